"""The same elements in another shape or order; cutting and putting together."""

from __future__ import annotations

import math
from typing import Any

from sbp.frontend.translation import Context, as_type, broadcast, filled, reshaped, translation
from sbp.ops import library as ops
from sbp.trace import Symbol


@translation(
    "aten.view.default", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze",
    "aten.unsqueeze", "aten.view_copy.default", "aten.squeeze_", "aten.unsqueeze_", "aten.ravel",
)  # fmt: skip
def _(context, x, *arguments, **options):
    """The result's shape says all of it."""
    return reshaped(x, context.shape)


@translation("aten.permute")
def _(context, x, dims):
    order = tuple(dim % len(x.shape) for dim in dims)
    return x if order == tuple(range(len(order))) else ops.permute(x, order=order)


@translation("aten.transpose", "aten.transpose_", "aten.swapaxes")
def _(context, x, first, second):
    return x if first == second else ops.transpose(x, first=first, second=second)


@translation("aten.t", "aten.numpy_T", "aten.mT")
def _(context, x):
    return x if len(x.shape) < 2 else ops.transpose(x)


@translation("aten.movedim")
def _(context, x, source, destination):
    rank = len(x.shape)
    sources = [at % rank for at in ([source] if isinstance(source, int) else source)]
    places = [at % rank for at in ([destination] if isinstance(destination, int) else destination)]
    order = [at for at in range(rank) if at not in sources]
    for place, at in sorted(zip(places, sources)):
        order.insert(place, at)
    return ops.permute(x, order=tuple(order))


@translation("aten.expand", "aten.expand_as", "aten.broadcast_to")
def _(context, x, *arguments, **options):
    return broadcast(x, context.shape)


@translation("aten.broadcast_tensors")
def _(context, tensors):
    return tuple(broadcast(x, kind.shape) for x, kind in zip(tensors, context.types))


@translation("aten.repeat", "aten.tile")
def _(context, x, repeats):
    x = reshaped(x, (*(1,) * (len(repeats) - len(x.shape)), *x.shape))
    counts = (*(1,) * (len(x.shape) - len(repeats)), *repeats)
    for axis, count in enumerate(counts):
        if count != 1:
            wide = (*x.shape[:axis], count, *x.shape[axis + 1 :])
            x = ops.expand(x, shape=wide) if x.shape[axis] == 1 else ops.tile(x, count, axis)
    return x


@translation("aten.repeat_interleave.self_int")
def _(context, x, repeats, dim=None, *, output_size=None):
    if dim is None:
        x, dim = reshaped(x, (-1,)), 0
    return x if repeats == 1 else ops.repeat_interleave(x, repeats, dim)


@translation("aten.flip")
def _(context, x, dims):
    return ops.flip(x, axis=tuple(dims))


@translation("aten.roll")
def _(context, x, shifts, dims=()):
    shifts, dims = ([item] if isinstance(item, int) else list(item) for item in (shifts, dims))
    if not dims:
        return reshaped(ops.roll(reshaped(x, (-1,)), shift=shifts[0], axis=0), x.shape)
    for shift, dim in zip(shifts, dims):
        x = ops.roll(x, shift=shift, axis=dim)
    return x


