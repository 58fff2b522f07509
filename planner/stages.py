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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sbp.errors import PipelineError
from sbp.layout import Partial
from sbp.passes.recompute import block_of
from sbp.planner.accumulation import Accumulation, accumulation_of
from sbp.planner.buffers import is_view
from sbp.planner.physical import Box, Compute, Operation, PhysicalPlan
from sbp.planner.pipeline import PHASES, check_whole

FORWARD, BACKWARD, WEIGHT = PHASES
ONCE = "once"

_RANKS = {phase: rank for rank, phase in enumerate((*PHASES, ONCE))}

Place = tuple[int, str]
"""A chunk, and one of `PHASES` or `ONCE`."""


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
    places = _Places(physical, stages * chunks, first_layers).run()
    physical, places = _with_constants_where_read(physical, places)
    made = {number: at for at, operation in enumerate(physical.operations) for number in operation.outputs}
    if weights_apart:
        places = _with_weights_apart(physical, places, made)
    _check_order(physical, places, made)
    homes, copies = _state(physical, places, made)
    transfers, accumulated, carried = _moves(physical, places, made)
    found = transfers, accumulated, carried, homes, copies
    return StagedPlan(physical, stages, chunks, tuple(places), *found, accumulation_of(physical))


class _Places:
    """Finds every operation's chunk and phase."""

    def __init__(self, physical: PhysicalPlan, count: int, first_layers: Sequence[int] | None) -> None:
        self.physical = physical
        self.count = count
        self.made: dict[int, int] = {}
        for at, operation in enumerate(physical.operations):
            self.made.update(dict.fromkeys(operation.outputs, at))
        self.readers: dict[int, list[int]] = {}
        for at, operation in enumerate(physical.operations):
            for number in operation.inputs:
                self.readers.setdefault(number, []).append(at)
        self.chunk_of_layer = self.deal(first_layers)
        self.places: list[Place | None] = [None] * len(physical.operations)

    def run(self) -> list[Place]:
        self.forward()
        self.backward()
        self.once()
        self.boxes()
        self.late_sums()
        return [place for place in self.places if place is not None]

    def computes(self, phase: str) -> list[tuple[int, Compute]]:
        return [
            (at, operation)
            for at, operation in enumerate(self.physical.operations)
            if isinstance(operation, Compute) and operation.phase == phase
        ]

    def deal(self, first_layers: Sequence[int] | None) -> dict[str, int]:
        """Layer -> chunk."""
        seconds: dict[str, float] = {}
        layer = None
        before = 0.0
        for _, operation in self.computes("forward"):
            layer = block_of(operation.module) or layer
            if layer is None:
                before += operation.seconds
            else:
                seconds[layer] = seconds.get(layer, 0.0) + operation.seconds
        layers = list(seconds)
        if self.count == 1 and not first_layers:
            return dict.fromkeys(layers, 0)
        if len(layers) < self.count:
            raise PipelineError(
                f"the plan has {len(layers)} layers (numbered modules such as h.3), which do not make {self.count} "
                "chunks; use fewer stages or chunks."
            )
        weights = [seconds[name] for name in layers]
        weights[0] += before
        starts = list(first_layers) if first_layers is not None else _shortest_cut(weights, self.count)[1:]
        bounds = [0, *starts, len(layers)]
        if len(bounds) != self.count + 1 or any(a >= b for a, b in zip(bounds, bounds[1:])):
            raise PipelineError(
                f"first_layers gives chunks 1 to {self.count - 1} the first layers {list(starts)}; they must ascend "
                f"between 1 and {len(layers) - 1}, one for each."
            )
        return {layers[at]: chunk for chunk, (a, b) in enumerate(zip(bounds, bounds[1:])) for at in range(a, b)}

    def forward(self) -> None:
        """What lies between two layers goes with the one before it."""
        chunk = 0
        for at, operation in self.computes("forward"):
            layer = block_of(operation.module)
            chunk = max(chunk, self.chunk_of_layer.get(layer, 0) if layer else 0)
            self.places[at] = chunk, FORWARD

    def backward(self) -> None:
        """Where its module is; else where the forward values are that it reads; and never before what it waits for.

        Values that follow from state alone (a weight's cast) say nothing: they are made wherever they are read.
        """
        homes: dict[str, set[int]] = {}
        for at, operation in self.computes("forward"):
            place = self.places[at]
            homes.setdefault(operation.module, set()).add(place[0] if place else 0)
        constant = constants_of(self.physical)
        for at, operation in self.computes("backward"):
            chunk = self.count - 1
            waits = self.count - 1
            layer = block_of(operation.module)
            seen = []
            for number in operation.inputs:
                place = self.place_of(number)
                if place is not None and place[1] == FORWARD:
                    if number not in constant:
                        seen.append(place[0])
                elif place is not None:
                    waits = min(waits, place[0])
            if layer is not None:
                chunk = self.chunk_of_layer[layer]
            elif len(homes.get(operation.module, ())) == 1:
                (chunk,) = homes[operation.module]
            elif seen:
                chunk = max(seen)
            self.places[at] = min(chunk, waits), BACKWARD

    def place_of(self, number: int) -> Place | None:
        """Where a register's value is computed, layout changes apart; None for sources."""
        at = self.made.get(number)
        while at is not None and self.places[at] is None:
            at = self.made.get(self.physical.operations[at].inputs[0]) if self.physical.operations[at].inputs else None
        return None if at is None else self.places[at]

    def once(self) -> None:
        """Where the state is read that it updates."""
        homes: dict[int, int] = {}
        for at, operation in enumerate(self.physical.operations):
            place = self.places[at]
            if place is not None and place[1] == FORWARD:
                for number in operation.inputs:
                    source = self.source_of(number)
                    if source is not None:
                        homes.setdefault(source, place[0])
        for at, operation in self.computes("optimizer"):
            chunks = [homes[source] for source in map(self.source_of, operation.inputs) if source in homes]
            made = [place[0] for place in map(self.place_of, operation.inputs) if place is not None]
            self.places[at] = (chunks or made or [0])[0], ONCE

    def source_of(self, number: int) -> int | None:
        """The state's register that a register is a layout of."""
        at = self.made.get(number)
        while at is not None and isinstance(self.physical.operations[at], Box):
            number = self.physical.operations[at].inputs[0]
            at = self.made.get(number)
        if at is not None or self.physical.registers[number].kind == "input":
            return None
        return number

    def boxes(self) -> None:
        """A layout is changed where the value was made, or in a later phase where it is read first.

        A maximum of sums is no sum of maxima: parts of a maximum are reduced for every micro-batch.
        """
        for at in reversed(range(len(self.physical.operations))):
            operation = self.physical.operations[at]
            if not isinstance(operation, Box):
                continue
            phase = {"optimizer": ONCE}.get(operation.phase, operation.phase)
            maker = self.place_of(operation.inputs[0])
            if maker is not None and (maker[1] == phase or not self.adds_up(operation.inputs[0])):
                self.places[at] = maker
                continue
            readers = [self.places[reader] for reader in self.readers.get(operation.outputs[0], ())]
            found = [place for place in readers if place is not None]
            if found:
                self.places[at] = found[0]
            else:
                self.places[at] = (maker[0] if maker is not None else 0), phase

    def adds_up(self, number: int) -> bool:
        """Whether a register's parts may be added up over micro-batches."""
        layout = self.physical.registers[number].layout
        return not any(isinstance(sbp, Partial) and sbp.reduce != "sum" for sbp in layout)

    def late_sums(self) -> None:
        """Sums of gradients over chunks that only the once phase reads are taken there, and what follows from them."""
        operations = self.physical.operations
        home: dict[int, int] = {}  # what may be done once -> the chunk that reads it
        for at in reversed(range(len(operations))):
            operation, place = operations[at], self.places[at]
            readers = [r for number in operation.outputs for r in self.readers.get(number, ())]
            linear = isinstance(operation, Box) or operation.op in ("add", "cast")
            if not linear or place is None or place[1] != BACKWARD or not readers:
                continue
            if all(self.is_once(r) or r in home for r in readers) and all(map(self.adds_up, operation.inputs)):
                reader = self.places[readers[0]]
                home[at] = home[readers[0]] if readers[0] in home else (reader[0] if reader else 0)
        moved: set[int] = set()
        for at in sorted(home):
            operation = operations[at]
            makers = {self.places[self.made[number]] for number in operation.inputs if number in self.made}
            after = any(self.made.get(number) in moved for number in operation.inputs)
            if after or (isinstance(operation, Compute) and operation.op == "add" and len(makers) > 1):
                moved.add(at)
        for at in moved:
            self.places[at] = home[at], ONCE

    def is_once(self, at: int) -> bool:
        """Whether an operation is placed in the once phase."""
        place = self.places[at]
        return place is not None and place[1] == ONCE


