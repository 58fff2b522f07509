"""What a plan is made for: a model with batch, precision and optimizer, as a graph and as data that makes it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sbp.errors import GraphError, PlanError
from sbp.frontend.model import TorchModel
from sbp.graph import Graph
from sbp.models import PRESETS, TINY, config_named
from sbp.nn.module import Module
from sbp.optim import SGD, Adam, AdamW, Optimizer, optimizer_named
from sbp.passes.recompute import with_recompute
from sbp.training import inference, training_step

DEFAULT_SAMPLES_PER_DEVICE = 64
DEFAULT_SEQUENCES_PER_DEVICE = 8
DEFAULT_TOKENS_PER_DEVICE = 8192
"""The default batch: 64 samples per device; of sequences 8, and fewer where these are more than 8,192 tokens."""

_OPTIMIZERS = (SGD, Adam, AdamW)
"""Optimizers that a plan file can name."""


@dataclass(frozen=True)
class Workload:
    """A graph, and how it was made: {} for a graph of one's own."""

    graph: Graph
    model: Mapping[str, Any]


LARGEST_VALUE_BYTES = 1 << 60


def workload(
    model: str | Module | Graph | TorchModel,
    devices: int,
    batch: int | None = None,
    sequence: int | None = None,
    training: bool = True,
    optimizer: Optimizer | str | None = None,
    precision: str | None = None,
    recompute: bool = False,
) -> Workload:
    """The graph of one step.

    Parameters
    ----------
    model
        A preset's name, a module of `sbp.nn` with `example_inputs`, a finished graph (the rest is then not used), or a
        module of PyTorch (whose batch is that of its example inputs, and its precision its own, unless given).
    devices
        Number of ranks, for the default batch.
    batch
        Global batch size; default 64 samples per device, of sequences 8, or fewer with at most 8,192 tokens.
    sequence
        Sequence length; default the model's own.
    precision
        Default "mixed" for training and "bf16" for inference.
    recompute
        Run the layers' forward parts again in the backward phase (see `sbp.passes.recompute`).
    """
    if isinstance(model, Graph):
        return Workload(_checked_sizes(model.validate()), {})
    if isinstance(model, TorchModel):
        graph = model.step(batch, sequence, training, optimizer, precision).graph
        return Workload(_checked_sizes(with_recompute(graph) if recompute else graph), {})
    if not isinstance(model, (str, Module)):
        raise GraphError(
            f"a model is a preset's name, a module of sbp.nn or torch.nn, or a Graph, got {type(model).__name__}; "
            "`sbp models` lists presets."
        )
    module = config_named(model).build() if isinstance(model, str) else model
    if batch is None:
        length = sequence or getattr(getattr(module, "config", None), "default_sequence", None)
        each = DEFAULT_SAMPLES_PER_DEVICE
        if length is not None:
            each = max(1, min(DEFAULT_SEQUENCES_PER_DEVICE, DEFAULT_TOKENS_PER_DEVICE // length))
        batch = devices * each
    precision = precision or ("mixed" if training else "bf16")
    name = model if isinstance(model, str) else getattr(module, "_preset", type(module).__name__)
    optimizer = None if optimizer is None else optimizer_named(optimizer)
    graph = _checked_sizes(_graph(module, batch, sequence, training, optimizer, precision, recompute, name))
    config = getattr(module, "config", None)
    if config is None or not (optimizer is None or type(optimizer) in _OPTIMIZERS):
        return Workload(graph, {})
    return Workload(
        graph,
        {
            "name": name,
            "family": type(config).__name__,
            "config": asdict(config),
            "batch": batch,
            "sequence": sequence,
            "training": training,
            "optimizer": _optimizer_json(optimizer),
            "precision": precision,
            "recompute": recompute,
        },
    )


def scaled_workload(model: Mapping[str, Any]) -> Graph:
    """The same step with tiny widths: equal node names, so that a plan's decisions apply to it.

    Raises
    ------
    PlanError
        The plan was made for a graph of one's own, which cannot be scaled.
    """
    if not model:
        raise PlanError("the plan was made for a graph without a model's configuration, which cannot be scaled down.")
    families = {type(config).__name__: type(config) for config in (*PRESETS.values(), *TINY.values())}
    family = families.get(model.get("family", ""))
    if family is None:
        raise PlanError(f"the plan names the model family {model.get('family')!r}; known are {', '.join(families)}.")
    known = {field.name for field in fields(family)}
    try:
        config: Any = family(**{key: _tuples(value) for key, value in model["config"].items() if key in known})
        module = config.scaled().build()
        optimizer = _optimizer(model["optimizer"])
        sequence = model["sequence"]
        limit = getattr(config.scaled(), "default_sequence", None)
        if sequence is not None and limit is not None:
            sequence = min(sequence, limit)
        name = f"scaled {model['name']}"
        batch, training, precision = model["batch"], model["training"], model["precision"]
        return _graph(module, batch, sequence, training, optimizer, precision, model["recompute"], name)
    except (KeyError, TypeError) as error:
        raise PlanError(f"the plan's field `model` is incomplete or wrong ({error}); plan again.") from None


def _checked_sizes(graph: Graph) -> Graph:
    for value in graph.values.values():
        if value.type.bytes > LARGEST_VALUE_BYTES:
            raise GraphError(f"{graph.name}: {value} has more than 2**60 bytes; check its sizes, and the batch.")
    return graph


def _graph(
    module: Module,
    batch: int,
    sequence: int | None,
    training: bool,
    optimizer: Optimizer | None,
    precision: str,
    recompute: bool,
    name: str,
) -> Graph:
    if not training:
        return inference(module, batch, sequence, precision, name)
    graph = training_step(module, batch, sequence, optimizer, precision, name)
    return with_recompute(graph) if recompute else graph


def _optimizer_json(optimizer: Optimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    settings: Any = optimizer
    return {"kind": type(optimizer).__name__, **asdict(settings)}


def _optimizer(data: Mapping[str, Any] | None) -> Optimizer | None:
    if data is None:
        return None
    kinds = {kind.__name__: kind for kind in _OPTIMIZERS}
    return kinds[data["kind"]](**{key: _tuples(value) for key, value in data.items() if key != "kind"})


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
