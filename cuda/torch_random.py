"""The random numbers of `sbp.ops.random`, bit for bit, in the signed 64-bit integers that PyTorch computes with.

Products and sums wrap around in either signedness; only shifts to the right must not bring in the sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sbp.cuda.torch_types import torch_dtype

_GOLDEN = 0x9E3779B97F4A7C15
_STREAM = 0xD1B54A32D192ED03
_MASK = (1 << 64) - 1


def _signed(number: int) -> int:
    """A 64-bit pattern as the signed integer of these bits."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _right(bits: torch.Tensor, count: int) -> torch.Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _right(bits, 31)


def random_bits(
    shape: tuple[int, ...], offset: tuple[int, ...], global_shape: tuple[int, ...], seed: int,
    step: torch.Tensor | None, stream: int, device: Any,
) -> torch.Tensor:  # fmt: skip
    """64 random bits for every element of a shard, see `sbp.ops.random.random_bits`."""
    key = _mix(torch.tensor([_signed(seed * _GOLDEN + stream * _STREAM + _GOLDEN)], device=device))
    if step is not None:
        key = _mix(key + step.reshape(1).to(torch.int64) * _signed(_GOLDEN))
    index = torch.zeros((1,) * max(len(shape), 1), dtype=torch.int64, device=device)
    stride = math.prod(global_shape)
    for at, size in enumerate(shape):
        stride = stride // global_shape[at] if global_shape[at] else 0
        places = torch.arange(offset[at], offset[at] + size, device=device) * stride
        index = index + places.reshape((-1,) + (1,) * (len(shape) - 1 - at))
    return _mix(_mix(index + 1) * _signed(_GOLDEN) + key.reshape((1,) * index.ndim))


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    return _right(bits, 11).to(torch.float64) * 2.0**-53


def dropout(xp, x, *step, rate, seed=0, offset=None, global_shape=None):
    if rate == 0:
        return x
    bits = _bits(step, x.shape, seed, offset, global_shape, 0, x.device)
    keep = (_right(bits, 11) >= round(rate * 2**53)).reshape(x.shape)
    return torch.where(keep, x * (1 / (1 - rate) if rate < 1 else 0.0), torch.zeros((), dtype=x.dtype, device=x.device))


def _bits(
    step: Any, shape: Any, seed: int, offset: Any, global_shape: Any, stream: int = 0, device: Any = None
) -> torch.Tensor:
    shape = tuple(shape)
    place = (0,) * len(shape) if offset is None else tuple(offset)
    whole = shape if global_shape is None else tuple(global_shape)
    if device is None:
        device = step[0].device if step else torch.empty(0).device  # the default device, which the caller sets
    return random_bits(shape, place, whole, seed, step[0] if step else None, stream, device)


def random_uniform(xp, *step, shape, seed=0, low=0.0, high=1.0, dtype="f32", offset=None, global_shape=None):
    drawn = low + (high - low) * _uniform(_bits(step, shape, seed, offset, global_shape))
    return drawn.reshape(tuple(shape)).to(torch_dtype(dtype))


def random_normal(xp, *step, shape, seed=0, mean=0.0, std=1.0, dtype="f32", offset=None, global_shape=None):
    radius, angle = (_uniform(_bits(step, shape, seed, offset, global_shape, stream)) for stream in (1, 2))
    drawn = torch.sqrt(-2 * torch.log(1 - radius)) * torch.cos(2 * math.pi * angle)
    return (mean + std * drawn).reshape(tuple(shape)).to(torch_dtype(dtype))


KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": dropout, "random_uniform": random_uniform, "random_normal": random_normal
}  # fmt: skip
"""Operator name -> kernel."""
