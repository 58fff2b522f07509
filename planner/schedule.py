"""The order in which each stage of a pipeline runs its segments: GPipe, 1F1B, interleaved 1F1B and zero-bubble.

A schedule is stated twice. `Schedule.orders` is the closed form of the papers. `Credits` is the same as what actors
do: a stage fires the most urgent segment whose inputs are there and whose output register has a free buffer. 1F1B is
nothing but stage s of p having p - s buffers for what its forward leaves to its backward.

Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al. 2021a, "Memory-efficient pipeline-parallel
DNN training"); interleaved (Narayanan et al. 2021b, "Efficient large-scale language model training on GPU clusters
using Megatron-LM"); ZB-H1 (Qi et al. 2024, "Zero bubble pipeline parallelism"); credits (Yuan et al. 2021, "OneFlow").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sbp.errors import PipelineError
from sbp.planner.pipeline import PHASES, check_whole
from sbp.wording import nearest_known

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
"""What `schedule_named` knows."""

MOST_SEGMENTS = 1_000_000
"""How many segments of all stages a schedule may put in order; more would fill memory with them."""

TRAINING = PHASES[:2]
"""The phases of a pipeline whose backward makes all gradients."""

Action = tuple[str, int, int]
"""(phase, chunk, micro-batch): one segment run once."""

Run = tuple[int, int]
"""(chunk, micro-batch)."""


@dataclass(frozen=True)
class Schedule:
    """Per stage the order of its segments.

    Attributes
    ----------
    orders
        Per stage its actions; every (phase, chunk of the stage, micro-batch) once.

    Raises
    ------
    PipelineError
        An action that does not belong to its stage, stands there twice, or is missing.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if len(self.orders) != self.stages:
            raise PipelineError(f"schedule {self.name}: {len(self.orders)} orders for {self.stages} stages.")
        phases = self.phases
        for stage, order in enumerate(self.orders):
            chunks = range(stage, self.stages * self.chunks, self.stages)
            expected = {(f, c, m) for f in phases for c in chunks for m in range(self.micro_batches)}
            for action, count in Counter(order).items():
                if action not in expected:
                    raise PipelineError(f"schedule {self.name}: stage {stage} cannot run {describe(action)}.")
                if count > 1:
                    raise PipelineError(f"schedule {self.name}: stage {stage} runs {describe(action)} {count} times.")
            if len(order) < len(expected):
                missing = min(expected - set(order))
                raise PipelineError(f"schedule {self.name}: stage {stage} never runs {describe(missing)}.")

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that it puts in order."""
        present = {action[0] for order in self.orders for action in order}
        return tuple(phase for phase in PHASES if phase in present)

    def in_flight(self, until: str = "backward") -> tuple[int, ...]:
        """Per stage the most forward segments at once that have run, or run, while their `until` has not ended."""
        most = []
        for order in self.orders:
            now = top = 0
            for phase, _, _ in order:
                now += phase == "forward"
                top = max(top, now)
                now -= phase == until
            most.append(top)
        return tuple(most)


@dataclass(frozen=True)
class Credits:
    """A schedule as register credits: what every stage may fire, and what it prefers.

    Attributes
    ----------
    priority
        Phases, the most urgent first.
    queues
        Per stage and phase the order of (chunk, micro-batch) within that phase.
    buffers
        Per stage and phase how many forward outputs may wait for that phase: the forward actor needs a free buffer in
        each register, which the named phase gives back at its end.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    priority: tuple[str, ...]
    queues: tuple[Mapping[str, tuple[Run, ...]], ...]
    buffers: tuple[Mapping[str, int], ...]

    def __post_init__(self) -> None:
        if len(self.queues) != self.stages or len(self.buffers) != self.stages:
            raise PipelineError(f"credits {self.name}: give queues and buffers for each of {self.stages} stages.")
        for stage, (queues, buffers) in enumerate(zip(self.queues, self.buffers)):
            if set(queues) != set(self.priority):
                raise PipelineError(f"credits {self.name}: stage {stage} has queues for {', '.join(sorted(queues))}.")
            for phase, count in buffers.items():
                if phase not in self.priority or phase == "forward" or count < 1:
                    raise PipelineError(
                        f"credits {self.name}: stage {stage} gives {count} buffers to {phase!r}; give at least 1 to a "
                        "phase after forward."
                    )
        # The queues hold what the orders of a schedule hold, which is checked there.
        Schedule(
            self.name,
            self.stages,
            self.chunks,
            self.micro_batches,
            tuple(tuple((phase, *run) for phase, runs in queues.items() for run in runs) for queues in self.queues),
        )


def describe(action: Action) -> str:
    """An action in words, for messages."""
    phase, chunk, micro_batch = action
    return f"{phase} of chunk {chunk}, micro-batch {micro_batch}"


def schedule_named(
    name: str, stages: int, chunks: int | None, micro_batches: int, phases: tuple[str, ...] = TRAINING
) -> Schedule:
    """The closed form of a schedule.

    Parameters
    ----------
    name
        One of `SCHEDULES`; "interleaved:2" states the chunks of a stage too.
    chunks
        Chunks of each stage; None for what the name says, or 1. Only gpipe and interleaved take more than one.
    phases
        What the pipeline has: forward alone, forward and backward, or all three; `Pipeline.phases`. Zero-bubble always
        has three; the other schedules run a weight segment right after its backward.

    Raises
    ------
    PipelineError
        An unknown name, or numbers that do not fit it.
    """
    name, chunks, phases = _checked(name, stages, chunks, micro_batches, phases)
    forward, backward, weight = PHASES
    orders = []
    for stage in range(stages):
        queues = _queues(stage, stages, chunks, micro_batches)
        count = len(queues[forward])
        warm = min(count, _warm_up(name, stage, stages, chunks, micro_batches))
        lag = stage if name == "zero-bubble" else 0
        order: list[Action] = [(forward, *run) for run in queues[forward][:warm]]
        for at in range(count if backward in phases else 0):
            if warm + at < count:
                order.append((forward, *queues[forward][warm + at]))
            order.append((backward, *queues[backward][at]))
            if weight in phases and at >= lag:
                order.append((weight, *queues[weight][at - lag]))
        if weight in phases:
            order += [(weight, *run) for run in queues[weight][max(count - lag, 0) :]]
        if phases == (forward,):
            order = [(forward, *run) for run in queues[forward]]
        orders.append(tuple(order))
    return Schedule(name, stages, chunks, micro_batches, tuple(orders))


