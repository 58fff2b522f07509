"""Ways in and out of a sharded program: global arrays to the local ranks' shards, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.errors import PlanError
from sbp.layout import Broadcast, Layout, Partial, Shard, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.physical import Register
from sbp.runtime.boxing import Local, identity
from sbp.shards import gather

REPLICAS_DIFFER = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2}
"""How far replicas of one shard may be apart, relative to the largest element; the order of a sum may differ."""


def place(
    array: numpy.ndarray, register: Register, mesh: Mesh, backend: Backend, ranks: tuple[int, ...], dtype: str
) -> Local:
    """The shards of a global array that the given ranks hold in a register.

    Along a P axis the first rank holds the tensor, for max and min all do, as in the boxing step `fill`.

    Raises
    ------
    PlanError
        The array has another shape than the register's value.
    """
    array = numpy.asarray(array)
    if array.shape != register.type.shape:
        raise PlanError(f"{register.value} is {register.type}, but was given an array of shape {list(array.shape)}.")
    return place_shards(lambda shard: array[shard.slices], register.type, register.layout, mesh, backend, ranks, dtype)


def place_shards(
    read: Callable[[Shard], numpy.ndarray],
    type: TensorType,
    layout: Layout,
    mesh: Mesh,
    backend: Backend,
    ranks: tuple[int, ...],
    dtype: str,
) -> Local:
    """What the given ranks hold of a tensor whose shards `read` gives, each of which is read once; see `place`."""
    held: Any = backend.dtype(dtype)
    shards: dict[Shard, Any] = {}
    made = {}
    for rank in ranks:
        coordinate = mesh.coordinate(rank)
        shard = layout.shard(type.shape, mesh.shape, coordinate)
        if shard not in shards:
            shards[shard] = backend.from_host(numpy.array(read(shard), dtype=held, order="C"))
        made[rank] = shards[shard]
        for sbp, index in zip(layout, coordinate):
            if isinstance(sbp, Partial) and sbp.reduce == "sum" and index:
                made[rank] = backend.xp.full_like(made[rank], identity("sum", held))
    return made


def collect(
    local: Local, register: Register, mesh: Mesh, backend: Backend, communicator: Communicator
) -> numpy.ndarray:
    """The global array of a register, on the host, in every process; Partial parts are reduced.

    Raises
    ------
    LayoutError, PlanError
        Ranks that should hold the same numbers do not, or a shard has the wrong shape.
    """
    if len(communicator.ranks) == communicator.size:
        parts = [backend.to_host(local[rank]) for rank in communicator.ranks]
        tolerance = REPLICAS_DIFFER.get(str(parts[0].dtype), 0.0)
        return gather(parts, register.layout, mesh, register.type.shape, tolerance, what=register.value)
    xp, arrays = backend.xp, dict(local)
    # From the last axis to the first: of two axes that split one dimension the right one cuts the left one's chunks.
    layout = register.layout
    for axis in reversed(range(mesh.ndim)):
        sbp, groups = layout[axis], mesh.groups(axis)
        if isinstance(sbp, Broadcast):
            if mesh.shape[axis] > 1:
                _compare(arrays, register, mesh, axis, xp, communicator)
        elif isinstance(sbp, Partial):
            arrays = communicator.all_reduce(arrays, groups, sbp.reduce)
        else:
            assert isinstance(sbp, Split)
            shards = [layout.shard(register.type.shape, mesh.shape, place) for place in mesh.coordinates()]
            sizes = tuple(tuple(shards[rank].shape[sbp.axis] for rank in group) for group in groups)
            arrays = communicator.all_gather(arrays, groups, sbp.axis, sizes)
        layout = layout.replace(axis, Broadcast())
    return backend.to_host(arrays[communicator.ranks[0]])


def _compare(arrays: Local, register: Register, mesh: Mesh, axis: int, xp: Any, communicator: Communicator) -> None:
    """Raise `PlanError`, on all ranks at once, if the ranks along a B axis hold different numbers."""
    groups = mesh.groups(axis)
    largest = communicator.all_reduce(arrays, groups, "max")
    smallest = communicator.all_reduce(arrays, groups, "min")
    verdicts = {
        rank: xp.asarray(int(_differ(xp, high, smallest[rank])), dtype="int32") for rank, high in largest.items()
    }
    everyone = (tuple(range(mesh.size)),)
    if any(int(verdict) for verdict in communicator.all_reduce(verdicts, everyone, "max").values()):
        raise PlanError(
            f"{register.value}: ranks along mesh axis {mesh.names[axis]} of {mesh} hold different numbers, but by "
            f"{register.layout} they are replicas."
        )


def _differ(xp: Any, high: Any, low: Any) -> bool:
    tolerance = REPLICAS_DIFFER.get(str(high.dtype), 0.0)
    different = (high != low) & ~((high != high) & (low != low))
    if not bool(different.any()):
        return False
    if tolerance == 0.0 or not bool((xp.isfinite(high) & xp.isfinite(low))[different].all()):
        return True
    scale = xp.abs(xp.where(xp.isfinite(high), high, 0)).max()
    return bool(xp.abs(high[different] - low[different]).max() > tolerance * scale)
