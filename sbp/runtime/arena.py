"""One preallocated buffer per rank, out of which an executor runs: every register is a view at its offset."""

from __future__ import annotations

from typing import Any

from sbp.cuda.interface import Backend
from sbp.layout import Shard
from sbp.planner.arena import Arena
from sbp.planner.physical import PhysicalPlan
from sbp.runtime.boxing import Local


class ArenaStore:
    """The local ranks' memory for one plan.

    Parameters
    ----------
    shards
        Per register the local ranks' boxes, in the order of `ranks`.
    dtypes
        Per register the backend's element type.
    """

    def __init__(
        self,
        physical: PhysicalPlan,
        arena: Arena,
        backend: Backend,
        ranks: tuple[int, ...],
        shards: list[tuple[Shard, ...]],
        dtypes: list[Any],
    ) -> None:
        xp = backend.xp
        self.arena = arena
        self.memory = {rank: xp.empty(arena.size_bytes, dtype="uint8") for rank in ranks}
        self._slots: list[Local] = []
        for offset, boxes, dtype in zip(arena.register_offsets, shards, dtypes):
            slots = {}
            for rank, box in zip(ranks, boxes):
                size = dtype.itemsize
                for length in box.shape:
                    size *= length
                slots[rank] = self.memory[rank][offset : offset + size].view(dtype).reshape(box.shape)
            self._slots.append(slots)
        self._copyto = xp.copyto

    def slot(self, number: int) -> Local:
        """A register's arrays, whatever is in them now."""
        return self._slots[number]

    def put(self, number: int, local: Local) -> Local:
        """Copy a register's arrays to their place; returns the arrays there."""
        slots = self._slots[number]
        for rank, array in local.items():
            if array is not slots[rank]:
                self._copyto(slots[rank], array)
        return slots
