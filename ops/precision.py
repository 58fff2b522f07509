"""How kernels keep accuracy in half precision."""

from __future__ import annotations

from typing import Any


def widen(x: Any) -> Any:
    """The array in at least 32-bit floating point: exponentials, means and variances lose too much in 16 bits."""
    return x.astype("float32") if x.dtype.itemsize < 4 else x


def wide_dtype(dtype: str) -> str:
    """The element type in which statistics of a tensor are kept."""
    return "f64" if dtype == "f64" else "f32"
