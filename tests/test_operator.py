"""Operators: what follows from one definition (types, layouts, cost), how they are called, and what is refused."""

import math

import numpy
import pytest
from own_operators import OWN

import sbp
from sbp.errors import GraphError, RuleError, SbpError
from sbp.graph import Graph
from sbp.layout import Layout
from sbp.operator import REGISTRY, Operator, TensorType, operator, parse_type
from sbp.rule import Signature
from sbp.trace import GraphBuilder


@pytest.fixture
def registry():
    """Operators defined in a test are gone after it."""
    before = dict(REGISTRY._operators)
    yield REGISTRY
    REGISTRY._operators.clear()
    REGISTRY._operators.update(before)


@pytest.fixture
def scaled_product(registry):
    @operator(
        "*b m k+, *b k+ n -> *b m n",
        linear="each",
        dtype=lambda x, w, *, factor, exact: "f64" if exact else x.dtype,
    )
    def scaled_product(xp, x, w, *, factor, exact=False):
        """Matrix product times a number."""
        return xp.matmul(x, w) * factor

    scaled_product.flops = lambda b, m, k, n: 2 * b * m * k * n + b * m * n
    return scaled_product


def test_what_the_kernel_says(scaled_product):
    op = scaled_product
    assert (op.name, op.__name__, op.__doc__) == ("scaled_product", "scaled_product", "Matrix product times a number.")
    assert op.input_names == ("x", "w") and op.output_names == ("out",)
    assert not op.variadic and not op.several and not op.differentiable and not op.localizes
    assert REGISTRY["scaled_product"] is op and "scaled_product" in list(REGISTRY)
    assert repr(op) == "<operator scaled_product>"


def test_types(scaled_product):
    x, w = parse_type("bf16[2,3,4]"), parse_type("f32[4,5]")
    assert scaled_product.infer((x, w), {"factor": 2}) == (parse_type("bf16[2,3,5]"),)
    assert scaled_product.infer((x, w), {"factor": 2, "exact": True}) == (parse_type("f64[2,3,5]"),)


def test_work_counts_the_busiest_rank(scaled_product):
    types = (parse_type("f32[5,8]"), parse_type("f32[8,6]"))
    rule = scaled_product.bind(types, {"factor": 1.0})
    outputs = scaled_product.infer(types, {"factor": 1.0})

    def work(*layouts):
        layouts = [Layout.parse(text) for text in layouts]
        signature = Signature(tuple(layouts[:2]), tuple(layouts[2:]))
        assert rule.admits(signature, (2,))
        return scaled_product.work(rule, types, outputs, {"factor": 1.0}, signature, (2,))

    assert work("B", "B", "B") == (2 * 5 * 8 * 6 + 5 * 6, 4 * (40 + 48 + 30))
    assert work("S(0)", "B", "S(0)") == (2 * 3 * 8 * 6 + 3 * 6, 4 * (24 + 48 + 18))
    assert work("S(1)", "S(0)", "P") == (2 * 5 * 4 * 6 + 5 * 6, 4 * (20 + 24 + 30))


def test_work_without_formulas_is_one_flop_per_element(registry):
    @operator("... -> ...")
    def same(xp, x):
        return x

    types = (parse_type("f16[6,4]"),)
    whole = Signature((Layout.parse("B"),), (Layout.parse("B"),))
    assert same.work(same.bind(types, {}), types, types, {}, whole, (2,)) == (24.0, 2 * 24 * 2.0)


def test_called_with_arrays_it_computes(scaled_product):
    x, w = numpy.ones((3, 4)), numpy.ones((4, 2))
    assert (scaled_product(x, w, factor=0.5) == 2.0).all()
    assert (scaled_product(x, w, 0.5) == 2.0).all(), "attributes may follow the tensors"


def test_called_with_symbols_it_adds_a_node(scaled_product):
    builder = GraphBuilder("test")
    x = builder.source("x", TensorType((3, 4), "f32"))
    w = builder.source("w", TensorType((4, 2), "f32"), "parameter")
    out = scaled_product(x, w, 0.5)
    graph = builder.finish([out])
    assert (out.shape, out.dtype) == ((3, 2), "f32")
    (node,) = graph.nodes
    assert (node.op, node.inputs, dict(node.attributes)) == (
        "scaled_product",
        ("x", "w"),
        {"factor": 0.5, "exact": False},
    )


