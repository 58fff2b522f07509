"""Collectives as changes of layout: what every rank holds before, and what it must hold after, for any communicator.

Both sides come from `sbp.shards.scatter` of one global tensor, so nothing here repeats how a communicator works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy

from sbp.layout import Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.shards import scatter

SHAPES = ((6, 4), (5, 7), (1, 2), (0, 3), (3, 0), (4, 5, 3))
CHANGES = (
    ("S(0)", "B"), ("S(1)", "B"), ("P", "B"), ("P(max)", "B"), ("P(min)", "B"), ("P", "S(0)"), ("P", "S(1)"),
    ("P(max)", "S(1)"), ("P(min)", "S(0)"), ("S(0)", "S(1)"), ("S(1)", "S(0)"),
)  # fmt: skip
LARGE = (70, 61)  # more bytes than a small all-reduce gathers whole


@dataclass(frozen=True)
class Collective:
    """`call(communicator, {rank: array})` must turn `before` into `after`, both in rank order."""

    name: str
    before: list[Any]
    after: list[Any]
    call: Callable[[Any, dict[int, Any]], dict[int, Any]]


def collectives(mesh: Mesh) -> Iterator[Collective]:
    """Every change of one mesh axis, beside every neighbour on the other axes, for even, uneven and empty shards."""
    random = numpy.random.default_rng(7)
    neighbours = ("B", "S(0)", "S(1)") if mesh.ndim > 1 else ("B",)
    for axis in range(mesh.ndim):
        for neighbour in neighbours:
            for source, target in CHANGES:
                if axis < mesh.ndim - 1 and neighbour in (source, target):
                    continue  # the inner axis of a nested split lies within the outer one's chunks
                for shape in (*SHAPES, LARGE) if (source, target, neighbour) == ("P", "B", "B") else SHAPES:
                    base = Layout.parse([neighbour] * mesh.ndim)
                    before = base.replace(axis, Layout.parse(source)[0])
                    after = base.replace(axis, Layout.parse(target)[0])
                    yield change(mesh, axis, before, after, shape, "float64", random)
    for dtype in ("float32", "int64", "int32", "uint8", "bool"):
        source = "P(max)" if dtype == "bool" else "P"
        for target in ("B", "S(0)"):
            before, after = (Layout.parse([text] + ["B"] * (mesh.ndim - 1)) for text in (source, target))
            yield change(mesh, 0, before, after, (5, 3), dtype, random)
        before, after = (Layout.parse([text] + ["B"] * (mesh.ndim - 1)) for text in ("S(0)", "S(1)"))
        yield change(mesh, 0, before, after, (5, 3), dtype, random)


def change(mesh: Mesh, axis: int, before: Layout, after: Layout, shape, dtype: str, random) -> Collective:
    """One case."""
    # Whole numbers, so that sums are exact in any order.
    whole = random.integers(0, 2 if dtype == "bool" else 20, shape).astype(dtype)
    source, target = before[axis], after[axis]
    if isinstance(source, Partial) and dtype.startswith("float"):
        parts = [_rounded(part, source.reduce) for part in scatter(whole, before, mesh, numpy, random)]
        whole = _reassembled(parts, before, mesh, shape, dtype)
    else:
        parts = scatter(whole, before, mesh, numpy, random)
    results = scatter(whole, after, mesh, numpy, random)
    groups = mesh.groups(axis)

    def sizes(layout: Layout, dimension: int):
        shards = [layout.shard(shape, mesh.shape, place) for place in mesh.coordinates()]
        return tuple(tuple(shards[rank].shape[dimension] for rank in group) for group in groups)

    def call(communicator, arrays):
        if isinstance(source, Partial) and isinstance(target, Split):
            made = sizes(after, target.axis)
            return communicator.reduce_scatter(arrays, groups, target.axis, made, source.reduce)
        if isinstance(source, Partial):
            return communicator.all_reduce(arrays, groups, source.reduce)
        if isinstance(target, Split):
            return communicator.all_to_all(
                arrays, groups, source.axis, sizes(before, source.axis), target.axis, sizes(after, target.axis)
            )
        return communicator.all_gather(arrays, groups, source.axis, sizes(before, source.axis))

    return Collective(f"{dtype}{list(shape)} {before} -> {after} on {mesh}", parts, results, call)


def _rounded(part, reduce):
    return numpy.where(numpy.isfinite(part), numpy.rint(numpy.where(numpy.isfinite(part), part, 0) * 8), part)


def _reassembled(parts, layout, mesh, shape, dtype):
    from sbp.shards import gather

    return gather(parts, layout, mesh, shape).astype(dtype)


def check(communicator: Any, mesh: Mesh, to_array: Callable[[Any], Any] = numpy.array, collective=None) -> int:
    """Run every case on a communicator's local ranks; returns how many, raises AssertionError with the case's name."""
    count = 0
    for case in collectives(mesh) if collective is None else (collective,):
        arrays = {rank: to_array(case.before[rank]) for rank in communicator.ranks}
        made = case.call(communicator, arrays)
        assert sorted(made) == sorted(communicator.ranks), case.name
        for rank, array in made.items():
            expected = case.after[rank]
            assert array.shape == expected.shape and array.dtype == expected.dtype, f"{case.name}, rank {rank}"
            assert numpy.array_equal(numpy.asarray(array), expected), f"{case.name}, rank {rank}"
            assert numpy.array_equal(numpy.asarray(arrays[rank]), case.before[rank]), f"{case.name}: wrote to its input"
        count += 1
    return count


def check_point_to_point(communicator: Any, to_array: Callable[[Any], Any] = numpy.array) -> None:
    """Broadcast and permute, among them empty arrays, arrays of no dimensions, a ring, and ranks that take no part."""
    size = communicator.size
    everyone = (tuple(range(size)),)
    for shape in ((3, 2), (0, 2), ()):
        arrays = {rank: to_array(numpy.full(shape, float(rank))) for rank in communicator.ranks}
        for root in range(size):
            for array in communicator.broadcast(arrays, everyone, root).values():
                assert array.shape == shape and (numpy.asarray(array) == root).all()
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    arrays = {rank: to_array(numpy.full((rank + 1,), rank, "int32")) for rank in communicator.ranks}
    shapes = {target: (source + 1,) for source, target in ring}
    made = communicator.permute(arrays, ring, shapes, "int32")
    assert sorted(made) == sorted(communicator.ranks)
    for target, array in made.items():
        source = (target - 1) % size
        assert array.shape == (source + 1,) and (numpy.asarray(array) == source).all()
    if size > 1:
        made = communicator.permute(arrays, [(size - 1, 0)], {0: (size,)}, "int32")
        assert sorted(made) == [rank for rank in communicator.ranks if rank == 0]
        assert all((numpy.asarray(array) == size - 1).all() for array in made.values())
    if size > 2:  # groups that no mesh axis has, of some ranks only and of different sizes
        arrays = {rank: to_array(numpy.full((3,), float(rank))) for rank in communicator.ranks}
        for groups in (((0, size - 1),), ((1,), (0, *range(2, size)))):
            made = communicator.all_reduce(arrays, groups, "sum")
            expected = {rank: sum(group) for group in groups for rank in group}
            assert sorted(made) == [rank for rank in communicator.ranks if rank in expected]
            assert all((numpy.asarray(array) == expected[rank]).all() for rank, array in made.items())
    communicator.barrier()
