"""The training loop behind `sbp run`: a plan's step over batches, losses out; and the same loop unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.errors import PlanError
from sbp.graph import Graph
from sbp.initial import draw
from sbp.interpreter import evaluate
from sbp.planner.physical import PhysicalPlan
from sbp.runtime.boxing import Local
from sbp.runtime.checkpoint import Checkpoint, Held, some_of, write_checkpoint
from sbp.runtime.executor import Executor
from sbp.runtime.threads import fitting

Batch = Mapping[str, Any]
"""Global arrays by input name."""

Progress = Callable[[int, float], None]
"""Called after every step with its number, from 0, and its loss."""


@dataclass(frozen=True, slots=True)
class Training:
    """What a training run leaves: the loss of every step, and the state after the last one, as global host arrays.

    `first_step` is how many steps the run that it goes on from had done.
    """

    losses: tuple[float, ...]
    state: Mapping[str, numpy.ndarray]
    first_step: int = 0

    def __repr__(self) -> str:
        ends = f", losses {self.losses[0]:.6g} to {self.losses[-1]:.6g}" if self.losses else ""
        begin = f" from {self.first_step} on" if self.first_step else ""
        return f"<Training of {len(self.losses)} steps{begin}{ends}>"


@dataclass(frozen=True, slots=True)
class Saving:
    """Where a run saves its state, after every so many steps besides the end, and what it says beside the tensors."""

    path: str | Path
    every: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise PlanError(f"a checkpoint can be saved after every 1 step or more, got {self.every}.")


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
    state: Mapping[str, Any] | Checkpoint | None = None,
    progress: Progress | None = None,
    save: Saving | None = None,
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
        Global arrays to start from instead; values it lacks are drawn. Of a checkpoint every rank reads its own shards,
        whatever mesh and layouts it was saved from; it must hold the whole state and nothing else. Steps are counted
        on from its own, so `batches` begin with the one after those it has seen.
    progress
        Called after every step.
    save
        Save the state as it goes. The checkpoint's facts are those given, the number of steps done, and the mesh.

    Raises
    ------
    PlanError
        The batches end early, or lack an input; `loss` is no output or not a single number.
    """
    loss = _loss_name(graph, loss)
    executor = Executor(physical, backend, communicator, floating=floating)
    first = state.steps if isinstance(state, Checkpoint) else 0
    local = _placed(graph, executor, seed, floating, state)
    losses = []
    for index, batch in _numbered(batches, steps, first):
        feeds = executor.place(_inputs(graph, batch, index, physical.sources))
        with fitting(physical):
            outputs, local = executor.step(local, feeds)
        losses.append(float(executor.collect(outputs[loss], physical.outputs[loss]).reshape(-1)[0]))
        if save is not None and (index + 1 == first + steps or (save.every and (index + 1) % save.every == 0)):
            _save(save, graph, executor, local, index + 1)
        if progress is not None:
            progress(index, losses[-1])
    return Training(tuple(losses), executor.collect_state(local), first)


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
    first_step: int = 0,
) -> Training:
    """The same training on one device, by the interpreter: what `train` is compared with."""
    loss = _loss_name(graph, loss)
    current = _start(graph, seed, floating, state)
    losses = []
    for index, batch in _numbered(batches, steps, first_step):
        made = evaluate(graph, {**current, **_inputs(graph, batch, index, graph.inputs)}, floating=floating)
        current.update((value, made[value]) for value in graph.updates)
        losses.append(float(numpy.asarray(made[loss]).reshape(-1)[0]))
        if progress is not None:
            progress(index, losses[-1])
    return Training(tuple(losses), current, first_step)


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


def _placed(
    graph: Graph,
    executor: Executor,
    seed: int,
    floating: str | None,
    state: Mapping[str, Any] | Checkpoint | None,
) -> dict[str, Local]:
    """The state on the ranks, as it is at the start."""
    physical = executor.physical
    if not isinstance(state, Checkpoint):
        start = _start(graph, seed, floating, state)
        return executor.place({value: start[value] for value in graph.state if value in physical.sources})
    _check_state(graph, state)
    placed = {}
    for value in graph.state:
        if value in physical.sources:
            register = physical.registers[physical.sources[value]]
            placed[value] = state.place(
                value, register.type, register.layout, physical.mesh, executor.backend, executor.communicator.ranks,
                executor.dtype(register),
            )  # fmt: skip
    return placed


def _check_state(graph: Graph, checkpoint: Checkpoint) -> None:
    """Raise unless the checkpoint holds the graph's state, no less and no more."""
    differences = {
        "lacks": [name for name in graph.state if name not in checkpoint.tensors],
        "has besides": [name for name in checkpoint.tensors if name not in graph.state],
    }
    said = [f"{what} {some_of(names)}" for what, names in differences.items() if names]
    if said:
        raise PlanError(
            f"the checkpoint {checkpoint.path} is not of the state of {graph.name}: it {' and '.join(said)}. It was "
            f"saved by {checkpoint.facts.get('graph', 'another program')}; train with the model and optimizer of then."
        )
    for name in checkpoint.tensors:
        checkpoint.check_type(name, graph.values[name].type)


def _save(save: Saving, graph: Graph, executor: Executor, state: Mapping[str, Local], steps: int) -> None:
    physical = executor.physical
    held = {}
    for value, local in state.items():
        register = physical.registers[physical.sources[value]]
        held[value] = Held(register.type, register.layout, local)
    facts = {**save.facts, "graph": graph.name, "steps": steps, "mesh": str(physical.mesh)}
    write_checkpoint(save.path, held, physical.mesh, executor.backend, executor.communicator, facts)


def _numbered(batches: Iterable[Batch], steps: int, first: int) -> Iterator[tuple[int, Batch]]:
    count = 0
    for count, batch in enumerate(islice(batches, steps), start=1):
        yield first + count - 1, batch
    if count < steps:
        raise PlanError(f"the batches ended after {count} of {steps} steps; give at least one per step.")


def _inputs(graph: Graph, batch: Batch, index: int, known: Iterable[str]) -> dict[str, Any]:
    """The batch's arrays for the inputs that the program reads."""
    missing = [value for value in graph.inputs if value not in batch and value in known]
    if missing:
        raise PlanError(f"batch {index} lacks the input {', '.join(missing)} of graph {graph.name}.")
    return {value: batch[value] for value in graph.inputs if value in known}
