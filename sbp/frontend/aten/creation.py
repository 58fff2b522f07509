"""Tensors out of nothing: ranges and constants."""

from __future__ import annotations

from typing import Any

from sbp.dtype import is_floating
from sbp.frontend.translation import Context, as_type, filled, translation
from sbp.ops import library as ops


@translation("aten.arange")
def arange(context: Context, *bounds: Any, dtype: Any = None, **options: Any) -> Any:
    """arange(end), (start, end) or (start, end, step)."""
    start, step = (bounds[0] if len(bounds) > 1 else 0), (bounds[2] if len(bounds) > 2 else 1)
    (size,) = context.shape
    with context.builder:
        return ops.arange(size=size, start=start, step=step, dtype=context.dtype)


@translation("aten.linspace")
def _(context, start, end, steps, **options):
    step = (end - start) / (steps - 1) if steps > 1 else 0
    with context.builder:
        places = ops.arange(size=steps, dtype="i64")
    out = ops.shift(ops.scale(as_type(places, "f64"), factor=step), amount=float(start))
    return as_type(out if is_floating(context.dtype) else ops.trunc(out), context.dtype)


for _name, _value in (("zeros", 0), ("ones", 1), ("empty", 0)):
    translation(f"aten.{_name}", f"aten.{_name}_like", f"aten.new_{_name}")(
        lambda context, *arguments, value=_value, **options: filled(context, value, context.shape)
    )


@translation("aten.empty_strided", "aten.new_empty_strided", "aten.empty_permuted")
def _(context, *arguments, **options):
    return filled(context, 0, context.shape)


@translation("aten.full")
def _(context, size, value, **options):
    return filled(context, value, context.shape)


@translation("aten.full_like", "aten.new_full")
def _(context, x, *arguments, **options):
    return filled(context, arguments[-1], context.shape)


@translation("aten.scalar_tensor")
def _(context, value, **options):
    return filled(context, value)


@translation("aten.eye")
def _(context, *sizes, **options):
    ones = filled(context, 1, context.shape)
    return ops.triu(ops.tril(ones))
