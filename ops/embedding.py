"""Looking up rows and elements by integers. A split of what is looked into gives P(sum): each rank finds its own."""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import is_floating, numpy_name
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.reduction import mean, sum_
from sbp.ops.views import normal_axis, permute, reshape


def _with_integers(value: TensorType, index: TensorType, **attributes: Any) -> str:
    if is_floating(index.dtype) or index.dtype == "bool":
        raise RuleError(f"looks up by integers, got {index}; cast it to i64 first")
    return value.dtype


def _local(xp, index, offset: int, size: int):
    """Where an index lies among `size` elements from `offset` on, and whether it lies there at all."""
    place = index - offset
    return xp.clip(place, 0, max(size - 1, 0)), (place >= 0) & (place < size)


# -- rows --------------------------------------------------------------------------------------------------------------


@operator("v+ d, *b -> *b d", linear="table", monotone="table", dtype=_with_integers)
def embedding(xp, table, ids, *, offset=0):
    """Rows of a table (v, d) by numbers (*b) -> (*b, d); zeros for a number that is no row.

    `offset`, the number of the first row, is set for shards.
    """
    place, found = _local(xp, ids, offset, table.shape[0])
    if table.shape[0] == 0:
        return xp.zeros((*ids.shape, table.shape[1]), table.dtype)
    return xp.where(found[..., None], table[place], xp.zeros((), table.dtype))


embedding.flops = lambda: 0
embedding.traffic = lambda b, d, itemsize: 2 * b * d * itemsize


@embedding.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[0].offset[0]}


@embedding.gradient
def _(grad, table, ids, *, offset):
    return embedding_backward(grad, ids, rows=table.shape[0], offset=offset), None


embedding.case("f32[6,4]", "i64[2,3]", ranges={"ids": (0, 6)})
embedding.case("f32[7,3]", "i64[5]", ranges={"ids": (-1, 8)})
embedding.case("f32[4,1]", "i64[]", ranges={"ids": (0, 4)})


def _embedding_backward_rule(grad: tuple[int, ...], ids: tuple[int, ...], *, rows: int, offset: int):
    return "*b+ d, *b+ -> v d", {"v": rows}


@operator(_embedding_backward_rule, linear="grad", dtype=_with_integers)
def embedding_backward(xp, grad, ids, *, rows, offset=0):
    """Gradients (*b, d) added up in the rows (rows, d) that their numbers (*b) name: the gradient of `embedding`."""
    width = grad.shape[-1]
    out = xp.zeros((rows, width), grad.dtype)
    if out.size and ids.size:
        place, found = _local(xp, ids.reshape(-1), offset, rows)
        grad = xp.where(found[:, None], grad.reshape(-1, width), xp.zeros((), grad.dtype))
        xp.add.at(out, place, grad)
    return out


embedding_backward.flops = lambda b, d: b * d
embedding_backward.traffic = lambda b, v, d, itemsize: (2 * b + v) * d * itemsize


@embedding_backward.localize
def _(attributes, inputs, outputs):
    return {"rows": outputs[0].shape[0], "offset": attributes["offset"] + outputs[0].offset[0]}


@embedding_backward.gradient
def _(grad, x, ids, *, offset):
    return embedding(grad, ids, offset=offset), None


embedding_backward.case("f32[2,3,4]", "i64[2,3]", ranges={"ids": (0, 6)}, rows=6)
embedding_backward.case("f32[5,3]", "i64[5]", ranges={"ids": (-1, 8)}, rows=7)
embedding_backward.case("f32[1]", "i64[]", ranges={"ids": (0, 4)}, rows=4)
embedding_backward.reasons = {"P(*), B -> P(*)": "would need to know that no two gradients meet in a row"}


def embedding_bag(table: Any, ids: Any, mode: str = "sum") -> Any:
    """Rows (v, d) by numbers (*b, bag), summed (or averaged, mode "mean") over each bag -> (*b, d)."""
    if mode not in ("sum", "mean"):
        raise RuleError(f"embedding_bag: mode must be 'sum' or 'mean', got {mode!r}")
    return (sum_ if mode == "sum" else mean)(embedding(table, ids), axis=-2)


