"""What of a plan PyTorch does otherwise than planned, and which collectives it should be seen to call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sbp.mesh import Mesh
from sbp.planner.physical import COLLECTIVES, Box, Operation


@dataclass(frozen=True)
class Difference:
    """One thing that runs otherwise than planned.

    Attributes
    ----------
    place
        The state value, or what else it is about.
    planned, exported
        Layouts, or what else is planned and done.
    why
        The reason.
    seconds
        What it adds to a step, predicted; below 0 where it saves.
    memory_bytes
        What it adds to the memory of the rank with the largest shards, between steps; below 0 where it saves.
    """

    place: str
    planned: str
    exported: str
    why: str
    seconds: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Collective:
    """One collective that a rank calls in a step: its kind, mesh axis, and bytes of what it sends and receives.

    `bytes` is the larger of the local tensors before and after, as the plan prices it.
    """

    kind: str
    axis: str
    bytes: int
    phase: str


def collectives_of(operations: Sequence[Operation], mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives among operations; those that have nobody to talk to, or nothing to say, are not called."""
    return tuple(
        Collective(operation.kind, mesh.names[operation.mesh_axis], operation.bytes, operation.phase)
        for operation in operations
        if isinstance(operation, Box)
        and operation.kind in COLLECTIVES
        and mesh.shape[operation.mesh_axis] > 1
        and operation.bytes
    )


@dataclass(frozen=True)
class ExportReport:
    """How an exported module follows its plan.

    Attributes
    ----------
    differences
        What runs otherwise; empty if everything is as planned.
    planned
        The collectives of a step of the plan.
    expected
        Those that a training step of the module calls, forward and backward. The optimizer's step calls none.
    on_host
        Operators without a kernel on the device; they run on NumPy.
    """

    model: str
    mesh: Mesh
    differences: tuple[Difference, ...]
    planned: tuple[Collective, ...]
    expected: tuple[Collective, ...]
    on_host: tuple[str, ...] = ()

    def counts(self) -> Mapping[str, tuple[int, int, int, int]]:
        """Kind -> number and bytes of the planned collectives, number and bytes of the expected ones."""
        found = {}
        for kind in COLLECTIVES:
            pair = [[c.bytes for c in some if c.kind == kind] for some in (self.planned, self.expected)]
            if pair[0] or pair[1]:
                found[kind] = (len(pair[0]), sum(pair[0]), len(pair[1]), sum(pair[1]))
        return found

    @property
    def seconds(self) -> float:
        """What all differences add to a step, predicted."""
        return sum(difference.seconds for difference in self.differences)

    def __str__(self) -> str:
        from sbp.report.export import export_text

        return export_text(self)
