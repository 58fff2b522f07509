"""Softmax and layer, RMS, group and instance norm: whole along what they normalize, split along everything else."""

from __future__ import annotations

from typing import Any

from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.elementwise import floating
from sbp.ops.precision import one_type, widen


def _axis(shape: tuple[int, ...], axis: int) -> int:
    if not -len(shape) <= axis < len(shape):
        raise RuleError(f"axis {axis} is not a dimension of shape {list(shape)}")
    return axis % len(shape)


def _along(x: tuple[int, ...], *_: Any, axis: int) -> str:
    """The pattern of a tensor that may be split along every dimension but `axis`."""
    whole = _axis(x, axis)
    return " ".join(f"d{number}" + "^" * (number == whole) for number in range(len(x)))


def _along_rule(x: tuple[int, ...], *, axis: int) -> str:
    pattern = _along(x, axis=axis)
    return f"{pattern} -> {pattern}"


def _along_backward_rule(grad: tuple[int, ...], out: tuple[int, ...], *, axis: int) -> str:
    pattern = _along(grad, axis=axis)
    return f"{pattern}, {pattern} -> {pattern}"


@operator(_along_rule)
def softmax(xp, x, *, axis=-1):
    """Exponentials divided by their sum along `axis`."""
    if not x.size:
        return xp.zeros_like(x)
    wide = widen(x)
    weights = xp.exp(wide - wide.max(axis=axis, keepdims=True))
    return (weights / weights.sum(axis=axis, keepdims=True)).astype(x.dtype, copy=False)


@softmax.gradient
def _(grad, x, *, axis, out):
    return softmax_backward(grad, out, axis=axis)


@operator(_along_backward_rule, linear="grad")
def softmax_backward(xp, grad, out, *, axis=-1):
    """Gradient of `softmax` from its output: out * (grad - sum(grad * out))."""
    wide, weights = widen(grad), widen(out)
    return (weights * (wide - (wide * weights).sum(axis=axis, keepdims=True))).astype(grad.dtype, copy=False)


@operator(_along_rule)
def log_softmax(xp, x, *, axis=-1):
    """Logarithm of `softmax`, without computing the exponentials' quotient."""
    if not x.size:
        return xp.zeros_like(x)
    wide = widen(x)
    wide = wide - wide.max(axis=axis, keepdims=True)
    return (wide - xp.log(xp.exp(wide).sum(axis=axis, keepdims=True))).astype(x.dtype, copy=False)


@log_softmax.gradient
def _(grad, x, *, axis, out):
    return log_softmax_backward(grad, out, axis=axis)


@operator(_along_backward_rule, linear="grad")
def log_softmax_backward(xp, grad, out, *, axis=-1):
    """Gradient of `log_softmax` from its output: grad - exp(out) * sum(grad)."""
    wide = widen(grad)
    return (wide - xp.exp(widen(out)) * wide.sum(axis=axis, keepdims=True)).astype(grad.dtype, copy=False)


def _moments(xp: Any, x: Any, axes: tuple[int, ...], eps: float) -> tuple[Any, Any]:
    """(x - mean, 1 / standard deviation) over `axes`, in two passes."""
    centered = x - x.mean(axis=axes, keepdims=True)
    return centered, 1.0 / xp.sqrt((centered * centered).mean(axis=axes, keepdims=True) + eps)


def _batch_axes(x: Any) -> tuple[int, ...]:
    return tuple(range(x.ndim - 1))


def _affine_type(x: TensorType, weight: TensorType, bias: TensorType, **_: Any) -> str:
    """The type of x; weight and bias may have a wider one, both the same."""
    floating(x, weight)
    one_type(weight, bias)
    return x.dtype


@operator("*b h^, h^, h^ -> *b h^", linear="weight bias", monotone="bias", dtype=_affine_type)
def layer_norm(xp, x, weight, bias, *, eps=1e-5):
    """Standardize over the last dimension, then scale and shift: x (*b, h), weight (h,), bias (h,)."""
    centered, inverse = _moments(xp, widen(x), (-1,), eps)
    return (centered * inverse * weight + bias).astype(x.dtype, copy=False)


layer_norm.flops = lambda b, h: 8 * b * h


@layer_norm.gradient
def _(grad, x, weight, bias, *, eps):
    return layer_norm_backward(grad, x, weight, eps=eps)


def _weighted_types(grad: Any, x: Any, weight: Any, **_: Any) -> tuple[str, str, str]:
    return x.dtype, weight.dtype, weight.dtype


