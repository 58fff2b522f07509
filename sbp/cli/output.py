"""Where a command's words go: data on stdout; tables on stdout too, or on stderr beside JSON; progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(data: Any) -> None:
    """Data on stdout, in a fixed order of keys."""
    import orjson

    sys.stdout.write(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")


def tables(as_json: bool) -> Console:
    """The console for result tables: stdout, unless that carries JSON."""
    from sbp.report.text import console_for

    return console_for(sys.stderr if as_json else sys.stdout)


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None] | None]:
    """A function that shows a line of what goes on, on stderr: in place on a terminal, else one below the other."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield lambda line: print(line, file=sys.stderr, flush=True)
        return
    from sbp.report.text import console_for

    with console_for(sys.stderr).status("") as status:
        yield lambda line: status.update(line)
