"""Gradients as graph nodes: against finite differences, and what the graph says about them."""

import numpy
import pytest
from hypothesis import given, settings, strategies

from sbp.autodiff import backward
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.initial import draw_all
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder

PROGRAMS = {
    "affine": (("x", (3, 4)), ("w", (5, 4)), lambda x, w: ops.mean(ops.tanh(ops.linear(x, w)))),
    "broadcast": (("x", (3, 4)), ("w", (4,)), lambda x, w: ops.sum(ops.exp(x * w + w) / (w * w + 2.0))),
    "reused": (("x", (3, 4)), ("w", (4, 3)), lambda x, w: ops.sum(ops.pow((x @ w) @ (x @ w), exponent=2.0))),
    "views": (
        ("x", (2, 6)),
        ("w", (3, 4)),
        lambda x, w: ops.sum(ops.sin(x.reshape(3, 4).permute(1, 0)) * ops.transpose(w * w, first=0, second=1)),
    ),
    "pieces": (
        ("x", (4, 6)),
        ("w", (4, 2)),
        lambda x, w: ops.sum(ops.square(ops.concat(*ops.split(x, sizes=(2, 4), axis=1)[::-1], w, axis=1)) * 0.5),
    ),
    "unused piece": (
        ("x", (4, 6)),
        ("w", (4, 2)),
        lambda x, w: ops.sum(ops.split(x, sizes=(2, 4), axis=1)[0] * ops.sigmoid(w)),
    ),
    "norm": (
        ("x", (2, 3, 4)),
        ("w", (4,)),
        lambda x, w: ops.sum(ops.square(ops.layer_norm(x, w, w)) * ops.rms_norm(x, w)),
    ),
    "softmax": (("x", (3, 5)), ("w", (3, 5)), lambda x, w: ops.sum(ops.softmax(x, axis=1) * w)),
}


def traced(first, second, program):
    builder = GraphBuilder("program")
    x, w = (builder.source(n, TensorType(s, "f64"), "input", Initial("normal", (0.0, 1.0))) for n, s in (first, second))
    with builder:
        loss = program(x, w)
    gradients = backward(builder, loss, [x, w])
    return builder.finish([loss, *gradients.values()]), loss.name, {k: g.name for k, g in gradients.items()}


@pytest.mark.parametrize("label", PROGRAMS)
def test_equals_finite_differences(label):
    graph, loss, gradients = traced(*PROGRAMS[label])
    feeds = draw_all(graph, seed=3, dtype="f64")
    found = evaluate(graph, feeds)
    step = 1e-6
    for name in ("x", "w"):
        expected = numpy.empty(graph.values[name].shape)
        for index in numpy.ndindex(*expected.shape):
            ends = []
            for sign in (1, -1):
                moved = feeds[name].copy()
                moved[index] += sign * step
                ends.append(evaluate(graph, {**feeds, name: moved})[loss])
            expected[index] = (ends[0] - ends[1]) / (2 * step)
        numpy.testing.assert_allclose(found[gradients[name]], expected, rtol=2e-5, atol=1e-7)


def test_second_derivative():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((4,), "f64"), "input", Initial())
    with builder:
        loss = ops.sum(ops.pow(x, exponent=3.0))
    first = backward(builder, loss, [x])["x"]
    with builder:
        total = ops.sum(first)
    second = backward(builder, total, [x])["x"]
    graph = builder.finish([first, second])
    feeds = draw_all(graph, dtype="f64")
    found = evaluate(graph, feeds)
    numpy.testing.assert_allclose(found[first.name], 3 * feeds["x"] ** 2)
    numpy.testing.assert_allclose(found[second.name], 6 * feeds["x"])


def test_nodes_belong_to_the_phase_and_module_of_what_they_differentiate():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((3, 4), "f32"))
    w = builder.source("w", TensorType((2, 4), "f32"), "parameter")
    with builder, builder.at("forward", "net.fc"):
        y = ops.linear(x, w)
    with builder, builder.at("forward", "net.loss"):
        loss = ops.mean(ops.square(y))
    gradient = backward(builder, loss, [w])["w"]
    graph = builder.finish([loss, gradient])
    made = graph.nodes[graph.producers[gradient.name][0]]
    assert (made.op, made.module, made.phase) == ("linear_weight_gradient", "net.fc", "backward")
    assert graph.values[gradient.name].kind == "gradient"
    assert {node.module for node in graph.nodes if node.phase == "backward"} == {"net.fc", "net.loss"}
    # x is an input whose gradient nobody asked for: no node computes it.
    assert not any(graph.values[name].shape == (3, 4) for node in graph.nodes for name in node.outputs)


def test_gradients_of_a_shared_value_are_added():
    builder = GraphBuilder()
    w = builder.source("w", TensorType((3, 3), "f64"), "parameter")
    with builder:
        loss = ops.sum(ops.matmul(w, w) + w)
    gradient = backward(builder, loss, [w])["w"]
    graph = builder.finish([gradient])
    backward_ops = [node.op for node in graph.nodes if node.phase == "backward"]
    assert backward_ops.count("add") == 2
    feeds = draw_all(graph, dtype="f64")
    ones, value = numpy.ones((3, 3)), feeds["w"]
    numpy.testing.assert_allclose(evaluate(graph, feeds)[gradient.name], ones @ value.T + value.T @ ones + ones)


