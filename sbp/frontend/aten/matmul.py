"""Matrix products."""

from __future__ import annotations

from typing import Any

from sbp.frontend.translation import Context, as_type, reshaped, translation
from sbp.ops import library as ops


@translation("aten.linear")
def linear(context: Context, x: Any, weight: Any, bias: Any = None) -> Any:
    """x @ weight^T + bias, weight (out, in)."""
    x, weight = as_type(x, context.dtype), as_type(weight, context.dtype)
    bias = None if bias is None else as_type(bias, context.dtype)
    if len(x.shape) == 1:
        out = reshaped(ops.linear(reshaped(x, (1, *x.shape)), weight), weight.shape[:1])
    else:
        out = ops.linear(x, weight)
    return out if bias is None else ops.add(out, bias)


@translation("aten.matmul", "aten.mm", "aten.bmm", "aten.mv", "aten.dot")
def product(context: Context, x: Any, y: Any) -> Any:
    """Matrix product, with vectors and broadcasting as in PyTorch."""
    x, y = as_type(x, context.dtype), as_type(y, context.dtype)
    left = reshaped(x, (1, *x.shape)) if len(x.shape) == 1 else x
    right = reshaped(y, (*y.shape, 1)) if len(y.shape) == 1 else y
    return reshaped(ops.matmul(left, right), context.shape)


@translation("aten.addmm", "aten.addmv", "aten.addbmm", "aten.baddbmm")
def _(context, bias, x, y, *, beta=1, alpha=1):
    out = ops.matmul(x, y) if len(y.shape) > 1 else product(context, x, y)
    out = out if alpha == 1 else ops.scale(out, factor=alpha)
    return ops.add(out, bias if beta == 1 else ops.scale(bias, factor=beta))


@translation("aten.outer")
def _(context, x, y):
    return ops.outer(x, y)


@translation("aten.einsum")
def _(context, subscripts, operands, *, path=None):
    return ops.einsum(*operands, subscripts=subscripts.replace(" ", ""))


@translation("aten._grouped_mm", "transformers.grouped_mm_fallback")
def _(context, x, weight, ends, bias=None, out_dtype=None):
    """Rows sorted by group, a weight per group, and where each group ends."""
    if bias is not None or len(x.shape) != 2 or len(weight.shape) != 3:
        raise NotImplementedError("grouped_mm with a bias, or of other dimensions than (rows, in) and (group, in, out)")
    return ops.grouped_matmul(x, weight, ends)