@translation("aten.as_strided", "aten.as_strided_copy", by_node=(0, "self"))
def _(context, node, size, stride, offset=None):
    """The elements at offset + the sum of index times stride, of what lies in memory in its own order."""
    kept, x = node.meta["val"], context.operand(node)
    start, total = offset or 0, math.prod(x.shape)
    last = start + sum((count - 1) * step for count, step in zip(size, stride))
    if not kept.is_contiguous() or kept.storage_offset() or (0 not in size and last >= total):
        raise NotImplementedError("as_strided of a tensor that is itself a view")
    if 0 in size:
        return filled(context, 0, context.shape)
    flat = reshaped(x, (total,))
    moving = sorted((at for at in range(len(size)) if stride[at] and size[at] > 1), key=lambda at: -stride[at])
    dense = [math.prod(size[at] for at in moving[place + 1 :]) for place in range(len(moving))]
    if [stride[at] for at in moving] == dense:  # a piece of memory, in another order of dimensions
        count = math.prod(size[at] for at in moving)
        piece = flat if count == total else ops.slice(flat, starts=(start,), stops=(start + count,))
        made = reshaped(piece, tuple(size[at] for at in moving))
        order = sorted(range(len(moving)), key=lambda place: moving[place])
        made = made if order == list(range(len(order))) else ops.permute(made, order=tuple(order))
        return broadcast(reshaped(made, tuple(n if at in moving else 1 for at, n in enumerate(size))), tuple(size))
    with context.builder:
        places = ops.full(shape=(1,) * len(size), value=start, dtype="i64")
        for at, (count, step) in enumerate(zip(size, stride)):
            along = ops.arange(size=count, start=0, step=step, dtype="i64")
            places = places + reshaped(along, tuple(count if k == at else 1 for k in range(len(size))))
    return reshaped(ops.index_select(flat, reshaped(places, (math.prod(size),)), 0), tuple(size))


# -- cutting -----------------------------------------------------------------------------------------------------------


