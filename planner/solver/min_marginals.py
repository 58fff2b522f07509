"""What each strategy costs at best: the optimum with the strategy forced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from sbp.planner.problem import FORBIDDEN_INTEGER, Problem
from sbp.planner.solver.pipeline import solve
from sbp.planner.solver.result import Assignment, Clock, Limits, Status


@dataclass(frozen=True, eq=False)
class MinMarginals:
    """Per strategy of the asked nodes the best objective with it forced; ``inf`` where nothing is feasible with it.

    Attributes
    ----------
    best : Assignment
        The unforced problem's.
    values : float64 (strategies,)
        In the problem's unit; NaN for nodes that were not asked for.
    exact : bool (strategies,)
        Whether the value is proven optimal; a lower bound otherwise.
    """

    best: Assignment
    values: np.ndarray
    exact: np.ndarray

    def of(self, problem: Problem, node: int) -> np.ndarray:
        """The values of one node's strategies."""
        return self.values[problem.node_offsets[node] : problem.node_offsets[node + 1]]


def forced(problem: Problem, node: int, strategy: int) -> Problem:
    """The problem with every other strategy of a node forbidden."""
    costs = problem.costs.copy()
    inside = slice(problem.node_offsets[node], problem.node_offsets[node + 1])
    kept = costs[problem.node_offsets[node] + strategy]
    costs[inside] = FORBIDDEN_INTEGER if problem.is_integer else np.inf
    costs[problem.node_offsets[node] + strategy] = kept
    return replace(problem, costs=costs)


def min_marginals(problem: Problem, limits: Limits | None = None, nodes: Iterable[int] | None = None) -> MinMarginals:
    """Min-marginals of some nodes (all if None), one exact solve each within the time limit of all together.

    When the time is used, what is left holds the best known lower bound, marked as not exact.
    """
    limits = limits or Limits()
    clock = Clock(limits.time_limit)
    best = solve(problem, limits)
    values = np.full(problem.strategy_count, np.nan)
    exact = np.zeros(problem.strategy_count, bool)
    forbidden = problem.forbidden_costs()
    for node in range(problem.node_count) if nodes is None else nodes:
        for strategy in range(problem.strategies(node)):
            index = problem.node_offsets[node] + strategy
            if forbidden[index] or best.status is Status.INFEASIBLE:
                values[index], exact[index] = np.inf, True
            elif best.choice is not None and best.choice[node] == strategy:
                values[index] = best.objective if best.status is Status.OPTIMAL else best.lower_bound
                exact[index] = best.status is Status.OPTIMAL
            elif clock.expired():
                values[index] = best.lower_bound
            else:
                found = solve(forced(problem, node, strategy), replace(limits, time_limit=clock.left), explain=False)
                exact[index] = found.status in (Status.OPTIMAL, Status.INFEASIBLE)
                value = found.objective if found.status is Status.OPTIMAL else found.lower_bound
                values[index] = max(value, best.lower_bound)
    return MinMarginals(best, values, exact)
