"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sbp.frontend.model import TorchModel
    from sbp.graph import Graph
    from sbp.nn.module import Module
    from sbp.optim import Optimizer

Decorated = Callable[..., Any]

OPTIMIZERS = ("adamw", "adam", "sgd", "momentum")
PRECISIONS = ("mixed", "bf16", "f32", "f64")

_UNITS = {"": 1, "b": 1} | {
    name: factor
    for power, letter in enumerate("kmgt", start=1)
    for name, factor in ((f"{letter}b", 1000**power), (f"{letter}ib", 1024**power), (letter, 1000**power))
}


class Seconds(click.FloatRange):
    """A finite number; click's own range lets `nan` through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number of seconds.", param, ctx)
        return found


def _together(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    def add(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return add


json_option = click.option("--json", "as_json", is_flag=True, help="Data on stdout; tables and progress on stderr.")

quiet_option = click.option("--quiet", "-q", is_flag=True, help="No progress and no tables.")

torch_option = click.option("--torch", metavar="FILE.PY:FUNCTION",
                            help="Instead of MODEL: the PyTorch module and example inputs that a function returns.")

model_options = _together(
    click.option("--batch", type=click.IntRange(min=1),
                 help="Global batch size; default 64 samples per device, 8 or fewer of sequences."),
    click.option("--seq", type=click.IntRange(min=1), help="Sequence length; default the model's own."),
    click.option(
        "--size", "sizes", multiple=True, metavar="NAME=VALUE", help="Another size of the preset, such as layers=4."
    ),
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), help="Default adamw."),
    click.option("--precision", type=click.Choice(PRECISIONS), help="Default mixed; bf16 for inference."),
    click.option("--recompute", type=click.Choice(("auto", "none", "full")), default="auto", show_default=True,
                 help="Run layers again in the backward phase: all (full), or where nothing fits otherwise (auto)."),
    click.option("--inference", is_flag=True, help="The forward pass only, without targets and optimizer."),
)

search_options = _together(
    click.option("--mesh", metavar="2,8", help="Mesh sizes, or dp=2,tp=8; default: several are tried."),
    click.option(
        "--pin", "pins", multiple=True, metavar="'GLOB=S(1), B'", help="Fix the layout of values by name; repeatable."
    ),
    click.option("--memory-limit", metavar="BYTES", help="Per device, such as 40GiB; default what the device has."),
    click.option("--time-limit", type=Seconds(min=0, min_open=True), default=60.0, show_default=True,
                 help="Seconds for all solves together."),
    click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Solver threads."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
                 help="What random choices derive from."),
)  # fmt: skip


def cluster_options(required: bool) -> Callable[[Decorated], Decorated]:
    """--cluster, --nodes and --devices-per-node."""
    return _together(
        click.option("--cluster", required=required, metavar="PRESET-OR-FILE", help="See `sbp clusters`."),
        click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; default the cluster's own."),
        click.option("--devices-per-node", type=click.IntRange(min=1), help="Default the cluster's own."),
    )


def planning_arguments(
    *,
    cluster: str | Any,
    nodes: int | None,
    devices_per_node: int | None,
    batch: int | None,
    seq: int | None,
    optimizer: str | None,
    precision: str | None,
    recompute: str,
    inference: bool,
    mesh: str | None,
    pins: Sequence[str],
    memory_limit: str | None,
    time_limit: float,
    threads: int,
    seed: int,
) -> dict[str, Any]:
    """The keyword arguments of `auto_parallel` (and `compare`) from the options' texts; bad ones raise `UsageError`."""
    from sbp.mesh import Mesh
    from sbp.planner.cluster import Cluster

    if inference and optimizer is not None:
        raise click.UsageError("--inference has no optimizer; leave --optimizer out.")
    return {
        "cluster": Cluster.resolve(cluster, nodes, devices_per_node),
        "batch": batch,
        "sequence": seq,
        "training": not inference,
        "optimizer": optimizer_named(optimizer),
        "precision": precision,
        "recompute": recompute,
        "mesh": None if mesh is None else Mesh.parse(mesh),
        "pins": parse_pins(pins),
        "memory_limit": None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit"),
        "time_limit": time_limit,
        "threads": threads,
        "seed": seed,
    }


