"""The default solver: the stages in order, each switchable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sbp.planner.problem import Problem
from sbp.planner.solver.bounds import ascended
from sbp.planner.solver.close import close
from sbp.planner.solver.core import Reduction, reduced
from sbp.planner.solver.dual import Dual
from sbp.planner.solver.infeasible import shortage
from sbp.planner.solver.reducer import SWITCH_ALL
from sbp.planner.solver.result import Assignment, Clock, Limits, Progress, Start
from sbp.planner.solver.scale import scaled
from sbp.planner.solver.state import State

EXPLAIN_SECONDS = 10.0
"""The most that goes into saying why a problem is infeasible."""
STAGES = ("reduce", "free", "dual", "anneal", "lns", "probe", "ilp")


def solve(
    problem: Problem,
    limits: Limits | None = None,
    *,
    without: tuple[str, ...] = (),
    progress: Progress | None = None,
    explain: bool = True,
    start: Start | None = None,
) -> Assignment:
    """Solve a layout problem.

    Parameters
    ----------
    problem : Problem
    limits : Limits
        Time, processes and seed; 60 s, 2 and 0 when not given.
    without : names of `STAGES`
        Stages to leave out. The result is then weaker, never wrong.
    progress : callable
        Called with (incumbent, lower bound, stage) whenever one of them improves.
    start : callable
        Gives a choice to start from (or None), feasible or not; called once, if the bound alone does not settle it.
    explain : bool
        When infeasible, find out how much memory is missing and who uses it (takes part of the time that is left).

    Returns
    -------
    Assignment
        Never raises for infeasible problems or exhausted time: see `Assignment.status`.
    """
    limits = limits or Limits()
    clock = Clock(limits.time_limit)
    state = State(problem, scaled(problem), clock, limits, progress, start)
    try:
        _stages(state, without)
    except KeyboardInterrupt:
        # Anytime: what is known when the user has waited enough is the answer.
        state.statistics["interrupted"] = True
        clock.feel()
    finally:
        state.process.kill()
        if state.annealing is not None:
            state.annealing.poll(state)
            state.annealing.kill()
    if explain and state.infeasible_because == "memory" and state.choice is None:
        found = shortage(
            problem, replace(limits, time_limit=max(min(EXPLAIN_SECONDS, clock.left), 0.5)), problem.usage_limit
        )
        return replace(state.assignment(), reason=found.sentence(problem), shortage=found)
    return state.assignment()


def _stages(state: State, without: tuple[str, ...]) -> None:
    switches = 0 if "reduce" in without else SWITCH_ALL
    integer, clock = state.integer, state.clock
    has_rows = len(integer.row_times) > 0
    if not has_rows or "free" not in without:
        with state.stage("reduce"):
            free = reduced(integer.with_rows(np.zeros(len(integer.row_times), bool)), switches, clock.expired)
        if not free.feasible:
            node = free.reducer.infeasible_node
            where = problem_node(state, node)
            state.declare_infeasible(f"forbidden strategies and pairs leave no choice{where}")
            return
        state.raise_bound(free.core.constant, "reduce")
        dual = _free_bound(state, free)
        if not has_rows or state.upper is not None:
            close(state, free, without, dual)
            if not has_rows or state.closed:
                return
    with state.stage("reduce"):
        base = reduced(integer, switches, clock.expired)
    if not base.feasible:
        state.declare_infeasible("memory")
        return
    close(state, base, without)


def problem_node(state: State, node: int) -> str:
    """Where the reductions ran out of strategies, for a message."""
    return f": none is left for {state.problem.node_name(node)}" if node >= 0 else ""


def _free_bound(state: State, free: Reduction) -> Dual | None:
    """Bound the problem without its memory; the labels are offered, for they may respect the limit."""
    with state.stage("free"):
        if free.core.node_count == 0:
            state.offer_core(free, np.empty(0, np.int64), "free")
            state.raise_bound(free.core.constant, "free")
            return None
        dual = ascended(free.core, state.clock.part(0.2))
        state.raise_bound(dual.exact_bound(), "free")
        if np.isfinite(dual.feasible_cost):
            state.offer_core(free, dual.feasible_labels, "free")
        return dual
