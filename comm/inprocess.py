"""All ranks in one process: the default communicator. Nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from sbp.comm.arrays import chunk_slices, reduce_in_order
from sbp.comm.interface import Array, CommunicationError, Groups, Sizes


class InProcessCommunicator:
    """`size` ranks that share this process.

    Parameters
    ----------
    size
        Number of ranks.
    xp
        Module of the arrays, NumPy or CuPy (then all ranks are on the current device).
    """

    def __init__(self, size: int, xp: Any = numpy) -> None:
        if size < 1:
            raise CommunicationError(f"a communicator needs at least 1 rank, got {size}.")
        self.size = size
        self.ranks = tuple(range(size))
        self._xp = xp

    def all_reduce(self, arrays: Mapping[int, Array], groups: Groups, reduce: str) -> dict[int, Array]:
        """P -> B; the members of a group share one result."""

        sizes = ((),) * len(groups)
        return _by_group(
            arrays, groups, sizes, lambda parts, _: [reduce_in_order(self._xp, parts, reduce)] * len(parts)
        )

    def all_gather(self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes) -> dict[int, Array]:
        """S(axis) -> B; the members of a group share one result."""
        return _by_group(arrays, groups, sizes, lambda parts, _: [self._xp.concatenate(parts, axis=axis)] * len(parts))

    def reduce_scatter(
        self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes, reduce: str
    ) -> dict[int, Array]:
        """P -> S(axis)."""

        def scattered(parts: list[Array], chunks: tuple[int, ...]) -> list[Array]:
            return [
                reduce_in_order(self._xp, (part[place] for part in parts), reduce)
                for place in chunk_slices(chunks, axis)
            ]

        return _by_group(arrays, groups, sizes, scattered)

    def all_to_all(
        self,
        arrays: Mapping[int, Array],
        groups: Groups,
        source_axis: int,
        source_sizes: Sizes,
        target_axis: int,
        target_sizes: Sizes,
    ) -> dict[int, Array]:
        """S(source_axis) -> S(target_axis)."""

        def exchanged(parts: list[Array], chunks: tuple[int, ...]) -> list[Array]:
            return [
                self._xp.concatenate([part[place] for part in parts], axis=source_axis)
                for place in chunk_slices(chunks, target_axis)
            ]

        return _by_group(arrays, groups, target_sizes, exchanged)

    def broadcast(self, arrays: Mapping[int, Array], groups: Groups, root: int) -> dict[int, Array]:
        """The members of a group share the root's array."""
        return {rank: arrays[group[root]] for group in groups for rank in group}

    def permute(
        self,
        arrays: Mapping[int, Array],
        pairs: Sequence[tuple[int, int]],
        shapes: Mapping[int, Sequence[int]],
        dtype: Any,
    ) -> dict[int, Array]:
        """The target gets the source's own array."""
        return {target: arrays[source] for source, target in pairs}

    def barrier(self) -> None:
        """Nothing to wait for."""

    def fail(self) -> None:
        """No other process waits."""

    def close(self) -> None:
        """Nothing to release."""


def _by_group(
    arrays: Mapping[int, Array],
    groups: Groups,
    sizes: Sizes,
    make: Callable[[list[Array], tuple[int, ...]], list[Array]],
) -> dict[int, Array]:
    """`make(parts, sizes)` for every group; groups whose members hold the very same arrays share the results."""
    made: dict[int, Array] = {}
    done: dict[tuple[Any, ...], list[Array]] = {}
    for group, chunks in zip(groups, sizes):
        parts = [arrays[rank] for rank in group]
        key = (chunks, *map(id, parts))
        if key not in done:
            done[key] = make(parts, chunks)
        made.update(zip(group, done[key]))
    return made
