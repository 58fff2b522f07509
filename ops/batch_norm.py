"""Batch norm in steps, so that a split batch needs two small sums over the ranks and nothing else.

Training computes the channels' mean (P(sum) under a split batch), then their variance around it, then normalizes
elementwise; backward sums twice what PyTorch's SyncBatchNorm sums. Statistics are always those of the whole batch.
"""

from __future__ import annotations

import math
from typing import Any

from sbp.operator import operator
from sbp.ops.broadcasting import of_type
from sbp.ops.precision import wide_dtype, widen


def _pattern(x: tuple[int, ...], mark: str = "") -> str:
    """(n, c, *spatial) with a mark on everything but the channels."""
    return f"n{mark} c" + "".join(f" s{number}{mark}" for number in range(len(x) - 2))


def _per_channel(parameter: Any, x: Any) -> Any:
    return parameter.reshape(1, -1 if parameter.size else 0, *(1,) * (x.ndim - 2))


def _others(x: Any) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _count(shape: tuple[int, ...]) -> int:
    """Elements per channel."""
    return math.prod(shape) // shape[1] if shape[1] else 0


def _global_count(attributes: dict[str, Any], inputs: Any, outputs: Any) -> dict[str, Any]:
    return {**attributes, "count": attributes["count"] or _count(inputs[0].global_shape)}


@operator(lambda x, **_: f"{_pattern(x, '+')} -> c", linear="all", dtype=lambda x, **_: wide_dtype(x.dtype))
def channel_mean(xp, x, *, count=None):
    """Sum over everything but the channels / `count` (default how many it sums): x (n, c, *spatial) -> (c,)."""
    return widen(x).sum(axis=_others(x)) / (count or _count(x.shape) or 1)


channel_mean.localize(_global_count)
channel_mean.flops = lambda n, c, s0, s1, s2: n * c * s0 * s1 * s2


@operator(lambda x, mean, **_: f"{_pattern(x, '+')}, c -> c", dtype=lambda x, mean, **_: wide_dtype(x.dtype))
def channel_variance(xp, x, mean, *, count=None):
    """Mean of (x - mean)^2 over everything but the channels: x (n, c, *spatial), mean (c,) -> (c,)."""
    centered = widen(x) - _per_channel(mean, x)
    return (centered * centered).sum(axis=_others(x)) / (count or _count(x.shape) or 1)


channel_variance.localize(_global_count)
channel_variance.flops = lambda n, c, s0, s1, s2: 3 * n * c * s0 * s1 * s2


def _inverse(xp: Any, variance: Any, eps: float) -> Any:
    return 1.0 / xp.sqrt(widen(variance) + eps)


@operator(
    lambda x, *_, **__: f"{_pattern(x)}, c, c, c, c -> {_pattern(x)}",
    linear="weight bias | x mean bias",
    monotone="bias",
)
def batch_norm_apply(xp, x, mean, variance, weight, bias, *, eps=1e-5, training=True):
    """(x - mean) / sqrt(variance + eps) * weight + bias per channel: x (n, c, *spatial), the others (c,).

    With `training` the gradient takes mean and variance as the functions of x that they are then, so they pass none on;
    otherwise they are constants.
    """
    scale = _inverse(xp, variance, eps) * weight
    out = (widen(x) - _per_channel(mean, x)) * _per_channel(scale, x) + _per_channel(bias, x)
    return out.astype(x.dtype, copy=False)


batch_norm_apply.flops = lambda n, c, s0, s1, s2: 3 * n * c * s0 * s1 * s2


@batch_norm_apply.gradient
def _(grad, x, mean, variance, weight, bias, *, eps, training):
    dweight, dbias = batch_norm_sums(grad, x, mean, variance, eps=eps)
    if training:
        dx = batch_norm_backward(grad, x, mean, variance, weight, dweight, dbias, eps=eps)
    else:
        dx = batch_norm_frozen_backward(grad, variance, weight, eps=eps)
    return dx, None, None, of_type(dweight, weight), of_type(dbias, bias)


@operator(
    lambda grad, *_, **__: f"{_pattern(grad, '+')}, {_pattern(grad, '+')}, c, c -> c, c",
    linear="grad | x mean -> dweight",
    outputs=("dweight", "dbias"),
    dtype=lambda grad, *_, **__: wide_dtype(grad.dtype),
)
def batch_norm_sums(xp, grad, x, mean, variance, *, eps=1e-5):
    """Per channel the sums of grad * normalized x and of grad: the gradients of weight and bias."""
    wide = widen(grad)
    centered = widen(x) - _per_channel(mean, x)
    dweight = (wide * centered).sum(axis=_others(x)) * _inverse(xp, variance, eps)
    return dweight.astype(wide.dtype, copy=False), wide.sum(axis=_others(x))


