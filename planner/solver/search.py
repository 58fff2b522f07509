"""Primal search on large cores: repair, descent, and annealing cycles guided by the prices of the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sbp.planner.solver.anneal import Annealer
from sbp.planner.solver.core import Core
from sbp.planner.solver.result import Clock

# One frozen configuration, chosen on structure.
STEPS = 400
"""Temperatures of a cycle; the prices move once at each."""
PRICE_SHARE = 0.7
"""Local costs take this share of the prices: the full price pays for overflow that the penalty charges again."""
SMALL_NODES = 500
RUGGED = (20.0, 200.0, 0.1)
"""Small cores: starting temperature (gaps per node), cooling, and the fraction of tree moves of each kind."""
SMOOTH = (3.0, 50.0, 0.01)
LARGEST_TREE = 80
EJECTIONS = 0.1
FORCED = 0.03
SLACK_UNIT = 0.02
SLACK_CLIP = 0.25
PRICE_RATE = 0.005
HARD_TAIL = 0.125
HARD_FACTOR = 300.0
TIGHT = 0.01
LADDER = 40
"""Steps of the price of overflow in a repair."""


@dataclass(frozen=True)
class Found:
    """A feasible choice (int32, strategies of the core) and its cost, without the core's constant."""

    choice: np.ndarray
    cost: float


def _found(annealer: Annealer) -> Found | None:
    return Found(annealer.best_labels, annealer.best_cost) if math.isfinite(annealer.best_cost) else None


def repaired(annealer: Annealer, labels: np.ndarray, prices: np.ndarray, clock: Clock) -> Found | None:
    """Make a choice respect the memory rows: flips of the least cost per byte of overflow that they remove come first.

    The price of overflow climbs a geometric ladder; at each rung every flip pays that is cheaper than the overflow it
    removes.
    """
    annealer.set_state(labels, np.zeros(len(prices)))
    annealer.forget_best()
    nodes = annealer.node_count
    # Forbidden pairs count as well: flips alone may be stuck on them, trees rarely are.
    if not math.isfinite(annealer.best_cost):
        typical = max(annealer.mean_usage_change(), 1.0)
        top = max(float(np.max(prices, initial=0.0)), abs(annealer.cost) / nodes / typical * 1e-3, 1e-12)
        for mu in np.geomspace(1e-3 * top, 1e6 * top, LADDER):
            annealer.run(2 * nodes, 0.0, mu, 0.02, 0.05, 0.1)
            if math.isfinite(annealer.best_cost) or clock.expired():
                break
    return _found(annealer)


def descended(
    annealer: Annealer, labels: np.ndarray, prices: np.ndarray, clock: Clock, sweeps: int = 10
) -> Found | None:
    """Improve a feasible choice on its true cost, memory respected at every step, until a sweep gains nothing.

    Flips, trees and ejections at temperature zero; overflow costs more than anything that it could gain.
    """
    nodes = annealer.node_count
    annealer.set_state(labels, np.zeros(len(prices)))
    annealer.forget_best()
    hard = 1e6 * max(float(np.max(prices, initial=0.0)), abs(annealer.cost) / nodes, 1.0)
    for _ in range(sweeps):
        before = annealer.best_cost
        annealer.run(3 * nodes, 0.0, hard, 0.02, 0.1, 0.2)
        if clock.expired() or not annealer.best_cost < before:
            break
    return _found(annealer)


@dataclass(frozen=True)
class Cycle:
    """Length and temperatures of one annealing cycle.

    Attributes
    ----------
    seconds : float
        Wall time after which the schedule is cut short.
    moves : int
        Moves of the whole cycle; the schedule follows these, so that cycles that are not cut short can be repeated.
    heat : float
        Factor on the starting temperature.
    """

    seconds: float
    moves: int
    heat: float = 1.0


def annealed(
    annealer: Annealer,
    labels: np.ndarray,
    prices: np.ndarray,
    gap: float,
    cycle: Cycle,
    clock: Clock,
    on_found: Callable[[Found], None] | None = None,
) -> Found | None:
    """One cycle from `labels`; returns the best feasible choice met, descended.

    Parameters
    ----------
    prices : float (rows,)
        Of the lower bound; they ascend slowly on from there.
    gap : float
        Incumbent minus bound: what there is to gain sets the temperature.
    """
    nodes = annealer.node_count
    capacities = annealer.row_capacities()
    heat, cooling, trees = RUGGED if nodes < SMALL_NODES else SMOOTH
    start = cycle.heat * heat * max(gap, 1.0) / nodes
    largest = nodes if nodes < SMALL_NODES else LARGEST_TREE
    forced = trees if nodes < SMALL_NODES else FORCED
    price = np.array(prices, np.float64)
    highest = float(np.max(price, initial=0.0))
    unit = SLACK_UNIT * max(float(np.max(capacities, initial=0.0)), 1.0)
    annealer.set_state(labels, PRICE_SHARE * price)
    annealer.forget_best()
    slack = annealer.slacks
    tight = max(int((slack < TIGHT * capacities).sum()), 1)
    effect = max(annealer.mean_usage_change() * tight, 1.0)
    soft = start / (2.0 * effect)
    hard = max(2.0 * highest, soft)
    own = clock.at_most(cycle.seconds)
    done, updates = 0.0, 0
    # Short enough for the clock to be heard.
    chunk = max(min(cycle.moves // STEPS, 4 * nodes), 1)
    while done < 1.0:
        temperature = start * cooling**-done
        mu = soft * (hard / soft) ** min(done / (1.0 - HARD_TAIL), 1.0)
        if done > 1.0 - HARD_TAIL:
            mu *= HARD_FACTOR ** ((done - 1.0 + HARD_TAIL) / HARD_TAIL)
        annealer.run(chunk, temperature, mu, trees, forced, EJECTIONS, largest)
        # On a slow machine the clock, not the moves, decides how fast the cycle cools.
        done += chunk / max(cycle.moves, 1)
        passed = own.elapsed / max(own.time_limit, 1e-9)
        if passed > done:
            own.feel()
            done = passed
        if clock.expired():
            break
        if done * STEPS < updates + 1:
            continue
        updates = int(done * STEPS)
        if len(price) and highest > 0:
            z = np.clip(annealer.slacks / unit, -SLACK_CLIP, SLACK_CLIP)
            price = np.maximum(0.0, price - PRICE_RATE * highest * z)
            highest = float(price.max())
        annealer.set_state(annealer.labels, PRICE_SHARE * price)
    best = _found(annealer)
    if best is None:
        # The end is nearly feasible: what is over goes at the least cost.
        best = repaired(annealer, annealer.labels, prices, clock)
    if best is None:
        return None
    if on_found is not None:
        on_found(best)
    return descended(annealer, best.choice, prices, clock) or best


def annealer_of(core: Core, seed: int, upper: int | None = None) -> Annealer:
    """An `Annealer` in whose costs forbidden strategies and pairs count more than the incumbent `upper` can gain."""
    worst = core.worst_cost() - core.constant
    scale = 2 * worst + 1 if upper is None else min(2 * worst + 1, 4 * max(upper - core.constant, 1) + 1)
    return Annealer(core, seed, float(scale))
