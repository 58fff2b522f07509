"""Random numbers that depend on a seed, a step and the place in the global tensor, never on its layout.

Counter-based: the bits of an element are a hash of its global row-major index, so any shard can make its own without
the rest. The hash is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) in exact 64-bit integers, the same on NumPy and CuPy.
"""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import dtype_named, is_floating, numpy_name
from sbp.errors import RuleError
from sbp.operator import TensorType, operator

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(xp, bits):
    bits = (bits ^ (bits >> xp.uint64(30))) * xp.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> xp.uint64(27))) * xp.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> xp.uint64(31))


def global_index(xp, shape, offset, global_shape):
    """Row-major index in the global tensor of every element of a shard, uint64 of `shape` (at least one dimension)."""
    index = xp.zeros((1,) * max(len(shape), 1), xp.uint64)
    stride = math.prod(global_shape)
    for at, size in enumerate(shape):
        stride = stride // global_shape[at] if global_shape[at] else 0
        places = xp.arange(offset[at], offset[at] + size, dtype=xp.uint64) * xp.uint64(stride)
        index = index + places.reshape((-1,) + (1,) * (len(shape) - 1 - at))
    return index


def random_bits(xp, shape, offset, global_shape, seed: int, step=None, *, stream: int = 0):
    """64 random bits for every element of a shard; `step` is None or an array with one whole number."""
    key = _mix(xp, xp.full(1, (seed * _GOLDEN + stream * 0xD1B54A32D192ED03 + _GOLDEN) & _MASK, dtype=xp.uint64))
    if step is not None:
        key = _mix(xp, key + xp.asarray(step).reshape(1).astype(xp.int64).astype(xp.uint64) * xp.uint64(_GOLDEN))
    index = global_index(xp, shape, offset, global_shape)
    return _mix(xp, _mix(xp, index + xp.uint64(1)) * xp.uint64(_GOLDEN) + key.reshape((1,) * index.ndim))


def uniform(xp, bits):
    """Numbers in [0, 1) of 53 random bits each, float64."""
    return (bits >> xp.uint64(11)).astype(xp.float64) * 2.0**-53


def _dropout_rule(x: tuple[int, ...], *step: tuple[int, ...], **attributes: Any) -> str:
    if len(step) > 1 or (step and step[0] != ()):
        raise RuleError("takes a tensor and at most one step number, a scalar")
    return "*d, -> *d" if step else "*d -> *d"


def _dropout_type(x: TensorType, *step: TensorType, rate: float, **attributes: Any) -> str:
    if not 0 <= rate <= 1:
        raise RuleError(f"rate {rate} must be between 0 and 1")
    if not is_floating(x.dtype):
        raise RuleError(f"takes floating numbers, got {x}")
    return x.dtype


@operator(_dropout_rule, linear="x", monotone="x", dtype=_dropout_type)
def dropout(xp, x, *step, rate, seed=0, offset=None, global_shape=None):
    """Elements dropped with probability `rate`, the others scaled by 1 / (1 - rate).

    The mask is a function of `seed`, of `step` (an optional scalar of whole numbers, such as a count of training steps)
    and of the element's global position; so it is the same under every layout, and made again for the gradient.
    `offset` and `global_shape` are set for shards.
    """
    if rate == 0:
        return x
    place = (0,) * x.ndim if offset is None else offset
    bits = random_bits(xp, x.shape, place, x.shape if global_shape is None else global_shape, seed, *step)
    keep = ((bits >> xp.uint64(11)) >= xp.uint64(round(rate * 2**53))).reshape(x.shape)
    factor = 1 / (1 - rate) if rate < 1 else 0.0
    return xp.where(keep, x * factor, xp.zeros((), x.dtype))


dropout.flops = lambda elements: 10 * elements


@dropout.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": outputs[0].offset, "global_shape": outputs[0].global_shape}


@dropout.gradient
def _(grad, x, *step, rate, seed):
    return (dropout(grad, *step, rate=rate, seed=seed), *(None for _ in step))


dropout.case("f32[4,6]", rate=0.5, seed=3)
dropout.case("f32[5,3]", "i64[]", rate=0.3)
dropout.case("f32[2,1,7]", rate=0.0)


def _fill_rule(*step: tuple[int, ...], shape: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    if len(step) > 1 or (step and step[0] != ()):
        raise RuleError("takes at most one step number, a scalar")
    sizes = {f"d{at}": size for at, size in enumerate(shape)}
    return f"{'*none^' if step else ''} -> {' '.join(sizes)}", sizes


def _fill_type(*step: TensorType, dtype: str, **attributes: Any) -> str:
    if not is_floating(dtype_named(dtype)):
        raise RuleError(f"makes floating numbers, not {dtype}")
    return dtype


def _fill_local(attributes, inputs, outputs):
    box = outputs[0]
    return {**attributes, "shape": box.shape, "offset": box.offset, "global_shape": box.global_shape}


def _bits_of(xp, step, shape, seed, offset, global_shape, stream=0):
    place = (0,) * len(shape) if offset is None else offset
    return random_bits(xp, shape, place, shape if global_shape is None else global_shape, seed, *step, stream=stream)


@operator(_fill_rule, dtype=_fill_type)
def random_uniform(xp, *step, shape, seed=0, low=0.0, high=1.0, dtype="f32", offset=None, global_shape=None):
    """Uniform random numbers in [low, high), a function of seed, step and global position."""
    bits = _bits_of(xp, step, shape, seed, offset, global_shape)
    return (low + (high - low) * uniform(xp, bits)).reshape(tuple(shape)).astype(numpy_name(dtype))


@operator(_fill_rule, dtype=_fill_type)
def random_normal(xp, *step, shape, seed=0, mean=0.0, std=1.0, dtype="f32", offset=None, global_shape=None):
    """Normal random numbers (Box and Muller, 1958), a function of seed, step and global position."""
    radius, angle = (uniform(xp, _bits_of(xp, step, shape, seed, offset, global_shape, stream)) for stream in (1, 2))
    drawn = xp.sqrt(-2 * xp.log(1 - radius)) * xp.cos(2 * math.pi * angle)
    return (mean + std * drawn).reshape(tuple(shape)).astype(numpy_name(dtype))


for _op in (random_uniform, random_normal):
    _op.flops = lambda elements_out: 20 * elements_out
    _op.localize(_fill_local)
    _op.gradient(lambda grad, *step: (None,) * len(step))
    _op.case(shape=(4, 6), seed=1)
    _op.case("i64[]", shape=(5,))
    _op.case(shape=(2, 1, 3), seed=2, dtype="f64")
