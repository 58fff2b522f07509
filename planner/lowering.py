"""Lowering: decisions become the physical plan. Boxing steps are made when first needed, at most once per group."""

from __future__ import annotations

from sbp.dtype import SIZES
from sbp.graph import Graph
from sbp.layout import Layout, Partial
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, TensorType
from sbp.planner.borders import border_seconds, border_times
from sbp.planner.boxing import BoxingTable, Step
from sbp.planner.buffers import packing_bytes
from sbp.planner.cost import ComputeCosts, kernel_seconds
from sbp.planner.decisions import Decisions
from sbp.planner.physical import Box, Compute, Operation, PhysicalPlan, Register
from sbp.planner.uses import OUTPUT, UPDATE, Group, groups_of, is_resident


class _Copies:
    """The registers in which one value is at hand, and the tree of steps that makes those its current uses ask for."""

    def __init__(self) -> None:
        self.registers: dict[Layout, int] = {}
        self.steps: dict[Layout, Step] = {}


class _Lowering:
    def __init__(
        self, graph: Graph, mesh: Mesh, decisions: Decisions, compute: ComputeCosts, boxing: BoxingTable
    ) -> None:
        self.graph, self.mesh, self.decisions, self.compute, self.boxing = graph, mesh, decisions, compute, boxing
        self.registers: list[Register] = []
        self.operations: list[Operation] = []
        self.groups = groups_of(graph)
        self.copies: dict[str, _Copies] = {}
        self.current: dict[str, int] = {}
        self.updates: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.to_keep: dict[int, list[str]] = {}
        for value in decisions.kept:
            if len(self.groups.get(value, ())) > 1:
                self.to_keep.setdefault(self.groups[value][0].last, []).append(value)
        self._local_bytes: dict[tuple[TensorType, Layout], int] = {}

    def run(self) -> PhysicalPlan:
        graph = self.graph
        sources = {}
        for value in graph.sources:
            sources[value] = self.place(value, self.decisions.sources[value], graph.values[value].kind)
        for time, node in enumerate(graph.nodes):
            signature = self.decisions.signatures[node.name]
            inputs = tuple(
                self.fetch(value, time, signature.inputs[k], node.phase) for k, value in enumerate(node.inputs)
            )
            outputs = tuple(
                self.place(value, signature.outputs[k], graph.values[value].kind)
                for k, value in enumerate(node.outputs)
            )
            seconds, flops, workspace, borders = self.cost(time)
            what = node.name, node.op, node.attributes, inputs, outputs, node.phase, node.module
            self.operations.append(Compute(*what, seconds, flops, workspace, borders))
            for value in node.outputs:
                self.store(value, node.phase)
            for value in self.to_keep.get(time, ()):
                self.fetch(value, time, self.decisions.kept[value], node.phase)
        end = len(graph.nodes)
        last_phase = graph.nodes[-1].phase if graph.nodes else "forward"
        for value, groups in self.groups.items():
            for use in groups[-1].uses:
                if use.operand == OUTPUT:
                    self.outputs[value] = self.fetch(value, end, self.decisions.outputs[value], last_phase)
                elif use.operand == UPDATE and use.state not in self.updates:
                    self.updates[use.state] = self.fetch(value, end, self.decisions.sources[use.state], last_phase)
        return PhysicalPlan(
            self.mesh, tuple(self.registers), tuple(self.operations), sources, self.outputs, self.updates
        )

    def store(self, value: str, phase: str) -> None:
        """A value that only becomes a state's next value is put into the stored layout at once."""
        groups = self.groups.get(value, ())
        if len(groups) == 1 and all(use.operand == UPDATE for use in groups[0].uses):
            for use in groups[0].uses:
                self.updates[use.state] = self.fetch(value, groups[0].last, self.decisions.sources[use.state], phase)

    def cost(self, time: int) -> tuple[float, float, int, tuple[tuple[int, float], ...]]:
        """Seconds, FLOP, workspace and borders of a node."""
        node = self.graph.nodes[time]
        op, types, made = REGISTRY[node.op], self.graph.types(node.inputs), self.graph.types(node.outputs)
        signature = self.decisions.signatures[node.name]
        case = self.graph.rule(node), types, made, node.attributes, signature, self.mesh.shape
        flops, moved = op.work(*case)
        seconds = kernel_seconds(self.compute, op, case, flops, moved, made[0].dtype)
        borders = border_times(op, case[0], types, node.attributes, signature, self.mesh, self.boxing.costs)
        return seconds + border_seconds(borders), flops, op.workspace_bytes(*case), borders

    def register(self, value: str, layout: Layout, kind: str) -> int:
        type = self.graph.values[value].type
        key = (type, layout)
        if key not in self._local_bytes:
            size = SIZES[type.dtype]
            for length in layout.local_shape(type.shape, self.mesh.shape):
                size *= length
            self._local_bytes[key] = size
        self.registers.append(Register(len(self.registers), value, type, layout, kind, self._local_bytes[key]))
        return len(self.registers) - 1

    def place(self, value: str, layout: Layout, kind: str) -> int:
        """The value comes to be in `layout`."""
        number = self.register(value, layout, kind)
        copies = self.copies[value] = _Copies()
        copies.registers[layout] = number
        if self.groups.get(value):
            self.current[value] = 0
            copies.steps = self.plan_steps(value, layout, self.groups[value][0])
        return number

    def plan_steps(self, value: str, root: Layout, group: Group, other: Layout | None = None) -> dict[Layout, Step]:
        wanted = set(self.decisions.wanted(self.graph, value, group))
        kept = self.decisions.kept.get(value)
        if kept is not None and group is self.groups[value][0] and len(self.groups[value]) > 1:
            wanted.add(kept)
        at_hand = (root,) if other is None else (root, other)
        kinds = {sbp.reduce for layout in (*at_hand, *wanted) for sbp in layout if isinstance(sbp, Partial)}
        space = self.boxing.space(self.graph.values[value].type, kinds | {"sum"})
        return space.tree(root, wanted, other)

    def fetch(self, value: str, time: int, layout: Layout, phase: str) -> int:
        """The register that holds the value in `layout` at a use, boxing what is missing."""
        groups = self.groups[value]
        while time > groups[self.current[value]].last:
            self.advance(value)
        copies = self.copies[value]
        return self.make(value, copies, layout, phase)

    def advance(self, value: str) -> None:
        """From one group to the next: only what is kept remains at hand."""
        self.current[value] += 1
        copies, groups = self.copies[value], self.groups[value]
        made = self.decisions.made(self.graph, value)
        kept = self.decisions.kept.get(value) if self.current[value] == 1 else None
        root = made if kept is None else kept
        other = made if root != made and is_resident(self.graph, value) else None
        copies.registers = {layout: copies.registers[layout] for layout in (root, other) if layout is not None}
        copies.steps = self.plan_steps(value, root, groups[self.current[value]], other)

    def make(self, value: str, copies: _Copies, layout: Layout, phase: str) -> int:
        found = copies.registers.get(layout)
        if found is not None:
            return found
        step = copies.steps[layout]
        source = self.make(value, copies, step.before, phase)
        target = self.register(value, layout, "boxing")
        before, after = self.registers[source], self.registers[target]
        workspace = packing_bytes(step.kind, step.mesh_axis, before, after, self.mesh)
        self.operations.append(
            Box(step.kind, step.mesh_axis, (source,), (target,), phase, step.seconds, step.bytes, workspace)
        )
        copies.registers[layout] = target
        return target


def lower(graph: Graph, mesh: Mesh, decisions: Decisions, compute: ComputeCosts, boxing: BoxingTable) -> PhysicalPlan:
    """The physical plan of legal decisions (see `Decisions.check`)."""
    return _Lowering(graph, mesh, decisions, compute, boxing).run()
