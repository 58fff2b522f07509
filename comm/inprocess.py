"""All ranks in one process: the default communicator. Nothing is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        made: dict[int, Array] = {}
        for group in groups:
            total = reduce_in_order(self._xp, (arrays[rank] for rank in group), reduce)
            made.update(dict.fromkeys(group, total))
        return made

    def all_gather(self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes) -> dict[int, Array]:
        """S(axis) -> B; the members of a group share one result."""
        made: dict[int, Array] = {}
        for group in groups:
            whole = self._xp.concatenate([arrays[rank] for rank in group], axis=axis)
            made.update(dict.fromkeys(group, whole))
        return made

    def reduce_scatter(
        self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes, reduce: str
    ) -> dict[int, Array]:
        """P -> S(axis)."""
        made: dict[int, Array] = {}
        for group, chunks in zip(groups, sizes):
            for rank, place in zip(group, chunk_slices(chunks, axis)):
                made[rank] = reduce_in_order(self._xp, (arrays[other][place] for other in group), reduce)
        return made

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
        made: dict[int, Array] = {}
        for group, chunks in zip(groups, target_sizes):
            for rank, place in zip(group, chunk_slices(chunks, target_axis)):
                made[rank] = self._xp.concatenate([arrays[other][place] for other in group], axis=source_axis)
        return made

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

    def close(self) -> None:
        """Nothing to release."""
