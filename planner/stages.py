"""A physical plan cut into the chunks of a pipeline: which operation runs where and in which phase, and what is sent.

One plan describes the step of one micro-batch on the ranks of one stage. Its layers are dealt out to chunks (virtual
stages); chunk c lives on stage c % stages. Every operation belongs to one chunk and one phase: forward, backward, or
once, after all micro-batches; for zero-bubble schedules the gradients of parameters are split off the backward phase
into one of their own, weight. Registers that are read in another chunk are sent there: activations forward, their
gradients backward. What the once phase reads of the others is added up over the micro-batches.

A tied parameter (GPT's embedding, which is its head, too) has a copy wherever it is read and is updated in one chunk.
The sum of its gradients is taken once, over what each chunk added up, and not for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.errors import PipelineError
from sbp.layout import Partial
from sbp.planner.accumulation import Accumulation, accumulation_of
from sbp.planner.buffers import is_view
from sbp.planner.physical import Compute, PhysicalPlan
from sbp.planner.pipeline import PHASES, check_whole
from sbp.planner.places import (
    ONCE,
    RANKS,
    Place,
    Places,
    check_order,
    constants_of,
    with_constants_where_read,
    with_weights_apart,
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A register that is sent from where it is made to another chunk, where `target` is the first phase to read it."""

    register: int
    source: Place
    target: Place


@dataclass(frozen=True, eq=False)
class StagedPlan:
    """A physical plan in chunks.

    Attributes
    ----------
    physical
        The step of one micro-batch on the ranks of one stage.
    stages, chunks
        Number of stages, and of chunks on each of them.
    places
        Per operation where it runs.
    transfers
        What is sent. Within the once phase and into it, once per step; else once per micro-batch.
    accumulated
        Registers that are added up over the micro-batches before the once phase, as `accumulation` says.
    carried
        Registers that the once phase reads and that are the same for every micro-batch (layouts of state).
    homes
        State value -> the chunk that updates it.
    copies
        State value -> all chunks that read it.
    accumulation
        What a micro-batch weighs in sums over the step.
    """

    physical: PhysicalPlan
    stages: int
    chunks: int
    places: tuple[Place, ...]
    transfers: tuple[Transfer, ...]
    accumulated: frozenset[int]
    carried: frozenset[int]
    homes: Mapping[str, int]
    copies: Mapping[str, tuple[int, ...]]
    accumulation: Accumulation

    @cached_property
    def segments(self) -> Mapping[Place, tuple[int, ...]]:
        """Place -> its operations in program order; places without any have an empty entry."""
        found: dict[Place, list[int]] = {
            (chunk, phase): [] for chunk in range(self.stages * self.chunks) for phase in (*PHASES, ONCE)
        }
        for at, place in enumerate(self.places):
            found[place].append(at)
        return {place: tuple(operations) for place, operations in found.items()}

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases of a micro-batch: forward alone, or with backward, or with backward and weight."""
        present = {phase for _, phase in self.places}
        last = max((at for at, phase in enumerate(PHASES) if phase in present), default=0)
        return PHASES[: last + 1]

    @cached_property
    def releases(self) -> Mapping[int, tuple[int, ...]]:
        """Operation -> the registers that its chunk does not need after it for this micro-batch.

        Registers that are sent, added up or put out are needed to the end of the segment that makes them.
        """
        physical = self.physical
        last: dict[tuple[int, int], int] = {}
        for at in self.order:
            for number in (*physical.operations[at].inputs, *physical.operations[at].outputs):
                last[self.places[at][0], number] = at
        kept = {*self.accumulated, *self.carried, *physical.outputs.values()}
        for transfer in self.transfers:
            if transfer.target[1] != ONCE:
                kept.add(transfer.register)
        for chunk, number in last:
            made = self.made.get(number)
            if number in kept and made is not None and self.places[made][0] == chunk:
                end = self.segments[self.places[made]][-1]
                last[chunk, number] = max(last[chunk, number], end, key=lambda at: self.positions[at])
        found: dict[int, list[int]] = {}
        for (_, number), at in last.items():
            found.setdefault(at, []).append(number)
        return {at: tuple(numbers) for at, numbers in found.items()}

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The operations before the once phase, chunk by chunk, and of a chunk phase by phase.

        Program order differs from that: an output's layout is changed after the backward phase.
        """
        chunks = range(self.stages * self.chunks)
        return tuple(at for chunk in chunks for phase in PHASES for at in self.segments[chunk, phase])

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """Operation -> where it stands in `order`."""
        return {at: position for position, at in enumerate(self.order)}

    @cached_property
    def made(self) -> Mapping[int, int]:
        """Register -> the operation that makes it; sources are absent."""
        return {number: at for at, operation in enumerate(self.physical.operations) for number in operation.outputs}

    def memory_of(self, chunk: int, number: int) -> int:
        """The register whose memory a register shares in a chunk; itself for all but views that are made there."""
        at = self.made.get(number)
        while at is not None and self.places[at][0] == chunk and is_view(self.physical.operations[at]):
            number = self.physical.operations[at].inputs[0]
            at = self.made.get(number)
        return number

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """Per chunk the registers that it reads before the once phase."""
        found: list[set[int]] = [set() for _ in range(self.stages * self.chunks)]
        for at in self.order:
            found[self.places[at][0]].update(self.physical.operations[at].inputs)
        return tuple(map(frozenset, found))

    def stage_of(self, chunk: int) -> int:
        """Where a chunk lives."""
        return chunk % self.stages


