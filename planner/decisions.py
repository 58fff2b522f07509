"""Decisions: everything a plan chooses, from which its boxing, cost, memory and program follow."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from sbp.errors import PlanError
from sbp.graph import Graph
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.planner.uses import OUTPUT, UPDATE, Group, groups_of, is_resident
from sbp.rule import Signature


@dataclass(frozen=True)
class Decisions:
    """What a plan chooses.

    Attributes
    ----------
    sources
        Input or state value -> the layout it is stored in.
    signatures
        Node name -> its signature.
    outputs
        Output value -> the layout it is left in.
    kept
        Value -> the layout kept from the forward phase for the later ones, where that is not the one it was made in;
        for state values, which stay anyway, a copy kept besides.
    """

    sources: Mapping[str, Layout]
    signatures: Mapping[str, Signature]
    outputs: Mapping[str, Layout]
    kept: Mapping[str, Layout] = field(default_factory=dict)

    def made(self, graph: Graph, value: str) -> Layout:
        """The layout in which a value comes to be."""
        producer = graph.producers.get(value)
        if producer is None:
            return self.sources[value]
        return self.signatures[graph.nodes[producer[0]].name].outputs[producer[1]]

    def wanted(self, graph: Graph, value: str, group: Group) -> tuple[Layout, ...]:
        """The layouts that the uses of a group ask for, one per use."""
        found = []
        for use in group.uses:
            if use.operand == OUTPUT:
                found.append(self.outputs[value])
            elif use.operand == UPDATE:
                found.append(self.sources[use.state])
            else:
                found.append(self.signatures[graph.nodes[use.node].name].inputs[use.operand])
        return tuple(found)

    def check(self, graph: Graph, mesh: Mesh) -> Decisions:
        """Raise `PlanError`, naming the place, unless everything is decided and legal; returns itself."""
        for value in graph.sources:
            layout = self.sources.get(value)
            if layout is None:
                raise PlanError(f"value {value}: the plan does not say how it is stored.")
            layout.check(graph.values[value].shape, mesh.shape, value)
            if layout.has_partial:
                raise PlanError(f"value {value}: inputs and state cannot be stored Partial, got {layout}.")
        for node in graph.nodes:
            signature = self.signatures.get(node.name)
            if signature is None:
                raise PlanError(f"node {node.name}: the plan has no signature for it.")
            if not graph.rule(node).admits(signature, mesh.shape):
                types = ", ".join(map(str, graph.types(node.inputs)))
                raise PlanError(f"node {node.name} ({node.op} of {types}): {signature} is not a signature on {mesh}.")
        for value in graph.outputs:
            if value not in self.outputs or self.outputs[value].has_partial:
                raise PlanError(f"output {value}: the plan must leave it in a layout without Partial.")
            self.outputs[value].check(graph.values[value].shape, mesh.shape, value)
        for value, layout in self.kept.items():
            if value not in graph.values:
                raise PlanError(f"kept copy: the graph has no value {value!r}.")
            layout.check(graph.values[value].shape, mesh.shape, value)
        return self


def random_decisions(graph: Graph, mesh: Mesh, seed: int) -> Decisions:
    """Legal decisions drawn at random: any signature of any node, any stored layout, any kept copy."""
    generator = random.Random(seed)
    signatures = {node.name: generator.choice(graph.rule(node).signatures(mesh.shape)) for node in graph.nodes}

    def stored(value: str) -> Layout:
        rank = len(graph.values[value].shape)
        choices = [f"S({axis})" for axis in range(rank)] + ["B"]
        return Layout.parse([generator.choice(choices) for _ in mesh.shape]).normal(mesh.shape)

    sources = {value: stored(value) for value in graph.sources}
    decisions = Decisions(sources, signatures, {value: stored(value) for value in graph.outputs})
    kept = {}
    for value, groups in groups_of(graph).items():
        if len(groups) > 1 and generator.random() < 0.5:
            candidates = set(decisions.wanted(graph, value, groups[0]))
            if not is_resident(graph, value):
                candidates.discard(decisions.made(graph, value))
            if candidates:
                kept[value] = generator.choice(sorted(candidates, key=str))
    return Decisions(sources, signatures, decisions.outputs, kept)