@translation("aten.slice.Tensor", "aten.slice_copy.Tensor")
def cut(context: Context, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """x[start:end:step] along one dimension."""
    first, last, stride = slice(start, end, step).indices(x.shape[dim])
    if (first, max(first, last), stride) == (0, x.shape[dim], 1):
        return x
    free: list[Any] = [None] * len(x.shape)
    starts, stops, steps = list(free), list(free), [1] * len(free)
    starts[dim], stops[dim], steps[dim] = first, max(first, last), stride
    return ops.slice(x, starts=tuple(starts), stops=tuple(stops), steps=None if step == 1 else tuple(steps))


@translation("aten.narrow")
def _(context, x, dim, start, length):
    return ops.narrow(x, dim, start, length)


@translation("aten.select.int", "aten.select_copy.int")
def _(context, x, dim, index):
    return ops.select(x, dim, index % x.shape[dim])


@translation("aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split",
             "aten.split_with_sizes_copy", "aten.split_copy.Tensor")  # fmt: skip
def _(context, x, parts, dim=0):
    axis = dim % len(x.shape)
    sizes = tuple(kind.shape[axis] for kind in context.types)
    return (x,) if len(sizes) == 1 else ops.split(x, sizes=sizes, axis=axis)


@translation("aten.unbind.int", "aten.unbind_copy.int")
def _(context, x, dim=0):
    axis, count = dim % len(x.shape), x.shape[dim]
    if count == 1:
        return (ops.select(x, axis, 0),)
    pieces = ops.split(x, sizes=(1,) * count, axis=axis)
    return tuple(ops.squeeze(piece, axis=axis) for piece in pieces)


@translation("aten.unfold")
def _(context, x, dim, size, step):
    axis = dim % len(x.shape)
    windows = [ops.narrow(x, axis, start, size) for start in range(0, x.shape[axis] - size + 1, step)]
    order = (*(at for at in range(len(x.shape) + 1) if at != axis + 1), axis + 1)
    return ops.permute(ops.stack(*windows, axis=axis), order=order)


# -- putting together --------------------------------------------------------------------------------------------------


@translation("aten.cat", "aten.concat", "aten.concatenate")
def _(context, tensors, dim=0):
    kept = [as_type(x, context.dtype) for x in tensors if x.shape != (0,)]
    return kept[0] if len(kept) == 1 else ops.concat(*kept, axis=dim)


@translation("aten.stack")
def _(context, tensors, dim=0):
    return ops.stack(*(as_type(x, context.dtype) for x in tensors), axis=dim % len(context.shape))


@translation("aten.hstack", "aten.column_stack")
def _(context, tensors):
    return ops.concat(*tensors, axis=0 if len(tensors[0].shape) == 1 else 1)


@translation("aten.constant_pad_nd", "aten.pad")
def pad(context: Context, x: Any, padding: Any, mode: Any = 0, value: Any = None) -> Any:
    """Numbers (before, after) for the last dimension first, as PyTorch gives them; negative ones cut."""
    if isinstance(mode, str) and mode != "constant":
        kinds = {"reflect": ops.reflection_pad, "replicate": ops.replication_pad, "circular": ops.circular_pad}
        return kinds[mode](x, tuple(padding))
    number = (0 if value is None else value) if isinstance(mode, str) else mode
    rank = len(x.shape)
    before, after = [0] * rank, [0] * rank
    for index in range(len(padding) // 2):
        before[rank - 1 - index], after[rank - 1 - index] = padding[2 * index], padding[2 * index + 1]
    if any(size < 0 for size in (*before, *after)):
        starts = tuple(max(-size, 0) for size in before)
        stops = tuple(size - max(-cut, 0) for size, cut in zip(x.shape, after))
        x = ops.slice(x, starts=starts, stops=stops)
        before, after = [max(size, 0) for size in before], [max(size, 0) for size in after]
    if not any((*before, *after)):
        return x
    whole = number if x.dtype.startswith(("f", "b")) else int(number)
    return ops.pad(x, before=tuple(before), after=tuple(after), value=whole)


for _kind, _function in (("reflection", ops.reflection_pad), ("replication", ops.replication_pad)):
    for _rank in (1, 2, 3):
        translation(f"aten.{_kind}_pad{_rank}d")(
            lambda context, x, padding, function=_function: function(x, tuple(padding))
        )


@translation("aten.slice_scatter")
def _(context, x, source, dim=0, start=None, end=None, step=1):
    first, last, stride = slice(start, end, step).indices(x.shape[dim])
    source = as_type(source, x.dtype)
    if stride == 1:
        return ops.slice_scatter(x, source, dim, first)
    axis = dim % len(x.shape)
    places = range(first, max(first, last), stride)
    where = [ops.narrow(x, axis, at, 1) for at in range(x.shape[axis])]
    for number, at in enumerate(places):
        where[at] = ops.narrow(source, axis, number, 1)
    return ops.concat(*where, axis=axis)


@translation("aten.select_scatter")
def _(context, x, source, dim, index):
    return ops.select_scatter(x, as_type(source, x.dtype), dim, index)


@translation("aten.copy", "aten.copy_")
def _(context, x, source, non_blocking=False):
    return broadcast(as_type(source, x.dtype), x.shape)


@translation("aten.fill", "aten.fill_", "aten.zero_")
def _(context, x, value=0):
    if isinstance(value, Symbol):
        return broadcast(as_type(value, x.dtype), x.shape)
    return filled(context, value, x.shape, x.dtype)


@translation("aten.tril", "aten.tril_")
def _(context, x, diagonal=0):
    return ops.tril(x, diagonal=diagonal)


@translation("aten.triu", "aten.triu_")
def _(context, x, diagonal=0):
    return ops.triu(x, diagonal=diagonal)


@translation("aten.diagonal", "aten.diagonal_copy")
def _(context, x, offset=0, dim1=0, dim2=1):
    return ops.diagonal(x, offset, dim1, dim2)


@translation("aten.diag_embed")
def _(context, x, offset=0, dim1=-2, dim2=-1):
    if offset or (dim1, dim2) != (-2, -1):
        raise NotImplementedError("diag_embed with offset or other dimensions")
    return ops.diagonal_embed(x)


@translation("aten.pixel_shuffle")
def _(context, x, factor):
    return ops.pixel_shuffle(x, factor)


@translation("aten.pixel_unshuffle")
def _(context, x, factor):
    return ops.pixel_unshuffle(x, factor)
