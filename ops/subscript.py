"""Python's x[key] in operators: what is cut out of a tensor, and a tensor with something else in that place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from sbp.dtype import holds, is_floating, numpy_name
from sbp.errors import RuleError
from sbp.ops.comparison import masked_fill, where
from sbp.ops.constant import full
from sbp.ops.embedding import index_select
from sbp.ops.order import flip, scatter
from sbp.ops.slicing import slice_, slice_backward
from sbp.ops.views import expand, normal_axis, reshape


@dataclass(frozen=True, slots=True)
class _Cut:
    """A box of a tensor, the dimensions turned around in it, and the shape in which it is given."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...]
    turned: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> tuple[int, ...]:
        """The shape of the box itself."""
        return tuple(len(range(*bound)) for bound in zip(self.starts, self.stops, self.steps))


def take(x: Any, key: Any) -> Any:
    """x[key]: whole numbers, slices (also backwards), `None` and `...` as in NumPy; or whole numbers in a list or
    tensor for one dimension, beside whole slices.

    Raises
    ------
    RuleError
        Too many indices, one outside its dimension, or a kind of index whose result's shape depends on the data.
    """
    listed = _listed(x, key)
    if listed is not None:
        axis, index = listed
        return index_select(x, index, axis=axis)
    cut = _cut(x, key)
    if cut.box != tuple(x.shape) or any(step != 1 for step in cut.steps):
        x = slice_(x, starts=cut.starts, stops=cut.stops, steps=cut.steps)
    if cut.turned:
        x = flip(x, axis=cut.turned)
    return x if tuple(x.shape) == cut.shape else reshape(x, shape=cut.shape)


def put(x: Any, key: Any, value: Any) -> Any:
    """x with x[key] = value, as a new tensor; `value` is a number, or a tensor of the shape of x[key] or one that
    broadcasts to it. Places in a list or tensor must differ.
    """
    listed = _listed(x, key)
    if listed is not None:
        return _put_listed(x, *listed, value)
    cut = _cut(x, key)
    value = _written(x, value, cut.shape)
    place = {"shape": tuple(x.shape), "starts": cut.starts, "stops": cut.stops, "steps": cut.steps}
    mask = slice_backward(full(shape=cut.box, value=True, dtype="bool"), **place)
    if isinstance(value, (int, float)):
        return masked_fill(x, mask, value=value)
    wide = value if tuple(value.shape) == cut.shape else expand(value, shape=cut.shape)
    wide = wide if cut.shape == cut.box else reshape(wide, shape=cut.box)
    if cut.turned:
        wide = flip(wide, axis=cut.turned)
    return where(mask, slice_backward(wide, **place), x)


def _written(x: Any, value: Any, shape: tuple[int, ...]) -> Any:
    """What is to be written: a number, or a tensor or array that broadcasts to the place. Lists take x's type."""
    if isinstance(value, (int, float)):
        if not holds(x.dtype, value):
            raise RuleError(f"cannot write {value} into the integers {x!r}; cast them to a floating type first")
        return value
    if hasattr(value, "__sbp_apply__"):
        return value
    try:
        array = numpy.asarray(value)
        numpy.broadcast_to(array, shape)
    except ValueError as error:
        raise RuleError(f"cannot write {value!r} where {list(shape)} is the shape: {error}") from None
    if array.dtype.kind not in "fiub":
        raise RuleError(f"cannot write {value!r}; give a number, an array of numbers, or a tensor")
    listed = isinstance(value, (list, tuple)) and (is_floating(x.dtype) or array.dtype.kind in "iu")
    return array.astype(numpy_name(x.dtype)) if listed else array


