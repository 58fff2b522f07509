"""Other solvers behind the same protocol, for comparison: the plain model by OR-Tools, pytoulbar2, enumeration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbp.errors import ProblemError
from sbp.planner.problem import Problem, evaluate
from sbp.planner.solver.core import Core
from sbp.planner.solver.ilp import FORMULATIONS
from sbp.planner.solver.pipeline import solve
from sbp.planner.solver.result import Assignment, Clock, Limits, Solver, Status, relative_gap
from sbp.planner.solver.scale import IntegerProblem, scaled
from sbp.planner.solver.worker import IlpProcess


@dataclass(frozen=True)
class OurSolver:
    """`solve`, with stages left out on demand."""

    without: tuple[str, ...] = ()
    name: str = "sbp"

    def solve(self, problem: Problem, limits: Limits) -> Assignment:
        return solve(problem, limits, without=self.without)


@dataclass(frozen=True)
class PlainIlp:
    """The unreduced problem as an integer program with all memory rows lazily added: "highs", "cp-sat" or "scip"."""

    name: str

    def solve(self, problem: Problem, limits: Limits) -> Assignment:
        clock = Clock(limits.time_limit)
        integer = scaled(problem)
        if _forbidden_everywhere(integer):
            return _infeasible()
        process = IlpProcess()
        try:
            result = process.solve(
                whole_core(integer), clock.left, solver=self.name, threads=limits.threads, seed=limits.seed
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


@dataclass(frozen=True)
class Toulbar2:
    """pytoulbar2 (not a dependency) on the unreduced problem; memory rows as pseudo-Boolean constraints."""

    name: str = "toulbar2"

    def solve(self, problem: Problem, limits: Limits) -> Assignment:
        try:
            import pytoulbar2
        except ImportError:
            raise ProblemError("the solver toulbar2 needs the package pytoulbar2: pip install pytoulbar2") from None
        clock = Clock(limits.time_limit)
        integer = scaled(problem)
        core = whole_core(integer)
        top = 2**59
        network = pytoulbar2.CFN(top)
        for node in range(core.node_count):
            network.AddVariable(str(node), range(int(core.sizes[node])))
            costs = core.costs[core.node_offsets[node] : core.node_offsets[node + 1]]
            network.AddFunction([str(node)], [min(int(cost), top) for cost in costs])
        for edge, (first, second) in enumerate(core.edge_nodes.tolist()):
            table = core.table_values[core.table_offsets[edge] : core.table_offsets[edge + 1]]
            network.AddFunction([str(first), str(second)], [min(int(cost), top) for cost in table])
        for row, capacity in enumerate(core.capacities.tolist()):
            live = np.flatnonzero((core.piece_rows[:, 0] <= row) & (row < core.piece_rows[:, 1]))
            terms = []
            for piece in live.tolist():
                usage = core.piece_usages[core.piece_offsets[piece] : core.piece_offsets[piece + 1]]
                terms += [(str(core.piece_nodes[piece]), value, int(amount)) for value, amount in enumerate(usage)]
            if terms:
                network.AddGeneralizedLinearConstraint(terms, operand="<=", rightcoef=int(capacity))
        answer = network.Solve(timeLimit=max(1, int(clock.left)))
        statistics = {"seconds": clock.elapsed}
        finished = clock.left > 0
        if not answer:
            if finished:
                return _infeasible()
            reason = "no choice in time"
            return Assignment(Status.TIME_LIMIT, None, math.inf, -math.inf, math.inf, reason, statistics=statistics)
        choice = np.array(answer[0], np.int64)
        objective = evaluate(problem, choice).cost
        lower = objective if finished else integer.to_problem_unit(int(network.GetDDualBound()))
        gap = relative_gap(objective, lower)
        status = Status.OPTIMAL if finished else Status.FEASIBLE
        return Assignment(status, choice, objective, lower, gap, self.name, statistics=statistics)


def solvers() -> dict[str, Solver]:
    """Every solver by its name."""
    found: dict[str, Solver] = {"sbp": OurSolver()}
    for name in FORMULATIONS:
        found[name] = PlainIlp(name)
    found["toulbar2"] = Toulbar2()
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
