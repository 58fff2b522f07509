"""How messages and reports speak of numbers of things, and of names that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, what: str, several: str = "") -> str:
    """`1 node`, `12 nodes`, `1,234 nodes`; `several` where an s does not make the plural (`2 entries`)."""
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"


def nearest_known(name: str, known: Iterable[str]) -> str:
    """A sentence's end: `did you mean a100-80g? Known are ...`, or `known are ...` where no name is near."""
    known = list(known)
    text = name.lower()
    begun = [one for one in known if text and one.startswith(text)]  # "a100" is nearer to "h100" letter by letter
    close = begun or difflib.get_close_matches(text, known, n=1, cutoff=0.5)
    return (f"did you mean {' or '.join(close)}? Known" if close else "known") + f" are {', '.join(known)}"
