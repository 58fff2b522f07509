"""From a module to the graph of one training or inference step: forward, precision, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from sbp.autodiff import backward
from sbp.errors import GraphError
from sbp.graph import Graph, Initial
from sbp.nn.module import Module
from sbp.operator import TensorType
from sbp.optim import AdamW, Optimizer
from sbp.passes.precision import Precision, with_precision
from sbp.passes.replay import replay
from sbp.trace import GraphBuilder, Symbol

Inputs = Mapping[str, tuple[TensorType, Initial]]


def trace(
    module: Module,
    batch: int,
    sequence: int | None = None,
    targets: bool = True,
    name: str | None = None,
    inputs: Inputs | None = None,
) -> Graph:
    """The forward graph of a module on its example inputs, in the types it declares.

    Parameters
    ----------
    batch, sequence
        Passed to `module.example_inputs`; a `sequence` of None is the module's own default.
    targets
        Feed the inputs named `*targets` too, for which the module returns its loss.
    inputs
        Type and start of every argument of `forward`, instead of `module.example_inputs(batch, sequence)`.
    """
    if batch < 1 or (sequence is not None and sequence < 1):
        raise GraphError(f"batch and sequence must be at least 1, got batch {batch} and sequence {sequence}.")
    builder = GraphBuilder(name or type(module).__name__)
    declared = module.example_inputs(batch, sequence) if inputs is None else inputs
    symbols = {
        label: builder.source(label, kind, "input", initial)
        for label, (kind, initial) in declared.items()
        if targets or not label.endswith("targets")
    }
    with builder:
        result = module(**symbols)
    outputs = [result] if isinstance(result, Symbol) else list(result.values() if isinstance(result, dict) else result)
    return builder.finish(outputs)


def training_step(
    module: Module,
    batch: int,
    sequence: int | None = None,
    optimizer: Optimizer | None = None,
    precision: str | Precision = "mixed",
    name: str | None = None,
    rewrite: Callable[[Graph], Graph] | None = None,
    inputs: Inputs | None = None,
) -> Graph:
    """One training step as a graph: the loss is its output, the state's next values are its updates.

    Parameters
    ----------
    module
        Returns a scalar loss from its example inputs (see `Module.example_inputs`).
    batch, sequence
        Global batch size; sequence length, default the module's own.
    optimizer
        Default `AdamW()`.
    precision
        "mixed" (bf16 computation, f32 parameters and optimizer state), "bf16", "f32" or "f64"; see
        `sbp.passes.precision`.
    rewrite
        A pass over the forward graph, applied before gradients are added.
    inputs
        See `trace`.

    Returns
    -------
    Graph
        Validated; forward, backward and optimizer nodes by their phase. Equal layers have equal nodes.
    """
    with _mode(module, training=True):
        forward = with_precision(trace(module, batch, sequence, name=name, inputs=inputs), precision)
    if len(forward.outputs) != 1 or forward.values[forward.outputs[0]].shape != ():
        found = ", ".join(str(forward.values[label]) for label in forward.outputs)
        raise GraphError(f"{forward.name}: a training step needs one scalar loss, the module returns {found}.")
    return add_training(forward if rewrite is None else rewrite(forward), optimizer)


def add_training(forward: Graph, optimizer: Optimizer | None = None) -> Graph:
    """Gradients of a forward graph's one output, a scalar loss, and an optimizer's update of every parameter."""
    builder, symbols = replay(forward)
    loss = symbols[forward.outputs[0]]
    parameters = [symbols[label] for label in forward.parameters]
    gradients = backward(builder, loss, parameters)
    (AdamW() if optimizer is None else optimizer).apply(
        builder, [p for p in parameters if p.name in gradients], gradients
    )
    return builder.finish([loss])


def inference(
    module: Module,
    batch: int,
    sequence: int | None = None,
    precision: str | Precision = "bf16",
    name: str | None = None,
    inputs: Inputs | None = None,
) -> Graph:
    """The forward pass in inference mode (no dropout, running statistics), without targets: it gives the logits."""
    with _mode(module, training=False):
        return with_precision(trace(module, batch, sequence, targets=False, name=name, inputs=inputs), precision)


@contextmanager
def _mode(module: Module, training: bool) -> Iterator[None]:
    """Set the mode of a module and its parts, and each part's own again afterwards."""
    before = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, mode in before:
            part.training = mode
