"""Global tensors made of nothing but their shape. Every rank makes its own shard; nothing is sent.

Random numbers depend on the seed and on an element's place in the global tensor, so they are the same under every
layout and on any number of ranks (see `sbp.ops.random`); equal seeds and shapes give equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from sbp.dtype import dtype_named, is_floating, numpy_name
from sbp.errors import GraphError
from sbp.layout import Broadcast, Layout, Partial
from sbp.operator import REGISTRY, Operator, TensorType
from sbp.ops import library as ops
from sbp.runtime.eager import check_layout, current_ranks
from sbp.runtime.global_tensor import GlobalTensor, LayoutLike, MeshLike, apply, as_layout, as_mesh

Shape = int | Sequence[int]


def zeros(shape: Shape, layout: LayoutLike = None, mesh: MeshLike = 1, dtype: str = "f32") -> GlobalTensor:
    """Zeros of a global shape; layout and mesh as for `sbp.from_numpy`."""
    return full(shape, 0, layout, mesh, dtype)


def ones(shape: Shape, layout: LayoutLike = None, mesh: MeshLike = 1, dtype: str = "f32") -> GlobalTensor:
    """Ones of a global shape; layout and mesh as for `sbp.from_numpy`."""
    return full(shape, 1, layout, mesh, dtype)


def full(shape: Shape, value: Any, layout: LayoutLike = None, mesh: MeshLike = 1, dtype: str = "f32") -> GlobalTensor:
    """One value in every element of a global shape; layout and mesh as for `sbp.from_numpy`."""
    return _made(ops.full, layout, mesh, shape=_shape(shape), value=value, dtype=dtype)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1,
    layout: LayoutLike = None,
    mesh: MeshLike = 1,
    dtype: str | None = None,
) -> GlobalTensor:
    """start, start + step, ... below stop; `arange(n)` counts from 0 to n - 1. Whole numbers are i64, others f32."""
    if stop is None:
        start, stop = 0, start
    if step == 0 or not all(math.isfinite(item) for item in (start, stop, step)):
        raise GraphError(f"arange from {start} to {stop} in steps of {step} never ends; the step must not be 0.")
    size = max(0, math.ceil((stop - start) / step))
    kind = dtype or ("i64" if all(isinstance(item, int) for item in (start, stop, step)) else "f32")
    return _made(ops.arange, layout, mesh, size=size, start=start, step=step, dtype=kind)


def randn(
    shape: Shape, layout: LayoutLike = None, mesh: MeshLike = 1, dtype: str = "f32", seed: int = 0
) -> GlobalTensor:
    """Standard normal numbers, the same under every layout and mesh."""
    return _made(ops.random_normal, layout, mesh, shape=_shape(shape), seed=seed, dtype=dtype)


def rand(
    shape: Shape, layout: LayoutLike = None, mesh: MeshLike = 1, dtype: str = "f32", seed: int = 0
) -> GlobalTensor:
    """Uniform numbers in [0, 1), the same under every layout and mesh."""
    return _made(ops.random_uniform, layout, mesh, shape=_shape(shape), seed=seed, dtype=dtype)


def randint(
    low: int,
    high: int,
    shape: Shape,
    layout: LayoutLike = None,
    mesh: MeshLike = 1,
    dtype: str = "i64",
    seed: int = 0,
) -> GlobalTensor:
    """Whole numbers from low to high - 1, the same under every layout and mesh."""
    dtype = dtype_named(dtype)
    if is_floating(dtype) or dtype == "bool":
        raise GraphError(f"randint makes whole numbers, not {dtype}.")
    bounds = numpy.iinfo(numpy_name(dtype))
    if not all(isinstance(item, (int, numpy.integer)) for item in (low, high)) or low >= high:
        raise GraphError(f"randint takes whole numbers, low below high, which is excluded; got {low} and {high}.")
    if low < bounds.min or high - 1 > bounds.max:
        raise GraphError(f"randint: {dtype} holds {bounds.min} to {bounds.max}, not all of {low} to {high - 1}.")
    grid = as_mesh(mesh)
    chosen = as_layout(layout, grid)
    check_layout(chosen, TensorType(_shape(shape), dtype), grid, "randint of")
    # Parts of a sum cannot be rounded one by one: made where they are whole, then laid out.
    held = Layout(tuple(Broadcast() if isinstance(sbp, Partial) else sbp for sbp in chosen))
    drawn = _made(ops.random_uniform, held, grid, shape=_shape(shape), seed=seed, dtype="f64")
    return ops.cast(ops.floor(drawn * (high - low)) + low, dtype=dtype).to_layout(chosen)


def _made(op: Operator, layout: LayoutLike, mesh: MeshLike, **attributes: Any) -> GlobalTensor:
    grid = as_mesh(mesh)
    chosen = as_layout(layout, grid)
    if not isinstance(attributes.get("seed", 0), (int, numpy.integer)):
        raise GraphError(f"{op.name}: a seed is a whole number, got {attributes['seed']!r}.")
    complete = op.complete({**attributes, "dtype": dtype_named(attributes["dtype"])})
    (type,) = op.infer((), complete)
    check_layout(chosen, type, grid, f"{op.name} of")
    return apply(REGISTRY[op.name], (), complete, grid, current_ranks(), (chosen,))


def _shape(shape: Shape) -> tuple[int, ...]:
    return TensorType((shape,) if isinstance(shape, (int, numpy.integer)) else tuple(shape), "f32").shape
