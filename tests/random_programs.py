"""Random programs out of every operator: calls of their example cases, tied together by reshaping what is there.

While a program grows, every value is computed, so that it can be kept in a range where rounding stays rounding: a
function with a jump or a kink only gets numbers that are away from it, large results are scaled down, and what is not
finite is left alone.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import numpy
from own_operators import OWN

from sbp.autodiff import backward
from sbp.dtype import is_floating, numpy_name
from sbp.graph import Graph, Initial
from sbp.interpreter import held_in, run_node
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, Case, Operator, TensorType
from sbp.ops import library as ops
from sbp.planner.boxing import BoxingTable
from sbp.planner.decisions import Decisions, random_decisions
from sbp.planner.lowering import lower
from sbp.planner.physical import PhysicalPlan
from sbp.planner.uses import groups_of, is_resident
from sbp.rule import Signature
from sbp.runtime.verify import Check, verify
from sbp.trace import GraphBuilder, Symbol

MESHES = (
    (2,), (3,), (4,), (5,), (7,), (2, 2), (2, 3), (3, 2), (3, 3), (1, 3), (5, 2), (2, 2, 2), (3, 2, 2), (2, 3, 1),
    (2, 1, 3),
)  # fmt: skip

# Results jump, or their slope does, somewhere: where two numbers are equal, or at a number that the operator knows.
KINKED = {
    "abs", "argmax", "argmin", "atan2", "cast", "ceil", "clamp", "clamp_backward", "equal", "exceeds", "floor",
    "floor_divide", "fmod", "greater", "greater_equal", "greater_number", "isfinite", "isinf", "isnan",
    "leaky_relu", "leaky_relu_backward", "less", "less_equal", "less_number", "max", "max_pool2d",
    "max_pool2d_backward", "maximum", "min", "minimum", "not_equal", "pow", "prod", "prod_backward", "relu",
    "relu_backward", "remainder", "round", "sign", "sort", "topk", "trunc",
}  # fmt: skip
# Only their first output is more than a help for the backward pass.
FIRST_OUTPUT_ONLY = {"attention", "masked_attention"}
LARGE = 30.0
ROUNDING = 1e-13


@dataclass(frozen=True)
class RandomProgram:
    """A graph with gradients, and arrays for its inputs and state."""

    seed: int
    graph: Graph
    feeds: dict[str, numpy.ndarray]
    operators: tuple[str, ...]


class RandomCosts:
    """Costs that have no meaning, so that boxing takes all kinds of ways."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "fill", "pad")
        self.weights = {kind: generator.uniform(0.1, 10.0) for kind in kinds}

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """Seconds of a boxing step."""
        return self.weights[kind] * (1 + axis + bytes / 100)

    def compute_seconds(self, op: str, flops: float, bytes: float, dtype: str) -> float:
        """Seconds of a node."""
        return flops + bytes


def operators() -> list[Operator]:
    """The library's own operators."""
    return [REGISTRY[name] for name in OWN]


def reduces(op: Operator) -> bool:
    """Whether splitting one of its dimensions makes parts of a sum or an extremum."""
    return any(factor.reduce for case in op.cases for factor in op.bind(case.types, case.attributes).factors)


