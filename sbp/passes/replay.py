"""Building a graph anew from another one, node by node: what every pass that changes nodes is written with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sbp.graph import Graph, Node
from sbp.operator import REGISTRY
from sbp.trace import GraphBuilder, Symbol

Visit = Callable[[GraphBuilder, Node, Sequence[Symbol]], Any]
"""Adds what stands for a node, given its inputs in the new graph; returns its output or outputs there."""


def copy_node(builder: GraphBuilder, node: Node, inputs: Sequence[Symbol]) -> Any:
    """The same operator with the same name and attributes on other inputs."""
    return builder.apply(REGISTRY[node.op], inputs, node.attributes, name=node.name)


def replay(graph: Graph, visit: Visit = copy_node) -> tuple[GraphBuilder, dict[str, Symbol]]:
    """Build a graph anew; nodes keep names, module paths and phases.

    Returns
    -------
    builder, symbols
        The builder, in which more can be added, and the new symbol of every value of `graph`.
    """
    builder = GraphBuilder(graph.name)
    symbols: dict[str, Symbol] = {}
    for name in graph.sources:
        value = graph.values[name]
        symbols[name] = builder.source(name, value.type, value.kind, value.initial)
    for node in graph.nodes:
        with builder, builder.at(node.phase, node.module):
            made = visit(builder, node, [symbols[name] for name in node.inputs])
        made = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        symbols.update(zip(node.outputs, made))
    for state, new in graph.updates.items():
        builder.update(symbols[state], symbols[new])
    return builder, symbols
