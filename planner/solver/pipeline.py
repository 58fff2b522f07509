"""The default solver: the stages in order, each switchable."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sbp.planner.problem import Problem, evaluate
from sbp.planner.solver.core import Reduction, reduced
from sbp.planner.solver.ilp import solve_ilp
from sbp.planner.solver.reducer import SWITCH_ALL
from sbp.planner.solver.result import Assignment, Clock, Limits, Progress, Status, relative_gap
from sbp.planner.solver.scale import IntegerProblem, scaled

STAGES = ("reduce", "ilp")
GAP_TOLERANCE = 1e-9
"""A float64 problem counts as solved when the gap is below this: costs are scaled to integers and rounded down."""


def solve(
    problem: Problem,
    limits: Limits | None = None,
    *,
    without: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> Assignment:
    """Solve a layout problem.

    Parameters
    ----------
    problem : Problem
    limits : Limits
        Time, processes and seed; 60 s, 2 and 0 when not given.
    without : names of `STAGES`
        Stages to leave out. The result is then weaker, never wrong.
    progress : callable
        Called with (incumbent, lower bound, stage) whenever one of them improves.

    Returns
    -------
    Assignment
        Never raises for infeasible problems or exhausted time: see `Assignment.status`.
    """
    limits = limits or Limits()
    clock = Clock(limits.time_limit)
    statistics: dict[str, Any] = {}
    integer = scaled(problem)
    state = _State(problem, integer, clock, limits, statistics, progress)
    switches = 0 if "reduce" in without else SWITCH_ALL

    # Memory first ignored: eliminations are then unrestricted, and if the result fits, it is optimal.
    free = reduced(integer.with_rows(np.zeros(len(integer.row_times), bool)), switches, clock.expired)
    if not free.feasible:
        return state.infeasible("forbidden pairs leave a node without a strategy", free.reducer.infeasible_node)
    state.raise_bound(free.core.constant, "reduce")
    _by_ilp(state, free, "free")
    if state.closed or not len(integer.row_times):
        return state.finish()
    bound = reduced(integer, switches, clock.expired)
    if not bound.feasible:
        return state.infeasible("memory", bound.reducer.infeasible_node)
    _by_ilp(state, bound, "memory")
    return state.finish()


class _State:
    """Incumbent and bound, in the integer problem's units."""

    def __init__(self, problem: Problem, integer: IntegerProblem, clock: Clock, limits: Limits, statistics: dict, progress) -> None:
        self.problem, self.integer, self.clock, self.limits, self.statistics = problem, integer, clock, limits, statistics
        self.progress = progress
        self.choice: np.ndarray | None = None
        self.upper: int | None = None
        self.lower: int | None = None
        self.proof = ""
        self.proven_infeasible: Assignment | None = None

    def offer(self, choice: np.ndarray, stage: str) -> bool:
        """Take over a full choice if it is feasible and better."""
        cost = self.integer.cost(choice)
        if cost >= 1 << 59 or (len(self.integer.row_times) and (self.integer.loads(choice) > self.integer.capacities).any()):
            return False
        if self.upper is not None and cost >= self.upper:
            return False
        self.choice, self.upper = choice, cost
        self.report(stage)
        return True

    def raise_bound(self, bound: int, stage: str) -> None:
        if self.lower is None or bound > self.lower:
            self.lower = bound
            self.proof = stage
            self.report(stage)

    def report(self, stage: str) -> None:
        if self.progress:
            upper = math.inf if self.upper is None else self.integer.to_problem_unit(self.upper)
            lower = -math.inf if self.lower is None else self.integer.to_problem_unit(self.lower)
            self.progress(upper, lower, stage)

    @property
    def closed(self) -> bool:
        return self.upper is not None and self.lower is not None and self.lower >= self.upper

    def infeasible(self, because: str, node: int = -1) -> Assignment:
        return Assignment(Status.INFEASIBLE, None, math.inf, math.inf, 0.0, because, self.statistics)

    def finish(self) -> Assignment:
        if self.proven_infeasible is not None:
            return self.proven_infeasible
        lower = -math.inf if self.lower is None else self.integer.to_problem_unit(self.lower)
        self.statistics["seconds"] = self.clock.elapsed
        if self.choice is None:
            return Assignment(Status.TIME_LIMIT, None, math.inf, lower, math.inf, "no choice was found in time", self.statistics)
        objective = evaluate(self.problem, self.choice).cost
        if self.integer.exact and self.closed:
            lower = objective
        lower = min(lower, objective)
        gap = relative_gap(objective, lower)
        optimal = gap == 0 if self.integer.exact else gap <= GAP_TOLERANCE
        return Assignment(Status.OPTIMAL if optimal else Status.FEASIBLE, self.choice, objective, lower, gap, self.proof, self.statistics)


def _by_ilp(state: _State, reduction: Reduction, stage: str) -> None:
    """Solve a reduction by the integer program. With all rows in it the search is complete."""
    core = reduction.core
    complete = len(reduction.problem.row_times) == len(state.integer.row_times)
    result = solve_ilp(core, state.clock.left, threads=state.limits.threads, seed=state.limits.seed)
    if result.choice is not None:
        state.offer(reduction.undo(result.choice), stage)
    if result.finished and result.choice is None and complete:
        state.proven_infeasible = state.infeasible("memory")
    state.raise_bound(result.lower_bound, stage)