def optimizer_named(name: str | None) -> Optimizer | None:
    """An optimizer of PyTorch's defaults by its name; `momentum` is SGD with momentum 0.9."""
    from sbp import optim

    if name is None:
        return None
    made: dict[str, Callable[[], Optimizer]] = {
        "adamw": optim.AdamW,
        "adam": optim.Adam,
        "sgd": optim.SGD,
        "momentum": lambda: optim.SGD(momentum=0.9),
    }
    return made[name]()


def parse_pins(texts: Sequence[str]) -> dict[str, str] | None:
    """`GLOB=LAYOUT` each."""
    pins: dict[str, str] = {}
    for text in texts:
        pattern, equals, layout = text.partition("=")
        if not equals or not pattern.strip() or not layout.strip():
            raise click.UsageError(
                f"--pin {text!r} is not GLOB=LAYOUT; write for example --pin 'h.*.fc.weight=S(0), B'."
            )
        if pins.setdefault(pattern.strip(), layout.strip()) != layout.strip():
            raise click.UsageError(
                f"--pin gives {pattern.strip()!r} twice, as {pins[pattern.strip()]} and {layout.strip()}."
            )
    return pins or None


def parse_bytes(text: str, option: str) -> int:
    """`40GiB`, `80 GB`, `1e9`: a number of bytes, at least 1."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise click.UsageError(
            f"{option} {text!r} is not a number of bytes; write for example 40GiB, 80GB or 42949672960."
        )
    return size


def parse_sizes(texts: Sequence[str]) -> dict[str, Any]:
    """`layers=4,heads=8` or several of them; `widths=8x16x4` is a tuple."""
    sizes: dict[str, Any] = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise click.UsageError(f"--size {text!r} is not NAME=VALUE; write for example --size layers=4,hidden=256.")
        sizes[name.strip()] = _size(value.strip())
    return sizes


def _size(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"\d+(x\d+)+x?|\d+x", text):
        return tuple(int(part) for part in text.split("x") if part)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def resolve_model(
    name: str | None, sizes: Sequence[str] = (), torch: str | None = None
) -> str | Module | Graph | TorchModel:
    """What MODEL names: a preset, one with other sizes, or the file of a graph; or what `--torch` names."""
    if name is None and torch is None:
        raise click.UsageError("Missing argument 'MODEL', or --torch FILE.PY:FUNCTION instead of it.")
    if name is not None and torch is not None:
        raise click.UsageError(f"--torch stands instead of MODEL; leave it or {name!r} out.")
    if torch is not None:
        if sizes:
            raise click.UsageError("--size changes a preset's sizes; a PyTorch model has those it is built with.")
        from sbp.cli.torch_model import torch_model

        return torch_model(torch)
    assert name is not None
    if name.endswith(".json") or "/" in name:
        if sizes:
            raise click.UsageError("--size changes a preset's sizes; a graph's file has its own.")
        return _graph_file(Path(name))
    if not sizes:
        return name
    from sbp.models import build

    given = parse_sizes(sizes)
    try:
        return build(name, **given)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise click.UsageError(f"--size {','.join(sizes)} does not fit {name}: {error}.") from None


def _graph_file(path: Path) -> Graph:
    from sbp.errors import GraphError, PlanError
    from sbp.graph import Graph
    from sbp.json_file import read_json_file

    data = read_json_file(path, "graph", "Graph.to_json", GraphError)
    if isinstance(data, Mapping) and data.get("format") == "sbp-plan":
        raise PlanError(f"{path} is a plan, not a model; `sbp report {path}` shows it.")
    try:
        return Graph.from_json(data)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None
