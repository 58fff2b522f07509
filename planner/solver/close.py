"""Bound, fix, probe: from a reduced problem to its optimum, or as near as the time allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sbp.planner.solver.aside import AnnealProcess
from sbp.planner.solver.bounds import ascended
from sbp.planner.solver.core import Reduction
from sbp.planner.solver.dual import Dual
from sbp.planner.solver.fixing import ReducedCosts, reduced_costs
from sbp.planner.solver.ilp import solve_ilp
from sbp.planner.solver.lns import neighbourhoods
from sbp.planner.solver.probe import tightened
from sbp.planner.solver.reducer import SWITCH_ALL
from sbp.planner.solver.result import Clock
from sbp.planner.solver.search import Cycle, annealed, annealer_of, descended, repaired
from sbp.planner.solver.state import State
from sbp.planner.solver.worker import GRACE

FIRST_TARGET = 1000
HEATS = (1.0, 10.0, 100.0)
"""Of the annealing cycles in this process; the first two also precede the probes of cores that stay large."""
MOVES = 1000
"""Moves of these cycles per strategy."""
PATIENCE = 8.0
"""Seconds of the first integer program; more when one does not end."""
STALE = 0.1
"""Fixing starts over when the incumbent has come down by this part of the gap."""
FIRST_STEPS = 200
"""Neighbourhoods searched before the first probe, time permitting."""
OPEN = 3000
"""With more strategies beyond one per node than this after the first fixing, a core is annealed before it is probed."""
HOPELESS = 10000
"""With more than this a proof is far: another process anneals from the start."""
SMALL = 1500
"""With at most this many strategies beyond one per node, a core goes to the integer program without a probe."""
QUICK = 0.3
PLAINLY_QUICK = 0.03
"""Parts of the patience: after a quick program the cutoff grows faster; a plainly quick one is quick on any machine."""
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
                core,
                state.clock.part(0.35),
                state.upper,
                None,
                lambda dual: state.offer_core(base, dual.feasible_labels, "dual"),
            )
        state.raise_bound(min(dual.exact_bound(), core.worst_cost() + 1), "dual")
        if state.closed:
            return
        costs = reduced_costs(core, dual, state.limits.seed)
    if state.upper is None and costs.bound > core.worst_cost():
        state.declare_infeasible("memory")
        return
    state.raise_bound(costs.bound, "dual")
    if not state.closed:
        state.offer_start()
    if state.closed or "ilp" in without:
        return
    if "probe" in without:
        _integer_program(state, base, None, None, state.clock.left)
        return
    large = core.strategy_count - core.node_count > SMALL
    if large and "anneal" not in without:
        with state.stage("anneal"):
            _first_choices(state, base, dual, costs)
        if state.upper is not None and core.strategy_count - core.node_count > HOPELESS and state.limits.threads > 1:
            _anneal(state, base, costs)
    gaining = True
    while not state.closed and not state.clock.expired():
        if large and state.upper is not None:
            base, costs, settled = _narrowed(state, base, costs, switches)
            if settled:
                return
            excess = base.core.strategy_count - base.core.node_count
            if (
                gaining
                and excess > OPEN
                and (excess <= HOPELESS or state.limits.threads == 1)
                and "anneal" not in without
            ):
                before = state.upper
                with state.stage("anneal"):
                    _cycles(state, base, costs, HEATS[:2], state.clock.part(0.2))
                gaining = before - state.upper > STALE * (before - costs.bound)
                if state.upper < before:
                    continue
        improved = False
        narrowed_at = state.upper

        def improve(base: Reduction = base, costs: ReducedCosts = costs) -> None:
            """Once per core, when a program did not end in time: the closer the incumbent, the smaller the probes."""
            nonlocal improved
            if not improved:
                improved = True
                _incumbent(state, base, costs, without)

        def stale(narrowed_at: int | None = narrowed_at) -> bool:
            """Whether the incumbent has become so much better that fixing should start over with it."""
            if not large or state.upper is None or state.lower is None or narrowed_at is None:
                return False
            return narrowed_at - state.upper > STALE * (narrowed_at - state.lower)

        excess = base.core.strategy_count - base.core.node_count
        if large and (state.upper is None or excess > HOPELESS):
            improve()
        if _probes(state, base, costs, switches, without, improve, stale) or not stale():
            return


def _first_choices(state: State, base: Reduction, dual: Dual, costs: ReducedCosts) -> None:
    """The bound's labels, made feasible and descended."""
    annealer = annealer_of(base.core, state.limits.seed, state.upper)
    starts = [dual.labels]
    if np.isfinite(dual.feasible_cost):
        starts.append(dual.feasible_labels)
    for labels in starts:
        found = repaired(annealer, labels, costs.prices, state.clock)
        if found is not None:
            found = descended(annealer, found.choice, costs.prices, state.clock) or found
            state.offer_core(base, found.choice, "anneal")


