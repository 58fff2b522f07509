"""Memory of a physical plan: what every rank holds over the step, by kind, and when it is most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sbp.dtype import SIZES
from sbp.planner.buffers import Buffer, buffers_of, register_bytes
from sbp.planner.physical import PhysicalPlan, Register

KINDS = ("parameter", "optimizer", "buffer", "input", "activation", "gradient", "boxing", "workspace")
"""What memory holds. boxing: copies of values in other layouts (gathered parameters, reduced gradients, ...).
workspace: what kernels and collectives hold while they run, besides their operands."""


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Bytes on one rank over the operations of the step.

    Attributes
    ----------
    by_kind
        int64 (kinds, operations): bytes of each of `KINDS` while each operation runs.
    """

    by_kind: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """int64 (operations,): bytes of all kinds."""
        return self.by_kind.sum(axis=0)

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return int(self.total.max(initial=0))

    @property
    def peak_at(self) -> int:
        """The first operation at which the peak is reached."""
        return int(np.argmax(self.total)) if self.by_kind.shape[1] else 0

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        if not self.by_kind.shape[1]:
            return dict.fromkeys(KINDS, 0)
        return {kind: int(self.by_kind[number, self.peak_at]) for number, kind in enumerate(KINDS)}


def memory_profile(
    physical: PhysicalPlan, rank: int | None = None, item_bytes: Mapping[str, int] = SIZES
) -> MemoryProfile:
    """Memory over time of a physical plan.

    Views share memory with what they are views of; a state's next value takes the place of the old one where the old
    one is not read any more (see `sbp.planner.buffers`).

    Parameters
    ----------
    rank
        Default the rank with the largest shards. That is the first one for every register, as shards are never larger
        on a later rank, so at no time does another rank hold more.
    item_bytes
        Bytes of an element by its type, where they are held in other ones than the plan says. Workspace, which is
        counted in the plan's own, is on every rank that of the largest.
    """
    count = max(len(physical.operations), 1)
    change = np.zeros((len(KINDS), count + 1), dtype=np.int64)
    for buffer in buffers_of(physical).buffers:
        register = physical.registers[buffer.registers[0]]
        kind, size = KINDS.index(register.kind), _bytes(physical, register, rank, item_bytes)
        change[kind, buffer.start] += size
        change[kind, buffer.stop] -= size
    by_kind = np.cumsum(change, axis=1)[:, :count]
    for at, operation in enumerate(physical.operations):
        by_kind[-1, at] = operation.workspace
    return MemoryProfile(by_kind)


def live_at(physical: PhysicalPlan, operation: int) -> tuple[Register, ...]:
    """The registers that hold memory of their own while an operation runs, the largest first."""
    live = [
        physical.registers[buffer.registers[0]]
        for buffer in buffers_of(physical).buffers
        if buffer.start <= operation < buffer.stop
    ]
    return tuple(sorted(live, key=lambda register: (-register.bytes, register.number)))


def buffer_bytes(physical: PhysicalPlan, buffer: Buffer) -> int:
    """Bytes of a buffer on the rank with the largest shards."""
    return _bytes(physical, physical.registers[buffer.registers[0]], None, SIZES)


def _bytes(physical: PhysicalPlan, register: Register, rank: int | None, item_bytes: Mapping[str, int]) -> int:
    if rank is None and item_bytes is SIZES:
        return register.bytes * register.credits
    return register_bytes(register, physical.mesh, rank or 0, item_bytes)
