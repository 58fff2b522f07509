"""Cutting, repeating and filling on torch tensors, rotary embedding, choices between tensors: what every model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sbp.cuda.torch_types import torch_dtype

Tensor = torch.Tensor


def _cut(starts: Sequence, stops: Sequence, steps: Sequence | None) -> tuple[slice, ...]:
    return tuple(slice(*bound) for bound in zip(starts, stops, (1,) * len(starts) if steps is None else steps))


def slice_(xp, x, *, starts, stops, steps=None):
    return x[_cut(starts, stops, steps)]


def slice_backward(xp, grad, *, shape, starts, stops, steps=None):
    out = grad.new_zeros(tuple(shape))
    out[_cut(starts, stops, steps)] = grad
    return out


def expand(xp, x, *, shape):
    return x.expand(tuple(shape))


def full(xp, *, shape, value, dtype="f32"):
    return torch.full(tuple(shape), value, dtype=torch_dtype(dtype), device=xp.device)


def arange(xp, *, size, start=0, step=1, dtype="i64"):
    return (torch.arange(size, device=xp.device) * step + start).to(torch_dtype(dtype))


def where(xp, condition, x, y):
    return torch.where(condition, x, y)


def masked_fill(xp, x, mask, *, value):
    return torch.where(mask, torch.as_tensor(value, dtype=x.dtype, device=x.device), x)


def equal_number(xp, x, *, number):
    return x == number


def less_number(xp, x, *, number):
    return x < number


def greater_number(xp, x, *, number):
    return x > number


def rotary(xp, x, *, theta=10000.0, offset=0, interleaved=False, inverse=False):
    s, d = x.shape[-2:]
    halves = torch.arange(d // 2, device=x.device, dtype=torch.float64)
    places = torch.arange(offset, offset + s, device=x.device, dtype=torch.float64)
    angles = places[:, None] * (float(theta) ** (-2.0 * halves / d))[None, :]
    cos, sin = torch.cos(angles).to(x.dtype), torch.sin(-angles if inverse else angles).to(x.dtype)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, d // 2), slice(d // 2, d))
    a, b = x[..., first], x[..., second]
    out = torch.empty_like(x)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def rotate_halves(xp, x, cos, sin, *, inverse=False):
    half = x.shape[-1] // 2
    turned = x * sin if inverse else x
    first, second = turned[..., :half], turned[..., half:]
    exchanged = torch.cat([second, -first] if inverse else [-second, first], dim=-1)
    return x * cos + (exchanged if inverse else exchanged * sin)


KERNELS: dict[str, Callable[..., Any]] = {
    "slice": slice_,
    **{function.__name__: function for function in (
        slice_backward, expand, full, arange, where, masked_fill, equal_number, less_number, greater_number, rotary,
        rotate_halves,
    )},
}  # fmt: skip
"""Operator name -> kernel."""
