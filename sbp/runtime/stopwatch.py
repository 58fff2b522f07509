"""Measuring on all ranks at once: typical times after a warm-up, of the slowest rank, alike on every process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend

LEAST_SECONDS = 1e-3
"""A measurement shorter than this is repeated inside the clock, so that reading the clock does not count."""


def undisturbed(seconds: Sequence[float]) -> float:
    """The lower quartile: what others do on the machine only adds time, so the median of disturbed runs says less."""
    return statistics.quantiles(seconds, n=4, method="inclusive")[0] if len(seconds) > 1 else seconds[0]


class Stopwatch:
    """Times what all ranks do at the same time (or, in one process, one after the other).

    Parameters
    ----------
    backend, communicator
        Of the ranks of this process.
    seconds
        How long one measurement may take; it is repeated at least `LEAST_REPEATS` times all the same.
    """

    LEAST_REPEATS, MOST_REPEATS = 7, 51

    def __init__(self, backend: Backend, communicator: Communicator, seconds: float) -> None:
        self.backend, self.communicator, self._budget = backend, communicator, seconds
        # Ranks that take turns in this process wait for nobody: their time is the processor's, whoever else uses it.
        alone = backend.name == "numpy" and len(communicator.ranks) == communicator.size
        self._clock = time.process_time if alone else time.perf_counter

    def seconds(self, run: Callable[[], object]) -> float:
        """Seconds of `run` on the slowest rank (see `undisturbed`)."""
        run()
        first = self.agreed([self._once(run, 1)])[0]
        inner = max(1, int(LEAST_SECONDS / max(first, 1e-9)))
        repeats = int(min(max(self._budget / max(first * inner, 1e-9), self.LEAST_REPEATS), self.MOST_REPEATS))
        return undisturbed(self.agreed([self._once(run, inner) / inner for _ in range(repeats)]))

    def _once(self, run: Callable[[], object], inner: int) -> float:
        self.backend.synchronize()
        self.communicator.barrier()
        start = self._clock()
        for _ in range(inner):
            run()
        self.backend.synchronize()
        return self._clock() - start

    def agreed(self, seconds: Sequence[float]) -> list[float]:
        """The largest of every rank's times, the same on all processes."""
        everyone = (tuple(range(self.communicator.size)),)
        mine = self.backend.from_host(numpy.asarray(seconds, dtype=numpy.float64))
        made = self.communicator.all_reduce(dict.fromkeys(self.communicator.ranks, mine), everyone, "max")
        return [float(item) for item in self.backend.to_host(made[self.communicator.ranks[0]])]
