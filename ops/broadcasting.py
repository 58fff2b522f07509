"""What gradients of broadcasting operators share. Operators are looked up by name: they are defined on top of this."""

from __future__ import annotations

from typing import Any

from sbp.dtype import dtype_named
from sbp.operator import REGISTRY


def unbroadcast(grad: Any, like: Any) -> Any:
    """The gradient of `like` from that of what it was broadcast to: summed over what was repeated, in its type."""
    added = len(grad.shape) - len(like.shape)
    repeated = tuple(
        axis for axis, size in enumerate(grad.shape) if axis < added or (size != 1 and like.shape[axis - added] == 1)
    )
    if repeated:
        grad = REGISTRY["sum"](grad, axis=repeated, keepdims=True)
    if added:
        grad = REGISTRY["reshape"](grad, shape=tuple(like.shape))
    return of_type(grad, like)


def of_type(grad: Any, like: Any) -> Any:
    """`grad` in the element type of `like`."""
    return grad if grad.dtype == like.dtype else REGISTRY["cast"](grad, dtype=dtype_named(like.dtype))
