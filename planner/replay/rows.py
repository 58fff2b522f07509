"""Published runs as configurations: one row of a CSV file each, with the columns of `runs.csv`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from sbp.errors import PlanError, SbpError
from sbp.models.bert import BertConfig
from sbp.models.gpt import GPTConfig
from sbp.models.llama import LlamaConfig
from sbp.planner.cluster import Cluster
from sbp.planner.frameworks import Framework
from sbp.planner.replay.configuration import Configuration, ModelConfig, for_ranks

DEVICES = (
    (r"V100.*32", "v100-32g"),
    (r"V100", "v100-16g"),
    (r"A100.*40", "a100-40g"),
    (r"A100.*PCIe", "a100-80g-pcie"),
    (r"A100", "a100-80g"),
    (r"H100.*96", "h100-96g"),
    (r"H100.*PCIe", "h100-pcie"),
    (r"H100", "h100"),
    (r"H200", "h200"),
    (r"H800", "h800"),
    (r"GB200", "gb200"),
    (r"GB300", "gb300"),
    (r"B200", "b200"),
    (r"B300", "b300"),
    (r"MI250", "mi250x"),
    (r"MI300", "mi300x"),
    (r"MI325", "mi325x"),
    (r"910B([1-4])", "ascend-910b"),
    (r"TPU ?v4", "tpu-v4"),
    (r"4090", "rtx-4090"),
)
"""Pattern of a device's name in the file -> cluster preset; the first that matches."""

FRAMEWORKS = (
    (r"Megatron-LM 2021", "", "megatron-2021"),
    (r"Megatron-LM 2022", "", "megatron-2022"),
    (r"Megatron-Core", "", "megatron-core"),
    (r"Megatron-DeepSpeed", r"BLOOM|bigscience.*Rebalancing", "bigscience-bf16"),
    (r"Megatron-DeepSpeed", r"bigscience", "bigscience"),
    (r"Megatron-DeepSpeed", "", "megatron-deepspeed"),
    (r"GPT-NeoX", "", "gpt-neox"),
    (r"MaxText|T5X|Pathways|Alpa|JAX", "", "xla"),
    (r"torchtitan|TorchTitan", "", "torchtitan"),
    (r"DeepSpeed.*ZeRO", "", "deepspeed-zero3"),
    (r"llm-foundry|FSDP|ZeRO|SMP", "", "fsdp-llm-foundry"),
    (r"NeMo|NGC Megatron", "", "nemo"),
    (r"MegaScale", "", "megascale"),
    (r"OneFlow", "", "oneflow"),
    (r"Megatron-LM", "", "megatron-2022"),
    (r"Meta internal|Llama", "", "torchtitan"),
    (r"PyTorch|NGC", "", "pytorch"),
)
"""Patterns of a row's framework and source -> traits; the first that matches."""

PRECISION = ((r"fp8", "fp8"), (r"^fp32$", "f32"), (r"fp16|bf16|amp", "mixed"))

MOST_LIKELY_MICRO_BATCH = 32

MOST_LIKELY_CHUNKS = 64

LEAST, MOST = 1e-12, 1e18
"""Between these lies every number that a row states, unless it is 0."""

