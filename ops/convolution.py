"""Convolution over any number of spatial dimensions, grouped and dilated; its two gradients; transposed convolution.

Splitting the batch or the output channels splits the result; splitting the input channels leaves a part of the sum.
With several groups, whole groups are split first. Spatial dimensions split with their windows: ranks fetch the rows
that their windows share with their neighbours' (a halo), and nothing where the kernel tiles them exactly (the patches
of a vision transformer).
"""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import GraphError, RuleError
from sbp.operator import operator
from sbp.ops.precision import one_type
from sbp.ops.windows import SLICED, SUMMED, Windows, per_dimension


def _check_shapes(x: tuple[int, ...], weight: tuple[int, ...], groups: int) -> None:
    if len(x) < 3 or len(weight) != len(x):
        raise RuleError(
            f"takes (n, channels, *spatial) and a weight with as many dimensions, got {list(x)} and {list(weight)}"
        )
    if groups < 1 or x[1] % groups or weight[0] % groups or x[1] // groups != weight[1]:
        raise RuleError(
            f"groups={groups} does not fit {x[1]} input channels and a weight {list(weight)}, which must be "
            "(output channels, input channels / groups, *kernel) with both channel numbers divisible by groups"
        )


def _rule(
    x: tuple[int, ...], weight: tuple[int, ...], *, stride: Any, padding: Any, dilation: Any, groups: int
) -> tuple[str, dict[str, int]]:
    _check_shapes(x, weight, groups)
    windows = Windows.of(x[2:], weight[2:], stride, padding, dilation).check()
    size, kernel, count, sizes = windows.terms(inside="+")
    return f"n (g c+) {size}, (g o) c+ {kernel} -> n (g o) {count}", {"g": groups, **sizes}


def _grouped(x: Any, groups: int) -> Any:
    """(a, groups * b, ...) -> (a, groups, b, ...)."""
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _matrix(weight: Any, groups: int) -> Any:
    """Weight (groups * o, c, *kernel) -> (groups, o, c * kernel elements)."""
    return weight.reshape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:]))