@operator(
    "*b+ h^, *b+ h^, h^ -> *b h^, h^, h^",
    linear="grad | weight -> dx",
    outputs=("dx", "dweight", "dbias"),
    dtype=_weighted_types,
)
def layer_norm_backward(xp, grad, x, weight, *, eps=1e-5):
    """Gradients of `layer_norm` for x (*b, h), weight and bias (h,); mean and deviation are computed again."""
    wide = widen(grad)
    centered, inverse = _moments(xp, widen(x), (-1,), eps)
    normal = centered * inverse
    scaled = wide * weight
    dx = inverse * (
        scaled - scaled.mean(axis=-1, keepdims=True) - normal * (scaled * normal).mean(axis=-1, keepdims=True)
    )
    batch = _batch_axes(x)
    return (
        dx.astype(x.dtype, copy=False),
        (wide * normal).sum(axis=batch).astype(weight.dtype, copy=False),
        wide.sum(axis=batch).astype(weight.dtype, copy=False),
    )


layer_norm_backward.flops = lambda b, h: 16 * b * h


def _root_mean_square(xp: Any, x: Any, eps: float) -> Any:
    return 1.0 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


@operator("*b h^, h^ -> *b h^", linear="weight")
def rms_norm(xp, x, weight, *, eps=1e-6):
    """Divide by the root mean square of the last dimension, then scale: x (*b, h), weight (h,)."""
    wide = widen(x)
    return (wide * _root_mean_square(xp, wide, eps) * weight).astype(x.dtype, copy=False)


rms_norm.flops = lambda b, h: 5 * b * h


@rms_norm.gradient
def _(grad, x, weight, *, eps):
    return rms_norm_backward(grad, x, weight, eps=eps)


@operator(
    "*b+ h^, *b+ h^, h^ -> *b h^, h^",
    linear="grad | weight -> dx",
    outputs=("dx", "dweight"),
    dtype=lambda grad, x, weight, **_: (x.dtype, weight.dtype),
)
def rms_norm_backward(xp, grad, x, weight, *, eps=1e-6):
    """Gradients of `rms_norm` for x (*b, h) and weight (h,)."""
    grad_wide, wide = widen(grad), widen(x)
    inverse = _root_mean_square(xp, wide, eps)
    normal = wide * inverse
    scaled = grad_wide * weight
    dx = inverse * (scaled - normal * (scaled * normal).mean(axis=-1, keepdims=True))
    return (
        dx.astype(x.dtype, copy=False),
        (grad_wide * normal).sum(axis=_batch_axes(x)).astype(weight.dtype, copy=False),
    )


rms_norm_backward.flops = lambda b, h: 12 * b * h


def _group_sizes(x: tuple[int, ...], groups: int) -> tuple[str, dict[str, int]]:
    """The pattern of (n, channels, *spatial) where whole groups of channels may be split."""
    if len(x) < 2 or groups < 1 or x[1] % groups:
        raise RuleError(f"groups={groups} does not divide the channels (dimension 1) of shape {list(x)}")
    spatial = "".join(f" s{number}^" for number in range(len(x) - 2))
    return f"n (g c^){spatial}", {"g": groups}


def _group_rule(x: tuple[int, ...], *_: Any, groups: int, eps: float) -> tuple[str, dict[str, int]]:
    pattern, sizes = _group_sizes(x, groups)
    return f"{pattern}, (g c^), (g c^) -> {pattern}", sizes


def _group_backward_rule(grad: tuple[int, ...], *_: Any, groups: int, eps: float) -> tuple[str, dict[str, int]]:
    pattern, sizes = _group_sizes(grad, groups)
    summed = pattern.replace("n ", "n+ ", 1)
    return f"{summed}, {summed}, (g c^) -> {pattern}, (g c^), (g c^)", sizes


