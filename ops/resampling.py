"""Fixed linear maps along one dimension: interpolation, unequal averages, and padding by reflection or repetition.

Every element of the result is a weighted sum of few elements of the input, at places that follow from sizes alone. So
the dimension splits on both sides: a split input gives a part of every sum, a split result is computed from the whole.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from sbp.dtype import is_floating
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.order import repeat_interleave
from sbp.ops.precision import widen
from sbp.ops.views import normal_axis

_SELECTING = ("nearest", "nearest-exact", "reflect", "replicate", "circular")
_WEIGHING = ("linear", "aligned", "cubic", "cubic-aligned", "mean")
_CUBIC = -0.75  # Keys' parameter, as PyTorch chooses it


def taps(
    mode: str, length: int, size: int, ratio: float | None, before: int, rows: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Places in the input (rows, taps) and their weights (rows, taps), for some rows of a result of `size`.

    Places may repeat, those beyond the input's `length` have weight zero.
    """
    if mode in ("reflect", "replicate", "circular"):
        place = rows - before
        if mode == "reflect":
            place = length - 1 - numpy.abs(length - 1 - numpy.abs(place))
        else:
            place = numpy.clip(place, 0, length - 1) if mode == "replicate" else place % length
        return place[:, None], numpy.ones((len(rows), 1))
    if mode in ("nearest", "nearest-exact"):
        if ratio is None:  # exactly, in whole numbers
            place = rows * length // size if mode == "nearest" else (2 * rows + 1) * length // (2 * size)
        else:
            place = numpy.floor((rows + (0.5 if mode == "nearest-exact" else 0)) * ratio).astype(numpy.int64)
        return numpy.minimum(place, length - 1)[:, None], numpy.ones((len(rows), 1))
    if mode == "mean":
        first, end = rows * length // size, -(-(rows + 1) * length // size)
        width = int((end - first).max(initial=1))
        place = first[:, None] + numpy.arange(width)
        return place, (place < end[:, None]) / (end - first)[:, None]
    if mode.endswith("aligned"):
        at = rows * ((length - 1) / (size - 1) if size > 1 else 0.0)
    else:
        at = (rows + 0.5) * (length / size if ratio is None else ratio) - 0.5
    if mode in ("linear", "aligned"):
        at = numpy.maximum(at, 0)
        place = numpy.minimum(numpy.floor(at).astype(numpy.int64), length - 1)
        share = numpy.minimum(at - place, 1.0)
        both = numpy.stack([place, numpy.minimum(place + 1, length - 1)], axis=1)
        return both, numpy.stack([1 - share, share], axis=1)
    place = numpy.floor(at).astype(numpy.int64)
    places = place[:, None] + numpy.arange(-1, 3)
    distance = numpy.abs(at[:, None] - places)
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = _CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return numpy.clip(places, 0, length - 1), numpy.where(distance <= 1, near, far)


def _check(length: int, size: int, mode: str, before: int) -> None:
    if mode not in (*_SELECTING, *_WEIGHING):
        raise RuleError(f"mode must be one of {', '.join((*_SELECTING, *_WEIGHING))}, got {mode!r}")
    if length < 1 or size < 0:
        raise RuleError(f"cannot make {size} elements out of {length}")
    after = size - length - before
    if mode == "reflect" and (max(before, after) >= length or min(before, after) < 0):
        raise RuleError(f"reflects fewer than {length} elements at each end, got {before} and {after}")


def _patterns(rank: int, axis: int, changed: str, made: str) -> str:
    at = normal_axis(axis, rank)
    before = " ".join(f"{changed}+" if number == at else f"d{number}" for number in range(rank))
    return f"{before} -> {' '.join(made if number == at else f'd{number}' for number in range(rank))}"


def _rule(x: tuple[int, ...], *, axis: int, size: int, mode: str, before: int, **_: Any) -> tuple[str, dict[str, int]]:
    _check(x[normal_axis(axis, len(x))], size, mode, before)
    return _patterns(len(x), axis, "i", "o"), {"o": size}


def _type(x: TensorType, *, mode: str, **_: Any) -> str:
    if mode in _WEIGHING and not is_floating(x.dtype):
        raise RuleError(f"weighs floating numbers, got {x}; cast it first")
    return x.dtype


def _selects(*_: Any, mode: str, **__: Any) -> str:
    return "all" if mode in _SELECTING else ""


