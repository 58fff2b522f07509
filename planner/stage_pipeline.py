"""A staged plan as the simulator sees it: segments of tasks with their times, and the memory that each holds and frees.

The peak of a stage does not depend on times, only on the order of its segments: within a stage one segment runs at a
time. `stage_peaks` follows a schedule and adds up; `simulate` gives the same, with the times besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sbp.planner.buffers import buffers_of
from sbp.planner.physical import Compute
from sbp.planner.pipeline import Pipeline, Segment, Task
from sbp.planner.places import FORWARD, ONCE, Place
from sbp.planner.schedule import Schedule
from sbp.planner.stages import StagedPlan
from sbp.planner.timing import tasks_of


@dataclass(frozen=True, slots=True)
class StagePeak:
    """Memory of one rank of a stage, in bytes.

    Attributes
    ----------
    resident_bytes
        Parameters, optimizer state and sums of gradients: what is there all the time.
    peak_bytes
        The most that is held at once, resident memory included.
    in_flight
        The most micro-batches (times chunks) whose forward has run, or runs, while their last phase has not ended.
    """

    resident_bytes: int
    peak_bytes: int
    in_flight: int


def stage_peaks(pipeline: Pipeline, schedule: Schedule) -> tuple[StagePeak, ...]:
    """Per stage the memory that a schedule needs, micro-batches in flight included.

    Tasks hold what they allocate from their start and free at their end, in program order; `before` and `after`
    segments count. Early and late tasks, which leave that order, count with their segment.
    """
    last = schedule.phases[-1]
    in_flight = schedule.in_flight(last) if last != FORWARD else (0,) * schedule.stages
    found = []
    for stage, order in enumerate(schedule.orders):
        resident = pipeline.resident_bytes[stage] if pipeline.resident_bytes else 0
        held = peak = resident
        segments = [pipeline.segment(chunk, phase, micro_batch) for phase, chunk, micro_batch in order]
        if pipeline.before:
            segments.insert(0, pipeline.before[stage])
        if pipeline.after:
            segments.append(pipeline.after[stage])
        known: dict[int, tuple[int, int]] = {}
        for segment in segments:
            if id(segment) not in known:
                known[id(segment)] = _rise(segment)
            most, left = known[id(segment)]
            peak = max(peak, held + most)
            held += left
        found.append(StagePeak(resident, peak, in_flight[stage]))
    return tuple(found)


def _rise(segment: Segment) -> tuple[int, int]:
    """The most that a segment holds beyond what was there, and what it leaves."""
    now = most = 0
    for task in segment.tasks:
        now += task.allocates
        most = max(most, now)
        now -= task.frees
    return most, now


def pipeline_of(
    staged: StagedPlan,
    micro_batches: int,
    send_seconds: Callable[[int], float] = lambda size: 0.0,
    overlap: bool = True,
) -> Pipeline:
    """The pipeline that `simulate` and `stage_peaks` read.

    Every operation is a task, on the compute stream or that of its mesh axis. Memory is that of the rank with the
    largest shards: a register's from its making (inputs from the beginning of the forward segment, what is received
    from that of the segment that waits for it) to the last operation of its chunk that reads it or a view of it; what
    is sent, put out or added up stays to the end of the segment that makes it. State and sums of gradients are
    resident.

    Parameters
    ----------
    send_seconds
        Bytes that a segment sends to the next chunk -> seconds. All that leaves a segment is counted there.
    overlap
        False plays all operations of a stage on one stream, as the ranks of one process do.
    """
    memory = _Memory(staged)
    segments = {
        (chunk, phase): _segment(staged, (chunk, phase), memory, send_seconds, overlap)
        for chunk in range(staged.stages * staged.chunks)
        for phase in staged.phases
    }
    after = tuple(_after(staged, stage, memory, overlap) for stage in range(staged.stages))
    return Pipeline(
        staged.stages, staged.chunks, micro_batches, segments, after=after, resident_bytes=memory.resident_bytes()
    )


class _Memory:
    """Per operation the bytes that it allocates and frees, without its workspace."""

    def __init__(self, staged: StagedPlan) -> None:
        self.staged = staged
        self.allocates: dict[int, int] = {}
        self.frees: dict[int, int] = {}
        registers = staged.physical.registers
        resident = {n for n in staged.physical.sources.values() if registers[n].kind != "input"}
        first: dict[tuple[int, int], int] = {}
        for at in staged.order:
            operation = staged.physical.operations[at]
            for number in (*operation.inputs, *operation.outputs):
                chunk = staged.places[at][0]
                first.setdefault((chunk, staged.memory_of(chunk, number)), at)
        # Inputs are there when the forward segment begins, what is received when the segment that waits for it does.
        for number in staged.physical.sources.values():
            for chunk, read in enumerate(staged.reads):
                if number in read and staged.segments[chunk, FORWARD]:
                    first[chunk, number] = staged.segments[chunk, FORWARD][0]
        for transfer in staged.transfers:
            if transfer.target[1] != ONCE:
                first[transfer.target[0], transfer.register] = staged.segments[transfer.target][0]
        # Memory that views share is free once the last of its registers is.
        last: dict[tuple[int, int], int] = {}
        for at in staged.order:
            for number in staged.releases.get(at, ()):
                chunk = staged.places[at][0]
                last[chunk, staged.memory_of(chunk, number)] = at
        for (chunk, number), at in first.items():
            if number not in resident:
                size = registers[number].bytes * registers[number].credits
                end = last[chunk, number]
                self.allocates[at] = self.allocates.get(at, 0) + size
                self.frees[end] = self.frees.get(end, 0) + size

    def resident_bytes(self) -> tuple[int, ...]:
        """Per stage: state that its chunks read or update, the sums that they make, and what they carry to the end."""
        staged = self.staged
        registers = staged.physical.registers
        found = [0] * staged.stages
        for value, number in staged.physical.sources.items():
            if registers[number].kind != "input":
                for stage in {staged.stage_of(chunk) for chunk in staged.copies[value]}:
                    found[stage] += registers[number].bytes
        for number in (*staged.accumulated, *staged.carried):
            found[staged.stage_of(staged.places[staged.made[number]][0])] += registers[number].bytes
        return tuple(found)


def _segment(
    staged: StagedPlan, place: Place, memory: _Memory, send_seconds: Callable[[int], float], overlap: bool
) -> Segment:
    registers = staged.physical.registers
    operations = staged.segments[place]
    tasks = _Tasks(staged, overlap)
    for at in operations:
        tasks.add(at, memory.allocates.get(at, 0), memory.frees.get(at, 0))
    sent = sum(registers[t.register].bytes for t in staged.transfers if t.source == place and t.target[1] != ONCE)
    return Segment(place[1], tuple(tasks.made), sent, send_seconds(sent) if sent else 0.0)


def _after(staged: StagedPlan, stage: int, memory: _Memory, overlap: bool) -> Segment:
    """The once phase of a stage; next values take the old ones' place where the plan says so."""
    operations = sorted(
        at
        for (c, phase), found in staged.segments.items()
        if phase == ONCE
        for at in found
        if staged.stage_of(c) == stage
    )
    there = set(operations)
    registers = staged.physical.registers
    home = [
        staged.memory_of(staged.places[staged.made[n]][0], n) if n in staged.made else n for n in range(len(registers))
    ]
    in_place = buffers_of(staged.physical).in_place
    kept = set(staged.physical.updates.values())
    last: dict[int, int] = {}
    for at in operations:
        for number in (*staged.physical.operations[at].inputs, *staged.physical.operations[at].outputs):
            last[home[number]] = at
    tasks = _Tasks(staged, overlap)
    for at in operations:
        operation = staged.physical.operations[at]
        made = [n for n in operation.outputs if home[n] == n and n not in in_place]
        mine = {home[n] for n in (*operation.inputs, *operation.outputs)}
        freed = [
            n for n in mine
            if last[n] == at and staged.made.get(n) in there and n not in in_place and n not in kept
        ]  # fmt: skip
        tasks.add(at, sum(registers[n].bytes for n in made), sum(registers[n].bytes for n in freed))
    return Segment("after", tuple(tasks.made))


class _Tasks:
    """The tasks of a segment, operation by operation."""

    def __init__(self, staged: StagedPlan, overlap: bool) -> None:
        self.staged, self.overlap = staged, overlap
        self.made: list[Task] = []
        self._last: dict[int, int] = {}  # operation -> its last task

    def add(self, at: int, allocates: int, frees: int) -> None:
        physical = self.staged.physical
        operation = physical.operations[at]
        makers = (self.staged.made.get(number) for number in operation.inputs)
        inputs = list(dict.fromkeys(self._last[maker] for maker in makers if maker in self._last))
        name = operation.node if isinstance(operation, Compute) else operation.kind
        self.made += tasks_of(operation, name, physical.mesh, len(self.made), inputs, allocates, frees, self.overlap)
        self._last[at] = len(self.made) - 1
