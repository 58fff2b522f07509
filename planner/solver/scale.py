"""From a `Problem` to 64-bit integers: costs scaled down to a stated resolution, memory over time turned into rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sbp.planner.problem import FORBIDDEN_INTEGER, Problem
from sbp.planner.solver.reducer import FORBIDDEN_COST

# Sums of all costs stay below this, so that no intermediate of the reductions can leave 64 bits or reach
# FORBIDDEN_COST.
_LARGEST_SUM = 2.0**57


@dataclass(frozen=True, eq=False)
class IntegerProblem:
    """A problem in integers. Costs are rounded *down*, so its optimum is a lower bound of the problem's.

    One unit is ``2**-exponent`` of the problem's unit (exponent 0, exact, for integer problems that fit).
    The same arrays as in `Problem`; forbidden is `FORBIDDEN_COST`. Rows are the times at which some piece starts:
    a load can only grow there. `piece_rows` are the rows (first, last + 1) that a piece covers.
    """

    node_offsets: np.ndarray
    costs: np.ndarray
    edge_nodes: np.ndarray
    edge_tables: np.ndarray
    table_offsets: np.ndarray
    table_values: np.ndarray
    piece_nodes: np.ndarray
    piece_rows: np.ndarray
    piece_offsets: np.ndarray
    piece_usages: np.ndarray
    row_times: np.ndarray
    capacities: np.ndarray
    exponent: int
    exact: bool

    @property
    def node_count(self) -> int:
        return len(self.node_offsets) - 1

    def to_problem_unit(self, value: int | float) -> int | float:
        """A cost or bound of this problem in the unit of the original one (rounded down when integers were scaled)."""
        if not math.isfinite(value):
            return value
        if self.exact:
            return int(value)
        return math.ldexp(float(value), -self.exponent)

    def cost(self, choice: np.ndarray) -> int:
        """Objective of a choice in this problem's units, `FORBIDDEN_COST` when forbidden."""
        values = self.costs[self.node_offsets[:-1] + choice]
        if len(self.edge_tables):
            columns = np.diff(self.node_offsets)[self.edge_nodes[:, 1]]
            where = (
                self.table_offsets[self.edge_tables]
                + choice[self.edge_nodes[:, 0]] * columns
                + choice[self.edge_nodes[:, 1]]
            )
            values = np.concatenate([values, self.table_values[where]])
        return FORBIDDEN_COST if (values >= FORBIDDEN_COST).any() else int(values.sum())

    def loads(self, choice: np.ndarray) -> np.ndarray:
        """Bytes in use at each row."""
        change = np.zeros(len(self.row_times) + 1, np.int64)
        if len(self.piece_nodes):
            used = self.piece_usages[self.piece_offsets[:-1] + choice[self.piece_nodes]]
            np.add.at(change, self.piece_rows[:, 0], used)
            np.add.at(change, self.piece_rows[:, 1], -used)
        return np.cumsum(change)[:-1]

    def with_rows(self, keep: np.ndarray) -> IntegerProblem:
        """The same problem with only some rows (bool per row): a relaxation."""
        from dataclasses import replace

        position = np.concatenate([[0], np.cumsum(keep)]).astype(np.int32)
        return replace(
            self,
            row_times=self.row_times[keep],
            capacities=self.capacities[keep],
            piece_rows=position[self.piece_rows],
        )


def scaled(problem: Problem) -> IntegerProblem:
    """The integer problem (see `IntegerProblem`)."""
    exponent, exact = _exponent(problem)
    times, piece_rows = _rows(problem)
    limit = problem.usage_limit
    return IntegerProblem(
        node_offsets=problem.node_offsets,
        costs=_integers(problem.costs, exponent),
        edge_nodes=problem.edge_nodes,
        edge_tables=problem.edge_tables,
        table_offsets=problem.table_offsets,
        table_values=_integers(problem.table_values, exponent),
        piece_nodes=problem.piece_nodes,
        piece_rows=piece_rows,
        piece_offsets=problem.piece_offsets,
        piece_usages=problem.piece_usages,
        row_times=times if limit is not None else times[:0],
        capacities=np.full(len(times) if limit is not None else 0, limit or 0, np.int64),
        exponent=exponent,
        exact=exact,
    )


def _exponent(problem: Problem) -> tuple[int, bool]:
    """Power of two by which costs are multiplied, and whether that is exact."""
    total = _largest_total(problem.costs, problem.node_offsets, None)
    if len(problem.edge_tables):
        total += _largest_total(problem.table_values, problem.table_offsets, problem.edge_tables)
    if problem.is_integer:
        if total < _LARGEST_SUM:
            return 0, True
        return -math.ceil(math.log2(total / _LARGEST_SUM)), False
    if total == 0:
        return 0, False
    return min(1000, math.floor(math.log2(_LARGEST_SUM / total))), False


def _largest_total(values: np.ndarray, offsets: np.ndarray, uses: np.ndarray | None) -> float:
    finite = np.abs(values.astype(np.float64))
    finite[finite >= FORBIDDEN_INTEGER if values.dtype == np.int64 else np.isinf(finite)] = 0.0
    largest = np.maximum.reduceat(finite, offsets[:-1])
    return float((largest if uses is None else largest[uses]).sum())


def _integers(values: np.ndarray, exponent: int) -> np.ndarray:
    if values.dtype == np.int64:
        forbidden = values >= FORBIDDEN_INTEGER
        whole = values if exponent == 0 else values >> -exponent
    else:
        forbidden = np.isposinf(values)
        whole = np.floor(np.ldexp(np.where(forbidden, 0.0, values), exponent)).astype(np.int64)
    return np.where(forbidden, np.int64(FORBIDDEN_COST), whole)


def _rows(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    start, stop = problem.piece_intervals[:, 0], problem.piece_intervals[:, 1]
    if not len(start):
        return np.empty(0, np.int64), np.empty((0, 2), np.int32)
    counts = stop > start
    times = np.unique(start[counts])
    if problem.usage_limit is None:
        return times, np.zeros((len(start), 2), np.int32)
    rows = np.stack([np.searchsorted(times, start), np.searchsorted(times, stop)], axis=1).astype(np.int32)
    rows[~counts] = 0
    return times, rows