@operator(_rule, linear="all", monotone=_selects, dtype=_type)
def resample(
    xp, x, *, axis, size, mode, ratio=None, before=0, start=0, length=None, first=0, total=None
):  # fmt: skip
    """A dimension of another `size`, each element a weighted sum of some elements that `mode` says.

    "nearest", "nearest-exact", "linear", "cubic" (and "aligned", "cubic-aligned", whose ends meet those of the input)
    interpolate; "mean" averages over windows that cover the dimension; "reflect", "replicate" and "circular" add
    `before` elements in front and the rest behind. `ratio` is the distance of neighbours, if it is not length / size.
    The others are set for shards: x begins at `start` of `length`, the result at `first` of `total`.
    """
    places, weights = taps(
        mode,
        x.shape[axis] if length is None else length,
        size if total is None else total,
        ratio,
        before,
        numpy.arange(first, first + size),
    )
    moved = xp.moveaxis(x, axis, -1)
    held = moved.shape[-1]
    if not held or not size or not x.size:
        return xp.moveaxis(xp.zeros((*moved.shape[:-1], size), x.dtype), -1, axis)
    local = places - start
    inside = (local >= 0) & (local < held)
    local = numpy.clip(local, 0, held - 1)
    if mode in _SELECTING:
        out = xp.where(xp.asarray(inside[:, 0]), moved[..., xp.asarray(local[:, 0])], xp.zeros((), x.dtype))
        return xp.moveaxis(out, -1, axis)
    moved = widen(moved)
    out = xp.zeros((*moved.shape[:-1], size), moved.dtype)
    for tap in range(places.shape[1]):
        factor = xp.asarray((weights[:, tap] * inside[:, tap]).astype(moved.dtype))
        out += moved[..., xp.asarray(local[:, tap])] * factor
    return xp.moveaxis(out.astype(x.dtype, copy=False), -1, axis)


@resample.localize
def _(attributes, inputs, outputs):
    held, made, axis = inputs[0], outputs[0], attributes["axis"]
    return {
        **attributes,
        "size": made.shape[axis],
        "start": held.offset[axis],
        "length": held.global_shape[axis],
        "first": made.offset[axis],
        "total": made.global_shape[axis],
    }


@resample.gradient
def _(grad, x, *, axis, size, mode, ratio, before):
    return resample_backward(grad, axis=axis, size=x.shape[axis], mode=mode, ratio=ratio, before=before)


def _backward_rule(grad: tuple[int, ...], *, axis: int, size: int, mode: str, before: int, **_: Any):
    _check(size, grad[normal_axis(axis, len(grad))], mode, before)
    return _patterns(len(grad), axis, "o", "i"), {"i": size}


@operator(_backward_rule, linear="all", dtype=_type)
def resample_backward(
    xp, grad, *, axis, size, mode, ratio=None, before=0, start=0, length=None, first=0, total=None
):  # fmt: skip
    """The adjoint of `resample` to an input of `size`; `grad` begins at `first` of `total`, the result at `start`."""
    moved = widen(xp.moveaxis(grad, axis, -1))
    count = moved.shape[-1]
    places, weights = taps(
        mode,
        size if length is None else length,
        count if total is None else total,
        ratio,
        before,
        numpy.arange(first, first + count),
    )
    local = places - start
    inside = (local >= 0) & (local < size)
    out = xp.zeros((*moved.shape[:-1], size), moved.dtype)
    if out.size and moved.size:
        rows = out.reshape(-1, size)
        flat = moved.reshape(-1, count)
        for tap in range(places.shape[1]):
            kept = numpy.flatnonzero(inside[:, tap])
            part = flat[:, xp.asarray(kept)] * xp.asarray(weights[kept, tap].astype(moved.dtype))
            xp.add.at(rows, (slice(None), xp.asarray(local[kept, tap])), part)
        out = rows.reshape(out.shape)
    return xp.moveaxis(out.astype(grad.dtype, copy=False), -1, axis)


@resample_backward.localize
def _(attributes, inputs, outputs):
    held, made, axis = inputs[0], outputs[0], attributes["axis"]
    return {
        **attributes,
        "size": made.shape[axis],
        "start": made.offset[axis],
        "length": made.global_shape[axis],
        "first": held.offset[axis],
        "total": held.global_shape[axis],
    }


@resample_backward.gradient
def _(grad, x, *, axis, size, mode, ratio, before):
    return resample(grad, axis=axis, size=x.shape[axis], mode=mode, ratio=ratio, before=before)


_TAPS = {"linear": 2, "aligned": 2, "cubic": 4, "cubic-aligned": 4}


def _flops(mode: str, elements: int, elements_out: int) -> float:
    return 2 * elements if mode == "mean" else 2 * _TAPS[mode] * elements_out if mode in _TAPS else 0


resample.flops = resample_backward.flops = _flops

_CASES: tuple[tuple[tuple[int, ...], int, int, dict[str, Any]], ...] = (
    ((4, 6), 1, 9, {"mode": "linear"}),
    ((5, 3), 0, 7, {"mode": "aligned"}),
    ((2, 5, 3), 1, 8, {"mode": "nearest"}),
    ((4, 7), -1, 3, {"mode": "mean"}),
    ((5, 4), 0, 9, {"mode": "cubic", "ratio": 0.5}),
    ((3, 5), 1, 9, {"mode": "reflect", "before": 3}),
    ((1, 3), 1, 5, {"mode": "replicate", "before": 1}),
    ((3, 4), 0, 5, {"mode": "circular", "before": 1}),
)
for _shape, _axis, _size, _attributes in _CASES:
    resample.case(f"f32[{','.join(map(str, _shape))}]", axis=_axis, size=_size, **_attributes)
    _made = list(_shape)
    _made[_axis] = _size
    resample_backward.case(f"f32[{','.join(map(str, _made))}]", axis=_axis, size=_shape[_axis], **_attributes)
