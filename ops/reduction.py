"""Reductions over dimensions."""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import is_floating
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.comparison import equal
from sbp.ops.elementwise import cast, div, mul, scale
from sbp.ops.views import expand, normal_axes, normal_axis, operand, reshape


def _reduced(mark: str):
    """A rule function: the dimensions `axis` are reduced, with a mark that says what splitting them makes."""

    def rule(x: tuple[int, ...], *, axis: Any, keepdims: bool, **attributes: Any) -> str:
        gone = normal_axes(axis, len(x))
        before = [f"d{at}{mark}" if at in gone else f"d{at}" for at in range(len(x))]
        after = ["1" if at in gone else f"d{at}" for at in range(len(x)) if keepdims or at not in gone]
        return f"{operand(before)} -> {' '.join(after)}"

    return rule


def restore(grad: Any, x: Any, axis: Any, keepdims: bool) -> Any:
    """What was reduced over `axis`, repeated to the shape of x."""
    if not keepdims:
        gone = normal_axes(axis, len(x.shape))
        grad = reshape(grad, shape=tuple(1 if at in gone else size for at, size in enumerate(x.shape)))
    return expand(grad, shape=tuple(x.shape))


def _sum_type(x: TensorType, **attributes: Any) -> str:
    return "i64" if x.dtype == "bool" else x.dtype


def _ones_only(x: TensorType, *, axis: Any, **attributes: Any) -> str:
    """Where only dimensions of size one are reduced, nothing but the shape changes."""
    return "all" if all(x.shape[at] == 1 for at in normal_axes(axis, len(x.shape))) else ""


def _total(xp, x, axes, keepdims, count=1):
    if x.dtype == xp.float16:  # sums of half precision overflow soon
        return (xp.sum(x, axis=axes, keepdims=keepdims, dtype=xp.float32) / count).astype(x.dtype)
    total = xp.sum(x, axis=axes, keepdims=keepdims, dtype=xp.int64 if x.dtype == bool else x.dtype)
    return total if count == 1 else total / count


@operator(_reduced("+"), name="sum", linear="all", monotone=_ones_only, dtype=_sum_type)
def sum_(xp, x, *, axis=None, keepdims=False):
    """Sum over dimensions (an int, several, or None: all). Of truth values: how many hold."""
    return _total(xp, x, normal_axes(axis, x.ndim), keepdims)


sum_.flops = lambda elements: elements


@sum_.gradient
def _(grad, x, *, axis, keepdims):
    return restore(grad, x, axis, keepdims)


def _mean_type(x: TensorType, **attributes: Any) -> str:
    if not is_floating(x.dtype):
        raise RuleError(f"takes the mean of floating numbers, got {x}; cast it first")
    return x.dtype


@operator(_reduced("+"), linear="all", monotone=_ones_only, dtype=_mean_type)
def mean(xp, x, *, axis=None, keepdims=False, count=None):
    """Mean over dimensions (an int, several, or None: all). `count`, set for shards, divides the sum."""
    axes = normal_axes(axis, x.ndim)
    if count is None:
        count = math.prod(x.shape[at] for at in axes)
    return _total(xp, x, axes, keepdims, count or math.nan)


mean.flops = lambda elements: elements


@mean.localize
def _(attributes, inputs, outputs):
    if attributes["count"] is not None:
        return attributes
    shape = inputs[0].global_shape
    return {**attributes, "count": math.prod(shape[at] for at in normal_axes(attributes["axis"], len(shape)))}


@mean.gradient
def _(grad, x, *, axis, keepdims, count):
    if count is None:
        count = math.prod(x.shape[at] for at in normal_axes(axis, len(x.shape)))
    return restore(scale(grad, factor=1 / count), x, axis, keepdims)


def lowest(xp: Any, dtype: Any) -> Any:
    """The number that is below all others of a type: the maximum of nothing."""
    if dtype.kind == "f":
        return -math.inf
    return False if dtype.kind == "b" else int(xp.iinfo(dtype).min)


def highest(xp: Any, dtype: Any) -> Any:
    """The number that is above all others of a type: the minimum of nothing."""
    if dtype.kind == "f":
        return math.inf
    return True if dtype.kind == "b" else int(xp.iinfo(dtype).max)


def _extremum(xp, x, axis, keepdims, function, of_nothing):
    axes = normal_axes(axis, x.ndim)
    if any(x.shape[at] == 0 for at in axes):
        shape = tuple(1 if at in axes else size for at, size in enumerate(x.shape) if keepdims or at not in axes)
        return xp.full(shape, of_nothing(xp, x.dtype), x.dtype)
    return function(x, axis=axes, keepdims=keepdims)


@operator(_reduced(">"), name="max", linear=_ones_only, monotone=_ones_only, passes=[("all", "max", "max")])
def max_(xp, x, *, axis=None, keepdims=False):
    """Maximum over dimensions (an int, several, or None: all); of nothing, the lowest number of the type."""
    return _extremum(xp, x, axis, keepdims, xp.max, lowest)