USUAL_HEADS = 64
"""Heads of a row that does not state them: those of BLOOM's prequel, the rows that lack them."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published run.

    Attributes
    ----------
    seconds, peak_bytes
        Measured, or None.
    configuration
        What is replayed; None with the `reason` why it cannot be.
    alternatives
        What else the row can mean, with `configuration`: of these the fastest that fits is taken, as the row's authors
        will have done.
    values
        The row as it is.
    """

    id: str
    source: str
    seconds: float | None
    peak_bytes: float | None
    configuration: Configuration | None
    alternatives: tuple[Configuration, ...]
    reason: str
    values: Mapping[str, str]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file.

    Raises
    ------
    PlanError
        The file cannot be read, lacks a column that every row needs, or has one twice.
    """
    try:
        # Spreadsheets begin a file with a byte order mark, which utf-8-sig leaves out.
        with open(path, encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            names = list(reader.fieldnames or ())
            needed = {"id", "source", "model_family", "layers", "hidden", "gpu", "gpus", "step_time_s"}
            if missing := sorted(needed - set(names)):
                raise PlanError(f"{path}: has no column {', '.join(missing)}; expected the columns of published runs.")
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise PlanError(f"{path}: has the column {', '.join(twice)} twice; remove one.")
            return list(_rows(reader))
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}; give a CSV file of published runs.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: is no CSV text in UTF-8: {error}.") from None


def _rows(reader: csv.DictReader[str]) -> Iterator[Row]:
    """Every row, also those whose text is damaged: what is wrong with one does not stop the others."""
    while True:
        try:
            values: dict[Any, Any] = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield _row({"id": f"line {reader.reader.line_num}"}, f"is no CSV text: {error}")
            continue
        more = values.pop(None, ())  # fields beyond the columns
        wrong = f"has {len(more)} more fields than there are columns" if more else ""
        values = {name: value or "" for name, value in values.items()}  # None where the row ends early
        yield _row(values if values["id"].strip() else {**values, "id": f"line {reader.reader.line_num}"}, wrong)


def _row(values: Mapping[str, str], reason: str = "") -> Row:
    seconds = memory = configuration = None
    alternatives: tuple[Configuration, ...] = ()
    try:
        seconds, memory = _optional(values, "step_time_s"), _optional(values, "peak_mem_GB")
        for name, value in (("step_time_s", seconds), ("peak_mem_GB", memory)):
            if value == 0.0:
                raise PlanError(f"column {name}: a number above 0 is expected, got 0")
        if "computed by the authors" in values.get("notes", ""):
            memory = None  # a formula's result, not a measurement
        if not reason and seconds is None and memory is None:
            reason = "neither time nor memory was measured"
        if not reason:
            configuration = configuration_of(values)
            alternatives = alternatives_of(configuration, values)
    except SbpError as error:
        reason = reason or str(error)
    peak = None if memory is None else memory * 1e9
    return Row(values["id"], values.get("source", ""), seconds, peak, configuration, alternatives, reason, values)


def configuration_of(values: Mapping[str, str]) -> Configuration:
    """The configuration of a row.

    Raises
    ------
    PlanError
        What the row does not state and cannot be assumed, or what cannot be replayed.
    """
    tp, pp, dp = (_whole(values, name) for name in ("tp", "pp", "dp"))
    if _whole(values, "ep", 1) != 1:
        raise PlanError("expert parallelism is not replayed")
    cluster = cluster_of(values)
    traits = framework_of(values)
    micro_batch, total = _whole(values, "micro_batch", 1), _whole(values, "global_batch")
    # Global batches are published rounded, to powers of two for instance.
    rounded = max(round(total / (micro_batch * dp)), 1) * micro_batch * dp
    if abs(rounded - total) > 0.25 * total:
        raise PlanError(f"a global batch of {total} is no multiple of {dp} x {micro_batch}")
    chunks = _whole(values, "vpp", 1)
    recompute = values.get("recompute", "") or "none"
    if recompute.startswith("unknown"):
        recompute = "selective" if traits.attention == "stored" else "none"
    if recompute.startswith("partial"):
        recompute = "selective"
    if recompute not in ("none", "selective", "full"):
        raise PlanError(f"recompute {recompute!r} is not replayed")
    run = Configuration(
        model=model_of(values),
        cluster=cluster,
        framework=traits,
        sequence=_whole(values, "seq_len"),
        tp=tp,
        pp=pp,
        dp=dp,
        cp=_whole(values, "cp", 1),
        micro_batch=micro_batch,
        global_batch=rounded,
        schedule=f"interleaved:{chunks}" if chunks > 1 and pp > 1 else "1f1b",
        recompute=recompute,
        sequence_parallel=_whole(values, "sequence_parallel", 0) == 1 and tp > 1,
        zero=_whole(values, "zero_stage", 0),
        precision=_precision(values.get("precision", "")),
    )
    return run


def alternatives_of(run: Configuration, values: Mapping[str, str]) -> tuple[Configuration, ...]:
    """The configurations that a row can mean: some do not state the micro-batch, or the interleaving."""
    sizes, schedules = [run.micro_batch], [run.schedule]
    if not _optional(values, "micro_batch"):
        sizes = [1 << power for power in range(MOST_LIKELY_MICRO_BATCH.bit_length())]
    layers, stages = run.model.layers, run.pp
    if stages > 1 and re.search(r"vpp[^;]*not (stated|printed)", values.get("notes", "")):
        schedules += [f"interleaved:{v}" for v in range(2, min(layers // stages, MOST_LIKELY_CHUNKS) + 1)]
    found = []
    for micro_batch, schedule in product(sizes, schedules):
        with suppress(PlanError):
            found.append(replace(run, micro_batch=micro_batch, schedule=schedule))
    return tuple(found)


def framework_of(values: Mapping[str, str]) -> Framework:
    """The traits of a row's framework."""
    name, source = values.get("framework", ""), values.get("source", "")
    for pattern, origin, traits in FRAMEWORKS:
        if re.search(pattern, name) and re.search(origin, source):
            return Framework.named(traits)
    raise PlanError(f"the framework {name!r} is not known")


