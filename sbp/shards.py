"""From a global array to what every rank holds, and back: the meaning of a layout, in code.

`scatter` and `gather` are inverse to each other for every layout, Partial included. They serve the prover, the
tests and the runtime's way in and out; the runtime's own boxing moves shards between ranks without a global array.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from sbp.errors import LayoutError
from sbp.layout import Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import array_module

REDUCE_FUNCTIONS = {"sum": "add", "max": "maximum", "min": "minimum"}
"""The array function that combines two parts, by the name of the reduction."""


def partial_axes(layout: Layout) -> tuple[int, ...]:
    """The mesh axes along which the layout holds unreduced parts."""
    return tuple(axis for axis, sbp in enumerate(layout) if isinstance(sbp, Partial))


def scatter(array: Any, layout: Layout, mesh: Mesh, xp: Any, rng: Any) -> list[Any]:
    """What every rank holds of `array` under a layout, in rank order, as separate arrays.

    Partial parts are random: those of a sum have mixed signs and are not proportional to one another; of a maximum
    (minimum) the rank that holds it changes from element to element, and the others hold something smaller (larger),
    now and then -inf (inf), as the maximum over an empty shard is.

    Parameters
    ----------
    array
        The global tensor.
    layout, mesh
        Where its pieces go.
    xp
        Array module (NumPy, CuPy).
    rng
        A `numpy.random.Generator`, used for Partial parts only.

    Raises
    ------
    LayoutError
        The layout does not fit the array or the mesh, holds two kinds of Partial, or asks for a sum of booleans.
    """
    layout.check(array.shape, mesh.shape)
    axes = partial_axes(layout)
    reduces = {sbp.reduce for sbp in layout if isinstance(sbp, Partial)}
    if len(reduces) > 1:
        raise LayoutError(
            f"layout {layout} holds parts of a {' and of a '.join(sorted(reduces))}; one kind is allowed."
        )
    sizes = [mesh.shape[axis] for axis in axes]
    count = 1
    for size in sizes:
        count *= size
    parts = [array] if not axes else _parts(array, reduces.pop(), count, xp, rng)
    by_place = dict(zip(product(*map(range, sizes)), parts))
    return [
        by_place[tuple(place[axis] for axis in axes)][layout.shard(array.shape, mesh.shape, place).slices].copy()
        for place in mesh.coordinates()
    ]


def gather(
    parts: Sequence[Any],
    layout: Layout,
    mesh: Mesh,
    global_shape: Sequence[int],
    rtol: float = 0.0,
    what: str = "tensor",
) -> Any:
    """The global array from what every rank holds; the inverse of `scatter`.

    Parameters
    ----------
    parts
        One array per rank, in rank order.
    layout, mesh, global_shape
        What the parts are pieces of.
    rtol
        How far replicas may differ, relative to the largest element; 0 asks for the same bits.
    what
        A name for messages.

    Raises
    ------
    LayoutError
        A part has another shape than the layout says, or ranks that should hold the same differ; the message names
        the ranks.
    """
    layout.check(global_shape, mesh.shape, what)
    if len(parts) != mesh.size:
        raise LayoutError(f"{what}: {mesh} has {mesh.size} ranks, got {len(parts)} parts; give one part per rank.")
    global_shape = tuple(global_shape)
    axes = partial_axes(layout)
    held: dict[tuple[int, ...], dict[tuple, tuple[int, Any]]] = {}
    for rank, (place, part) in enumerate(zip(mesh.coordinates(), parts)):
        shard = layout.shard(global_shape, mesh.shape, place)
        if tuple(part.shape) != shard.shape:
            raise LayoutError(
                f"{what}: rank {rank} at {place} of {mesh} holds shape {list(part.shape)}; layout {layout} of the "
                f"global shape {list(global_shape)} gives it {list(shard.shape)}. Uneven splits follow torch.chunk."
            )
        boxes = held.setdefault(tuple(place[axis] for axis in axes), {})
        other, known = boxes.setdefault((shard.offset, shard.shape), (rank, part))
        if other != rank and not _same(known, part, rtol):
            raise LayoutError(
                f"{what}: ranks {other} and {rank} of {mesh} hold different numbers, but by {layout} they are replicas."
            )
    whole = None
    for boxes in held.values():
        assembled = _empty_like(parts[0], global_shape)
        for (offset, shape), (_, part) in boxes.items():
            assembled[tuple(slice(start, start + size) for start, size in zip(offset, shape))] = part
        if whole is None:
            whole = assembled
        else:
            sbp = layout[axes[0]]
            assert isinstance(sbp, Partial)
            whole = reduce_pair(whole, assembled, sbp.reduce)
    return whole


def global_shape(shapes: Sequence[Sequence[int]], layout: Layout, mesh: Mesh, what: str = "tensor") -> tuple[int, ...]:
    """The shape of the tensor whose pieces have these shapes, in rank order.

    Raises
    ------
    LayoutError
        No tensor has such pieces under the layout; the message names a rank, its shape and the one it should have.
    """
    if len(shapes) != mesh.size or len({len(shape) for shape in shapes}) != 1:
        raise LayoutError(
            f"{what}: {mesh} has {mesh.size} ranks, whose pieces have as many dimensions as the tensor; "
            f"got shapes {', '.join(str(list(shape)) for shape in shapes)}."
        )
    layout.check(shapes[0], mesh.shape, what)
    sizes = list(shapes[0])
    for axis in {sbp.axis for sbp in layout if isinstance(sbp, Split)}:
        apart = [isinstance(sbp, Split) and sbp.axis == axis for sbp in layout]
        sizes[axis] = sum(
            shape[axis]
            for shape, place in zip(shapes, mesh.coordinates())
            if all(at == 0 for at, split in zip(place, apart) if not split)
        )
    for rank, (shape, place) in enumerate(zip(shapes, mesh.coordinates())):
        expected = layout.shard(sizes, mesh.shape, place).shape
        if tuple(shape) != expected:
            raise LayoutError(
                f"{what}: rank {rank} of {mesh} holds shape {list(shape)}; together the pieces are {sizes}, of which "
                f"layout {layout} gives it {list(expected)}. Uneven splits follow torch.chunk: equal pieces, the last "
                "ones smaller or empty."
            )
    return tuple(sizes)


def reduce_pair(x: Any, y: Any, reduce: str) -> Any:
    """Two parts combined by "sum", "max" or "min"."""
    module = array_module([x])
    return getattr(module, REDUCE_FUNCTIONS[reduce])(x, y)


def _same(x: Any, y: Any, rtol: float) -> bool:
    xp = array_module([x])
    if rtol == 0.0 or x.dtype.kind not in "fc":
        return bool(((x == y) | ((x != x) & (y != y))).all())
    scale = float(xp.abs(xp.where(xp.isfinite(x), x, 0)).max()) if x.size else 0.0
    return bool(xp.allclose(x, y, rtol=rtol, atol=rtol * scale, equal_nan=True))


def _empty_like(array: Any, shape: tuple[int, ...]) -> Any:
    return array_module([array]).empty(shape, dtype=array.dtype)


def _parts(array: Any, reduce: str, count: int, xp: Any, rng: Any) -> list[Any]:
    kind = array.dtype.kind
    if reduce == "sum":
        if kind == "b":
            raise LayoutError("booleans have no sum; use P(max) for any and P(min) for all.")
        return _sum_parts(array, count, xp, rng)
    winner = xp.asarray(rng.integers(0, count, array.shape))
    sign = -1 if reduce == "max" else 1
    parts = []
    for index in range(count):
        if kind == "b":
            random = xp.asarray(rng.random(array.shape) < 0.5)
            other = array & random if reduce == "max" else array | random
        elif kind in "iu":
            # Far from the type's limits, since arithmetic on integers at their limit wraps around.
            away = xp.asarray(rng.integers(1, 6, array.shape))
            limits = xp.iinfo(array.dtype)
            other = xp.clip(array.astype("int64") + sign * away, max(limits.min, -(2**62)), min(limits.max, 2**62))
        else:
            other = array + sign * xp.asarray(rng.exponential(1.0, array.shape) + 0.1)
            other = xp.where(xp.asarray(rng.random(array.shape) < 0.1), sign * xp.inf, other)
        parts.append(xp.where(winner == index, array, other).astype(array.dtype))
    return parts


def _sum_parts(array: Any, count: int, xp: Any, rng: Any) -> list[Any]:
    kind = array.dtype.kind
    parts: list[Any] = []
    rest = array.copy()
    for _ in range(count - 1):
        if kind == "u":  # no negative parts, and no wrapping around
            part = xp.asarray(
                rng.integers(0, rest.astype("int64").get() + 1 if hasattr(rest, "get") else rest.astype("int64") + 1)
            )
        elif kind == "i":
            part = xp.asarray(rng.integers(-6, 7, array.shape))
        else:
            part = xp.asarray(rng.standard_normal(array.shape) * 2.0)
        part = part.astype(array.dtype)
        parts.append(part)
        rest = rest - part
    return [*parts, rest]
