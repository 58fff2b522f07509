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
