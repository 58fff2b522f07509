"""ONNX's operators that read at places that data says."""

from __future__ import annotations

from sbp.frontend.onnx_operators.node import onnx_translation
from sbp.frontend.translation import as_type
from sbp.ops import library as ops


@onnx_translation("Gather")
def _(node, x, index):
    axis = node.get("axis", 0) % len(x.shape)
    value = node.constant(1)
    if value is not None and value.ndim == 0:
        return ops.select(x, axis, int(value) % x.shape[axis])
    if axis == 0 and len(x.shape) == 2 and (value is None or (value >= 0).all()):
        return ops.embedding(x, as_type(index, "i64"))
    return ops.index(x, as_type(index, "i64"), axis=axis)


@onnx_translation("GatherElements")
def _(node, x, index):
    return ops.gather(x, as_type(index, "i64"), axis=node.get("axis", 0) % len(x.shape))


@onnx_translation("GatherND")
def _(node, x, index):
    if node.get("batch_dims", 0):
        raise NotImplementedError("GatherND with batch_dims")
    count = index.shape[-1]
    parts = [ops.select(index, len(index.shape) - 1, at) for at in range(count)]
    return ops.index(x, *parts)


@onnx_translation("OneHot")
def _(node, index, depth, values):
    low, high = (float(value) for value in node.known(2, "values"))
    hot = ops.one_hot(as_type(index, "i64"), classes=int(node.known(1, "a depth")), dtype="f32")
    hot = ops.shift(ops.scale(hot, factor=high - low), amount=low) if (low, high) != (0.0, 1.0) else hot
    axis = node.get("axis", -1) % len(hot.shape)
    order = list(range(len(hot.shape) - 1))
    order.insert(axis, len(hot.shape) - 1)
    return as_type(ops.permute(hot, order=tuple(order)), values.dtype)
