"""The unsharded reference: what it returns, in which types, and how it fails."""

import numpy
import pytest

from sbp.errors import GraphError
from sbp.graph import Graph, Initial, Node, Value
from sbp.initial import draw, draw_all
from sbp.interpreter import attributes_in, evaluate
from sbp.operator import REGISTRY, TensorType, operator
from sbp.ops import library as ops
from sbp.trace import GraphBuilder


def small(dtype="f32"):
    """y = exp(x w) in `dtype`, a sum in f64, and a counter that is updated."""
    builder = GraphBuilder("small")
    x = builder.source("x", TensorType((2, 3), dtype), "input", Initial("normal", (0.0, 1.0)))
    w = builder.source("w", TensorType((3, 4), dtype), "parameter", Initial("uniform", (-1.0, 1.0)))
    count = builder.source("count", TensorType((), "i64"), "buffer", Initial("constant", (7,)))
    with builder:
        y = ops.exp(x @ w)
        total = ops.sum(ops.cast(y, dtype="f64"))
        builder.update(count, ops.shift(count, amount=1))
    return builder.finish([y, total]), y.name, total.name


def test_returns_outputs_and_new_state_by_the_states_name():
    graph, y, total = small()
    feeds = draw_all(graph)
    found = evaluate(graph, feeds)
    assert set(found) == {y, total, "count"}
    expected = numpy.exp(feeds["x"].astype("f8") @ feeds["w"].astype("f8"))
    numpy.testing.assert_allclose(found[y], expected, rtol=1e-12)
    numpy.testing.assert_allclose(found[total], expected.sum(), rtol=1e-12)
    assert found["count"] == 8 and found["count"].dtype == numpy.int64


@pytest.mark.parametrize(
    "dtype, floating, y_type, total_type",
    [
        ("f32", "f64", "float64", "float64"),
        ("f32", "f32", "float32", "float32"),
        ("f32", None, "float32", "float64"),
        ("bf16", None, "float32", "float64"),
        ("f16", None, "float16", "float64"),
    ],
)
def test_floating_overrides_every_floating_type(dtype, floating, y_type, total_type):
    graph, y, total = small(dtype)
    found = evaluate(graph, draw_all(graph), floating=floating)
    assert (found[y].dtype, found[total].dtype) == (y_type, total_type)


def test_keep_returns_intermediate_values():
    graph, y, _ = small()
    product = graph.nodes[0].outputs[0]
    feeds = draw_all(graph)
    found = evaluate(graph, feeds, keep=[product, "w"])
    numpy.testing.assert_allclose(numpy.exp(found[product]), found[y])
    numpy.testing.assert_array_equal(found["w"], feeds["w"])
    with pytest.raises(GraphError, match="unknown value 'wrong'"):
        evaluate(graph, feeds, keep=["wrong"])


def test_feeds_are_checked():
    graph, *_ = small()
    feeds = draw_all(graph)
    with pytest.raises(GraphError, match=r"parameter 'w' \(f32\[3,4\]\) is not fed"):
        evaluate(graph, {k: v for k, v in feeds.items() if k != "w"})
    with pytest.raises(GraphError, match=r"input 'x' is f32\[2,3\], but was fed an array of shape \[2, 2\]"):
        evaluate(graph, {**feeds, "x": numpy.zeros((2, 2))})


def test_feeds_are_not_changed():
    graph, *_ = small()
    feeds = draw_all(graph, dtype="f64")
    before = {name: array.copy() for name, array in feeds.items()}
    evaluate(graph, feeds)
    for name, array in before.items():
        numpy.testing.assert_array_equal(feeds[name], array)


@pytest.fixture
def broken():
    @operator("a -> a", name="broken_for_this_test")
    def kernel(xp, x):
        if x[0] > 0:
            raise ValueError("no positive numbers")
        return x[:-1]

    yield kernel
    REGISTRY._operators.pop("broken_for_this_test")


@pytest.mark.parametrize(
    "start, message",
    [
        (1.0, r"node net\.bad \(broken_for_this_test\) on \(float64\[3\]\): ValueError: no positive numbers"),
        (-1.0, r"node net\.bad \(broken_for_this_test\): its kernel made 'y' of shape \[2\], the graph says f32\[3\]"),
    ],
)
def test_a_failing_kernel_names_its_node(broken, start, message):
    kind = TensorType((3,), "f32")
    values = {"x": Value("x", kind, "input"), "y": Value("y", kind)}
    graph = Graph("g", values, (Node("net.bad", "broken_for_this_test", ("x",), ("y",)),), ("y",))
    with pytest.raises(GraphError, match=message):
        evaluate(graph, {"x": numpy.full(3, start)})


@pytest.mark.parametrize(
    "initial, expected",
    [
        (Initial("zeros", ()), [0, 0, 0]),
        (Initial("ones", ()), [1, 1, 1]),
        (Initial("constant", (2.5,)), [2.5, 2.5, 2.5]),
        (Initial("arange", ()), [0, 1, 2]),
    ],
)
def test_fixed_initial_values(initial, expected):
    array = draw(Value("v", TensorType((3,), "f32"), "parameter", initial))
    assert array.dtype == numpy.float32
    numpy.testing.assert_array_equal(array, expected)


def test_random_initial_values_depend_on_name_and_seed_only():
    def value(name, dtype="f32"):
        return Value(name, TensorType((50, 40), dtype), "parameter", Initial("normal", (3.0, 0.5)))

    first = draw(value("a"))
    numpy.testing.assert_array_equal(first, draw(value("a")))
    assert not numpy.array_equal(first, draw(value("b")))
    assert not numpy.array_equal(first, draw(value("a"), seed=1))
    numpy.testing.assert_array_equal(first, draw(value("a"), dtype="f64").astype("float32"))
    assert abs(first.mean() - 3) < 0.1 and abs(first.std() - 0.5) < 0.05


def test_integers_and_uniform_stay_in_their_ranges():
    ids = draw(Value("ids", TensorType((1000,), "i64"), "input", Initial("integers", (3, 7))))
    assert set(ids) == {3, 4, 5, 6} and ids.dtype == numpy.int64
    numbers = draw(Value("u", TensorType((1000,), "f32"), "input", Initial("uniform", (-2.0, 5.0))))
    assert -2 <= numbers.min() < -1.8 and 4.8 < numbers.max() <= 5


def test_defaults_and_errors_of_initial_values():
    assert not draw(Value("m", TensorType((3,), "f32"), "optimizer")).any()
    with pytest.raises(GraphError, match=r"'ids' \(i64\[3\]\) holds integers"):
        draw(Value("ids", TensorType((3,), "i64"), "input"))
    with pytest.raises(GraphError, match="unknown initial 'gauss'"):
        draw(Value("x", TensorType((3,), "f32"), "input", Initial("gauss", ())))
    with pytest.raises(GraphError, match="takes 2 parameters"):
        draw(Value("x", TensorType((3,), "f32"), "input", Initial("uniform", (1.0,))))
    with pytest.raises(GraphError, match="low < high"):
        draw(Value("x", TensorType((3,), "i64"), "input", Initial("integers", (4, 4))))


def test_only_floating_dtype_attributes_are_overridden():
    given = {"dtype": "bf16", "other": "bf16", "axis": 1}
    assert attributes_in(given, "f64") == {"dtype": "f64", "other": "bf16", "axis": 1}
    assert attributes_in({"dtype": "i64"}, "f64") == {"dtype": "i64"}
    assert attributes_in(given, None) == given
