"""How a plan lays out its state: per parameter the stored layout, those it is used in, and its optimizer state's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbp.layout import Layout
from sbp.planner.physical import Compute
from sbp.report.naming import grouped_names, template_of

if TYPE_CHECKING:
    from sbp.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """State or inputs of equal layers that are laid out alike.

    Attributes
    ----------
    names
        `h.{0..11}.mlp.fc.weight`.
    kind
        parameter, buffer, optimizer or input.
    forward, backward
        The layouts in which operators of the phase read it (after casts).
    optimizer
        The layouts its optimizer state is stored in.
    bytes
        Stored bytes on the rank with the largest shards, all of the row together.
    """

    names: str
    kind: str
    type: str
    count: int
    stored: str
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    optimizer: tuple[str, ...]
    bytes: int
    members: tuple[str, ...]


def layout_rows(plan: Plan) -> tuple[LayoutRow, ...]:
    """One row per group, in the graph's order: parameters, then buffers and inputs, then state of no parameter."""
    graph, physical = plan.graph, plan.physical
    uses = _uses(plan)
    parameters = graph.parameters
    state_of: dict[str, list[str]] = {name: [] for name in parameters}
    loose: list[str] = []
    for name in graph.sources:
        if graph.values[name].kind == "optimizer":
            owner = _owner(name, state_of)
            (loose if owner is None else state_of[owner]).append(name)
    others = [name for name in graph.sources if graph.values[name].kind in ("buffer", "input")]
    found: dict[Any, list[str]] = {}
    for name in (*parameters, *others, *loose):
        value = graph.values[name]
        forward, backward = (uses.get((name, phase), ()) for phase in ("forward", "backward"))
        states = tuple(dict.fromkeys(str(plan.decisions.sources[state]) for state in state_of.get(name, ())))
        stored = str(plan.decisions.sources[name])
        key = (template_of(name)[0], value.kind, value.type, stored, forward, backward, states)
        found.setdefault(key, []).append(name)
    local = {number: physical.registers[number].bytes for number in physical.sources.values()}
    return tuple(
        LayoutRow(
            ", ".join(grouped_names(members)),
            kind,
            str(type_),
            len(members),
            stored,
            forward,
            backward,
            states,
            sum(local[physical.sources[name]] for name in members),
            tuple(members),
        )
        for (_, kind, type_, stored, forward, backward, states), members in found.items()
    )


def _owner(state: str, parameters: dict[str, list[str]]) -> str | None:
    """The parameter whose name the state value's name starts with: `h.0.w` of `h.0.w.exp_avg`."""
    name = state
    while "." in name:
        name = name.rpartition(".")[0]
        if name in parameters:
            return name
    return None


def _uses(plan: Plan) -> dict[tuple[str, str], tuple[str, ...]]:
    """(source, phase) -> the layouts in which operators of the phase read it, casts looked through."""
    registers = plan.physical.registers
    root = {name: name for name in plan.physical.sources}
    found: dict[tuple[str, str], dict[Layout, None]] = {}
    for operation in plan.physical.operations:
        if not isinstance(operation, Compute):
            continue
        if operation.op == "cast":
            source = root.get(registers[operation.inputs[0]].value)
            if source is not None:
                root[registers[operation.outputs[0]].value] = source
                continue
        for number in operation.inputs:
            source = root.get(registers[number].value)
            if source is not None:
                found.setdefault((source, operation.phase), {})[registers[number].layout] = None
    return {key: tuple(map(str, layouts)) for key, layouts in found.items()}