def _narrowed(
    state: State, base: Reduction, costs: ReducedCosts, switches: int
) -> tuple[Reduction, ReducedCosts, bool]:
    """Everything that is at most as costly as the incumbent (which stays in), and whether that settles the problem."""
    assert state.upper is not None
    if state.annealing is not None:
        state.annealing.poll(state)
    with state.stage("probe"):
        found = tightened(
            base,
            state.upper,
            state.clock,
            known=costs,
            seed=state.limits.seed,
            switches=switches,
            on_label=lambda reduction, choice: state.offer_core(reduction, choice, "probe"),
        )
    if found.closed:
        # Not reached while the incumbent is sound: it costs no more than itself.
        state.raise_bound(state.upper, "probe")
        return base, costs, True
    core = found.reduction.core
    if core.node_count == 0:
        state.offer_core(found.reduction, np.empty(0, np.int64), "probe")
        state.raise_bound(core.constant, "probe")
        return base, costs, True
    if found.reduced is None:
        return base, costs, False
    state.raise_bound(found.reduced.bound, "probe")
    return found.reduction, found.reduced, False


def _incumbent(state: State, base: Reduction, costs: ReducedCosts, without: tuple[str, ...]) -> None:
    """Lower the incumbent by annealing (in another process where there are two) and by neighbourhoods."""
    if "anneal" not in without:
        with state.stage("anneal"):
            _anneal(state, base, costs)
    if "lns" in without or state.upper is None:
        return
    with state.stage("lns"):
        clock = state.clock.part(0.05)
        search = neighbourhoods(state, base, costs)
        for _ in range(FIRST_STEPS):
            if search is None or clock.expired() or state.closed:
                return
            search.step(clock.left)


def _labels(state: State, base: Reduction) -> np.ndarray:
    """The incumbent's strategies where the core still has them, the first ones elsewhere."""
    if state.choice is None:
        return np.zeros(base.core.node_count, np.int32)
    return np.maximum(base.project_known(state.choice), 0).astype(np.int32)


def _anneal(state: State, base: Reduction, costs: ReducedCosts) -> None:
    if state.limits.threads == 1 or state.upper is None:
        _cycles(state, base, costs, HEATS, state.clock.part(0.2))
        return
    if state.annealing is None:
        state.annealing = AnnealProcess()
    state.annealing.poll(state)
    if state.annealing.fruitless and not state.annealing.running:
        # From here neighbourhoods are the better use of the second core.
        return
    state.clock.feel()
    state.annealing.start(base, costs.prices, _labels(state, base), costs.bound, state.upper, state.limits.seed)


def _cycles(state: State, base: Reduction, costs: ReducedCosts, heats: tuple[float, ...], clock: Clock) -> None:
    """Annealing cycles in this process, of so many moves that equal input gives equal choices unless time is short."""
    core = base.core
    upper = state.upper if state.upper is not None else core.worst_cost()
    labels = _labels(state, base)
    annealer = annealer_of(core, state.limits.seed, upper)
    for position, heat in enumerate(heats):
        cycle = Cycle(clock.left / (len(heats) - position), MOVES * core.strategy_count, heat)
        found = annealed(annealer, labels, costs.prices, float(upper - costs.bound), cycle, clock)
        if found is not None and state.offer_core(base, found.choice, "anneal"):
            labels = found.choice


def _cutoff(core_size: int, costs: ReducedCosts, target: int, nodes: int) -> int:
    """The bound plus the room below which about `target` strategies more than one per node survive."""
    marginals = np.sort(costs.strategy_marginal)
    keep = min(nodes + target, core_size) - 1
    return costs.bound + max(int(marginals[keep]), 1)


