"""ONNX's convolutions, pooling and resampling."""

from __future__ import annotations

import math
from typing import Any

from sbp.frontend.onnx_operators.node import Node, onnx_translation
from sbp.ops import library as ops
from sbp.trace import Symbol


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
