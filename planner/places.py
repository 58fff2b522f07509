"""Where the operations of a physical plan run in a pipeline: the chunk and the phase of each.

Layers are dealt out to chunks; what has no layer follows the values that it reads, layout changes the operation that
they serve. What follows from state alone is made wherever it is read; the gradients of parameters can be put off into
a phase of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sbp.errors import PipelineError
from sbp.layout import Partial
from sbp.passes.recompute import block_of
from sbp.planner.physical import Box, Compute, Operation, PhysicalPlan
from sbp.planner.pipeline import PHASES

FORWARD, BACKWARD, WEIGHT = PHASES
ONCE = "once"

RANKS = {phase: rank for rank, phase in enumerate((*PHASES, ONCE))}
"""Phase -> how late in a step it comes."""

Place = tuple[int, str]
"""A chunk, and one of `PHASES` or `ONCE`."""


class Places:
    """Finds every operation's chunk and phase.

    Parameters
    ----------
    count
        Number of chunks.
    first_layers
        Per chunk but the first the number of its first layer; None for the cut whose longest chunk is shortest.
    """

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
        """Per operation its place.

        Raises
        ------
        PipelineError
            Fewer layers than chunks, or first layers that do not ascend.
        """
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
        starts = list(first_layers) if first_layers is not None else shortest_cut(weights, self.count)[1:]
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


def shortest_cut(weights: Sequence[float], count: int) -> list[int]:
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


def with_constants_where_read(physical: PhysicalPlan, places: list[Place]) -> tuple[PhysicalPlan, list[Place]]:
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


def with_weights_apart(physical: PhysicalPlan, places: Sequence[Place], made: Mapping[int, int]) -> list[Place]:
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


def check_order(physical: PhysicalPlan, places: Sequence[Place], made: Mapping[int, int]) -> None:
    """Raise `PipelineError` where an operation reads what is made in a later phase, or against the pipeline's way."""
    for at, operation in enumerate(physical.operations):
        chunk, phase = places[at]
        for number in operation.inputs:
            if number not in made:
                continue
            before, earlier = places[made[number]]
            late = RANKS[earlier] > RANKS[phase]
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
