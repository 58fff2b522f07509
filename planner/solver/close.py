"""Bound, fix, probe: from a reduced problem to its optimum, or as near as the time allows."""

from __future__ import annotations

import numpy as np

from sbp.planner.solver.bounds import ascended
from sbp.planner.solver.core import Reduction
from sbp.planner.solver.dual import Dual
from sbp.planner.solver.fixing import ReducedCosts, reduced_costs
from sbp.planner.solver.ilp import solve_ilp
from sbp.planner.solver.probe import tightened
from sbp.planner.solver.reducer import SWITCH_ALL
from sbp.planner.solver.state import State

FIRST_TARGET = 1000
SMALL = 1500
"""With at most this many strategies beyond one per node, a core goes to the integer program without a probe."""
IN_PROCESS = 400
"""Integer programs over at most this many strategies are solved in this process: they end in moments."""


def close(state: State, base: Reduction, without: tuple[str, ...] = (), dual: Dual | None = None) -> None:
    """Raise the bound and lower the incumbent until they meet or the time is used.

    `base` must contain every choice that is better than the incumbent; `dual` may hold a bound of it that is already
    known.
    """
    switches = 0 if "reduce" in without else SWITCH_ALL
    core = base.core
    if core.node_count == 0:
        state.offer_core(base, np.empty(0, np.int64), "reduce")
        state.raise_bound(core.constant, "reduce")
        return
    if "dual" in without:
        _integer_program(state, base, None, None, state.clock.left)
        return
    with state.stage("dual"):
        if dual is None:
            dual = ascended(
                core, state.clock, state.upper, None, lambda dual: state.offer_core(base, dual.feasible_labels, "dual")
            )
        state.raise_bound(min(dual.exact_bound(), core.worst_cost() + 1), "dual")
        if state.closed:
            return
        costs = reduced_costs(core, dual, state.limits.seed)
    if state.upper is None and costs.bound > core.worst_cost():
        state.declare_infeasible("memory")
        return
    state.raise_bound(costs.bound, "dual")
    if state.closed or "ilp" in without:
        return
    if "probe" in without:
        _integer_program(state, base, None, None, state.clock.left)
        return
    _probes(state, base, costs, switches)


def _cutoff(core_size: int, costs: ReducedCosts, target: int, nodes: int) -> int:
    """The bound plus the room below which about `target` strategies more than one per node survive."""
    marginals = np.sort(costs.strategy_marginal)
    keep = min(nodes + target, core_size) - 1
    return costs.bound + max(int(marginals[keep]), 1)


def _probes(state: State, base: Reduction, costs: ReducedCosts, switches: int, ceiling: int | None = None) -> bool:
    """Search everything in `base` that costs at most `ceiling`; True when that is complete.

    Cutoffs grow from the bound: faster while probes close by themselves, slower when their integer programs are
    hard, and they shrink after one that did not end in time. Each probe leaves a smaller problem with a better bound.
    """
    core = base.core
    excess = core.strategy_count - core.node_count
    patience = 8.0
    hardest = 0
    step = _cutoff(core.strategy_count, costs, FIRST_TARGET, core.node_count) - costs.bound
    while not state.closed and not state.clock.expired():
        limit = ceiling
        if state.upper is not None:
            limit = state.upper - 1 if limit is None else min(limit, state.upper - 1)
        if limit is not None and state.lower is not None and state.lower > limit:
            return True
        if excess <= SMALL:
            # Small enough for one program over all of it.
            if _integer_program(state, base, limit, None if limit is None else costs, min(patience, state.clock.left)):
                return True
            patience *= 2
            if limit is None:
                continue
        lower = costs.bound if state.lower is None else max(state.lower, costs.bound)
        cutoff = lower + max(step, 1)
        last = limit is not None and cutoff >= limit
        if last:
            assert limit is not None
            cutoff = limit
        with state.stage("probe"):
            found = tightened(
                base,
                cutoff,
                state.clock,
                known=costs,
                seed=state.limits.seed,
                switches=switches,
                on_label=lambda reduction, choice: state.offer_core(reduction, choice, "probe"),
            )
        if found.closed:
            state.raise_bound(cutoff + 1, "probe")
            step *= 4
            continue
        if state.clock.expired():
            return False
        small = found.reduction.core
        if small.node_count == 0:
            state.offer_core(found.reduction, np.empty(0, np.int64), "probe")
            state.raise_bound(small.constant, "probe")
            return True
        if found.reduced is None:
            return False
        state.raise_bound(min(found.reduced.bound, cutoff + 1), "probe")
        left = small.strategy_count - small.node_count
        start = state.clock.elapsed
        if left > SMALL and left < 0.7 * excess:
            finished = _probes(state, found.reduction, found.reduced, switches, cutoff)
        else:
            finished = _integer_program(state, found.reduction, cutoff, found.reduced, min(patience, state.clock.left))
        if finished:
            state.raise_bound(cutoff + 1, "probe")
            if last:
                return True
            step = int(step * (2.0 if state.clock.elapsed - start < 0.3 * patience else 1.2))
        else:
            # A lower cutoff helps only while it makes the program smaller; then only time does.
            smaller = left < 0.97 * hardest if hardest else True
            hardest = left
            step = max(int((cutoff - (state.lower or cutoff)) * (0.4 if smaller else 4.0)), 1)
            patience *= 1.5 if smaller else 3.0
    return False


def _integer_program(
    state: State, reduction: Reduction, cutoff: int | None, costs: ReducedCosts | None, seconds: float
) -> bool:
    """Solve a reduction by the integer program; True when everything below the cutoff is settled."""
    if cutoff is None and state.upper is not None:
        cutoff = state.upper - 1
    options = {"threads": state.limits.threads, "seed": state.limits.seed, "cutoff": cutoff, "reduced": costs}
    with state.stage("ilp"):
        if reduction.core.strategy_count <= IN_PROCESS:
            result = solve_ilp(reduction.core, seconds, **options)
        else:
            result = state.process.solve(reduction.core, seconds, None, **options)
    if result.choice is not None:
        state.offer_core(reduction, result.choice, "ilp")
    elif result.finished and cutoff is None:
        state.declare_infeasible("memory")
        return True
    state.raise_bound(result.lower_bound, "ilp")
    return result.finished
