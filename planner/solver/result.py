"""What a solver is given and what it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sbp.planner.problem import Problem

if TYPE_CHECKING:
    from sbp.planner.solver.infeasible import Shortage


class Status(Enum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """The choice is proven optimal (float64 problems: to the stated gap tolerance)."""
    FEASIBLE = "feasible"
    """A choice and a lower bound; the limit or Ctrl-C came before the proof."""
    INFEASIBLE = "infeasible"
    """Proven: no choice satisfies the limit and the forbidden pairs; `Assignment.reason` says why."""
    TIME_LIMIT = "time limit"
    """No choice was found in time; nothing is proven but the lower bound."""


@dataclass(frozen=True)
class Limits:
    """What a solve may use.

    Attributes
    ----------
    time_limit : float
        Seconds of wall time, from the call.
    threads : int
        Processes that share the incumbent, and threads given to OR-Tools.
    seed : int
        Everything random derives from it.
    """

    time_limit: float = 60.0
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Assignment:
    """One strategy per node, with its objective and what is proven about it.

    Attributes
    ----------
    status : Status
    choice : int64 (nodes,) or None
    objective : int or float
        In the problem's unit, recomputed by `sbp.planner.problem.evaluate`; ``inf`` without a choice.
    lower_bound : int or float
        No choice is better than this; ``-inf`` when nothing is known, ``inf`` when infeasible.
    gap : float
        ``(objective - lower_bound) / |objective|``; 0 when optimal, ``inf`` without a choice.
    reason : str
        One sentence for people: what proved optimality, or why there is no choice.
    shortage : Shortage or None
        When memory makes the problem infeasible: the smallest reachable peak and who makes it.
    statistics : mapping
        Seconds and sizes by stage; ``reproducible``: no clock and no second search decided anything, so that equal
        input, seed and threads give this very choice again, on any machine.
    """

    status: Status
    choice: np.ndarray | None
    objective: int | float
    lower_bound: int | float
    gap: float
    reason: str = ""
    shortage: Shortage | None = None
    statistics: Mapping[str, Any] = field(default_factory=dict)


class Solver(Protocol):
    """What a solver must offer to be compared with the others."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    def solve(self, problem: Problem, limits: Limits) -> Assignment: ...


Progress = Callable[[int | float, int | float, str], None]
"""Called with incumbent, lower bound and the stage that found them."""


Start = Callable[[], "np.ndarray | None"]
"""Gives a choice to start from; called only when the problem turns out to be hard."""


class Clock:
    """Wall time since the start, and what is left of the limit.

    Attributes
    ----------
    felt : bool
        Whether time has decided anything, here or in a part: a result for which it has not is the same on every
        machine.
    """

    def __init__(self, time_limit: float, whole: Clock | None = None) -> None:
        self.start = time.monotonic()
        self.time_limit = time_limit
        self.felt = False
        self._whole = whole

    def part(self, share: float) -> Clock:
        """A clock for a share of what is left."""
        return self.at_most(share * self.left)

    def at_most(self, seconds: float) -> Clock:
        """A clock for so many seconds, or what is left."""
        return Clock(max(min(seconds, self.left), 0.0), self)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def left(self) -> float:
        return self.time_limit - self.elapsed

    def expired(self) -> bool:
        if self.elapsed < self.time_limit:
            return False
        self.feel()
        return True

    def feel(self) -> None:
        """Note that time has decided something."""
        clock: Clock | None = self
        while clock is not None:
            clock.felt = True
            clock = clock._whole


def relative_gap(objective: int | float, lower_bound: int | float) -> float:
    """``(objective - lower_bound) / |objective|``, 0 when they meet."""
    if objective == float("inf"):
        return float("inf") if lower_bound != float("inf") else 0.0
    difference = objective - lower_bound
    if difference <= 0:
        return 0.0
    return float(difference / abs(objective)) if objective else float("inf")
