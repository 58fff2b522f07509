"""The layout problem: nodes with strategies, pairwise costs, memory over time. Nothing of deep learning is left in it.

Choose one strategy for every node. The cost of a choice is the sum of the chosen strategies' node costs and, for
every edge, of
the entry of its table at the two chosen strategies. At every time the usages of the chosen strategies of all pieces
whose
half-open interval ``[start, stop)`` holds that time must not add up to more than the usage limit. An empty interval
never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sbp.errors import ProblemError

FORBIDDEN_INTEGER = 10**18
"""An integer cost of this much or more forbids the strategy or the pair (the contest's convention)."""

_LARGEST_TOTAL = 2**62
_LARGEST_USAGE = 2**62


def _frozen(values, dtype) -> np.ndarray:
    array = np.ascontiguousarray(values, dtype=dtype)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Problem:
    """A layout problem as flat arrays; build one with `ProblemBuilder` or read one with
    `sbp.planner.iopddl.read_problem`.

    Attributes
    ----------
    node_offsets : int64 (nodes + 1,)
        Strategies of node ``v`` are the entries ``node_offsets[v]:node_offsets[v + 1]`` of `costs`.
    costs : int64 or float64 (strategies,)
        Node costs: seconds when float64. Forbidden: ``inf`` (float64), ``>= 10**18`` (int64).
    edge_nodes : int32 (edges, 2)
        The two end nodes of each edge. Parallel edges are allowed, loops are not.
    edge_tables : int32 (edges,)
        Which shared table prices the edge: rows are strategies of the first node, columns of the second.
    table_shapes : int32 (tables, 2)
    table_offsets : int64 (tables + 1,)
    table_values : int64 or float64 (entries,)
        The tables, row-major, one after the other; the same type and convention as `costs`.
    piece_nodes : int32 (pieces,)
        The node of each usage piece, ascending. A node may have none, one or several.
    piece_intervals : int64 (pieces, 2)
        Half-open ``[start, stop)`` on one time axis.
    piece_offsets : int64 (pieces + 1,)
    piece_usages : int64 (entries,)
        Bytes used by each strategy of the piece's node during the interval.
    usage_limit : int or None
        Bytes; None when memory does not matter.
    name : str
    node_names : tuple of str
        One per node (may be empty strings), used in messages.
    strategy_labels : tuple of (tuple of str or None)
        Per node the labels of its strategies, used in messages; empty when none are known.
    """

    node_offsets: np.ndarray
    costs: np.ndarray
    edge_nodes: np.ndarray
    edge_tables: np.ndarray
    table_shapes: np.ndarray
    table_offsets: np.ndarray
    table_values: np.ndarray
    piece_nodes: np.ndarray
    piece_intervals: np.ndarray
    piece_offsets: np.ndarray
    piece_usages: np.ndarray
    usage_limit: int | None = None
    name: str = ""
    node_names: tuple[str, ...] = ()
    strategy_labels: tuple[tuple[str, ...] | None, ...] = field(default=())

    @property
    def node_count(self) -> int:
        return len(self.node_offsets) - 1

    @property
    def edge_count(self) -> int:
        return len(self.edge_tables)

    @property
    def strategy_count(self) -> int:
        return len(self.costs)

    @property
    def is_integer(self) -> bool:
        """Whether costs are int64 (float64 seconds otherwise)."""
        return self.costs.dtype == np.int64

    def strategies(self, node: int) -> int:
        """The number of strategies of a node."""
        return int(self.node_offsets[node + 1] - self.node_offsets[node])

    def node_costs(self, node: int) -> np.ndarray:
        return self.costs[self.node_offsets[node] : self.node_offsets[node + 1]]

    def table(self, edge: int) -> np.ndarray:
        """The (strategies of first, strategies of second) table of an edge."""
        index = self.edge_tables[edge]
        values = self.table_values[self.table_offsets[index] : self.table_offsets[index + 1]]
        return values.reshape(self.table_shapes[index])

    def node_name(self, node: int) -> str:
        """The node's name for messages; its number when it has none."""
        name = self.node_names[node] if node < len(self.node_names) else ""
        return name or f"node {node}"

    def strategy_name(self, node: int, strategy: int) -> str:
        labels = self.strategy_labels[node] if node < len(self.strategy_labels) else None
        return labels[strategy] if labels else f"strategy {strategy}"

    def without_limit(self) -> Problem:
        """The same problem with memory ignored."""
        return self.with_limit(None)

    def with_limit(self, usage_limit: int | None) -> Problem:
        """The same problem under another usage limit (bytes)."""
        from dataclasses import replace

        return replace(self, usage_limit=_checked_limit(usage_limit))

    def forbidden_costs(self) -> np.ndarray:
        """Which entries of `costs` are forbidden."""
        return self.costs >= FORBIDDEN_INTEGER if self.is_integer else np.isposinf(self.costs)

    def __repr__(self) -> str:
        limit = "no limit" if self.usage_limit is None else f"limit {self.usage_limit:,} bytes"
        return (
            f"Problem({self.name or 'unnamed'}: {self.node_count:,} nodes, {self.strategy_count:,} strategies, "
            f"{self.edge_count:,} edges over {len(self.table_shapes):,} tables, "
            f"{len(self.piece_nodes):,} pieces, {limit})"
        )


class ProblemBuilder:
    """Collects nodes, usages and edges, checks each where it is given, and builds a `Problem`.

    Costs may be integers or floats; if any is a float, the whole problem is float64.
    Tables that are equal are stored once; passing the same array object again costs nothing but a dictionary look-up.
    """

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._costs: list[np.ndarray] = []
        self._names: list[str] = []
        self._labels: list[tuple[str, ...] | None] = []
        self._edges: list[tuple[int, int, int]] = []
        self._tables: list[np.ndarray] = []
        self._table_by_object: dict[int, tuple[np.ndarray, int]] = {}
        self._table_by_content: dict[tuple[tuple[int, ...], str, bytes], int] = {}
        self._pieces: list[tuple[int, int, int, np.ndarray]] = []

    @property
    def node_count(self) -> int:
        return len(self._costs)

    def _where(self, node: int) -> str:
        name = self._names[node]
        return f"node {node} ({name})" if name else f"node {node}"

    def add_node(self, costs, name: str = "", labels: Sequence[str] | None = None) -> int:
        """Add a node and return its number.

        Parameters
        ----------
        costs : array (strategies,)
            Seconds (float) or integers; ``inf`` or ``>= 10**18`` forbids a strategy.
        name, labels
            Used in messages only.
        """
        node = len(self._costs)
        where = f"node {node} ({name})" if name else f"node {node}"
        array = _checked_costs(costs, f"costs of {where}")
        if array.ndim != 1 or array.size == 0:
            raise ProblemError(
                f"costs of {where}: expected one cost per strategy, at least one; got shape {array.shape}"
            )
        if labels is not None and len(labels) != array.size:
            raise ProblemError(f"labels of {where}: {len(labels)} labels for {array.size} strategies")
        self._costs.append(array)
        self._names.append(name)
        self._labels.append(tuple(labels) if labels is not None else None)
        return node

    def add_usage(self, node: int, start: int, stop: int, usage) -> None:
        """Let `node` use ``usage[strategy]`` bytes during the half-open interval ``[start, stop)``."""
        if not 0 <= node < len(self._costs):
            raise ProblemError(f"usage: node {node} does not exist; add_node returned 0 to {len(self._costs) - 1}")
        where = self._where(node)
        if int(start) != start or int(stop) != stop:
            raise ProblemError(f"interval of {where}: [{start}, {stop}) is not made of integers")
        if stop < start or start < 0 or stop >= 2**62:
            raise ProblemError(f"interval of {where}: [{start}, {stop}) must satisfy 0 <= start <= stop < 2**62")
        array = np.asarray(usage)
        if array.dtype.kind not in "iub":
            raise ProblemError(f"usages of {where}: expected integers (bytes), got {array.dtype}")
        if array.shape != self._costs[node].shape:
            raise ProblemError(f"usages of {where}: shape {array.shape} for {self._costs[node].size} strategies")
        if array.min() < 0 or array.max() >= _LARGEST_USAGE:
            raise ProblemError(f"usages of {where}: {array.min()} to {array.max()} bytes is outside 0 to 2**62")
        self._pieces.append((node, int(start), int(stop), array.astype(np.int64)))

    def add_edge(self, first: int, second: int, table) -> None:
        """Price the pair of strategies of two nodes with ``table[strategy of first, strategy of second]``."""
        for node in (first, second):
            if not 0 <= node < len(self._costs):
                raise ProblemError(
                    f"edge {len(self._edges)}: node {node} does not exist; "
                    f"add_node returned 0 to {len(self._costs) - 1}"
                )
        if first == second:
            raise ProblemError(f"edge {len(self._edges)}: both ends are {self._where(first)}; put the cost on the node")
        index = self._table_index(table, len(self._edges))
        expected = (self._costs[first].size, self._costs[second].size)
        if self._tables[index].shape != expected:
            raise ProblemError(
                f"table of edge {len(self._edges)} between {self._where(first)} and {self._where(second)}: "
                f"shape {self._tables[index].shape}, expected {expected}"
            )
        self._edges.append((int(first), int(second), index))

    def _table_index(self, table, edge: int) -> int:
        known = self._table_by_object.get(id(table))
        if known is not None and known[0] is table:
            return known[1]
        array = _checked_costs(table, f"table of edge {edge}")
        key = (array.shape, array.dtype.str, array.tobytes())
        index = self._table_by_content.get(key)
        if index is None:
            index = len(self._tables)
            self._tables.append(array)
            self._table_by_content[key] = index
        if isinstance(table, np.ndarray) and not table.flags.writeable:
            # A writeable array may be changed and passed again, so only frozen ones are recognised by identity.
            self._table_by_object[id(table)] = (table, index)
        return index

    def build(self, usage_limit: int | None = None) -> Problem:
        """The finished problem; `usage_limit` in bytes, None when memory does not matter."""
        if not self._costs:
            raise ProblemError("the problem has no nodes; add at least one with add_node")
        everything = [*self._costs, *self._tables]
        dtype = np.float64 if any(array.dtype == np.float64 for array in everything) else np.int64
        self._pieces.sort(key=lambda piece: piece[0])  # stable: pieces of a node keep their order
        problem = Problem(
            node_offsets=_offsets(self._costs),
            costs=_concatenated(self._costs, dtype),
            edge_nodes=_frozen([edge[:2] for edge in self._edges], np.int32).reshape(-1, 2),
            edge_tables=_frozen([edge[2] for edge in self._edges], np.int32),
            table_shapes=_frozen([table.shape for table in self._tables], np.int32).reshape(-1, 2),
            table_offsets=_offsets(self._tables),
            table_values=_concatenated(self._tables, dtype),
            piece_nodes=_frozen([piece[0] for piece in self._pieces], np.int32),
            piece_intervals=_frozen([piece[1:3] for piece in self._pieces], np.int64).reshape(-1, 2),
            piece_offsets=_offsets([piece[3] for piece in self._pieces]),
            piece_usages=_concatenated([piece[3] for piece in self._pieces], np.int64),
            usage_limit=_checked_limit(usage_limit),
            name=self._name,
            node_names=tuple(self._names),
            strategy_labels=tuple(self._labels) if any(labels is not None for labels in self._labels) else (),
        )
        check_totals(problem)
        return problem


def check_totals(problem: Problem) -> None:
    """Refuse numbers whose sums would leave 64 bits (usages) or float64 (costs)."""
    if problem.piece_usages.size:
        largest = np.maximum.reduceat(problem.piece_usages, problem.piece_offsets[:-1])
        if float(largest.astype(np.float64).sum()) >= _LARGEST_TOTAL:
            raise ProblemError("usages: they may add up to more than 2**62 bytes; give them in a larger unit")
    finite = problem.costs[~problem.forbidden_costs()]
    values = problem.table_values
    tables = values[values < FORBIDDEN_INTEGER] if problem.is_integer else values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        total = np.abs(finite.astype(np.float64)).sum()
        if tables.size:
            total += problem.edge_count * np.abs(tables.astype(np.float64)).max()
    if not np.isfinite(total):
        raise ProblemError("costs: their sum overflows float64; give them in a larger unit")


def _checked_costs(values, field_name: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ProblemError(f"{field_name}: not an array of numbers ({error})") from None
    if array.dtype.kind in "iub":
        if array.dtype.kind == "u" and array.size and int(array.max()) >= FORBIDDEN_INTEGER:
            array = np.minimum(array, np.uint64(FORBIDDEN_INTEGER))
        array = array.astype(np.int64)
        if array.size and int(array.min()) <= -FORBIDDEN_INTEGER:
            raise ProblemError(f"{field_name}: {array.min()} is below -10**18")
    elif array.dtype.kind == "f":
        array = array.astype(np.float64)
        if np.isnan(array).any():
            raise ProblemError(
                f"{field_name}: contains NaN at {tuple(int(i) for i in np.argwhere(np.isnan(array))[0])}"
            )
        if np.isneginf(array).any():
            raise ProblemError(f"{field_name}: contains -inf; only +inf (forbidden) is allowed")
    else:
        raise ProblemError(f"{field_name}: expected numbers, got {array.dtype}")
    return array


def _checked_limit(usage_limit) -> int | None:
    if usage_limit is None:
        return None
    if isinstance(usage_limit, (bool, float)) or int(usage_limit) != usage_limit:
        raise ProblemError(f"usage_limit: expected an integer number of bytes or none, got {usage_limit!r}")
    if not 0 <= usage_limit < 2**63:
        raise ProblemError(f"usage_limit: {usage_limit} is outside 0 to 2**63")
    return int(usage_limit)


def _offsets(arrays: Sequence[np.ndarray]) -> np.ndarray:
    sizes = np.fromiter((array.size for array in arrays), np.int64, len(arrays))
    return _frozen(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), np.int64)


def _concatenated(arrays: Sequence[np.ndarray], dtype) -> np.ndarray:
    if not arrays:
        return _frozen(np.empty(0, dtype), dtype)
    if dtype == np.float64:
        # Mixed problems: an integer's forbidden mark becomes the float one.
        arrays = [
            np.where(array >= FORBIDDEN_INTEGER, np.inf, array.astype(np.float64)) if array.dtype == np.int64 else array
            for array in arrays
        ]
    return _frozen(np.concatenate([array.ravel() for array in arrays]), dtype)


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs and uses, computed from the problem alone.

    Attributes
    ----------
    cost : int or float
        Objective in the problem's unit; ``inf`` when a forbidden strategy or pair is chosen.
    peak : int
        Largest load over time, bytes.
    peak_time : int or None
        The earliest time at which it is reached.
    within_limit : bool
    """

    cost: int | float
    peak: int
    peak_time: int | None
    within_limit: bool

    @property
    def feasible(self) -> bool:
        return self.within_limit and self.cost != float("inf")


def evaluate(problem: Problem, choice) -> Evaluation:
    """Cost and peak memory of a choice, in exact integers where the problem is one, independently of any solver.

    Raises
    ------
    ProblemError
        If the choice has the wrong length or an index out of range.
    """
    chosen = checked_choice(problem, choice)
    cost = _cost(problem, chosen)
    times, loads = usage_profile(problem, chosen)
    peak_index = int(np.argmax(loads)) if loads.size else 0
    peak = int(loads[peak_index]) if loads.size else 0
    within = problem.usage_limit is None or peak <= problem.usage_limit
    return Evaluation(cost, peak, int(times[peak_index]) if loads.size else None, within)


def checked_choice(problem: Problem, choice) -> np.ndarray:
    """The choice as int64 (nodes,), after checking its length and range."""
    try:
        chosen = np.asarray(choice)
    except (ValueError, OverflowError) as error:
        raise ProblemError(f"choice: not a list of strategy indices ({error})") from None
    if chosen.shape != (problem.node_count,):
        raise ProblemError(f"choice: expected {problem.node_count} strategy indices, got shape {chosen.shape}")
    if chosen.dtype.kind not in "iu":
        raise ProblemError(f"choice: expected integers, got {chosen.dtype}")
    sizes = np.diff(problem.node_offsets)
    wrong = np.flatnonzero((chosen < 0) | (chosen >= sizes))
    if wrong.size:
        node = int(wrong[0])
        raise ProblemError(
            f"choice: {problem.node_name(node)} has {sizes[node]} strategies, index {chosen[node]} is out of range"
        )
    return chosen.astype(np.int64)


def _cost(problem: Problem, chosen: np.ndarray) -> int | float:
    node_values = problem.costs[problem.node_offsets[:-1] + chosen]
    tables = problem.edge_tables
    if tables.size:
        rows, columns = chosen[problem.edge_nodes[:, 0]], chosen[problem.edge_nodes[:, 1]]
        edge_values = problem.table_values[
            problem.table_offsets[tables] + rows * problem.table_shapes[tables, 1] + columns
        ]
    else:
        edge_values = problem.table_values[:0]
    values = np.concatenate([node_values, edge_values])
    if problem.is_integer:
        if (values >= FORBIDDEN_INTEGER).any():
            return float("inf")
        # Python integers do not wrap; halves are summed separately to stay in NumPy.
        return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
    from math import fsum

    return fsum(values.tolist()) if np.isfinite(values).all() else float("inf")


def usage_profile(problem: Problem, choice) -> tuple[np.ndarray, np.ndarray]:
    """Times at which the load changes and the load (bytes) from each of them on; both empty without pieces."""
    chosen = np.asarray(choice, dtype=np.int64)
    start, stop = problem.piece_intervals[:, 0], problem.piece_intervals[:, 1]
    used = (
        problem.piece_usages[problem.piece_offsets[:-1] + chosen[problem.piece_nodes]]
        if len(start)
        else problem.piece_usages
    )
    counts = stop > start
    times, where = np.unique(np.concatenate([start[counts], stop[counts]]), return_inverse=True)
    change = np.zeros(len(times), np.int64)
    np.add.at(change, where, np.concatenate([used[counts], -used[counts]]))
    return times, np.cumsum(change)
