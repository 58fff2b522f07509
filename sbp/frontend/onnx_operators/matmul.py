"""ONNX's matrix products."""

from __future__ import annotations

from sbp.frontend.onnx_operators.node import onnx_translation
from sbp.frontend.translation import reshaped
from sbp.ops import library as ops


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
