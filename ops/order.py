"""Operators in which the order of one dimension matters, which is therefore not split: scans, sorting, turning."""

from __future__ import annotations

from collections.abc import Callable
from operator import setitem
from typing import Any

from sbp.dtype import is_floating
from sbp.errors import RuleError
from sbp.operator import Operator, TensorType, operator
from sbp.ops.constant import full
from sbp.ops.elementwise import add, numeric
from sbp.ops.embedding import embedding_backward, take_along, take_along_backward
from sbp.ops.views import EVERY, expand, normal_axes, normal_axis, operand, reshape, unsqueeze


def ordered_rule(x: tuple[int, ...], *, axis: Any, **attributes: Any) -> str:
    """The rule of an operator that moves or sums up elements along dimensions, which then are never split."""
    fixed = normal_axes(axis, len(x))
    names = [f"d{at}^" if at in fixed else f"d{at}" for at in range(len(x))]
    return f"{operand(names)} -> {' '.join(names)}"


# -- turning and repeating ---------------------------------------------------------------------------------------------


@operator(ordered_rule, **EVERY)
def flip(xp, x, *, axis):
    """Dimensions (an int or several) in reverse order."""
    return xp.flip(x, axis=normal_axes(axis, x.ndim))


@flip.gradient
def _(grad, x, *, axis):
    return flip(grad, axis=axis)


flip.case("f32[4,6]", axis=1)
flip.case("f32[2,5,3]", axis=(0, -1))
flip.case("i64[7,1]", axis=0)


@operator(ordered_rule, **EVERY)
def roll(xp, x, *, shift, axis):
    """Elements moved by `shift` places along a dimension; what leaves at one end enters at the other."""
    return xp.roll(x, shift, axis=axis)


@roll.gradient
def _(grad, x, *, shift, axis):
    return roll(grad, shift=-shift, axis=axis)


roll.case("f32[4,6]", shift=2, axis=1)
roll.case("f32[5,3]", shift=-1, axis=0)
roll.case("f32[1,7,2]", shift=9, axis=-2)

flip.flops = roll.flops = lambda: 0


def repeat_interleave(x: Any, repeats: int, axis: int) -> Any:
    """Every element of a dimension `repeats` times in a row."""
    at = normal_axis(axis, len(x.shape))
    shape = tuple(x.shape)
    wide = expand(unsqueeze(x, axis=at + 1), shape=(*shape[: at + 1], repeats, *shape[at + 1 :]))
    return reshape(wide, shape=(*shape[:at], shape[at] * repeats, *shape[at + 1 :]))


def tile(x: Any, repeats: int, axis: int) -> Any:
    """A dimension `repeats` times one after the other."""
    at = normal_axis(axis, len(x.shape))
    shape = tuple(x.shape)
    wide = expand(unsqueeze(x, axis=at), shape=(*shape[:at], repeats, *shape[at:]))
    return reshape(wide, shape=(*shape[:at], shape[at] * repeats, *shape[at + 1 :]))


# -- scans -------------------------------------------------------------------------------------------------------------


@operator(ordered_rule, linear="all", dtype=numeric)
def cumsum(xp, x, *, axis, reverse=False):
    """Sums of all elements up to each one along a dimension, with `reverse` from the end."""
    if reverse:
        return xp.flip(xp.cumsum(xp.flip(x, axis), axis=axis, dtype=x.dtype), axis)
    return xp.cumsum(x, axis=axis, dtype=x.dtype)


@cumsum.gradient
def _(grad, x, *, axis, reverse):
    return cumsum(grad, axis=axis, reverse=not reverse)


cumsum.case("f32[4,6]", axis=1)
cumsum.case("f32[5,3]", axis=0, reverse=True)
cumsum.case("i64[3,4]", axis=-1)


@operator(ordered_rule, dtype=numeric)
def cumprod(xp, x, *, axis):
    """Products of all elements up to each one along a dimension."""
    return xp.cumprod(x, axis=axis, dtype=x.dtype)


@cumprod.gradient
def _(grad, x, *, axis):
    return cumprod_backward(grad, x, axis=axis)