def _put_listed(x: Any, axis: int, index: Any, value: Any) -> Any:
    if len(index.shape) != 1:
        raise RuleError(f"places to write are numbers in one dimension, got the shape {list(index.shape)}")
    shape = tuple(index.shape[0] if k == axis else size for k, size in enumerate(x.shape))
    places = reshape(index, shape=tuple(index.shape[0] if k == axis else 1 for k in range(len(shape))))
    value = _written(x, value, shape)
    source = full(shape=shape, value=value, dtype=x.dtype) if isinstance(value, (int, float)) else value
    source = source if tuple(source.shape) == shape else expand(source, shape=shape)
    return scatter(x, expand(places, shape=shape), source, axis=axis)


def _listed(x: Any, key: Any) -> tuple[int, Any] | None:
    """(dimension, index) if one index is a list, an array or a tensor, and the others leave their dimensions whole."""
    keys = key if isinstance(key, tuple) else (key,)
    found = [at for at, item in enumerate(keys) if isinstance(item, list) or getattr(item, "shape", ()) != ()]
    if not found:
        return None
    at = found[0]
    others = [item for number, item in enumerate(keys) if number != at]
    if len(found) > 1 or any(item is not Ellipsis and item != slice(None) for item in others):
        raise RuleError("a list or tensor of indices stands alone beside whole slices; index one dimension at a time")
    from_end = any(item is Ellipsis for item in keys[:at])
    axis = normal_axis(at - len(keys) if from_end else at, len(x.shape))
    index = keys[at]
    if isinstance(index, list):
        index = numpy.asarray(index) if index else numpy.zeros(0, "int64")
    if str(getattr(index, "dtype", "")).startswith("bool"):
        raise RuleError("the shape of x[mask] depends on the data; use where or masked_fill, which keep the shape")
    if not hasattr(index, "__sbp_apply__"):
        size = x.shape[axis]
        if index.size and (index.min() < -size or index.max() >= size):
            raise RuleError(f"indices {index.tolist()} reach outside dimension {axis} of {list(x.shape)}")
        index = index + size * (index < 0)
    return axis, index


def _cut(x: Any, key: Any) -> _Cut:
    shape = tuple(x.shape)
    bounds: list[tuple[int, int, int]] = []
    turned: list[int] = []
    final: list[int] = []
    for item in _one_per_dimension(key, shape):
        axis = len(bounds)
        if item is None:
            final.append(1)
        elif isinstance(item, slice):
            try:
                start, stop, step = item.indices(shape[axis])
            except (TypeError, ValueError) as error:
                raise RuleError(f"cannot index dimension {axis} of {list(shape)} with {item!r}: {error}") from None
            count = len(range(start, stop, step))
            if step < 0:
                start, stop = (start + step * (count - 1), start + 1) if count else (0, 0)
                turned.append(axis)
            bounds.append((start, max(start, stop), abs(step)))
            final.append(count)
        else:
            place = _number(item)
            if not -shape[axis] <= place < shape[axis]:
                raise RuleError(f"index {place} is outside dimension {axis} of {list(shape)}")
            bounds.append((place % shape[axis], place % shape[axis] + 1, 1))
    starts, stops, steps = zip(*bounds) if bounds else ((), (), ())
    return _Cut(starts, stops, steps, tuple(turned), tuple(final))


def _one_per_dimension(key: Any, shape: tuple[int, ...]) -> list[Any]:
    """The index of every dimension, and None where a new one stands."""
    keys = list(key) if isinstance(key, tuple) else [key]
    used = sum(item is not None and item is not Ellipsis for item in keys)
    if used > len(shape):
        raise RuleError(f"{used} indices for the {len(shape)} dimensions of {list(shape)}")
    ellipses = [at for at, item in enumerate(keys) if item is Ellipsis]
    if len(ellipses) > 1:
        raise RuleError("an index holds '...' once at most")
    at = ellipses[0] if ellipses else len(keys)
    return [*keys[:at], *[slice(None)] * (len(shape) - used), *keys[at + 1 :]]


def _number(item: Any) -> int:
    if isinstance(item, bool) or not hasattr(item, "__index__"):
        raise RuleError(
            f"cannot index with {item!r}; use whole numbers, slices, None, '...' or a list of whole numbers"
        )
    return item.__index__()
