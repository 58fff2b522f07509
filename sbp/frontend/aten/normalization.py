"""Softmax and normalizations."""

from __future__ import annotations

import math
from typing import Any

from sbp.frontend.translation import Context, as_type, filled, reshaped, translation
from sbp.ops import library as ops


@translation("aten.softmax", "aten._softmax")
def _(context, x, dim, *arguments, **options):
    x = as_type(x, context.dtype)
    return ops.softmax(x, axis=dim)


@translation("aten.log_softmax", "aten._log_softmax")
def _(context, x, dim, *arguments, **options):
    return ops.log_softmax(as_type(x, context.dtype), axis=dim)


def _affine(context: Context, weight: Any, bias: Any, size: int, dtype: str) -> tuple[Any, Any]:
    """Weight and bias of one type; ones and zeros where there are none."""
    dtype = next((item.dtype for item in (weight, bias) if item is not None), dtype)
    weight = filled(context, 1, (size,), dtype) if weight is None else weight
    return weight, filled(context, 0, (size,), dtype) if bias is None else bias


@translation("aten.layer_norm")
def layer_norm(context: Context, x: Any, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5,
               *arguments: Any) -> Any:  # fmt: skip
    """Over the last dimensions, which are flattened to one where there are several."""
    size = math.prod(shape)
    flat = reshaped(x, (*x.shape[: len(x.shape) - len(shape)], size))
    weight, bias = (None if item is None else reshaped(item, (size,)) for item in (weight, bias))
    return reshaped(ops.layer_norm(flat, *_affine(context, weight, bias, size, x.dtype), eps=eps), x.shape)


@translation("aten.rms_norm")
def _(context, x, shape, weight=None, eps=None):
    size = math.prod(shape)
    flat = reshaped(x, (*x.shape[: len(x.shape) - len(shape)], size))
    weight = filled(context, 1, (size,), x.dtype) if weight is None else reshaped(weight, (size,))
    if eps is None:
        eps = {"f64": 2.0**-52, "f32": 2.0**-23, "bf16": 2.0**-7, "f16": 2.0**-10}[x.dtype]
    return reshaped(ops.rms_norm(flat, weight, eps=eps), x.shape)


@translation("aten.group_norm")
def _(context, x, groups, weight=None, bias=None, eps=1e-5, *arguments):
    return ops.group_norm(x, *_affine(context, weight, bias, x.shape[1], x.dtype), groups=groups, eps=eps)


@translation("aten.instance_norm")
def _(context, x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, *arguments):
    if not use_input_stats:
        affine = _affine(context, weight, bias, x.shape[1], x.dtype)
        return ops.batch_norm_apply(x, running_mean, running_var, *affine, eps=eps, training=False)
    return ops.instance_norm(x, *_affine(context, weight, bias, x.shape[1], x.dtype), eps=eps)


@translation("aten.batch_norm")
def _(context, x, weight, bias, running_mean, running_var, training, momentum, eps, *arguments):
    """Without changes to running statistics: those come as `_native_batch_norm_legit_functional`."""
    affine = _affine(context, weight, bias, x.shape[1], x.dtype)
    if training:
        mean = ops.channel_mean(x)
        return ops.batch_norm_apply(x, mean, ops.channel_variance(x, mean), *affine, eps=eps, training=True)
    return ops.batch_norm_apply(x, running_mean, running_var, *affine, eps=eps, training=False)


@translation("aten._native_batch_norm_legit_functional")
def _(context, x, weight, bias, running_mean, running_var, training, momentum, eps):
    affine = _affine(context, weight, bias, x.shape[1], x.dtype)
    out, mean, variance = ops.batch_norm(
        x, *affine, running_mean, running_var, training=training, momentum=momentum, eps=eps
    )
    return out, None, None, mean, variance


@translation("aten._native_batch_norm_legit_no_training")
def _(context, x, weight, bias, running_mean, running_var, momentum, eps):
    affine = _affine(context, weight, bias, x.shape[1], x.dtype)
    return ops.batch_norm_apply(x, running_mean, running_var, *affine, eps=eps, training=False), None, None


@translation("aten._native_batch_norm_legit.no_stats")
def _(context, x, weight, bias, training, momentum, eps):
    affine = _affine(context, weight, bias, x.shape[1], x.dtype)
    mean = ops.channel_mean(x)
    out = ops.batch_norm_apply(x, mean, ops.channel_variance(x, mean), *affine, eps=eps, training=True)
    return out, None, None


@translation("aten.normalize")
def _(context, x, p=2.0, dim=1, eps=1e-12):
    return ops.normalize(x, axis=dim, eps=eps)


@translation("aten.cosine_similarity")
def _(context, x, y, dim=1, eps=1e-8):
    return ops.cosine_similarity(x, y, axis=dim, eps=eps)
