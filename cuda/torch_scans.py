"""Kernels for torch tensors: running extrema, searching and counting, windows, scattering with a reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def cummax(xp, x, *, axis):
    return (x, x.long()) if not x.numel() else tuple(torch.cummax(x, axis))


def cummin(xp, x, *, axis):
    return (x, x.long()) if not x.numel() else tuple(torch.cummin(x, axis))


def logcumsumexp(xp, x, *, axis):
    return torch.logcumsumexp(x, axis)


def logcumsumexp_backward(xp, grad, x, out, *, axis):
    grad, x, out = (each.movedim(axis, -1) for each in (grad, x, out))
    above = torch.where(torch.isfinite(out), out, torch.inf)  # an empty sum passes nothing on
    weights = torch.exp(x[..., :, None] - above[..., None, :]).triu()
    return (weights * grad[..., None, :]).sum(dim=-1).movedim(-1, axis)


def searchsorted(xp, sequence, values, *, right=False):
    return torch.searchsorted(sequence.sort(dim=-1).values.contiguous(), values.contiguous(), right=right)


def isin(xp, x, tests):
    return torch.isin(x, tests)


def bincount(xp, x, *, size, offset=0):
    places = x.reshape(-1).long() - offset
    return torch.bincount(places[(places >= 0) & (places < size)], minlength=size)[:size]


def _pairs(padding: Any, count: int) -> list[tuple[int, int]]:
    wide = (padding,) * count if isinstance(padding, int) else padding
    return [(each, each) if isinstance(each, int) else tuple(each) for each in wide]


def sliding_windows(xp, x, *, kernel_size, stride=1, padding=0, dilation=1):
    count = len(kernel_size)
    strides, dilations = ((each,) * count if isinstance(each, int) else each for each in (stride, dilation))
    x = functional.pad(x, [side for pair in reversed(_pairs(padding, count)) for side in pair])
    lead = x.ndim - count
    for number, (kernel, step, spread) in enumerate(zip(kernel_size, strides, dilations)):
        span, dimension = spread * (kernel - 1) + 1, lead + number
        if x.shape[dimension] < span:
            shape = list(x.shape)
            shape[dimension] = 0
            x = x.new_zeros((*shape, kernel))
        else:
            x = x.unfold(dimension, span, step)[..., ::spread]
    return x.permute(*range(lead), *range(lead + count, lead + 2 * count), *range(lead, lead + count)).contiguous()


def sum_windows(xp, x, *, size, kernel_size, stride=1, padding=0, dilation=1):
    zeros = x.new_zeros((*x.shape[: x.ndim - 2 * len(kernel_size)], *size))
    if not x.numel() or not zeros.numel():
        return zeros
    where = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    with torch.enable_grad():
        cells = zeros.requires_grad_()
        return torch.autograd.grad(sliding_windows(xp, cells, **where), cells, x)[0]


def _scattered(x: Tensor, index: Tensor, source: Tensor, axis: int, offset: int, reduce: str) -> Tensor:
    size = x.shape[axis]
    if not x.numel() or not index.numel():
        return x.clone()
    place = index - offset
    inside = (place >= 0) & (place < size)
    # What lies outside writes a place's own element to it, which changes nothing.
    place = place.clamp(0, size - 1)
    return x.scatter_reduce(axis, place, torch.where(inside, source, x.gather(axis, place)), reduce)


def scatter_max(xp, x, index, source, *, axis=-1, offset=0):
    return _scattered(x, index, source, axis, offset, "amax")


def scatter_min(xp, x, index, source, *, axis=-1, offset=0):
    return _scattered(x, index, source, axis, offset, "amin")


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        cummax, cummin, logcumsumexp, logcumsumexp_backward, searchsorted, isin, bincount, sliding_windows, sum_windows,
        scatter_max, scatter_min,
    )
}  # fmt: skip
"""Operator name -> kernel."""
