"""Reduced-cost fixing: strategies and pairs that no choice below a cutoff can use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp.planner.solver.core import Core
from sbp.planner.solver.dual import Dual
from sbp.planner.solver.marginals import forest, forest_marginals
from sbp.planner.solver.reducer import FORBIDDEN_COST

FORESTS = 8


@dataclass(frozen=True, eq=False)
class ReducedCosts:
    """An exact bound and what forcing each strategy or table entry adds to it at least (all integers >= 0).

    `strategy` and `entry` are the reparametrised costs: for every choice, cost + prices . (load - capacity) is at
    least the bound plus their sum. `fraction` is what rounding down took
    from each strategy, `bound_fraction` what it took from the bound. `strategy_marginal`, `entry_marginal` are
    the larger numbers for one strategy or entry alone.
    """

    bound: int
    strategy: np.ndarray
    entry: np.ndarray
    fraction: np.ndarray
    bound_fraction: float
    strategy_marginal: np.ndarray
    entry_marginal: np.ndarray
    prices: np.ndarray

    def beyond(self, core: Core, cutoff: int) -> tuple[np.ndarray, np.ndarray]:
        """Strategies and table entries that only choices costing more than `cutoff` use."""
        room = cutoff - self.bound
        return self.strategy_marginal > room, (self.entry_marginal > room) & (core.table_values < FORBIDDEN_COST // 2)


def reduced_costs(core: Core, dual: Dual, seed: int = 0, forests: int = FORESTS) -> ReducedCosts:
    """Exact reduced costs at the dual's current point, sharpened over random spanning forests."""
    bound, strategy, entry, fraction, bound_fraction = dual.exact(True)
    strategy_marginal, entry_marginal = strategy.copy(), np.minimum(entry, FORBIDDEN_COST // 2)
    random = np.random.default_rng(seed)
    for _ in range(forests):
        order, parent = forest(core.node_count, core.edge_nodes, random.permutation(len(core.edge_nodes)))
        strategies, entries = forest_marginals(core, strategy, entry, order, parent)
        np.maximum(strategy_marginal, strategies, out=strategy_marginal)
        np.maximum(entry_marginal, entries, out=entry_marginal)
    return ReducedCosts(
        bound, strategy, entry, fraction, bound_fraction, strategy_marginal, entry_marginal, dual.prices
    )
