"""What of a plan PyTorch does otherwise than planned, and which collectives it should be seen to call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sbp.layout import Layout, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.boxing import Step
from sbp.planner.physical import COLLECTIVES, Box, Operation, PhysicalPlan


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
    """One collective that a rank calls in a step: its kind, mesh axis and phase.

    Attributes
    ----------
    bytes
        The larger of the rank's tensors before and after, as the plan prices it.
    sent
        The same as PyTorch is given it: for gathers and reduce-scatters uneven shards are padded to equal ones.
    """

    kind: str
    axis: str
    bytes: int
    sent: int
    phase: str


def collectives_of(physical: PhysicalPlan, operations: Iterable[Operation]) -> tuple[Collective, ...]:
    """The collectives among operations of a program."""
    registers = physical.registers
    return tuple(
        collective(
            operation.kind,
            operation.mesh_axis,
            registers[operation.inputs[0]].type,
            registers[operation.inputs[0]].layout,
            registers[operation.outputs[0]].layout,
            physical.mesh,
            operation.bytes,
            operation.phase,
        )
        for operation in operations
        if isinstance(operation, Box) and is_called(operation.kind, operation.mesh_axis, physical.mesh, operation.bytes)
    )


def steps_of(steps: Iterable[Step], kind: TensorType, mesh: Mesh, phase: str) -> tuple[Collective, ...]:
    """The collectives among boxing steps of a value."""
    return tuple(
        collective(step.kind, step.mesh_axis, kind, step.before, step.after, mesh, step.bytes, phase)
        for step in steps
        if is_called(step.kind, step.mesh_axis, mesh, step.bytes)
    )


def is_called(kind: str, axis: int, mesh: Mesh, size: int) -> bool:
    """Collectives with nobody to talk to, or nothing to say, are not called."""
    return kind in COLLECTIVES and mesh.shape[axis] > 1 and size > 0


def collective(
    kind: str, axis: int, type: TensorType, before: Layout, after: Layout, mesh: Mesh, size: int, phase: str
) -> Collective:
    """One collective, with the bytes it has when uneven shards are padded."""
    sent = size
    split = {"all_gather": before, "reduce_scatter": after}.get(kind)
    if split is not None:
        whole, sbp = (after if kind == "all_gather" else before), split[axis]
        assert isinstance(sbp, Split)
        length = whole.local_shape(type.shape, mesh.shape)[sbp.axis]
        parts = mesh.shape[axis]
        sent = size // length * (-(-length // parts) * parts)
    return Collective(kind, mesh.names[axis], size, sent, phase)


@dataclass(frozen=True)
class Counts:
    """Collectives of one kind in a step: number and bytes of the planned ones, and of those that PyTorch is to call."""

    planned: int
    planned_bytes: int
    called: int
    called_bytes: int


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

    def counts(self) -> Mapping[str, Counts]:
        """Kind -> how many are planned and called, and their bytes."""
        found = {}
        for kind in COLLECTIVES:
            planned, called = ([c for c in some if c.kind == kind] for some in (self.planned, self.expected))
            if planned or called:
                found[kind] = Counts(
                    len(planned), sum(c.bytes for c in planned), len(called), sum(c.sent for c in called)
                )
        return found

    @property
    def seconds(self) -> float:
        """What all differences add to a step, predicted."""
        return sum(difference.seconds for difference in self.differences)

    def __str__(self) -> str:
        from sbp.report.export import export_text

        return export_text(self)