def _shortest_cut(weights: Sequence[float], count: int) -> list[int]:
    """The first layers of `count` consecutive groups whose heaviest is lightest; of equal ones that of even counts."""
    if not any(weights):
        return [chunk * len(weights) // count for chunk in range(count)]
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    layers = len(weights)
    best: list[list[tuple[float, int, int]]] = [[(0.0, 0, 0)] + [(float("inf"), 0, 0)] * layers]
    for group in range(1, count + 1):
        row = [(float("inf"), 0, 0)] * (layers + 1)
        for stop in range(group, layers + 1):
            row[stop] = min(
                (max(best[-1][start][0], sums[stop] - sums[start]), max(best[-1][start][1], stop - start), start)
                for start in range(group - 1, stop)
            )
        best.append(row)
    starts, stop = [], layers
    for group in range(count, 0, -1):
        stop = best[group][stop][2]
        starts.append(stop)
    return starts[::-1]


def constants_of(physical: PhysicalPlan) -> frozenset[int]:
    """Registers that follow from state alone: state, its layouts, its casts; the same for every micro-batch."""
    found = {number for number in physical.sources.values() if physical.registers[number].kind != "input"}
    for operation in physical.operations:
        if found.issuperset(operation.inputs):
            found.update(operation.outputs)
    return frozenset(found)


def _with_constants_where_read(physical: PhysicalPlan, places: list[Place]) -> tuple[PhysicalPlan, list[Place]]:
    """The plan in which a chunk makes for itself what follows from state alone, instead of having it sent."""
    constant = constants_of(physical) - set(physical.sources.values())
    home = {number: places[at][0] for at, o in enumerate(physical.operations) for number in o.outputs}
    # Register -> the other chunks that read it, with the first phase to do so.
    wanted: dict[int, dict[int, str]] = {number: {} for number in constant}

    def want(number: int, chunk: int, phase: str) -> None:
        if number in constant and home[number] != chunk:
            known = wanted[number].get(chunk, phase)
            wanted[number][chunk] = FORWARD if FORWARD in (known, phase) else phase

    copies: dict[int, dict[int, str]] = {}
    for at in reversed(range(len(places))):
        operation, (chunk, phase) = physical.operations[at], places[at]
        if phase == ONCE:
            continue
        copies[at] = {}
        for number in operation.outputs:
            for other, first in wanted.get(number, {}).items():
                copies[at][other] = FORWARD if FORWARD in (first, copies[at].get(other)) else first
        for other, first in [(chunk, phase), *copies[at].items()]:
            for number in operation.inputs:
                want(number, other, first)

    registers = list(physical.registers)
    own: dict[tuple[int, int], int] = {}
    operations: list[Operation] = []
    found: list[Place] = []
    for at, operation in enumerate(physical.operations):
        for chunk, phase in [places[at], *copies.get(at, {}).items()]:
            inputs = tuple(operation.inputs if phase == ONCE else (own.get((n, chunk), n) for n in operation.inputs))
            outputs = operation.outputs
            if chunk != places[at][0]:
                outputs = tuple(range(len(registers), len(registers) + len(outputs)))
                for number, new in zip(operation.outputs, outputs):
                    registers.append(replace(registers[number], number=new))
                    own[number, chunk] = new
            copy: Any = operation
            operations.append(replace(copy, inputs=inputs, outputs=outputs))
            found.append((chunk, phase))
    return replace(physical, registers=tuple(registers), operations=tuple(operations)), found


def _with_weights_apart(physical: PhysicalPlan, places: Sequence[Place], made: Mapping[int, int]) -> list[Place]:
    """The places, with backward work that nothing but its own layer's gradients of parameters waits for put off.

    The rest is what another chunk's backward reads, and what another layer's (or module's, outside of layers) does:
    so that the first chunk, which sends nothing on, is split where the others are.
    """

    def owner(operation: Operation) -> str | None:
        return (block_of(operation.module) or operation.module) if isinstance(operation, Compute) else None

    put_out = {*physical.outputs.values(), *physical.updates.values()}
    readers: dict[int, list[int]] = {}
    for at, operation in enumerate(physical.operations):
        for number in operation.inputs:
            readers.setdefault(number, []).append(at)
    urgent: set[int] = set()
    # Operation -> the owners of what it leads to: a layout change has none of its own.
    leads: dict[int, set[str]] = {}
    for at in reversed(range(len(places))):
        if places[at][1] != BACKWARD:
            continue
        operation = physical.operations[at]
        after = [reader for number in operation.outputs for reader in readers.get(number, ())]
        backward = [reader for reader in after if places[reader][1] == BACKWARD]
        mine = owner(operation)
        leads[at] = {name for reader in backward for name in leads[reader]}
        elsewhere = bool(leads[at] - {mine}) if mine is not None else False
        if mine is not None:
            leads[at] = {mine}
        if (
            elsewhere
            or any(reader in urgent or places[reader][0] != places[at][0] for reader in backward)
            or any(number in put_out for number in operation.outputs)
        ):
            urgent.add(at)
    return [
        (chunk, WEIGHT if phase == BACKWARD and at not in urgent else phase) for at, (chunk, phase) in enumerate(places)
    ]


def _check_order(physical: PhysicalPlan, places: Sequence[Place], made: Mapping[int, int]) -> None:
    for at, operation in enumerate(physical.operations):
        chunk, phase = places[at]
        for number in operation.inputs:
            if number not in made:
                continue
            before, earlier = places[made[number]]
            late = _RANKS[earlier] > _RANKS[phase]
            if earlier == phase == FORWARD:
                late = before > chunk
            elif earlier == BACKWARD and phase in (BACKWARD, WEIGHT):
                late = before < chunk
            if late:
                name = operation.node if isinstance(operation, Compute) else operation.kind
                raise PipelineError(
                    f"{name} is {phase} work of chunk {chunk}, but reads {physical.registers[number].value}, which is "
                    f"{earlier} work of chunk {before}: no pipeline has that order. Cut elsewhere (first_layers)."
                )


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
                if known is None or _RANKS[place[1]] < _RANKS[known.target[1]]:
                    transfers[key] = Transfer(number, source, place)
    for value, new in physical.updates.items():
        if new not in made:
            raise PipelineError(f"state {value} becomes {physical.registers[new].value}, which no operation makes.")
    return tuple(transfers.values()), frozenset(accumulated), frozenset(carried)
