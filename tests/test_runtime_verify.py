"""Verification finds what is right right, and what is wrong wrong, by name."""

import dataclasses
import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import mlp, random_plan, replicated_plan

from sbp.autodiff import backward
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.errors import PlanError
from sbp.graph import Initial
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.physical import Box, Compute, PhysicalPlan, Register
from sbp.runtime.verify import VerificationError, _difference, verify
from sbp.trace import GraphBuilder


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_random_plans_are_right(shape):
    graph = mlp()
    for seed in range(5):
        plan = random_plan(graph, Mesh(shape), seed)
        found = verify(graph, plan, seed).raise_if_wrong()
        assert found and found.passed and found.worst.error <= 1e-9
        roles = [check.role for check in found.checks]
        assert roles.count("output") == 1 and roles.count("state") == len(graph.updates) == 13
        gradients = {check.value for check in found.checks if check.role == "gradient"}
        assert len(gradients) == 4
        assert "values equal the unsharded run within 1e-09" in str(found)


def test_every_register_of_a_gradient_is_compared():
    graph = mlp()
    plan = random_plan(graph, Mesh((2, 2)), 4)
    found = verify(graph, plan)
    read = {name for node in graph.nodes if node.phase == "optimizer" for name in node.inputs}
    expected = sorted(str(r.layout) for r in plan.registers if r.kind == "gradient" and r.value in read)
    assert sorted(str(check.layout) for check in found.checks if check.role == "gradient") == expected
    assert len(verify(graph, plan, keep_gradients=False).checks) == 14


class Wrong(NumpyBackend):
    """Its kernel of one operator is off by a part in a million, on the first rank's shards or on all."""

    def __init__(self, operator, factor=1 + 1e-6):
        self.operator, self.factor = operator, factor

    def kernel(self, name, default):
        def wrong(xp, *inputs, **attributes):
            made = default(xp, *inputs, **attributes)
            return tuple(item * self.factor for item in made) if isinstance(made, tuple) else made * self.factor

        return wrong if name == self.operator else default


@pytest.mark.parametrize(
    "operator, first",
    [
        ("relu", r"activation relu: f32\[6,7\] .* made by node relu \(relu\)"),
        ("square", r"activation square: .* made by node square"),
        ("adamw_update", r"made by node adamw_update \(adamw_update\)"),
        ("relu_backward", r"gradient relu_backward: .* made by node relu_backward \(relu_backward\)"),
    ],
)
def test_a_wrong_kernel_is_found_where_it_stands(operator, first):
    graph = mlp()
    found = verify(graph, random_plan(graph, Mesh((2,)), 1), backend=Wrong(operator))
    assert not found and not found.passed
    with pytest.raises(VerificationError, match=f"The first wrong one of the program is .*{first}"):
        found.raise_if_wrong()


def test_a_missing_reduction_is_found():
    """Parts of a sum taken for the whole: the register says B, but every rank holds its own part."""
    builder = GraphBuilder("product")
    x = builder.source("x", TensorType((3, 4), "f32"), "input")
    w = builder.source("w", TensorType((4, 2), "f32"), "parameter")
    with builder:
        graph = builder.finish([ops.scale(ops.matmul(x, w), factor=2.0)])
    layouts = [("x", "S(1)"), ("w", "S(0)"), ("matmul", "B"), ("scale", "B")]
    registers = tuple(
        Register(number, value, graph.values[value].type, Layout.parse(text), graph.values[value].kind, 0)
        for number, (value, text) in enumerate(layouts)
    )
    operations = (
        Compute("matmul", "matmul", {}, (0, 1), (2,), "forward", "", 0.0, 0.0),
        Compute("scale", "scale", {"factor": 2.0}, (2,), (3,), "forward", "", 0.0, 0.0),
    )
    plan = PhysicalPlan(Mesh((2,)), registers, operations, {"x": 0, "w": 1}, {"scale": 3}, {})
    found = verify(graph, plan)
    assert found.first_wrong.value == "matmul" and found.first_wrong.error == float("inf")
    with pytest.raises(VerificationError, match=r"made by node matmul .*hold different numbers, but by .* replicas"):
        found.raise_if_wrong()