def cut(
    physical: PhysicalPlan,
    stages: int,
    chunks: int = 1,
    first_layers: Sequence[int] | None = None,
    *,
    weights_apart: bool = False,
) -> StagedPlan:
    """Cut the plan of a training (or inference) step between its layers.

    Parameters
    ----------
    physical
        The step of one micro-batch. Layers are the numbered modules, such as `h.3` (see `sbp.passes.recompute`).
    stages, chunks
        Number of stages, and of chunks on each of them.
    first_layers
        Per chunk but the first the number of its first layer; default the cut whose longest chunk is shortest, by the
        operations' predicted seconds.
    weights_apart
        Give what only leads to gradients of parameters a phase of its own, as zero-bubble schedules need it.

    Raises
    ------
    PipelineError
        Fewer layers than chunks; state that the forward phase updates, such as running statistics; a value other than a
        gradient that the once phase reads of a micro-batch; an order that no pipeline has.
    """
    check_whole("cut", "stages", stages, 1)
    check_whole("cut", "chunks", chunks, 1)
    if first_layers is not None:
        if not isinstance(first_layers, (list, tuple)):
            raise PipelineError(f"cut: first_layers must be a list of layers' numbers, got {first_layers!r}.")
        for layer in first_layers:
            check_whole("cut", "a number in first_layers", layer)
    places = Places(physical, stages * chunks, first_layers).run()
    physical, places = with_constants_where_read(physical, places)
    made = {number: at for at, operation in enumerate(physical.operations) for number in operation.outputs}
    if weights_apart:
        places = with_weights_apart(physical, places, made)
    check_order(physical, places, made)
    homes, copies = _state(physical, places, made)
    transfers, accumulated, carried = _moves(physical, places, made)
    found = transfers, accumulated, carried, homes, copies
    return StagedPlan(physical, stages, chunks, tuple(places), *found, accumulation_of(physical))


def _state(
    physical: PhysicalPlan, places: Sequence[Place], made: Mapping[int, int]
) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Per state value the chunk that updates it, and all that read it."""
    state = {number: value for value, number in physical.sources.items() if physical.registers[number].kind != "input"}
    readers: dict[str, dict[int, None]] = {value: {} for value in state.values()}
    for at, operation in enumerate(physical.operations):
        for number in operation.inputs:
            if number in state:
                readers[state[number]][places[at][0]] = None
    homes, copies = {}, {}
    for value, chunks in readers.items():
        home = next(iter(chunks), 0)
        new = physical.updates.get(value)
        if new is not None and new in made:
            place = places[made[new]]
            if place[1] != ONCE:
                raise PipelineError(
                    f"state {value} is updated in the {place[1]} phase, for every micro-batch; a pipeline updates "
                    "state once, after all of them. Use one stage, or a model without running statistics."
                )
            home = place[0]
        homes[value] = home
        copies[value] = tuple(sorted({*chunks, home}))
    return homes, copies


def _moves(
    physical: PhysicalPlan, places: Sequence[Place], made: Mapping[int, int]
) -> tuple[tuple[Transfer, ...], frozenset[int], frozenset[int]]:
    transfers: dict[tuple[int, int, bool], Transfer] = {}
    accumulated, carried = set(), set()
    constant = constants_of(physical)
    for at, operation in enumerate(physical.operations):
        place = places[at]
        for number in operation.inputs:
            if number not in made:
                continue
            source = places[made[number]]
            once = place[1] == ONCE
            if once and source[1] != ONCE:
                register = physical.registers[number]
                if number in constant:
                    carried.add(number)
                elif register.kind not in ("gradient", "boxing"):
                    raise PipelineError(
                        f"{register.value} is made for every micro-batch and read once, by "
                        f"{operation.node if isinstance(operation, Compute) else operation.kind}; only gradients can "
                        "be added up over micro-batches."
                    )
                elif any(isinstance(sbp, Partial) and sbp.reduce != "sum" for sbp in register.layout):
                    raise PipelineError(
                        f"{register.value} is added up over micro-batches, but in {register.layout} its parts are "
                        "not added; make it in another layout."
                    )
                else:
                    accumulated.add(number)
            if source[0] != place[0]:
                # Program order is not a chunk's order of phases: forward comes first wherever it reads the register.
                key = (number, place[0], once)
                known = transfers.get(key)
                if known is None or RANKS[place[1]] < RANKS[known.target[1]]:
                    transfers[key] = Transfer(number, source, place)
    for value, new in physical.updates.items():
        if new not in made:
            raise PipelineError(f"state {value} becomes {physical.registers[new].value}, which no operation makes.")
    return tuple(transfers.values()), frozenset(accumulated), frozenset(carried)
