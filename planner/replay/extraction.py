"""From a lowered plan to the kernels of its parts: which operators run together, and which are none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from sbp.dtype import SIZES
from sbp.graph import Graph
from sbp.operator import REGISTRY, Operator
from sbp.passes.recompute import block_of
from sbp.planner.cost import VIEWS
from sbp.planner.physical import COLLECTIVES, Box, Compute, PhysicalPlan
from sbp.planner.places import constants_of
from sbp.rule import Signature

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


def extract(graph: Graph, physical: PhysicalPlan) -> Program:
    """The program of a plan of one layer: its operations by part and phase."""
    parts = _parts(physical)
    extraction = _Extraction(graph, physical, constants_of(physical))
    for at, operation in enumerate(physical.operations):
        if operation.phase != "optimizer":
            extraction.add(at, parts[at])
    return Program(
        {key: tuple(kernels) for key, kernels in extraction.kernels.items()},
        *_parameters(graph, physical, parts),
        _activations(physical, parts),
        _stream_bytes(physical, parts),
    )


@dataclass
class _Extraction:
    """Kernels found so far, and the chain: registers that the pointwise kernel at hand has made."""

    graph: Graph
    physical: PhysicalPlan
    weights: frozenset[int]
    kernels: dict[tuple[str, str], list[Kernel]] = field(
        default_factory=lambda: {(part, phase): [] for part in PARTS for phase in ("forward", "backward")}
    )
    chain: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.readers: dict[tuple[int, str], list[int]] = {}
        for at, operation in enumerate(self.physical.operations):
            for number in operation.inputs:
                self.readers.setdefault((number, operation.phase), []).append(at)

    def add(self, at: int, part: str) -> None:
        """The kernel of one operation, if it has one of its own."""
        operation = self.physical.operations[at]
        kernels = self.kernels[part, operation.phase]
        if isinstance(operation, Box):
            self.chain = set()
            if operation.kind in COLLECTIVES:
                dtype, moved = self.physical.registers[operation.inputs[0]].type.dtype, operation.bytes
                kernels.append(Kernel(operation.kind, operation.kind, (), moved, moved, True, dtype))
        elif operation.op in STRIDED:
            if self.chain.intersection(operation.inputs):
                self.chain.update(operation.outputs)
        elif not self.serves_weights(operation):
            # Weights are cast with the optimizer step, and their gradients added up as they are accumulated.
            self.add_compute(at, operation, kernels)

    def serves_weights(self, operation: Compute) -> bool:
        """Whether an operation casts a weight or its gradient, or adds gradients of one weight."""
        if operation.op == "cast":
            return operation.inputs[0] in self.weights or operation.phase == "backward"
        registers = self.physical.registers
        shapes = [registers[number].type.shape for number in (*operation.inputs, *operation.outputs)]
        return operation.op == "add" and operation.phase == "backward" and all(len(shape) < 3 for shape in shapes)

    def add_compute(self, at: int, operation: Compute, kernels: list[Kernel]) -> None:
        op, node = REGISTRY[operation.op], self.nodes[operation.node]
        inputs = [self.physical.registers[number] for number in operation.inputs]
        outputs = [self.physical.registers[number] for number in operation.outputs]
        types, made = self.graph.types(node.inputs), self.graph.types(node.outputs)
        shape = self.physical.mesh.shape
        signature = Signature(tuple(r.layout for r in inputs), tuple(r.layout for r in outputs))
        _, moved = op.work(self.graph.rule(node), types, made, node.attributes, signature, shape)
        local = [r.layout.local_shape(r.type.shape, shape) for r in (*inputs, *outputs)]
        gradient = prod(local[-1]) if operation.op in _WEIGHT_GRADIENTS else 0
        if operation.op in POINTWISE:
            self.add_pointwise(at, operation, op, moved, made[0].dtype, kernels)
            return
        self.chain = set()
        if operation.op in _PRODUCTS:
            sizes = _product(operation.op, local)
            kernels.append(Kernel(op.name, "product", sizes, moved, moved, True, made[0].dtype, gradient))
        elif operation.op in _ATTENTION:
            q, k = local[_ATTENTION[operation.op] :][:2]
            causal = int(bool(node.attributes.get("causal")))
            kind, shape_of = operation.op, (q[0], q[1], q[2], k[2], q[3], k[1], causal)
            kernels.append(Kernel(op.name, kind, shape_of, moved, moved, True, types[0].dtype))
        elif moved >= _SCALAR_BYTES:
            kernels.append(Kernel(op.name, "memory", (), moved, moved, True, made[0].dtype, gradient))

    def add_pointwise(
        self, at: int, operation: Compute, op: Operator, moved: float, dtype: str, kernels: list[Kernel]
    ) -> None:
        """A pointwise operator goes on with the chain that feeds it: what lies between is neither written nor read."""
        if moved < _SCALAR_BYTES:
            return
        held = self.chain.intersection(operation.inputs)
        between = sum(self.physical.registers[number].bytes for number in held)
        if held and kernels and all(self.readers[number, operation.phase] == [at] for number in held):
            last = kernels[-1]
            kernels[-1] = replace(last, fused_bytes=max(last.fused_bytes - between, 0.0))
        self.chain = (self.chain if held else set()) | set(operation.outputs)
        kernels.append(Kernel(op.name, "memory", (), moved, max(moved - between, 0.0), not held, dtype))


_PRODUCTS = ("linear", "matmul", "linear_weight_gradient")
_ATTENTION = {"attention": 0, "attention_backward": 1}
"""Operators of attention -> where their queries stand among the inputs; keys stand behind them."""

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


def _parts(physical: PhysicalPlan) -> list[str]:
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


def _parameters(graph: Graph, physical: PhysicalPlan, parts: list[str]) -> tuple[dict[str, int], int]:
    """Elements by part, and those of weights outside the head that it reads as well."""
    counts = dict.fromkeys(PARTS, 0)
    tied = 0
    order = [op.module for op, part in zip(physical.operations, parts) if isinstance(op, Compute) and part == "head"]
    for name in graph.parameters:
        register = physical.registers[physical.sources[name]]
        elements = register.bytes // SIZES[register.type.dtype]
        part = "layer" if block_of(name) else "head" if name.rpartition(".")[0] in order else "embedding"
        counts[part] += elements
        if part == "embedding" and _is_read_by(physical, parts, register.number, "head"):
            tied += elements
    return counts, tied


def _is_read_by(physical: PhysicalPlan, parts: list[str], weight: int, part: str) -> bool:
    """Whether a part's forward operations read a weight, or what is made of it alone."""
    derived = {weight}
    for op, where in zip(physical.operations, parts):
        if op.phase == "forward" and derived.intersection(op.inputs):
            if where == part:
                return True
            if derived.issuperset(op.inputs):
                derived.update(op.outputs)
    return False


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
    weights = constants_of(physical)
    total = dict.fromkeys(PARTS, 0)
    for number, at in made.items():
        if number in kept and number not in weights:
            total[parts[at]] += physical.registers[number].bytes
    return total


def _stream_bytes(physical: PhysicalPlan, parts: list[str]) -> int:
    """Bytes of what the layer reads of the embedding."""
    outside = {n for at, op in enumerate(physical.operations) if parts[at] == "embedding" for n in op.outputs}
    weights = constants_of(physical)
    read = (
        physical.registers[number].bytes
        for at, op in enumerate(physical.operations)
        if parts[at] == "layer" and op.phase == "forward"
        for number in op.inputs
        if number in outside and number not in weights
    )
    return max(read)
