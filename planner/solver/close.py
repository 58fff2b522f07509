"""Bound, fix, probe: from a reduced problem to its optimum, or as near as the time allows."""

from __future__ import annotations

import numpy as np
from sbp.planner.solver.bounds import ascended
from sbp.planner.solver.core import Reduction
from sbp.planner.solver.fixing import ReducedCosts, reduced_costs
from sbp.planner.solver.ilp import solve_ilp
from sbp.planner.solver.probe import tightened
from sbp.planner.solver.reducer import SWITCH_ALL
from sbp.planner.solver.state import State

FIRST_TARGET = 1000
SMALL = 1500
"""Cores of at most this many strategies go to the integer program without a probe."""


def close(state: State, base: Reduction, without: tuple[str, ...] = ()) -> None:
    """Raise the bound and lower the incumbent until they meet or the time is used.

    `base` must contain every choice that is better than the incumbent.
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
        dual = ascended(
            core, state.clock, state.upper, None, lambda dual: state.offer_core(base, dual.feasible_labels, "dual")
        )
        costs = reduced_costs(core, dual, state.limits.seed)
    if costs.bound > core.worst_cost():
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


def _probes(state: State, base: Reduction, costs: ReducedCosts, switches: int) -> None:
    core = base.core
    target = FIRST_TARGET
    patience = 10.0
    while not state.closed and not state.clock.expired():
        assert state.lower is not None
        everything = core.node_count + target >= core.strategy_count
        cutoff = None if everything else _cutoff(core.strategy_count, costs, target, core.node_count)
        if cutoff is not None and cutoff <= state.lower:
            target *= 2
            continue
        if state.upper is not None and (cutoff is None or cutoff >= state.upper - 1):
            cutoff, everything = state.upper - 1, True
        if cutoff is None:
            # Nothing is known from above and the core is small: one integer program over all of it.
            _integer_program(state, base, None, None, state.clock.left)
            return
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
            target *= 2
            continue
        if state.clock.expired():
            return
        small = found.reduction.core
        if small.node_count == 0:
            state.offer_core(found.reduction, np.empty(0, np.int64), "probe")
            state.raise_bound(small.constant, "probe")
            return
        if found.reduced is not None:
            state.raise_bound(min(found.reduced.bound, cutoff + 1), "probe")
        finished = _integer_program(state, found.reduction, cutoff, found.reduced, min(patience, state.clock.left))
        if finished:
            target *= 2
        else:
            patience *= 2


def _integer_program(
    state: State, reduction: Reduction, cutoff: int | None, costs: ReducedCosts | None, seconds: float
) -> bool:
    """Solve a reduction by the integer program; True when everything below the cutoff is settled."""
    with state.stage("ilp"):
        if cutoff is None and state.upper is not None:
            cutoff = state.upper - 1
        result = solve_ilp(
            reduction.core,
            seconds,
            threads=state.limits.threads,
            seed=state.limits.seed,
            cutoff=cutoff,
            reduced=costs,
        )
    if result.choice is not None:
        state.offer_core(reduction, result.choice, "ilp")
    elif result.finished and cutoff is None:
        state.declare_infeasible("memory")
        return True
    state.raise_bound(result.lower_bound, "ilp")
    return result.finished
