"""Small array functions that every communicator shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from sbp.comm.interface import Array, CommunicationError

UFUNCS = {"sum": "add", "max": "maximum", "min": "minimum"}
"""Reduction -> the elementwise function of two arrays that it repeats."""


def reduce_in_order(xp: Any, arrays: Iterable[Array], reduce: str) -> Array:
    """Elementwise reduction from first to last, in a new array; deterministic, as every rank adds in the same order."""
    if reduce not in UFUNCS:
        raise CommunicationError(f"unknown reduction {reduce!r}; known are {', '.join(UFUNCS)}.")
    function = getattr(xp, UFUNCS[reduce])
    parts = iter(arrays)
    total = xp.array(next(parts))
    if total.dtype.kind == "c" and reduce != "sum":
        raise CommunicationError(
            f"complex numbers have no order, so there is no {reduce!r} of {total.dtype}; use 'sum'."
        )
    for part in parts:
        function(total, part, out=total)
    return total


def chunk_slices(sizes: Sequence[int], axis: int) -> list[tuple[slice, ...]]:
    """Per chunk the indices that select it along `axis`."""
    stops = list(accumulate(sizes))
    before = (slice(None),) * axis
    return [(*before, slice(stop - size, stop)) for size, stop in zip(sizes, stops)]


def with_size(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    """The shape with another size in one dimension."""
    return (*shape[:axis], size, *shape[axis + 1 :])
