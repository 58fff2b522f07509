"""How many threads NumPy's matrix products use: on small matrices several threads mostly wait for one another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy

from sbp.planner.physical import PhysicalPlan

SMALL = 1 << 20
"""Elements of a plan's largest tensor up to which one thread is as fast as several."""


@contextmanager
def fitting(physical: PhysicalPlan) -> Iterator[None]:
    """Inside, one thread if the plan's tensors are small, else as many as before."""
    if any(register.type.elements > SMALL for register in physical.registers):
        yield
        return
    with matrix_threads(1):
        yield


@contextmanager
def matrix_threads(count: int) -> Iterator[None]:
    """Inside, the OpenBLAS that comes with NumPy uses `count` threads; with another library nothing changes."""
    found = _openblas()
    if found is None:
        yield
        return
    get, set_ = found
    before = get()
    set_(count)
    try:
        yield
    finally:
        set_(before)


@lru_cache(maxsize=1)
def _openblas() -> tuple[Callable[[], int], Callable[[int], object]] | None:
    """The functions that get and set the number of threads, from the library in NumPy's wheel."""
    home = Path(numpy.__file__).parent
    for path in (*home.parent.glob("numpy.libs/*openblas*"), *home.glob(".dylibs/*openblas*")):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        for prefix, suffix in (("scipy_", "64_"), ("scipy_", ""), ("", "64_"), ("", "")):
            get, set_ = (
                getattr(library, f"{prefix}openblas_{what}_num_threads{suffix}", None) for what in ("get", "set")
            )
            if get is not None and set_ is not None:
                return get, set_
    return None
