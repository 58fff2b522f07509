"""The training loop behind `sbp run`: a plan's step over batches, losses out; and the same loop unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.errors import PlanError
from sbp.graph import Graph
from sbp.initial import draw
from sbp.interpreter import evaluate
from sbp.planner.physical import PhysicalPlan
from sbp.runtime.executor import Executor
from sbp.runtime.threads import fitting

Batch = Mapping[str, Any]
"""Global arrays by input name."""

Progress = Callable[[int, float], None]
"""Called after every step with its number, from 0, and its loss."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a training run leaves: the loss of every step, and the state after the last one, as global host arrays."""

    losses: tuple[float, ...]
    state: Mapping[str, numpy.ndarray]

    def __repr__(self) -> str:
        ends = f", losses {self.losses[0]:.6g} to {self.losses[-1]:.6g}" if self.losses else ""
        return f"<Training of {len(self.losses)} steps{ends}>"


def train(
    graph: Graph,
    physical: PhysicalPlan,
    batches: Iterable[Batch],
    steps: int,
    backend: Backend | None = None,
    communicator: Communicator | None = None,
    *,
    seed: int = 0,
    floating: str | None = None,
    loss: str | None = None,
    state: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Training:
    """Train for `steps` steps with a plan.

    Parameters
    ----------
    graph, physical
        The training step, and a plan for it.
    batches
        One mapping of input name -> global array per step; at least `steps` of them. Every process gives the same ones.
    backend, communicator
        As for `Executor`.
    seed
        The state is drawn with it (`sbp.initial.draw`).
    floating
        Element type that replaces every floating one; None keeps the graph's.
    loss
        The output that is reported; default the first one.
    state
        Global arrays to start from instead (a checkpoint); values it lacks are drawn.
    progress
        Called after every step.

    Raises
    ------
    PlanError
        The batches end early, or lack an input; `loss` is no output or not a single number.
    """
    loss = _loss_name(graph, loss)
    executor = Executor(physical, backend, communicator, floating=floating)
    start = _start(graph, seed, floating, state)
    local = executor.place({value: start[value] for value in graph.state if value in physical.sources})
    del start
    losses = []
    for index, batch in _numbered(batches, steps):
        feeds = executor.place(_inputs(graph, batch, index, physical.sources))
        with fitting(physical):
            outputs, local = executor.step(local, feeds)
        losses.append(float(executor.collect(outputs[loss], physical.outputs[loss]).reshape(-1)[0]))
        if progress is not None:
            progress(index, losses[-1])
    return Training(tuple(losses), executor.collect_state(local))


def train_unsharded(
    graph: Graph,
    batches: Iterable[Batch],
    steps: int,
    *,
    seed: int = 0,
    floating: str | None = None,
    loss: str | None = None,
    state: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Training:
    """The same training on one device, by the interpreter: what `train` is compared with."""
    loss = _loss_name(graph, loss)
    current = _start(graph, seed, floating, state)
    losses = []
    for index, batch in _numbered(batches, steps):
        made = evaluate(graph, {**current, **_inputs(graph, batch, index, graph.inputs)}, floating=floating)
        current.update((value, made[value]) for value in graph.updates)
        losses.append(float(numpy.asarray(made[loss]).reshape(-1)[0]))
        if progress is not None:
            progress(index, losses[-1])
    return Training(tuple(losses), current)


def _loss_name(graph: Graph, loss: str | None) -> str:
    if not graph.outputs:
        raise PlanError(f"graph {graph.name} has no output to report as loss.")
    name = graph.outputs[0] if loss is None else loss
    if name not in graph.outputs or graph.values[name].type.elements != 1:
        raise PlanError(
            f"graph {graph.name}: the loss must be an output of one element, {name!r} is not; "
            f"its outputs are {', '.join(str(graph.values[output]) for output in graph.outputs)}."
        )
    return name


def _start(graph: Graph, seed: int, floating: str | None, state: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {} if state is None else state
    unknown = [value for value in given if value not in graph.state]
    if unknown:
        raise PlanError(f"graph {graph.name} has no state {', '.join(unknown)}; the checkpoint is of another model.")
    return {
        value: given[value] if value in given else draw(graph.values[value], seed, floating) for value in graph.state
    }


def _numbered(batches: Iterable[Batch], steps: int) -> Iterator[tuple[int, Batch]]:
    count = 0
    for count, batch in enumerate(islice(batches, steps), start=1):
        yield count - 1, batch
    if count < steps:
        raise PlanError(f"the batches ended after {count} of {steps} steps; give at least one per step.")


def _inputs(graph: Graph, batch: Batch, index: int, known: Iterable[str]) -> dict[str, Any]:
    """The batch's arrays for the inputs that the program reads."""
    missing = [value for value in graph.inputs if value not in batch and value in known]
    if missing:
        raise PlanError(f"batch {index} lacks the input {', '.join(missing)} of graph {graph.name}.")
    return {value: batch[value] for value in graph.inputs if value in known}
