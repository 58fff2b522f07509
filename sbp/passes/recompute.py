"""Recompute: blocks run their forward part again in the backward phase instead of keeping activations.

Chen et al. 2016, "Training deep nets with sublinear memory cost" (arXiv:1604.06174), with one segment per block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from sbp.graph import Graph, Node, Value

_NUMBERED = re.compile(r"(?:[A-Za-z_]\w*\.)*\d+(?=\.|$)")


def block_of(module: str) -> str | None:
    """The block that a module path lies in: the part up to its first number, such as `h.3` of `h.3.mlp.fc`."""
    match = _NUMBERED.match(module)
    return match[0] if match else None


def with_recompute(graph: Graph, block: Callable[[str], str | None] = block_of) -> Graph:
    """A training step whose blocks keep only what enters and leaves them.

    Every value that is made inside a block, read by the backward phase and by no forward node outside the block, is
    made again by copies of the block's nodes, which stand before the first backward node that reads one of them. Random
    masks come out the same, because they depend on seeds and positions only; buffers are updated by the first run.

    Parameters
    ----------
    graph
        A training step (see `sbp.training.training_step`).
    block
        Module path -> its block's name, or None for modules outside of blocks; default `block_of`.

    Returns
    -------
    Graph
        Validated; copies are named `<node>.again`. Without blocks it equals the input.
    """
    blocks = [block(node.module) if node.phase == "forward" else None for node in graph.nodes]
    kept_for = _kept_outside(graph, blocks)
    copied: dict[str, dict[int, None]] = {}
    first_reader: dict[str, int] = {}

    def need(name: str, reader: int) -> None:
        """The value is read again: copy its node, and those that its inputs need."""
        producer = graph.producers.get(name)
        if producer is None or name in kept_for:
            return
        at, home = producer[0], blocks[producer[0]]
        if home is None:
            return
        first_reader[home] = min(first_reader.get(home, reader), reader)
        nodes = copied.setdefault(home, {})
        if at not in nodes:
            nodes[at] = None
            for read in graph.nodes[at].inputs:
                made = graph.producers.get(read)
                if made is not None and blocks[made[0]] == home:
                    need(read, reader)

    for at, node in enumerate(graph.nodes):
        if node.phase != "forward":
            for name in node.inputs:
                need(name, at)

    again = {
        name: f"{name}.again"
        for nodes in copied.values()
        for at in nodes
        for name in graph.nodes[at].outputs
        if name not in kept_for
    }
    values: dict[str, Value] = dict(graph.values)
    inserted: dict[int, list[Node]] = {}
    for home, nodes in copied.items():
        for at in sorted(nodes):
            node = graph.nodes[at]
            outputs = tuple(f"{name}.again" for name in node.outputs)
            for name, new in zip(node.outputs, outputs):
                values[new] = replace(graph.values[name], name=new)
            inputs = tuple(
                again[name] if name in again and _inside(graph, name, home, blocks) else name for name in node.inputs
            )
            copy = replace(node, name=f"{node.name}.again", inputs=inputs, outputs=outputs, phase="backward")
            inserted.setdefault(first_reader[home], []).append(copy)
    result: list[Node] = []
    for at, node in enumerate(graph.nodes):
        result.extend(inserted.get(at, ()))
        if node.phase != "forward":
            node = replace(node, inputs=tuple(again.get(name, name) for name in node.inputs))
        result.append(node)
    return Graph(graph.name, values, tuple(result), graph.outputs, graph.updates).validate()


def _kept_outside(graph: Graph, blocks: list[str | None]) -> frozenset[str]:
    """Values that stay anyway: what a forward node outside their block reads, outputs, and next values of state."""
    kept = {*graph.outputs, *graph.updates.values()}
    for at, node in enumerate(graph.nodes):
        if node.phase == "forward":
            for name in node.inputs:
                producer = graph.producers.get(name)
                if producer is not None and blocks[producer[0]] != blocks[at]:
                    kept.add(name)
    return frozenset(kept)


def _inside(graph: Graph, name: str, home: str, blocks: list[str | None]) -> bool:
    producer = graph.producers.get(name)
    return producer is not None and blocks[producer[0]] == home
