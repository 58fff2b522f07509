"""Memory of a physical plan: what every rank holds over the step, by kind, and when it is most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbp.planner.physical import PhysicalPlan, Register

KINDS = ("parameter", "optimizer", "buffer", "input", "activation", "gradient", "boxing")
"""What registers hold; boxing is copies of values in other layouts (gathered parameters, reduced gradients, ...)."""


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Bytes on the rank with the largest shards, over the operations of the step.

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


def memory_profile(physical: PhysicalPlan) -> MemoryProfile:
    """Memory over time of a physical plan.

    A state value's next value takes the place of the old one when the old one is not read after the next is made, so
    that optimizer updates happen in place.
    """
    count = max(len(physical.operations), 1)
    change = np.zeros((len(KINDS), count + 1), dtype=np.int64)
    for register, start, stop in _held(physical):
        kind = KINDS.index(register.kind)
        change[kind, start] += register.bytes
        change[kind, stop] -= register.bytes
    return MemoryProfile(np.cumsum(change, axis=1)[:, :count])


def live_at(physical: PhysicalPlan, operation: int) -> tuple[Register, ...]:
    """The registers that hold memory while an operation runs, the largest first."""
    live = [register for register, start, stop in _held(physical) if start <= operation < stop]
    return tuple(sorted(live, key=lambda register: (-register.bytes, register.number)))


def _held(physical: PhysicalPlan) -> Iterator[tuple[Register, int, int]]:
    """Registers with memory of their own, each with the operations [start, stop) during which it holds it."""
    last = max(len(physical.operations), 1) - 1
    in_place = _in_place(physical)
    for register, (start, stop) in zip(physical.registers, physical.lifetimes):
        if register.number not in in_place:
            start = min(start, last)
            yield register, start, max(stop, start + 1)


def _in_place(physical: PhysicalPlan) -> frozenset[int]:
    """Registers of next values that take their state's place."""
    last_read: dict[int, int] = {}
    made: dict[int, int] = {}
    for at, operation in enumerate(physical.operations):
        for number in operation.inputs:
            last_read[number] = at
        for number in operation.outputs:
            made[number] = at
    found = set()
    for state, number in physical.updates.items():
        old = physical.sources[state]
        if number in made and last_read.get(old, -1) <= made[number]:
            found.add(number)
    return frozenset(found)
