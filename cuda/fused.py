"""The fused kernels of `kernels.cu` in the form of operators' kernels, each beside the operator that it replaces.

Where the arrays are not what the CUDA kernel takes (another element type, an empty shard) the operator's own runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from sbp.cuda.interface import Array, Kernel

SUFFIXES = {"float32": "f32", "float64": "f64"}
ELEMENT_THREADS = 256
MOST_BLOCKS = 1 << 16

Function = Callable[[str], Any]
"""Name of a CUDA kernel -> the loaded kernel, called as `(grid, block, arguments)`."""


def adamw_update(load: Function, default: Kernel) -> Kernel:
    """AdamW in one pass instead of about ten."""

    def kernel(xp, parameter, grad, first, second, step, *, lr, beta1, beta2, eps, weight_decay):
        arrays = (parameter, grad, first, second)
        if not _suited(*arrays) or str(step.dtype) != "int64" or step.shape:
            return default(
                xp,
                *arrays,
                step,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                weight_decay=weight_decay,
            )
        arrays = tuple(map(xp.ascontiguousarray, arrays))
        made = tuple(xp.empty(parameter.shape, parameter.dtype) for _ in range(3))
        blocks = min(-(-parameter.size // ELEMENT_THREADS), MOST_BLOCKS)
        numbers = (numpy.float64(number) for number in (lr, beta1, beta2, eps, weight_decay))
        load(f"adamw_{SUFFIXES[str(parameter.dtype)]}")(
            (blocks,), (ELEMENT_THREADS,), (*arrays, step, *made, numpy.int64(parameter.size), *numbers)
        )
        return made

    return kernel


def layer_norm(load: Function, default: Kernel) -> Kernel:
    """Layer norm, a block per row."""

    def kernel(xp, x, weight, bias, *, eps):
        if not _suited(x, weight, bias):
            return default(xp, x, weight, bias, eps=eps)
        return _by_rows(load, xp, "layer_norm", x, (weight, bias), eps)

    return kernel


def rms_norm(load: Function, default: Kernel) -> Kernel:
    """RMS norm, a block per row."""

    def kernel(xp, x, weight, *, eps):
        if not _suited(x, weight):
            return default(xp, x, weight, eps=eps)
        return _by_rows(load, xp, "rms_norm", x, (weight,), eps)

    return kernel


OVERRIDES: dict[str, Callable[[Function, Kernel], Kernel]] = {
    "adamw_update": adamw_update,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
}
"""Operator -> its fused kernel, given how to load CUDA kernels and the operator's own."""


def _suited(*arrays: Array) -> bool:
    """Whether the arrays are of one type that the CUDA kernels take, and hold anything."""
    kinds = {str(array.dtype) for array in arrays}
    return len(kinds) == 1 and kinds <= set(SUFFIXES) and all(array.size for array in arrays)


def _by_rows(load: Function, xp: Any, name: str, x: Array, rest: tuple[Array, ...], eps: float) -> Array:
    x, rest = xp.ascontiguousarray(x), tuple(map(xp.ascontiguousarray, rest))
    width = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    made = xp.empty(x.shape, x.dtype)
    # A power of two, as the sum over a block halves it again and again; about four elements to a thread.
    threads = min(max(32, 1 << max(0, (width // 4 - 1).bit_length())), 1024)
    number = numpy.dtype(str(x.dtype)).type
    load(f"{name}_{SUFFIXES[str(x.dtype)]}")(
        (min(rows, MOST_BLOCKS),),
        (threads,),
        (x, *rest, made, numpy.int64(rows), numpy.int64(width), number(eps)),
    )
    return made
