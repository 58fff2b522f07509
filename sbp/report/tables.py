"""A table that leaves columns out, rather than break names into pieces, where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

LEAST = 24
"""Columns of characters that text which may be broken keeps at least, where columns can be left out for it."""

_BETWEEN = 3
"""Blank columns between two columns of a table."""


@dataclass(frozen=True)
class Column:
    """`optional` ones may be left out; `unbroken` ones keep to one line; `right` is how numbers stand."""

    title: str
    right: bool
    unbroken: bool
    optional: bool

    @classmethod
    def of(cls, text: str) -> Column:
        """From a title with marks before it: `?` optional, `>` right-aligned and unbroken, `!` unbroken."""
        title = text.lstrip("?>!")
        marks = text[: len(text) - len(title)]
        return cls(title, ">" in marks, ">" in marks or "!" in marks, "?" in marks)


@dataclass(frozen=True)
class Fitting:
    """A title, a table and a note, for rich; the width decides when it is printed."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        shown = self.shown(options.max_width)
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for number in shown:
            column = self.columns[number]
            made.add_column(
                Text(column.title),
                justify="right" if column.right else "left",
                no_wrap=column.unbroken,
                overflow="fold",
            )
        for row in self.rows:
            made.add_row(*(Text(row[number]) for number in shown))
        yield Text(self.title, style="bold")
        yield made
        left_out = [column.title for number, column in enumerate(self.columns) if number not in shown]
        for line in (self.note, f"left out in {options.max_width} columns: {', '.join(left_out)}" if left_out else ""):
            if line:
                yield Text(line, style="dim")
        yield Text("")

    def shown(self, width: int) -> list[int]:
        """The columns that fit: optional ones go, the last first, until what stays has room."""
        shown = list(range(len(self.columns)))
        for number in reversed(shown.copy()):
            if sum(map(self._needed, shown)) + _BETWEEN * (len(shown) - 1) <= width:
                break
            if self.columns[number].optional:
                shown.remove(number)
        return shown

    def _needed(self, number: int) -> int:
        column = self.columns[number]
        longest = max((len(row[number]) for row in self.rows), default=0)
        return max(len(column.title), longest if column.unbroken else min(longest, LEAST))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> Fitting:
    """A title, a table and a note; titles of columns carry the marks of `Column.of`."""
    return Fitting(title, tuple(map(Column.of, columns)), tuple(map(tuple, rows)), note)