batch_norm_sums.flops = lambda n, c, s0, s1, s2: 4 * n * c * s0 * s1 * s2


@operator(
    lambda grad, *_, **__: f"{_pattern(grad)}, {_pattern(grad)}, c, c, c, c, c -> {_pattern(grad)}",
    linear="grad dweight dbias | weight | grad x mean dbias",
)
def batch_norm_backward(xp, grad, x, mean, variance, weight, dweight, dbias, *, eps=1e-5, count=None):
    """Gradient for x of batch norm in training, from the two sums over the whole batch (of `count` per channel)."""
    count = count or _count(x.shape) or 1
    inverse = _inverse(xp, variance, eps)
    normal = (widen(x) - _per_channel(mean, x)) * _per_channel(inverse, x)
    around = widen(grad) - _per_channel(widen(dbias) / count, x) - normal * _per_channel(widen(dweight) / count, x)
    return (around * _per_channel(inverse * weight, x)).astype(grad.dtype, copy=False)


batch_norm_backward.localize(_global_count)
batch_norm_backward.flops = lambda n, c, s0, s1, s2: 6 * n * c * s0 * s1 * s2


@operator(lambda grad, *_, **__: f"{_pattern(grad)}, c, c -> {_pattern(grad)}", linear="grad | weight")
def batch_norm_frozen_backward(xp, grad, variance, weight, *, eps=1e-5):
    """Gradient for x of batch norm with constant statistics."""
    return (widen(grad) * _per_channel(_inverse(xp, variance, eps) * weight, grad)).astype(grad.dtype, copy=False)


def _both_increase(*_: Any, momentum: float = 0.1, factor: float = 1.0) -> str:
    return "each" if 0 <= momentum <= 1 and factor >= 0 else ""


@operator("..., ... -> ...", linear="all", monotone=_both_increase)
def moving_average(xp, average, new, *, momentum=0.1, factor=1.0):
    """(1 - momentum) * average + momentum * factor * new: how running statistics follow those of a batch."""
    return ((1 - momentum) * average + (momentum * factor) * new).astype(average.dtype, copy=False)


def batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *,
    training: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Batch norm over everything but the channels: x (n, c, *spatial), the others (c,).

    Returns
    -------
    tuple
        The output, and the next running mean and variance (the variance unbiased, as PyTorch keeps it); in evaluation
        these are the given ones. Registering them as updates of the buffers is the caller's part.
    """
    if not training:
        out = batch_norm_apply(x, running_mean, running_var, weight, bias, eps=eps, training=False)
        return out, running_mean, running_var
    mean = channel_mean(x)
    variance = channel_variance(x, mean)
    count = _count(tuple(x.shape))
    unbiased = count / (count - 1) if count > 1 else 1.0
    out = batch_norm_apply(x, mean, variance, weight, bias, eps=eps, training=True)
    return (
        out,
        moving_average(running_mean, mean, momentum=momentum),
        moving_average(running_var, variance, momentum=momentum, factor=unbiased),
    )


_POSITIVE = {"variance": (0.5, 2.0)}
for _x, _c in (("f32[4,5,2]", "f32[5]"), ("f32[3,4,1,2]", "f32[4]"), ("f32[1,6]", "f32[6]")):
    channel_variance.case(_x, _c)
    batch_norm_apply.case(_x, _c, _c, _c, _c, ranges=_POSITIVE)
    batch_norm_sums.case(_x, _x, _c, _c, ranges=_POSITIVE)
    batch_norm_frozen_backward.case(_x, _c, _c, ranges=_POSITIVE)
batch_norm_backward.case("f32[3,5]", "f32[3,5]", *("f32[5]",) * 5, ranges=_POSITIVE)
batch_norm_backward.case("f32[2,4,3]", "f32[2,4,3]", *("f32[4]",) * 5, ranges=_POSITIVE)
batch_norm_backward.case("f32[4,1,2]", "f32[4,1,2]", *("f32[1]",) * 5, ranges=_POSITIVE)
for _x in ("f32[4,5,2]", "f32[3,4,1,2]", "f32[5,6]"):
    channel_mean.case(_x)
moving_average.case("f32[4]", "f32[4]")
moving_average.case("f32[5]", "f32[5]", momentum=0.3, factor=1.25)
moving_average.case("f32[1]", "f32[1]", momentum=0.5)
