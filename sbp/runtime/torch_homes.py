"""Where parameters lie between steps in PyTorch, and what of that is not as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.boxing import BoxingTable, Step
from sbp.planner.physical import COLLECTIVES, Box
from sbp.planner.plan import Plan
from sbp.runtime.torch_gradients import Gradient
from sbp.runtime.torch_report import Difference


@dataclass(frozen=True)
class Home:
    """Where a parameter lies between steps, and what brings it to where the plan has it.

    Attributes
    ----------
    layout
        That of the DTensor, its gradient and its optimizer state.
    gather
        Steps from `layout` to the stored layout, at the start of forward.
    collect
        Steps from the layout of the planned gradient to `layout`, at the end of backward.
    """

    layout: Layout
    gather: tuple[Step, ...] = ()
    collect: tuple[Step, ...] = ()


def homes_of(plan: Plan, gradients: Mapping[str, Gradient]) -> dict[str, Home]:
    """Every parameter's home: where its optimizer works, if that is a smaller shard than the stored one.

    torch.optim keeps its state like the parameter. Where a plan stores a parameter whole but updates a shard (ZeRO-1),
    the shard is therefore what lies between steps, and the gather that the plan does after the update is done before
    the next forward.
    """
    boxing = BoxingTable(plan.mesh, plan.costs)
    found = {}
    for name in plan.graph.parameters:
        kind, stored = plan.graph.values[name].type, plan.decisions.sources[name]
        gradient, home = gradients.get(name), stored
        update = None if gradient is None else gradient.update
        smaller = (
            update is not None
            and not update.has_partial
            and (layout_bytes(kind, update, plan.mesh) < layout_bytes(kind, stored, plan.mesh))
        )
        if update is not None and smaller:
            home = update
        collect = () if gradient is None else boxing.path(kind, gradient.layout, home)
        found[name] = Home(home, boxing.path(kind, home, stored), collect)
    return found


def layout_bytes(kind: TensorType, layout: Layout, mesh: Mesh) -> int:
    """Bytes of a tensor on the rank with the largest shard."""
    return TensorType(layout.local_shape(kind.shape, mesh.shape), kind.dtype).bytes


def differences_of(plan: Plan, homes: Mapping[str, Home], gradients: Mapping[str, Gradient]) -> Iterator[Difference]:
    """What is not as planned, with what it adds to a step and to the memory between steps."""
    for name, home in homes.items():
        kind, stored = plan.graph.values[name].type, plan.decisions.sources[name]
        size = layout_bytes(kind, home.layout, plan.mesh)
        if home.layout != stored:
            yield Difference(
                name,
                f"stored {stored}",
                f"stored {home.layout}",
                "torch.optim works where the parameter lies; what the plan gathers after the update is gathered before "
                "the next forward, and again by every forward without an update",
                sum(step.seconds for step in home.gather) - _after_update(plan, name),
                size - layout_bytes(kind, stored, plan.mesh),
            )
        if home.collect:
            yield Difference(
                name,
                f"updated from a gradient in {gradients[name].layout}",
                f"gradient in {home.layout}",
                "the gradient of a DTensor lies like the DTensor",
                sum(step.seconds for step in home.collect),
            )
        for state in _optimizer_state(plan, name):
            kept, value = plan.decisions.sources[state], plan.graph.values[state]
            if value.shape == kind.shape and kept != home.layout:
                yield Difference(
                    state,
                    f"stored {kept}",
                    f"stored {home.layout}",
                    "torch.optim keeps its state like the parameter",
                    0.0,
                    layout_bytes(value.type, home.layout, plan.mesh) - layout_bytes(value.type, kept, plan.mesh),
                )
    if any(node.op == "dropout" for node in plan.graph.nodes):
        yield Difference(
            "dropout",
            "masks from step and place",
            "masks from step and place",
            "they are sbp's, and torch.manual_seed does not change them",
        )


def _after_update(plan: Plan, name: str) -> float:
    """Seconds of the boxing from a parameter's next value to its stored layout, which PyTorch does not run."""
    value, registers = plan.graph.updates.get(name), plan.physical.registers
    return sum(
        operation.seconds
        for operation in plan.physical.operations
        if isinstance(operation, Box)
        and operation.kind in COLLECTIVES
        and registers[operation.inputs[0]].value == value
    )


def _optimizer_state(plan: Plan, name: str) -> list[str]:
    values = plan.graph.values
    return [
        state for state in plan.graph.state if values[state].kind == "optimizer" and state.rpartition(".")[0] == name
    ]
