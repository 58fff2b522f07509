"""Physical plans made without a planner: any choice of signatures, joined by the fewest single boxing steps.

Which steps are legal is asked of the executor's own preparation; what they compute is what the tests find out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache

from sbp.autodiff import backward
from sbp.comm.inprocess import InProcessCommunicator
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.errors import LayoutError, PlanError
from sbp.graph import Graph, Initial
from sbp.layout import Broadcast, Layout, Partial, Split, broadcast_layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.physical import Box, Compute, PhysicalPlan, Register
from sbp.rule import Signature
from sbp.runtime.boxing import prepare
from sbp.trace import GraphBuilder

KINDS = {
    ("Partial", "Broadcast"): "all_reduce", ("Split", "Broadcast"): "all_gather",
    ("Partial", "Split"): "reduce_scatter",
    ("Split", "Split"): "all_to_all", ("Broadcast", "Split"): "slice", ("Broadcast", "Partial"): "fill",
    ("Split", "Partial"): "pad",
}  # fmt: skip


def mlp(batch=6, features=(5, 7, 3), optimizer=True) -> Graph:
    """Two layers with bias, mean square loss, gradients, and AdamW or no update."""
    builder = GraphBuilder("mlp")
    normal = Initial("normal", (0.0, 0.5))
    x = builder.source("x", TensorType((batch, features[0]), "f32"), "input", normal)
    y = builder.source("y", TensorType((batch, features[2]), "f32"), "input", normal)
    parameters = {}
    for layer in (0, 1):
        shape = (features[layer], features[layer + 1])
        parameters[f"w{layer}"] = builder.source(f"w{layer}", TensorType(shape, "f32"), "parameter", normal)
        parameters[f"b{layer}"] = builder.source(f"b{layer}", TensorType(shape[1:], "f32"), "parameter", normal)
    with builder:
        hidden = ops.relu(ops.matmul(x, parameters["w0"]) + parameters["b0"])
        out = ops.matmul(hidden, parameters["w1"]) + parameters["b1"]
        loss = ops.mean(ops.square(out - y))
    if not optimizer:
        return builder.finish([loss, out])
    gradients = backward(builder, loss, list(parameters.values()))
    step = builder.source("step", TensorType((), "i64"), "optimizer", Initial("zeros", ()))
    with builder, builder.at("optimizer"):
        counted = ops.shift(step, amount=1)
        builder.update(step, counted)
        for name, parameter in parameters.items():
            zeros, kind = Initial("zeros", ()), parameter.value.type
            states = [builder.source(f"{name}.{m}", kind, "optimizer", zeros) for m in "mv"]
            made = ops.adamw_update(parameter, gradients[name], *states, counted, lr=0.01)
            for state, new in zip((parameter, *states), made):
                builder.update(state, new)
    return builder.finish([loss])


@cache
def steps_from(layout: Layout, type: TensorType, mesh: Mesh) -> tuple[tuple[str, int, Layout], ...]:
    """Every legal single step: (kind, mesh axis, target)."""
    found = []
    options = [Broadcast(), *(Split(axis) for axis in range(len(type.shape)))]
    options += [Partial(reduce) for reduce in ("sum", "max", "min")[type.dtype == "bool" :]]
    for axis in range(mesh.ndim):
        for target in options:
            kind = KINDS.get((layout[axis].__class__.__name__, target.__class__.__name__))
            if kind is None or target == layout[axis]:
                continue
            after = layout.replace(axis, target)
            if len({sbp.reduce for sbp in after if isinstance(sbp, Partial)}) > 1:
                continue
            registers = [Register(n, "v", type, each, "activation", 0) for n, each in enumerate((layout, after))]
            box = Box(kind, axis, (0,), (1,), "forward", 0.0, 0)
            try:
                prepare(box, *registers, mesh, NumpyBackend(), InProcessCommunicator(mesh.size), "f64")
            except (PlanError, LayoutError):
                continue
            found.append((kind, axis, after))
    return tuple(found)


@cache
def path(source: Layout, target: Layout, type: TensorType, mesh: Mesh) -> tuple[tuple[str, int, Layout], ...]:
    """The fewest steps between two layouts."""
    queue, came = deque([source]), {source: ()}
    while queue:
        at = queue.popleft()
        if at == target:
            return came[at]
        for step in steps_from(at, type, mesh):
            if step[2] not in came:
                came[step[2]] = (*came[at], step)
                queue.append(step[2])
    raise AssertionError(f"no way from {source} to {target} of {type} on {mesh}")


Choose = Callable[[str, tuple[Signature, ...]], Signature]
Stored = Callable[[str, list[Layout]], Layout]


def physical(graph: Graph, mesh: Mesh, choose: Choose, stored: Stored) -> PhysicalPlan:
    """The plan that `choose(node name, signatures)` and `stored(value, layouts without P)` describe."""
    registers: list[Register] = []
    operations: list[Box | Compute] = []
    held: dict[str, dict[Layout, int]] = {}

    def register(value, layout):
        item = graph.values[value]
        registers.append(Register(len(registers), value, item.type, layout, item.kind, item.type.bytes))
        held.setdefault(value, {})[layout] = len(registers) - 1
        return len(registers) - 1

    def reach(value, layout, phase):
        if layout in held[value]:
            return held[value][layout]
        first = next(iter(held[value]))  # the layout it was made in
        at = held[value][first]
        for kind, axis, after in path(first, layout, graph.values[value].type, mesh):
            if after not in held[value]:
                made = register(value, after)
                operations.append(Box(kind, axis, (at,), (made,), phase, 0.0, 0))
            at = held[value][after]
        return at

    sources = {}
    for value in graph.sources:
        shape = graph.values[value].shape
        options = [Layout(())]
        for _ in range(mesh.ndim):
            options = [Layout((*o.axes, s)) for o in options for s in (Broadcast(), *map(Split, range(len(shape))))]
        sources[value] = register(value, stored(value, options))
    for node in graph.nodes:
        chosen = choose(node.name, graph.rule(node).signatures(mesh.shape))
        inputs = tuple(reach(v, layout, node.phase) for v, layout in zip(node.inputs, chosen.inputs))
        outputs = tuple(register(v, layout) for v, layout in zip(node.outputs, chosen.outputs))
        operations.append(
            Compute(node.name, node.op, node.attributes, inputs, outputs, node.phase, node.module, 0.0, 0.0)
        )
    outputs = {value: reach(value, broadcast_layout(mesh.ndim), "forward") for value in graph.outputs}
    updates = {s: reach(new, registers[sources[s]].layout, "optimizer") for s, new in graph.updates.items()}
    return PhysicalPlan(mesh, tuple(registers), tuple(operations), sources, outputs, updates)


def random_plan(graph: Graph, mesh: Mesh, seed: int) -> PhysicalPlan:
    """Random signatures and stored layouts."""
    generator = random.Random(seed)
    return physical(graph, mesh, lambda _, found: generator.choice(found), lambda _, found: generator.choice(found))


def replicated_plan(graph: Graph, mesh: Mesh) -> PhysicalPlan:
    """Everything B."""
    return physical(graph, mesh, lambda _, found: found[0], lambda _, found: found[0])