def _probes(
    state: State,
    base: Reduction,
    costs: ReducedCosts,
    switches: int,
    without: tuple[str, ...],
    improve: Callable[[], None],
    stale: Callable[[], bool],
    ceiling: int | None = None,
) -> bool:
    """Search everything in `base` that costs at most `ceiling`; True when that is complete.

    Cutoffs grow from the bound: faster while probes close by themselves, slower when their integer programs are
    hard, and they shrink after one that did not end in time. Each probe leaves a smaller problem with a better bound.
    """
    core = base.core
    excess = core.strategy_count - core.node_count
    # A core that a better incumbent narrowed is as hard as the one before it.
    patience = state.patience if ceiling is None else PATIENCE
    hardest = easiest = 0
    step = _cutoff(core.strategy_count, costs, FIRST_TARGET, core.node_count) - costs.bound
    while not state.closed and not state.clock.expired():
        if state.annealing is not None:
            state.annealing.poll(state)
        if stale():
            if ceiling is None:
                state.patience = patience
            return False
        limit = ceiling
        if state.upper is not None:
            limit = state.upper - 1 if limit is None else min(limit, state.upper - 1)
        if limit is not None and state.lower is not None and state.lower > limit:
            return True
        if excess <= SMALL:
            # Small enough for one program over all of it.
            if _integer_program(
                state, base, limit, None if limit is None else costs, min(patience, state.clock.left), without
            ):
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
            finished = _probes(state, found.reduction, found.reduced, switches, without, improve, stale, cutoff)
        else:
            finished = _integer_program(
                state, found.reduction, cutoff, found.reduced, min(patience, state.clock.left), without
            )
        if finished:
            state.raise_bound(cutoff + 1, "probe")
            if last:
                return True
            seconds = state.clock.elapsed - start
            if seconds > PLAINLY_QUICK * patience:
                state.clock.feel()
            growth = 2.0 if seconds < QUICK * patience else 1.2
            # Where a higher cutoff hardly makes the program larger, creeping only solves it again and again.
            step = int(step * (4.0 if left < 1.03 * easiest else growth))
            easiest = left
        else:
            improve()
            # A lower cutoff helps only while it makes the program smaller; then only time does.
            smaller = left < 0.97 * hardest if hardest else True
            hardest = left
            step = max(int((cutoff - (state.lower or cutoff)) * (0.4 if smaller else 4.0)), 1)
            patience *= 1.5 if smaller else 3.0
    return state.closed


def _integer_program(
    state: State,
    reduction: Reduction,
    cutoff: int | None,
    costs: ReducedCosts | None,
    seconds: float,
    without: tuple[str, ...] = (),
) -> bool:
    """Solve a reduction by the integer program; True when everything below the cutoff is settled.

    With two threads, neighbourhoods are searched meanwhile. What they find counts only if the program does not end in
    time: a result that no limit cut short must not depend on how fast the machine is.
    """
    if cutoff is None and state.upper is not None:
        cutoff = state.upper - 1
    # What overruns must still end within the limit.
    seconds = min(seconds, max(state.clock.left - GRACE, 0.5 * state.clock.left))
    options: dict[str, Any] = {
        "threads": state.limits.threads,
        "seed": state.limits.seed,
        "cutoff": cutoff,
        "reduced": costs,
    }
    with state.stage("ilp"):
        if reduction.core.strategy_count <= IN_PROCESS:
            result = solve_ilp(reduction.core, seconds, **options)
        else:
            aside = state.fork()
            meanwhile = None
            if state.limits.threads > 1:
                meanwhile = _meanwhile(state, aside)
            try:
                result = state.process.solve(reduction.core, seconds, meanwhile, state.clock, **options)
            except KeyboardInterrupt:
                state.adopt(aside, "lns")
                raise
            finally:
                if state.search is not None:
                    state.search.state = state
            if not result.finished or state.annealing is not None:
                state.adopt(aside, "lns" if state.annealing is None else "anneal")
    if not result.finished:
        state.clock.feel()
    if result.choice is not None:
        state.offer_core(reduction, result.choice, "ilp")
    elif result.finished and cutoff is None:
        state.declare_infeasible("memory")
        return True
    state.raise_bound(result.lower_bound, "ilp")
    return result.finished


def _meanwhile(state: State, aside: State) -> Callable[[float], bool] | None:
    """What to do while an integer program runs: search neighbourhoods, and hear what the annealing has found."""
    search = state.search
    if search is not None:
        search.state = aside
    annealing = state.annealing
    if annealing is None:
        return None if search is None else search.pass_time

    def work(seconds: float) -> bool:
        annealing.poll(aside)
        if search is not None:
            search.pass_time(seconds)
        elif annealing.running:
            annealing.poll(aside, 0.1)
        else:
            time.sleep(0.1)
        return True

    return work
