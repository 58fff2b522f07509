"""Integer programs in a process of their own: one can be stopped at any moment, and this process goes on searching
meanwhile.

OR-Tools' solvers check their time limit only now and then (HiGHS was seen to overrun by minutes), and they cannot be
interrupted from Python. A killed process can.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from sbp.planner.solver.core import Core
from sbp.planner.solver.ilp import IlpResult, solve_ilp
from sbp.planner.solver.result import Clock

GRACE = 1.0
"""Seconds that a program may overrun before its process is killed."""


class IlpProcess:
    """Solves one integer program at a time; started on first use and again after a kill."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None

    def solve(
        self,
        core: Core,
        time_limit: float,
        meanwhile: Callable[[float], bool] | None = None,
        clock: Clock | None = None,
        by: Callable[..., IlpResult] = solve_ilp,
        **options: Any,
    ) -> IlpResult:
        """As `solve_ilp`, never longer than the limit plus `GRACE`, nor than the clock.

        Parameters
        ----------
        by : callable(core, time_limit, **options) -> IlpResult
            What solves; a function that can be imported.
        meanwhile : callable(seconds) -> bool
            Called again and again while the program runs, to do about so many seconds of other work; False ends the
            program (the result then says that nothing was found).
        """
        nothing = IlpResult(None, core.constant, False, 0)
        deadline = time.monotonic() + time_limit
        if time_limit <= 0:
            return nothing
        process = self._started()
        try:
            self._send(process, (by, core, time_limit, options))
            while True:
                left = deadline + GRACE - time.monotonic()
                if clock is not None:
                    left = min(left, clock.left)
                if left <= 0:
                    self.kill()
                    return nothing
                if meanwhile is None:
                    if self._ready(process, left):
                        break
                elif self._ready(process, 0.0):
                    break
                elif not meanwhile(min(left, 1.0)):
                    if self._ready(process, 0.0):
                        break
                    self.kill()
                    return nothing
            answer = self._receive(process)
        except (BrokenPipeError, EOFError, OSError):
            # The process died (out of memory, say): without it nothing is known.
            self.kill()
            return nothing
        except BaseException:
            self.kill()
            raise
        return answer

    def _started(self) -> subprocess.Popen:
        if self._process is None or self._process.poll() is not None:
            environment = dict(os.environ, PYTHONPATH=os.pathsep.join(part for part in sys.path if part))
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from sbp.planner.solver.worker import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        return self._process

    @staticmethod
    def _send(process: subprocess.Popen, request: Any) -> None:
        assert process.stdin is not None
        data = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
        process.stdin.write(struct.pack("<Q", len(data)))
        process.stdin.write(data)
        process.stdin.flush()

    @staticmethod
    def _ready(process: subprocess.Popen, seconds: float) -> bool:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return bool(selector.select(seconds))

    @staticmethod
    def _receive(process: subprocess.Popen) -> IlpResult:
        assert process.stdout is not None
        header = process.stdout.read(8)
        if len(header) < 8:
            raise EOFError
        return pickle.loads(process.stdout.read(struct.unpack("<Q", header)[0]))

    def kill(self) -> None:
        """End the process, whatever it is doing."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.kill()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            process.wait()


def serve() -> None:
    """The process's loop: read a request from stdin, answer on what was stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    requests = sys.stdin.buffer
    while True:
        header = requests.read(8)
        if len(header) < 8:
            return
        by, core, time_limit, options = pickle.loads(requests.read(struct.unpack("<Q", header)[0]))
        result = by(core, time_limit, **options)
        data = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
        answers.write(struct.pack("<Q", len(data)))
        answers.write(data)
        answers.flush()
