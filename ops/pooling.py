"""Maximum and average pooling over windows. Batch and channels split, and places along with the windows.

Where windows overlap or do not fit the shards, ranks fetch from their neighbours what their windows cover.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sbp.borders import hull
from sbp.errors import RuleError
from sbp.layout import Shard
from sbp.operator import TensorType, operator
from sbp.ops.reduction import max_, mean
from sbp.ops.resampling import resample
from sbp.ops.slicing import concat, narrow
from sbp.ops.windows import CHANCE, SLICED, SUMMED, Windows, per_dimension


def _spatial(kernel_size: Any) -> int:
    """How many dimensions are pooled: as many as the kernel's size has numbers, two if it is one number."""
    return 2 if isinstance(kernel_size, int) else len(kernel_size)


def _checked(x: tuple[int, ...], *, kernel_size: Any, stride: Any, padding: Any, **_: Any) -> Windows:
    if len(x) < _spatial(kernel_size):
        raise RuleError(f"takes (*b, h, w) for kernel_size={kernel_size}, got shape {list(x)}")
    windows = _windows(x, kernel_size, stride, padding).check()
    if any(2 * max(pad) > kernel for pad, kernel in zip(windows.padding, windows.kernel)):
        raise RuleError(f"padding={padding} must be at most half of kernel_size={kernel_size}")
    return windows