def test_operators_without_tensors_use_the_current_builder(registry):
    @operator(lambda *, size, start: ("-> n", {"n": size}), dtype="i64")
    def counting(xp, *, size, start=0):
        return xp.arange(start, start + size)

    @counting.localize
    def _(attributes, inputs, outputs):
        return {"size": outputs[0].shape[0], "start": attributes["start"] + outputs[0].offset[0]}

    assert counting(size=3).tolist() == [0, 1, 2]
    with GraphBuilder() as builder:
        out = counting(size=5)
    graph = builder.finish([out])
    assert graph.nodes[0].inputs == () and out.shape == (5,)
    rule = graph.rule(graph.nodes[0])
    _, (box,) = rule.shards(rule.signatures((2,))[1], (2,), (1,))
    assert counting.kernel(numpy, **counting.local_attributes({"size": 5}, (), (box,))).tolist() == [3, 4]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda op, x: op(x), "takes 2 tensors (x, w), got 1"),
        (lambda op, x: op(x, x, 1.0, False, 7), "each once; got 5 positional arguments"),
        (lambda op, x: op(x, x, 1.0, factor=2.0), "each once; got 3 positional arguments and factor"),
        (lambda op, x: op(x, x), "needs the attribute factor"),
        (lambda op, x: op(x, x, factor=1, fctor=2), "has no attribute fctor; it has factor, exact"),
    ],
)
def test_wrong_calls_name_the_operator(scaled_product, call, says):
    with pytest.raises(GraphError) as error:
        call(scaled_product, numpy.ones((2, 2)))
    assert str(error.value).startswith("operator scaled_product") and says in str(error.value)


def test_wrong_shapes_name_the_operator_and_all_types(scaled_product):
    builder = GraphBuilder("net")
    x = builder.source("x", TensorType((3, 4), "f32"))
    with builder.scope("mlp"), pytest.raises(SbpError) as error:
        scaled_product(x, x, 1.0)
    assert "operator scaled_product(f32[3,4], f32[3,4])" in str(error.value)
    assert "input 1 of shape [3, 4] has 3 where dimension k" in str(error.value)
    assert str(error.value).endswith("(in module mlp)")


def test_attributes_must_be_plain(scaled_product):
    types = (parse_type("f32[3,4]"), parse_type("f32[4,2]"))
    with pytest.raises(GraphError, match="attributes are plain values"):
        scaled_product.infer(types, {"factor": numpy.ones(2)})


def test_partial_passes_by_group(registry):
    def passing(types, count=1, **options):
        made = ", ".join(["..."] * count)
        op = Operator(lambda xp, x, y, *more: x, f"... -> {made}", name="probe", **options)
        found = op.passing_for([parse_type(text) for text in types], count)
        return {(tuple(sorted(p.inputs)), tuple(sorted(p.outputs)), p.before, p.after) for p in found}

    pair = ["f32[2]", "f32[2]"]
    assert passing(pair) == set()
    assert passing(pair, linear="all") == {((0, 1), (0,), "sum", "sum")}
    assert passing(pair, linear="each") == {((0,), (0,), "sum", "sum"), ((1,), (0,), "sum", "sum")}
    assert passing(pair, linear="x y | y") == {((0, 1), (0,), "sum", "sum"), ((1,), (0,), "sum", "sum")}
    assert passing(pair, linear="y -> b", outputs=("a", "b"), count=2) == {((1,), (1,), "sum", "sum")}
    assert passing(pair, linear="x ->") == {((0,), (), "sum", "sum")}
    assert passing([*pair, "f32[2]"], linear="more | y more") == {
        ((2,), (0,), "sum", "sum"),
        ((1, 2), (0,), "sum", "sum"),
    }
    assert passing(pair, monotone="x") == {((0,), (0,), kind, kind) for kind in ("max", "min")}
    assert passing(pair, antitone="x") == {((0,), (0,), "max", "min"), ((0,), (0,), "min", "max")}
    assert passing(pair, passes=[("all", "max", "max")]) == {((0, 1), (0,), "max", "max")}
    assert passing(["bool[2]", "f32[2]"], linear="each") == {((1,), (0,), "sum", "sum")}, "booleans have no sum"
    assert passing(pair, linear=lambda x, y: "x" if x.dtype == "f32" else "") == {((0,), (0,), "sum", "sum")}


@pytest.mark.parametrize("option", ["linear", "monotone", "antitone"])
def test_groups_that_name_no_input_are_refused(option):
    with pytest.raises(RuleError, match="names 'z', which is none of x"):
        Operator(lambda xp, x: x, "... -> ...", name="probe", **{option: "z"})


def test_cases_are_checked_when_they_are_added(scaled_product):
    scaled_product.case("f32[2,3]", "f32[3,4]", factor=2.0)
    assert len(scaled_product.cases) == 1
    with pytest.raises(RuleError, match="dimension k"):
        scaled_product.case("f32[2,3]", "f32[4,4]", factor=2.0)
    with pytest.raises(GraphError, match="needs the attribute factor"):
        scaled_product.case("f32[2,3]", "f32[3,4]")
    with pytest.raises(RuleError, match="names 'ids', which is none of x, w"):
        scaled_product.case("f32[2,3]", "f32[3,4]", ranges={"ids": (0, 3)}, factor=2.0)
    with pytest.raises(GraphError, match="is not a tensor type"):
        scaled_product.case("f32(2,3)", "f32[3,4]", factor=2.0)


