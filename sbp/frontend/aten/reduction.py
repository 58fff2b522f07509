"""Sums, means, extremes; scans, sorting, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sbp.frontend.translation import Context, as_type, reshaped, translation
from sbp.ops import library as ops


def _axes(x: Any, dim: Any) -> Any:
    """An axis or several as the operators take them; PyTorch's empty list is all of them."""
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return None
    return tuple(at % max(len(x.shape), 1) for at in dim) if isinstance(dim, (list, tuple)) else dim


def _reduction(function: Callable) -> Callable:
    def translate(context: Context, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        x = as_type(x, context.dtype)
        return x if x.shape == () else function(x, axis=_axes(x, dim), keepdims=keepdim)

    return translate


for _names, _function in (
    (("sum",), ops.sum),
    (("mean",), ops.mean),
    (("prod",), ops.prod),
    (("amax",), ops.max),
    (("amin",), ops.min),
):
    translation(*(f"aten.{name}" for name in _names))(_reduction(_function))


def _truth(function: Callable) -> Callable:
    def translate(context: Context, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        return function(as_type(x, "bool"), axis=_axes(x, dim), keepdims=keepdim)

    return translate


translation("aten.any")(_truth(ops.any))
translation("aten.all")(_truth(ops.all))


@translation("aten.max.default")
def _(context, x):
    return ops.max(x)


@translation("aten.min.default")
def _(context, x):
    return ops.min(x)


def _with_places(largest: bool) -> Callable:
    def translate(context: Context, x: Any, dim: int, keepdim: bool = False) -> Any:
        values, places = ops.topk(x, k=1, axis=dim, largest=largest)
        return tuple(reshaped(item, kind.shape) for item, kind in zip((values, places), context.types))

    return translate


translation("aten.max.dim")(_with_places(True))
translation("aten.min.dim")(_with_places(False))


@translation("aten.argmax")
def _(context, x, dim=None, keepdim=False):
    return ops.argmax(x, axis=dim, keepdims=keepdim)


@translation("aten.argmin")
def _(context, x, dim=None, keepdim=False):
    return ops.argmin(x, axis=dim, keepdims=keepdim)


@translation("aten.var.correction", "aten.var.dim", "aten.var.default")
def variance(context: Context, x: Any, dim: Any = None, unbiased: Any = True, keepdim: bool = False,
             *, correction: Any = None) -> Any:  # fmt: skip
    """Variance; `correction` is 1 unless given."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    degrees = correction if correction is not None else int(unbiased)
    return ops.var(x, axis=_axes(x, dim), keepdims=keepdim, correction=degrees)


@translation("aten.std.correction", "aten.std.dim", "aten.std.default")
def _(context, x, dim=None, unbiased=True, keepdim=False, *, correction=None):
    return ops.sqrt(variance(context, x, dim, unbiased, keepdim, correction=correction))


@translation("aten.var_mean.correction")
def _(context, x, dim=None, *, correction=None, keepdim=False):
    degrees = 1 if correction is None else correction
    axes = _axes(x, dim)
    return ops.var(x, axis=axes, keepdims=keepdim, correction=degrees), ops.mean(x, axis=axes, keepdims=keepdim)


@translation("aten.logsumexp")
def _(context, x, dim, keepdim=False):
    return ops.logsumexp(x, axis=_axes(x, dim), keepdims=keepdim)


@translation("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def _(context, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    x = as_type(x, context.dtype)
    axes = _axes(x, dim)
    if ord == 2:
        return ops.sqrt(ops.sum(ops.square(x), axis=axes, keepdims=keepdim))
    return ops.p_norm(x, p=ord, axis=axes, keepdims=keepdim)


@translation("aten.norm.Scalar")
def _(context, x, p=2):
    return ops.p_norm(x, p=p)


@translation("aten.cumsum")
def _(context, x, dim, *, dtype=None):
    return ops.cumsum(as_type(x, context.dtype), axis=dim)


@translation("aten.cumprod")
def _(context, x, dim, *, dtype=None):
    return ops.cumprod(as_type(x, context.dtype), axis=dim)


@translation("aten.diff")
def _(context, x, n=1, dim=-1, prepend=None, append=None):
    pieces = [piece for piece in (prepend, x, append) if piece is not None]
    x = ops.concat(*pieces, axis=dim % len(x.shape)) if len(pieces) > 1 else x
    for _ in range(n):
        size = x.shape[dim]
        x = ops.sub(ops.narrow(x, dim, 1, size - 1), ops.narrow(x, dim, 0, size - 1))
    return x


@translation("aten.topk")
def _(context, x, k, dim=-1, largest=True, sorted=True):
    return ops.topk(x, k=k, axis=dim, largest=largest)


@translation("aten.sort")
def _(context, x, dim=-1, descending=False, *, stable=None):
    return ops.sort(x, axis=dim, descending=descending)


@translation("aten.argsort")
def _(context, x, dim=-1, descending=False, *, stable=None):
    return ops.argsort(x, axis=dim, descending=descending)
