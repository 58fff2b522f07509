"""Reading and writing at computed places: indexing by several tensors, diagonals, slices written back, shuffles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sbp.errors import RuleError
from sbp.operator import operator
from sbp.ops.comparison import equal, less_number, logical_not, masked_fill, where
from sbp.ops.constant import arange, full
from sbp.ops.elementwise import add, scale, shift
from sbp.ops.embedding import embedding, embedding_backward, take_along
from sbp.ops.order import scatter_type
from sbp.ops.slicing import concat, narrow, slice_, tril, triu
from sbp.ops.views import expand, normal_axis, permute, reshape, unsqueeze

# -- rows written ------------------------------------------------------------------------------------------------------


@operator("v d, *b^, *b^ d -> v d", linear="x rows", monotone="x rows|x|rows", dtype=scatter_type)
def put_rows(xp, x, index, rows, *, offset=0):
    """x (v, d) with `rows` (*b, d) written at the numbers `index` (*b); of equal ones the last counts, others than
    those of rows are left out. `offset`, the number of the first row, is set for shards.
    """
    out = x.copy()
    place = index.reshape(-1) - offset
    kept = xp.nonzero((place >= 0) & (place < x.shape[0]))[0]
    out[place[kept]] = rows.reshape(len(place), x.shape[1])[kept]
    return out


put_rows.flops = lambda: 0


@put_rows.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + outputs[0].offset[0]}


@put_rows.gradient
def _(grad, x, index, rows):
    zeros = full(shape=tuple(rows.shape), value=0.0, dtype=grad.dtype)
    # Of equal places only the last was written: the one whose own number is read there afterwards.
    numbers = reshape(arange(size=math.prod(index.shape)), shape=(*index.shape, 1))
    last = put_rows(full(shape=(x.shape[0], 1), value=-1, dtype="i64"), index, numbers)
    written = equal(embedding(last, index), numbers)
    return put_rows(grad, index, zeros), None, masked_fill(embedding(grad, index), logical_not(written), value=0)


put_rows.case("f32[6,4]", "i64[3]", "f32[3,4]", ranges={"index": (0, 6)})
put_rows.case("f32[5,3]", "i64[1,2]", "f32[1,2,3]", ranges={"index": (-1, 7)})
put_rows.case("i64[4,1]", "i64[]", "i64[1]", ranges={"index": (0, 4)})


def _numbers(x: Any, indices: Sequence[Any], axis: int) -> tuple[Any, int]:
    """Row-major numbers of the elements that indices of the dimensions from `axis` on name, and how many there are."""
    if not indices or axis + len(indices) > len(x.shape):
        raise RuleError(f"index: {len(indices)} indices from dimension {axis} on do not fit shape {list(x.shape)}")
    sizes = x.shape[axis : axis + len(indices)]
    flat = None
    for number, (index, size) in enumerate(zip(indices, sizes)):
        index = where(less_number(index, number=0), shift(index, amount=size), index)  # from the end
        stride = math.prod(sizes[number + 1 :])
        index = index if stride == 1 else scale(index, factor=stride)
        flat = index if flat is None else add(flat, index)
    return flat, math.prod(sizes)


def _in_front(x: Any, axis: int, count: int) -> tuple[Any, tuple[int, ...]]:
    """x with `count` dimensions from `axis` on moved to the front, and the sizes of the others."""
    others = [at for at in range(len(x.shape)) if not axis <= at < axis + count]
    moved = permute(x, order=(*range(axis, axis + count), *others)) if axis else x
    return moved, tuple(x.shape[at] for at in others)


def index(x: Any, *indices: Any, axis: int = 0) -> Any:
    """x[..., i, j, ...]: elements of the dimensions from `axis` on by integer tensors that broadcast together.

    The dimensions of the indices stand where the indexed ones stood. Negative integers count from the end; what is
    outside gives zero.
    """
    at = normal_axis(axis, len(x.shape))
    flat, count = _numbers(x, indices, at)
    moved, rest = _in_front(x, at, len(indices))
    found = embedding(reshape(moved, shape=(count, math.prod(rest))), flat)
    found = reshape(found, shape=(*flat.shape, *rest))
    new = len(flat.shape)
    return (
        found
        if at == 0
        else permute(found, order=(*range(new, new + at), *range(new), *range(new + at, len(found.shape))))
    )


def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, axis: int = 0) -> Any:
    """x with `values` written (or added) where integer tensors say that broadcast together; places as for `index`.

    Without `accumulate`, of equal places the last is written.
    """
    at = normal_axis(axis, len(x.shape))
    flat, count = _numbers(x, indices, at)
    moved, rest = _in_front(x, at, len(indices))
    new = len(flat.shape)
    spot = (*x.shape[:at], *flat.shape, *x.shape[at + len(indices) :])
    if values.shape != spot:
        values = expand(values, shape=spot)
    if at:
        values = permute(values, order=(*range(at, at + new), *range(at), *range(at + new, len(spot))))
    width = math.prod(rest)
    table, rows = reshape(moved, shape=(count, width)), reshape(values, shape=(*flat.shape, width))
    table = add(table, embedding_backward(rows, flat, rows=count)) if accumulate else put_rows(table, flat, rows)
    out = reshape(table, shape=moved.shape)
    taken, rank = len(indices), len(x.shape)
    return out if at == 0 else permute(out, order=(*range(taken, taken + at), *range(taken), *range(taken + at, rank)))


def gather(x: Any, index: Any, axis: int = -1) -> Any:
    """Elements along one dimension, as torch.gather: `index` may be smaller than x in the other dimensions."""
    at = normal_axis(axis, len(x.shape))
    if len(index.shape) != len(x.shape) or any(
        size > whole for k, (size, whole) in enumerate(zip(index.shape, x.shape)) if k != at
    ):
        raise RuleError(f"gather: index {list(index.shape)} is larger than {list(x.shape)} outside of dimension {at}")
    for k, (size, whole) in enumerate(zip(index.shape, x.shape)):
        if k != at and size != whole:
            x = narrow(x, k, 0, size)
    return take_along(x, index, axis=at)


# -- slices and diagonals ----------------------------------------------------------------------------------------------


def slice_scatter(x: Any, source: Any, axis: int = 0, start: int = 0) -> Any:
    """x with `source` in place of as many of its elements from `start` on, along one dimension."""
    at = normal_axis(axis, len(x.shape))
    end = start + source.shape[at]
    if not 0 <= start <= end <= x.shape[at]:
        raise RuleError(
            f"slice_scatter: {source.shape[at]} elements from {start} on exceed dimension {at} of {list(x.shape)}"
        )
    pieces = [narrow(x, at, 0, start)] if start else []
    pieces.append(source)
    if end < x.shape[at]:
        pieces.append(narrow(x, at, end, x.shape[at] - end))
    return pieces[0] if len(pieces) == 1 else concat(*pieces, axis=at)


def select_scatter(x: Any, source: Any, axis: int, index: int) -> Any:
    """x with `source` in place of element `index` of one dimension."""
    at = normal_axis(axis, len(x.shape))
    if not -x.shape[at] <= index < x.shape[at]:
        raise RuleError(f"index {index} is outside dimension {at} of {list(x.shape)}")
    return slice_scatter(x, unsqueeze(source, axis=at), at, index % x.shape[at])


def diagonal(x: Any, offset: int = 0, first: int = 0, second: int = 1) -> Any:
    """The diagonal of two dimensions, `offset` places above the main one; it becomes the last dimension."""
    rank = len(x.shape)
    i, j = normal_axis(first, rank), normal_axis(second, rank)
    if i == j:
        raise RuleError(f"diagonal: dimensions {first} and {second} of {list(x.shape)} are the same")
    others = [at for at in range(rank) if at not in (i, j)]
    rows, columns = x.shape[i], x.shape[j]
    count = max(0, min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns))
    flat = reshape(permute(x, order=(*others, i, j)), shape=(*(x.shape[at] for at in others), rows * columns))
    start = offset if offset >= 0 else -offset * columns
    ends = (*flat.shape[:-1], start + (count - 1) * (columns + 1) + 1 if count else start)
    starts, steps = (*(0,) * len(others), start), (*(1,) * len(others), columns + 1)
    return slice_(flat, starts=starts, stops=ends, steps=steps)


def diagonal_embed(x: Any) -> Any:
    """Square matrices (*b, n, n) with x (*b, n) on their diagonals and zeros elsewhere."""
    wide = expand(unsqueeze(x, axis=-1), shape=(*x.shape, x.shape[-1]))
    return triu(tril(wide))


def pixel_shuffle(x: Any, factor: int) -> Any:
    """Channels turned into places (Shi et al., 2016): (*b, c * f * f, h, w) -> (*b, c, h * f, w * f)."""
    *lead, channels, height, width = x.shape
    if channels % (factor * factor):
        raise RuleError(f"pixel_shuffle: {channels} channels are not divisible by {factor}^2")
    kept, n = channels // (factor * factor), len(lead)
    x = reshape(x, shape=(*lead, kept, factor, factor, height, width))
    x = permute(x, order=(*range(n), n, n + 3, n + 1, n + 4, n + 2))
    return reshape(x, shape=(*lead, kept, height * factor, width * factor))


def pixel_unshuffle(x: Any, factor: int) -> Any:
    """The inverse of `pixel_shuffle`: (*b, c, h * f, w * f) -> (*b, c * f * f, h, w)."""
    *lead, channels, height, width = x.shape
    if height % factor or width % factor:
        raise RuleError(f"pixel_unshuffle: {height} x {width} is not divisible by {factor}")
    n = len(lead)
    x = reshape(x, shape=(*lead, channels, height // factor, factor, width // factor, factor))
    x = permute(x, order=(*range(n), n, n + 2, n + 4, n + 1, n + 3))
    return reshape(x, shape=(*lead, channels * factor * factor, height // factor, width // factor))
