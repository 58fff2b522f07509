"""Simulation of one step of a pipeline: what runs when on which stream, what it costs, and what decides its length.

The ranks of a stage do the same at the same time, so one of them is simulated for each stage. Compute is one stream,
and so is every kind of link. Link streams that share a link share its speed, and kernels can be slowed down by what
moves beside them (see `sbp.planner.pipeline.Pipeline`). The events are played by `sbp.planner.events` (Cython).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sbp.errors import PipelineError
from sbp.planner.event_graph import EventGraph
from sbp.planner.events import Engine, latest_stops
from sbp.planner.pipeline import COMPUTE, P2P, Pipeline, Segment
from sbp.planner.schedule import Action, Credits, Schedule, describe, schedule_named


@dataclass(frozen=True, eq=False)
class Events:
    """Every task and every transfer that ran: one entry each, stage by stage in program order.

    Attributes
    ----------
    start, stop
        float64 (events,): seconds since the step began.
    stage, stream
        int32 (events,): where; `stream` counts in `SimulatedStep.streams`.
    run
        int32 (events,): which entry of `SimulatedStep.runs` the event belongs to.
    task
        int32 (events,): number of the task in its segment; -1 for what the segment sends.
    slack
        float64 (events,): seconds by which it could end later before the step took longer, all else as it was.
    """

    start: np.ndarray
    stop: np.ndarray
    stage: np.ndarray
    stream: np.ndarray
    run: np.ndarray
    task: np.ndarray
    slack: np.ndarray

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """One simulated step.

    Attributes
    ----------
    pipeline, schedule
        What was simulated.
    streams
        Names of the streams: "compute" first, then link streams.
    step_seconds
        Length of the step.
    busy_seconds, exposed_seconds
        float64 (stages, streams): how long each stream worked, and how long it did while the stage's compute stream
        stood still; several that worked at once share that time. A transfer is exposed where it is waited for: on the
        receiving stage, and on the sending one if sends block. For compute `exposed_seconds` is 0.
    memory
        Per stage (times, bytes): int64 bytes per rank held from each time on.
    runs
        Every segment that ran, as (stage, action); phase "before" and "after" with chunk -1.
    events
        Every task and transfer.
    critical_path
        int64: indices of the events that decide the length of the step, in order: each starts when the one before it
        ends, the first at 0, and the last ends the step.
    """

    pipeline: Pipeline
    schedule: Schedule
    streams: tuple[str, ...]
    step_seconds: float
    busy_seconds: np.ndarray
    exposed_seconds: np.ndarray
    memory: tuple[tuple[np.ndarray, np.ndarray], ...]
    peak_bytes: tuple[int, ...]
    runs: tuple[tuple[int, Action], ...]
    events: Events
    critical_path: np.ndarray

    @property
    def bubble_seconds(self) -> np.ndarray:
        """float64 (stages,): how long each stage did nothing and waited for no communication of its own."""
        return np.maximum(self.step_seconds - self.busy_seconds[:, 0] - self.exposed_seconds.sum(axis=1), 0.0)

    @property
    def bubble_fraction(self) -> float:
        """The stages' bubbles relative to their compute: (p - 1) / m for 1F1B on p equal stages."""
        compute = float(self.busy_seconds[:, 0].sum())
        return float(self.bubble_seconds.sum()) / compute if compute > 0 else 0.0

    @cached_property
    def breakdown_seconds(self) -> dict[str, float]:
        """Compute, exposed link streams by name, and "bubble": means over stages, which add up to the step."""
        found = {COMPUTE: float(self.busy_seconds[:, 0].mean())}
        found |= {name: float(self.exposed_seconds[:, at + 1].mean()) for at, name in enumerate(self.streams[1:])}
        return found | {"bubble": max(self.step_seconds - sum(found.values()), 0.0)}

    @cached_property
    def compute_only_seconds(self) -> float:
        """Length of the step if all communication were free and disturbed nobody."""
        silent = replace(without(self.pipeline, self.streams[1:]), compute_slowdown=0.0)
        return simulate(silent, self.schedule).step_seconds

    @property
    def exposed_communication_seconds(self) -> float:
        """What communication adds to the step: step less compute-only step."""
        return self.step_seconds - self.compute_only_seconds

    def path_seconds(self) -> dict[str, float]:
        """The critical path by stream; its entries add up to the step."""
        lengths = (self.events.stop - self.events.start)[self.critical_path]
        streams = self.events.stream[self.critical_path]
        return {name: float(lengths[streams == at].sum()) for at, name in enumerate(self.streams)}

    def segment(self, run: int) -> Segment:
        """The segment of an entry of `runs`."""
        stage, (phase, chunk, micro_batch) = self.runs[run]
        if chunk < 0:
            return (self.pipeline.before if phase == "before" else self.pipeline.after)[stage]
        return self.pipeline.segment(chunk, phase, micro_batch)

    def event_name(self, event: int) -> str:
        """The task's name; "send" for a transfer."""
        number = int(self.events.task[event])
        return "send" if number < 0 else self.segment(int(self.events.run[event])).tasks[number].name


