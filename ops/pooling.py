"""Maximum and average pooling over windows. Batch and channels split, and places where the windows tile them."""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import GraphError, RuleError
from sbp.operator import operator
from sbp.ops.reduction import mean
from sbp.ops.windows import Windows, per_dimension


def _checked(x: tuple[int, ...], *, kernel_size: Any, stride: Any, padding: Any, **_: Any) -> Windows:
    if len(x) < 2:
        raise RuleError(f"takes (*b, h, w), got shape {list(x)}")
    windows = _windows(x, kernel_size, stride, padding).check()
    if any(2 * pad > kernel for pad, kernel in zip(windows.padding, windows.kernel)):
        raise RuleError(f"padding={padding} must be at most half of kernel_size={kernel_size}")
    return windows


def _rule(x: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    size, _, count, sizes = _checked(x, **attributes).terms(inside="^")
    return f"*b {size} -> *b {count}", sizes


def _flops(kernel_size: Any, elements_out: int) -> float:
    return elements_out * math.prod(per_dimension(kernel_size, 2, "kernel_size"))


def _disjoint(*_: Any, kernel_size: Any, stride: Any = None, **__: Any) -> str:
    """Where windows do not overlap, backward only moves (and scales) elements, so maxima pass."""
    kernel = per_dimension(kernel_size, 2, "kernel_size")
    steps = kernel if stride is None else per_dimension(stride, 2, "stride")
    return "grad" if all(size <= step for size, step in zip(kernel, steps)) else ""


def _windows(shape: tuple[int, ...], kernel_size: Any, stride: Any, padding: Any) -> Windows:
    return Windows.of(tuple(shape[-2:]), kernel_size, kernel_size if stride is None else stride, padding, 1)


@operator(_rule, passes=(("x", "max", "max"),))
def max_pool2d(xp, x, *, kernel_size, stride=None, padding=0):
    """Largest element of each window: x (*b, h, w) -> (*b, rows, columns). `stride` is `kernel_size` unless given."""
    windows = _windows(x.shape, kernel_size, stride, padding)
    shape = (*x.shape[:-2], *windows.counts)
    if not x.size:
        return xp.zeros(shape, x.dtype)
    return windows.gather(xp, x, -math.inf).max(axis=-2).reshape(shape)


max_pool2d.flops = _flops


@max_pool2d.gradient
def _(grad, x, *, kernel_size, stride, padding):
    return max_pool2d_backward(grad, x, kernel_size=kernel_size, stride=stride, padding=padding)


def _backward_rule(grad: tuple[int, ...], x: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    windows = _checked(x, **attributes)
    if tuple(grad[-2:]) != windows.counts:
        raise RuleError(f"the gradient's shape {list(grad)} should end in {list(windows.counts)}")
    size, _, count, sizes = windows.terms(inside="^")
    return f"*b {count}, *b {size} -> *b {size}", sizes


@operator(_backward_rule, linear="grad", monotone=_disjoint)
def max_pool2d_backward(xp, grad, x, *, kernel_size, stride=None, padding=0):
    """Gradient of `max_pool2d`: each window's goes to its largest element, of equal ones the first."""
    if not x.size:
        return xp.zeros_like(x)
    windows = _windows(x.shape, kernel_size, stride, padding)
    largest = windows.gather(xp, x, -math.inf).argmax(axis=-2)[..., None, :]
    places = xp.arange(math.prod(windows.kernel))[:, None]
    cells = grad.reshape(*grad.shape[:-2], 1, math.prod(windows.counts))
    return windows.scatter(xp, xp.where(places == largest, cells, xp.zeros_like(cells)))


max_pool2d_backward.flops = lambda elements: 2 * elements


def _divisor(xp: Any, windows: Windows, count_include_pad: bool, dtype: Any) -> Any:
    """By what each window's sum is divided: its size, or the number of its elements that are not padding."""
    if count_include_pad or not any(windows.padding):
        return math.prod(windows.kernel)
    return windows.gather(xp, xp.ones(windows.size, dtype)).sum(axis=-2).reshape(windows.counts)


@operator(_rule, linear="all")
def avg_pool2d(xp, x, *, kernel_size, stride=None, padding=0, count_include_pad=True):
    """Mean of each window: x (*b, h, w) -> (*b, rows, columns). Padding counts as zeros, or not at all."""
    windows = _windows(x.shape, kernel_size, stride, padding)
    shape = (*x.shape[:-2], *windows.counts)
    if not x.size:
        return xp.zeros(shape, x.dtype)
    return windows.gather(xp, x).sum(axis=-2).reshape(shape) / _divisor(xp, windows, count_include_pad, x.dtype)


avg_pool2d.flops = _flops


@avg_pool2d.gradient
def _(grad, x, *, kernel_size, stride, padding, count_include_pad):
    return avg_pool2d_backward(
        grad, size=tuple(x.shape[-2:]), kernel_size=kernel_size, stride=stride, padding=padding,
        count_include_pad=count_include_pad,
    )  # fmt: skip


def _average_backward_rule(
    grad: tuple[int, ...], *, size: tuple[int, int], **attributes: Any
) -> tuple[str, dict[str, int]]:
    windows = _checked((*grad[:-2], *size), **attributes)
    if tuple(grad[-2:]) != windows.counts:
        raise RuleError(f"the gradient's shape {list(grad)} should end in {list(windows.counts)}")
    places, _, count, sizes = windows.terms(inside="^")
    return f"*b {count} -> *b {places}", sizes


@operator(_average_backward_rule, linear="all", monotone=_disjoint)
def avg_pool2d_backward(xp, grad, *, size, kernel_size, stride=None, padding=0, count_include_pad=True):
    """Gradient of `avg_pool2d` for an input of spatial `size`."""
    if not grad.size:
        return xp.zeros((*grad.shape[:-2], *size), grad.dtype)
    windows = _windows(size, kernel_size, stride, padding)
    cells = grad / _divisor(xp, windows, count_include_pad, grad.dtype)
    cells = cells.reshape(*grad.shape[:-2], 1, math.prod(windows.counts))
    return windows.scatter(xp, xp.broadcast_to(cells, (*cells.shape[:-2], math.prod(windows.kernel), cells.shape[-1])))


avg_pool2d_backward.flops = lambda elements: 2 * elements


@avg_pool2d_backward.localize
def _(attributes, inputs, outputs):
    return {**attributes, "size": outputs[0].shape[-2:]}


@avg_pool2d_backward.gradient
def _(grad, cells, *, size, kernel_size, stride, padding, count_include_pad):
    return avg_pool2d(
        grad, kernel_size=kernel_size, stride=stride, padding=padding, count_include_pad=count_include_pad
    )


def adaptive_avg_pool2d(x: Any, output_size: int | tuple[int, int] = 1) -> Any:
    """Mean over equal windows, so many that the output has `output_size`: x (*b, h, w) -> (*b, *output_size).

    Raises
    ------
    GraphError
        The output size does not divide the input's, so that windows would be unequal.
    """
    wanted = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    if wanted == (1, 1):
        return mean(x, axis=(-2, -1), keepdims=True)
    if any(size % want for size, want in zip(x.shape[-2:], wanted)):
        raise GraphError(
            f"adaptive_avg_pool2d: {list(x.shape[-2:])} is not divisible into {list(wanted)} equal windows; "
            "resize the input."
        )
    return avg_pool2d(x, kernel_size=tuple(size // want for size, want in zip(x.shape[-2:], wanted)))


for _op in (max_pool2d, avg_pool2d):
    _op.case("f32[2,3,4,4]", kernel_size=2)
    _op.case("f32[3,5,4]", kernel_size=3, stride=2, padding=1)
    _op.case("f32[1,4,3]", kernel_size=(2, 1), stride=1)
avg_pool2d.case("f32[2,4,4]", kernel_size=2, padding=1, count_include_pad=False)
max_pool2d_backward.case("f32[2,3,2,2]", "f32[2,3,4,4]", kernel_size=2)
max_pool2d_backward.case("f32[3,3,2]", "f32[3,5,4]", kernel_size=3, stride=2, padding=1)
avg_pool2d_backward.case("f32[2,3,2,2]", size=(4, 4), kernel_size=2)
avg_pool2d_backward.case("f32[3,3,2]", size=(5, 4), kernel_size=3, stride=2, padding=1, count_include_pad=False)