resample.case("i64[5,2]", axis=0, size=7, mode="nearest-exact")
resample.reasons = resample_backward.reasons = {
    "S(*) -> S(*)": "some places happen to fall on the borders of shards",
    "P(m* -> P(m*": "would need to know that no two places meet",
}

# -- put together from the ones above ----------------------------------------------------------------------------------

_MODES = {
    "nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "linear", "bilinear": "linear",
    "trilinear": "linear", "bicubic": "cubic", "area": "mean",
}  # fmt: skip
_DIMENSIONS = {"linear": 1, "bilinear": 2, "bicubic": 2, "trilinear": 3}


def interpolate(
    x: Any, size: Any = None, scale_factor: Any = None, mode: str = "nearest", align_corners: bool = False
) -> Any:
    """x (n, c, *spatial) with another spatial size, as torch.nn.functional.interpolate.

    Parameters
    ----------
    size, scale_factor
        One of them: the new spatial size, or what to multiply it by; a number or one per dimension.
    mode
        "nearest", "nearest-exact", "area", or "linear", "bilinear", "trilinear", "bicubic" for 1, 2, 3, 2 dimensions.
    align_corners
        Whether the corners of both images are the same places (otherwise their edges are).
    """
    spatial = x.shape[2:]
    count = len(spatial)
    if mode not in _MODES or _DIMENSIONS.get(mode, count) != count or not count:
        raise RuleError(f"interpolate: mode {mode!r} does not fit shape {list(x.shape)}; known are {', '.join(_MODES)}")
    if (size is None) == (scale_factor is None):
        raise RuleError("interpolate: give either size or scale_factor")
    if align_corners and mode not in _DIMENSIONS:
        raise RuleError(f"interpolate: align_corners has no meaning for mode {mode!r}")

    def exact(length: int) -> tuple[int, ...]:
        """Sizes at which PyTorch copies pixels, whatever the factor was."""
        if mode == "nearest" and count == 2:
            return length, 2 * length
        return (length,) if _MODES[mode] == "linear" else ()

    ratios: list[float | None] = [None] * count
    if size is None:
        factors = (scale_factor,) * count if isinstance(scale_factor, (int, float)) else tuple(scale_factor)
        size = tuple(math.floor(length * factor) for length, factor in zip(spatial, factors))
        if mode != "area":
            ratios = [None if made == length * factor or made in exact(length) else 1 / factor
                      for length, made, factor in zip(spatial, size, factors)]  # fmt: skip
    sizes = (size,) * count if isinstance(size, int) else tuple(size)
    if len(sizes) != count or min(sizes) < 1:
        raise RuleError(f"interpolate: cannot make spatial size {list(sizes)} out of {list(spatial)}")
    way = _MODES[mode] if not align_corners else {"linear": "aligned", "cubic": "cubic-aligned"}[_MODES[mode]]
    for number, (length, made, ratio) in enumerate(zip(spatial, sizes, ratios)):
        if made == length and ratio is None:
            continue
        if way in ("nearest", "nearest-exact") and made % length == 0 and ratio is None:
            x = repeat_interleave(x, made // length, number + 2)  # whose split dimension stays split
        else:
            x = resample(x, axis=number + 2, size=made, mode=way, ratio=ratio)
    return x


def _padded(x: Any, padding: Any, mode: str) -> Any:
    pairs = list(zip(padding[::2], padding[1::2]))
    if len(padding) % 2 or len(pairs) > len(x.shape):
        raise RuleError(f"padding {list(padding)} needs two numbers per dimension, the last dimension first")
    for number, (before, after) in enumerate(pairs):
        axis = len(x.shape) - 1 - number
        if before or after:
            x = resample(x, axis=axis, size=x.shape[axis] + before + after, mode=mode, before=before)
    return x


def reflection_pad(x: Any, padding: tuple[int, ...]) -> Any:
    """The last dimensions continued by their mirror image; `padding` is (before, after) pairs, the last one first."""
    return _padded(x, padding, "reflect")


def replication_pad(x: Any, padding: tuple[int, ...]) -> Any:
    """The last dimensions continued by their outermost elements; `padding` as for `reflection_pad`."""
    return _padded(x, padding, "replicate")


def circular_pad(x: Any, padding: tuple[int, ...]) -> Any:
    """The last dimensions continued periodically; `padding` as for `reflection_pad`."""
    return _padded(x, padding, "circular")
