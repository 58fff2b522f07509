"""What one rank does for one micro-batch: the kernels and collectives of a physical plan, without their times.

A model of one layer is planned with pinned layouts and lowered; its operations, told apart by module, are those of the
embedding, of every layer, and of the head with the loss. Decisions do not depend on sizes, so they are made once per
kind of model and split; every other size is lowered under the same decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from sbp.dtype import SIZES
from sbp.graph import STATE_KINDS, Graph
from sbp.mesh import Mesh
from sbp.models.bert import BertConfig
from sbp.models.gpt import GPTConfig
from sbp.models.llama import LlamaConfig
from sbp.operator import REGISTRY
from sbp.passes.recompute import block_of
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster, Device, Tier
from sbp.planner.cost import VIEWS, AnalyticCostModel
from sbp.planner.decisions import Decisions
from sbp.planner.lowering import lower
from sbp.planner.physical import COLLECTIVES, Box, Compute, PhysicalPlan
from sbp.planner.replay.layouts import MegatronLayouts
from sbp.planner.search import search
from sbp.planner.solver import Limits
from sbp.planner.workload import workload
from sbp.rule import Signature

ModelConfig = GPTConfig | LlamaConfig | BertConfig

PARTS = ("embedding", "layer", "head")

STRIDED = VIEWS | {"split", "permute", "transpose", "expand", "slice"}
"""Operators that frameworks leave to the strides of the next kernel."""

POINTWISE = frozenset(
    {"add", "sub", "mul", "div", "neg", "scale", "shift", "cast", "dropout", "gelu", "silu", "relu"}
    | {"gelu_backward", "silu_backward", "relu_backward"}
)
"""Operators that can share one kernel with the pointwise operator that feeds them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One operation on one rank.

    Parameters
    ----------
    kind
        "product", "attention", "attention_backward", "memory", or one of `COLLECTIVES`.
    sizes
        Of a product (batch, m, n, k); of attention (batch, heads, queries, keys, head size, key heads,
        causal).
    bytes
        What a memory kernel reads and writes, or the payload of a collective.
    fused_bytes
        The same where pointwise operators in a row are one kernel.
    starts
        False if it then belongs to the kernel before it.
    parameters
        Elements of the weight whose gradient a product makes, else 0.
    """

    op: str
    kind: str
    sizes: tuple[int, ...]
    bytes: float
    fused_bytes: float
    starts: bool
    dtype: str
    parameters: int = 0


@dataclass(frozen=True)
class Program:
    """The kernels of a model of one layer, by part and phase, and what its parts hold.

    Attributes
    ----------
    kernels
        (part, "forward" or "backward") -> kernels in order.
    parameters
        Part -> elements of its parameters on one rank.
    tied
        Elements of the embedding that the head uses as well.
    activations
        Part -> bytes made by the forward phase and read by the backward phase, on one rank, attention's scores aside.
    stream_bytes
        Bytes of the residual stream of one micro-batch on one rank: what stages send, and full recompute keeps.
    """

    kernels: Mapping[tuple[str, str], tuple[Kernel, ...]]
    parameters: Mapping[str, int]
    tied: int
    activations: Mapping[str, int]
    stream_bytes: int


_LAYOUT_CLUSTER = Cluster(
    "layouts", Device("any", (("f32", 1e14),), 1 << 60, 1e12), 1, 1, (Tier("any", None, 1e-5, 1e11),)
)
"""Where layouts are decided: pinned ones do not depend on the hardware."""


@lru_cache(maxsize=2048)
def program(
    model: ModelConfig, ranks: int, sequence_parallel: bool, batch: int, sequence: int, precision: str
) -> Program:
    """The program of one micro-batch of a model on `ranks` tensor-parallel ranks; `model.layers` is not used.

    Raises
    ------
    SbpError
        Sizes that the model or the split cannot take.
    """
    graph = _graph(model, batch, sequence, precision)
    mesh = Mesh((ranks,), ("tp",))
    kind = _small(model)
    decisions = _decisions(kind, min(ranks, 2), sequence_parallel and ranks > 1, precision)
    costs = AnalyticCostModel(_LAYOUT_CLUSTER.with_nodes(ranks))
    return _extract(graph, lower(graph, mesh, decisions, costs, BoxingTable(mesh, costs)))


def _small(model: ModelConfig) -> ModelConfig:
    """A model whose graph has the same nodes, small enough to be planned at once."""
    if isinstance(model, LlamaConfig):
        return replace(model, layers=1, heads=2, kv_heads=2, hidden=64, vocabulary=128, positions=16, intermediate=128)
    return replace(model, layers=1, heads=2, hidden=64, vocabulary=128, positions=16, intermediate=128)


def _graph(model: ModelConfig, batch: int, sequence: int, precision: str) -> Graph:
    fitting = replace(model, layers=1, positions=max(model.positions, sequence))
    return workload(fitting.build(), 1, batch, sequence, True, None, precision).graph


@lru_cache(maxsize=64)
def _decisions(model: ModelConfig, ranks: int, sequence_parallel: bool, precision: str) -> Decisions:
    """The pinned layouts of a kind of model."""
    graph = _graph(model, 4, 16, precision)
    mesh = Mesh((ranks,), ("tp",))
    costs = AnalyticCostModel(_LAYOUT_CLUSTER.with_nodes(ranks))
    return search(
        graph, mesh, costs, None, Limits(60.0, 1, 0), MegatronLayouts(graph, mesh, sequence_parallel)
    ).decisions


def _extract(graph: Graph, physical: PhysicalPlan) -> Program:
    parts = _parts(graph, physical)
    registers, shape = physical.registers, physical.mesh.shape
    nodes = {node.name: node for node in graph.nodes}
    weights = _weights(physical)
    readers: dict[int, list[int]] = {}
    for at, operation in enumerate(physical.operations):
        for number in operation.inputs:
            readers.setdefault(number, []).append(at)
    found: dict[tuple[str, str], list[Kernel]] = {
        (part, phase): [] for part in PARTS for phase in ("forward", "backward")
    }
    chain: set[int] = set()  # registers that the pointwise kernel at hand has made
    for at, operation in enumerate(physical.operations):
        if operation.phase == "optimizer":
            continue
        kernels = found[parts[at], operation.phase]
        if isinstance(operation, Box):
            chain = set()
            if operation.kind in COLLECTIVES:
                dtype = registers[operation.inputs[0]].type.dtype
                kernels.append(
                    Kernel(operation.kind, operation.kind, (), operation.bytes, operation.bytes, True, dtype)
                )
            continue
        if operation.op in STRIDED:
            if chain.intersection(operation.inputs):
                chain.update(operation.outputs)
            continue
        if _serves_weights(physical, operation, weights):
            continue  # weights are cast with the optimizer step, their gradients added up as they are accumulated
        op = REGISTRY[operation.op]
        inputs = [registers[number] for number in operation.inputs]
        outputs = [registers[number] for number in operation.outputs]
        node = nodes[operation.node]
        types, made = graph.types(node.inputs), graph.types(node.outputs)
        signature = Signature(tuple(r.layout for r in inputs), tuple(r.layout for r in outputs))
        _, moved = op.work(graph.rule(node), types, made, node.attributes, signature, shape)
        local = [r.layout.local_shape(r.type.shape, shape) for r in (*inputs, *outputs)]
        dtype = made[0].dtype
        gradient = prod(local[-1]) if operation.op in _WEIGHT_GRADIENTS else 0
        if operation.op in _PRODUCTS:
            chain = set()
            kernels.append(
                Kernel(op.name, "product", _product(operation.op, local), moved, moved, True, dtype, gradient)
            )
            continue
        if operation.op in ("attention", "attention_backward"):
            chain = set()
            q, k = local[0 if operation.op == "attention" else 1], local[1 if operation.op == "attention" else 2]
            sizes = (q[0], q[1], q[2], k[2], q[3], k[1], int(bool(node.attributes.get("causal"))))
            kernels.append(Kernel(op.name, operation.op, sizes, moved, moved, True, types[0].dtype))
            continue
        fused, starts = moved, True
        if operation.op in POINTWISE:
            if held := chain.intersection(operation.inputs):
                starts = False
                fused -= sum(registers[number].bytes for number in held)
                last = kernels[-1] if kernels else None
                if last is not None and all(
                    _phase_readers(physical, readers, number, operation.phase) == [at] for number in held
                ):
                    written = sum(registers[number].bytes for number in held)
                    kernels[-1] = replace(last, fused_bytes=max(last.fused_bytes - written, 0.0))
            chain = set(operation.outputs) if starts else chain | set(operation.outputs)
        else:
            chain = set()
        if moved >= _SCALAR_BYTES:
            kernels.append(Kernel(op.name, "memory", (), moved, max(fused, 0.0), starts, dtype, gradient))
    return Program(
        {key: tuple(kernels) for key, kernels in found.items()},
        *_parameters(graph, physical),
        _activations(physical, parts),
        _stream_bytes(physical, parts),
    )


_PRODUCTS = ("linear", "matmul", "linear_weight_gradient")
_WEIGHT_GRADIENTS = ("linear_weight_gradient", "embedding_backward")

_SCALAR_BYTES = 1024
"""Less than this is a number that the host knows, such as the loss scale."""


def _product(op: str, local: list[tuple[int, ...]]) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product from its operands' local shapes."""
    left, right = local[0], local[1]
    if op == "linear":
        return 1, prod(left[:-1]), right[0], left[-1]
    if op == "linear_weight_gradient":
        return 1, left[-1], right[-1], prod(left[:-1])
    if len(right) == 2:
        return 1, prod(left[:-1]), right[1], left[-1]
    return prod(left[:-2]), left[-2], right[-1], left[-1]


