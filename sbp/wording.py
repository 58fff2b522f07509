"""How messages and reports speak of numbers of things."""

from __future__ import annotations


def counted(number: int, what: str, several: str = "") -> str:
    """`1 node`, `12 nodes`, `1,234 nodes`; `several` where an s does not make the plural (`2 entries`)."""
    return f"{number:,} {what if number == 1 else several or f'{what}s'}"
