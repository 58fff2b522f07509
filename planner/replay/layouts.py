"""The layouts that training frameworks pin: tensor parallelism as in Megatron-LM, with or without sequence parallelism.

Weights are split by column, row and vocabulary (Shoeybi et al. 2019, arXiv:1909.08053). Between a row-parallel product
and the next column-parallel one, activations are whole on every rank, or, with sequence parallelism, split along the
sequence (Korthikanti et al. 2022, arXiv:2205.05198). What this leaves open, the planner decides.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from sbp.graph import Graph, Node
from sbp.layout import Broadcast, Layout, Split
from sbp.mesh import Mesh
from sbp.planner.styles import COLUMN_PARALLEL, ROW_PARALLEL, VOCABULARY_PARALLEL, Styles, TensorParallel
from sbp.rule import Signature

_SPLIT_INSIDE = re.compile(r"(?:^|\.)(?:attn|attention|self_attn|mlp|act|loss)$")
"""Modules whose own operators work on heads, on the feed-forward width or on the vocabulary, split over ranks."""

_WITH_WEIGHTS = frozenset({"linear", "matmul", "linear_weight_gradient", "embedding", "embedding_backward"})
"""Operators that a weight's layout decides about."""


class MegatronLayouts:
    """A restriction (see `sbp.planner.strategies.Restriction`) to Megatron-LM's layouts on a mesh of one axis."""

    def __init__(self, graph: Graph, mesh: Mesh, sequence_parallel: bool) -> None:
        self._styles = Styles(graph, mesh, TensorParallel(sequence=sequence_parallel))
        self._ranks = mesh.size
        self._stream = Split(1) if sequence_parallel else Broadcast()
        facts = self._styles.facts
        self._tokens = (facts.batch, facts.length)
        self._weights: dict[str, tuple[tuple[int, ...], Split]] = {}
        for name in graph.parameters:
            shape = graph.values[name].shape
            if len(shape) > 1 and (axis := _split_axis(name)) is not None:
                self._weights[name.rpartition(".")[0]] = shape, Split(axis)
        tied = next(
            (self._weights[module] for module in self._weights if VOCABULARY_PARALLEL.search(f"{module}.weight")), None
        )
        self._logits = None if tied is None else (*self._tokens, tied[0][0])
        for node in graph.nodes:
            if (
                tied is not None
                and node.module not in self._weights
                and VOCABULARY_PARALLEL.search(f"{node.module}.weight")
            ):
                self._weights[node.module] = tied

    def key(self, graph: Graph, node: Node) -> Hashable:
        """The style's key, the weight's layout, and whether the node works on the residual stream."""
        return self._styles.key(graph, node), self._weights.get(node.module), self._is_stream(node)

    def _is_stream(self, node: Node) -> bool:
        if node.phase == "optimizer" or node.op in _WITH_WEIGHTS or _SPLIT_INSIDE.search(node.module):
            return False
        weight = self._weights.get(node.module)
        return weight is None or weight[1] == Split(1)

    def allows(self, graph: Graph, node: Node, signature: Signature) -> bool:
        """Weights are used as they are stored, and the residual stream keeps its layout."""
        if not self._styles.allows(graph, node, signature):
            return False
        if self._ranks == 1 or node.phase == "optimizer":
            return True
        weight, stream = self._weights.get(node.module), self._is_stream(node)
        for name, layout in zip((*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs)):
            shape = graph.values[name].shape
            if shape == self._logits and layout[0] != Split(2):
                return False
            if weight is not None and shape == weight[0] and layout[0] != weight[1]:
                return False
            if stream and len(shape) > 2 and shape[:2] == self._tokens and layout[0] != self._stream:
                return False
        return True

    def allows_source(self, graph: Graph, value: str, layout: Layout) -> bool:
        """Weights are stored as they are used."""
        return self._styles.allows_source(graph, value, layout)

    def describe(self, graph: Graph, place: str) -> str:
        """For messages."""
        return "Megatron-LM's layouts"


def _split_axis(name: str) -> int | None:
    """The dimension of a weight that is split, if any is."""
    if COLUMN_PARALLEL.search(name) or VOCABULARY_PARALLEL.search(name):
        return 0
    return 1 if ROW_PARALLEL.search(name) else None
