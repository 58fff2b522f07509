"""ONNX's normalizations and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

from sbp.frontend.onnx_operators.node import Node, onnx_translation
from sbp.frontend.translation import reshaped
from sbp.ops import library as ops
from sbp.trace import Symbol


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