def credits_named(
    name: str, stages: int, chunks: int | None, micro_batches: int, phases: tuple[str, ...] = TRAINING
) -> Credits:
    """The register credits from which the same schedule arises; parameters and errors as for `schedule_named`.

    On stages that take equally long, with transfers that keep up with them, gpipe, 1f1b and zero-bubble (of at least as
    many micro-batches as stages, all phases equally long) fire in the closed form's order, and interleaved in one that
    takes as long. Elsewhere actors fire what can run instead of waiting for the closed form's next segment; what is in
    flight stays within the same buffers.
    """
    name, chunks, phases = _checked(name, stages, chunks, micro_batches, phases)
    forward, backward, weight = PHASES
    queues, buffers = [], []
    for stage in range(stages):
        found = _queues(stage, stages, chunks, micro_batches)
        queues.append({phase: found[phase] for phase in phases})
        waiting = {}
        if backward in phases:
            warm = min(len(found[forward]), _warm_up(name, stage, stages, chunks, micro_batches))
            waiting[backward] = min(warm + 1, len(found[forward]))
        if name == "zero-bubble":
            waiting[weight] = min(stages, micro_batches)
        buffers.append(waiting)
    priority: tuple[str, ...]
    if name == "zero-bubble":
        priority = (forward, backward, weight)
    elif name == "1f1b":
        priority = tuple(phase for phase in (weight, backward, forward) if phase in phases)
    else:
        priority = tuple(phase for phase in (weight, forward, backward) if phase in phases)
    return Credits(name, stages, chunks, micro_batches, priority, tuple(queues), tuple(buffers))


def chunks_named(name: str) -> int | None:
    """The chunks of each stage that a schedule's name states, as "interleaved:2" does; None where it states none.

    Raises
    ------
    PipelineError
        No schedule has this name.
    """
    base, colon, number = name.partition(":")
    if base not in SCHEDULES:
        raise PipelineError(f"no schedule is called {name!r}; {nearest_known(base, SCHEDULES)}.")
    if not colon:
        return None
    if base != "interleaved" or not number.isdecimal() or int(number) < 1:
        raise PipelineError(f"schedule {name!r}: only interleaved takes a number, of chunks: interleaved:2.")
    return int(number)


def _checked(
    name: str, stages: int, chunks: int | None, micro_batches: int, phases: tuple[str, ...]
) -> tuple[str, int, tuple[str, ...]]:
    """The name without its number, the chunks, the phases."""
    base, number = name.partition(":")[0], chunks_named(name)
    if number is not None:
        if chunks not in (None, number):
            raise PipelineError(f"schedule {name!r} is for {number} chunks per stage, but there are {chunks}.")
        chunks = number
    chunks = 1 if chunks is None else chunks
    for what, value in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
        check_whole(f"schedule {name}", what, value, 1)
    if chunks > 1 and base not in ("gpipe", "interleaved"):
        raise PipelineError(f"schedule {name} has one chunk per stage, not {chunks}; use interleaved:{chunks}.")
    if phases not in (PHASES[:1], TRAINING, PHASES):
        raise PipelineError(f"schedule {name}: the phases {phases} are not the first of {', '.join(PHASES)}.")
    phases = PHASES if base == "zero-bubble" else phases
    count = stages * chunks * micro_batches * len(phases)
    if count > MOST_SEGMENTS:
        raise PipelineError(
            f"schedule {name}: {stages * chunks} chunks with {micro_batches} micro-batches have {count:,} "
            f"segments, more than {MOST_SEGMENTS:,}; use fewer micro-batches, of which a step's length is linear."
        )
    return base, chunks, phases


def _queues(stage: int, stages: int, chunks: int, micro_batches: int) -> dict[str, tuple[Run, ...]]:
    """Per phase the order of (chunk, micro-batch): a group of micro-batches through all chunks, then the next group.

    Groups are as large as the pipeline is long; a remainder joins the last group, because a shorter group of its own
    would let the stages wait for each other.
    """
    whole = max(micro_batches // stages, 1) if chunks > 1 else 1
    starts = [group * stages for group in range(whole)]
    groups = [range(a, b) for a, b in zip(starts, [*starts[1:], micro_batches])]
    mine = range(stage, stages * chunks, stages)
    down = tuple((chunk, m) for group in groups for chunk in mine for m in group)
    up = tuple((chunk, m) for group in groups for chunk in reversed(mine) for m in group)
    return {"forward": down, "backward": up, "weight": up}


def _warm_up(name: str, stage: int, stages: int, chunks: int, micro_batches: int) -> int:
    """How many forward segments a stage runs before it alternates, if there are so many."""
    if name == "gpipe":
        return chunks * micro_batches
    if chunks == 1:
        return stages - stage - 1
    largest = micro_batches if micro_batches < 2 * stages else stages + micro_batches % stages
    return 2 * (stages - stage - 1) + (chunks - 1) * largest
