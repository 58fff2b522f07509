"""Where in a training step a parameter's gradient is finished, and where the gradient of the loss comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp.graph import Graph
from sbp.layout import Layout
from sbp.operator import REGISTRY
from sbp.planner.physical import Compute, PhysicalPlan
from sbp.runtime.torch_program import ExportError


@dataclass(frozen=True)
class Gradient:
    """The register that holds a parameter's gradient, its layout, and the layout in which the parameter is updated.

    `update` is None where the update is more than one operator, so that there may be several.
    """

    register: int
    layout: Layout
    update: Layout | None


def gradients_of(graph: Graph, physical: PhysicalPlan) -> dict[str, Gradient]:
    """Parameter -> its gradient, for those that the step updates.

    An update is an operator of the parameter and its gradient (`adamw_update`), or nodes of the phase "optimizer" that
    read one gradient among them.

    Raises
    ------
    ExportError
        An update reads no gradient, or several of the parameter's shape.
    """
    computes = {operation.node: operation for operation in physical.operations if isinstance(operation, Compute)}
    found = {}
    for parameter in graph.parameters:
        new = graph.updates.get(parameter)
        if new is None or new not in graph.producers:
            continue
        node = graph.nodes[graph.producers[new][0]]
        compute = computes[node.name]
        if REGISTRY[node.op].input_names[:2] == ("parameter", "grad") and node.inputs[0] == parameter:
            register = physical.registers[compute.inputs[1]]
            update = physical.registers[compute.inputs[0]].layout
            found[parameter] = Gradient(register.number, register.layout, update)
        else:
            found[parameter] = _read_by(graph, physical, parameter, new)
    return found


def _read_by(graph: Graph, physical: PhysicalPlan, parameter: str, new: str) -> Gradient:
    made = {
        number for operation in physical.operations for number in operation.outputs if isinstance(operation, Compute)
    }
    by_value = {physical.registers[number].value: number for number in made}
    waiting, seen, gradients = [new], set(), set()
    while waiting:
        value = waiting.pop()
        if value in seen or value not in graph.producers:
            continue
        seen.add(value)
        node = graph.nodes[graph.producers[value][0]]
        if node.phase == "optimizer":
            waiting.extend(node.inputs)
        elif graph.values[value].type == graph.values[parameter].type:
            gradients.add(value)
    if len(gradients) != 1:
        raise ExportError(
            f"parameter {parameter}: its update reads {len(gradients)} gradients of its type "
            f"({', '.join(sorted(gradients)) or 'none'}); one is expected. Plan with an optimizer of sbp.optim."
        )
    register = physical.registers[by_value[gradients.pop()]]
    return Gradient(register.number, register.layout, None)


def seed_of(graph: Graph, physical: PhysicalPlan) -> int:
    """The register that holds the gradient of the loss: the one that backward starts from.

    Raises
    ------
    ExportError
        The graph has another form than one loss whose gradient is the constant one.
    """
    for operation in physical.operations:
        if isinstance(operation, Compute) and operation.phase == "backward":
            attributes: Mapping[str, object] = operation.attributes
            register = physical.registers[operation.outputs[0]]
            loss = graph.values[graph.outputs[0]]
            if operation.op == "full" and attributes.get("value") == 1.0 and register.type == loss.type:
                return register.number
            if not operation.inputs:
                continue
            break
    raise ExportError(
        f"{graph.name}: backward does not start from the gradient of the first output; export plans of training steps "
        "made by sbp (auto_parallel, sbp.training)."
    )
