"""The residual problem as an integer program (local polytope: node variables integer, pair variables continuous), by
OR-Tools.

Memory rows are added lazily: those with a price first, then those that a solution violates. With reduced costs from the
dual the objective is written in them: every coefficient is then >= 0 and at most the gap, and the cutoff becomes a
*budget row* over strategies, pairs and the priced slack of the rows, which makes branching strong.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import sys
from dataclasses import dataclass

import numpy as np

from sbp.planner.solver.core import Core
from sbp.planner.solver.fixing import ReducedCosts
from sbp.planner.solver.reducer import FORBIDDEN_COST
from sbp.planner.solver.result import Clock

HALF = FORBIDDEN_COST // 2
FORMULATIONS = ("highs", "cp-sat", "scip")
"""The solvers of OR-Tools that take the integer program."""


@dataclass(frozen=True, eq=False)
class IlpResult:
    """`choice` is over the core's strategies (None if none was found below the cutoff); bounds include the core's
    constant.

    `finished` says that the search was complete: `choice` is optimal, or there is no choice better than the cutoff.
    """

    choice: np.ndarray | None
    lower_bound: int
    finished: bool
    rows_used: int


@dataclass(eq=False)
class _Model:
    """Columns: one per strategy, one per allowed table entry (up to `pair_end`), then slacks."""

    columns: int
    integer: int
    pair_end: int
    excluded: np.ndarray
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


def _base_model(core: Core, costs: np.ndarray, entries: np.ndarray, pairs_integer: bool) -> _Model:
    """Columns for strategies and allowed table entries at the given (scaled) costs, tied by the local polytope."""
    strategies = core.strategy_count
    allowed = core.table_values < HALF
    entry_column = np.full(len(core.table_values), -1, np.int64)
    entry_column[allowed] = strategies + np.arange(int(allowed.sum()))
    excluded = np.flatnonzero(core.costs >= HALF)
    objective = np.concatenate([costs, entries[allowed]])
    objective[excluded] = 0.0
    columns = len(objective)
    model = _Model(
        columns,
        columns if pairs_integer else strategies,
        columns,
        excluded,
        objective,
        entry_column,
        [],
        [],
        [],
        [],
        [],
    )
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
    hits, strategies, amounts = [], [], []
    for piece in pieces.tolist():
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


def _add_rows(model: _Model, core: Core, rows: np.ndarray, prices: np.ndarray | None) -> None:
    """Memory rows; a row with a price (scaled cost per byte) gets a slack column that pays it."""
    where, strategy, amount = row_usages(core, rows)
    starts = np.searchsorted(where, np.arange(len(rows)))
    stops = np.searchsorted(where, np.arange(len(rows)), side="right")
    values = np.empty(len(where))
    high = np.empty(len(rows))
    low = np.full(len(rows), -np.inf)
    slack_rows, slack_values, slack_prices = [], [], []
    for index in range(len(rows)):
        piece = slice(starts[index], stops[index])
        # Whole multiples of a common divisor keep small coefficients exact in floating point.
        divisor = int(np.gcd.reduce(amount[piece])) if stops[index] > starts[index] else 1
        capacity = int(core.capacities[rows[index]])
        units = capacity // divisor
        factor = 1.0 if units < 10**6 else 10.0**6 / units
        values[piece] = amount[piece] // divisor * factor
        high[index] = units * factor
        if prices is not None and prices[index] > 0:
            # slack in bytes / divisor; what the rounded capacity gives away is paid in the offset by the caller
            high[index] = low[index] = capacity / divisor * factor
            slack_rows.append(index)
            slack_values.append(factor)
            slack_prices.append(prices[index] * divisor)
    columns = np.concatenate([strategy, model.columns + np.arange(len(slack_rows))])
    model.add(
        np.concatenate([where, np.array(slack_rows, np.int64)]),
        columns,
        np.concatenate([values, np.array(slack_values)]),
        low,
        high,
    )
    model.objective = np.concatenate([model.objective, np.array(slack_prices)])
    model.columns += len(slack_rows)


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
    reduced: ReducedCosts | None = None,
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
        Memory rows to start with; others are added when violated.
    reduced : ReducedCosts or None
        Write the objective in these (see the module); needs a cutoff.
    """
    clock = Clock(time_limit)
    if solver == "cp-sat":
        reduced = None  # its variables are integers, so fractions and slacks have no place in it
    if core.node_count == 0:
        return IlpResult(np.empty(0, np.int64), core.constant, True, 0)
    active = np.unique(rows).astype(np.int64) if rows is not None else np.empty(0, np.int64)
    if reduced is None:
        offset, costs, entries = core.constant, core.costs.astype(np.float64), core.table_values.astype(np.float64)
        room = cutoff - offset if cutoff is not None else None
        size = (
            float(room)
            if room is not None
            else float(core.costs[core.costs < HALF].max(initial=0)) * math.sqrt(core.node_count)
        )
    else:
        assert cutoff is not None
        offset, costs, entries = reduced.bound, reduced.strategy + reduced.fraction, reduced.entry.astype(np.float64)
        room = cutoff - offset
        size = float(room)
        active = np.union1d(active, np.flatnonzero(reduced.prices > 0))
    if room is not None and cutoff is not None and room < 0:
        return IlpResult(None, cutoff + 1, True, 0)
    scale = 1.0 if solver == "cp-sat" and size < 2**50 else min(1.0, 1e5 / max(size, 1.0))
    extra = 0.0 if reduced is None else reduced.bound_fraction
    lower = offset if cutoff is None else min(offset, cutoff + 1)
    while True:
        model = _base_model(core, costs * scale, entries * scale, pairs_integer=solver == "cp-sat")
        if len(active):
            _add_rows(model, core, active, None if reduced is None else reduced.prices[active] * scale)
        if room is not None:
            used = np.flatnonzero(model.objective)
            top = room * scale * (1 + 1e-9) + 1e-6
            zeros = np.zeros(len(used), np.int64)
            model.add(zeros, used, model.objective[used], np.array([-np.inf]), np.array([top]))
        outcome = _run(model, solver, clock.left, threads, seed)
        if outcome is None:
            return IlpResult(None, lower, False, len(active))
        kind, values, bound = outcome
        if kind == "infeasible":
            return IlpResult(None, lower if cutoff is None else cutoff + 1, True, len(active))
        if math.isfinite(bound):
            # The solver's bound is a float: give away its tolerance before rounding up to the integer grid.
            proven = math.ceil((bound - 1e-6 - 1e-9 * abs(bound)) / scale + extra - 1e-2) + offset
            lower = max(lower, proven if cutoff is None else min(proven, cutoff + 1))
        if values is None:
            return IlpResult(None, lower, False, len(active))
        choice = _rounded(core, values)
        if core.overflow(choice) > 0:
            missing = np.setdiff1d(violated_rows(core, choice), active)
            if not len(missing) or clock.left <= 0:
                return IlpResult(None, lower, False, len(active))
            active = np.union1d(active, missing)
            continue
        cost = core.cost(choice)
        if cost >= HALF:
            return IlpResult(None, lower, False, len(active))
        finished = kind == "optimal"
        if finished and (cost - lower) * scale < 2e-6 + 2e-9 * size * scale:
            lower = cost
        return IlpResult(choice, min(lower, cost), finished, len(active))