def test_a_box_that_does_not_do_what_its_registers_say():
    graph = mlp(4, (4, 4, 4))
    plans = (random_plan(graph, Mesh((2,)), seed) for seed in range(50))
    plan, box = next((p, o) for p in plans for o in p.operations if isinstance(o, Box) and o.kind == "all_to_all")
    source, target = (plan.registers[number] for number in (*box.inputs, *box.outputs))
    changed = dataclasses.replace(target, layout=source.layout)
    wrong = tuple(changed if register is target else register for register in plan.registers)
    with pytest.raises(PlanError, match="all_to_all of .*must differ on mesh axis x, and only there"):
        verify(graph, dataclasses.replace(plan, registers=wrong))


def test_plan_of_another_graph():
    graph = mlp()
    plan = replicated_plan(graph, Mesh((2,)))
    fewer = dataclasses.replace(plan, updates={k: v for k, v in plan.updates.items() if k != "w0"})
    with pytest.raises(PlanError, match="lacks the update of w0 of graph mlp"):
        verify(graph, fewer)


def test_feeds_replace_drawn_inputs():
    builder = GraphBuilder("sum")
    x = builder.source("x", TensorType((4,), "f32"), "input")
    with builder:
        graph = builder.finish([ops.sum(x)])
    plan = random_plan(graph, Mesh((2,)), 0)
    assert verify(graph, plan, feeds={"x": numpy.array([1e300, 1.0, -1e300, 1.0])}).checks[0].value == "sum"


def test_integers_must_be_equal():
    builder = GraphBuilder("count")
    step = builder.source("step", TensorType((), "i64"), "optimizer", Initial("zeros", ()))
    with builder:
        new = ops.shift(step, amount=1)
        builder.update(step, new)
        graph = builder.finish([new])
    plan = random_plan(graph, Mesh((2,)), 0)
    assert verify(graph, plan).passed
    wrong = verify(graph, plan, backend=Wrong("shift", 2), rtol=10.0)
    assert [check.passed for check in wrong.checks] == [False, False] and wrong.worst.error == float("inf")


@pytest.mark.parametrize(
    "array, reference, floor, expected",
    [
        ([1.0, 2.0], [1.0, 4.0], 0.0, 0.5),
        ([1e-17], [0.0], 1.0, 1e-17),
        ([1e-17], [2e-17], 1e-3, 1e-14),
        ([numpy.inf, 1.0], [numpy.inf, 1.0], 0.0, 0.0),
            ([numpy.nan], [numpy.nan], 0.0, numpy.inf),  # equal, and proves nothing
        ([numpy.nan, 1.0], [1.0, 1.0], 0.0, numpy.inf),
        ([numpy.inf], [-numpy.inf], 0.0, numpy.inf),
        ([1.0], [1.0, 1.0], 0.0, numpy.inf),
        ([], [], 0.0, 0.0),
        ([0.5], [0.0], 0.0, 0.5),
    ],
)
def test_difference(array, reference, floor, expected):
    assert _difference(numpy.array(array), numpy.array(reference), floor)[0] == pytest.approx(expected, rel=1e-12)


def scalar_gradient(centred):
    """The only gradient is that of a scalar: a sum, whose terms cancel if `centred`."""
    builder = GraphBuilder("scalar")
    x = builder.source("x", TensorType((64, 3), "f32"), "input", Initial("normal", (0.0, 1.0)))
    scale = builder.source("scale", TensorType((), "f32"), "parameter", Initial("normal", (1.0, 0.1)))
    with builder:
        terms = ops.sub(x, ops.mean(x, axis=0, keepdims=True)) if centred else x
        loss = ops.sum(ops.mul(terms, scale))
    (gradient,) = backward(builder, loss, [scale]).values()
    with builder, builder.at("optimizer"):
        builder.update(scale, ops.sub(scale, ops.scale(gradient, factor=0.1)))
    return builder.finish([loss])


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_a_scalar_that_is_zero_but_for_rounding_is_no_alarm(parts):
    """Neither the loss nor the gradient has a size of its own: both are measured by the numbers that went in."""
    graph = scalar_gradient(centred=True)
    for seed in range(4):
        assert verify(graph, random_plan(graph, Mesh((parts,)), seed), seed)


def test_a_scalar_that_is_wrong_is_noticed():
    for centred in (False, True):
        graph = scalar_gradient(centred)
        plan = random_plan(graph, Mesh((2,)), 1)
        assert verify(graph, plan)
        assert bool(verify(graph, plan, backend=Wrong("sum", 1 + 1e-7))) == centred, "a part of nothing is nothing"