def _local_groups(attributes: dict[str, Any], inputs: Any, outputs: Any) -> dict[str, Any]:
    x = inputs[0]
    return {**attributes, "groups": attributes["groups"] * x.shape[1] // x.global_shape[1] if x.shape[1] else 0}


def _group_moments(xp: Any, x: Any, groups: int, eps: float) -> tuple[Any, Any]:
    """(x - mean, 1 / standard deviation) as (n, groups, elements of a group), (n, groups, 1)."""
    return _moments(xp, widen(x).reshape(x.shape[0], groups, -1 if x.size else 1), (-1,), eps)


def _per_channel(parameter: Any, x: Any) -> Any:
    return parameter.reshape(1, x.shape[1], *(1,) * (x.ndim - 2))


@operator(_group_rule, linear="weight bias", monotone="bias", dtype=_affine_type)
def group_norm(xp, x, weight, bias, *, groups, eps=1e-5):
    """Standardize each group of channels of each sample: x (n, c, *spatial), weight and bias (c,)."""
    if not x.size:
        return xp.zeros_like(x)
    centered, inverse = _group_moments(xp, x, groups, eps)
    normal = (centered * inverse).reshape(x.shape)
    return (normal * _per_channel(weight, x) + _per_channel(bias, x)).astype(x.dtype, copy=False)


group_norm.localize(_local_groups)


@group_norm.gradient
def _(grad, x, weight, bias, *, groups, eps):
    return group_norm_backward(grad, x, weight, groups=groups, eps=eps)


@operator(
    _group_backward_rule,
    linear="grad | weight -> dx",
    outputs=("dx", "dweight", "dbias"),
    dtype=_weighted_types,
)
def group_norm_backward(xp, grad, x, weight, *, groups, eps=1e-5):
    """Gradients of `group_norm` for x (n, c, *spatial), weight and bias (c,)."""
    others = (0, *range(2, x.ndim))
    if not x.size:
        return xp.zeros_like(x), xp.zeros_like(weight), xp.zeros_like(weight)
    wide = widen(grad)
    centered, inverse = _group_moments(xp, x, groups, eps)
    normal = centered * inverse
    scaled = (wide * _per_channel(weight, x)).reshape(normal.shape)
    dx = inverse * (
        scaled - scaled.mean(axis=-1, keepdims=True) - normal * (scaled * normal).mean(axis=-1, keepdims=True)
    )
    return (
        dx.reshape(x.shape).astype(x.dtype, copy=False),
        (wide * normal.reshape(x.shape)).sum(axis=others).astype(weight.dtype, copy=False),
        wide.sum(axis=others).astype(weight.dtype, copy=False),
    )


group_norm_backward.localize(_local_groups)


def instance_norm(x: Any, weight: Any, bias: Any, *, eps: float = 1e-5) -> Any:
    """`group_norm` with one channel per group: x (n, c, *spatial), weight and bias (c,)."""
    return group_norm(x, weight, bias, groups=x.shape[1], eps=eps)


def _elementwise_flops(per_element: int) -> Any:
    def flops(**sizes: Any) -> float:
        total = float(per_element)
        for name, size in sizes.items():
            if name.startswith("d") and name[1:].isdigit():
                total *= size
        return total

    return flops


softmax.flops = _elementwise_flops(5)
log_softmax.flops = _elementwise_flops(5)
softmax_backward.flops = _elementwise_flops(4)
log_softmax_backward.flops = _elementwise_flops(4)
group_norm.flops = lambda n, g, c, s0, s1, s2: 8 * n * g * c * s0 * s1 * s2
group_norm_backward.flops = lambda n, g, c, s0, s1, s2: 16 * n * g * c * s0 * s1 * s2

for _op in (softmax, log_softmax):
    _op.case("f32[4,5]")
    _op.case("f32[3,5,2]", axis=1)
    _op.case("f32[4,1]", axis=0)
for _op in (softmax_backward, log_softmax_backward):
    _op.case("f32[4,5]", "f32[4,5]")
    _op.case("f32[3,5,2]", "f32[3,5,2]", axis=1)
    _op.case("f32[4,1]", "f32[4,1]", axis=0)
layer_norm.case("f32[4,3,6]", "f32[6]", "f32[6]")
layer_norm.case("f32[5,2]", "f32[2]", "f32[2]")
layer_norm.case("f32[3]", "f32[3]", "f32[3]")
layer_norm_backward.case("f32[4,3,6]", "f32[4,3,6]", "f32[6]")
layer_norm_backward.case("f32[5,2]", "f32[5,2]", "f32[2]")
layer_norm_backward.case("f32[1,3]", "f32[1,3]", "f32[3]")
rms_norm.case("f32[4,3,6]", "f32[6]")
rms_norm.case("f32[5,2]", "f32[2]")
rms_norm.case("f32[1,3]", "f32[3]")
rms_norm_backward.case("f32[4,3,6]", "f32[4,3,6]", "f32[6]")
rms_norm_backward.case("f32[5,2]", "f32[5,2]", "f32[2]")
rms_norm_backward.case("f32[1,3]", "f32[1,3]", "f32[3]")
group_norm.case("f32[2,4,3]", "f32[4]", "f32[4]", groups=2)
group_norm.case("f32[3,3,2,2]", "f32[3]", "f32[3]", groups=3)
group_norm.case("f32[1,4]", "f32[4]", "f32[4]", groups=1)
group_norm_backward.case("f32[2,4,3]", "f32[2,4,3]", "f32[4]", groups=2)
group_norm_backward.case("f32[3,3,2]", "f32[3,3,2]", "f32[3]", groups=3)
group_norm_backward.case("f32[5,4]", "f32[5,4]", "f32[4]", groups=1)