def _phase_readers(physical: PhysicalPlan, readers: Mapping[int, list[int]], number: int, phase: str) -> list[int]:
    return [at for at in readers.get(number, ()) if physical.operations[at].phase == phase]


def _weights(physical: PhysicalPlan) -> frozenset[int]:
    """Registers that hold parameters and what is made of them alone, and gradients of parameters."""
    known = {number for name, number in physical.sources.items() if physical.registers[number].kind in STATE_KINDS}
    for operation in physical.operations:
        if operation.inputs and all(number in known for number in operation.inputs):
            known.update(operation.outputs)
    return frozenset(known)


def _serves_weights(physical: PhysicalPlan, operation: Compute, weights: frozenset[int]) -> bool:
    """Whether an operation casts a weight or its gradient, or adds gradients of one weight."""
    if operation.op == "cast":
        return operation.inputs[0] in weights or operation.phase == "backward"
    shapes = {physical.registers[number].type.shape for number in (*operation.inputs, *operation.outputs)}
    return operation.op == "add" and operation.phase == "backward" and all(len(shape) < 3 for shape in shapes)


def _parts(graph: Graph, physical: PhysicalPlan) -> list[str]:
    """Per operation its part: by its module, and boxing by what makes a Partial value or else what reads it."""
    blocks = [
        at
        for at, op in enumerate(physical.operations)
        if isinstance(op, Compute) and op.phase == "forward" and block_of(op.module)
    ]
    first, last = blocks[0], blocks[-1]
    head = {
        op.module
        for at, op in enumerate(physical.operations)
        if isinstance(op, Compute) and op.phase == "forward" and at > last
    }
    made_by: dict[int, int] = {}
    reader: dict[int, int] = {}
    for at, op in enumerate(physical.operations):
        for number in op.outputs:
            made_by[number] = at
        for number in op.inputs:
            reader.setdefault(number, at)
    found: list[str] = []
    for at, op in enumerate(physical.operations):
        if isinstance(op, Compute):
            part = "layer" if block_of(op.module) else "head" if op.module in head else "embedding"
            if op.phase == "forward" and part == "embedding" and at > first:
                part = "head"
        else:
            part = ""
        found.append(part)
    for at, op in enumerate(physical.operations):
        if isinstance(op, Box):
            source = physical.registers[op.inputs[0]]
            maker = made_by.get(op.inputs[0])
            found[at] = found[maker] if source.layout.has_partial and maker is not None else ""
    for at in range(len(found) - 1, -1, -1):
        if not found[at]:
            target = reader.get(physical.operations[at].outputs[0])
            found[at] = found[target] if target is not None and found[target] else "embedding"
    return found