class _Maker:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rank = self.random.choice((2, 3, 5))  # of inputs; few dimensions leave room for many mesh axes
        self.numbers = numpy.random.default_rng(seed)
        self.builder = GraphBuilder(f"random {seed}")
        self.arrays: dict[str, numpy.ndarray] = {}
        self.feeds: dict[str, numpy.ndarray] = {}
        self.pool: list[Symbol] = []
        self.computed = 0

    # -- values --------------------------------------------------------------------------------------------------------

    def source(self, type: TensorType, low: float | None = None, high: float | None = None) -> Symbol:
        """A new input or parameter: normal numbers, or uniform ones between limits; integers in [low, high)."""
        floating = is_floating(type.dtype)
        if type.dtype == "bool":
            array: Any = self.numbers.random(type.shape) < 0.5
        elif floating:
            drawn = self.numbers.standard_normal(type.shape)
            array = drawn if low is None or high is None else self.numbers.uniform(low, high, type.shape)
        else:
            low, high = (0, 7) if low is None or high is None else (low, high)
            array = self.numbers.integers(int(low), int(high), type.shape).astype(numpy_name(type.dtype))
        kind = "parameter" if floating and self.random.random() < 0.5 else "input"
        name = self.builder.unique("w" if kind == "parameter" else "x")
        symbol = self.builder.source(name, type, kind, Initial("normal", (0.0, 1.0)) if kind == "parameter" else None)
        self.arrays[name] = self.feeds[name] = numpy.asarray(array)
        return symbol

    def compute(self) -> None:
        """Run the nodes that were added since the last time."""
        for node in self.builder.nodes[self.computed :]:
            inputs = [self.arrays[name] for name in node.inputs]
            with numpy.errstate(all="ignore"):
                results = run_node(node, inputs, numpy, "f64")
            for name, result in zip(node.outputs, results):
                self.arrays[name] = numpy.asarray(result, dtype=held_in(self.builder.values[name].dtype, "f64"))
        self.computed = len(self.builder.nodes)

    def fitted(self, x: Symbol, type: TensorType) -> Symbol:
        """Elements of x in another shape and type: cut off, or repeated with other factors."""
        if x.value.type == type:
            return x
        if x.dtype != type.dtype:
            x = ops.cast(x, dtype=type.dtype)
        if x.shape == type.shape:
            return x
        flat, wanted = ops.reshape(x, shape=(-1,)), type.elements
        have = flat.shape[0]
        if have < wanted:
            flat = ops.narrow(ops.tile(flat, -(-wanted // have), 0), 0, 0, wanted)
            flat = ops.mul(flat, self.source(flat.value.type))
        if flat.shape[0] > wanted:
            start = self.random.randrange(flat.shape[0] - wanted + 1)
            flat = ops.narrow(flat, 0, start, wanted)
        return ops.reshape(flat, shape=type.shape)

    def operand(self, op: Operator, index: int, case: Case) -> Symbol:
        """A value for one operand of a case: from what is there, or a new source."""
        type = case.types[index]
        limits = case.ranges.get(op.input_names[min(index, len(op.input_names) - 1)])
        if not is_floating(type.dtype):
            return self.source(type, *(limits or ()))
        if not self.pool or not type.elements or self.random.random() < 0.25:
            return self.source(type, *(limits or ()))
        chosen = self.random.choice(self.pool[-self.random.choice((1, 2, 6, len(self.pool))) :])
        x = self.fitted(chosen, type)
        if limits is not None:
            low, high = limits
            x = ops.shift(ops.scale(ops.sigmoid(x), factor=float(high - low)), amount=float(low))
        self.compute()
        if op.name in KINKED and not self.is_general(x):
            return self.source(type, *(limits or ()))
        return x

    def is_general(self, *symbols: Symbol) -> bool:
        """No two numbers are nearly equal, and none is near a multiple of a quarter."""
        both = numpy.sort(numpy.concatenate([self.arrays[x.name].ravel() for x in symbols]))
        if not numpy.isfinite(both).all():
            return False
        return bool((numpy.diff(both) > 1e-6).all() and (numpy.abs(both * 4 - numpy.round(both * 4)) > 1e-6).all())

    # -- nodes ---------------------------------------------------------------------------------------------------------

    def call(self, op: Operator) -> None:
        """One of the operator's cases, applied to values of this program."""
        cases = [case for case in op.cases if max((len(t.shape) for t in case.types), default=0) <= self.rank]
        if not cases:
            return
        case = self.random.choice(cases)
        inputs = [self.operand(op, index, case) for index in range(len(case.types))]
        floating = [x for x in inputs if is_floating(x.dtype)]
        if op.name in KINKED and len(floating) > 1:
            self.compute()
            if not self.is_general(*floating):
                return
        made = op(*inputs, **case.attributes)
        outputs = made if isinstance(made, tuple) else (made,)
        for out in outputs[:1] if op.name in FIRST_OUTPUT_ONLY else outputs:
            self.keep(out if op.differentiable else ops.detach(out))

    def keep(self, out: Symbol) -> None:
        """Make a result available to further nodes, scaled down if it is large."""
        self.compute()
        array = self.arrays[out.name]
        if not is_floating(out.dtype) or not array.size:
            return
        largest = float(numpy.abs(array).max())
        if not math.isfinite(largest) or largest > 1e6:
            return
        if largest > LARGE:
            out = ops.scale(out, factor=float(2.0 ** -math.ceil(math.log2(largest))))
            self.compute()
        self.pool.append(out)

    def leaves(self) -> list[Symbol]:
        """Values of the pool that nothing reads."""
        read = {name for node in self.builder.nodes for name in node.inputs}
        return [x for x in self.pool if x.name not in read]


def random_program(seed: int, least: int = 5, most: int = 40) -> RandomProgram:
    """A program of `least` to `most` operators forward, its gradients, and half of the time an update of its state."""
    maker = _Maker(seed)
    builder, generator = maker.builder, maker.random
    wanted = generator.randint(least, most)
    known = operators()
    reducing = [op for op in known if reduces(op)]
    with builder:
        while len(builder.nodes) < wanted:
            maker.call(generator.choice(reducing if generator.random() < 0.3 else known))
        leaves = maker.leaves()[-6:] or [maker.source(TensorType((3,), "f32"))]
        loss = None
        for leaf in leaves:
            weighted = ops.mul(leaf, maker.source(leaf.value.type))
            term = ops.cast(ops.sum(weighted), dtype="f32")
            loss = term if loss is None else ops.add(loss, term)
        maker.compute()
    forward = tuple(node.op for node in builder.nodes)
    seen = generator.sample(maker.pool, min(3, len(maker.pool)))
    sources = [x for x in list(builder.symbols.values()) if x.name in maker.feeds and is_floating(x.dtype)]
    gradients = backward(builder, loss, sources)
    with builder, builder.at("optimizer"):
        for x in sources:
            if x.name in gradients and x.value.kind == "parameter" and generator.random() < 0.5:
                builder.update(x, ops.sub(x, ops.scale(gradients[x.name], factor=0.1)))
    outputs = list(dict.fromkeys([loss.name, *(x.name for x in seen), *(g.name for g in gradients.values())]))
    graph = builder.finish([builder.symbols[name] for name in outputs])
    return RandomProgram(seed, graph, maker.feeds, forward)


def wrong_values(program: RandomProgram, mesh: Mesh, seed: int) -> list[Check]:
    """What differs from the unsharded run under random layouts, by more than rounding leaves of numbers near one.

    Verification is relative to a value's own size, and here some values are sums that cancel to the last digit.
    """
    found = verify(program.graph, random_plan(program, mesh, seed), feeds=program.feeds)
    return [check for check in found.checks if not check.passed and check.error * check.scale > ROUNDING]


def random_mesh(program: RandomProgram) -> Mesh:
    """A mesh of one to three axes, fewer for tensors of many dimensions, which have many thousand pairs of layouts."""
    rank = max(len(value.shape) for value in program.graph.values.values())
    options = [shape for shape in MESHES if len(shape) + rank <= 6] or MESHES[:5]
    return Mesh(random.Random(program.seed).choice(options))


def random_layouts(program: RandomProgram, mesh: Mesh, seed: int) -> Decisions:
    """Random legal decisions in which many nodes make parts, or take what their producers make as it is.

    Left to chance alone, hardly any Partial would reach a node with all its parts: boxing makes parts of which all but
    one are empty, with which even a square is linear.
    """
    graph, generator = program.graph, random.Random(seed)
    drawn = random_decisions(graph, mesh, seed)
    made = dict(drawn.sources)
    signatures = {}
    for node in graph.nodes:
        options = graph.rule(node).signatures(mesh.shape)
        chosen = drawn.signatures[node.name]
        makers = [one for one in options if any(layout.has_partial for layout in one.outputs) and not any(
            layout.has_partial for layout in one.inputs)]  # fmt: skip
        if makers and generator.random() < 0.4:
            chosen = generator.choice(makers)
        elif generator.random() < 0.6:
            have = [made[value] for value in node.inputs]

            def fit(signature: Signature, have: list[Layout] = have) -> int:
                same = [layout for layout, at_hand in zip(signature.inputs, have) if layout == at_hand]
                return len(same) + 9 * sum(layout.has_partial for layout in same)

            best = max(map(fit, options))
            chosen = generator.choice([signature for signature in options if fit(signature) == best])
        signatures[node.name] = chosen
        made.update(zip(node.outputs, chosen.outputs))
    decisions = replace(drawn, signatures=signatures, kept={})
    kept = {}
    for value, groups in groups_of(graph).items():
        if len(groups) > 1 and generator.random() < 0.5:
            candidates = set(decisions.wanted(graph, value, groups[0]))
            if not is_resident(graph, value):
                candidates.discard(decisions.made(graph, value))
            if candidates:
                kept[value] = generator.choice(sorted(candidates, key=str))
    return replace(decisions, kept=kept).check(graph, mesh)


def random_plan(program: RandomProgram, mesh: Mesh, seed: int) -> PhysicalPlan:
    """Random legal layouts for everything, joined by the boxing that random costs choose."""
    costs = RandomCosts(seed)
    return lower(program.graph, mesh, random_layouts(program, mesh, seed), costs, BoxingTable(mesh, costs))