def test_gradients_get_what_they_name(registry):
    seen = []

    @operator("... -> ..., ...", outputs=("a", "b"))
    def twice(xp, x, *, scale=3):
        return x, x

    @twice.gradient
    def _(grad, x, *, scale, out):
        seen.append((grad, x, scale, out))
        return grad[0]

    assert twice.gradients(["ga", None], ["x"], ["a", "b"], {}) == ("ga",)
    assert seen == [(("ga", None), "x", 3, ("a", "b"))]
    with pytest.raises(GraphError, match="operator argmax has no gradient; detach its inputs"):
        REGISTRY["argmax"].gradients([None], [None], [None], {})


def test_a_gradient_of_the_wrong_length_is_refused(scaled_product):
    scaled_product.gradient(lambda grad, x, w: (grad,))
    with pytest.raises(GraphError, match="gives 1 values for 2 inputs"):
        scaled_product.gradients(["g"], ["x", "w"], ["out"], {"factor": 1.0})


def test_the_registry_suggests(registry):
    with pytest.raises(GraphError, match="unknown operator 'matmull'. Did you mean matmul?"):
        REGISTRY["matmull"]
    with pytest.raises(GraphError, match="Import the module that defines it first"):
        REGISTRY["zzzzzz"]
    with pytest.raises(RuleError, match=r"operator 'matmul' is already defined in sbp\.ops\.matmul"):
        operator("... -> ...", name="matmul")(lambda xp, x: x)


def test_an_operator_may_be_defined_again_where_it_was(registry):
    """Re-running a notebook cell replaces what the cell made."""

    def define(factor):
        @operator("... -> ...")
        def again(xp, x):
            return x * factor

        return again

    define(2)
    second = define(3)
    assert REGISTRY["again"] is second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f32[4,6]", TensorType((4, 6), "f32")),
        (" bf16[] ", TensorType((), "bf16")),
        ("int64[3]", TensorType((3,), "i64")),
        ("bool[0, 2]", TensorType((0, 2), "bool")),
    ],
)
def test_type_spellings(text, expected):
    assert parse_type(text) == expected
    assert parse_type(str(expected)) == expected


@pytest.mark.parametrize("name", ["float32", "torch.float32", numpy.float32, numpy.dtype("float32"), "f32", "float"])
def test_element_types_by_any_usual_name(name):
    assert TensorType((2,), name).dtype == "f32"


def test_sizes_of_types():
    kind = TensorType((4, 6), "bf16")
    assert (kind.elements, kind.bytes, str(kind)) == (24, 48, "bf16[4,6]")
    assert TensorType((), "f64").bytes == 8
    with pytest.raises(GraphError, match="unknown element type 'complex64'; known are f64"):
        TensorType((2,), "complex64")
    with pytest.raises(GraphError, match="at least 0"):
        TensorType((2, -1), "f32")


def test_every_operator_is_documented_and_has_cases():
    for name in OWN:
        op = REGISTRY[name]
        assert op.__doc__, f"operator {name} has no docstring"
        assert len(op.cases) >= 2, f"operator {name} has {len(op.cases)} cases; its rule is proven on these"


def test_a_user_operator_goes_through_the_whole_graph(registry):
    """The example of the README: one place, ten lines, everything else follows."""

    @sbp.operator("b m k+, n k+ -> b m n", linear="each")
    def linear_map(xp, x, w):
        """x (b, m, k) times the transposed weight (n, k)."""
        return xp.matmul(x, w.T)

    linear_map.flops = lambda b, m, k, n: 2 * b * m * k * n

    @linear_map.gradient
    def _(grad, x, w):
        return grad @ w, (grad.transpose() @ x).sum(axis=0)

    linear_map.case("f32[2,3,4]", "f32[5,4]")

    from sbp.autodiff import backward
    from sbp.interpreter import evaluate

    builder = GraphBuilder("user")
    with builder:
        x = builder.source("x", TensorType((2, 3, 4), "f32"))
        w = builder.source("w", TensorType((5, 4), "f32"), "parameter")
        loss = linear_map(x, w).sum()
        grads = backward(builder, loss, [x, w])
    graph = Graph.from_json(builder.finish([loss, grads["x"], grads["w"]]).to_json())
    rng = numpy.random.default_rng(0)
    feeds = {"x": rng.standard_normal((2, 3, 4)), "w": rng.standard_normal((5, 4))}
    found = evaluate(graph, feeds)
    numpy.testing.assert_allclose(found[graph.outputs[0]], (feeds["x"] @ feeds["w"].T).sum(), rtol=1e-12)
    numpy.testing.assert_allclose(found[graph.outputs[1]], numpy.broadcast_to(feeds["w"].sum(0), (2, 3, 4)), rtol=1e-12)
    numpy.testing.assert_allclose(
        found[graph.outputs[2]], numpy.broadcast_to(feeds["x"].sum((0, 1)), (5, 4)), rtol=1e-12
    )