@operator(_reduced("<"), name="min", linear=_ones_only, monotone=_ones_only, passes=[("all", "min", "min")])
def min_(xp, x, *, axis=None, keepdims=False):
    """Minimum over dimensions (an int, several, or None: all); of nothing, the highest number of the type."""
    return _extremum(xp, x, axis, keepdims, xp.min, highest)


max_.flops = min_.flops = lambda elements: elements


def _extremum_gradient(grad, x, *, axis, keepdims, out):
    """Shared equally between the elements that are the extremum."""
    ones = tuple(1 if at in normal_axes(axis, len(x.shape)) else size for at, size in enumerate(x.shape))
    found = cast(equal(x, out if keepdims else reshape(out, shape=ones)), dtype=x.dtype)
    share = div(grad if keepdims else reshape(grad, shape=ones), sum_(found, axis=axis, keepdims=True))
    return mul(found, share)


max_.gradient(_extremum_gradient)
min_.gradient(_extremum_gradient)

for _op in (sum_, mean, max_, min_):
    _op.case("f32[4,6]", axis=1)
    _op.case("f32[5,3]", axis=0, keepdims=True)
    _op.case("f32[2,3,4]", axis=(0, -1))
    _op.case("f32[5]")
    _op.case("f32[1,4]", axis=0)
    _op.case("f32[]")
sum_.case("i64[4,3]", axis=0)
sum_.case("bool[5]")
max_.case("i64[4,3]", axis=0)
max_.case("bool[3,8]", axis=0)


def _prod_type(x: TensorType, **attributes: Any) -> str:
    return "i64" if x.dtype == "bool" else x.dtype


@operator(_reduced("^"), dtype=_prod_type)
def prod(xp, x, *, axis=None, keepdims=False):
    """Product over dimensions (an int, several, or None: all)."""
    return xp.prod(x, axis=normal_axes(axis, x.ndim), keepdims=keepdims, dtype=xp.int64 if x.dtype == bool else x.dtype)


prod.flops = lambda elements: elements


@prod.gradient
def _(grad, x, *, axis, keepdims):
    if not keepdims:
        gone = normal_axes(axis, len(x.shape))
        grad = reshape(grad, shape=tuple(1 if at in gone else size for at, size in enumerate(x.shape)))
    return prod_backward(grad, x, axis=axis)


def _prod_backward_rule(grad: tuple[int, ...], x: tuple[int, ...], *, axis: Any) -> str:
    gone = normal_axes(axis, len(x))
    kept = ["1" if at in gone else f"d{at}" for at in range(len(x))]
    full = [f"d{at}^" if at in gone else f"d{at}" for at in range(len(x))]
    return f"{' '.join(kept)}, {' '.join(full)} -> {' '.join(full)}"


@operator(_prod_backward_rule, linear="grad")
def prod_backward(xp, grad, x, *, axis=None):
    """`grad` (dimensions kept) times the product of all other elements, which zeros do not spoil."""
    axes = normal_axes(axis, x.ndim)
    zero = x == 0
    zeros = xp.sum(zero, axis=axes, keepdims=True)
    safe = xp.where(zero, x.dtype.type(1), x)
    product = xp.prod(safe, axis=axes, keepdims=True)
    others = xp.where(zeros == 0, product / safe, xp.where((zeros == 1) & zero, product, x.dtype.type(0)))
    return grad * others


prod_backward.case("f32[4,1]", "f32[4,6]", axis=1)
prod_backward.case("f32[1,1]", "f32[5,2]")
prod_backward.case("f32[3,1,1]", "f32[3,4,2]", axis=(-1, 1))

for _op in (prod,):
    _op.case("f32[4,6]", axis=1)
    _op.case("f32[5,3]", axis=0, keepdims=True)
    _op.case("f32[5]")


def _arg_rule(x: tuple[int, ...], *, axis: int | None, keepdims: bool) -> str:
    gone = range(len(x)) if axis is None else (normal_axis(axis, len(x)),)
    before = [f"d{at}^" if at in gone else f"d{at}" for at in range(len(x))]
    after = ["1" if at in gone else f"d{at}" for at in range(len(x)) if keepdims or at not in gone]
    return f"{operand(before)} -> {' '.join(after)}"


def _arg(xp, function, x, axis, keepdims):
    if axis is None:
        found = xp.asarray(function(x.reshape(-1), axis=0))
        return (found.reshape((1,) * x.ndim) if keepdims else found).astype(xp.int64)
    found = function(x, axis=axis).astype(xp.int64)
    return xp.expand_dims(found, axis) if keepdims else found


@operator(_arg_rule, dtype="i64")
def argmax(xp, x, *, axis=None, keepdims=False):
    """Where the maximum is along a dimension, the first of equals; None: in the flattened tensor."""
    return _arg(xp, xp.argmax, x, axis, keepdims)


@operator(_arg_rule, dtype="i64")
def argmin(xp, x, *, axis=None, keepdims=False):
    """Where the minimum is along a dimension, the first of equals; None: in the flattened tensor."""
    return _arg(xp, xp.argmin, x, axis, keepdims)


for _op in (argmax, argmin):
    _op.flops = lambda elements: elements
    _op.case("f32[4,6]", axis=1)
    _op.case("f32[5,3]", axis=0, keepdims=True)
    _op.case("f32[7]")
