"""Other solvers behind the same protocol, for comparison: the plain model by OR-Tools and by pytoulbar2."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbp.errors import ProblemError
from sbp.planner.problem import Problem, evaluate
from sbp.planner.solver.core import Core
from sbp.planner.solver.ilp import FORMULATIONS, IlpResult, solve_ilp
from sbp.planner.solver.pipeline import solve
from sbp.planner.solver.result import Assignment, Clock, Limits, Solver, Status, relative_gap
from sbp.planner.solver.scale import IntegerProblem, scaled
from sbp.planner.solver.toulbar2 import solve_toulbar2
from sbp.planner.solver.worker import GRACE, IlpProcess


@dataclass(frozen=True)
class OurSolver:
    """`solve`, with stages left out on demand."""

    without: tuple[str, ...] = ()
    name: str = "sbp"

    def solve(self, problem: Problem, limits: Limits) -> Assignment:
        return solve(problem, limits, without=self.without)


@dataclass(frozen=True)
class PlainModel:
    """The unreduced problem, given to a solver in a process that can be ended at the limit."""

    name: str
    by: Callable[..., IlpResult]
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = "ortools"

    def solve(self, problem: Problem, limits: Limits) -> Assignment:
        if importlib.util.find_spec(self.package) is None:
            raise ProblemError(
                f"the solver {self.name} needs the package {self.package}: pip install {self.package}"
            )
        clock = Clock(limits.time_limit)
        integer = scaled(problem)
        if _forbidden_everywhere(integer):
            return _infeasible()
        process = IlpProcess()
        try:
            result = process.solve(
                whole_core(integer),
                max(clock.left - GRACE, 0.5 * clock.left),
                clock=clock,
                by=self.by,
                threads=limits.threads,
                seed=limits.seed,
                **self.options,
            )
        finally:
            process.kill()
        lower: int | float = integer.to_problem_unit(result.lower_bound)
        statistics: dict[str, Any] = {"seconds": clock.elapsed}
        if result.choice is None:
            if result.finished:
                return _infeasible()
            return Assignment(
                Status.TIME_LIMIT, None, math.inf, lower, math.inf, "no choice in time", statistics=statistics
            )
        objective = evaluate(problem, result.choice).cost
        if result.finished:
            lower = objective
        gap = relative_gap(objective, lower)
        status = Status.OPTIMAL if result.finished else Status.FEASIBLE
        return Assignment(
            status, result.choice, objective, min(lower, objective), gap, self.name, statistics=statistics
        )


def solvers() -> dict[str, Solver]:
    """Every solver by its name."""
    found: dict[str, Solver] = {"sbp": OurSolver()}
    for name in FORMULATIONS:
        # All memory rows, added lazily.
        found[name] = PlainModel(name, solve_ilp, {"solver": name})
    found["toulbar2"] = PlainModel("toulbar2", solve_toulbar2, package="pytoulbar2")
    return found


def whole_core(integer: IntegerProblem) -> Core:
    """The problem as it is, in a core's arrays: nothing eliminated, tables no longer shared."""
    sizes = np.diff(integer.table_offsets)[integer.edge_tables] if len(integer.edge_tables) else np.empty(0, np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    parts = [
        integer.table_values[integer.table_offsets[table] : integer.table_offsets[table + 1]]
        for table in integer.edge_tables.tolist()
    ]
    count = integer.node_count
    counts = np.diff(integer.node_offsets)
    return Core(
        nodes=np.arange(count, dtype=np.int32),
        node_offsets=integer.node_offsets.copy(),
        costs=integer.costs.copy(),
        original=(np.arange(len(integer.costs)) - np.repeat(integer.node_offsets[:-1], counts)).astype(np.int32),
        edge_nodes=integer.edge_nodes.copy(),
        table_offsets=offsets,
        table_values=np.concatenate(parts) if parts else np.empty(0, np.int64),
        piece_nodes=integer.piece_nodes.copy(),
        piece_rows=integer.piece_rows.copy(),
        piece_offsets=integer.piece_offsets.copy(),
        piece_usages=integer.piece_usages.copy(),
        capacities=integer.capacities.copy(),
        rows=np.arange(len(integer.capacities), dtype=np.int32),
        constant=0,
    )


def _forbidden_everywhere(integer: IntegerProblem) -> bool:
    cheapest = np.minimum.reduceat(integer.costs, integer.node_offsets[:-1])
    return bool((cheapest >= 1 << 59).any())


def _infeasible() -> Assignment:
    return Assignment(Status.INFEASIBLE, None, math.inf, math.inf, 0.0, "the integer program is infeasible")
