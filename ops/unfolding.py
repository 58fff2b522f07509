"""Windows as a tensor of their own (im2col) and their sum back into place (col2im)."""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.views import reshape
from sbp.ops.windows import CHANCE, SLICED, SUMMED, Windows, per_dimension


def _windows(size: tuple[int, ...], attributes: dict[str, Any]) -> Windows:
    kernel = attributes["kernel_size"]
    given = (attributes[name] for name in ("stride", "padding", "dilation"))
    return Windows.of(tuple(size[len(size) - len(kernel) :]), kernel, *given)


def _rule(x: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    if len(x) < len(attributes["kernel_size"]):
        raise RuleError(f"kernel_size={attributes['kernel_size']} has more dimensions than {list(x)}")
    size, kernel, count, sizes = _windows(x, attributes).check().terms(inside="^")
    return f"*b {size} -> *b {kernel} {count}", sizes


@operator(_rule, linear="all", monotone="all")
def sliding_windows(xp, x, *, kernel_size, stride=1, padding=0, dilation=1):
    """Every window over the last dimensions, as many as `kernel_size` (a tuple) has numbers.

    x (*b, *size) -> (*b, *kernel_size, *windows), with zeros as padding.
    """
    attributes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    windows = _windows(x.shape, attributes)
    shape = (*x.shape[: x.ndim - len(kernel_size)], *windows.kernel, *windows.counts)
    if not x.size or 0 in shape:
        return xp.zeros(shape, x.dtype)
    return windows.gather(xp, x).reshape(shape)


@sliding_windows.reads
def _(attributes, inputs, outputs):
    return (_windows(inputs[0].global_shape, attributes).cells_read(inputs[0], outputs[0]),)


@sliding_windows.localize
def _(attributes, inputs, outputs):
    windows = _windows(inputs[0].global_shape, attributes)
    return {**attributes, "padding": windows.local_padding(inputs[0], outputs[0])}


@sliding_windows.gradient
def _(grad, x, *, kernel_size, stride, padding, dilation):
    size = tuple(x.shape[len(x.shape) - len(kernel_size) :])
    return sum_windows(grad, size=size, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)


def _sum_rule(x: tuple[int, ...], *, size: tuple[int, ...], **attributes: Any) -> tuple[str, dict[str, int]]:
    windows = _windows(size, attributes).check()
    count = len(windows.size)
    if len(x) < 2 * count or tuple(x[len(x) - 2 * count :]) != (*windows.kernel, *windows.counts):
        raise RuleError(f"the windows' shape {list(x)} should end in {[*windows.kernel, *windows.counts]}")
    places, kernel, counts, sizes = windows.terms(inside="^")
    return f"*b {kernel} {counts} -> *b {places}", sizes


def _disjoint(x: TensorType, *, size: tuple[int, ...], **attributes: Any) -> str:
    """Where no two windows meet, elements are only moved, so that extrema pass."""
    windows = _windows(size, attributes)
    apart = (
        count == 1 or kernel == 1 or dilation * (kernel - 1) < stride
        for count, kernel, dilation, stride in zip(windows.counts, windows.kernel, windows.dilation, windows.stride)
    )
    return "all" if all(apart) else ""


@operator(_sum_rule, linear="all", monotone=_disjoint)
def sum_windows(xp, x, *, size, kernel_size, stride=1, padding=0, dilation=1):
    """The adjoint of `sliding_windows`: x (*b, *kernel_size, *windows) -> (*b, *size), overlaps added."""
    lead = x.shape[: x.ndim - 2 * len(kernel_size)]
    if not x.size or not math.prod(size):
        return xp.zeros((*lead, *size), x.dtype)
    attributes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    windows = _windows(tuple(size), attributes)
    return windows.scatter(xp, x.reshape(*lead, math.prod(windows.kernel), math.prod(windows.counts)))


@sum_windows.reads
def _(attributes, inputs, outputs):
    return (_windows(tuple(attributes["size"]), attributes).windows_read(inputs[0], outputs[0]),)


@sum_windows.localize
def _(attributes, inputs, outputs):
    windows = _windows(tuple(attributes["size"]), attributes)
    size = outputs[0].shape[len(outputs[0].shape) - len(windows.size) :]
    return {**attributes, "size": size, "padding": windows.local_padding(outputs[0], inputs[0])}


@sum_windows.gradient
def _(grad, x, *, size, kernel_size, stride, padding, dilation):
    return sliding_windows(grad, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)


sliding_windows.flops = sum_windows.flops = lambda elements: elements


def unfold(x: Any, kernel_size: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Any:
    """Windows as columns: x (n, c, *spatial) -> (n, c * kernel elements, windows), as torch.nn.functional.unfold."""
    kernel = per_dimension(kernel_size, len(x.shape) - 2, "kernel_size")
    made = sliding_windows(x, kernel_size=kernel, stride=stride, padding=padding, dilation=dilation)
    count = math.prod(made.shape[len(made.shape) - len(kernel) :])
    return reshape(made, shape=(x.shape[0], x.shape[1] * math.prod(kernel), count))


def fold(
    x: Any, output_size: tuple[int, ...], kernel_size: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> Any:
    """The adjoint of `unfold`: x (n, c * kernel elements, windows) -> (n, c, *output_size), overlaps added."""
    size = tuple(output_size)
    kernel = per_dimension(kernel_size, len(size), "kernel_size")
    windows = Windows.of(size, kernel, stride, padding, dilation).check()
    elements = math.prod(kernel)
    if len(x.shape) != 3 or x.shape[1] % elements or x.shape[2] != math.prod(windows.counts):
        raise RuleError(
            f"fold takes (n, channels * {elements}, {math.prod(windows.counts)}) for output_size={size}, "
            f"kernel_size={kernel}, got {list(x.shape)}"
        )
    spread = reshape(x, shape=(x.shape[0], x.shape[1] // elements, *kernel, *windows.counts))
    return sum_windows(spread, size=size, kernel_size=kernel, stride=stride, padding=padding, dilation=dilation)


_CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("f32[2,4,4]", "f32[2,2,2,2,2]", {"kernel_size": (2, 2), "stride": 2}),
    ("f32[3,7]", "f32[3,3,4]", {"kernel_size": (3,), "stride": 2, "padding": 1}),
    ("f32[1,5,3]", "f32[1,2,1,3,3]", {"kernel_size": (2, 1), "dilation": 2}),
)
for _x, _y, _where in _CASES:
    sliding_windows.case(_x, **_where)
    sum_windows.case(_y, size=tuple(map(int, _x[4:-1].split(",")))[-len(_where["kernel_size"]) :], **_where)
sliding_windows.reasons.update({"S(*) -> P*": SUMMED, "S(*) -> S(*)": CHANCE})
sum_windows.reasons.update({"S(*) -> P*": SUMMED, "S(*) -> S(*)": CHANCE, "B -> S(*)": SLICED})
