"""What the stages of a pipeline do: tasks on streams, grouped into the segments that a schedule puts in order.

A training step is `micro_batches` times the same work. The model is cut into `stages * chunks` consecutive chunks
(virtual stages); chunk c lives on stage c % stages, as in Megatron's interleaved schedule (Narayanan et al. 2021). What
one chunk does in one phase for one micro-batch is a `Segment`: its tasks are actors, each on one stream of the stage.
All ranks of a stage do the same, so a stage is described, and simulated, as one rank.

How segments follow each other, for one stage:

* A stage works on one segment at a time, in the order of its schedule. A segment begins when the one before it on this
  stage has ended and what it receives has arrived; then its tasks without inputs may start. It ends when all its tasks
  have ended. Two marks soften this: an `early` task may start one segment ahead (a prefetch), and nobody waits for a
  `late` one but tasks that read it and the `after` segment (a gradient reduction beside the backward pass).
* Tasks of one stream run one after another, in program order, as kernels on a CUDA stream do.
* What a segment sends to its neighbour (forward to chunk c + 1, backward to chunk c - 1) leaves on the stream "p2p" of
  the sender, and the neighbour's segment of the same phase and micro-batch begins after it has arrived. Between chunks
  of one stage nothing is sent, whatever the segment says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sbp.errors import PipelineError

COMPUTE = "compute"
"""The stream of kernels; every other stream moves data, and is named after a mesh axis or is "p2p"."""

P2P = "p2p"
"""The stream of what goes from stage to stage."""

PHASES = ("forward", "backward", "weight")
"""What a chunk does for a micro-batch. `backward` makes the gradients of the chunk's inputs, and those of its weights
too unless these have a segment of their own, `weight`, which zero-bubble schedules put where a stage would idle."""

ONCE = ("before", "after")
"""What a stage does once per step."""

Key = tuple[int, str]
"""A chunk, from 0 to stages * chunks - 1, and one of `PHASES`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One operation of a segment on every rank of the stage: an actor.

    Parameters
    ----------
    name
        For people; need not be unique.
    stream
        `COMPUTE`, or the link stream that it occupies: a mesh axis such as "tp", or `P2P`.
    seconds
        Its time when nothing disturbs it.
    inputs
        Earlier tasks of the same segment that must have ended before it starts.
    allocates
        Bytes per rank that are held from its start on ...
    frees
        ... and bytes that are given back at its end, whoever allocated them.
    early
        It does not wait for its segment to begin: it may start once the segment before it on this stage has begun.
        Only for tasks without inputs.
    late
        The end of its segment does not wait for it; the `after` segment of the stage does.
    meets
        Tasks of other stages' `before` and `after` segments with the same text are one collective: they start together
        and the slowest decides. Empty for all others.
    """

    name: str
    stream: str
    seconds: float
    inputs: tuple[int, ...] = ()
    allocates: int = 0
    frees: int = 0
    early: bool = False
    late: bool = False
    meets: str = ""

    def __post_init__(self) -> None:
        owner = f"task {self.name!r}"
        if not isinstance(self.stream, str) or not self.stream:
            raise PipelineError(f"{owner}: its stream must be a text that is not empty, got {self.stream!r}.")
        check_seconds(owner, "seconds", self.seconds)
        check_whole(owner, "allocates", self.allocates)
        check_whole(owner, "frees", self.frees)
        object.__setattr__(self, "seconds", float(self.seconds))
        object.__setattr__(self, "inputs", tuple(self.inputs))
        if self.early and self.inputs:
            raise PipelineError(f"{owner} is early and has inputs; only a task that reads nothing can start early.")


@dataclass(frozen=True, slots=True)
class Segment:
    """What one chunk does in one phase for one micro-batch, or a stage once per step.

    Parameters
    ----------
    phase
        One of `PHASES` or `ONCE`.
    tasks
        In program order, which is the order on every stream. None at all is legal: an empty chunk passes on what it
        gets.
    sends_bytes, sends_seconds
        What goes to the neighbouring chunk's stage, and how long that takes when nothing disturbs it.
    sends_after
        The task at whose end the transfer may start; None: at the end of the segment.
    """

    phase: str
    tasks: tuple[Task, ...]
    sends_bytes: int = 0
    sends_seconds: float = 0.0
    sends_after: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))
        owner = f"{self.phase} segment"
        if self.phase not in (*PHASES, *ONCE):
            raise PipelineError(f"no phase is called {self.phase!r}; known are {', '.join((*PHASES, *ONCE))}.")
        for at, task in enumerate(self.tasks):
            for number in task.inputs:
                if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < at:
                    raise PipelineError(
                        f"{owner}: task {at} ({task.name!r}) reads {number!r}, which is no earlier task of its "
                        "segment; list tasks so that each comes after its inputs."
                    )
        check_whole(owner, "sends_bytes", self.sends_bytes)
        check_seconds(owner, "sends_seconds", self.sends_seconds)
        object.__setattr__(self, "sends_seconds", float(self.sends_seconds))
        if self.sends_after is not None and not 0 <= self.sends_after < len(self.tasks):
            raise PipelineError(
                f"{owner}: sends_after is {self.sends_after}, but its tasks are 0 to {len(self.tasks) - 1}."
            )

    @property
    def compute_seconds(self) -> float:
        """Time of its kernels."""
        return math.fsum(task.seconds for task in self.tasks if task.stream == COMPUTE)


@dataclass(frozen=True)
class Pipeline:
    """The work of one step, for all stages.

    Parameters
    ----------
    stages
        Number of pipeline stages; 1 is a step without a pipeline.
    chunks
        Chunks (virtual stages) on each stage.
    micro_batches
        How often each segment runs.
    segments
        (chunk, phase) -> segment, for all chunks: "forward" alone (inference), "forward" and "backward", or all three.
    before, after
        Per stage what it does once, before its first segment and after its last; empty for nothing.
    first, last
        Segments that take the place of those of `segments` for the first and the last micro-batch: parameters
        gathered once, gradients reduced beside the last backward pass.
    links
        Stream -> name of the link that it uses. Streams on one link of a rank share it: while k transfers use it at
        once, each goes at 1/k of its speed (links are duplex, a collective uses both directions). Streams that are not
        named have a link of their own.
    blocking_sends
        The sender's next segment waits until what it sent has arrived, as in Megatron's 1F1B without overlap.
    compute_slowdown
        While a link stream of the stage works, kernels take (1 + compute_slowdown) times as long.
    resident_bytes
        Per stage what is held all the time (parameters, optimizer state); empty for nothing.

    Raises
    ------
    PipelineError
        Segments missing or of another phase than their key, or numbers out of range.
    """

    stages: int
    chunks: int
    micro_batches: int
    segments: Mapping[Key, Segment]
    before: tuple[Segment, ...] = ()
    after: tuple[Segment, ...] = ()
    first: Mapping[Key, Segment] = field(default_factory=dict)
    last: Mapping[Key, Segment] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    blocking_sends: bool = False
    compute_slowdown: float = 0.0
    resident_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("stages", "chunks", "micro_batches"):
            check_whole("pipeline", name, getattr(self, name), 1)
        check_seconds("pipeline", "compute_slowdown", self.compute_slowdown)
        for name in ("segments", "first", "last", "links"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name in ("before", "after", "resident_bytes"):
            given = tuple(getattr(self, name))
            object.__setattr__(self, name, given)
            if len(given) not in (0, self.stages):
                raise PipelineError(f"pipeline: {name} has {len(given)} entries for {self.stages} stages.")
        for stage, size in enumerate(self.resident_bytes):
            check_whole("pipeline", f"resident_bytes of stage {stage}", size)
        self._check_segments()
        self._check_once()

    def _check_segments(self) -> None:
        phases = self.phases
        if phases not in (PHASES[:1], PHASES[:2], PHASES):
            raise PipelineError(
                f"pipeline: its segments have the phases {', '.join(phases) or 'none'}; expected forward, or forward "
                "and backward, or forward, backward and weight."
            )
        count = self.stages * self.chunks * len(phases)
        if count > len(self.segments):  # before they are listed: a damaged file may say any number
            given = self.segments
            first = next((c, f) for c in range(self.stages * self.chunks) for f in phases if (c, f) not in given)
            raise PipelineError(f"pipeline: no segment is given for {first!r} ({count - len(given)} missing).")
        expected = {(chunk, phase) for chunk in range(self.stages * self.chunks) for phase in phases}
        for name, given in (("segments", self.segments), ("first", self.first), ("last", self.last)):
            for key, segment in given.items():
                if key not in expected:
                    raise PipelineError(
                        f"pipeline: {name} has {key!r}, but its chunks are 0 to {self.stages * self.chunks - 1} "
                        f"and its phases {', '.join(phases)}."
                    )
                if segment.phase != key[1]:
                    raise PipelineError(f"pipeline: {name}[{key!r}] holds a {segment.phase} segment.")
                for task in segment.tasks:
                    if task.meets:
                        raise PipelineError(
                            f"pipeline: task {task.name!r} of {name}[{key!r}] meets {task.meets!r}; only tasks of "
                            "before and after segments can meet."
                        )
        if self.micro_batches == 1 and set(self.first) & set(self.last):
            raise PipelineError(
                "pipeline: with one micro-batch, first and last both replace "
                f"{min(set(self.first) & set(self.last))!r}; give one of the two."
            )

    def _check_once(self) -> None:
        meetings: dict[str, set[int]] = {}
        for name in ONCE:
            for stage, segment in enumerate(getattr(self, name)):
                if segment.phase != name:
                    raise PipelineError(f"pipeline: {name}[{stage}] holds a {segment.phase} segment.")
                if segment.sends_bytes or segment.sends_seconds:
                    raise PipelineError(f"pipeline: {name}[{stage}] sends; give it a task on {P2P!r} instead.")
                for task in segment.tasks:
                    if task.meets and stage in meetings.setdefault(task.meets, set()):
                        raise PipelineError(
                            f"pipeline: two tasks of stage {stage} meet {task.meets!r}; a meeting has at most one task "
                            "of a stage."
                        )
                    if task.meets:
                        meetings[task.meets].add(stage)

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """The phases of its segments, in the order of `PHASES`."""
        present = {phase for _, phase in self.segments}
        return tuple(phase for phase in PHASES if phase in present)

    def stage_of(self, chunk: int) -> int:
        """Where a chunk lives."""
        return chunk % self.stages

    def segment(self, chunk: int, phase: str, micro_batch: int) -> Segment:
        """What a chunk does in a phase for a micro-batch."""
        key = (chunk, phase)
        if micro_batch == 0 and key in self.first:
            return self.first[key]
        if micro_batch == self.micro_batches - 1 and key in self.last:
            return self.last[key]
        return self.segments[key]

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The streams in use: `COMPUTE` first, then link streams by name."""
        found = {task.stream for segment in self.all_segments() for task in segment.tasks}
        if any(segment.sends_bytes or segment.sends_seconds for segment in self.all_segments()):
            found.add(P2P)
        return (COMPUTE, *sorted(found - {COMPUTE}))

    def all_segments(self) -> tuple[Segment, ...]:
        """Every segment that is given, in a fixed order."""
        keyed = (given[key] for given in (self.segments, self.first, self.last) for key in sorted(given))
        return (*keyed, *self.before, *self.after)