def _one_hot_rule(index: tuple[int, ...], *, classes: int, dtype: str, offset: int):
    return "*b -> *b c", {"c": classes}


def _one_hot_type(index: TensorType, *, classes: int, dtype: str, offset: int) -> str:
    _with_integers(index, index)
    return dtype


@operator(_one_hot_rule, dtype=_one_hot_type)
def one_hot(xp, index, *, classes, dtype="f32", offset=0):
    """1 at the place that an integer (*b) names among (*b, classes), 0 elsewhere."""
    return (index[..., None] == xp.arange(offset, offset + classes)).astype(numpy_name(dtype))


@one_hot.localize
def _(attributes, inputs, outputs):
    return {**attributes, "classes": outputs[0].shape[-1], "offset": attributes["offset"] + outputs[0].offset[-1]}


one_hot.case("i64[4,2]", ranges={"index": (0, 5)}, classes=5)
one_hot.case("i64[5]", ranges={"index": (0, 6)}, classes=6, dtype="i64")
one_hot.case("i64[2,1,3]", ranges={"index": (-1, 9)}, classes=7, dtype="bool")


# -- elements ----------------------------------------------------------------------------------------------------------


@operator("*b v+, *b -> *b", linear="x", monotone="x", dtype=_with_integers)
def pick(xp, x, index, *, offset=0):
    """One element per row: x (*b, v), index (*b) -> (*b); 0 for a number outside the row."""
    place, found = _local(xp, index, offset, x.shape[-1])
    if x.shape[-1] == 0:
        return xp.zeros(index.shape, x.dtype)
    return xp.where(found, xp.take_along_axis(x, place[..., None], axis=-1)[..., 0], xp.zeros((), x.dtype))


pick.flops = lambda: 0
pick.traffic = lambda b, itemsize: 3 * b * itemsize


@pick.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[0].offset[-1]}


@pick.gradient
def _(grad, x, index, *, offset):
    return pick_backward(grad, index, size=x.shape[-1], offset=offset), None


pick.case("f32[4,6]", "i64[4]", ranges={"index": (0, 6)})
pick.case("f32[2,3,5]", "i64[2,3]", ranges={"index": (-1, 6)})
pick.case("f32[7]", "i64[]", ranges={"index": (0, 7)})


def _pick_backward_rule(grad: tuple[int, ...], index: tuple[int, ...], *, size: int, offset: int):
    return "*b, *b -> *b v", {"v": size}


@operator(_pick_backward_rule, linear="grad", monotone="grad", dtype=_with_integers)
def pick_backward(xp, grad, index, *, size, offset=0):
    """grad (*b) at the place that index (*b) names among (*b, size), zeros elsewhere: the gradient of `pick`."""
    hit = index[..., None] == xp.arange(offset, offset + size)
    return xp.where(hit, grad[..., None], xp.zeros((), grad.dtype))


@pick_backward.localize
def _(attributes, inputs, outputs):
    return {"size": outputs[0].shape[-1], "offset": attributes["offset"] + outputs[0].offset[-1]}


@pick_backward.gradient
def _(grad, x, index, *, offset):
    return pick(grad, index, offset=offset), None


pick_backward.case("f32[4]", "i64[4]", ranges={"index": (0, 6)}, size=6)
pick_backward.case("f32[2,3]", "i64[2,3]", ranges={"index": (-1, 6)}, size=5)
pick_backward.case("f32[]", "i64[]", ranges={"index": (0, 7)}, size=7)


def _along(rank: int, axis: int, here: str) -> str:
    at = normal_axis(axis, rank)
    return " ".join(here if k == at else f"d{k}" for k in range(rank))


def _take_along_rule(x: tuple[int, ...], index: tuple[int, ...], *, axis: int, offset: int) -> str:
    if len(x) != len(index):
        raise RuleError(f"x {list(x)} and index {list(index)} must have as many dimensions as each other")
    return f"{_along(len(x), axis, 'v+')}, {_along(len(x), axis, 'k')} -> {_along(len(x), axis, 'k')}"


