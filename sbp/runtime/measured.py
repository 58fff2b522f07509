"""Measured kernels: what each kind of operation took on these ranks, and plans priced with that.

Two operations are of one kind if they run the same kernel (or collective) on local arrays of the same shapes. So a
short program measured once prices any longer one that is made of the same kinds.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from sbp.errors import PlanError
from sbp.planner.physical import Compute, Operation, PhysicalPlan
from sbp.planner.timing import operation_name
from sbp.runtime.actors import PipelineStep
from sbp.runtime.boxing import Local
from sbp.runtime.executor import Executor


def kind_of(operation: Operation, physical: PhysicalPlan) -> Hashable:
    """What an operation's time depends on: kernel, attributes, and its registers' types and layouts."""
    registers = physical.registers
    places = tuple(
        (registers[number].type, registers[number].layout) for number in (*operation.inputs, *operation.outputs)
    )
    if isinstance(operation, Compute):
        return operation.op, tuple(sorted((key, str(value)) for key, value in operation.attributes.items())), places
    return operation.kind, operation.mesh_axis, places


def measured_seconds(
    executor: Executor, state: Mapping[str, Local], feeds: Mapping[str, Local], steps: int = 5
) -> dict[Hashable, float]:
    """Kind of operation -> mean of its seconds over all operations of the kind in some timed steps.

    The first step is not counted: it fills caches.
    """
    timelines = [executor.run(state, feeds, timed=True).timeline for _ in range(steps + 1)]
    return mean_seconds(executor.physical, timelines[1:])


def mean_seconds(physical: PhysicalPlan, timelines: Iterable[Sequence[tuple[float, float]]]) -> dict[Hashable, float]:
    """Kind of operation -> mean of its seconds in timelines of the plan (`StepResult.timeline`).

    The mean and not the median, because times are added up to a step: what disturbs one operation in ten counts.
    """
    return _mean_of_runs(physical, ((at, *times) for timeline in timelines for at, times in enumerate(timeline)))


def mean_seconds_of_actors(physical: PhysicalPlan, steps: Iterable[PipelineStep]) -> dict[Hashable, float]:
    """The same of a cut plan's timed steps (`PipelineStep.timelines`): what kernels take while other stages work."""
    return _mean_of_runs(physical, (ran for step in steps for timeline in step.timelines for ran in timeline))


def _mean_of_runs(physical: PhysicalPlan, runs: Iterable[tuple[int, float, float]]) -> dict[Hashable, float]:
    """Of (number of an operation, start, stop)."""
    kinds = [kind_of(operation, physical) for operation in physical.operations]
    found: dict[Hashable, list[float]] = {}
    for at, start, stop in runs:
        found.setdefault(kinds[at], []).append(stop - start)
    return {kind: fmean(seconds) for kind, seconds in found.items()}


def with_measured(physical: PhysicalPlan, seconds: Mapping[Hashable, float]) -> PhysicalPlan:
    """The same plan, whose operations take what their kinds were measured to take.

    Raises
    ------
    PlanError
        An operation is of a kind that was not measured.
    """
    operations = []
    for operation in physical.operations:
        kind = kind_of(operation, physical)
        if kind not in seconds:
            raise PlanError(
                f"{operation_name(operation, physical)}: no operation of its kind was measured; measure a plan that "
                "has the same kernels on the same local shapes."
            )
        measured = replace(operation, seconds=seconds[kind])
        # What was measured is the operation as a whole.
        operations.append(replace(measured, borders=()) if isinstance(measured, Compute) else measured)
    return replace(physical, operations=tuple(operations))
