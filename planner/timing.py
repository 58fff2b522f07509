"""Predicted timeline of a physical plan: the simulator on one stage, with a stream per mesh axis beside compute.

An operation starts when its inputs are there and its stream has done what stands before it in the program. What
communication does not hide behind compute is exposed: the step takes compute plus exposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbp.mesh import Mesh
from sbp.planner.borders import border_seconds
from sbp.planner.buffers import buffers_of
from sbp.planner.cluster import Cluster
from sbp.planner.collective import placements
from sbp.planner.memory import buffer_bytes
from sbp.planner.physical import COLLECTIVES, Box, Compute, Operation, PhysicalPlan
from sbp.planner.pipeline import COMPUTE, Pipeline, Segment, Task
from sbp.planner.simulator import SimulatedStep, simulate


@dataclass(frozen=True, eq=False)
class Timeline:
    """When every operation runs.

    Attributes
    ----------
    start, stop
        float64 (operations,): seconds from the start of the step; fetching borders belongs to an operation.
    streams
        Per operation its stream: "compute" or the name of a mesh axis.
    step
        The simulated step: exposed time by axis, critical path, slack, memory over time. Its events are the operations
        and, before those that have them, the fetching of their borders.
    """

    start: np.ndarray
    stop: np.ndarray
    streams: tuple[str, ...]
    step: SimulatedStep

    @property
    def step_seconds(self) -> float:
        """Length of the step."""
        return self.step.step_seconds

    def busy_seconds(self, stream: str) -> float:
        """Time during which a stream works."""
        if stream not in self.step.streams:
            return 0.0
        return float(self.step.busy_seconds[0, self.step.streams.index(stream)])

    @property
    def compute_seconds(self) -> float:
        """Length of the step without communication: kernels that nothing slows down."""
        return self.step.compute_only_seconds

    @property
    def exposed_seconds(self) -> float:
        """Time that communication adds to the step: step less compute-only step."""
        return max(self.step.exposed_communication_seconds, 0.0)

    @property
    def exposed_by_axis(self) -> dict[str, float]:
        """Mesh axis -> how long compute stood still while its collectives ran; several at once share that time."""
        found = self.step.breakdown_seconds
        return {stream: found[stream] for stream in self.step.streams[1:]}


def predict_timeline(
    physical: PhysicalPlan,
    links: Mapping[str, str] | None = None,
    compute_slowdown: float = 0.0,
    overlap: bool = True,
) -> Timeline:
    """Play the plan on its streams.

    Parameters
    ----------
    links
        Mesh axis -> link that its collectives use, as `links_of` finds; axes on the same link share its speed while
        both use it. Default a link of its own for each.
    compute_slowdown
        As in `Pipeline`.
    overlap
        False plays everything on one stream, as the ranks of one process do.
    """
    pipeline = pipeline_of(physical, links, compute_slowdown, overlap)
    step = simulate(pipeline, "gpipe")
    tasks = pipeline.segments[0, "forward"].tasks
    counts = [1 + (len(_borders(operation)) if overlap else 0) for operation in physical.operations]
    last = np.cumsum(counts, dtype=np.int64) - 1
    first = last - np.array(counts, dtype=np.int64) + 1
    streams = tuple(tasks[at].stream for at in last)
    return Timeline(step.events.start[first], step.events.stop[last], streams, step)


def pipeline_of(
    physical: PhysicalPlan,
    links: Mapping[str, str] | None = None,
    compute_slowdown: float = 0.0,
    overlap: bool = True,
) -> Pipeline:
    """The plan as a pipeline of one stage with one segment, whose tasks are the plan's operations.

    Memory is taken when the operation that first needs a buffer starts, and given back when the last in program order
    that needs it ends; what is there before the step is resident.
    """
    made: dict[int, int] = {}
    allocates, frees = [0] * len(physical.operations), [0] * len(physical.operations)
    resident, there = 0, set(physical.sources.values())
    for buffer in buffers_of(physical).buffers:
        size = buffer_bytes(physical, buffer)
        if buffer.registers[0] in there or not physical.operations:
            resident += size
        else:
            allocates[buffer.start] += size
        if buffer.stop < len(physical.operations):
            frees[buffer.stop - 1] += size
    tasks: list[Task] = []
    for at, operation in enumerate(physical.operations):
        inputs = sorted({made[number] for number in operation.inputs if number in made})
        name, held = operation_name(operation, physical), (allocates[at], frees[at])
        tasks += tasks_of(operation, name, physical.mesh, len(tasks), inputs, *held, overlap)
        made.update(dict.fromkeys(operation.outputs, len(tasks) - 1))
    segments = {(0, "forward"): Segment("forward", tuple(tasks))}
    return Pipeline(
        1,
        1,
        1,
        segments,
        links=dict(links or {}),
        compute_slowdown=compute_slowdown,
        resident_bytes=(resident,),
    )


def tasks_of(
    operation: Operation,
    name: str,
    mesh: Mesh,
    first: int,
    inputs: Sequence[int],
    allocates: int,
    frees: int,
    overlap: bool = True,
) -> list[Task]:
    """An operation as tasks of a segment, of which the last is the operation itself.

    Borders are fetched before it on the streams of their mesh axes, one after another, as the executor does.

    Parameters
    ----------
    first
        How many tasks the segment has already.
    inputs
        The tasks that make what the operation reads.
    allocates, frees
        Bytes, without the operation's workspace.
    """
    fetched = [(axis, seconds) for axis, seconds in _borders(operation) if overlap]
    tasks: list[Task] = []
    for axis, seconds in fetched:
        before = inputs if not tasks else [first + len(tasks) - 1]
        tasks.append(Task(f"borders of {name}", mesh.names[axis], seconds, tuple(before)))
    kernel = operation.seconds if not fetched else max(0.0, operation.seconds - border_seconds(fetched))
    stream = stream_of(operation, mesh) if overlap else COMPUTE
    before = inputs if not tasks else [first + len(tasks) - 1]
    tasks.append(Task(name, stream, kernel, tuple(before)))
    tasks[0] = replace(tasks[0], allocates=allocates + operation.workspace)
    tasks[-1] = replace(tasks[-1], frees=frees + operation.workspace)
    return tasks


def _borders(operation: Operation) -> tuple[tuple[int, float], ...]:
    return operation.borders if isinstance(operation, Compute) else ()


def stream_of(operation: Operation, mesh: Mesh) -> str:
    """Where an operation runs: on its mesh axis if it is a collective, else with the kernels."""
    if isinstance(operation, Box) and operation.kind in COLLECTIVES:
        return mesh.names[operation.mesh_axis]
    return COMPUTE


def operation_name(operation: Operation, physical: PhysicalPlan) -> str:
    """The node, or the boxing step and the value that it moves."""
    if isinstance(operation, Compute):
        return operation.node
    return f"{operation.kind} {physical.registers[operation.inputs[0]].value}"


def links_of(mesh: Mesh, cluster: Cluster) -> dict[str, str]:
    """Mesh axis -> the outermost link tier on which ranks that differ along it meet; axes of one rank have none."""
    found = {}
    order = [tier.name for tier in cluster.tiers]
    for axis, name in enumerate(mesh.names):
        tiers = {place.meetings[-1].tier.name for place in placements(cluster, mesh.groups(axis)) if place.meetings}
        if tiers:
            found[name] = max(tiers, key=order.index)
    return found
