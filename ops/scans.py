"""Scans that keep the largest, the smallest, or the logarithm of a sum of exponentials of all elements so far."""

from __future__ import annotations

from typing import Any

from sbp.operator import Operator, TensorType, operator
from sbp.ops.embedding import take_along_backward
from sbp.ops.order import ordered_rule


def _scanned_rule(x: tuple[int, ...], *, axis: int) -> str:
    left, _, right = ordered_rule(x, axis=axis).partition(" -> ")
    return f"{left} -> {right}, {right}"


def _scanned_types(x: TensorType, **attributes: Any) -> tuple[str, str]:
    return x.dtype, "i64"


def _extremum(xp: Any, x: Any, axis: int, larger: Any) -> tuple[Any, Any]:
    """The running extremum and where it was met last."""
    best = larger.accumulate(x, axis=axis)
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    places = xp.where(x == best, xp.arange(x.shape[axis]).reshape(shape), xp.zeros((), dtype=xp.int64))
    return best, xp.maximum.accumulate(places, axis=axis).astype(xp.int64)


@operator(_scanned_rule, outputs=("values", "places"), dtype=_scanned_types)
def cummax(xp, x, *, axis):
    """The largest of all elements up to each one along a dimension, and where it is; of equal ones the last."""
    return _extremum(xp, x, axis, xp.maximum)


@operator(_scanned_rule, outputs=("values", "places"), dtype=_scanned_types)
def cummin(xp, x, *, axis):
    """The smallest of all elements up to each one along a dimension, and where it is; of equal ones the last."""
    return _extremum(xp, x, axis, xp.minimum)


def _scanning(op: Operator) -> None:
    @op.gradient
    def _(grad, x, *, axis, out):
        if grad[0] is None:
            return None
        return take_along_backward(grad[0], out[1], size=x.shape[axis], axis=axis)

    op.case("f32[4,6]", axis=1)
    op.case("f32[5,3]", axis=0)
    op.case("i64[2,1,7]", axis=-1)
    op.flops = lambda elements: 2 * elements


for _op in (cummax, cummin):
    _scanning(_op)


@operator(ordered_rule)
def logcumsumexp(xp, x, *, axis):
    """log of the sum of exp of all elements up to each one along a dimension, without overflow; -inf counts nothing."""
    return xp.logaddexp.accumulate(x, axis=axis)


@logcumsumexp.gradient
def _(grad, x, *, axis, out):
    return logcumsumexp_backward(grad, x, out, axis=axis)


logcumsumexp.flops = lambda elements: 4 * elements
logcumsumexp.case("f32[4,6]", axis=1)
logcumsumexp.case("f32[5,3]", axis=0)
logcumsumexp.case("f32[2,1,7]", axis=-1)


def _backward_rule(grad: tuple[int, ...], *others: tuple[int, ...], axis: int) -> str:
    left, arrow, right = ordered_rule(grad, axis=axis).partition(" -> ")
    return f"{left}, {left}, {left} -> {right}"


@operator(_backward_rule, linear="grad")
def logcumsumexp_backward(xp, grad, x, out, *, axis):
    """Gradient of `logcumsumexp`: for each element i the sum over j >= i of grad_j exp(x_i - out_j).

    No exponent is positive, as a sum is at least each of its terms; it takes one pass per place of the dimension.
    """
    grad, x, out = (xp.moveaxis(each, axis, 0) for each in (grad, x, out))
    made = xp.zeros(x.shape, grad.dtype)
    for place in range(x.shape[0]):
        above = out[place]
        weight = xp.where(xp.isfinite(above), xp.exp(x[: place + 1] - xp.where(xp.isfinite(above), above, 0)), 0)
        made[: place + 1] += grad[place] * weight
    return xp.moveaxis(made, 0, axis)


logcumsumexp_backward.flops = lambda elements: 4 * elements
logcumsumexp_backward.case("f32[4,6]", "f32[4,6]", "f32[4,6]", axis=1)
logcumsumexp_backward.case("f32[5,3]", "f32[5,3]", "f32[5,3]", axis=0)
logcumsumexp_backward.case("f32[2,1,3]", "f32[2,1,3]", "f32[2,1,3]", axis=-1)
