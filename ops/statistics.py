"""Statistics put together from reductions: their parts, and with them the collectives of a split, stay visible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sbp.errors import RuleError
from sbp.ops.elementwise import (
    abs_,
    add,
    cast,
    clamp,
    exp,
    log,
    maximum,
    mul,
    pow_,
    reciprocal,
    scale,
    shift,
    sqrt,
    square,
    sub,
)
from sbp.ops.reduction import max_, mean, min_, sum_
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


def norm(x: Any, axis: Any = None, keepdims: bool = False, order: float = 2) -> Any:
    """Norm over dimensions: Euclidean, or of another order above 0, `math.inf` for the largest magnitude."""
    return _root(_powers(x, order, axis, keepdims), order)


def global_norm(tensors: Sequence[Any], order: float = 2) -> Any:
    """Norm of all elements of several tensors (see `norm`), in single precision or better.

    Whatever the layouts, every element counts once: the sum over a split dimension is P(sum), one over a repeated
    tensor is not.
    """
    total = None
    for x in tensors:
        part = _powers(cast(x, dtype="f32") if x.dtype in ("f16", "bf16") else x, order, None, False)
        total = part if total is None else maximum(total, part) if order == math.inf else add(total, part)
    return _root(total, order)


def _powers(x: Any, order: float, axis: Any, keepdims: bool) -> Any:
    """What adds up over the parts of a tensor; for the infinite order what their maximum is taken of."""
    if not order > 0:
        raise RuleError(f"norm: the order must be above 0, got {order}")
    if order == math.inf:
        return max_(abs_(x), axis=axis, keepdims=keepdims)
    return sum_(square(x) if order == 2 else pow_(abs_(x), exponent=order), axis=axis, keepdims=keepdims)


def _root(total: Any, order: float) -> Any:
    if order == math.inf:
        return total
    return sqrt(total) if order == 2 else pow_(total, exponent=1 / order)


def clip_by_global_norm(tensors: Sequence[Any], limit: float, order: float = 2) -> tuple[list[Any], Any]:
    """Tensors scaled so that their common norm is at most `limit` (torch.nn.utils.clip_grad_norm_), and that norm."""
    found = global_norm(tensors, order)
    factor = clamp(scale(reciprocal(shift(found, amount=1e-6)), factor=limit), high=1.0)
    return [mul(x, cast(factor, dtype=x.dtype) if x.dtype != factor.dtype else factor) for x in tensors], found


def any_(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Whether any truth value holds."""
    return max_(x, axis=axis, keepdims=keepdims)


def all_(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Whether all truth values hold."""
    return min_(x, axis=axis, keepdims=keepdims)