def simulate(pipeline: Pipeline, schedule: Schedule | Credits | str) -> SimulatedStep:
    """Simulate one step.

    Parameters
    ----------
    pipeline
        The work.
    schedule
        The order on every stage; or credits, from which the order arises (`fire`); or a name for `schedule_named`.

    Raises
    ------
    PipelineError
        The schedule does not fit the pipeline, or its orders wait for each other.
    """
    if isinstance(schedule, str):
        schedule = schedule_named(
            schedule, pipeline.stages, pipeline.chunks, pipeline.micro_batches, phases=pipeline.phases
        )
    if isinstance(schedule, Credits):
        schedule = fire(pipeline, schedule)
    if not isinstance(schedule, Schedule):
        raise PipelineError(f"simulate takes the name of a schedule or a Schedule, got {schedule!r}.")
    _check_fit(pipeline, schedule)
    graph, engine = _prepare(pipeline, schedule)
    result = engine.run()
    if not result["finished"]:
        raise _deadlock(graph, result["sequence"])
    if not np.isfinite(result["stop"]).all():
        raise PipelineError("the step never ends: its seconds, added up, are more than a number holds; check them.")
    return _step(graph, schedule, result)


def fire(pipeline: Pipeline, credits: Credits) -> Schedule:
    """The orders in which the stages' actors fire: each as soon as it can, by credits and priority.

    An early task starts with its segment here, because which segment comes next is not known before.

    Raises
    ------
    PipelineError
        The credits do not fit the pipeline, or so few buffers that nothing can fire.
    """
    _check_fit(pipeline, credits)
    graph, engine = _prepare(pipeline, credits)
    result = engine.run()
    if not result["finished"]:
        raise _deadlock(graph, result["sequence"])
    orders = []
    for mine in graph.by_stage:
        runs = [instance for instance in mine if instance.action[1] >= 0]
        runs.sort(key=lambda instance: result["sequence"][instance.first])
        orders.append(tuple(instance.action for instance in runs))
    return Schedule(credits.name, credits.stages, credits.chunks, credits.micro_batches, tuple(orders))


def without(pipeline: Pipeline, streams: Collection[str]) -> Pipeline:
    """The same pipeline, in which everything on some link streams takes no time."""
    for stream in streams:
        if stream == COMPUTE:
            raise PipelineError("the compute stream is what a step is for; name link streams to leave out.")

    def quiet(segment: Segment) -> Segment:
        tasks = (replace(task, seconds=0.0) if task.stream in streams else task for task in segment.tasks)
        sends = 0.0 if P2P in streams else segment.sends_seconds
        return replace(segment, tasks=tuple(tasks), sends_seconds=sends)

    def all_quiet(segments: Mapping) -> dict:
        # Chunks that are alike share their segment; they still do afterwards.
        known: dict[int, Segment] = {}
        for segment in segments.values():
            if id(segment) not in known:
                known[id(segment)] = quiet(segment)
        return {key: known[id(segment)] for key, segment in segments.items()}

    return replace(
        pipeline,
        segments=all_quiet(pipeline.segments),
        first=all_quiet(pipeline.first),
        last=all_quiet(pipeline.last),
        before=tuple(map(quiet, pipeline.before)),
        after=tuple(map(quiet, pipeline.after)),
    )


MOST_EVENTS = 20_000_000
"""How many tasks a simulated step may have; the tables of more do not fit in a usual machine's memory."""