def _parameters(graph: Graph, physical: PhysicalPlan) -> tuple[dict[str, int], int]:
    counts = dict.fromkeys(PARTS, 0)
    tied = 0
    order = [node.module for node in graph.nodes if node.phase == "forward"]
    last_block = max(at for at, module in enumerate(order) if block_of(module))
    after = set(order[last_block + 1 :])
    for name in graph.parameters:
        register = physical.registers[physical.sources[name]]
        elements = register.bytes // SIZES[register.type.dtype]
        owner = name.rpartition(".")[0]
        part = "layer" if block_of(name) else "head" if owner in after else "embedding"
        counts[part] += elements
    matrices = {name: graph.values[name].shape for name in graph.parameters if len(graph.values[name].shape) > 1}
    table = max((name for name in matrices if not block_of(name)), key=lambda name: matrices[name][0])
    owners = {name.rpartition(".")[0] for name, shape in matrices.items() if shape[0] == matrices[table][0]}
    if not owners & after:
        register = physical.registers[physical.sources[table]]
        tied = register.bytes // SIZES[register.type.dtype]
    return counts, tied


def _activations(physical: PhysicalPlan, parts: list[str]) -> dict[str, int]:
    """Bytes that the forward phase makes and the backward phase reads; strided views share their source's memory."""
    made: dict[int, int] = {}
    alias: dict[int, int] = {}
    kept: set[int] = set()
    for at, op in enumerate(physical.operations):
        if op.phase == "forward":
            for number in op.outputs:
                made[number] = at
                if isinstance(op, Compute) and op.op in STRIDED and op.op != "slice":
                    alias[number] = alias.get(op.inputs[0], op.inputs[0])
                elif isinstance(op, Box):
                    alias[number] = op.inputs[0]  # made again, or of the same memory
        else:
            kept.update(alias.get(number, number) for number in op.inputs)
    weights = _weights(physical)
    total = dict.fromkeys(PARTS, 0)
    for number, at in made.items():
        if number in kept and number not in weights:
            total[parts[at]] += physical.registers[number].bytes
    return total


def _stream_bytes(physical: PhysicalPlan, parts: list[str]) -> int:
    """Bytes of what the layer reads of the embedding."""
    outside = {n for at, op in enumerate(physical.operations) if parts[at] == "embedding" for n in op.outputs}
    weights = _weights(physical)
    read = (
        physical.registers[number].bytes
        for at, op in enumerate(physical.operations)
        if parts[at] == "layer" and op.phase == "forward"
        for number in op.inputs
        if number in outside and number not in weights
    )
    return max(read)