@operator(_take_along_rule, linear="x", monotone="x", dtype=_with_integers)
def take_along(xp, x, index, *, axis=-1, offset=0):
    """Elements of x along one dimension by an index of equal other dimensions (torch.gather); 0 for numbers outside."""
    place, found = _local(xp, index, offset, x.shape[axis])
    if x.shape[axis] == 0:
        return xp.zeros(index.shape, x.dtype)
    return xp.where(found, xp.take_along_axis(x, place, axis=axis), xp.zeros((), x.dtype))


take_along.flops = lambda: 0
take_along.traffic = lambda elements_out, itemsize: 3 * elements_out * itemsize


@take_along.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[0].offset[attributes["axis"]]}


@take_along.gradient
def _(grad, x, index, *, axis, offset):
    return take_along_backward(grad, index, size=x.shape[axis], axis=axis, offset=offset), None


take_along.case("f32[4,6]", "i64[4,3]", ranges={"index": (0, 6)})
take_along.case("f32[5,2,3]", "i64[4,2,3]", ranges={"index": (0, 5)}, axis=0)
take_along.case("i64[1,7,2]", "i64[1,3,2]", ranges={"index": (-1, 8)}, axis=1)


def _take_along_backward_rule(grad: tuple[int, ...], index: tuple[int, ...], *, size: int, axis: int, offset: int):
    rank = len(grad)
    return f"{_along(rank, axis, 'k+')}, {_along(rank, axis, 'k+')} -> {_along(rank, axis, 'v')}", {"v": size}


@operator(_take_along_backward_rule, linear="grad", dtype=_with_integers)
def take_along_backward(xp, grad, index, *, size, axis=-1, offset=0):
    """grad added up at the places along one dimension that an index of its shape names: gradient of `take_along`."""
    moved = xp.moveaxis(grad, axis, -1)
    rows = math.prod(moved.shape[:-1])
    out = xp.zeros((rows, size), grad.dtype)
    if size and grad.size:
        place, found = _local(xp, xp.moveaxis(index, axis, -1).reshape(rows, -1), offset, size)
        part = xp.where(found, moved.reshape(rows, -1), xp.zeros((), grad.dtype))
        xp.add.at(out, (xp.arange(rows)[:, None], place), part)
    return xp.moveaxis(out.reshape(*moved.shape[:-1], size), -1, axis)


take_along_backward.flops = lambda elements: elements


@take_along_backward.localize
def _(attributes, inputs, outputs):
    axis = attributes["axis"]
    return {**attributes, "size": outputs[0].shape[axis], "offset": attributes["offset"] + outputs[0].offset[axis]}


@take_along_backward.gradient
def _(grad, x, index, *, axis, offset):
    return take_along(grad, index, axis=axis, offset=offset), None


take_along_backward.case("f32[4,3]", "i64[4,3]", ranges={"index": (0, 6)}, size=6)
take_along_backward.case("f32[4,2,3]", "i64[4,2,3]", ranges={"index": (0, 5)}, size=5, axis=0)
take_along_backward.case("f32[1,3,2]", "i64[1,3,2]", ranges={"index": (-1, 8)}, size=7, axis=1)
take_along_backward.reasons = embedding_backward.reasons


def index_select(x: Any, index: Any, axis: int = 0) -> Any:
    """Entries of one dimension by integers: x (..., v, ...), index (k) -> (..., k, ...)."""
    rank, at = len(x.shape), normal_axis(axis, len(x.shape))
    others = [k for k in range(rank) if k != at]
    front = x if at == 0 else permute(x, order=(at, *others))
    width = math.prod(x.shape[k] for k in others)
    rows = embedding(reshape(front, shape=(x.shape[at], width)), index)
    rows = reshape(rows, shape=(*index.shape, *(x.shape[k] for k in others)))
    if at == 0:
        return rows
    new = len(index.shape)
    order = (*range(new, new + at), *range(new), *range(new + at, new + rank - 1))
    return permute(rows, order=order)
