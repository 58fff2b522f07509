"""Scattering with a reduction: the largest, smallest, sum or mean of what is written at a place.

Splitting what is written leaves parts of an extremum, as splitting it for a sum leaves parts of a sum.
"""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import dtype_named, is_floating
from sbp.errors import RuleError
from sbp.operator import Operator, operator
from sbp.ops.comparison import equal, less_number, logical_not, masked_fill
from sbp.ops.constant import full
from sbp.ops.elementwise import add, cast, clamp, div, mul, shift
from sbp.ops.embedding import take_along, take_along_backward
from sbp.ops.order import scatter_rule, scatter_type, scattered
from sbp.ops.views import normal_axis

_SCATTERED = ("x source", "x", "source")


@operator(
    scatter_rule(">"),
    passes=(*((group, "max", "max") for group in _SCATTERED), ("x", "min", "min")),
    dtype=scatter_type,
)
def scatter_max(xp, x, index, source, *, axis=-1, offset=0):
    """The larger of x and all of `source` that `index` puts there along one dimension; places outside are left out."""
    return scattered(xp, xp.maximum.at, x, index, source, axis, offset)


@operator(
    scatter_rule("<"),
    passes=(*((group, "min", "min") for group in _SCATTERED), ("x", "max", "max")),
    dtype=scatter_type,
)
def scatter_min(xp, x, index, source, *, axis=-1, offset=0):
    """The smaller of x and all of `source` that `index` puts there along one dimension; places outside are left out."""
    return scattered(xp, xp.minimum.at, x, index, source, axis, offset)


def _extremum(op: Operator) -> None:
    @op.localize
    def _(attributes, inputs, outputs):
        return {**attributes, "offset": attributes["offset"] + outputs[0].offset[attributes["axis"]]}

    @op.gradient
    def _(grad, x, index, source, *, axis, out):
        # All that reach the extremum share its gradient, as in PyTorch.
        mine = cast(equal(x, out), dtype=grad.dtype)
        theirs = cast(equal(source, take_along(out, index, axis=axis)), dtype=grad.dtype)
        count = add(mine, take_along_backward(theirs, index, size=x.shape[axis], axis=axis))
        each = div(grad, count)
        return mul(each, mine), None, mul(take_along(each, index, axis=axis), theirs)

    op.flops = lambda elements: elements
    op.reasons["P(m??), S(*), S(*) -> P(m??)"] = "what is written into is made whole, or all of it is parts"
    op.case("f32[4,6]", "i64[4,3]", "f32[4,3]", ranges={"index": (0, 6)})
    op.case("f32[5,3]", "i64[4,3]", "f32[4,3]", ranges={"index": (0, 5)}, axis=0)
    op.case("i64[2,1,4]", "i64[2,1,5]", "i64[2,1,5]", ranges={"index": (-1, 5)})


for _op in (scatter_max, scatter_min):
    _extremum(_op)


def scatter_reduce(x: Any, index: Any, source: Any, reduce: str, axis: int = -1, include_self: bool = True) -> Any:
    """x with `source` combined into it where `index` says along one dimension, as torch.scatter_reduce.

    Parameters
    ----------
    reduce
        "sum", "mean", "amax" or "amin". A product has no layouts that its factors could be split in; take logarithms.
    include_self
        Whether x's own element takes part where something is written.

    Raises
    ------
    RuleError
        Another reduction.
    """
    if reduce not in ("sum", "mean", "amax", "amin"):
        raise RuleError(f"scatter_reduce combines by sum, mean, amax or amin, got {reduce!r}")
    axis = normal_axis(axis, len(x.shape))
    size = x.shape[axis]
    ones = full(shape=tuple(source.shape), value=1.0, dtype=x.dtype)
    count = take_along_backward(ones, index, size=size, axis=axis)
    touched = logical_not(less_number(count, number=0.5))
    if reduce in ("amax", "amin"):
        start = x if include_self else masked_fill(x, touched, value=_limit(x, reduce))
        return (scatter_max if reduce == "amax" else scatter_min)(start, index, source, axis=axis)
    start = x if include_self else masked_fill(x, touched, value=0)
    total = add(start, take_along_backward(source, index, size=size, axis=axis))
    if reduce == "sum":
        return total
    return div(total, clamp(shift(count, amount=1.0) if include_self else count, low=1.0))


def _limit(x: Any, reduce: str) -> float:
    if not is_floating(dtype_named(x.dtype)):
        raise RuleError(f"scatter_reduce by {reduce} without include_self takes floating numbers, got {x.dtype}")
    return -math.inf if reduce == "amax" else math.inf
