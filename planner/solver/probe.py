"""Probes: everything that costs at most a cutoff, searched completely.

Under an assumed cutoff close to the bound, reduced-cost fixing removes most of a problem; what is left is reduced,
bounded and
fixed again until it stalls, and then small enough for an integer program. A probe that finds nothing *proves* that
every choice
costs more than the cutoff, so cutoffs that grow from the bound upwards raise the bound until the optimum is met. No
incumbent is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sbp.planner.solver.bounds import ascended
from sbp.planner.solver.core import Reduction, reduced
from sbp.planner.solver.fixing import ReducedCosts, reduced_costs
from sbp.planner.solver.reducer import SWITCH_ALL
from sbp.planner.solver.result import Clock

ROUNDS = 12
PATIENCE = 3
SHRINK = 0.99
SHARE = 0.1
"""Of the time that is left, what the rounds of one probe may use."""


@dataclass(frozen=True, eq=False)
class Tightened:
    """What fixing left below a cutoff; `closed` says that nothing is left (every choice costs more)."""

    reduction: Reduction
    reduced: ReducedCosts | None
    closed: bool


def tightened(
    base: Reduction,
    cutoff: int,
    clock: Clock,
    *,
    known: ReducedCosts | None = None,
    prices: np.ndarray | None = None,
    seed: int = 0,
    switches: int = SWITCH_ALL,
    on_label: Callable[[Reduction, np.ndarray], object] | None = None,
) -> Tightened:
    """Rounds of bound, fix and reduce below `cutoff` on a copy of `base`.

    Dual solutions are degenerate: each has other marginals. Rounds alternate between going on from the last prices and
    starting from none, which together fix far more than either alone.

    Parameters
    ----------
    known : ReducedCosts or None
        Of ``base.core``, to start with.
    on_label : callable(reduction, choice)
        Called with feasible choices met on the way.
    """
    work = reduced(base, switches, clock.expired)
    rows = len(base.core.rows)
    if not work.feasible:
        return Tightened(work, None, True)
    prices = np.zeros(rows) if prices is None else prices.copy()
    if known is not None:
        # The copy's core equals the base's core node by node unless the switches differ.
        if len(known.strategy) == work.core.strategy_count and len(known.entry) == len(work.core.table_values):
            work = work.shrink(*known.beyond(work.core, cutoff), clock.expired)
        if known.prices is not None and len(known.prices) == rows:
            prices = known.prices.copy()
    best: ReducedCosts | None = None
    stalled = 0
    budget = clock.part(SHARE)
    for index in range(ROUNDS):
        if not work.feasible:
            return Tightened(work, None, True)
        core = work.core
        if core.node_count == 0:
            return Tightened(work, None, core.constant > cutoff)
        if budget.expired():
            break
        step = work

        def tell(dual, step=step):
            if on_label is not None:
                on_label(step, dual.feasible_labels)

        dual = ascended(core, budget, cutoff, prices[core.rows] if index % 2 == 0 else None, tell)
        costs = reduced_costs(core, dual, seed + index, 8 if index < 2 else 16)
        if costs.bound > cutoff:
            return Tightened(work, costs, True)
        best = costs
        prices[core.rows] = costs.prices
        before = core.strategy_count + 0.1 * len(core.table_values)
        forbidden, forbidden_entries = costs.beyond(core, cutoff)
        if not forbidden.any() and not forbidden_entries.any():
            stalled += 1
        else:
            work = work.shrink(forbidden, forbidden_entries, clock.expired)
            best = None
            if not work.feasible:
                return Tightened(work, None, True)
            after = work.core.strategy_count + 0.1 * len(work.core.table_values)
            stalled = stalled + 1 if after > SHRINK * before else 0
        if stalled >= PATIENCE:
            break
    if best is None and work.core.node_count:
        dual = ascended(work.core, clock.part(SHARE), cutoff, prices[work.core.rows])
        best = reduced_costs(work.core, dual, seed)
        if best.bound > cutoff:
            return Tightened(work, best, True)
    if work.core.node_count == 0:
        return Tightened(work, None, work.core.constant > cutoff)
    return Tightened(work, best, False)