# -- definitions that are none -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("", {}, "has no '->'"),
        (None, {}, "operator wrong: its rule is None; write a text"),
        (("a -> a", {}), {}, "its rule is .* write a text"),
        ("->", {}, "has 0 inputs, its kernel takes x"),
        ("a, b -> a b", {}, "has 2 inputs, its kernel takes x"),
        ("a -> a, a", {}, r"has 2 outputs, but their names are out \(outputs=\)"),
        ("*d -> *d", {"outputs": ("y", "z")}, "has 1 outputs, but their names are y, z"),
        ("*d -> *d", {"outputs": ()}, "has 1 outputs, but their names are none"),
        ("a (b -> a (b", {}, "parentheses stand around a compound"),
        ("a) b -> a) b", {}, "parentheses stand around"),
        ("((a b) c) -> ((a b) c)", {}, "and hold no others"),
        ("*d -> *d", {"linear": "y"}, "'y' names 'y', which is none of x"),
        ("*d -> *d", {"linear": "x |"}, "'x |' has a group without inputs"),
        ("*d -> *d", {"monotone": 5}, "5 names no inputs"),
        ("*d -> *d", {"antitone": None}, "None names no inputs"),
        ("*d -> *d", {"passes": "all"}, "passes has triples such as"),
        ("*d -> *d", {"passes": [("x", "sum")]}, "passes has triples such as"),
        ("*d -> *d", {"linaer": "all"}, "operator wrong has no option linaer; there are name, linear, monotone"),
        ("*d -> *d", {"name": 5}, "an operator is a function with a name"),
    ],
)
def test_a_definition_that_is_none_is_reported_where_it_stands(rule, options, message):
    def wrong(xp, x):
        return x

    with pytest.raises(RuleError, match=message):
        operator(rule, **options)(wrong)
    assert "wrong" not in REGISTRY


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (lambda x: 1 / 0, {}, r"operator wrong\(f32\[4,6\]\).*ZeroDivisionError"),
        (lambda x: None, {}, r"operator wrong\(f32\[4,6\]\): its rule is None"),
        (lambda: "*d -> *d", {}, "takes 0 positional arguments"),
        (lambda x: ("a b -> a b c", {"c": "z"}), {}, "TypeError"),
        (lambda x: ("a b -> a b c", {"c": 2.5}), {}, "TypeError"),
        ("a b -> a b c", {}, "does not say the size of output dimension 'c'"),
        ("*d -> *d", {"linear": lambda: "all"}, "takes 0 positional arguments"),
        ("*d -> *d", {"linear": lambda x: 5}, "5 names no inputs"),
        ("*d -> *d", {"dtype": "f99"}, "unknown element type 'f99'"),
        ("*d -> *d", {"dtype": 5}, "unknown element type 5"),
        ("*d -> *d", {"dtype": lambda: "f32"}, "takes 0 positional arguments"),
        ("*d -> *d", {"dtype": lambda x: ("f32", "f32")}, "1 outputs, its dtype= gives 2"),
    ],
)
def test_a_definition_that_cannot_be_asked_is_reported_at_its_first_example(registry, rule, options, message):
    @operator(rule, **options)
    def wrong(xp, x):
        return x

    with pytest.raises(SbpError, match=message):
        wrong.case("f32[4,6]")
    for text in ("f32", "f32[a]", 5, None):
        with pytest.raises(GraphError, match="is not a tensor type"):
            wrong.case(text)


NONSENSE = [None, "a", "", -1, 0, 7, 2**70, 0.5, math.nan, math.inf, (), (0, 0), (-1,), (1, 2, 3, 4, 5), ((0, 1),),
            {"a": 1}, (None,), numpy.arange(3), object, -3]  # fmt: skip


@pytest.mark.parametrize("name", REGISTRY)
def test_attributes_of_any_kind_are_taken_or_named(name):
    """Of the wrong type, out of range, infinite: an operator gives a type for the call, or an error that is sbp's."""
    op = REGISTRY[name]
    for case in op.cases[:1]:
        for key in op.defaults:
            for value in NONSENSE:
                try:
                    made = op.infer(case.types, {**case.attributes, key: value})
                except SbpError as error:
                    assert str(error)
                else:
                    assert all(size >= 0 for one in made for size in one.shape)