def uniform_pipeline(
    stages: int,
    micro_batches: int,
    forward_seconds: float,
    backward_seconds: float,
    *,
    chunks: int = 1,
    weight_seconds: float | None = None,
    sends_seconds: float = 0.0,
    activation_bytes: int = 1,
) -> Pipeline:
    """The textbook's pipeline: all chunks alike, one kernel per phase, whose activations live until the last phase.

    Times are those of one chunk; `weight_seconds` of None leaves the weight gradients in the backward segment.
    """
    last = "backward" if weight_seconds is None else "weight"
    times = {"forward": forward_seconds, "backward": backward_seconds}
    if weight_seconds is not None:
        times["weight"] = weight_seconds
    segments: dict[Key, Segment] = {}
    for phase, seconds in times.items():
        held = activation_bytes if phase == "forward" else 0
        freed = activation_bytes if phase == last else 0
        task = Task(phase, COMPUTE, seconds, (), held, freed)
        sends = sends_seconds if phase != "weight" else 0.0
        for chunk in range(stages * chunks):
            segments[chunk, phase] = Segment(phase, (task,), 0, sends)
    return Pipeline(stages, chunks, micro_batches, segments)


def check_seconds(owner: str, name: str, value: float) -> None:
    """Raise `PipelineError` unless a time (or a factor) is a finite number of at least 0."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good:
        raise PipelineError(f"{owner}: {name} must be a finite number of at least 0, got {value!r}.")


def check_whole(owner: str, name: str, value: int, least: int = 0) -> None:
    """Raise `PipelineError` unless a value is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PipelineError(f"{owner}: {name} must be a whole number of at least {least}, got {value!r}.")


def chain(seconds: Sequence[float], stream: str = COMPUTE) -> tuple[Task, ...]:
    """Tasks of one stream, each reading the one before it."""
    return tuple(Task(f"{stream} {at}", stream, time, (at - 1,) if at else ()) for at, time in enumerate(seconds))
