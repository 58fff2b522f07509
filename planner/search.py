"""The best decisions on one mesh: formulate, solve, lower, and check the result against the problem it came from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sbp.errors import InfeasibleError, PlanError, TimeLimitError
from sbp.graph import Graph
from sbp.mesh import Mesh
from sbp.planner.arena import arena_of
from sbp.planner.boxing import BoxingTable
from sbp.planner.cost import CostModel
from sbp.planner.decisions import Decisions
from sbp.planner.formulation import Formulation, formulate
from sbp.planner.lowering import lower
from sbp.planner.memory import memory_profile
from sbp.planner.physical import PhysicalPlan
from sbp.planner.pins import Both
from sbp.planner.solver import Assignment, Limits, Status, solve
from sbp.planner.strategies import LEAST_FILL, Restriction, Strategies
from sbp.planner.styles import DataParallel, FullyShardedDataParallel, Styles

Progress = Callable[[str], None]

_AGREEMENT = 1e-9
"""Relative difference allowed between a solver's objective and the plan's, summed in another order."""

_MEMORY_ROUNDS = 4


class Outbid(Exception):
    """Every plan on the mesh costs more than the cutoff: at least `lower_bound_seconds`."""

    def __init__(self, lower_bound_seconds: float) -> None:
        super().__init__(lower_bound_seconds)
        self.lower_bound_seconds = lower_bound_seconds


@dataclass(frozen=True)
class Outcome:
    """What a search on one mesh found; `lower_bound_seconds` holds for every plan on that mesh."""

    mesh: Mesh
    decisions: Decisions
    physical: PhysicalPlan
    objective_seconds: float
    lower_bound_seconds: float
    status: Status
    reason: str

    @property
    def gap(self) -> float:
        """(objective - lower bound) / objective."""
        if self.objective_seconds <= 0:
            return 0.0
        return max(0.0, (self.objective_seconds - self.lower_bound_seconds) / self.objective_seconds)


def objective_seconds(physical: PhysicalPlan) -> float:
    """The objective of a finished plan: compute and boxing, operation by operation."""
    return math.fsum(operation.seconds for operation in physical.operations)


def search(
    graph: Graph,
    mesh: Mesh,
    costs: CostModel,
    memory_limit: int | None,
    limits: Limits,
    restriction: Restriction | None = None,
    least_fill: float = LEAST_FILL,
    progress: Progress | None = None,
    cutoff: float | None = None,
    hint: Decisions | None = None,
) -> Outcome:
    """The cheapest plan of a graph on a mesh whose memory stays within `memory_limit` bytes per device.

    The problem counts what values need; the finished plan also counts what is needed while layouts change, and the
    arena that all of it is put into (see `sbp.planner.arena`). Where that makes the plan exceed the limit, the problem
    is solved again under a limit that is smaller by the excess; the lower bound stays that of the first problem.

    Parameters
    ----------
    cutoff
        Seconds of a plan that is known already: the search stops as soon as its bound exceeds them.
    hint
        Decisions that a hard search starts from, where the problem offers them.

    Raises
    ------
    Outbid
        Nothing on this mesh is better than the cutoff.
    InfeasibleError, TimeLimitError
        Nothing fits (with the reason), or nothing was found in time.
    """

    def watch(incumbent: float, bound: float, stage: str) -> None:
        if cutoff is not None and bound > cutoff:
            raise Outbid(bound)

    started = time.monotonic()
    boxing = BoxingTable(mesh, costs)
    strategies = Strategies(graph, mesh, costs, boxing, restriction, least_fill)
    formulation = formulate(strategies, memory_limit)

    def start() -> np.ndarray | None:
        given = None if hint is None else formulation.encode(hint)
        if given is not None:
            return given
        return _choice_under_a_style(formulation, costs, boxing, restriction, least_fill, limits)

    limit, bound, least_peak = memory_limit, None, 1 << 62
    # However long the problem took to build, it is worth a try.
    deadline = max(started + limits.time_limit, time.monotonic() + limits.time_limit / 4)
    for _ in range(_MEMORY_ROUNDS):
        problem = formulation.problem.with_limit(limit)
        left = replace(limits, time_limit=max(deadline - time.monotonic(), 0.01))
        assignment = solve(problem, left, progress=watch, start=start)
        bound = float(assignment.lower_bound) if bound is None else bound
        if assignment.choice is None:
            if limit != memory_limit:
                break
            raise _nothing_found(formulation, assignment, memory_limit)
        decisions = formulation.decode(assignment.choice)
        physical = lower(graph, mesh, decisions, costs, boxing)
        total = objective_seconds(physical)
        promised = float(assignment.objective)
        # A choice that is not optimal may pay for copies that nobody reads; the plan never makes those.
        proven = assignment.status is Status.OPTIMAL
        peak = needed_bytes(physical, memory_limit)
        # With memory to spare only: unread copies may have stood for less memory than the plan then needs without them.
        fits = memory_limit is None or peak <= memory_limit
        if total > promised * (1 + _AGREEMENT) or (proven and fits and total < bound * (1 - _AGREEMENT)):
            raise PlanError(
                f"{graph.name} on {mesh}: the finished plan costs {total!r} s, the solver promised {promised!r} s with "
                f"a bound of {bound!r} s; this is a fault of sbp, please report it with the graph."
            )
        least_peak = min(peak, least_peak)
        if fits:
            status = assignment.status
            if status is Status.OPTIMAL and limit != memory_limit and total > bound:
                status = Status.FEASIBLE
            return Outcome(mesh, decisions, physical, total, min(bound, total), status, assignment.reason)
        assert limit is not None and memory_limit is not None
        limit -= max(peak - memory_limit, 1)
        if progress:
            progress(
                f"{mesh}: layout changes and holes between buffers need {peak - memory_limit:,} bytes more than the "
                "limit; solving again"
            )
        if limit <= 0:
            break
    raise InfeasibleError(
        f"{graph.name} on {mesh}: no plan was found within {memory_limit:,} bytes per device, though that none exists "
        f"is not proven: the best layouts need {least_peak - (memory_limit or 0):,} bytes more while they change. "
        "Allow that much more, or use more devices."
    )


def needed_bytes(physical: PhysicalPlan, memory_limit: int | None) -> int:
    """Bytes per device that a finished plan needs: held at once, and, if that is within the limit, put somewhere.

    The arena may need more than the peak, for the holes between buffers; how much is not looked at beyond the limit.
    """
    peak = memory_profile(physical).peak_bytes
    if memory_limit is not None and peak <= memory_limit:
        return max(peak, arena_of(physical, within=memory_limit, enough=memory_limit).size_bytes)
    return peak


def _choice_under_a_style(
    formulation: Formulation,
    costs: CostModel,
    boxing: BoxingTable,
    restriction: Restriction | None,
    least_fill: float,
    limits: Limits,
) -> np.ndarray | None:
    """Where a hard search starts: the best choice under the simplest styles, whose problems are solved in a moment."""
    graph, mesh = formulation.graph, formulation.strategies.mesh
    best: tuple[float, np.ndarray] | None = None
    for style in (DataParallel(), FullyShardedDataParallel()):
        narrowed = Both(restriction, Styles(graph, mesh, *(style for _ in mesh.shape)))
        try:
            strategies = Strategies(graph, mesh, costs, boxing, narrowed, least_fill)
            small = formulate(strategies, formulation.problem.usage_limit)
        except InfeasibleError:
            continue
        found = solve(small.problem, replace(limits, time_limit=min(limits.time_limit / 4, 10.0)), explain=False)
        choice = None if found.choice is None else formulation.encode(small.decode(found.choice))
        if choice is not None and (best is None or found.objective < best[0]):
            best = float(found.objective), choice
    return None if best is None else best[1]


def _nothing_found(formulation: Formulation, assignment: Assignment, memory_limit: int | None) -> Exception:
    where = f"{formulation.graph.name} on {formulation.strategies.mesh}"
    if assignment.status is not Status.INFEASIBLE:
        return TimeLimitError(
            f"{where}: no plan was found within the time limit (lower bound {assignment.lower_bound:.6g} s); give more "
            "time or a larger memory limit."
        )
    shortage = assignment.shortage
    if shortage is None or shortage.smallest_peak is None or memory_limit is None:
        return InfeasibleError(f"{where}: {assignment.reason}.")
    by_kind: dict[str, int] = {}
    by_value: dict[str, int] = {}
    for node, _, amount in shortage.users:
        kind, value = formulation.held_by(node)
        by_kind[kind] = by_kind.get(kind, 0) + amount
        by_value[value] = by_value.get(value, 0) + amount
    kinds = ", ".join(f"{kind} {gib(amount)}" for kind, amount in sorted(by_kind.items(), key=lambda item: -item[1]))
    values = ", ".join(f"{value} {gib(amount)}" for value, amount in sorted(by_value.items(), key=lambda i: -i[1])[:3])
    least = "the least that any layouts need" if shortage.exact else "the least that was found to do"
    return InfeasibleError(
        f"{where}: the limit is {gib(memory_limit)} per device, but {least} is {gib(shortage.smallest_peak)}, "
        f"{gib(shortage.smallest_peak - memory_limit)} too much ({kinds}; the largest: {values}). Use a smaller batch "
        "or sequence, recompute, more devices, or devices with more memory."
    )


def gib(size: int) -> str:
    """Bytes for people."""
    if size >= 2**28:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB" if size >= 2**20 else f"{size:,} bytes"
