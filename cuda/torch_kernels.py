"""Kernels written for torch tensors: products, norms, softmax, lookups, convolution and pooling, and what is cheapest.

Every other operator runs its own kernel (see `sbp.cuda.torch_backend`). These are here because PyTorch has a faster
one, because the operator's own would leave half precision and come back, or because it uses what only NumPy has.
Signatures and results are those of `sbp.ops`; the tests compare all of them on the operators' example calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sbp.cuda import torch_attention, torch_experts, torch_losses, torch_random, torch_scans, torch_views
from sbp.cuda.torch_types import torch_dtype, widen


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(rank))
    return tuple(at % rank for at in ((axis,) if isinstance(axis, int) else axis))


def pulled_back(function: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a PyTorch function's inputs from that of its output."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad)


# -- products ----------------------------------------------------------------------------------------------------------


def matmul(xp, x, w):
    return torch.matmul(x, w)


def linear(xp, x, w):
    return functional.linear(x, w)


def linear_weight_gradient(xp, grad, x):
    return grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1]) if grad.numel() and x.numel() else (
        grad.new_zeros((grad.shape[-1], x.shape[-1]))
    )  # fmt: skip


# -- elementwise and views ---------------------------------------------------------------------------------------------


def cast(xp, x, *, dtype):
    return x.to(torch_dtype(dtype))


def scale(xp, x, *, factor):
    return x * (factor if x.is_floating_point() else int(factor))


def shift(xp, x, *, amount):
    return x + (amount if x.is_floating_point() else int(amount))


def gelu(xp, x, *, approximate="none"):
    return functional.gelu(x, approximate=approximate)


def gelu_backward(xp, grad, x, *, approximate="none"):
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def silu_backward(xp, grad, x):
    return torch.ops.aten.silu_backward(grad, x)


def tanh_backward(xp, grad, out):
    return torch.ops.aten.tanh_backward(grad, out)


def sigmoid_backward(xp, grad, out):
    return torch.ops.aten.sigmoid_backward(grad, out)


def relu_backward(xp, grad, out):
    return torch.ops.aten.threshold_backward(grad, out, 0)


def reshape(xp, x, *, shape):
    return x.reshape(tuple(shape))


def permute(xp, x, *, order):
    return x.permute(tuple(order))


def transpose(xp, x, *, first=-2, second=-1):
    return x.transpose(first, second)


def squeeze(xp, x, *, axis=None):
    axes = [at for at, size in enumerate(x.shape) if size == 1] if axis is None else _axes(axis, x.ndim)
    return x.reshape([size for at, size in enumerate(x.shape) if at not in axes])


def unsqueeze(xp, x, *, axis):
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    rank = x.ndim + len(axes)
    for at in sorted(at % rank for at in axes):
        x = x.unsqueeze(at)
    return x


def concat(xp, *xs, axis=0):
    return torch.cat(xs, dim=axis)


def split(xp, x, *, sizes, axis=0):
    return tuple(x.split(list(sizes), dim=axis))


def sum_(xp, x, *, axis=None, keepdims=False):
    axes = _axes(axis, x.ndim)
    return x.sum(dim=axes, keepdim=keepdims) if axes else x.clone()


def prod_backward(xp, grad, x, *, axis=None):
    axes = _axes(axis, x.ndim)
    zero = x == 0
    zeros, safe = zero.sum(dim=axes, keepdim=True), torch.where(zero, torch.ones_like(x), x)
    product = safe
    for at in axes:
        product = product.prod(dim=at, keepdim=True)
    others = torch.where(zeros == 0, product / safe, torch.where((zeros == 1) & zero, product, torch.zeros_like(x)))
    return grad * others


# -- softmax and losses ------------------------------------------------------------------------------------------------


def softmax(xp, x, *, axis=-1):
    return torch.softmax(x, dim=axis)


def softmax_backward(xp, grad, out, *, axis=-1):
    return torch.ops.aten._softmax_backward_data(grad, out, axis, out.dtype)


def log_softmax(xp, x, *, axis=-1):
    return torch.log_softmax(x, dim=axis)


def log_softmax_backward(xp, grad, out, *, axis=-1):
    return torch.ops.aten._log_softmax_backward_data(grad, out, axis, out.dtype)


# -- norms -------------------------------------------------------------------------------------------------------------


def _moments(x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    centered = x - x.mean(dim=axes, keepdim=True)
    return centered, torch.rsqrt((centered * centered).mean(dim=axes, keepdim=True) + eps)


def _standardized_gradient(scaled: Tensor, normal: Tensor, inverse: Tensor) -> Tensor:
    along = (scaled * normal).mean(dim=-1, keepdim=True)
    return inverse * (scaled - scaled.mean(dim=-1, keepdim=True) - normal * along)


def _batch(x: Tensor) -> tuple[int, ...]:
    return tuple(range(x.ndim - 1))


def _summed(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(dim=axes) if axes else x


def layer_norm(xp, x, weight, bias, *, eps=1e-5):
    if weight.dtype == x.dtype:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    centered, inverse = _moments(widen(x), (-1,), eps)
    return (centered * inverse * weight + bias).to(x.dtype)


def layer_norm_backward(xp, grad, x, weight, *, eps=1e-5):
    wide = widen(grad)
    centered, inverse = _moments(widen(x), (-1,), eps)
    normal = centered * inverse
    dx = _standardized_gradient(wide * weight, normal, inverse)
    axes = _batch(x)
    return dx.to(x.dtype), _summed(wide * normal, axes).to(weight.dtype), _summed(wide, axes).to(weight.dtype)


def rms_norm(xp, x, weight, *, eps=1e-6):
    wide = widen(x)
    return (wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight).to(x.dtype)


def rms_norm_backward(xp, grad, x, weight, *, eps=1e-6):
    grad_wide, wide = widen(grad), widen(x)
    inverse = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
    normal, scaled = wide * inverse, grad_wide * weight
    dx = inverse * (scaled - normal * (scaled * normal).mean(dim=-1, keepdim=True))
    return dx.to(x.dtype), _summed(grad_wide * normal, _batch(x)).to(weight.dtype)


def _per_channel(parameter: Tensor, x: Tensor) -> Tensor:
    return parameter.reshape(1, x.shape[1], *(1,) * (x.ndim - 2))


def _others(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.ndim))


def _count(shape: Any) -> int:
    return math.prod(shape) // shape[1] if shape[1] else 0


def _grouped(x: Tensor, groups: int) -> Tensor:
    return widen(x).reshape(x.shape[0], groups, -1 if x.numel() else 1)


def group_norm(xp, x, weight, bias, *, groups, eps=1e-5):
    if not x.numel():
        return torch.zeros_like(x)
    centered, inverse = _moments(_grouped(x, groups), (-1,), eps)
    normal = (centered * inverse).reshape(x.shape)
    return (normal * _per_channel(weight, x) + _per_channel(bias, x)).to(x.dtype)


def group_norm_backward(xp, grad, x, weight, *, groups, eps=1e-5):
    if not x.numel():
        return torch.zeros_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    wide = widen(grad)
    centered, inverse = _moments(_grouped(x, groups), (-1,), eps)
    normal = centered * inverse
    dx = _standardized_gradient((wide * _per_channel(weight, x)).reshape(normal.shape), normal, inverse)
    dweight = (wide * normal.reshape(x.shape)).sum(dim=_others(x))
    return dx.reshape(x.shape).to(x.dtype), dweight.to(weight.dtype), wide.sum(dim=_others(x)).to(weight.dtype)


def _inverse(variance: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(widen(variance) + eps)


def batch_norm_apply(xp, x, mean, variance, weight, bias, *, eps=1e-5, training=True):
    factor = _inverse(variance, eps) * weight
    return ((widen(x) - _per_channel(mean, x)) * _per_channel(factor, x) + _per_channel(bias, x)).to(x.dtype)


def batch_norm_sums(xp, grad, x, mean, variance, *, eps=1e-5):
    wide = widen(grad)
    centered = widen(x) - _per_channel(mean, x)
    return (wide * centered).sum(dim=_others(x)) * _inverse(variance, eps), wide.sum(dim=_others(x))


def batch_norm_backward(xp, grad, x, mean, variance, weight, dweight, dbias, *, eps=1e-5, count=None):
    count = count or _count(x.shape) or 1
    inverse = _inverse(variance, eps)
    normal = (widen(x) - _per_channel(mean, x)) * _per_channel(inverse, x)
    around = widen(grad) - _per_channel(widen(dbias) / count, x) - normal * _per_channel(widen(dweight) / count, x)
    return (around * _per_channel(inverse * weight, x)).to(grad.dtype)


def batch_norm_frozen_backward(xp, grad, variance, weight, *, eps=1e-5):
    return (widen(grad) * _per_channel(_inverse(variance, eps) * weight, grad)).to(grad.dtype)


def moving_average(xp, average, new, *, momentum=0.1, factor=1.0):
    return ((1 - momentum) * average + (momentum * factor) * new).to(average.dtype)


# -- lookups -----------------------------------------------------------------------------------------------------------


def _within(index: Tensor, offset: int, size: int) -> tuple[Tensor, Tensor]:
    place = index.long() - offset
    return place.clamp(0, max(size - 1, 0)), (place >= 0) & (place < size)


def embedding(xp, table, ids, *, offset=0):
    if table.shape[0] == 0:
        return table.new_zeros((*ids.shape, table.shape[1]))
    place, found = _within(ids, offset, table.shape[0])
    rows = functional.embedding(place, table)
    return torch.where(found[..., None], rows, torch.zeros((), dtype=table.dtype, device=table.device))


def embedding_backward(xp, grad, ids, *, rows, offset=0):
    width = grad.shape[-1]
    out = torch.zeros((rows, width), dtype=widen(grad).dtype, device=grad.device)
    if out.numel() and ids.numel():
        place, found = _within(ids.reshape(-1), offset, rows)
        out.index_add_(0, place, widen(grad).reshape(-1, width) * found[:, None])
    return out.to(grad.dtype)


def take_along_backward(xp, grad, index, *, size, axis=-1, offset=0):
    moved = grad.movedim(axis, -1)
    out = grad.new_zeros((*moved.shape[:-1], size))
    if size and grad.numel():
        place, found = _within(index.movedim(axis, -1), offset, size)
        out.scatter_add_(-1, place, moved * found)
    return out.movedim(-1, axis)


# -- convolution and pooling -------------------------------------------------------------------------------------------

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_MAX_POOLS: Mapping[int, Callable[..., Any]] = {
    1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d
}  # fmt: skip
_AVERAGE_POOLS: Mapping[int, Callable[..., Any]] = {
    1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d
}  # fmt: skip


def _spread(size: int, kernel: int, stride: int, padding: int | tuple[int, int], dilation: int) -> int:
    around = 2 * padding if isinstance(padding, int) else sum(padding)
    return (size + around - dilation * (kernel - 1) - 1) // stride + 1


def _padded(x: Tensor, padding: Any, value: float = 0.0) -> tuple[Tensor, Any]:
    """The tensor and the padding that is left to do: pairs (before, after), of which torch's windows know none, are
    laid around it, or cut off where they are negative."""
    if isinstance(padding, int) or all(isinstance(each, int) for each in padding):
        return x, padding
    sides = [n for each in reversed(padding) for n in ((each, each) if isinstance(each, int) else each)]
    return functional.pad(x, sides, value=value), 0


def _each(value: Any, count: int) -> tuple[int, ...]:
    return (value,) * count if isinstance(value, int) else tuple(value)


def convolution(xp, x, weight, *, stride=1, padding=0, dilation=1, groups=1):
    count = x.ndim - 2
    sizes = zip(x.shape[2:], weight.shape[2:], *(_each(value, count) for value in (stride, padding, dilation)))
    made = (x.shape[0], weight.shape[0], *(_spread(*size) for size in sizes))
    if not x.numel() or not weight.numel() or 0 in made:
        return x.new_zeros(made)
    x, padding = _padded(x, padding)
    groups = x.shape[1] // weight.shape[1]  # a rank may hold some of the groups
    return _CONVOLUTIONS[count](x, weight, None, stride, padding, dilation, groups)


def convolution_input_gradient(xp, grad, weight, *, shape, stride=1, padding=0, dilation=1, groups=1):
    made = (grad.shape[0], *shape[1:])
    if not grad.numel() or not weight.numel() or 0 in made:
        return grad.new_zeros(made)
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return pulled_back(lambda x: convolution(xp, x, weight, **options), grad, grad.new_zeros(made))[0]


def convolution_weight_gradient(xp, grad, x, *, shape, stride=1, padding=0, dilation=1, groups=1):
    if not grad.numel() or not x.numel() or not math.prod(shape):
        return grad.new_zeros(tuple(shape))
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    return pulled_back(lambda weight: convolution(xp, x, weight, **options), grad, grad.new_zeros(tuple(shape)))[0]


def _pooled(x: Tensor, count: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A pooling of (n, 1, *spatial) applied to (*b, *spatial)."""
    made = function(x.reshape(math.prod(x.shape[: x.ndim - count]), 1, *x.shape[x.ndim - count :]))
    return made.reshape(*x.shape[: x.ndim - count], *made.shape[2:])