def test_a_value_the_loss_does_not_depend_on_has_no_entry():
    builder = GraphBuilder()
    x, y = (builder.source(name, TensorType((2,), "f32")) for name in "xy")
    with builder:
        loss = ops.sum(ops.square(x))
    assert list(backward(builder, loss, [x, y])) == ["x"]


def test_a_seed_replaces_the_scalar_one():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((3,), "f64"), "input", Initial())
    seed = builder.source("seed", TensorType((3,), "f64"), "input", Initial())
    with builder:
        y = ops.square(x)
    gradient = backward(builder, y, [x], seed)["x"]
    graph = builder.finish([gradient])
    feeds = draw_all(graph, dtype="f64")
    numpy.testing.assert_allclose(evaluate(graph, feeds)[gradient.name], 2 * feeds["x"] * feeds["seed"])


def test_no_gradient_flows_through_integers():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((3, 4), "f64"), "input", Initial())
    with builder:
        best = ops.cast(ops.argmax(x, axis=1), dtype="f64")
        loss = ops.sum(ops.square(x)) + ops.sum(best)
    gradient = backward(builder, loss, [x])["x"]
    graph = builder.finish([gradient])
    feeds = draw_all(graph, dtype="f64")
    numpy.testing.assert_allclose(evaluate(graph, feeds)[gradient.name], 2 * feeds["x"])


def errors():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((3, 4), "f32"))
    ids = builder.source("ids", TensorType((3,), "i64"))
    with builder:
        y = ops.square(x)
        count = ops.sum(ids)
        loss = ops.sum(y)
    return builder, x, ids, y, count, loss


def test_the_loss_must_be_a_floating_scalar():
    builder, x, ids, y, count, loss = errors()
    with pytest.raises(GraphError, match=r"scalar.*f32\[3,4\].*reduce it"):
        backward(builder, y, [x])
    with pytest.raises(GraphError, match="holds integers"):
        backward(builder, count, [x])
    with pytest.raises(GraphError, match=r"ids.*leave it out"):
        backward(builder, loss, [ids])


def test_a_missing_gradient_names_the_node():
    from sbp.operator import REGISTRY, operator

    @operator("... -> ...", name="opaque_for_this_test")
    def opaque(xp, x):
        return x

    try:
        builder = GraphBuilder()
        x = builder.source("x", TensorType((3,), "f32"))
        with builder, builder.at("forward", "net.odd"):
            loss = ops.sum(opaque(x))
        with pytest.raises(GraphError, match=r"gradient of node net\.odd\.opaque_for_this_test .*no gradient"):
            backward(builder, loss, [x])
    finally:
        REGISTRY._operators.pop("opaque_for_this_test")


def smooth(symbols, choices):
    """A program of random smooth steps on (3, 4) tensors; every step reads two of the values made so far."""
    made = list(symbols)
    for kind, first, second in choices:
        a, b = made[first % len(made)], made[second % len(made)]
        made.append(
            {
                "add": lambda a, b: a + b,
                "mul": lambda a, b: ops.tanh(a) * b,
                "sub": lambda a, b: a - ops.sin(b),
                "matmul": lambda a, b: ops.tanh(a @ ops.transpose(b)) @ a,
                "broadcast": lambda a, b: a * ops.mean(b, axis=0, keepdims=True),
                "softmax": lambda a, b: ops.softmax(a, axis=1) + b,
                "reshape": lambda a, b: ops.permute(a.reshape(4, 3), order=(1, 0)) - 0.5 * b,
                "concat": lambda a, b: ops.slice(ops.concat(a, b, axis=0), starts=(2, 0), stops=(5, 4)),
            }[kind](a, b)
        )
    return ops.mean(ops.sigmoid(made[-1]))


KINDS = ["add", "mul", "sub", "matmul", "broadcast", "softmax", "reshape", "concat"]


@settings(max_examples=40, deadline=None)
@given(
    strategies.lists(
        strategies.tuples(strategies.sampled_from(KINDS), strategies.integers(0, 9), strategies.integers(0, 9)),
        min_size=1,
        max_size=8,
    ),
    strategies.integers(0, 5),
)
def test_random_programs_equal_their_directional_derivative(choices, seed):
    builder = GraphBuilder()
    inputs = [builder.source(n, TensorType((3, 4), "f64"), "input", Initial("normal", (0.0, 1.0))) for n in "xy"]
    with builder:
        loss = smooth(inputs, choices)
    gradients = backward(builder, loss, inputs)
    graph = builder.finish([loss, *gradients.values()])
    feeds = draw_all(graph, seed, "f64")
    found = evaluate(graph, feeds)
    random = numpy.random.default_rng(seed)
    along = {name: random.normal(size=(3, 4)) for name in "xy"}
    ends = [
        evaluate(graph, {name: feeds[name] + sign * 1e-5 * along[name] for name in "xy"})[loss.name] for sign in (1, -1)
    ]
    slope = sum(float((found[gradients[name].name] * along[name]).sum()) for name in "xy" if name in gradients)
    assert abs(slope - (ends[0] - ends[1]) / 2e-5) < 1e-6 * max(1.0, abs(slope))