def _rounded(core: Core, values: np.ndarray) -> np.ndarray:
    """The strategy of each node with the largest variable."""
    choice = np.empty(core.node_count, np.int64)
    order = np.lexsort((values[: core.strategy_count], np.repeat(np.arange(core.node_count), core.sizes)))
    choice[:] = order[core.node_offsets[1:] - 1] - core.node_offsets[:-1]
    return choice


def _run(model: _Model, solver: str, time_limit: float, threads: int, seed: int):
    """(kind, values or None, bound) with kind "optimal", "feasible", "infeasible" or "unknown"; None if there is no
    time."""
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

    if time_limit <= 0:
        return None
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(model.columns))
    proto.variables.lower_bounds.extend(np.zeros(model.columns))
    upper = np.ones(model.columns)
    upper[model.excluded] = 0.0
    upper[model.pair_end :] = np.inf
    proto.variables.upper_bounds.extend(upper)
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
    with quiet_stdout():
        try:
            result = mathopt.solve(mathopt.Model.from_model_proto(proto), kinds[solver], params=parameters)
        except Exception:
            # OR-Tools turns a solver's refusal (numbers too large, say) into various exceptions: nothing is known then.
            return "unknown", None, -math.inf
    reason = result.termination.reason
    if reason == mathopt.TerminationReason.INFEASIBLE:
        return "infeasible", None, math.inf
    bound = result.termination.objective_bounds.dual_bound
    if result.has_primal_feasible_solution():
        found = result.variable_values()
        array = np.fromiter(found.values(), np.float64, len(found))
        return ("optimal" if reason == mathopt.TerminationReason.OPTIMAL else "feasible"), array, bound
    return "unknown", None, bound


@contextlib.contextmanager
def quiet_stdout():
    """HiGHS prints progress of its heuristics to file descriptor 1 whatever it is told; stdout belongs to our
    output."""
    sys.stdout.flush()
    saved = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