def _rule(x: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    size, _, count, sizes = _checked(x, **attributes).terms(inside="^")
    return f"*b {size} -> *b {count}", sizes


def _flops(kernel_size: Any, elements_out: int) -> float:
    return elements_out * math.prod(per_dimension(kernel_size, _spatial(kernel_size), "kernel_size"))


def _disjoint(grad: TensorType, *_: Any, kernel_size: Any, stride: Any = None, **__: Any) -> str:
    """Where windows do not overlap, backward only moves (and scales) elements, so maxima pass."""
    count = _spatial(kernel_size)
    kernel = per_dimension(kernel_size, count, "kernel_size")
    steps = kernel if stride is None else per_dimension(stride, count, "stride")
    windows = grad.shape[-count:]
    return "grad" if all(size <= step or many == 1 for size, step, many in zip(kernel, steps, windows)) else ""


def _windows(shape: tuple[int, ...], kernel_size: Any, stride: Any, padding: Any) -> Windows:
    size = tuple(shape[-_spatial(kernel_size) :])
    return Windows.of(size, kernel_size, kernel_size if stride is None else stride, padding, 1)


@operator(_rule, passes=(("x", "max", "max"),))
def max_pool2d(xp, x, *, kernel_size, stride=None, padding=0):
    """Largest element of each window: x (*b, h, w) -> (*b, rows, columns). `stride` is `kernel_size` unless given.

    Pools as many of the last dimensions as `kernel_size` has numbers, two if it is one number.
    """
    windows = _windows(x.shape, kernel_size, stride, padding)
    shape = (*x.shape[: -len(windows.size)], *windows.counts)
    if not x.size or 0 in shape:
        return xp.zeros(shape, x.dtype)
    return windows.gather(xp, x, -math.inf).max(axis=-2).reshape(shape)


def _read_cells(attributes: dict[str, Any], inputs: tuple[Shard, ...], outputs: tuple[Shard, ...]) -> tuple[Shard]:
    windows = _of_attributes(inputs[0].global_shape, attributes)
    return (windows.cells_read(inputs[0], outputs[0]),)


def _of_attributes(x: tuple[int, ...], attributes: dict[str, Any]) -> Windows:
    return _windows(x, *(attributes[name] for name in ("kernel_size", "stride", "padding")))


def _local_pooling(attributes: dict[str, Any], inputs: tuple[Shard, ...], outputs: tuple[Shard, ...]) -> dict[str, Any]:
    windows = _of_attributes(inputs[0].global_shape, attributes)
    return {**attributes, "padding": windows.local_padding(inputs[0], outputs[0])}


max_pool2d.reads(_read_cells)
max_pool2d.localize(_local_pooling)
max_pool2d.flops = _flops


@max_pool2d.gradient
def _(grad, x, *, kernel_size, stride, padding):
    return max_pool2d_backward(grad, x, kernel_size=kernel_size, stride=stride, padding=padding)


def _backward_rule(grad: tuple[int, ...], x: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    windows = _checked(x, **attributes)
    if tuple(grad[-len(windows.size) :]) != windows.counts:
        raise RuleError(f"the gradient's shape {list(grad)} should end in {list(windows.counts)}")
    size, _, count, sizes = windows.terms(inside="^")
    return f"*b {count}, *b {size} -> *b {size}", sizes


@operator(_backward_rule, linear="grad", monotone=_disjoint)
def max_pool2d_backward(xp, grad, x, *, kernel_size, stride=None, padding=0, keep=None):
    """Gradient of `max_pool2d`: each window's goes to its largest element, of equal ones the first.

    `keep` gives (offset, size) per pooled dimension of the places whose gradient is wanted; default all.
    """
    kept = (...,) if keep is None else (..., *(slice(start, start + size) for start, size in keep))
    if not x.size or not grad.size:
        return xp.zeros_like(x)[kept]
    windows = _windows(x.shape, kernel_size, stride, padding)
    largest = windows.gather(xp, x, -math.inf).argmax(axis=-2)[..., None, :]
    places = xp.arange(math.prod(windows.kernel))[:, None]
    cells = grad.reshape(*grad.shape[: -len(windows.size)], 1, math.prod(windows.counts))
    return windows.scatter(xp, xp.where(places == largest, cells, xp.zeros_like(cells)))[kept]


@max_pool2d_backward.reads
def _(attributes, inputs, outputs):
    windows = _of_attributes(inputs[1].global_shape, attributes)
    grad = windows.windows_read(inputs[0], outputs[0])
    return grad, hull(windows.cells_read(inputs[1], grad), outputs[0])


@max_pool2d_backward.localize
def _(attributes, inputs, outputs):
    windows = _of_attributes(inputs[1].global_shape, attributes)
    count = len(windows.size)
    keep = tuple((outputs[0].offset[at] - inputs[1].offset[at], outputs[0].shape[at]) for at in range(-count, 0))
    whole = keep == tuple((0, size) for size in inputs[1].shape[-count:])
    return {**attributes, "padding": windows.local_padding(inputs[1], inputs[0]), "keep": None if whole else keep}


max_pool2d_backward.flops = lambda elements: 2 * elements


def _divisor(xp: Any, windows: Windows, count_include_pad: bool, dtype: Any) -> Any:
    """By what each window's sum is divided: its size, or the number of its elements that are not padding."""
    if count_include_pad or not any(map(any, windows.padding)):
        return math.prod(windows.kernel)
    return windows.gather(xp, xp.ones(windows.size, dtype)).sum(axis=-2).reshape(windows.counts)


@operator(_rule, linear="all")
def avg_pool2d(xp, x, *, kernel_size, stride=None, padding=0, count_include_pad=True):
    """Mean of each window: x (*b, h, w) -> (*b, rows, columns). Padding counts as zeros, or not at all.

    Pools as many of the last dimensions as `kernel_size` has numbers, two if it is one number.
    """
    windows = _windows(x.shape, kernel_size, stride, padding)
    shape = (*x.shape[: -len(windows.size)], *windows.counts)
    if not x.size or 0 in shape:
        return xp.zeros(shape, x.dtype)
    return windows.gather(xp, x).sum(axis=-2).reshape(shape) / _divisor(xp, windows, count_include_pad, x.dtype)


avg_pool2d.reads(_read_cells)
avg_pool2d.localize(_local_pooling)
avg_pool2d.flops = _flops


@avg_pool2d.gradient
def _(grad, x, *, kernel_size, stride, padding, count_include_pad):
    return avg_pool2d_backward(
        grad, size=tuple(x.shape[-_spatial(kernel_size) :]), kernel_size=kernel_size, stride=stride, padding=padding,
        count_include_pad=count_include_pad,
    )  # fmt: skip


def _average_backward_rule(
    grad: tuple[int, ...], *, size: tuple[int, ...], **attributes: Any
) -> tuple[str, dict[str, int]]:
    windows = _checked((*grad[: -len(size)], *size), **attributes)
    if tuple(grad[-len(windows.size) :]) != windows.counts:
        raise RuleError(f"the gradient's shape {list(grad)} should end in {list(windows.counts)}")
    places, _, count, sizes = windows.terms(inside="^")
    return f"*b {count} -> *b {places}", sizes


@operator(_average_backward_rule, linear="all", monotone=_disjoint)
def avg_pool2d_backward(xp, grad, *, size, kernel_size, stride=None, padding=0, count_include_pad=True, around=None):
    """Gradient of `avg_pool2d` for an input of spatial `size`.

    `around` says where the input lies in a larger one whose places count as well: (before, after) per dimension.
    """
    if not grad.size or not math.prod(size):
        return xp.zeros((*grad.shape[: -len(size)], *size), grad.dtype)
    windows = _windows(size, kernel_size, stride, padding)
    counted = windows if around is None else _surrounded(windows, around)
    cells = grad / _divisor(xp, counted, count_include_pad, grad.dtype)
    cells = cells.reshape(*grad.shape[: -len(windows.size)], 1, math.prod(windows.counts))
    return windows.scatter(xp, xp.broadcast_to(cells, (*cells.shape[:-2], math.prod(windows.kernel), cells.shape[-1])))


def _surrounded(windows: Windows, around: tuple[tuple[int, int], ...]) -> Windows:
    """The same windows over more places and less padding."""
    size = tuple(size + before + after for size, (before, after) in zip(windows.size, around))
    padding = tuple((pad[0] - before, pad[1] - after) for pad, (before, after) in zip(windows.padding, around))
    return replace(windows, size=size, padding=padding)


avg_pool2d_backward.flops = lambda elements: 2 * elements


def _global_cells(attributes: dict[str, Any]) -> Windows:
    return _of_attributes(tuple(attributes["size"]), attributes)


@avg_pool2d_backward.reads
def _(attributes, inputs, outputs):
    return (_global_cells(attributes).windows_read(inputs[0], outputs[0]),)


@avg_pool2d_backward.localize
def _(attributes, inputs, outputs):
    windows, count = _global_cells(attributes), len(attributes["size"])
    shape, offset = outputs[0].shape[-count:], outputs[0].offset[-count:]
    around = tuple((start, whole - start - size) for whole, start, size in zip(windows.size, offset, shape))
    padding = windows.local_padding(outputs[0], inputs[0])
    return {**attributes, "size": shape, "padding": padding, "around": around if any(map(any, around)) else None}


@avg_pool2d_backward.gradient
def _(grad, cells, *, size, kernel_size, stride, padding, count_include_pad):
    return avg_pool2d(
        grad, kernel_size=kernel_size, stride=stride, padding=padding, count_include_pad=count_include_pad
    )


def _sizes(count: int, x: Any, output_size: Any) -> tuple[int, ...]:
    if len(x.shape) < count:
        raise RuleError(f"pools the last {count} dimensions, got shape {list(x.shape)}")
    return per_dimension(output_size, count, "output_size")


def _adaptive_mean(count: int, x: Any, output_size: Any) -> Any:
    wanted = _sizes(count, x, output_size)
    spatial = tuple(x.shape[-count:])
    if wanted == (1,) * count:
        return mean(x, axis=tuple(range(-count, 0)), keepdims=True)
    if all(size % want == 0 for size, want in zip(spatial, wanted)):
        return avg_pool2d(x, kernel_size=tuple(size // want for size, want in zip(spatial, wanted)))
    for number, want in enumerate(wanted):
        if want != spatial[number]:
            x = resample(x, axis=number - count, size=want, mode="mean")
    return x


def adaptive_avg_pool1d(x: Any, output_size: Any = 1) -> Any:
    """Mean over windows, so many that the output is (*b, output_size); unequal ones overlap as in PyTorch."""
    return _adaptive_mean(1, x, output_size)


def adaptive_avg_pool2d(x: Any, output_size: Any = 1) -> Any:
    """Mean over windows, so many that the output is (*b, *output_size); unequal ones overlap as in PyTorch."""
    return _adaptive_mean(2, x, output_size)


def adaptive_avg_pool3d(x: Any, output_size: Any = 1) -> Any:
    """Mean over windows, so many that the output is (*b, *output_size); unequal ones overlap as in PyTorch."""
    return _adaptive_mean(3, x, output_size)


def adaptive_max_pool2d(x: Any, output_size: Any = 1) -> Any:
    """Largest elements of windows as those of `adaptive_avg_pool2d`: x (*b, h, w) -> (*b, *output_size)."""
    wanted = _sizes(2, x, output_size)
    if all(size % want == 0 for size, want in zip(x.shape[-2:], wanted)):
        return max_pool2d(x, kernel_size=tuple(size // want for size, want in zip(x.shape[-2:], wanted)))
    for axis, want in ((-2, wanted[0]), (-1, wanted[1])):  # a maximum of maxima
        size = x.shape[axis]
        rows = [(at * size // want, -(-(at + 1) * size // want)) for at in range(want)]
        x = concat(*(max_(narrow(x, axis, a, b - a), axis=axis, keepdims=True) for a, b in rows), axis=axis)
    return x


def max_pool1d(x: Any, kernel_size: int, stride: int | None = None, padding: int = 0) -> Any:
    """`max_pool2d` over the last dimension only."""
    return max_pool2d(x, kernel_size=per_dimension(kernel_size, 1, "kernel_size"), stride=stride, padding=padding)


def max_pool3d(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Any:
    """`max_pool2d` over the last three dimensions."""
    return max_pool2d(x, kernel_size=per_dimension(kernel_size, 3, "kernel_size"), stride=stride, padding=padding)


def avg_pool1d(
    x: Any, kernel_size: int, stride: int | None = None, padding: int = 0, count_include_pad: bool = True
) -> Any:
    """`avg_pool2d` over the last dimension only."""
    sizes = per_dimension(kernel_size, 1, "kernel_size")
    return avg_pool2d(x, kernel_size=sizes, stride=stride, padding=padding, count_include_pad=count_include_pad)


def avg_pool3d(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, count_include_pad: bool = True) -> Any:
    """`avg_pool2d` over the last three dimensions."""
    sizes = per_dimension(kernel_size, 3, "kernel_size")
    return avg_pool2d(x, kernel_size=sizes, stride=stride, padding=padding, count_include_pad=count_include_pad)


for _op in (max_pool2d, avg_pool2d):
    _op.case("f32[2,3,4,4]", kernel_size=2)
    _op.case("f32[3,5,4]", kernel_size=3, stride=2, padding=1)
    _op.case("f32[1,4,3]", kernel_size=(2, 1), stride=1)
avg_pool2d.case("f32[2,4,4]", kernel_size=2, padding=1, count_include_pad=False)
max_pool2d.case("f32[3,2,5]", kernel_size=(2,), stride=2, padding=1)
max_pool2d.case("f32[2,7]", kernel_size=(4,), stride=1, padding=1)
avg_pool2d.case("f32[1,7]", kernel_size=(3,), stride=2, padding=1, count_include_pad=False)
avg_pool2d.case("f32[2,3,2,4,2]", kernel_size=(1, 2, 2))
max_pool2d_backward.case("f32[2,3,2,2]", "f32[2,3,4,4]", kernel_size=2)
max_pool2d_backward.case("f32[3,3,2]", "f32[3,5,4]", kernel_size=3, stride=2, padding=1)
max_pool2d_backward.case("f32[2,6]", "f32[2,7]", kernel_size=(4,), stride=1, padding=1)
max_pool2d_backward.case("f32[1,3]", "f32[1,8]", kernel_size=(2,), stride=3)
avg_pool2d_backward.case("f32[1,6]", size=(7,), kernel_size=(4,), stride=1, padding=1, count_include_pad=False)
max_pool2d_backward.case("f32[1,2,1,3]", "f32[1,2,2,5]", kernel_size=2, stride=(1, 2), padding=(0, 1))
avg_pool2d_backward.case("f32[2,3,2,2]", size=(4, 4), kernel_size=2)
avg_pool2d_backward.case("f32[3,3,2]", size=(5, 4), kernel_size=3, stride=2, padding=1, count_include_pad=False)
avg_pool2d_backward.case("f32[1,2,1,5]", size=(3, 5), kernel_size=(3, 1))
for _op in (max_pool2d, avg_pool2d, avg_pool2d_backward):
    _op.reasons.update({"S(*) -> P*": SUMMED, "S(*) -> S(*)": CHANCE})
avg_pool2d_backward.reasons["B -> S(*)"] = SLICED
max_pool2d_backward.reasons.update(
    {"B, B -> S(*)": SLICED, "S(*), B -> P*": SUMMED, "B, S(*) -> S(*)": CHANCE, "S(*), B -> S(*)": CHANCE}
)
