"""Reading and writing at computed places."""

from __future__ import annotations

from typing import Any

from sbp.frontend.translation import Context, as_type, broadcast, filled, reshaped, translation
from sbp.ops import library as ops


@translation("aten.embedding")
def _(context, table, ids, padding_idx=-1, *arguments):
    """The gradient of the padding row, which PyTorch leaves out, is left out too."""
    out = ops.embedding(table, ids)
    if padding_idx is None or padding_idx < 0:
        return out
    padding = ops.unsqueeze(ops.equal_number(ids, number=padding_idx), axis=-1)
    return ops.where(padding, ops.detach(out), out)


@translation("aten.embedding_bag.padding_idx", "aten._embedding_bag", "aten._embedding_bag_forward_only",
             by_node=(2, "offsets"))  # fmt: skip
def _(context, table, ids, offsets, scale_grad_by_freq=False, mode=0, sparse=False, per_sample_weights=None,
      include_last_offset=False, padding_idx=-1):  # fmt: skip
    bags = context.shape[0]
    starts = context.constant(offsets)
    if mode == 2 or per_sample_weights is not None or ids.shape[0] % bags:
        raise NotImplementedError("embedding_bag with bags of several lengths, weights or maxima")
    length = ids.shape[0] // bags
    if starts is None or any(int(start) != number * length for number, start in enumerate(starts.tolist()[:bags])):
        raise NotImplementedError("embedding_bag whose offsets are not known to be those of bags of one length")
    bag = reshaped(ids, (bags, length))
    return ops.embedding_bag(table, bag, mode=("sum", "mean")[mode]), None, None, None


@translation("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _(context, x, indices):
    return _indexed(context, x, indices)


def _indexed(context: Context, x: Any, indices: Any) -> Any:
    """x[i, :, j, ...] by integer tensors; masks change shapes with the data and have no entry."""
    places = [at for at, index in enumerate(indices) if index is not None]
    given = [indices[at] for at in places]
    if any(index.dtype == "bool" for index in given):
        raise NotImplementedError("indexing by a mask, whose result's shape depends on the data; use torch.where")
    given = [as_type(index, "i64") for index in given]
    if places == list(range(places[0], places[-1] + 1)):
        return ops.index(x, *given, axis=places[0])
    # Indexed dimensions that are apart come to the front, as their common dimensions do.
    order = (*places, *(at for at in range(len(x.shape)) if at not in places))
    return ops.index(ops.permute(x, order=order), *given)


@translation("aten.index_put", "aten._unsafe_index_put", "aten.index_put_")
def _(context, x, indices, values, accumulate=False):
    places = [at for at, index in enumerate(indices) if index is not None]
    given = [indices[at] for at in places]
    values = as_type(values, x.dtype)
    if len(given) == 1 and given[0].dtype == "bool":
        mask = reshaped(given[0], (*given[0].shape, *(1,) * (len(x.shape) - len(given[0].shape))))
        if values.shape != () or accumulate:
            raise NotImplementedError("index_put by a mask with more than one number")
        return ops.where(mask, values, x)
    if places != list(range(places[0], places[-1] + 1)):
        raise NotImplementedError("index_put of dimensions that are apart")
    return ops.index_put(x, [as_type(index, "i64") for index in given], values, accumulate, axis=places[0])


@translation("aten.index_select")
def _(context, x, dim, index):
    return ops.index_select(x, as_type(index, "i64"), axis=dim % max(len(x.shape), 1))


@translation("aten.gather")
def _(context, x, dim, index, *, sparse_grad=False):
    return ops.gather(x, index, axis=dim % len(x.shape))


@translation("aten.scatter.src", "aten.scatter_.src")
def _(context, x, dim, index, source):
    return ops.scatter(x, index, as_type(source, x.dtype), axis=dim % len(x.shape))


@translation("aten.scatter.value", "aten.scatter_.value")
def _(context, x, dim, index, value):
    with context.builder:
        number = float(value) if x.dtype.startswith(("f", "bf")) else value
        source = ops.full(shape=index.shape, value=number, dtype=x.dtype)
    return ops.scatter(x, index, source, axis=dim % len(x.shape))


@translation("aten.scatter_add", "aten.scatter_add_")
def _(context, x, dim, index, source):
    return ops.scatter_add(x, index, as_type(source, x.dtype), axis=dim % len(x.shape))


@translation("aten.index_add", "aten.index_add_")
def _(context, x, dim, index, source, *, alpha=1):
    source = source if alpha == 1 else ops.scale(source, factor=alpha)
    axis, rank = dim % len(x.shape), len(x.shape)
    front = (axis, *(at for at in range(rank) if at != axis))
    moved, rows = (ops.permute(item, order=front) if axis else item for item in (x, source))
    width = moved.shape[1:]
    flat, added = reshaped(moved, (moved.shape[0], -1)), reshaped(rows, (rows.shape[0], -1))
    out = reshaped(ops.index_add(flat, as_type(index, "i64"), added), (moved.shape[0], *width))
    back = tuple(sorted(range(rank), key=front.__getitem__))
    return ops.permute(out, order=back) if axis else out


@translation("aten.one_hot")
def _(context, x, num_classes=-1):
    return ops.one_hot(x, classes=context.shape[-1], dtype=context.dtype)


@translation("aten.masked_scatter")
def _(context, x, mask, source):
    """The mask's true places take the source's elements in order, found by counting the places before."""
    flat = reshaped(broadcast(mask, x.shape), (-1,))
    number = ops.shift(ops.cumsum(ops.cast(flat, dtype="i64"), axis=0), amount=-1)
    elements = reshaped(source, (-1, 1))
    taken = reshaped(ops.embedding(elements, ops.clamp(number, low=0, high=elements.shape[0] - 1)), x.shape)
    return ops.where(reshaped(flat, x.shape), as_type(taken, x.dtype), x)


@translation("aten.histc", "aten.bincount")
def _(context, x, bins=100, min=0, max=0):
    """How many numbers fall into each of `bins` parts of [min, max], the last one closed; others are left out."""
    if str(context.node.target).startswith("aten.bincount") or min >= max:
        raise NotImplementedError("counting into bins that the data says")
    flat = as_type(reshaped(x, (-1,)), "f64")
    place = ops.floor(ops.scale(ops.shift(flat, amount=-float(min)), factor=bins / (max - min)))
    place = ops.where(ops.equal_number(flat, number=float(max)), filled(context, bins - 1, (), "f64"), place)
    ones = filled(context, 1, (*flat.shape, 1), context.dtype)
    return reshaped(ops.embedding_backward(ones, as_type(place, "i64"), rows=bins), context.shape)
