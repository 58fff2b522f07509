"""One boxing step, made ready to run: what every local rank sends, keeps or fills in, worked out once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Array, Backend
from sbp.errors import PlanError
from sbp.layout import SBP, Broadcast, Partial, Shard, Split
from sbp.mesh import Mesh
from sbp.planner.physical import Box, Register

Local = dict[int, Array]
"""The arrays of the local ranks."""

_FORMS: dict[str, tuple[type[Any], type[Any]]] = {
    "all_reduce": (Partial, Broadcast),
    "all_gather": (Split, Broadcast),
    "reduce_scatter": (Partial, Split),
    "all_to_all": (Split, Split),
    "slice": (Broadcast, Split),
    "fill": (Broadcast, Partial),
    "pad": (Split, Partial),
}
"""Kind of step -> what it changes on its mesh axis."""


def prepare(
    box: Box, source: Register, target: Register, mesh: Mesh, backend: Backend, communicator: Communicator, dtype: str
) -> Callable[[Local], Local]:
    """The step as a function of the local ranks' source arrays, giving their target arrays.

    Raises
    ------
    PlanError
        The layouts are not what such a step changes, or the shards of a group do not hold what its targets need
        (a nested split whose outer axis changes); the message shows both layouts.
    """
    axis = box.mesh_axis
    what = f"{box.kind} of {source.value} ({source.type}) from {source.layout} to {target.layout} on {mesh}"
    if box.kind not in _FORMS or not 0 <= axis < mesh.ndim:
        raise PlanError(f"{what}: there is no such step along mesh axis {axis}; known are {', '.join(_FORMS)}.")
    before, after = source.layout[axis], target.layout[axis]
    forms = _FORMS[box.kind]
    if not isinstance(before, forms[0]) or not isinstance(after, forms[1]) or source.type != target.type:
        raise PlanError(
            f"{what}: on mesh axis {mesh.names[axis]} it changes {before} to {after}, but this step changes "
            f"{forms[0].__name__} to {forms[1].__name__} of one type."
        )
    if before == after or source.layout.replace(axis, after) != target.layout:
        raise PlanError(f"{what}: the layouts must differ on mesh axis {mesh.names[axis]}, and only there.")
    shape = source.type.shape
    places = list(mesh.coordinates())
    held = [source.layout.shard(shape, mesh.shape, place) for place in places]
    wanted = [target.layout.shard(shape, mesh.shape, place) for place in places]
    groups = mesh.groups(axis)
    for group in groups:
        whole = _whole([held[rank] for rank in group], before)
        if whole is None or not _makes([wanted[rank] for rank in group], after, whole):
            raise PlanError(
                f"{what}: ranks {', '.join(map(str, group))} do not hold among them what each of them needs, since "
                "another mesh axis splits the same dimension within this axis' chunks; gather that axis first."
            )
    if box.kind in ("slice", "fill", "pad"):
        return _local_step(box.kind, before, after, held, wanted, groups, backend, communicator.ranks, dtype)
    return _collective(box.kind, before, after, held, wanted, groups, communicator)


def identity(reduce: str, dtype: Any) -> Any:
    """The number that changes nothing: 0 for sum, the smallest for max, the largest for min (a NumPy dtype)."""
    import numpy

    if reduce == "sum":
        return 0
    if dtype.kind == "f":
        return -numpy.inf if reduce == "max" else numpy.inf
    if dtype.kind == "b":
        return reduce == "min"
    limits = numpy.iinfo(dtype)
    return limits.min if reduce == "max" else limits.max


def _collective(
    kind: str,
    before: SBP,
    after: SBP,
    held: Sequence[Shard],
    wanted: Sequence[Shard],
    groups: tuple[tuple[int, ...], ...],
    communicator: Communicator,
) -> Callable[[Local], Local]:
    def sizes(shards: Sequence[Shard], axis: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(shards[rank].shape[axis] for rank in group) for group in groups)

    if isinstance(before, Partial):
        reduce = before.reduce
        if kind == "all_reduce":
            return lambda arrays: communicator.all_reduce(arrays, groups, reduce)
        assert isinstance(after, Split)
        axis, made = after.axis, sizes(wanted, after.axis)
        return lambda arrays: communicator.reduce_scatter(arrays, groups, axis, made, reduce)
    assert isinstance(before, Split)
    axis, had = before.axis, sizes(held, before.axis)
    if kind == "all_gather":
        return lambda arrays: communicator.all_gather(arrays, groups, axis, had)
    assert isinstance(after, Split)
    target, made = after.axis, sizes(wanted, after.axis)
    return lambda arrays: communicator.all_to_all(arrays, groups, axis, had, target, made)


def _local_step(
    kind: str,
    before: SBP,
    after: SBP,
    held: Sequence[Shard],
    wanted: Sequence[Shard],
    groups: tuple[tuple[int, ...], ...],
    backend: Backend,
    ranks: Sequence[int],
    dtype: str,
) -> Callable[[Local], Local]:
    xp = backend.xp
    if kind == "slice":
        cuts = {rank: _within(wanted[rank], held[rank]) for rank in ranks}
        # A copy, so that the whole tensor can be freed.
        return _shared(cuts, lambda array, cut: xp.copy(array[cut], order="C"))
    assert isinstance(after, Partial)
    neutral = identity(after.reduce, backend.dtype(dtype))
    if kind == "fill":
        first = {group[0] for group in groups}
        keeps = {rank: after.reduce != "sum" or rank in first for rank in ranks}
        return _shared(keeps, lambda array, keep: xp.copy(array, order="C") if keep else xp.full_like(array, neutral))
    pads = {rank: (wanted[rank].shape, _within(held[rank], wanted[rank])) for rank in ranks}

    def pad(array: Array, place: tuple[tuple[int, ...], tuple[slice, ...]]) -> Array:
        shape, cut = place
        made = xp.full(shape, neutral, array.dtype)
        made[cut] = array
        return made

    return _shared(pads, pad)


def _shared(places: dict[int, Any], make: Callable[[Array, Any], Array]) -> Callable[[Local], Local]:
    """`make(array, place)` on every rank; ranks of one process that hold the same array and place share the result."""
    numbers: dict[str, int] = {}
    plan = [(rank, place, numbers.setdefault(repr(place), len(numbers))) for rank, place in places.items()]

    def run(arrays: Local) -> Local:
        made: Local = {}
        done: dict[tuple[int, int], Array] = {}
        for rank, place, number in plan:
            key = (id(arrays[rank]), number)
            if key not in done:
                done[key] = make(arrays[rank], place)
            made[rank] = done[key]
        return made

    return run


def _within(inner: Shard, outer: Shard) -> tuple[slice, ...]:
    """The indices of one box within another that contains it."""
    starts = (min(a - b, size) for a, b, size in zip(inner.offset, outer.offset, outer.shape))
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.shape))


def _same(a: Shard, b: Shard) -> bool:
    return a.shape == b.shape and (a.offset == b.offset or 0 in a.shape)


def _whole(held: Sequence[Shard], sbp: SBP) -> Shard | None:
    """What a group holds together along its axis; None if that is not a box."""
    if not isinstance(sbp, Split):
        return held[0] if all(_same(shard, held[0]) for shard in held) else None
    size = sum(shard.shape[sbp.axis] for shard in held)
    shape = held[0].shape[: sbp.axis] + (size,) + held[0].shape[sbp.axis + 1 :]
    whole = Shard(held[0].global_shape, held[0].offset, shape)
    return whole if _makes(held, sbp, whole) else None


def _makes(shards: Sequence[Shard], sbp: SBP, whole: Shard) -> bool:
    """Whether the shards, in order, are what `sbp` makes of the whole: all of it each, or consecutive pieces."""
    if not isinstance(sbp, Split):
        return all(_same(shard, whole) for shard in shards)
    start = whole.offset[sbp.axis]
    for shard in shards:
        size = shard.shape[sbp.axis]
        expected = Shard(
            whole.global_shape,
            whole.offset[: sbp.axis] + (start,) + whole.offset[sbp.axis + 1 :],
            whole.shape[: sbp.axis] + (size,) + whole.shape[sbp.axis + 1 :],
        )
        if not _same(shard, expected):
            return False
        start += size
    return start == whole.offset[sbp.axis] + whole.shape[sbp.axis]
