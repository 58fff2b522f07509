"""What is left of a problem after the reductions, as flat arrays, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sbp.planner.solver.reducer import FORBIDDEN_COST, SWITCH_ALL, Reducer
from sbp.planner.solver.scale import IntegerProblem


@dataclass(frozen=True, eq=False)
class Core:
    """A residual problem: at most one edge between two nodes, tables normalised, usages relative to their minimum.

    `nodes` are the original numbers of the nodes; ``original[node_offsets[v] + s]`` is the original number of strategy ``s``.
    `rows` are the numbers of the surviving rows in the integer problem. The cost of a choice is `constant` more than
    the sum over the arrays.
    """

    nodes: np.ndarray
    node_offsets: np.ndarray
    costs: np.ndarray
    original: np.ndarray
    edge_nodes: np.ndarray
    table_offsets: np.ndarray
    table_values: np.ndarray
    piece_nodes: np.ndarray
    piece_rows: np.ndarray
    piece_offsets: np.ndarray
    piece_usages: np.ndarray
    capacities: np.ndarray
    rows: np.ndarray
    constant: int

    @property
    def node_count(self) -> int:
        return len(self.nodes)

    @property
    def strategy_count(self) -> int:
        return len(self.costs)

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.node_offsets)

    def cost(self, choice: np.ndarray) -> int:
        """Total cost (constant included) of a choice of current strategies; `FORBIDDEN_COST` when forbidden."""
        values = self.costs[self.node_offsets[:-1] + choice]
        if len(self.edge_nodes):
            columns = self.sizes[self.edge_nodes[:, 1]]
            where = self.table_offsets[:-1] + choice[self.edge_nodes[:, 0]] * columns + choice[self.edge_nodes[:, 1]]
            values = np.concatenate([values, self.table_values[where]])
        return FORBIDDEN_COST if (values >= FORBIDDEN_COST).any() else int(values.sum()) + self.constant

    def loads(self, choice: np.ndarray) -> np.ndarray:
        """Usage above the minimum at each row."""
        change = np.zeros(len(self.capacities) + 1, np.int64)
        if len(self.piece_nodes):
            used = self.piece_usages[self.piece_offsets[:-1] + choice[self.piece_nodes]]
            np.add.at(change, self.piece_rows[:, 0], used)
            np.add.at(change, self.piece_rows[:, 1], -used)
        return np.cumsum(change)[:-1]

    def overflow(self, choice: np.ndarray) -> int:
        """Bytes over the capacity at the worst row (0 when feasible)."""
        return int(np.maximum(self.loads(choice) - self.capacities, 0).max(initial=0))


@dataclass(eq=False)
class Reduction:
    """A problem and what the exact reductions made of it. `shrink` goes on from there; `undo` maps choices back."""

    problem: IntegerProblem
    reducer: Reducer
    core: Core
    feasible: bool

    def undo(self, choice: np.ndarray) -> np.ndarray:
        """The full choice (original strategies) for a choice of the core's strategies."""
        full = np.zeros(self.problem.node_count, np.int32)
        core = self.core
        full[core.nodes] = core.original[core.node_offsets[:-1] + choice]
        return self.reducer.undo(full).astype(np.int64)

    def project(self, full: np.ndarray) -> np.ndarray | None:
        """The core's choice that agrees with a full one, or None where a strategy of it was removed."""
        core = self.core
        wanted = np.repeat(full[core.nodes], core.sizes)
        hits = np.flatnonzero(core.original == wanted)
        if len(hits) != core.node_count:
            return None
        return (hits - core.node_offsets[:-1]).astype(np.int32)

    def shrink(
        self,
        forbidden: np.ndarray | None = None,
        forbidden_entries: np.ndarray | None = None,
        out_of_time: Callable[[], bool] | None = None,
    ) -> Reduction:
        """Forbid strategies (bool per strategy of the core) and pairs (bool per table entry) and reduce again, in place."""
        core = self.core
        if forbidden_entries is not None and forbidden_entries.any():
            where = np.flatnonzero(forbidden_entries)
            edge = np.searchsorted(core.table_offsets, where, side="right") - 1
            inside = where - core.table_offsets[edge]
            columns = core.sizes[core.edge_nodes[edge, 1]]
            ends = core.nodes[core.edge_nodes[edge]]
            self.reducer.forbid_pairs(
                np.ascontiguousarray(ends[:, 0], np.int32),
                np.ascontiguousarray(ends[:, 1], np.int32),
                (inside // columns).astype(np.int32),
                (inside % columns).astype(np.int32),
            )
        if forbidden is not None and forbidden.any():
            where = np.flatnonzero(forbidden)
            node = np.searchsorted(core.node_offsets, where, side="right") - 1
            self.reducer.forbid(core.nodes[node].astype(np.int32), (where - core.node_offsets[node]).astype(np.int32))
        feasible = self.reducer.run(out_of_time)
        return Reduction(self.problem, self.reducer, Core(**self.reducer.extract()) if feasible else core, feasible)


def reduced(problem: IntegerProblem, switches: int = SWITCH_ALL, out_of_time: Callable[[], bool] | None = None) -> Reduction:
    """Apply the exact reductions until nothing changes."""
    reducer = Reducer(
        problem.node_offsets,
        problem.costs,
        problem.edge_nodes,
        problem.edge_tables,
        problem.table_offsets,
        problem.table_values,
        problem.piece_nodes,
        problem.piece_rows,
        problem.piece_offsets,
        problem.piece_usages,
        problem.capacities,
        switches,
    )
    feasible = reducer.run(out_of_time)
    core = Core(**reducer.extract())
    return Reduction(problem, reducer, core, feasible)
