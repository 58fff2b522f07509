"""Strategies: every signature that a node may take on the mesh, with its seconds, as arrays that equal nodes share."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sbp.errors import InfeasibleError
from sbp.graph import Graph, Node
from sbp.layout import Layout, Partial
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, TensorType
from sbp.planner.borders import border_seconds, border_times
from sbp.planner.boxing import BoxingTable, LayoutSpace
from sbp.planner.cost import ComputeCosts, kernel_seconds
from sbp.rule import BoundRule, Signature

LEAST_FILL = 0.5
"""Planning leaves out splits whose mean shard is less than half of the largest: more than half of the work is waste."""


class Restriction(Protocol):
    """Narrows what a plan may choose: pins, and the baselines."""

    def key(self, graph: Graph, node: Node) -> Hashable:
        """Nodes of equal structure and equal key are restricted alike."""

    def allows(self, graph: Graph, node: Node, signature: Signature) -> bool:
        """Whether the node may take the signature."""

    def allows_source(self, graph: Graph, value: str, layout: Layout) -> bool:
        """Whether the input or state value may be stored in the layout."""

    def describe(self, graph: Graph, place: str) -> str:
        """What narrows this node or value, for messages."""


@dataclass(frozen=True, eq=False)
class StrategySet:
    """The strategies of a node (or of every node like it).

    Attributes
    ----------
    signatures
        One per strategy.
    seconds, flops
        float64 (strategies,): compute time and FLOP on the rank with the largest shards.
    inputs, outputs
        Per operand int64 (strategies,): the layout's number in the operand's `LayoutSpace`.
    """

    signatures: tuple[Signature, ...]
    seconds: np.ndarray
    flops: np.ndarray
    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


class Strategies:
    """The strategies of all nodes and sources of a graph on a mesh.

    Parameters
    ----------
    restriction
        Narrows the choice; a node that is left without strategies raises `InfeasibleError` naming it.
    least_fill
        See `BoundRule.signatures`.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        compute: ComputeCosts,
        boxing: BoxingTable,
        restriction: Restriction | None = None,
        least_fill: float = LEAST_FILL,
    ) -> None:
        self.graph = graph
        self.mesh = mesh
        self.boxing = boxing
        self.reductions = possible_reductions(graph)
        self._compute = compute
        self._restriction = restriction
        self._least_fill = least_fill
        self._sets: dict[Hashable, StrategySet] = {}
        self._sources: dict[Hashable, np.ndarray] = {}

    def space(self, value: str) -> LayoutSpace:
        """The layout space of a value."""
        return self.boxing.space(self.graph.values[value].type, {"sum", *self.reductions[value]})

    def of_node(self, node: Node) -> StrategySet:
        """The node's strategies."""
        types = self.graph.types(node.inputs)
        reductions = tuple(tuple(sorted(self.reductions[name])) for name in (*node.inputs, *node.outputs))
        attributes = tuple(sorted((name, repr(value)) for name, value in node.attributes.items()))
        extra = self._restriction.key(self.graph, node) if self._restriction else None
        key = (node.op, types, attributes, reductions, extra)
        if key not in self._sets:
            self._sets[key] = self._enumerate(node, types)
        return self._sets[key]

    def of_source(self, value: str) -> np.ndarray:
        """Numbers (in the value's space) of the layouts in which an input or state value may be stored."""
        type = self.graph.values[value].type
        spaces = self.space(value)
        allowed = self._restriction.allows_source if self._restriction else None
        key: Hashable = (type, tuple(sorted(self.reductions[value])))
        if key not in self._sources:
            self._sources[key] = _frozen([i for i, layout in enumerate(spaces.layouts) if self._storable(layout, type)])
        numbers = self._sources[key]
        if allowed is None:
            return numbers
        kept = tuple(int(i) for i in numbers if allowed(self.graph, value, spaces.layouts[i]))
        if len(kept) == len(numbers):
            return numbers
        if not kept:  # a restriction may ask for a layout that planning would leave out, such as a very uneven one
            kept = tuple(i for i, l in enumerate(spaces.layouts) if not l.has_partial and allowed(self.graph, value, l))
        if not kept:
            assert self._restriction is not None
            raise InfeasibleError(
                f"{value}: {type} has no layout that satisfies {self._restriction.describe(self.graph, value)}."
            )
        return self._sources.setdefault((key, kept), _frozen(kept))

    def storable(self, value: str) -> np.ndarray:
        """Numbers of the layouts without Partial, in which an output may be left."""
        shape = self.mesh.shape
        layouts = enumerate(self.space(value).layouts)
        return _frozen([i for i, l in layouts if not l.has_partial and l == l.normal(shape)])

    def _storable(self, layout: Layout, type: TensorType) -> bool:
        if layout.has_partial or layout != layout.normal(self.mesh.shape):
            return False
        local = layout.local_shape(type.shape, self.mesh.shape)
        ways = [1] * len(local)
        for sbp, parts in zip(layout, self.mesh.shape):
            if not isinstance(sbp, Partial) and hasattr(sbp, "axis"):
                ways[sbp.axis] *= parts
        return all(size >= self._least_fill * parts * part for size, parts, part in zip(type.shape, ways, local))

    def _enumerate(self, node: Node, types: tuple[TensorType, ...]) -> StrategySet:
        op = REGISTRY[node.op]
        rule = self._reachable(node, op.bind(types, node.attributes))
        signatures = rule.signatures(self.mesh.shape, self._least_fill)
        if self._restriction is not None:
            restriction = self._restriction
            kept = tuple(s for s in signatures if restriction.allows(self.graph, node, s))
            if not kept:
                every = op.bind(types, node.attributes).signatures(self.mesh.shape)
                kept = tuple(s for s in every if self._offers(node, s) and restriction.allows(self.graph, node, s))
            if not kept:
                raise InfeasibleError(
                    f"node {node.name} ({op.name} {', '.join(map(str, types))}) on {self.mesh} has no signature that "
                    f"satisfies {restriction.describe(self.graph, node.name)}."
                )
            signatures = kept
        outputs = self.graph.types(node.outputs)
        dtype = outputs[0].dtype
        cases = [(rule, types, outputs, node.attributes, signature, self.mesh.shape) for signature in signatures]
        work = [op.work(*case) for case in cases]
        seconds = [
            kernel_seconds(self._compute, op, case, flops, moved, dtype)
            + border_seconds(border_times(op, rule, types, node.attributes, signature, self.mesh, self.boxing.costs))
            for (flops, moved), case, signature in zip(work, cases, signatures)
        ]
        in_spaces = [self.space(name) for name in node.inputs]
        out_spaces = [self.space(name) for name in node.outputs]
        return StrategySet(
            signatures,
            np.array(seconds, dtype=np.float64),
            np.array([flops for flops, _ in work], dtype=np.float64),
            tuple(_frozen([space.index[s.inputs[k]] for s in signatures]) for k, space in enumerate(in_spaces)),
            tuple(_frozen([space.index[s.outputs[k]] for s in signatures]) for k, space in enumerate(out_spaces)),
        )

    def _offers(self, node: Node, signature: Signature) -> bool:
        """Whether every operand can be in its layout: P(max) only where some producer makes such parts."""
        names, layouts = (*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs)
        return all(layout in self.space(name).index for name, layout in zip(names, layouts))

    def _reachable(self, node: Node, rule: BoundRule) -> BoundRule:
        """Without the passings that no input can feed: making a whole tensor Partial only to pass it on never pays."""
        passing = tuple(p for p in rule.passing if _feeds(p.before, p.inputs, node, self.reductions))
        return replace(rule, passing=passing)


def _feeds(before: str, inputs: frozenset[int], node: Node, reductions: Mapping[str, frozenset[str]]) -> bool:
    return any(before in reductions[node.inputs[index]] for index in inputs)


def possible_reductions(graph: Graph) -> dict[str, frozenset[str]]:
    """Value -> reductions by which it can come out Partial: a rule contracts a dimension, or passes a Partial on."""
    found: dict[str, frozenset[str]] = {name: frozenset() for name in graph.values}
    for node in graph.nodes:
        rule = graph.rule(node)
        for number, name in enumerate(node.outputs):
            present = {factor for dimension in rule.outputs[number] for factor in dimension}
            kinds = {
                factor.reduce
                for index, factor in enumerate(rule.factors)
                if factor.reduce is not None and factor.splittable and index not in present
            }
            kinds |= {p.after for p in rule.passing if number in p.outputs and _feeds(p.before, p.inputs, node, found)}
            found[name] = frozenset(kinds)
    return found


def _frozen(numbers) -> np.ndarray:
    array = np.array(numbers, dtype=np.int64)
    array.flags.writeable = False
    return array
