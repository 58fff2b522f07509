"""Element types: which go together in one operator, and how kernels keep accuracy in half precision."""

from __future__ import annotations

from typing import Any

from sbp.errors import RuleError
from sbp.operator import TensorType


def widen(x: Any) -> Any:
    """The array in at least 32-bit floating point: sums, exponentials and means lose too much in 16 bits."""
    return x.astype("float32") if x.dtype.itemsize < 4 else x


def wide_dtype(dtype: str) -> str:
    """The element type in which statistics of a tensor are kept."""
    return "f64" if dtype == "f64" else "f32"


def one_type(*types: TensorType, **attributes: Any) -> str:
    """The element type that all operands have; raises `RuleError` if they differ, as gradients would then too."""
    if len({t.dtype for t in types}) > 1:
        raise RuleError(f"tensors of different element types: {', '.join(map(str, types))}; cast them first")
    return types[0].dtype
