"""Boxes of a tensor at places that data says: cut out and written, put together from other operators.

A place is held inside the tensor, as XLA's dynamic-slice and dynamic-update-slice hold it: a box of size n begins at
most n elements before the end of a dimension, whatever number was asked for. That is said in global numbers, so that
no layout makes it something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.errors import RuleError
from sbp.ops.constant import arange
from sbp.ops.elementwise import add, cast, clamp
from sbp.ops.embedding import index_select
from sbp.ops.order import scatter
from sbp.ops.slicing import narrow
from sbp.ops.views import expand, reshape


def dynamic_slice(x: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The box of `sizes` that begins at `starts`, each a whole number or a scalar tensor of one.

    Raises
    ------
    RuleError
        Not one start and one size per dimension, or a box larger than the tensor.
    """
    _check(x, starts, sizes, "dynamic_slice")
    for axis, (start, size) in enumerate(zip(starts, sizes)):
        if size == x.shape[axis]:
            continue
        last = x.shape[axis] - size
        if isinstance(start, int):
            x = narrow(x, axis, min(max(start, 0), last), size)
        else:
            x = index_select(x, _places(start, size, last), axis=axis)
    return x


def dynamic_update_slice(x: Any, update: Any, starts: Sequence[Any]) -> Any:
    """x with `update`, a tensor of as many dimensions, written where `starts` says; errors as of `dynamic_slice`."""
    _check(x, starts, update.shape, "dynamic_update_slice")
    axis = next((at for at, (size, whole) in enumerate(zip(update.shape, x.shape)) if size != whole), None)
    if axis is None:
        return update
    size, last = update.shape[axis], x.shape[axis] - update.shape[axis]
    here = [start if at == axis else 0 for at, start in enumerate(starts)]
    rows = dynamic_slice(x, here, [size if at == axis else whole for at, whole in enumerate(x.shape)])
    rows = dynamic_update_slice(rows, update, starts)
    places = reshape(
        _places(starts[axis], size, last), shape=tuple(size if at == axis else 1 for at in range(len(here)))
    )
    return scatter(x, expand(places, shape=tuple(rows.shape)), rows, axis=axis)


def _places(start: Any, size: int, last: int) -> Any:
    along = arange(size=size, dtype="i64")
    if isinstance(start, int):
        return along + min(max(start, 0), last)
    return add(clamp(cast(reshape(start, shape=(1,)), dtype="i64"), low=0, high=last), along)


def _check(x: Any, starts: Sequence[Any], sizes: Sequence[int], what: str) -> None:
    fits = len(starts) == len(sizes) == len(x.shape) and all(
        0 <= size <= whole for size, whole in zip(sizes, x.shape, strict=True)
    )
    if not fits:
        raise RuleError(
            f"{what}: a box {list(sizes)} with {len(starts)} starts does not lie in the shape {list(x.shape)}; it "
            "takes one start and one size per dimension, none larger than the tensor"
        )
    if any(getattr(start, "shape", ()) not in ((), (1,)) or isinstance(start, (float, str)) for start in starts):
        raise RuleError(f"{what}: a start is a whole number or a scalar tensor of one, got {list(starts)!r}")
