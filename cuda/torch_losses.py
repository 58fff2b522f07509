"""The parts of cross entropy on torch tensors, each over the classes that a rank has (see `sbp.ops.loss`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbp.cuda.torch_types import widen


def _axes(axis: Any, rank: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(rank))
    return tuple(at % rank for at in ((axis,) if isinstance(axis, int) else axis))


def mean(xp, x, *, axis=None, keepdims=False, count=None):
    axes = _axes(axis, x.ndim)
    if count is None:
        count = math.prod(x.shape[at] for at in axes)
    total = x.sum(dim=axes, keepdim=keepdims) if axes else x
    return total / (count or math.nan)


def _extremum(function: Callable[..., Tensor], of_nothing: str) -> Callable[..., Tensor]:
    def kernel(xp: Any, x: Tensor, *, axis: Any = None, keepdims: bool = False) -> Tensor:
        axes = _axes(axis, x.ndim)
        if not axes:
            return x
        if any(x.shape[at] == 0 for at in axes):
            shape = [1 if at in axes else size for at, size in enumerate(x.shape) if keepdims or at not in axes]
            if x.dtype.is_floating_point:
                return x.new_full(shape, -math.inf if of_nothing == "min" else math.inf)
            if x.dtype == torch.bool:
                return x.new_full(shape, of_nothing == "max")
            return x.new_full(shape, getattr(torch.iinfo(x.dtype), of_nothing))
        return function(x, dim=axes, keepdim=keepdims)

    return kernel


def sum_exp(xp, x, maximum):
    return torch.exp(widen(x) - widen(maximum)[..., None]).sum(dim=-1)


def _kept(
    targets: Tensor, offset: int, size: int, classes: int, ignore_index: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which targets count at all, which of them are among the classes from `offset` on, and where."""
    counts = (targets >= 0) & (targets < classes)
    if ignore_index is not None:
        counts = counts & (targets != ignore_index)
    here = counts & (targets >= offset) & (targets < offset + size)
    return counts, here, (targets.long() - offset).clamp(0, max(size - 1, 0))


def log_probability(xp, logits, targets, maximum, sum_exp, *, ignore_index=None, classes=None, offset=0):
    size = logits.shape[-1]
    _, here, place = _kept(targets, offset, size, size if classes is None else classes, ignore_index)
    if size == 0:
        return widen(logits).new_zeros(targets.shape)
    found = widen(logits.gather(-1, place[..., None])[..., 0]) - widen(maximum) - torch.log(sum_exp)
    return torch.where(here, found, torch.zeros_like(found))


def log_probability_backward(xp, grad, logits, targets, maximum, sum_exp, *, ignore_index=None, classes=None, offset=0):
    size = logits.shape[-1]
    counts, here, place = _kept(targets, offset, size, size if classes is None else classes, ignore_index)
    factor = torch.where(counts, grad, torch.zeros_like(grad))
    out = torch.exp(widen(logits) - widen(maximum)[..., None])
    out *= -(factor / sum_exp)[..., None]
    if size:
        out.scatter_add_(-1, place[..., None], (factor * here).to(out.dtype)[..., None])
    return out.to(logits.dtype)


def pick(xp, x, index, *, offset=0):
    size = x.shape[-1]
    if size == 0:
        return x.new_zeros(index.shape)
    place = index.long() - offset
    found = x.gather(-1, place.clamp(0, size - 1)[..., None])[..., 0]
    return torch.where((place >= 0) & (place < size), found, torch.zeros_like(found))


KERNELS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (
        mean, sum_exp, log_probability, log_probability_backward, pick
    )},
    "max": _extremum(torch.amax, "min"),
    "min": _extremum(torch.amin, "max"),
}  # fmt: skip
"""Operator name -> kernel."""
