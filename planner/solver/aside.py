"""Annealing in a process of its own: it searches while this one raises the bound, and sends every better choice."""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import struct
import subprocess
import sys

import numpy as np

from sbp.planner.solver.core import Core, Reduction
from sbp.planner.solver.result import Clock
from sbp.planner.solver.search import Cycle, Found, annealed, annealer_of, descended, repaired
from sbp.planner.solver.state import State

CYCLES = ((4.0, 1.0), (4.0, 10.0), (6.0, 100.0), (10.0, 3.0))
"""Seconds and heat of the cycles. The gap may lie in thousands of small decisions or in few large ones."""


class AnnealProcess:
    """Anneals one core at a time; what it finds is fetched by `poll`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._reduction: Reduction | None = None
        self.fruitless = False
        """Whether the last search (so far) has found nothing better."""

    @property
    def running(self) -> bool:
        """Whether a search is going on."""
        return self._process is not None and self._process.poll() is None

    def start(
        self, reduction: Reduction, prices: np.ndarray, labels: np.ndarray, bound: int, upper: int, seed: int
    ) -> None:
        """Search a reduction's core from `labels` on; a search that still runs is ended.

        The reduction must not be shrunk while the search goes on.
        """
        self.kill()
        self.fruitless = True
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(part for part in sys.path if part))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from sbp.planner.solver.aside import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        self._reduction = reduction
        assert self._process.stdin is not None
        try:
            pickle.dump(
                (reduction.core, prices, labels, bound, upper, seed), self._process.stdin, pickle.HIGHEST_PROTOCOL
            )
            self._process.stdin.flush()
        except OSError:
            self.kill()

    def poll(self, state: State, seconds: float = 0.0) -> bool:
        """Offer what was found to `state`, waiting at most so long; True if the incumbent became better."""
        better = False
        while self._process is not None and self._reduction is not None:
            assert self._process.stdout is not None
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                if not selector.select(seconds):
                    break
            header = self._process.stdout.read(8)
            data = self._process.stdout.read(struct.unpack("<Q", header)[0]) if len(header) == 8 else b""
            if not data:
                self.kill()
                break
            if state.offer_core(self._reduction, pickle.loads(data), "anneal"):
                better, self.fruitless = True, False
            seconds = 0.0
        return better

    def kill(self) -> None:
        """End the search, whatever it is doing."""
        process, self._process, self._reduction = self._process, None, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.wait()


class _OrphanClock(Clock):
    """Expires when the process that asked has gone."""

    def __init__(self) -> None:
        super().__init__(1e9)
        self.parent = os.getppid()

    def expired(self) -> bool:
        return os.getppid() != self.parent


def explore(
    core: Core, prices: np.ndarray, labels: np.ndarray, bound: int, upper: int, seed: int, clock: Clock, send
) -> None:
    """Cycle after cycle from the best choice so far, until a round of them finds nothing; `send` is called with every
    better choice."""
    annealer = annealer_of(core, seed, upper)
    gap = float(upper - bound)
    best: Found | None = None

    def tell(found: Found | None) -> None:
        nonlocal best
        if found is not None and (best is None or found.cost < best.cost):
            best = found
            send(found.choice)

    start = repaired(annealer, labels, prices, clock)
    tell(start)
    if start is not None:
        tell(descended(annealer, start.choice, prices, clock))
    stretch = 1.0
    while True:
        before = best
        for seconds, heat in CYCLES:
            if clock.expired():
                return
            begin = labels if best is None else best.choice
            cycle = Cycle(min(stretch * seconds, clock.left), 10**12, heat)
            tell(annealed(annealer, begin, prices, gap, cycle, clock, tell))
        if best is before:
            return
        stretch *= 1.5


def serve() -> None:
    """The process: one request on stdin, better choices on what was stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    core, prices, labels, bound, upper, seed = pickle.load(sys.stdin.buffer)

    def send(choice: np.ndarray) -> None:
        data = pickle.dumps(choice, protocol=pickle.HIGHEST_PROTOCOL)
        answers.write(struct.pack("<Q", len(data)))
        answers.write(data)
        answers.flush()

    explore(core, prices, labels, bound, upper, seed, _OrphanClock(), send)
