"""Where a command's words go: data on stdout; tables on stdout too, or on stderr beside JSON; progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from sbp.cli.streams import reader_gone

if TYPE_CHECKING:
    from rich.console import Console


def print_json(data: Any) -> None:
    """Data on stdout, in a fixed order of keys."""
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")


def check_writable(out: str, what: str) -> None:
    """Before minutes of work, not after them.

    Raises
    ------
    PlanError
        There is no such folder, it is a folder itself, or no permission.
    """
    import os
    from pathlib import Path

    from sbp.errors import PlanError

    if Path(out).is_dir():
        raise PlanError(f"cannot write {what} {out}: it is a folder; name a file in it.")
    folder = Path(out).parent
    if not folder.is_dir():
        raise PlanError(f"cannot write {what} {out}: there is no folder {folder}; make it first.")
    if not os.access(out if Path(out).exists() else folder, os.W_OK):
        raise PlanError(f"cannot write {what} {out}: no permission to write it.")


def tables(as_json: bool) -> Console:
    """The console for result tables: stdout, unless that carries JSON."""
    return console_on(sys.stderr if as_json else sys.stdout)


def console_on(stream: IO[str]) -> Console:
    """A console that leaves a broken pipe to the command line, which knows the exit code for it."""
    from sbp.report.text import console_for

    console = console_for(stream)
    console.on_broken_pipe = reader_gone  # type: ignore[method-assign]
    return console


def say(line: str) -> None:
    """A line on stderr; a full or closed one stops no command."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """A function that shows a line of what goes on, on stderr: in place on a terminal, else one below the other."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield say
        return
    with console_on(sys.stderr).status("") as status:
        yield lambda line: status.update(line)