def _prepare(pipeline: Pipeline, plan: Schedule | Credits) -> tuple[EventGraph, Engine]:
    count = pipeline.micro_batches * sum(len(segment.tasks) for segment in pipeline.segments.values())
    if count > MOST_EVENTS:
        raise PipelineError(
            f"the step has {count:,} tasks in {pipeline.micro_batches:,} micro-batches, more than {MOST_EVENTS:,}; "
            "simulate fewer micro-batches, of which a step's length is linear."
        )
    graph = EventGraph(pipeline, plan)
    engine = Engine(
        graph.arrays, pipeline.stages, len(graph.streams), max(len(graph.links), 1), pipeline.compute_slowdown
    )
    return graph, engine


def _check_fit(pipeline: Pipeline, plan: Schedule | Credits) -> None:
    sizes = [(item.stages, item.chunks, item.micro_batches) for item in (pipeline, plan)]
    if sizes[0] != sizes[1]:
        texts = ["{} stages of {} chunks with {} micro-batches".format(*size) for size in sizes]
        raise PipelineError(f"schedule {plan.name} is for {texts[1]}; the pipeline has {texts[0]}.")
    phases = plan.phases if isinstance(plan, Schedule) else tuple(plan.queues[0])
    if set(phases) != set(pipeline.phases):
        raise PipelineError(
            f"schedule {plan.name} runs {', '.join(phases)}; the pipeline has {', '.join(pipeline.phases)}. "
            "Give schedule_named the pipeline's phases; zero-bubble needs weight segments beside the backward ones."
        )


def _deadlock(graph: EventGraph, sequence: np.ndarray) -> PipelineError:
    waiting = []
    for stage, mine in enumerate(graph.by_stage):
        stuck = next((item for item in mine if sequence[item.end] < 0), None)
        if stuck is not None:
            phase, chunk, _ = stuck.action
            waiting.append(f"stage {stage} for {phase if chunk < 0 else describe(stuck.action)}")
    return PipelineError(
        f"schedule {graph.plan.name}: the stages wait for each other ({'; '.join(waiting[:4])}); change their "
        "orders or give them more buffers."
    )


def _step(graph: EventGraph, schedule: Schedule, result: dict) -> SimulatedStep:
    arrays = graph.arrays
    step_seconds = float(result["stop"].max(initial=0.0))
    nodes = np.flatnonzero(graph.stream >= 0)
    number = np.full(graph.size, -1, np.int64)
    number[nodes] = np.arange(len(nodes))
    latest = latest_stops(
        arrays["successor_start"],
        arrays["successor"],
        result["following"],
        arrays["meeting"],
        arrays["member_start"],
        arrays["member"],
        np.argsort(result["sequence"], kind="stable"),
        result["start"],
        result["stop"],
        step_seconds,
    )
    events = Events(
        result["start"][nodes],
        result["stop"][nodes],
        arrays["slot"][nodes] // len(graph.streams),
        graph.stream[nodes],
        graph.instance[nodes],
        graph.task[nodes],
        np.maximum(latest[nodes] - result["stop"][nodes], 0.0),
    )
    times, stages, sizes = result["samples"]
    resident = graph.pipeline.resident_bytes or (0,) * graph.pipeline.stages
    memory = []
    for stage, always in enumerate(resident):
        mine = stages == stage
        memory.append(
            (np.concatenate([[0.0], times[mine]]), np.concatenate([[0], sizes[mine]]).astype(np.int64) + always)
        )
    return SimulatedStep(
        graph.pipeline,
        schedule,
        graph.streams,
        step_seconds,
        result["busy"],
        result["exposed"],
        tuple(memory),
        tuple(int(peak) + always for peak, always in zip(result["peak"], resident)),
        tuple((instance.stage, instance.action) for instance in graph.instances),
        events,
        _critical_path(result, number),
    )


def _critical_path(result: dict, number: np.ndarray) -> np.ndarray:
    """Back from the event that ends the step, each time to the one whose end let it start."""
    path: list[int] = []
    tasks = np.flatnonzero(number >= 0)
    if not len(tasks):
        return np.array([], np.int64)
    node = int(tasks[np.argmax(result["stop"][tasks])])
    while node >= 0:
        if number[node] >= 0:
            path.append(int(number[node]))
        node = int(result["cause"][node])
    return np.array(path[::-1], np.int64)
