"""Better incumbents: large neighbourhoods of the incumbent, searched completely."""

from __future__ import annotations

import time

import numpy as np

from sbp.planner.solver.core import Core, Reduction, reduced
from sbp.planner.solver.fixing import ReducedCosts
from sbp.planner.solver.ilp import solve_ilp
from sbp.planner.solver.probe import tightened
from sbp.planner.solver.state import State

NEIGHBOURHOOD = 1200
"""Strategies beyond one per node in the first neighbourhoods; grows while they are easy."""


def neighbourhoods(state: State, base: Reduction, costs: ReducedCosts) -> Neighbourhoods | None:
    """The search around the incumbent, over what can be as good; it is kept in the state for later."""
    if state.upper is None:
        return None
    around = reduced(base)
    forbidden, entries = costs.beyond(base.core, state.upper)
    # Unless the base was not reduced, its copy's core is the same node by node, and fixing applies to it.
    if len(forbidden) == around.core.strategy_count and len(entries) == len(around.core.table_values):
        around = around.shrink(forbidden, entries, state.clock.expired)
    if not around.feasible or around.core.node_count == 0:
        return None
    core = around.core
    regret = np.ones(core.strategy_count)
    wanted = base.core.node_offsets[np.repeat(core.nodes, core.sizes)] + core.original
    regret += costs.strategy_marginal[wanted]
    state.search = Neighbourhoods(state, around, regret)
    return state.search


class Neighbourhoods:
    """Large neighbourhood search: free a part of the incumbent, keep the rest, search what is better completely."""

    def __init__(self, state: State, base: Reduction, regret: np.ndarray) -> None:
        self.state, self.base = state, base
        self.regret = regret
        self.random = np.random.default_rng(state.limits.seed + 1)
        self.size = NEIGHBOURHOOD
        core = base.core
        ends = core.edge_nodes
        node = np.concatenate([ends[:, 0], ends[:, 1]])
        other = np.concatenate([ends[:, 1], ends[:, 0]])
        order = np.argsort(node, kind="stable")
        self.starts = np.searchsorted(node[order], np.arange(core.node_count + 1))
        self.others = other[order]

    def step(self, seconds: float) -> bool:
        """One neighbourhood; True if the incumbent became better."""
        state, core = self.state, self.base.core
        if state.choice is None or state.upper is None or not core.node_count:
            return False
        current = self.base.project_known(state.choice)
        unknown = current < 0
        current = np.where(unknown, 0, current)
        free = self._window(core) if len(core.capacities) and self.random.random() < 0.4 else self._ball(core, current)
        free |= unknown
        forbidden = np.ones(core.strategy_count, bool)
        forbidden[core.node_offsets[:-1] + current] = False
        forbidden[np.repeat(free, core.sizes)] = False
        clock = state.clock.at_most(seconds)
        part = reduced(self.base).shrink(forbidden, None, clock.expired)
        if not part.feasible:
            return False
        before = state.upper
        found = tightened(
            part,
            state.upper - 1,
            clock,
            seed=int(self.random.integers(1 << 30)),
            on_label=lambda reduction, choice: state.offer_core(reduction, choice, "lns"),
        )
        easy = True
        if not found.closed and not clock.expired():
            rest = found.reduction.core
            if rest.node_count == 0:
                state.offer_core(found.reduction, np.empty(0, np.int64), "lns")
            elif rest.strategy_count - rest.node_count <= 600:
                result = solve_ilp(rest, min(2.0, clock.left), cutoff=state.upper - 1, reduced=found.reduced)
                if result.choice is not None:
                    state.offer_core(found.reduction, result.choice, "lns")
                easy = result.finished
                if not easy:
                    clock.feel()
            else:
                easy = False
        self.size = min(int(self.size * 1.1), core.strategy_count) if easy else max(int(self.size * 0.85), 100)
        return state.upper < before

    def pass_time(self, seconds: float) -> bool:
        """Work for about so many seconds; always asks for more."""
        if not self.step(seconds):
            time.sleep(0.001)
        return True

    def _ball(self, core: Core, current: np.ndarray) -> np.ndarray:
        """A breadth-first ball around a node whose strategy the bound finds expensive."""
        weight = self.regret[core.node_offsets[:-1] + current].astype(np.float64)
        total = weight.sum()
        if total > 0 and self.random.random() < 0.8:
            root = int(self.random.choice(core.node_count, p=weight / total))
        else:
            root = int(self.random.integers(core.node_count))
        free = np.zeros(core.node_count, bool)
        queue, room = [root], self.size
        seen = {root}
        head = 0
        while head < len(queue) and room > 0:
            node = queue[head]
            head += 1
            free[node] = True
            room -= int(core.sizes[node]) - 1
            around = self.others[self.starts[node] : self.starts[node + 1]]
            for neighbour in self.random.permutation(around).tolist():
                if neighbour not in seen:
                    seen.add(neighbour)
                    queue.append(neighbour)
        return free

    def _window(self, core: Core) -> np.ndarray:
        """The nodes with memory at a window of times around a random row."""
        row = int(self.random.integers(len(core.capacities)))
        middle = (core.piece_rows[:, 0] + core.piece_rows[:, 1]) / 2.0
        free = np.zeros(core.node_count, bool)
        room = self.size
        for piece in np.argsort(np.abs(middle - row), kind="stable").tolist():
            node = int(core.piece_nodes[piece])
            if not free[node]:
                free[node] = True
                room -= int(core.sizes[node]) - 1
                if room <= 0:
                    break
        return free
