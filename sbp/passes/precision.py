"""Mixed precision: which values are kept and computed in which element type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp.dtype import SIZES, is_floating
from sbp.errors import GraphError
from sbp.graph import Graph, Node
from sbp.ops import library as ops
from sbp.passes.replay import copy_node, replay
from sbp.trace import GraphBuilder, Symbol


@dataclass(frozen=True)
class Precision:
    """`storage` is the element type of state between steps, `compute` that of activations.

    `full` is what an explicit cast to f32 in the model means: losses and what else needs the digits.
    """

    storage: str
    compute: str
    full: str


PRECISIONS = {
    "mixed": Precision("f32", "bf16", "f32"),
    "bf16": Precision("bf16", "bf16", "f32"),
    "f32": Precision("f32", "f32", "f32"),
    "f64": Precision("f64", "f64", "f64"),
}
"""By name: mixed (bf16 computation, f32 parameters and optimizer state), bf16, f32, f64."""

_MATRIX = ("matmul", "linear", "convolution", "attention", "masked_attention", "einsum")  # tensor cores
_OWN_TYPES = (  # beside a narrow x their scale, shift and statistics stay wide, inside the kernels too
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm_apply",
    "channel_variance",
    "sum_exp",
    "log_probability",
)
_LOOK_UP = ("embedding", "gather")  # reads few rows of a large table, so rows are cast, not tables


def precision_named(name: str | Precision) -> Precision:
    """A precision by its name; unknown names raise `GraphError`."""
    if isinstance(name, Precision):
        return name
    if name not in PRECISIONS:
        raise GraphError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def with_precision(graph: Graph, precision: str | Precision) -> Graph:
    """A forward graph written in f32 in another precision.

    * Parameters are stored in `storage`, inputs and buffers as they are declared. Where that is not `compute`, each is
      cast once, a parameter in the module that owns it; of a table that is only looked up in, the rows are cast.
    * Scale, shift and statistics of normalizations, and the sums of cross-entropy, keep their own wide types.
    * Matrix products, convolutions and attention run in `compute`. Other nodes run in `compute` too, unless one of
      their inputs is wider (it comes from an explicit cast): then all its inputs are widened.
    * What only serves to update state (running statistics) is computed in the state's type.
    * Casts that change nothing are left out.

    Raises
    ------
    GraphError
        The graph has a backward phase already (apply it to the forward graph: gradients then follow it).
    """
    chosen = precision_named(precision)
    if any(node.phase != "forward" for node in graph.nodes):
        raise GraphError(f"graph {graph.name}: the precision must be chosen before gradients are added.")
    sources = set(graph.sources)
    values = {
        name: replace(value, type=replace(value.type, dtype=_source_type(value.kind, value.dtype, chosen)))
        if name in sources
        else value
        for name, value in graph.values.items()
    }
    rewriter = _Rewriter(graph, chosen)
    builder, symbols = replay(replace(graph, values=values), rewriter.visit)
    for state in graph.updates:
        new = symbols[graph.updates[state]]
        if new.dtype != symbols[state].dtype:
            with builder:
                builder.update(symbols[state], ops.cast(new, dtype=symbols[state].dtype))
    return builder.finish([symbols[name] for name in graph.outputs])


def _source_type(kind: str, dtype: str, precision: Precision) -> str:
    if not is_floating(dtype):
        return dtype
    if kind in ("input", "buffer"):  # targets and running statistics need not lose digits
        return precision.full if dtype == "f32" else dtype
    return precision.storage


class _Rewriter:
    """Chooses the element types of one node after the other."""

    def __init__(self, graph: Graph, precision: Precision) -> None:
        self.graph = graph
        self.precision = precision
        self.sources = set(graph.sources)
        self.casts: dict[tuple[str, str], Symbol] = {}
        self.only_updates = _only_for_updates(graph)
        self.only_looked_up = {
            name
            for name in graph.parameters
            if graph.consumers[name] and all(graph.nodes[i].op in _LOOK_UP and k == 0 for i, k in graph.consumers[name])
        }

    def visit(self, builder: GraphBuilder, node: Node, inputs: Sequence[Symbol]) -> Any:
        compute, full = self.precision.compute, self.precision.full
        if node.op == "cast" and is_floating(node.attributes["dtype"]):
            target = full if node.attributes["dtype"] == "f32" else node.attributes["dtype"]
            if is_floating(inputs[0].dtype):
                if self._is_source(inputs[0]):
                    return self._cast(builder, inputs[0], target)
                return inputs[0] if inputs[0].dtype == target else ops.cast(inputs[0], dtype=target)
            return ops.cast(inputs[0], dtype=target if target == full else compute)
        if node.op in _LOOK_UP and node.inputs[0] in self.only_looked_up:
            rows = copy_node(builder, node, inputs)
            return rows if rows.dtype == compute else ops.cast(rows, dtype=compute)
        if node.name in self.only_updates:
            wide = self._widest([item.dtype for item in inputs])
        elif node.op in _MATRIX:
            wide = compute
        else:
            decisive = inputs[:1] if node.op in _OWN_TYPES else inputs
            wide = self._widest([compute, *(item.dtype for item in decisive if not self._is_source(item))])
        count = 1 if node.op in _OWN_TYPES else len(inputs)
        inputs = [
            self._cast(builder, item, wide) if index < count and is_floating(item.dtype) else item
            for index, item in enumerate(inputs)
        ]
        if is_floating(node.attributes.get("dtype", "")):
            node = replace(node, attributes={**node.attributes, "dtype": wide})
        return copy_node(builder, node, inputs)

    def _is_source(self, symbol: Symbol) -> bool:
        return symbol.name in self.sources

    def _widest(self, dtypes: Sequence[str]) -> str:
        floating = [dtype for dtype in dtypes if is_floating(dtype)]
        return max(floating, key=lambda dtype: SIZES[dtype], default=self.precision.compute)

    def _cast(self, builder: GraphBuilder, symbol: Symbol, dtype: str) -> Symbol:
        """The symbol in another type; cast once per type, a source in the module that owns it."""
        if symbol.dtype == dtype:
            return symbol
        known = self.casts.get((symbol.name, dtype))
        if known is None:
            module = symbol.name.rpartition(".")[0] if self._is_source(symbol) else builder.module
            with builder.at("forward", module):
                known = ops.cast(symbol, dtype=dtype)
            self.casts[symbol.name, dtype] = known
        return known


def _only_for_updates(graph: Graph) -> set[str]:
    """Names of nodes whose results reach new state but no output."""
    wanted = set(graph.outputs)
    useful: set[str] = set()
    for node in reversed(graph.nodes):
        if any(name in wanted for name in node.outputs):
            wanted.update(node.inputs)
            useful.add(node.name)
    return {node.name for node in graph.nodes if node.name not in useful}
