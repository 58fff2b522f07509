"""ONNX's operators that give the same numbers in another shape, order or selection."""

from __future__ import annotations

import math
from typing import Any

from sbp.frontend.onnx_operators.node import onnx_translation
from sbp.frontend.translation import broadcast, reshaped
from sbp.ops import library as ops


@onnx_translation("Reshape")
def _(node, x, shape):
    target = [int(size) for size in node.known(1, "a shape")]
    if not node.get("allowzero", 0):
        target = [x.shape[at] if size == 0 else size for at, size in enumerate(target)]
    total = math.prod(size for size in target if size != -1)
    return reshaped(x, tuple(math.prod(x.shape) // total if size == -1 else size for size in target))


@onnx_translation("Flatten")
def _(node, x):
    axis = node.get("axis", 1) % (len(x.shape) + 1)
    return reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@onnx_translation("Transpose")
def _(node, x):
    return ops.permute(x, order=tuple(node.get("perm", range(len(x.shape) - 1, -1, -1))))


@onnx_translation("Squeeze")
def _(node, x, axes=None):
    return ops.squeeze(x, axis=node.axes())


@onnx_translation("Unsqueeze")
def _(node, x, axes=None):
    return ops.unsqueeze(x, axis=node.axes())


@onnx_translation("Expand")
def _(node, x, shape):
    target = [int(size) for size in node.known(1, "a shape")]
    rank = max(len(target), len(x.shape))
    target = [1] * (rank - len(target)) + target
    own = (*(1,) * (rank - len(x.shape)), *x.shape)
    return broadcast(x, tuple(max(a, b) for a, b in zip(target, own)))


@onnx_translation("Tile")
def _(node, x, repeats):
    for axis, count in enumerate(node.known(1, "repeats")):
        x = x if count == 1 else ops.tile(x, int(count), axis)
    return x


@onnx_translation("Concat")
def _(node, *inputs):
    kept = [x for x in inputs if 0 not in x.shape] or list(inputs[:1])
    return kept[0] if len(kept) == 1 else ops.concat(*kept, axis=node.get("axis"))


@onnx_translation("Split")
def _(node, x, split=None):
    axis = node.get("axis", 0) % len(x.shape)
    given = node.get("split")
    given = node.constant(1) if given is None else given
    if given is None:
        count = node.get("num_outputs", node.outputs)
        each = -(-x.shape[axis] // count)
        given = [min(each, x.shape[axis] - each * at) for at in range(count)]
    sizes = tuple(int(size) for size in given)
    return ops.split(x, sizes=sizes, axis=axis) if len(sizes) > 1 else (x,)


@onnx_translation("Slice")
def _(node, x, *bounds):
    starts, ends = (
        node.known(at, "bounds") if node.get(key) is None else node.get(key) for at, key in ((1, "starts"), (2, "ends"))
    )
    axes = node.axes(3) or tuple(range(len(starts)))
    steps = node.constant(4)
    steps = [1] * len(axes) if steps is None else [int(step) for step in steps]
    cut: dict[str, list[Any]] = {"starts": [None] * len(x.shape), "stops": [None] * len(x.shape)}
    strides = [1] * len(x.shape)
    flipped = []
    for axis, start, end, step in zip(axes, starts, ends, steps):
        axis %= len(x.shape)
        first, last, stride = slice(int(start), int(end), step).indices(x.shape[axis])
        if stride < 0:
            count = len(range(first, last, stride))
            first, stride = x.shape[axis] - 1 - first, -stride
            last = first + (count - 1) * stride + 1
            flipped.append(axis)
        cut["starts"][axis], cut["stops"][axis], strides[axis] = first, max(first, last), stride
    x = ops.flip(x, axis=tuple(flipped)) if flipped else x
    return ops.slice(x, starts=tuple(cut["starts"]), stops=tuple(cut["stops"]), steps=tuple(strides))


@onnx_translation("Pad")
def _(node, x, *given):
    pads = node.get("pads")
    pads = [int(size) for size in (node.known(1, "pads") if pads is None else pads)]
    axes = node.axes(3) or tuple(range(len(x.shape)))
    before, after = [0] * len(x.shape), [0] * len(x.shape)
    for at, axis in enumerate(axes):
        before[axis], after[axis] = pads[at], pads[at + len(axes)]
    mode = node.get("mode", "constant")
    if mode != "constant":
        last = [size for b, a in zip(before[::-1], after[::-1]) for size in (b, a)]
        return {"reflect": ops.reflection_pad, "edge": ops.replication_pad, "wrap": ops.circular_pad}[mode](
            x, tuple(last[: 2 * (len(x.shape) - 2)])
        )
    value = node.constant(2) if len(given) > 1 else None
    number = 0.0 if value is None else float(value)
    return ops.pad(x, before=tuple(before), after=tuple(after), value=number)


@onnx_translation("Trilu")
def _(node, x, k=None):
    value = node.constant(1)
    return (ops.triu if node.get("upper", 1) else ops.tril)(x, diagonal=0 if value is None else int(value))


@onnx_translation("DepthToSpace")
def _(node, x):
    size = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return ops.pixel_shuffle(x, size)
    n, c, h, w = x.shape
    x = ops.reshape(x, shape=(n, size, size, c // size**2, h, w))
    return ops.reshape(ops.permute(x, order=(0, 3, 4, 1, 5, 2)), shape=(n, c // size**2, h * size, w * size))