def _pool(pools: Mapping[int, Callable[..., Any]], kernel_size: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    count = 2 if isinstance(kernel_size, int) else len(kernel_size)
    sizes = _each(kernel_size, count)
    return lambda x: _pooled(x, count, lambda cells: pools[count](cells, sizes, **options))


def _no_windows(x: Tensor, size: Any, kernel_size: Any, stride: Any, padding: Any) -> Tensor:
    count = len(size)
    steps = kernel_size if stride is None else stride
    sizes = zip(size, _each(kernel_size, count), _each(steps, count), _each(padding, count), (1,) * count)
    return x.new_zeros((*x.shape[: x.ndim - count], *(_spread(*each) for each in sizes)))


def _spatial(x: Tensor, kernel_size: Any) -> Any:
    return x.shape[-(2 if isinstance(kernel_size, int) else len(kernel_size)) :]


def max_pool2d(xp, x, *, kernel_size, stride=None, padding=0):
    none = _no_windows(x, _spatial(x, kernel_size), kernel_size, stride, padding)
    if not x.numel() or not none.numel():
        return none
    x, padding = _padded(x, padding, -math.inf)
    return _pool(_MAX_POOLS, kernel_size, stride=stride, padding=padding)(x)


def max_pool2d_backward(xp, grad, x, *, kernel_size, stride=None, padding=0, keep=None):
    kept: Any = (...,) if keep is None else (..., *(slice(start, start + size) for start, size in keep))
    if not x.numel() or not grad.numel():
        return torch.zeros_like(x)[kept]
    options = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
    return pulled_back(lambda x: max_pool2d(xp, x, **options), grad, x)[0][kept]


def avg_pool2d(xp, x, *, kernel_size, stride=None, padding=0, count_include_pad=True):
    none = _no_windows(x, _spatial(x, kernel_size), kernel_size, stride, padding)
    if not x.numel() or not none.numel():
        return none
    cells, left = _padded(x, padding)
    options = {"stride": stride, "padding": left, "count_include_pad": count_include_pad}
    made = _pool(_AVERAGE_POOLS, kernel_size, **options)(cells)
    if cells is x or count_include_pad:
        return made
    real, _ = _padded(torch.ones_like(x), padding)
    return made / _pool(_AVERAGE_POOLS, kernel_size, **options)(real)


def avg_pool2d_backward(
    xp, grad, *, size, kernel_size, stride=None, padding=0, count_include_pad=True, around=None
):  # fmt: skip
    made = grad.new_zeros((*grad.shape[: grad.ndim - len(size)], *size))
    if not grad.numel() or not made.numel():
        return made
    options = {"stride": stride, "padding": padding, "count_include_pad": count_include_pad}
    if around is None:
        return pulled_back(lambda x: avg_pool2d(xp, x, kernel_size=kernel_size, **options), grad, made)[0]
    # The places around count in the windows' sizes; their own gradients belong to other ranks.
    pads = [pad if isinstance(pad, tuple) else (pad, pad) for pad in _each(padding, len(size))]
    options["padding"] = tuple((p - b, q - a) for (p, q), (b, a) in zip(pads, around))
    sides = [n for pair in reversed(around) for n in pair]
    return pulled_back(
        lambda x: avg_pool2d(xp, functional.pad(x, sides), kernel_size=kernel_size, **options), grad, made
    )[0]


def _plain(function: Any) -> Callable[..., Any]:
    """A PyTorch function of the tensors alone."""
    return lambda xp, *tensors: function(*tensors)


KERNELS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (
        matmul, linear, linear_weight_gradient, cast, scale, shift, gelu, gelu_backward, silu_backward, tanh_backward,
        sigmoid_backward, relu_backward, reshape, permute, transpose, squeeze, unsqueeze, concat, split, prod_backward,
        softmax, softmax_backward, log_softmax, log_softmax_backward, layer_norm, layer_norm_backward, rms_norm,
        rms_norm_backward, group_norm, group_norm_backward, batch_norm_apply, batch_norm_sums, batch_norm_backward,
        batch_norm_frozen_backward, moving_average, embedding, embedding_backward, take_along_backward, convolution,
        convolution_input_gradient, convolution_weight_gradient, max_pool2d, max_pool2d_backward, avg_pool2d,
        avg_pool2d_backward,
    )},
    "sum": sum_,
    "detach": lambda xp, x: x,
    **{name: _plain(function) for name, function in {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "neg": torch.neg, "exp": torch.exp,
        "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "square": torch.square, "tanh": torch.tanh,
        "sigmoid": torch.sigmoid, "relu": torch.relu, "silu": functional.silu, "erf": torch.erf, "abs": torch.abs,
        "log": torch.log, "cos": torch.cos, "sin": torch.sin, "floor": torch.floor, "maximum": torch.maximum,
        "minimum": torch.minimum, "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le,
        "greater": torch.gt, "greater_equal": torch.ge, "logical_and": torch.logical_and,
        "logical_or": torch.logical_or, "logical_not": torch.logical_not,
    }.items()},
    **torch_attention.KERNELS,
    **torch_experts.KERNELS,
    **torch_losses.KERNELS,
    **torch_random.KERNELS,
    **torch_scans.KERNELS,
    **torch_views.KERNELS,
}  # fmt: skip
"""Operator name -> kernel of the form `kernel(xp, *tensors, **attributes)`; of `xp` only its device is used."""
