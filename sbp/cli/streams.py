"""The standard streams, where somebody closed them, filled them up or left: what a command then writes to, and says."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import IO, NoReturn

_OUTPUT = (errno.EBADF, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def stand_in_for_closed_streams() -> None:
    """Give Python streams where the shell closed them (`>&-`, `2>&-`): writing to stdout fails, stderr is swallowed.

    Python has None there, which no writer expects. The descriptors themselves are filled too, so that no file that a
    command opens becomes the stdout of the libraries it calls.
    """
    for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, mode)  # the lowest free descriptor: this one
    if sys.stdout is None:
        # A descriptor for reading only: writing raises EBADF, as it does on a closed one.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")


def unwritable(error: OSError) -> str:
    """Why an output does not take what was written, such as `stdout is closed`; "" if the error is another one.

    Commands name the files they write, so what fails to be written without a name is a stream.
    """
    if error.filename is not None or error.errno not in _OUTPUT:
        return ""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            silence(stream)
    return "stdout is closed" if error.errno == errno.EBADF else f"the output cannot be written: {error.strerror}"


def silence(stream: IO[str]) -> None:
    """Send what a stream still holds to nowhere: Python flushes once more at exit, which must not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def reader_gone() -> NoReturn:
    """What a console does when nobody reads: nothing of its own (rich exits with 1, which means something else)."""
    raise BrokenPipeError(errno.EPIPE, "nobody reads stdout any more")
