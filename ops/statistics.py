"""Statistics put together from reductions: their parts, and with them the collectives of a split, stay visible."""

from __future__ import annotations

import math
from typing import Any

from sbp.ops.elementwise import add, exp, log, scale, sqrt, square, sub
from sbp.ops.reduction import max_, mean, sum_
from sbp.ops.views import detach, normal_axes, reshape


def var(x: Any, axis: Any = None, keepdims: bool = False, correction: float = 1) -> Any:
    """Variance over dimensions, divided by the number of elements minus `correction` (1 as in PyTorch)."""
    count = math.prod(x.shape[at] for at in normal_axes(axis, len(x.shape)))
    deviation = sub(x, mean(x, axis=axis, keepdims=True))
    divisor = 1 / (count - correction) if count > correction else math.nan
    return scale(sum_(square(deviation), axis=axis, keepdims=keepdims), factor=divisor)


def std(x: Any, axis: Any = None, keepdims: bool = False, correction: float = 1) -> Any:
    """Square root of the variance."""
    return sqrt(var(x, axis=axis, keepdims=keepdims, correction=correction))


def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """log(sum(exp(x))) over dimensions, without overflow."""
    top = detach(max_(x, axis=axis, keepdims=True))  # the result does not depend on it, so it needs no gradient
    total = add(log(sum_(exp(sub(x, top)), axis=axis, keepdims=True)), top)
    if keepdims:
        return total
    gone = normal_axes(axis, len(x.shape))
    return reshape(total, shape=tuple(size for at, size in enumerate(x.shape) if at not in gone))


def norm(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Euclidean norm over dimensions."""
    return sqrt(sum_(square(x), axis=axis, keepdims=keepdims))