def cluster_of(values: Mapping[str, str]) -> Cluster:
    """The cluster of a row: its device's preset, with the network's bandwidth as the row states it."""
    preset = _preset(values["gpu"])
    ranks, per_node = _whole(values, "gpus"), _whole(values, "gpus_per_node", 8)
    return _cluster(preset, _optional(values, "inter_node_bw"), ranks, per_node)


def _preset(device: str) -> str:
    for pattern, preset in DEVICES:
        if found := re.search(pattern, device):
            return preset + "".join(found.groups())
    raise PlanError(f"no cluster preset has the device {device!r}")


@lru_cache(maxsize=1024)
def _cluster(preset: str, network: float | None, ranks: int, per_node: int) -> Cluster:
    if preset == "a100-80g" and network == 6.25:
        return for_ranks(Cluster.preset("jean-zay"), ranks)
    cluster = Cluster.preset(preset).with_devices_per_node(per_node)
    if network:
        *inside, outermost = cluster.tiers
        share = 1.0 if outermost.links is None else per_node / outermost.links  # the file states it per device
        rate = network * 1e9 * share
        cluster = replace(cluster, tiers=(*inside, replace(outermost, bandwidth_bytes_per_second=rate)))
    return for_ranks(cluster, ranks)


def model_of(values: Mapping[str, str]) -> ModelConfig:
    """The model of a row."""
    family = values["model_family"].strip().lower()
    layers, hidden, vocabulary = (_whole(values, name) for name in ("layers", "hidden", "vocab"))
    heads = _whole(values, "heads", USUAL_HEADS if hidden % USUAL_HEADS == 0 else max(hidden // 128, 1))
    wide = _whole(values, "ffn_hidden", 4 * hidden)
    length = _whole(values, "seq_len")
    if family.startswith("llama"):
        groups = _whole(values, "kv_heads", heads)
        return LlamaConfig(layers, heads, groups, hidden, wide, vocabulary, length)
    if family.startswith("bert"):
        return BertConfig(
            layers=layers,
            heads=heads,
            hidden=hidden,
            intermediate=wide,
            vocabulary=vocabulary,
            positions=max(length, 512),
        )
    if family.startswith(("gpt", "mpt", "bloom", "opt", "pythia")):
        return GPTConfig(layers, heads, hidden, vocabulary, length, wide, dropout=0.1)
    raise PlanError(f"the model family {values['model_family']!r} is not replayed")


def _precision(text: str) -> str:
    for pattern, name in PRECISION:
        if re.search(pattern, text):
            return name
    raise PlanError(f"the precision {text!r} is not known")


def _optional(values: Mapping[str, str], name: str) -> float | None:
    """A number, 0 or between `LEAST` and `MOST`; None where nothing is stated."""
    text = (values.get(name) or "").strip()
    if not text:
        return None
    shown = repr(text if len(text) <= 40 else text[:40] + "...")
    try:
        value = float(text)
    except ValueError:
        raise PlanError(f"column {name}: a number is expected, got {shown}") from None
    if value != 0.0 and not LEAST <= value <= MOST:  # nor is it NaN
        raise PlanError(f"column {name}: a number of at least 0 and at most {MOST:g} is expected, got {shown}")
    return value


def _whole(values: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number; the default, if there is one, where the row has nothing or 0."""
    value = _optional(values, name)
    if not value and default is not None:
        return default
    if value is None:
        raise PlanError(f"the row does not state {name}")
    if value != int(value) or value < 1:
        raise PlanError(f"column {name}: a whole number of at least 1 is expected, got {value:g}")
    return int(value)


def rows_of(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of several files."""
    return [row for path in paths for row in read_rows(path)]
