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

    `nodes` are the original numbers of the nodes; ``original[node_offsets[v] + s]`` is the original number of
    strategy ``s``.
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

    def worst_cost(self) -> int:
        """No allowed choice costs more (constant included).

        Reductions that ran out of time leave forbidden strategies behind; their costs, added up, would leave 64 bits.
        """
        if not self.node_count:
            return self.constant
        costs = np.where(self.costs < FORBIDDEN_COST // 2, self.costs, 0)
        total = int(np.maximum.reduceat(costs, self.node_offsets[:-1]).sum()) + self.constant
        if len(self.edge_nodes):
            allowed = np.where(self.table_values < FORBIDDEN_COST // 2, self.table_values, 0)
            total += int(np.maximum.reduceat(allowed, self.table_offsets[:-1]).sum())
        return total

    def overflow(self, choice: np.ndarray) -> int:
        """Bytes over the capacity at the worst row (0 when feasible)."""
        return int(np.maximum(self.loads(choice) - self.capacities, 0).max(initial=0))


@dataclass(eq=False)
class Reduction:
    """A problem and what the exact reductions made of it. `shrink` goes on from there; `undo` maps choices back.

    With a `parent`, the problem that was reduced is the parent's core, and `undo` goes all the way back.
    """

    reducer: Reducer
    core: Core
    feasible: bool
    node_count: int
    parent: Reduction | None = None

    def undo(self, choice: np.ndarray) -> np.ndarray:
        """The full choice (original strategies) for a choice of the core's strategies."""
        full = np.zeros(self.node_count, np.int32)
        core = self.core
        full[core.nodes] = core.original[core.node_offsets[:-1] + choice]
        whole = self.reducer.undo(full).astype(np.int64)
        return whole if self.parent is None else self.parent.undo(whole)

    def project(self, full: np.ndarray) -> np.ndarray | None:
        """The core's choice that agrees with a full one, or None where a strategy of it was removed."""
        if self.parent is not None:
            inner = self.parent.project(full)
            if inner is None:
                return None
            full = inner
        core = self.core
        hits = np.flatnonzero(core.original == np.repeat(full[core.nodes], core.sizes))
        if len(hits) != core.node_count:
            return None
        return (hits - core.node_offsets[:-1]).astype(np.int32)

    def project_known(self, full: np.ndarray) -> np.ndarray:
        """As `project`, with -1 for nodes whose strategy was removed."""
        if self.parent is not None:
            full = self.parent.project_known(full)
        core = self.core
        choice = np.full(core.node_count, -1, np.int64)
        hits = np.flatnonzero(core.original == np.repeat(full[core.nodes], core.sizes))
        node = np.searchsorted(core.node_offsets, hits, side="right") - 1
        choice[node] = hits - core.node_offsets[node]
        return choice

    def rows(self) -> np.ndarray:
        """The core's rows as numbers of the original problem's rows."""
        return self.core.rows if self.parent is None else self.parent.rows()[self.core.rows]

    def shrink(
        self,
        forbidden: np.ndarray | None = None,
        forbidden_entries: np.ndarray | None = None,
        out_of_time: Callable[[], bool] | None = None,
    ) -> Reduction:
        """Forbid strategies (bool per strategy of the core) and pairs (bool per table entry) and reduce on, in
        place."""
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
        return Reduction(
            self.reducer, Core(**self.reducer.extract()) if feasible else core, feasible, self.node_count, self.parent
        )


def reduced(
    problem: IntegerProblem | Reduction, switches: int = SWITCH_ALL, out_of_time: Callable[[], bool] | None = None
) -> Reduction:
    """Apply the exact reductions until nothing changes.

    A `Reduction` is copied: reducing the copy further leaves it as it is.
    """
    if isinstance(problem, Reduction):
        core, parent = problem.core, problem
        edge_tables = np.arange(len(core.edge_nodes), dtype=np.int32)
        arrays: Core | IntegerProblem = core
    else:
        parent, edge_tables, arrays = None, problem.edge_tables, problem
    reducer = Reducer(
        arrays.node_offsets,
        arrays.costs,
        arrays.edge_nodes,
        edge_tables,
        arrays.table_offsets,
        arrays.table_values,
        arrays.piece_nodes,
        arrays.piece_rows,
        arrays.piece_offsets,
        arrays.piece_usages,
        arrays.capacities,
        switches,
    )
    if parent is not None:
        reducer.constant = parent.core.constant
    feasible = reducer.run(out_of_time)
    return Reduction(reducer, Core(**reducer.extract()), feasible, arrays.node_count, parent)
