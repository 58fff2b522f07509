"""Fields of JSON files: each is read as what it must be, and the message names the file's part and the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sbp.errors import SbpError

Made = TypeVar("Made")


def is_finite_number(value: Any) -> bool:
    """Whether a value is a number that a float can hold, and no truth value.

    Unlike `math.isfinite` this is an answer for whole numbers of hundreds of digits, too.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


class Field:
    """A JSON value and where it stands.

    Parameters
    ----------
    value
        What the JSON reader made.
    place
        The part of the file, such as `graph file, node 'fc'`.
    error
        What is raised, naming place and path, when the value is not what it must be.
    path
        The field inside the place, such as `mesh.names[1]`.
    """

    __slots__ = ("error", "path", "place", "value")

    def __init__(self, value: Any, place: str, error: type[SbpError], path: str = "") -> None:
        self.value, self.place, self.error, self.path = value, place, error, path

    def __getitem__(self, key: str) -> Field:
        """A field of an object, which must be there."""
        self.mapping()
        if key not in self.value:
            raise self.error(f"{self.place}: the field {self._inside(key)!r} is missing; write the file again.")
        return Field(self.value[key], self.place, self.error, self._inside(key))

    def get(self, key: str, default: Any) -> Field:
        """A field of an object, or what stands for it where it is absent."""
        self.mapping()
        return Field(self.value.get(key, default), self.place, self.error, self._inside(key))

    def at(self, place: str) -> Field:
        """The same value as a part of the file of its own."""
        return Field(self.value, place, self.error)

    def wrong(self, expected: str) -> SbpError:
        """The error that this is not what was expected."""
        what = self.path or "the whole"
        return self.error(
            f"{self.place}: a field has the wrong type: {what} must be {expected}, got {_short(self.value)}; "
            "write the file again."
        )

    def mapping(self) -> dict[str, Field]:
        """An object: the fields by key."""
        if not isinstance(self.value, Mapping) or not all(isinstance(key, str) for key in self.value):
            raise self.wrong("an object")
        return {key: Field(item, self.place, self.error, self._inside(key)) for key, item in self.value.items()}

    def list(self, length: int | None = None) -> list[Field]:
        """A list, of so many items if `length` is given."""
        if not isinstance(self.value, (list, tuple)) or length not in (None, len(self.value)):
            raise self.wrong("a list" if length is None else f"a list of {length} items")
        return [Field(item, self.place, self.error, f"{self.path}[{at}]") for at, item in enumerate(self.value)]

    def text(self) -> str:
        """A text."""
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        return self.value

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(item.text() for item in self.list())

    def truth(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def whole(self, least: int | None = None) -> int:
        """A whole number, of at least `least`."""
        bound = "" if least is None else f" of at least {least}"
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.wrong(f"a whole number{bound}")
        if least is not None and self.value < least:
            raise self.wrong(f"a whole number{bound}")
        return self.value

    def number(self, least: float | None = None) -> float:
        """A finite number, of at least `least`."""
        bound = "" if least is None else f" of at least {least:g}"
        if not is_finite_number(self.value):
            raise self.wrong(f"a number{bound}")
        if least is not None and self.value < least:
            raise self.wrong(f"a number{bound}")
        return float(self.value)

    def plain(self) -> Any:
        """An operator's attribute: a number, text, truth value, null, or a list of these, which becomes a tuple.

        Infinities are written `{"float": "inf"}`, as JSON has no numbers for them.
        """
        if isinstance(self.value, Mapping):
            name = self.value.get("float")
            if len(self.value) != 1 or name not in ("inf", "-inf", "nan"):
                raise self.wrong('a number, a text, true, false, null or a list of these (or {"float": "inf"})')
            return float(name)
        return tuple(item.plain() for item in self.list()) if isinstance(self.value, (list, tuple)) else self.value

    def parsed(self, parse: Callable[[str], Made]) -> Made:
        """A text that `parse` reads; what it raises names this field too."""
        text = self.text()
        try:
            return parse(text)
        except SbpError as error:
            raise self.error(f"{self.place}: {self.path}: {error}") from None

    def _inside(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