cumprod.case("f32[4,6]", axis=1)
cumprod.case("f32[5,3]", axis=0)
cumprod.case("i64[2,1,4]", axis=-1)


def _pair(grad: tuple[int, ...], x: tuple[int, ...], *, axis: int) -> str:
    left, _, right = ordered_rule(x, axis=axis).partition(" -> ")
    return f"{left}, {left} -> {right}"


@operator(_pair, linear="grad")
def cumprod_backward(xp, grad, x, *, axis):
    """Gradient of `cumprod`: for each element the sum over later places of grad times the product of the others.

    Zeros do not spoil it, as nothing is divided; it takes as many scans as the dimension is long.
    """
    x, grad = xp.moveaxis(x, axis, 0), xp.moveaxis(grad, axis, 0)
    out = xp.zeros(x.shape, grad.dtype)
    before = xp.ones(x.shape[1:], x.dtype)
    for place in range(x.shape[0]):
        rest = xp.concatenate([before[None], x[place + 1 :]])
        out[place] = (xp.cumprod(rest, axis=0) * grad[place:]).sum(axis=0)
        before = before * x[place]
    return xp.moveaxis(out, 0, axis)


cumprod_backward.flops = lambda elements, axis: 4 * elements
cumprod_backward.case("f32[4,6]", "f32[4,6]", axis=1)
cumprod_backward.case("f32[5,3]", "f32[5,3]", axis=0)
cumprod_backward.case("f32[2,1,4]", "f32[2,1,4]", axis=-1)


# -- sorting -----------------------------------------------------------------------------------------------------------


def _sorted_types(x: TensorType, **attributes: Any) -> tuple[str, str]:
    return x.dtype, "i64"


def _sorted_rule(x: tuple[int, ...], *, axis: int, **attributes: Any) -> str:
    left, _, right = ordered_rule(x, axis=axis).partition(" -> ")
    return f"{left} -> {right}, {right}"


def _order(xp, x, axis: int, descending: bool):
    """Places of the elements in order; equal ones stay as they are."""
    if not descending:
        return xp.argsort(x, axis=axis, kind="stable").astype(xp.int64)
    # Stable from the end: the reverse of an ascending sort of the reversed dimension.
    last = x.shape[axis] - 1
    return (last - xp.flip(xp.argsort(xp.flip(x, axis), axis=axis, kind="stable"), axis)).astype(xp.int64)


@operator(_sorted_rule, outputs=("values", "places"), dtype=_sorted_types)
def sort(xp, x, *, axis=-1, descending=False):
    """Elements in order along a dimension, and where they were; equal ones keep their order."""
    places = _order(xp, x, axis, descending)
    return xp.take_along_axis(x, places, axis=axis), places


def _topk_rule(x: tuple[int, ...], *, k: int, axis: int, largest: bool) -> tuple[str, dict[str, int]]:
    at = normal_axis(axis, len(x))
    if not 0 <= k <= x[at]:
        raise RuleError(f"k {k} must be between 0 and {x[at]}, the size of dimension {at} of {list(x)}")
    left = [f"d{number}^" if number == at else f"d{number}" for number in range(len(x))]
    right = " ".join("k^" if number == at else f"d{number}" for number in range(len(x)))
    return f"{' '.join(left)} -> {right}, {right}", {"k": k}


@operator(_topk_rule, outputs=("values", "places"), dtype=_sorted_types)
def topk(xp, x, *, k, axis=-1, largest=True):
    """The k largest (or smallest) elements along a dimension in order, and where they were; of equals the first."""
    places = xp.take(_order(xp, x, axis, largest), xp.arange(k), axis=axis)
    return xp.take_along_axis(x, places, axis=axis), places


def _sorted_gradient(grad, x, *, axis, out):
    if grad[0] is None:
        return None
    return take_along_backward(grad[0], out[1], size=x.shape[axis], axis=axis)


def _sorting(op: Operator) -> None:
    op.gradient(_sorted_gradient)
    op.flops = lambda elements: 10 * elements
    # A radix sort on a device goes back and forth between two buffers of keys and places.
    op.workspace = lambda elements, itemsize: elements * (itemsize + 8)