@operator(_rule, linear="each", dtype=one_type)
def convolution(xp, x, weight, *, stride=1, padding=0, dilation=1, groups=1):
    """Cross-correlation: x (n, c, *spatial), weight (o, c / groups, *kernel) -> (n, o, *windows).

    `stride`, `padding` (zeros on both sides) and `dilation` are one number or one per spatial dimension; `padding` may
    be a pair (before, after) per dimension.
    """
    windows = Windows.of(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    shape = (x.shape[0], weight.shape[0], *windows.counts)
    if not x.size or not weight.size or 0 in shape:
        return xp.zeros(shape, x.dtype)
    groups = x.shape[1] // weight.shape[1]  # a rank may hold some of the groups
    columns = windows.gather(xp, _grouped(x, groups))
    columns = columns.reshape(x.shape[0], groups, columns.shape[2] * columns.shape[3], columns.shape[4])
    return xp.matmul(_matrix(weight, groups), columns).reshape(shape)


def _global(x: tuple[int, ...], weight: tuple[int, ...], attributes: dict[str, Any]) -> Windows:
    """The windows of the unsharded operator."""
    names = "stride", "padding", "dilation"
    return Windows.of(tuple(x[2:]), tuple(weight[2:]), *(attributes[name] for name in names))


@convolution.reads
def _(attributes, inputs, outputs):
    windows = _global(inputs[0].global_shape, inputs[1].global_shape, attributes)
    return windows.cells_read(inputs[0], outputs[0]), inputs[1]


@convolution.localize
def _(attributes, inputs, outputs):
    windows = _global(inputs[0].global_shape, inputs[1].global_shape, attributes)
    return {**attributes, "padding": windows.local_padding(inputs[0], outputs[0])}


convolution.flops = lambda n, g, o, c, y0, y1, y2, p0, p1, p2: 2 * n * g * o * c * y0 * y1 * y2 * p0 * p1 * p2


@convolution.gradient
def _(grad, x, weight, *, stride, padding, dilation, groups):
    where = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (
        convolution_input_gradient(grad, weight, shape=tuple(x.shape), **where),
        convolution_weight_gradient(grad, x, shape=tuple(weight.shape), **where),
    )


def _check_windows(grad: tuple[int, ...], windows: Windows, channels: int) -> None:
    if tuple(grad[1:]) != (channels, *windows.counts):
        raise RuleError(f"the gradient's shape {list(grad)} should be {[grad[0], channels, *windows.counts]}")


def _input_gradient_rule(
    grad: tuple[int, ...], weight: tuple[int, ...], *,
    shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int,
) -> tuple[str, dict[str, int]]:  # fmt: skip
    _check_shapes(shape, weight, groups)
    windows = Windows.of(tuple(shape[2:]), weight[2:], stride, padding, dilation).check()
    _check_windows(grad, windows, weight[0])
    size, kernel, count, sizes = windows.terms()
    return f"n (g o+) {count}, (g o+) c {kernel} -> n (g c) {size}", {"g": groups, **sizes}


@operator(_input_gradient_rule, linear="each", dtype=one_type)
def convolution_input_gradient(xp, grad, weight, *, shape, stride=1, padding=0, dilation=1, groups=1):
    """Gradient of `convolution` for its input of `shape`, which is also the transposed convolution of `grad`."""
    if not grad.size or not weight.size:
        return xp.zeros((grad.shape[0], *shape[1:]), grad.dtype)
    windows = Windows.of(tuple(shape[2:]), weight.shape[2:], stride, padding, dilation)
    groups = shape[1] // weight.shape[1]
    cells = grad.reshape(grad.shape[0], groups, weight.shape[0] // groups, math.prod(windows.counts))
    columns = xp.matmul(_matrix(weight, groups).swapaxes(-1, -2), cells)
    columns = columns.reshape(
        grad.shape[0], groups, weight.shape[1], math.prod(windows.kernel), math.prod(windows.counts)
    )
    return windows.scatter(xp, columns).reshape(grad.shape[0], *shape[1:])


@convolution_input_gradient.reads
def _(attributes, inputs, outputs):
    windows = _global(attributes["shape"], inputs[1].global_shape, attributes)
    return windows.windows_read(inputs[0], outputs[0]), inputs[1]


@convolution_input_gradient.localize
def _(attributes, inputs, outputs):
    windows = _global(attributes["shape"], inputs[1].global_shape, attributes)
    return {**attributes, "shape": outputs[0].shape, "padding": windows.local_padding(outputs[0], inputs[0])}


convolution_input_gradient.flops = convolution.flops


@convolution_input_gradient.gradient
def _(grad, cells, weight, *, shape, stride, padding, dilation, groups):
    where = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return (
        convolution(grad, weight, **where),
        convolution_weight_gradient(cells, grad, shape=tuple(weight.shape), **where),
    )


def _weight_gradient_rule(
    grad: tuple[int, ...], x: tuple[int, ...], *,
    shape: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int,
) -> tuple[str, dict[str, int]]:  # fmt: skip
    _check_shapes(x, shape, groups)
    windows = Windows.of(x[2:], tuple(shape[2:]), stride, padding, dilation).check()
    _check_windows(grad, windows, shape[0])
    size, kernel, count, sizes = windows.terms(window="+")
    return f"n+ (g o) {count}, n+ (g c) {size} -> (g o) c {kernel}", {"g": groups, **sizes}


@operator(_weight_gradient_rule, linear="each", dtype=one_type)
def convolution_weight_gradient(xp, grad, x, *, shape, stride=1, padding=0, dilation=1, groups=1):
    """Gradient of `convolution` for its weight of `shape`: grad (n, o, *windows), x (n, c, *spatial)."""
    if not grad.size or not x.size or not math.prod(shape):
        return xp.zeros(shape, grad.dtype)
    windows = Windows.of(x.shape[2:], tuple(shape[2:]), stride, padding, dilation)
    groups = x.shape[1] // shape[1]
    n, outputs, count = x.shape[0], shape[0] // groups, math.prod(windows.counts)
    columns = windows.gather(xp, _grouped(x, groups)).reshape(n, groups, math.prod(shape[1:]), count)
    cells = grad.reshape(n, groups, outputs, count)
    if n * groups * outputs * math.prod(shape[1:]) <= columns.size:
        return xp.matmul(cells, columns.swapaxes(-1, -2)).sum(axis=0).reshape(shape)
    # Many samples of few windows: one long product per group instead of a partial weight per sample.
    cells = cells.transpose(1, 2, 0, 3).reshape(groups, outputs, n * count)
    columns = columns.transpose(1, 0, 3, 2).reshape(groups, n * count, math.prod(shape[1:]))
    return xp.matmul(cells, columns).reshape(shape)


@convolution_weight_gradient.reads
def _(attributes, inputs, outputs):
    windows = _global(inputs[1].global_shape, attributes["shape"], attributes)
    return inputs[0], windows.cells_read(inputs[1], inputs[0])


@convolution_weight_gradient.localize
def _(attributes, inputs, outputs):
    windows = _global(inputs[1].global_shape, attributes["shape"], attributes)
    return {**attributes, "shape": outputs[0].shape, "padding": windows.local_padding(inputs[1], inputs[0])}


convolution_weight_gradient.flops = convolution.flops


@convolution_weight_gradient.gradient
def _(grad, cells, x, *, shape, stride, padding, dilation, groups):
    where = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return convolution(x, grad, **where), convolution_input_gradient(cells, grad, shape=tuple(x.shape), **where)


def _forward(dimensions: int, x: Any, weight: Any, attributes: dict[str, Any]) -> Any:
    if len(x.shape) != dimensions + 2:
        raise GraphError(
            f"conv{dimensions}d takes (n, channels and {dimensions} spatial dimensions), got shape {list(x.shape)}."
        )
    return convolution(x, weight, **attributes)


def conv1d(x: Any, weight: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """`convolution` of x (n, c, l) with weight (o, c / groups, k)."""
    return _forward(1, x, weight, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})


def conv2d(x: Any, weight: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """`convolution` of x (n, c, h, w) with weight (o, c / groups, kh, kw)."""
    return _forward(2, x, weight, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})


def conv3d(x: Any, weight: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    """`convolution` of x (n, c, d, h, w) with weight (o, c / groups, kd, kh, kw)."""
    return _forward(3, x, weight, {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups})


def conv_transpose(
    x: Any, weight: Any, *,
    stride: Any = 1, padding: Any = 0, output_padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    """Transposed convolution: x (n, c, *spatial), weight (c, o / groups, *kernel), as in PyTorch.

    A spatial size becomes (size - 1) * stride - 2 * padding + dilation * (kernel - 1) + output_padding + 1.
    """
    count = len(x.shape) - 2
    wide = [
        per_dimension(value, count, what)
        for what, value in (
            ("stride", stride), ("padding", padding), ("output_padding", output_padding), ("dilation", dilation)
        )
    ]  # fmt: skip
    spatial = tuple(
        (size - 1) * step - 2 * pad + spread * (kernel - 1) + extra + 1
        for size, kernel, step, pad, extra, spread in zip(x.shape[2:], weight.shape[2:], *wide)
    )
    return convolution_input_gradient(
        x, weight, shape=(x.shape[0], weight.shape[1] * groups, *spatial),
        stride=stride, padding=padding, dilation=dilation, groups=groups,
    )  # fmt: skip


for _x, _w, _y, _where in (
    ("f32[1,2,4,4]", "f32[3,2,2,2]", "f32[1,3,2,2]", {"stride": 2}),
    ("f32[2,3,4,3]", "f32[4,3,2,2]", "f32[2,4,3,2]", {}),
    ("f32[3,4,5]", "f32[6,2,3]", "f32[3,6,3]", {"stride": 2, "padding": 1, "groups": 2}),
    ("f32[1,3,5]", "f32[3,1,2]", "f32[1,3,3]", {"dilation": 2, "groups": 3}),
    ("f32[1,1,7,3]", "f32[2,1,3,2]", "f32[1,2,7,4]", {"padding": 1}),
    ("f32[1,2,8]", "f32[1,2,2]", "f32[1,1,3]", {"stride": 3}),
    ("f32[1,1,5]", "f32[1,1,4]", "f32[1,1,7]", {"padding": ((3, 2),)}),
    ("f32[2,1,2,2,2]", "f32[5,1,1,2,2]", "f32[2,5,2,1,1]", {"stride": (1, 2, 2)}),
):
    convolution.case(_x, _w, **_where)
    convolution_input_gradient.case(_y, _w, shape=tuple(map(int, _x[4:-1].split(","))), **_where)
    convolution_weight_gradient.case(_y, _x, shape=tuple(map(int, _w[4:-1].split(","))), **_where)
convolution.reasons["S([2-9]), B -> P"] = SUMMED
convolution_input_gradient.reasons.update({"B, B -> S([2-9])": SLICED, "S([2-9]), B -> P": SUMMED})
convolution_weight_gradient.reasons["B, S([2-9]) -> P"] = SUMMED
