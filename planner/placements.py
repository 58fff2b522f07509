"""Placements of a plan as plain data, in DTensor's words, readable without sbp.

Schema 1, all keys always present::

    {"format": "sbp-placements", "schema": 1,
     "mesh": {"shape": [2, 4], "names": ["dp", "tp"]},
     "parameters": {NAME: {"shape": [...], "dtype": "f32",
                           "stored": PLACEMENTS,             # from step to step
                           "used": [PLACEMENTS, ...],        # in which forward and backward operators read it
                           "updated": PLACEMENTS or null,    # in which the optimizer works on it
                           "optimizer_state": {NAME: PLACEMENTS}}},
     "buffers": {NAME: {"shape", "dtype", "stored"}},
     "inputs": {NAME: {"shape", "dtype", "stored"}},
     "outputs": {NAME: {"shape", "dtype", "made": PLACEMENTS, "stored": PLACEMENTS}},
     "modules": {PATH: {"inputs": [CROSSING, ...], "outputs": [CROSSING, ...]}}}

    PLACEMENTS: one text per mesh axis: "Replicate()", "Shard(0)", "Partial(sum)", "Partial(max)", "Partial(min)".
        Two axes that shard one dimension nest left to right; uneven shards are those of torch.chunk.
    CROSSING: {"value", "shape", "dtype", "made": PLACEMENTS, "used": [PLACEMENTS, ...]}: a tensor that enters or leaves
        the module in the forward phase, in program order; "made" is how it comes to be, "used" how it is read inside
        (inputs) or outside (outputs). Where they differ the plan redistributes.

Readers ignore keys they do not know; a change of meaning raises `schema`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sbp.graph import STATE_KINDS, Graph
from sbp.layout import SBP, Layout, Partial, Split
from sbp.operator import REGISTRY

if TYPE_CHECKING:
    from sbp.planner.plan import Plan

SCHEMA = 1


def placement_text(sbp: SBP) -> str:
    """One SBP in DTensor's words; `Layout.parse` reads it back."""
    if isinstance(sbp, Split):
        return f"Shard({sbp.axis})"
    return f"Partial({sbp.reduce})" if isinstance(sbp, Partial) else "Replicate()"


def placement_texts(layout: Layout) -> list[str]:
    """One text per mesh axis."""
    return [placement_text(sbp) for sbp in layout]


def placements_of(plan: Plan) -> dict[str, Any]:
    """The placements of a plan's parameters, inputs, outputs and modules; see the module's documentation."""
    graph, decisions = plan.graph, plan.decisions

    def kind(value: str) -> dict[str, Any]:
        return {"shape": list(graph.values[value].shape), "dtype": graph.values[value].dtype}

    def stored(value: str) -> dict[str, Any]:
        return {**kind(value), "stored": placement_texts(decisions.sources[value])}

    states: dict[str, dict[str, Any]] = {name: {} for name in graph.parameters}
    for value in graph.state:
        owner = value.rpartition(".")[0]
        if graph.values[value].kind == "optimizer" and owner in states:
            states[owner][value] = placement_texts(decisions.sources[value])
    return {
        "format": "sbp-placements",
        "schema": SCHEMA,
        "mesh": {"shape": list(plan.mesh.shape), "names": list(plan.mesh.names)},
        "parameters": {
            name: {
                **stored(name),
                "used": _used(plan, name, lambda phase: phase != "optimizer"),
                "updated": _updated(plan, name),
                "optimizer_state": states[name],
            }
            for name in graph.parameters
        },
        "buffers": {name: stored(name) for name in graph.state if graph.values[name].kind == "buffer"},
        "inputs": {name: stored(name) for name in graph.inputs},
        "outputs": {
            name: {
                **kind(name),
                "made": placement_texts(decisions.made(graph, name)),
                "stored": placement_texts(decisions.outputs[name]),
            }
            for name in graph.outputs
        },
        "modules": {path: _crossings(plan, path) for path in modules_of(graph)},
    }


def modules_of(graph: Graph) -> list[str]:
    """Paths of all modules with forward nodes, and of what contains them, in program order."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if node.phase == "forward" and node.module:
            parts = node.module.split(".")
            found.update(dict.fromkeys(".".join(parts[: count + 1]) for count in range(len(parts))))
    return list(found)


def _used(plan: Plan, value: str, counts: Any) -> list[list[str]]:
    graph = plan.graph
    layouts = (
        plan.decisions.signatures[graph.nodes[at].name].inputs[operand]
        for at, operand in graph.consumers[value]
        if counts(graph.nodes[at].phase)
    )
    return _distinct(layouts)


def _distinct(layouts: Iterable[Layout]) -> list[list[str]]:
    return [placement_texts(layout) for layout in dict.fromkeys(layouts)]


def _updated(plan: Plan, name: str) -> list[str] | None:
    graph = plan.graph
    new = graph.updates.get(name)
    if new is None or new not in graph.producers:
        return None
    node = graph.nodes[graph.producers[new][0]]
    if node.inputs[:1] != (name,) or REGISTRY[node.op].input_names[:2] != ("parameter", "grad"):
        return None
    return placement_texts(plan.decisions.signatures[node.name].inputs[0])


def _crossings(plan: Plan, path: str) -> dict[str, list[dict[str, Any]]]:
    """What enters and leaves a module in the forward phase, state aside."""
    graph, decisions = plan.graph, plan.decisions
    inside = {
        at
        for at, node in enumerate(graph.nodes)
        if node.phase == "forward" and (node.module == path or node.module.startswith(f"{path}."))
    }
    entering: dict[str, list[Layout]] = {}
    leaving: dict[str, list[Layout]] = {}
    for at in sorted(inside):
        node = graph.nodes[at]
        for value, layout in zip(node.inputs, decisions.signatures[node.name].inputs):
            producer = graph.producers.get(value)
            if graph.values[value].kind not in STATE_KINDS and (producer is None or producer[0] not in inside):
                entering.setdefault(value, []).append(layout)
        for value in node.outputs:
            outside = [
                decisions.signatures[graph.nodes[reader].name].inputs[operand]
                for reader, operand in graph.consumers[value]
                if reader not in inside and graph.nodes[reader].phase == "forward"
            ]
            outside += [decisions.outputs[value]] if value in graph.outputs else []
            if outside:
                leaving[value] = outside
    return {
        key: [
            {
                "value": value,
                "shape": list(graph.values[value].shape),
                "dtype": graph.values[value].dtype,
                "made": placement_texts(decisions.made(graph, value)),
                "used": _distinct(layouts),
            }
            for value, layouts in crossing.items()
        ]
        for key, crossing in (("inputs", entering), ("outputs", leaving))
    }