_sorting(sort)
_sorting(topk)
sort.case("f32[4,6]")
sort.case("f32[5,3]", axis=0, descending=True)
sort.case("i64[2,1,7]", axis=-1)
topk.case("f32[4,6]", k=2)
topk.case("f32[5,3]", k=3, axis=0, largest=False)
topk.case("i64[2,7,1]", k=1, axis=1)


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Any:
    """Where the elements in order are along a dimension."""
    return sort(x, axis=axis, descending=descending)[1]


# -- writing into places -----------------------------------------------------------------------------------------------


def scatter_rule(mark: str) -> Callable[..., str]:
    """The rule of writing a source into x along one dimension, that of the source marked as the writing reduces it."""

    def rule(x: tuple[int, ...], index: tuple[int, ...], source: tuple[int, ...], *, axis: int, offset: int) -> str:
        if not len(x) == len(index) == len(source):
            raise RuleError(f"x {list(x)}, index {list(index)} and source {list(source)} must have as many dimensions")
        at = normal_axis(axis, len(x))
        wide, narrow = (
            " ".join(name if number == at else f"d{number}" for number in range(len(x))) for name in ("v", f"k{mark}")
        )
        return f"{wide}, {narrow}, {narrow} -> {wide}"

    return rule


def scatter_type(x: TensorType, index: TensorType, source: TensorType, **attributes: Any) -> str:
    """The element type of x, into which a source of the same type is written; the index holds integers."""
    if is_floating(index.dtype) or index.dtype == "bool" or x.dtype != source.dtype:
        raise RuleError(f"takes integers and two tensors of one element type, got {x}, {index}, {source}")
    return x.dtype


def scattered(xp: Any, put: Callable, x: Any, index: Any, source: Any, axis: int, offset: int) -> Any:
    """A copy of x after `put(rows, places, values)` has written the source where the index says, inside of x."""
    size = x.shape[axis]
    out = xp.moveaxis(x, axis, -1).copy()
    index, source = xp.moveaxis(index, axis, -1) - offset, xp.moveaxis(source, axis, -1)
    if out.size and index.size:
        rows, width = out.reshape(-1, size), index.shape[-1]
        index, source = index.reshape(-1, width), source.reshape(-1, width)
        row, column = xp.nonzero((index >= 0) & (index < size))
        put(rows, (row, index[row, column]), source[row, column])
        out = rows.reshape(out.shape)
    return xp.moveaxis(out, -1, axis)


@operator(scatter_rule("^"), linear="x source", monotone="x source|x|source", dtype=scatter_type)
def scatter(xp, x, index, source, *, axis=-1, offset=0):
    """x with `source` written where `index` says along one dimension; places must differ, others are left out."""
    return scattered(xp, setitem, x, index, source, axis, offset)


scatter.flops = lambda: 0


@scatter.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + outputs[0].offset[attributes["axis"]]}


@scatter.gradient
def _(grad, x, index, source, *, axis):
    zeros = full(shape=tuple(source.shape), value=0.0, dtype=grad.dtype)
    return scatter(grad, index, zeros, axis=axis), None, take_along(grad, index, axis=axis)


scatter.case("f32[4,6]", "i64[4,1]", "f32[4,1]", ranges={"index": (0, 6)})
scatter.case("f32[5,3]", "i64[1,3]", "f32[1,3]", ranges={"index": (0, 5)}, axis=0)
scatter.case("i64[2,1,4]", "i64[2,1,1]", "i64[2,1,1]", ranges={"index": (-1, 6)})


def scatter_add(x: Any, index: Any, source: Any, axis: int = -1) -> Any:
    """x with `source` added where `index` says along one dimension (torch.scatter_add); places may repeat."""
    return add(x, take_along_backward(source, index, size=x.shape[axis], axis=axis))


def index_add(x: Any, index: Any, source: Any) -> Any:
    """x (v, d) with rows `source` (*b, d) added where `index` (*b) says; places may repeat."""
    return add(x, embedding_backward(source, index, rows=x.shape[0]))
