"""ONNX's operators in operators of `sbp`: the table of `sbp.frontend.onnx`.

An entry is a function of a `Node` and the operator's inputs, tensors as symbols; what is known at import (shapes, axes)
it reads with `node.constant`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sbp.frontend.translation import Table, as_type, broadcast, reshaped
from sbp.ops import library as ops
from sbp.trace import GraphBuilder, Symbol

onnx_translation = Table()
"""Of ONNX operators by name; users add theirs: `@onnx_translation("Name")`."""

_TYPES = {1: "f32", 2: "u8", 3: "i8", 6: "i32", 7: "i64", 9: "bool", 10: "f16", 11: "f64", 12: "u32", 16: "bf16"}
"""Element types by their number in TensorProto; others are not held here."""


@dataclass
class Node:
    """An ONNX node being translated.

    Parameters
    ----------
    attributes
        Its attributes as Python values.
    constant
        Value of input i (a NumPy array) where it is known at import, else None.
    outputs
        How many outputs are used.
    """

    builder: GraphBuilder
    name: str
    attributes: Mapping[str, Any]
    constant: Callable[[int], Any]
    outputs: int
    opset: int

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def known(self, index: int, what: str, default: Any = None) -> Any:
        """The value of input i; raises `NotImplementedError` if only the data says it."""
        value = self.constant(index)
        if value is None and default is None:
            raise NotImplementedError(f"{what} that the data says")
        return default if value is None else value

    def axes(self, index: int = 1, name: str = "axes") -> tuple[int, ...] | None:
        """Axes from the attribute of older opsets or the input of newer ones; None: all."""
        given = self.get(name)
        if given is None:
            given = self.constant(index)
        return None if given is None else tuple(int(axis) for axis in (given if hasattr(given, "__len__") else [given]))


def element_type(number: int) -> str:
    """The name of an element type of TensorProto; raises `NotImplementedError` for what is not held here."""
    if number not in _TYPES:
        raise NotImplementedError(f"element type {number} of TensorProto")
    return _TYPES[number]


# -- element by element ------------------------------------------------------------------------------------------------

for _name, _function in {
    "Neg": ops.neg, "Abs": ops.abs, "Sqrt": ops.sqrt, "Exp": ops.exp, "Log": ops.log, "Reciprocal": ops.reciprocal,
    "Erf": ops.erf, "Tanh": ops.tanh, "Sigmoid": ops.sigmoid, "Relu": ops.relu, "Softplus": ops.softplus,
    "HardSwish": ops.hardswish, "Softsign": ops.softsign, "Floor": ops.floor, "Ceil": ops.ceil, "Round": ops.round,
    "Sign": ops.sign, "Sin": ops.sin, "Cos": ops.cos, "Tan": ops.tan, "Asin": ops.asin, "Acos": ops.acos,
    "Atan": ops.atan, "Sinh": ops.sinh, "Cosh": ops.cosh, "Asinh": ops.asinh, "Acosh": ops.acosh, "Atanh": ops.atanh,
    "IsNaN": ops.isnan, "Not": ops.logical_not, "Mish": ops.mish, "Identity": lambda x: x,
}.items():  # fmt: skip
    onnx_translation(_name)(lambda node, x, function=_function: function(x))

for _name, _function in {
    "Add": ops.add, "Sub": ops.sub, "Mul": ops.mul, "Equal": ops.equal, "Greater": ops.greater, "Less": ops.less,
    "GreaterOrEqual": ops.greater_equal, "LessOrEqual": ops.less_equal, "And": ops.logical_and, "Or": ops.logical_or,
    "Xor": ops.logical_xor, "PRelu": ops.prelu,
}.items():  # fmt: skip
    onnx_translation(_name)(lambda node, x, y, function=_function: function(x, y))


@onnx_translation("Div")
def _(node, x, y):
    if x.dtype.startswith(("i", "u")):  # whole numbers are divided towards zero
        return as_type(ops.trunc(ops.div(as_type(x, "f64"), as_type(y, "f64"))), x.dtype)
    return ops.div(x, y)


@onnx_translation("Pow")
def _(node, x, exponent):
    value = node.constant(1)
    if value is not None and value.size == 1:
        number = float(value.reshape(-1)[0])
        special: dict[float, Callable] = {1.0: lambda x: x, 2.0: ops.square, 0.5: ops.sqrt}
        return special[number](x) if number in special else ops.pow(x, exponent=number)
    return ops.exp(ops.mul(ops.log(x), as_type(exponent, x.dtype)))


@onnx_translation("Mod")
def _(node, x, y):
    return ops.fmod(x, y) if node.get("fmod", 0) else ops.remainder(x, y)


for _name, _function in {"Max": ops.maximum, "Min": ops.minimum, "Sum": ops.add}.items():

    @onnx_translation(_name)
    def _(node, first, *others, function=_function):
        for other in others:
            first = function(first, other)
        return first


@onnx_translation("Mean")
def _(node, *inputs):
    total = inputs[0]
    for other in inputs[1:]:
        total = ops.add(total, other)
    return ops.scale(total, factor=1 / len(inputs))


@onnx_translation("Gelu")
def _(node, x):
    return ops.gelu(x, approximate=node.get("approximate", "none"))


@onnx_translation("LeakyRelu")
def _(node, x):
    return ops.leaky_relu(x, slope=node.get("alpha", 0.01))


@onnx_translation("Elu")
def _(node, x):
    return ops.elu(x, alpha=node.get("alpha", 1.0))


@onnx_translation("Selu")
def _(node, x):
    return ops.selu(x)


@onnx_translation("HardSigmoid")
def _(node, x):
    line = ops.shift(ops.scale(x, factor=node.get("alpha", 0.2)), amount=node.get("beta", 0.5))
    return ops.clamp(line, low=0, high=1)


@onnx_translation("Clip")
def _(node, x, low=None, high=None):
    bounds = []
    for index, key in ((1, "min"), (2, "max")):
        given = node.get(key)
        value = node.constant(index) if given is None else given
        bounds.append(None if value is None else float(value))
    return ops.clamp(x, low=bounds[0], high=bounds[1]) if bounds != [None, None] else x


@onnx_translation("Where")
def _(node, condition, x, y):
    return ops.where(condition, x, y)


@onnx_translation("Cast", "CastLike")
def _(node, x, like=None):
    return as_type(x, element_type(node.get("to")) if like is None else like.dtype)


@onnx_translation("Dropout")
def _(node, x, *ratio):
    """As in inference, which is what an exported model is for."""
    return x


# -- shapes ------------------------------------------------------------------------------------------------------------


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


# -- reading places ----------------------------------------------------------------------------------------------------


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


# -- reductions --------------------------------------------------------------------------------------------------------


def _reduction(function: Callable) -> Callable:
    def translate(node: Node, x: Symbol, axes: Any = None) -> Symbol:
        chosen = node.axes()
        if not chosen:
            if node.get("noop_with_empty_axes", 0):
                return x
            chosen = None
        return function(x, axis=chosen, keepdims=bool(node.get("keepdims", 1)))

    return translate


_REDUCTIONS: dict[str, Callable] = {
    "ReduceSum": ops.sum, "ReduceMean": ops.mean, "ReduceMax": ops.max, "ReduceMin": ops.min, "ReduceProd": ops.prod,
    "ReduceL2": lambda x, **where: ops.sqrt(ops.sum(ops.square(x), **where)),
    "ReduceL1": lambda x, **where: ops.sum(ops.abs(x), **where), "ReduceLogSumExp": ops.logsumexp,
    "ReduceSumSquare": lambda x, **where: ops.sum(ops.square(x), **where),
}  # fmt: skip
for _name, _function in _REDUCTIONS.items():
    onnx_translation(_name)(_reduction(_function))


@onnx_translation("ArgMax")
def _(node, x):
    return ops.argmax(x, axis=node.get("axis", 0), keepdims=bool(node.get("keepdims", 1)))


@onnx_translation("ArgMin")
def _(node, x):
    return ops.argmin(x, axis=node.get("axis", 0), keepdims=bool(node.get("keepdims", 1)))


@onnx_translation("TopK")
def _(node, x, k):
    return ops.topk(
        x, k=int(node.known(1, "k").reshape(-1)[0]), axis=node.get("axis", -1), largest=bool(node.get("largest", 1))
    )


@onnx_translation("CumSum")
def _(node, x, axis):
    if node.get("exclusive", 0):
        raise NotImplementedError("CumSum that leaves out each element itself")
    where = int(node.known(1, "an axis").reshape(-1)[0])
    return ops.cumsum(x, axis=where, reverse=bool(node.get("reverse", 0)))


# -- products, convolutions, pooling -----------------------------------------------------------------------------------


@onnx_translation("MatMul")
def _(node, x, y):
    left = reshaped(x, (1, *x.shape)) if len(x.shape) == 1 else x
    right = reshaped(y, (*y.shape, 1)) if len(y.shape) == 1 else y
    out = ops.matmul(left, right)
    if len(x.shape) == 1:
        out = ops.squeeze(out, axis=-2)
    return ops.squeeze(out, axis=-1) if len(y.shape) == 1 else out


@onnx_translation("Gemm")
def _(node, x, y, bias=None):
    x = ops.transpose(x) if node.get("transA", 0) else x
    out = ops.linear(x, y) if node.get("transB", 0) else ops.matmul(x, y)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    out = out if alpha == 1 else ops.scale(out, factor=alpha)
    return out if bias is None else ops.add(out, bias if beta == 1 else ops.scale(bias, factor=beta))


@onnx_translation("Einsum")
def _(node, *inputs):
    return ops.einsum(*inputs, subscripts=node.get("equation").replace(" ", ""))


def _sides(node: Node, x: Symbol, kernel: tuple[int, ...], value: float = 0.0) -> tuple[Symbol, tuple[int, ...]]:
    """The tensor padded where both sides differ, and the padding of both sides that is left."""
    count = len(kernel)
    strides, spread = node.get("strides", [1] * count), node.get("dilations", [1] * count)
    pads = list(node.get("pads", [0] * 2 * count))
    automatic = node.get("auto_pad", "NOTSET")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        before, after = [], []
        for size, window, step, wide in zip(x.shape[2:], kernel, strides, spread):
            total = max((-(-size // step) - 1) * step + (window - 1) * wide + 1 - size, 0)
            small, large = total // 2, total - total // 2
            before.append(small if automatic == "SAME_UPPER" else large)
            after.append(large if automatic == "SAME_UPPER" else small)
        pads = before + after
    before, after = pads[:count], pads[count:]
    if before != after:
        x = ops.pad(x, before=(0, 0, *before), after=(0, 0, *after), value=value)
        return x, (0,) * count
    return x, tuple(before)


def _with_bias(out: Symbol, bias: Symbol | None) -> Symbol:
    if bias is None:
        return out
    return ops.add(out, ops.reshape(bias, shape=(bias.shape[0], *(1,) * (len(out.shape) - 2))))


@onnx_translation("Conv")
def _(node, x, weight, bias=None):
    count = len(weight.shape) - 2
    x, padding = _sides(node, x, weight.shape[2:])
    out = ops.convolution(
        x, weight, stride=tuple(node.get("strides", [1] * count)), padding=padding,
        dilation=tuple(node.get("dilations", [1] * count)), groups=node.get("group", 1),
    )  # fmt: skip
    return _with_bias(out, bias)


@onnx_translation("ConvTranspose")
def _(node, x, weight, bias=None):
    count = len(weight.shape) - 2
    pads = node.get("pads", [0] * 2 * count)
    automatic = node.get("auto_pad", "NOTSET") != "NOTSET" or node.get("output_shape") is not None
    if automatic or pads[:count] != pads[count:]:
        raise NotImplementedError("ConvTranspose with output_shape, auto_pad, or sides padded differently")
    out = ops.conv_transpose(
        x, weight, stride=tuple(node.get("strides", [1] * count)), padding=tuple(pads[:count]),
        output_padding=tuple(node.get("output_padding", [0] * count)),
        dilation=tuple(node.get("dilations", [1] * count)), groups=node.get("group", 1),
    )  # fmt: skip
    return _with_bias(out, bias)


def _one(sizes: Any) -> Any:
    sizes = tuple(sizes)
    return sizes[0] if len(set(sizes)) == 1 else sizes


@onnx_translation("MaxPool")
def _(node, x):
    kernel = tuple(node.get("kernel_shape"))
    if node.get("ceil_mode", 0) or any(size != 1 for size in node.get("dilations", [1])) or node.outputs > 1:
        raise NotImplementedError("MaxPool with ceil_mode, dilations or places")
    x, padding = _sides(node, x, kernel, -math.inf)
    pool = (ops.max_pool1d, ops.max_pool2d, ops.max_pool3d)[len(kernel) - 1]
    return pool(x, kernel_size=_one(kernel), stride=_one(node.get("strides", [1] * len(kernel))), padding=_one(padding))


@onnx_translation("AveragePool")
def _(node, x):
    kernel = tuple(node.get("kernel_shape"))
    counted = bool(node.get("count_include_pad", 0))
    before = x
    x, padding = _sides(node, x, kernel)
    if node.get("ceil_mode", 0) or (before is not x and not counted):
        raise NotImplementedError("AveragePool with ceil_mode, or with sides padded differently and not counted")
    pool = (ops.avg_pool1d, ops.avg_pool2d, ops.avg_pool3d)[len(kernel) - 1]
    return pool(x, kernel_size=_one(kernel), stride=_one(node.get("strides", [1] * len(kernel))),
                padding=_one(padding), count_include_pad=counted)  # fmt: skip


@onnx_translation("GlobalAveragePool")
def _(node, x):
    return ops.mean(x, axis=tuple(range(2, len(x.shape))), keepdims=True)


@onnx_translation("GlobalMaxPool")
def _(node, x):
    return ops.max(x, axis=tuple(range(2, len(x.shape))), keepdims=True)


@onnx_translation("Resize")
def _(node, x, *given):
    sizes = node.constant(3)
    if sizes is None:
        scales = node.known(2, "scales")
        sizes = [int(size * scale) for size, scale in zip(x.shape, scales)]
    mode, where = node.get("mode", "nearest"), node.get("coordinate_transformation_mode", "half_pixel")
    rank = len(x.shape) - 2
    if mode == "linear" and where in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        kind = ("linear", "bilinear", "trilinear")[rank - 1]
    elif mode == "nearest" and where == "asymmetric" and node.get("nearest_mode", "round_prefer_floor") == "floor":
        kind, where = "nearest", ""
    else:
        raise NotImplementedError(f"Resize with mode {mode}, {where}, {node.get('nearest_mode', '')}")
    return ops.interpolate(
        x, size=tuple(int(size) for size in sizes[2:]), mode=kind, align_corners=where == "align_corners"
    )


# -- normalizations ----------------------------------------------------------------------------------------------------


@onnx_translation("Softmax")
def _(node, x):
    return _along(node, x, ops.softmax)


@onnx_translation("LogSoftmax")
def _(node, x):
    return _along(node, x, ops.log_softmax)


def _along(node: Node, x: Symbol, function: Callable) -> Symbol:
    """Before opset 13 over all dimensions from the axis on, since then over it alone."""
    if node.opset >= 13:
        return function(x, axis=node.get("axis", -1))
    axis = node.get("axis", 1) % len(x.shape)
    flat = reshaped(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return reshaped(function(flat, axis=-1), x.shape)


def _filled(value: float, size: int, dtype: str) -> Symbol:
    return ops.full(shape=(size,), value=value, dtype=dtype)


@onnx_translation("LayerNormalization")
def _(node, x, weight, bias=None):
    axis = node.get("axis", -1) % len(x.shape)
    size = math.prod(x.shape[axis:])
    flat = reshaped(x, (*x.shape[:axis], size))
    bias = _filled(0.0, size, weight.dtype) if bias is None else reshaped(bias, (size,))
    return reshaped(ops.layer_norm(flat, reshaped(weight, (size,)), bias, eps=node.get("epsilon", 1e-5)), x.shape)


@onnx_translation("RMSNormalization", "SimplifiedLayerNormalization")
def _(node, x, weight):
    axis = node.get("axis", -1) % len(x.shape)
    size = math.prod(x.shape[axis:])
    flat = reshaped(x, (*x.shape[:axis], size))
    return reshaped(ops.rms_norm(flat, reshaped(weight, (size,)), eps=node.get("epsilon", 1e-5)), x.shape)


@onnx_translation("BatchNormalization")
def _(node, x, weight, bias, mean, variance):
    if node.get("training_mode", 0):
        raise NotImplementedError("BatchNormalization in training mode; export the model in evaluation mode")
    return ops.batch_norm_apply(x, mean, variance, weight, bias, eps=node.get("epsilon", 1e-5), training=False)


@onnx_translation("InstanceNormalization")
def _(node, x, weight, bias):
    return ops.instance_norm(x, weight, bias, eps=node.get("epsilon", 1e-5))


@onnx_translation("GroupNormalization")
def _(node, x, weight, bias):
    if weight.shape[0] != x.shape[1]:  # before opset 21 one number per group
        weight, bias = (ops.repeat_interleave(item, x.shape[1] // item.shape[0], 0) for item in (weight, bias))
    return ops.group_norm(x, weight, bias, groups=node.get("num_groups"), eps=node.get("epsilon", 1e-5))


@onnx_translation("Attention")
def _(node, q, k, v, mask=None, *past):
    """Opset 23, of (batch, heads, length, width) tensors."""
    if past or node.outputs > 1 or node.get("softcap", 0.0) or len(q.shape) != 4:
        raise NotImplementedError("Attention with past keys, softcap, or heads in one dimension")
    options = {"causal": bool(node.get("is_causal", 0)), "scale": node.get("scale")}
    if mask is None:
        return ops.attention(q, k, v, **options)[0]
    if mask.dtype != "bool":
        raise NotImplementedError("Attention with numbers added to the scores")
    return ops.masked_attention(q, k, v, reshaped(mask, (*(1,) * (4 - len(mask.shape)), *mask.shape)), **options)[0]
