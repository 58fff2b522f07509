"""Styles: the usual ways to parallelise, as restrictions per mesh axis on what a plan may choose.

The baselines are plans under a style; and a plan under a style, found in a moment, is where a hard search starts from.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from sbp.graph import STATE_KINDS, Graph, Node
from sbp.layout import SBP, Broadcast, Layout, Split
from sbp.mesh import Mesh
from sbp.rule import Signature

COLUMN_PARALLEL = re.compile(
    r"(?:^|\.)(?:qkv|q|k|v|q_proj|k_proj|v_proj|query|key|value|fc|fc1|gate|gate_proj|up|up_proj)\.(?:weight|bias)$"
)
ROW_PARALLEL = re.compile(r"(?:^|\.)(?:proj|o|o_proj|out|fc2|down|down_proj)\.weight$")
VOCABULARY_PARALLEL = re.compile(
    r"(?:^|\.)(?:wte|tok_embeddings|embed_tokens|word_embeddings|token|lm_head|head|output|decoder)\.weight$"
)
"""How Megatron-LM splits a transformer's weights over a tensor-parallel axis (Shoeybi et al. 2019, arXiv:1909.08053).
"""

EXPERTS = re.compile(r"(?:^|\.)experts(?:\.|$)")
"""Names of what belongs to the experts of a mixture, whose weights are stacked: (experts, ...)."""


@dataclass(frozen=True, eq=False)
class Facts:
    """What the styles need to know of a graph.

    Its weight-like values, its batch size and sequence length, and its number of experts (0: there are none).
    """

    graph: Graph
    weights: frozenset[str]
    batch: int
    length: int
    experts: int = 0

    @classmethod
    def of(cls, graph: Graph) -> Facts:
        """Read them off the graph: batch and length are the first two sizes of the input of highest rank."""
        longest = max((graph.values[name].shape for name in graph.inputs), key=len, default=())
        stacked = (graph.values[name].shape for name in graph.parameters if EXPERTS.search(name))
        experts = next((shape[0] for shape in stacked if len(shape) > 2), 0)
        batch, length = (*longest, 0, 0)[:2]
        return cls(graph, weight_like(graph), batch, length, experts)


class DataParallel:
    """Batch split, parameters and optimizer state everywhere."""

    def source(self, facts: Facts, value: str, sbp: SBP, parts: int) -> bool:
        if facts.graph.values[value].kind in STATE_KINDS:
            return isinstance(sbp, Broadcast)
        return _splits_batch(facts.graph, value, sbp, parts)

    def operand(self, facts: Facts, node: Node, value: str, sbp: SBP) -> bool:
        if not isinstance(sbp, Split):
            return True
        return node.phase != "optimizer" and value not in facts.weights and sbp.axis == 0


class FullyShardedDataParallel(DataParallel):
    """Batch split; parameters, gradients and optimizer state split and gathered where they are used (ZeRO-3, FSDP)."""

    def source(self, facts: Facts, value: str, sbp: SBP, parts: int) -> bool:
        shape = facts.graph.values[value].shape
        if facts.graph.values[value].kind in STATE_KINDS:
            return isinstance(sbp, Split) or max(shape, default=0) < parts
        return _splits_batch(facts.graph, value, sbp, parts)

    def operand(self, facts: Facts, node: Node, value: str, sbp: SBP) -> bool:
        if not isinstance(sbp, Split) or node.phase == "optimizer":
            return True
        if all(name in facts.weights for name in node.inputs):
            return True  # casts and the like work on shards
        return value not in facts.weights and sbp.axis == 0


class ShardedOptimizer(DataParallel):
    """Batch split, parameters everywhere; gradients and optimizer state split, next parameters gathered (ZeRO-1, 2)."""

    def source(self, facts: Facts, value: str, sbp: SBP, parts: int) -> bool:
        if facts.graph.values[value].kind == "optimizer":
            return isinstance(sbp, Split) or max(facts.graph.values[value].shape, default=0) < parts
        return super().source(facts, value, sbp, parts)

    def operand(self, facts: Facts, node: Node, value: str, sbp: SBP) -> bool:
        return node.phase == "optimizer" or super().operand(facts, node, value, sbp)


class ContextParallel:
    """Sequence split in all activations, parameters and optimizer state everywhere (ring or all-gather attention)."""

    def source(self, facts: Facts, value: str, sbp: SBP, parts: int) -> bool:
        shape = facts.graph.values[value].shape
        if facts.graph.values[value].kind in STATE_KINDS or len(shape) < 2 or shape[1] != facts.length:
            return isinstance(sbp, Broadcast)
        return sbp == Split(1) or shape[1] < parts

    def operand(self, facts: Facts, node: Node, value: str, sbp: SBP) -> bool:
        if not isinstance(sbp, Split):
            return True
        shape = facts.graph.values[value].shape
        return node.phase != "optimizer" and value not in facts.weights and shape[sbp.axis] == facts.length


class ExpertParallel(DataParallel):
    """Data parallel but for the experts of a mixture, which are split: all-to-alls take tokens to them (GShard)."""

    def source(self, facts: Facts, value: str, sbp: SBP, parts: int) -> bool:
        if self._stacked(facts, value) and facts.graph.values[value].kind in STATE_KINDS:
            return sbp == Split(0) or facts.experts < parts
        return super().source(facts, value, sbp, parts)

    def operand(self, facts: Facts, node: Node, value: str, sbp: SBP) -> bool:
        if not isinstance(sbp, Split):
            return True
        if value in facts.weights or node.phase == "optimizer":
            return sbp.axis == 0 and self._stacked(facts, value)
        return sbp.axis == 0 or facts.graph.values[value].shape[sbp.axis] == facts.experts

    def _stacked(self, facts: Facts, value: str) -> bool:
        shape = facts.graph.values[value].shape
        return facts.experts > 0 and len(shape) > 2 and shape[0] == facts.experts


@dataclass(frozen=True)
class TensorParallel:
    """Weights split by column, row and vocabulary as in Megatron-LM; the batch is not split.

    With `sequence`, activations between the split matrix products may be split along the sequence
    (Korthikanti et al. 2022, arXiv:2205.05198).
    """

    sequence: bool = False

    def source(self, facts: Facts, value: str, sbp: SBP, parts: int) -> bool:
        if facts.graph.values[value].kind not in STATE_KINDS:
            return isinstance(sbp, Broadcast)
        name = re.sub(r"\.(?:exp_avg|exp_avg_sq|momentum_buffer|max_exp_avg_sq)$", "", value)
        shape = facts.graph.values[value].shape
        if COLUMN_PARALLEL.search(name) or VOCABULARY_PARALLEL.search(name):
            return sbp == Split(0) or shape[0] < parts
        if ROW_PARALLEL.search(name):
            return sbp == Split(1) or shape[1] < parts
        return isinstance(sbp, Broadcast)

    def operand(self, facts: Facts, node: Node, value: str, sbp: SBP) -> bool:
        if not isinstance(sbp, Split) or value in facts.weights or node.phase == "optimizer":
            return True
        shape = facts.graph.values[value].shape
        if sbp.axis == 0 and shape[0] == facts.batch and len(shape) > 1:
            return False
        return self.sequence or not (len(shape) == 3 and sbp.axis == 1 and shape[1] == facts.length)


Style = DataParallel | ShardedOptimizer | FullyShardedDataParallel | ExpertParallel | TensorParallel | ContextParallel


class Styles:
    """A restriction (see `sbp.planner.strategies.Restriction`): one style per mesh axis."""

    def __init__(self, graph: Graph, mesh: Mesh, *styles: Style) -> None:
        self.mesh = mesh
        self.styles = styles
        self.facts = Facts.of(graph)

    def key(self, graph: Graph, node: Node) -> Hashable:
        """Which operands are weights, and the phase: all that the styles look at besides shapes."""
        weights = self.facts.weights
        return node.phase, tuple(name in weights for name in (*node.inputs, *node.outputs))

    def allows(self, graph: Graph, node: Node, signature: Signature) -> bool:
        """Every axis follows its style."""
        operands = list(zip((*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs)))
        return all(
            style.operand(self.facts, node, value, layout[axis])
            for axis, style in enumerate(self.styles)
            for value, layout in operands
        )

    def allows_source(self, graph: Graph, value: str, layout: Layout) -> bool:
        """Every axis follows its style."""
        return all(
            style.source(self.facts, value, layout[axis], self.mesh.shape[axis])
            for axis, style in enumerate(self.styles)
            if self.mesh.shape[axis] > 1
        )

    def describe(self, graph: Graph, place: str) -> str:
        """The styles."""
        return "the style " + " x ".join(type(style).__name__ for style in self.styles)


def weight_like(graph: Graph) -> frozenset[str]:
    """Values that depend on state only (parameters, their casts), and gradients and next values of parameters."""
    known = {name for name in graph.sources if graph.values[name].kind in STATE_KINDS}
    for node in graph.nodes:
        if node.phase == "optimizer" or (node.inputs and all(name in known for name in node.inputs)):
            known.update(node.outputs)
    # A gradient that reaches the optimizer belongs to the weights, and so do the casts and sums on its way there.
    wanted = {name for node in graph.nodes if node.phase == "optimizer" for name in node.inputs} | set(
        graph.updates.values()
    )
    for node in reversed(graph.nodes):
        if any(name in wanted for name in node.outputs):
            known.update(name for name in node.outputs if name in wanted)
            if len(node.inputs) <= 2 and all(
                graph.values[n].shape == graph.values[node.outputs[0]].shape for n in node.inputs
            ):
                wanted.update(name for name in node.inputs if name in graph.producers)
    return frozenset(known)


def _splits_batch(graph: Graph, value: str, sbp: SBP, parts: int) -> bool:
    shape = graph.values[value].shape
    if not shape or shape[0] < parts:
        return isinstance(sbp, Broadcast)
    return sbp == Split(0)
