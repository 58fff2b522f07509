"""The ascent of the lower bound: row prices and messages of a core, improved until they stall."""

from __future__ import annotations

import math

import numpy as np

from sbp.planner.solver.core import Core
from sbp.planner.solver.dual import Dual
from sbp.planner.solver.result import Clock

# One frozen configuration, chosen on structure: see `ascended`.
FLATNESS = 0.1
PATIENCE = 12
ROUND = 50
LEVEL_FLOOR = 1e-4
STALL = 0.002
CYCLES = 60


def ascended(
    core: Core, clock: Clock, upper: float | None = None, prices: np.ndarray | None = None, on_label=None
) -> Dual:
    """Prices and messages with a good bound; the result stands at its best point.

    Cycles of level steps: each starts with a level of 0.3 of the gap and ends when the level has shrunk to
    `LEVEL_FLOOR` of it; the ascent ends with a cycle that gained less than `STALL` of the gap.

    Parameters
    ----------
    upper : float or None
        Cost of the best known choice, constant included. None: estimated from the labels.
    prices : float (rows,) or None
        Where to start.
    on_label : callable(dual) or None
        Called between rounds when a better feasible label was found.
    """
    dual = Dual(core, prices)
    dual.flatness = FLATNESS
    if core.node_count == 0:
        dual.ascend(1, math.inf)
        return dual
    seen = math.inf
    worst = float(core.worst_cost())

    def goal() -> float:
        known = min(upper if upper is not None else math.inf, dual.feasible_cost)
        if math.isfinite(known):
            return known + 1.0
        # Nothing is known from above: a bound beyond the worst choice proves that there is none.
        beyond = worst + 1.0 + 1e-6 * abs(worst)
        if not math.isfinite(dual.best_bound):
            return beyond
        return min(beyond, dual.best_bound + 2.0 * max(abs(dual.best_bound - core.constant), 1.0))

    last = -math.inf
    for cycle in range(CYCLES):
        if cycle:
            dual.restore_best()
            dual.step_level = 0.3 * max(goal() - dual.best_bound, 1.0)
        while True:
            dual.ascend(ROUND, goal(), 0.0, PATIENCE, max(0.0, clock.left))
            if dual.feasible_cost < seen:
                seen = dual.feasible_cost
                if on_label is not None:
                    on_label(dual)
            gap = goal() - dual.best_bound
            if gap <= 0 or clock.expired() or dual.step_level < LEVEL_FLOOR * gap:
                break
        gap = goal() - dual.best_bound
        if core.capacities.size == 0 or gap <= 0 or clock.expired() or dual.best_bound - last < STALL * gap:
            break
        last = dual.best_bound
    dual.restore_best()
    return dual
