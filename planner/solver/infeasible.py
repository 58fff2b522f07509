"""Why nothing fits: the smallest reachable peak, who makes it, and minimal sets of demands that contradict each
other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from sbp.planner.problem import FORBIDDEN_INTEGER, Problem, evaluate
from sbp.planner.solver.result import Clock, Limits, Status

LARGEST_USERS = 5

Item = TypeVar("Item")


@dataclass(frozen=True)
class Shortage:
    """How far a memory limit is from what is reachable.

    Attributes
    ----------
    smallest_peak : int or None
        Bytes; the smallest peak that some choice reaches. None when no choice was found in time.
    proven_above : int
        No choice has a peak of this many bytes or less. The smallest peak is exact when this is one less.
    time : int or None
        When that peak occurs.
    users : tuple of (node, strategy, bytes)
        The users at that time, in the choice with the smallest peak, the largest first.
    """

    smallest_peak: int | None
    proven_above: int
    time: int | None
    users: tuple[tuple[int, int, int], ...]

    @property
    def exact(self) -> bool:
        return self.smallest_peak is not None and self.proven_above == self.smallest_peak - 1

    def sentence(self, problem: Problem) -> str:
        """For people."""
        limit = problem.usage_limit
        if self.smallest_peak is None or limit is None:
            return f"memory: every choice needs more than {self.proven_above:,} bytes at its peak"
        how = "is" if self.exact else f"found is (none is below {self.proven_above + 1:,} bytes)"
        names = ", ".join(
            f"{problem.node_name(node)} ({problem.strategy_name(node, strategy)}) {amount:,}"
            for node, strategy, amount in self.users[:LARGEST_USERS]
        )
        return (
            f"memory: the limit is {limit:,} bytes, the smallest reachable peak {how} {self.smallest_peak:,} bytes, "
            f"{self.smallest_peak - limit:,} too many, at time {self.time}; the largest users there are {names}"
        )


def shortage(problem: Problem, limits: Limits, known_infeasible: int | None = None) -> Shortage:
    """The smallest reachable peak by bisection of the limit over a problem without costs.

    Parameters
    ----------
    limits : Limits
        All steps together; what is known then is the answer.
    known_infeasible : int or None
        A limit that is already proven too small.
    """
    from sbp.planner.solver.pipeline import solve

    clock = Clock(limits.time_limit)
    low = _least_load(problem) - 1
    if known_infeasible is not None:
        low = max(low, known_infeasible)
    # Which choice is cheap does not matter here, only which is allowed.
    allowed = replace(
        problem,
        costs=_only_forbidden(problem, problem.costs),
        table_values=_only_forbidden(problem, problem.table_values),
        usage_limit=None,
    )
    best: np.ndarray | None = None
    high: int | None = None
    guess = solve(_by_usage(allowed), replace(limits, time_limit=max(clock.left, 0.01)), explain=False)
    if guess.choice is not None:
        best, high = guess.choice, evaluate(problem, guess.choice).peak
    while high is not None and high - low > 1 and not clock.expired():
        middle = low + (high - low) // 2
        found = solve(allowed.with_limit(middle), replace(limits, time_limit=max(clock.left, 0.01)), explain=False)
        if found.status is Status.INFEASIBLE:
            low = middle
        elif found.choice is not None:
            best, high = found.choice, evaluate(problem, found.choice).peak
        else:
            break
    if best is None:
        return Shortage(None, low, None, ())
    outcome = evaluate(problem, best)
    assert outcome.peak_time is not None
    return Shortage(outcome.peak, low, outcome.peak_time, _users(problem, best, outcome.peak_time))


def minimal_conflict(items: Sequence[Item], feasible: Callable[[Sequence[Item]], bool]) -> tuple[Item, ...]:
    """A subset of demands that cannot be met together, while each smaller part of it can.

    `feasible` says whether a set of demands can be met; it must be false for all `items` (else the result is empty),
    and
    dropping demands never makes a feasible set infeasible. QuickXplain (Junker 2004): few calls when the conflict is
    small.
    """
    if not items or feasible(items):
        return ()
    if not feasible(()):
        return ()

    def explain(background: list[Item], changed: bool, rest: list[Item]) -> list[Item]:
        if changed and not feasible(background):
            return []
        if len(rest) == 1:
            return rest
        half = len(rest) // 2
        first, second = rest[:half], rest[half:]
        from_second = explain(background + first, bool(first), second)
        from_first = explain(background + from_second, bool(from_second), first)
        return from_first + from_second

    found = explain([], False, list(items))
    return tuple(item for item in items if item in found)


def _only_forbidden(problem: Problem, values: np.ndarray) -> np.ndarray:

    if problem.is_integer:
        return np.where(values >= FORBIDDEN_INTEGER, np.int64(FORBIDDEN_INTEGER), np.int64(0))
    return np.where(np.isposinf(values), np.inf, 0.0)


def _by_usage(problem: Problem) -> Problem:
    """Costs that prefer little memory: the usages over the length of their intervals."""
    extra = np.zeros(problem.strategy_count)
    for piece, node in enumerate(problem.piece_nodes.tolist()):
        start, stop = problem.piece_intervals[piece].tolist()
        if stop > start:
            usage = problem.piece_usages[problem.piece_offsets[piece] : problem.piece_offsets[piece + 1]]
            extra[problem.node_offsets[node] : problem.node_offsets[node + 1]] += usage * float(stop - start)
    scale = float(extra.max(initial=0.0))
    costs = np.where(problem.forbidden_costs(), np.inf, extra / scale if scale else extra)
    tables = np.where(
        problem.table_values > 0 if problem.is_integer else np.isposinf(problem.table_values), np.inf, 0.0
    )
    return replace(problem, costs=costs, table_values=tables)


def _least_load(problem: Problem) -> int:
    """The largest load when every node uses the least it can at every time."""
    counts = problem.piece_intervals[:, 1] > problem.piece_intervals[:, 0]
    if not counts.any():
        return 0
    forbidden = problem.forbidden_costs()
    change: dict[int, int] = {}
    for piece in np.flatnonzero(counts).tolist():
        node = int(problem.piece_nodes[piece])
        usage = problem.piece_usages[problem.piece_offsets[piece] : problem.piece_offsets[piece + 1]]
        usable = usage[~forbidden[problem.node_offsets[node] : problem.node_offsets[node + 1]]]
        least = int(usable.min()) if usable.size else int(usage.min())
        start, stop = problem.piece_intervals[piece].tolist()
        change[start] = change.get(start, 0) + least
        change[stop] = change.get(stop, 0) - least
    load = peak = 0
    for time in sorted(change):
        load += change[time]
        peak = max(peak, load)
    return peak


def _users(problem: Problem, choice: np.ndarray, time: int) -> tuple[tuple[int, int, int], ...]:
    live = np.flatnonzero((problem.piece_intervals[:, 0] <= time) & (time < problem.piece_intervals[:, 1]))
    amounts: dict[int, int] = {}
    for piece in live.tolist():
        node = int(problem.piece_nodes[piece])
        amounts[node] = amounts.get(node, 0) + int(problem.piece_usages[problem.piece_offsets[piece] + choice[node]])
    largest = sorted(amounts.items(), key=lambda item: (-item[1], item[0]))
    return tuple((node, int(choice[node]), amount) for node, amount in largest if amount)
