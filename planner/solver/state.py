"""Incumbent and bound of a solve, shared by its stages."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import Any

import numpy as np

from sbp.planner.problem import Problem, evaluate
from sbp.planner.solver.core import Reduction
from sbp.planner.solver.reducer import FORBIDDEN_COST
from sbp.planner.solver.result import Assignment, Clock, Limits, Progress, Start, Status, relative_gap
from sbp.planner.solver.scale import IntegerProblem
from sbp.planner.solver.worker import IlpProcess

GAP_TOLERANCE = 1e-9
"""A float64 problem counts as solved when the gap is below this: costs are scaled to integers and rounded down."""


class State:
    """Incumbent and bound in the integer problem's units; every choice is checked in integers before it is taken."""

    def __init__(
        self,
        problem: Problem,
        integer: IntegerProblem,
        clock: Clock,
        limits: Limits,
        progress: Progress | None,
        start: Start | None = None,
    ) -> None:
        self.problem, self.integer, self.clock, self.limits, self.progress = problem, integer, clock, limits, progress
        self.start = start
        self.choice: np.ndarray | None = None
        self.upper: int | None = None
        self.lower: int | None = None
        self.proof = ""
        self.infeasible_because: str | None = None
        self.process = IlpProcess()
        self.search: Any = None
        """The neighbourhood search that goes on while integer programs run (see `lns.Neighbourhoods`)."""
        self.patience = 8.0
        """Seconds that the next integer program may take."""
        self.annealing: Any = None
        """The annealing that goes on in another process (see `aside.AnnealProcess`)."""
        self.statistics: dict[str, Any] = {"stage_seconds": {}, "incumbents": []}

    @contextmanager
    def stage(self, name: str):
        """Account the time inside to a stage."""
        start = time.monotonic()
        try:
            yield
        finally:
            seconds = self.statistics["stage_seconds"]
            seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start

    def offer(self, choice: np.ndarray, stage: str) -> bool:
        """Take over a full choice if it is feasible and better."""
        integer = self.integer
        cost = integer.cost(choice)
        if cost >= FORBIDDEN_COST or (self.upper is not None and cost >= self.upper):
            return False
        if len(integer.row_times) and (integer.loads(choice) > integer.capacities).any():
            return False
        self.choice, self.upper = choice, cost
        self.statistics["incumbents"].append((round(self.clock.elapsed, 3), integer.to_problem_unit(cost), stage))
        self.report(stage)
        return True

    def offer_start(self) -> None:
        """Take over the choice that the caller starts from, the first time this is called."""
        if self.start is not None:
            start, self.start = self.start, None
            with self.stage("start"):
                choice = start()
                if choice is not None:
                    self.offer(np.asarray(choice, np.int64), "start")

    def offer_core(self, reduction: Reduction, choice: np.ndarray, stage: str) -> bool:
        """Take over a choice of a reduction's core."""
        return self.offer(reduction.undo(np.asarray(choice, np.int64)), stage)

    def fork(self) -> State:
        """A state with the same incumbent, and a clock of its own, for a search whose finds may yet be dropped."""
        other = State(self.problem, self.integer, Clock(self.clock.left), self.limits, None)
        other.choice, other.upper, other.lower = self.choice, self.upper, self.lower
        return other

    def adopt(self, other: State, stage: str) -> None:
        """Take over a fork's incumbent."""
        if other.choice is not None:
            self.offer(other.choice, stage)

    def raise_bound(self, bound: int, stage: str) -> None:
        """Take over a proven lower bound. Bounds above the incumbent mean that it is optimal."""
        if self.upper is not None:
            bound = min(bound, self.upper)
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
        """Whether nothing is left to prove."""
        if self.infeasible_because is not None:
            return True
        if self.upper is None or self.lower is None:
            return False
        if self.integer.exact:
            return self.lower >= self.upper
        # Half of the tolerance: rounding the costs down takes a little more when the bound is stated.
        return self.upper - self.lower <= 0.5 * GAP_TOLERANCE * abs(self.upper)

    def declare_infeasible(self, because: str) -> None:
        """Only after a proof."""
        self.infeasible_because = because

    def assignment(self) -> Assignment:
        """What is known now."""
        self.statistics["seconds"] = self.clock.elapsed
        self.statistics["reproducible"] = not self.clock.felt
        if self.choice is None:
            if self.infeasible_because is not None:
                return Assignment(
                    Status.INFEASIBLE,
                    None,
                    math.inf,
                    math.inf,
                    0.0,
                    self.infeasible_because,
                    statistics=self.statistics,
                )
            lower = -math.inf if self.lower is None else self.integer.to_problem_unit(self.lower)
            reason = "the time limit passed before a choice was found"
            return Assignment(Status.TIME_LIMIT, None, math.inf, lower, math.inf, reason, statistics=self.statistics)
        objective = evaluate(self.problem, self.choice).cost
        lower = -math.inf if self.lower is None else self.integer.to_problem_unit(self.lower)
        if self.integer.exact and self.closed:
            lower = objective
        lower = min(lower, objective)
        gap = relative_gap(objective, lower)
        if gap == 0 if self.integer.exact else gap <= GAP_TOLERANCE:
            return Assignment(
                Status.OPTIMAL, self.choice, objective, lower, gap, self.proof, statistics=self.statistics
            )
        return Assignment(Status.FEASIBLE, self.choice, objective, lower, gap, self.proof, statistics=self.statistics)
