"""A core given to pytoulbar2 (not a dependency) as a cost function network, for comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from sbp.planner.solver.core import Core
from sbp.planner.solver.ilp import IlpResult

TOP = 2**59
"""From here on a cost forbids."""
TIMER_SECONDS = 0.05
"""A search that ends so near to its limit is not taken for complete."""


def solve_toulbar2(core: Core, time_limit: float, *, threads: int = 1, seed: int = 0) -> IlpResult:
    """Solve by branch and bound (toulbar2, one thread); memory rows are linear constraints over the strategies.

    Source: Hurley et al., "Multi-language evaluation of exact solvers in graphical model discrete optimization",
    Constraints 2016.
    """
    import pytoulbar2

    start = time.monotonic()
    network = pytoulbar2.CFN(TOP, seed=seed + 1)
    try:
        _post(core, network)
    except pytoulbar2.tb2.Contradiction:
        # Propagation alone refutes it.
        return IlpResult(None, core.constant, True, 0)
    left = time_limit - (time.monotonic() - start)
    if left <= 0:
        return IlpResult(None, core.constant, False, 0)
    seconds, begun = max(int(left), 1), time.monotonic()
    answer = network.Solve(timeLimit=seconds)
    # It does not say whether its limit, in whole seconds of processor time, cut the search short. Wall time is no less.
    finished = time.monotonic() - begun < seconds - TIMER_SECONDS
    if not answer:
        return IlpResult(None, core.constant, finished, 0)
    choice = np.array(answer[0], np.int64)
    lower = core.cost(choice) if finished else int(network.GetDDualBound()) + core.constant
    return IlpResult(choice, lower, finished, 0)


def _post(core: Core, network: Any) -> None:
    for node in range(core.node_count):
        network.AddVariable(str(node), range(int(core.sizes[node])))
        costs = core.costs[core.node_offsets[node] : core.node_offsets[node + 1]]
        network.AddFunction([node], np.minimum(costs, TOP).tolist())
    for edge, ends in enumerate(core.edge_nodes.tolist()):
        table = core.table_values[core.table_offsets[edge] : core.table_offsets[edge + 1]]
        network.AddFunction(ends, np.minimum(table, TOP).tolist())
    for terms, capacity in _rows(core):
        network.AddGeneralizedLinearConstraint(terms, operand="<=", rightcoef=capacity)


def _rows(core: Core) -> Iterator[tuple[list[tuple[int, int, int]], int]]:
    """Per memory row that can be exceeded the terms (node, strategy, bytes) and the capacity."""
    for row, capacity in enumerate(core.capacities.tolist()):
        terms, most = [], 0
        for piece in np.flatnonzero((core.piece_rows[:, 0] <= row) & (row < core.piece_rows[:, 1])).tolist():
            usage = core.piece_usages[core.piece_offsets[piece] : core.piece_offsets[piece + 1]].tolist()
            most += max(usage)
            terms += [(int(core.piece_nodes[piece]), value, amount) for value, amount in enumerate(usage) if amount]
        if most > capacity:
            yield terms, capacity
