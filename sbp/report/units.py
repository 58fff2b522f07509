"""Numbers as people read them."""

from __future__ import annotations

import math

SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
BYTES = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))


def unit_for(number: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    """The largest unit of which the number is at least one, for an axis: its name and size."""
    return next((unit for unit in units if number >= unit[1]), units[-1])


def seconds_text(seconds: float | None) -> str:
    """`1.23 s`, `45.6 ms`, `7.89 us`; a dash for None."""
    if seconds is None:
        return "-"
    if not math.isfinite(seconds):
        return str(seconds)
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size * 0.9995:
            return f"{_three(seconds / size)} {unit}"
    return "0" if seconds == 0 else f"{_three(seconds / 1e-9)} ns"


def bytes_text(size: float | None) -> str:
    """`1.5 GiB`, `320 MiB`, `12 B`; a dash for None."""
    if size is None:
        return "-"
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor * 0.9995:
            return f"{_three(size / factor)} {unit}"
    return f"{size:.0f} B"


def count_text(number: float) -> str:
    """`1.23 T`, `45.6 G`, `789`: decimal prefixes, for FLOP and parameter counts."""
    for unit, factor in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= factor * 0.9995:
            return f"{_three(number / factor)} {unit}"
    return f"{number:.0f}"


def share_text(part: float, whole: float) -> str:
    """`12.3 %`; a dash where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def _three(number: float) -> str:
    """Three significant digits, without an exponent."""
    size = abs(number)
    digits = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{number:.{digits}f}"
