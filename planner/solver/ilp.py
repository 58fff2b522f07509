"""The residual problem as an integer program (local polytope: node variables integer, pair variables continuous), by OR-Tools.

Memory rows are added lazily: only those that a solution violates. A *budget row* may state that no better choice can use
strategies whose reduced costs add up to more than the gap; it is redundant, and it makes branching strong.
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass

import numpy as np

from sbp.planner.solver.core import Core
from sbp.planner.solver.reducer import FORBIDDEN_COST

HALF = FORBIDDEN_COST // 2


@dataclass(frozen=True, eq=False)
class IlpResult:
    """`choice` is over the core's strategies (None if none was found below the cutoff); bounds include the core's constant.

    `finished` says that the search was complete: `choice` is optimal, or there is no choice better than the cutoff.
    """

    choice: np.ndarray | None
    lower_bound: int
    finished: bool
    rows_used: int


@dataclass(frozen=True, eq=False)
class Budget:
    """Reduced costs (per strategy, per table entry; integers >= 0) over a bound: their sum over a choice is at most `room`.

    `row_prices` (per row, >= 0, float) multiply the slack of the rows, which is part of the sum.
    """

    strategy: np.ndarray
    entry: np.ndarray
    room: float
    row_prices: np.ndarray | None = None


@dataclass(eq=False)
class _Model:
    """Columns: one per strategy, then one per allowed table entry. Rows as (columns, values, low, high)."""

    columns: int
    integer: int
    objective: np.ndarray
    entry_column: np.ndarray
    row_index: list[np.ndarray]
    column_index: list[np.ndarray]
    coefficient: list[np.ndarray]
    low: list[np.ndarray]
    high: list[np.ndarray]
    row_count: int = 0

    def add(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """`rows` count from 0 within this block."""
        self.row_index.append(rows + self.row_count)
        self.column_index.append(columns)
        self.coefficient.append(values)
        self.low.append(low)
        self.high.append(high)
        self.row_count += len(low)


def _base_model(core: Core, scale: float, pairs_integer: bool) -> _Model:
    strategies = core.strategy_count
    allowed = core.table_values < HALF
    entry_column = np.full(len(core.table_values), -1, np.int64)
    entry_column[allowed] = strategies + np.arange(int(allowed.sum()))
    objective = np.concatenate([core.costs, core.table_values[allowed]]).astype(np.float64) * scale
    columns = len(objective)
    model = _Model(columns, columns if pairs_integer else strategies, objective, entry_column, [], [], [], [], [])
    sizes = core.sizes
    node_of = np.repeat(np.arange(core.node_count), sizes)
    model.add(node_of, np.arange(strategies), np.ones(strategies), np.ones(core.node_count), np.ones(core.node_count))
    if len(core.edge_nodes):
        edge = np.repeat(np.arange(len(core.edge_nodes)), np.diff(core.table_offsets))
        inside = np.arange(len(core.table_values)) - core.table_offsets[edge]
        width = sizes[core.edge_nodes[edge, 1]]
        row, column = inside // width, inside % width
        for side, position in ((0, row), (1, column)):
            ends = core.edge_nodes[:, side]
            counts = sizes[ends]
            starts = np.concatenate([[0], np.cumsum(counts)])
            total = int(starts[-1])
            of_edge = np.repeat(np.arange(len(ends)), counts)
            local = np.arange(total) - starts[of_edge]
            strategy = core.node_offsets[ends[of_edge]] + local
            block_rows = np.concatenate([np.arange(total), (starts[edge] + position)[allowed]])
            block_columns = np.concatenate([strategy, entry_column[allowed]])
            values = np.concatenate([-np.ones(total), np.ones(int(allowed.sum()))])
            model.add(block_rows, block_columns, values, np.zeros(total), np.zeros(total))
    return model


def row_usages(core: Core, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Non-zero usages at some rows: (position in `rows`, strategy, bytes), pieces of one node added up."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.searchsorted(ordered, core.piece_rows[:, 0])
    last = np.searchsorted(ordered, core.piece_rows[:, 1])
    pieces = np.flatnonzero(last > first)
    sizes = core.sizes[core.piece_nodes[pieces]]
    hits, strategies, amounts = [], [], []
    for piece, size in zip(pieces.tolist(), sizes.tolist()):
        covered = order[first[piece] : last[piece]]
        usage = core.piece_usages[core.piece_offsets[piece] : core.piece_offsets[piece + 1]]
        used = np.flatnonzero(usage)
        start = core.node_offsets[core.piece_nodes[piece]]
        hits.append(np.repeat(covered, len(used)))
        strategies.append(np.tile(start + used, len(covered)))
        amounts.append(np.tile(usage[used], len(covered)))
    if not hits:
        nothing = np.empty(0, np.int64)
        return nothing, nothing, nothing
    key = np.concatenate(hits) * core.strategy_count + np.concatenate(strategies)
    unique, inverse = np.unique(key, return_inverse=True)
    total = np.zeros(len(unique), np.int64)
    np.add.at(total, inverse, np.concatenate(amounts))
    return unique // core.strategy_count, unique % core.strategy_count, total


def _add_rows(model: _Model, core: Core, rows: np.ndarray) -> None:
    where, strategy, amount = row_usages(core, rows)
    if not len(where):
        return
    starts = np.searchsorted(where, np.arange(len(rows)))
    stops = np.searchsorted(where, np.arange(len(rows)), side="right")
    values = np.empty(len(where))
    high = np.empty(len(rows))
    for index in range(len(rows)):
        piece = slice(starts[index], stops[index])
        # Whole multiples of a common divisor keep small coefficients exact in floating point.
        divisor = int(np.gcd.reduce(amount[piece])) if stops[index] > starts[index] else 1
        capacity = int(core.capacities[rows[index]]) // divisor
        whole = amount[piece] // divisor
        factor = 1.0 if capacity < 10**6 else 10.0**6 / capacity
        values[piece] = whole * factor
        high[index] = (capacity + 0.5 if capacity < 10**6 else capacity) * factor
    model.add(where, strategy, values, np.full(len(rows), -np.inf), high)


def _add_budget(model: _Model, core: Core, budget: Budget) -> None:
    used = np.flatnonzero(budget.strategy)
    columns = [used]
    values = [budget.strategy[used].astype(np.float64)]
    entries = np.flatnonzero((model.entry_column >= 0) & (budget.entry > 0))
    columns.append(model.entry_column[entries])
    values.append(budget.entry[entries].astype(np.float64))
    column, value = np.concatenate(columns), np.concatenate(values)
    scale = 1000.0 / max(budget.room, 1.0)
    # Anything above the room excludes its column alone; larger coefficients only hurt the numerics.
    value = np.minimum(value * scale, 2000.0)
    model.add(
        np.zeros(len(column), np.int64), column, value, np.array([-np.inf]), np.array([budget.room * scale * (1 + 1e-9) + 1e-6])
    )


def violated_rows(core: Core, choice: np.ndarray, most: int = 64) -> np.ndarray:
    """Rows where a choice exceeds the capacity: the worst row of every run of exceeded rows, the worst runs first."""
    excess = core.loads(choice) - core.capacities
    over = np.flatnonzero(excess > 0)
    if not len(over):
        return over
    runs = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    worst = np.array([run[np.argmax(excess[run])] for run in runs])
    return np.sort(worst[np.argsort(-excess[worst], kind="stable")][:most])


def solve_ilp(
    core: Core,
    time_limit: float,
    *,
    solver: str = "highs",
    threads: int = 1,
    seed: int = 0,
    cutoff: int | None = None,
    rows: np.ndarray | None = None,
    budget: Budget | None = None,
    magnitude: float | None = None,
) -> IlpResult:
    """Solve the core by OR-Tools.

    Parameters
    ----------
    time_limit : float
        Seconds, all rounds of lazy rows together.
    solver : {"highs", "cp-sat", "scip"}
    cutoff : int or None
        Look only for choices of at most this cost (constant included).
    rows : int array or None
        Memory rows to start with; others are added when violated. None starts with none.
    magnitude : float or None
        Size of the objective values that matter; costs are scaled so that it becomes 1e6. None: from the costs.
    """
    from sbp.planner.solver.result import Clock

    clock = Clock(time_limit)
    trivial = core.constant
    if core.node_count == 0:
        return IlpResult(np.empty(0, np.int64), trivial, cutoff is None or trivial <= cutoff, 0)
    if magnitude is None:
        if cutoff is not None:
            magnitude = max(1.0, float(cutoff - core.constant))
        else:
            finite = core.costs[core.costs < HALF]
            magnitude = max(1.0, float(finite.max(initial=0)) * math.sqrt(core.node_count))
    scale = 1.0 if solver == "cp-sat" and magnitude < 2**50 else min(1.0, 1e6 / magnitude)
    active = np.unique(rows).astype(np.int64) if rows is not None else np.empty(0, np.int64)
    lower = trivial
    while True:
        model = _base_model(core, scale, pairs_integer=solver == "cp-sat")
        if cutoff is not None:
            finite = np.flatnonzero(model.objective)
            room = (cutoff - core.constant) * scale
            model.add(np.zeros(len(finite), np.int64), finite, model.objective[finite], np.array([-np.inf]), np.array([room * (1 + 1e-9) + 1e-6]))
        if len(active):
            _add_rows(model, core, active)
        if budget is not None:
            _add_budget(model, core, budget)
        outcome = _run(model, solver, clock.left, threads, seed)
        if outcome is None:
            return IlpResult(None, lower, False, len(active))
        kind, values, bound = outcome
        if kind == "infeasible":
            return IlpResult(None, lower if cutoff is None else cutoff + 1, True, len(active))
        if math.isfinite(bound):
            # The solver's bound is a float: give away its tolerance before rounding up to the integer grid.
            lower = max(lower, math.ceil((bound - 1e-6 * max(1.0, abs(bound) * 1e-3)) / scale - 1e-6) + core.constant)
            if cutoff is not None:
                lower = min(lower, cutoff + 1)
        if values is None:
            return IlpResult(None, lower, False, len(active))
        choice = _rounded(core, values)
        missing = np.setdiff1d(violated_rows(core, choice), active)
        if core.overflow(choice) > 0:
            if not len(missing) or clock.left <= 0:
                return IlpResult(None, lower, False, len(active))
            active = np.union1d(active, missing)
            continue
        if core.cost(choice) >= HALF:
            return IlpResult(None, lower, False, len(active))
        finished = kind == "optimal"
        if finished:
            lower = max(lower, core.cost(choice)) if abs(core.cost(choice) - lower) * scale < 1e-3 else lower
        return IlpResult(choice, min(lower, core.cost(choice)), finished, len(active))


def _rounded(core: Core, values: np.ndarray) -> np.ndarray:
    """The strategy of each node with the largest variable."""
    choice = np.empty(core.node_count, np.int64)
    order = np.lexsort((values[: core.strategy_count], np.repeat(np.arange(core.node_count), core.sizes)))
    choice[:] = order[core.node_offsets[1:] - 1] - core.node_offsets[:-1]
    return choice


def _run(model: _Model, solver: str, time_limit: float, threads: int, seed: int):
    """(kind, values or None, bound) with kind "optimal", "feasible", "infeasible" or "unknown"; None if there is no time."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    if time_limit <= 0:
        return None
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(model.columns))
    proto.variables.lower_bounds.extend(np.zeros(model.columns))
    proto.variables.upper_bounds.extend(np.ones(model.columns))
    integers = np.zeros(model.columns, bool)
    integers[: model.integer] = True
    proto.variables.integers.extend(integers.tolist())
    nonzero = np.flatnonzero(model.objective)
    proto.objective.linear_coefficients.ids.extend(nonzero.tolist())
    proto.objective.linear_coefficients.values.extend(model.objective[nonzero].tolist())
    proto.linear_constraints.ids.extend(range(model.row_count))
    proto.linear_constraints.lower_bounds.extend(np.concatenate(model.low).tolist())
    proto.linear_constraints.upper_bounds.extend(np.concatenate(model.high).tolist())
    rows, columns, values = (np.concatenate(part) for part in (model.row_index, model.column_index, model.coefficient))
    order = np.lexsort((columns, rows))
    proto.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(columns[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(values[order].tolist())
    kinds = {"highs": mathopt.SolverType.HIGHS, "cp-sat": mathopt.SolverType.CP_SAT, "scip": mathopt.SolverType.GSCIP}
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=time_limit),
        # HiGHS keeps a global thread pool whose size cannot change within a process.
        threads=None if solver == "highs" else threads,
        random_seed=seed,
        relative_gap_tolerance=0.0,
        absolute_gap_tolerance=1e-7 if solver != "cp-sat" else 0.5,
    )
    if solver == "highs":
        parameters.highs.double_options["mip_feasibility_tolerance"] = 1e-7
    result = mathopt.solve(mathopt.Model.from_model_proto(proto), kinds[solver], params=parameters)
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return "infeasible", None, math.inf
    bound = result.termination.objective_bounds.dual_bound
    if result.has_primal_feasible_solution():
        found = result.variable_values()
        array = np.fromiter(found.values(), np.float64, len(found))
        return ("optimal" if reason == mathopt.TerminationReason.OPTIMAL else "feasible"), array, bound
    return "unknown", None, bound
