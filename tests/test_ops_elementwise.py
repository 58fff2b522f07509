"""Elementwise operators, comparisons and activations against NumPy and PyTorch, and what they refuse."""

import math

import numpy
import pytest
from operator_programs import Program, check_against_torch, close

from sbp.errors import RuleError
from sbp.operator import REGISTRY, parse_type
from sbp.ops import library as ops
from sbp.ops.broadcasting import unbroadcast
from sbp.trace import GraphBuilder

RNG = numpy.random.default_rng(5)
X, Y = RNG.standard_normal((4, 6)), RNG.standard_normal((4, 6))
ROW, COLUMN = RNG.standard_normal(6), RNG.standard_normal((4, 1))
SCALAR = RNG.standard_normal(())
POSITIVE = RNG.uniform(0.2, 3.0, (4, 6))
MASK = RNG.random((4, 6)) < 0.5

torch = pytest.importorskip("torch")
F = torch.nn.functional

UNARY = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "square": torch.square, "exp": torch.exp,
    "expm1": torch.expm1, "sin": torch.sin, "cos": torch.cos, "floor": torch.floor, "ceil": torch.ceil,
    "round": torch.round, "trunc": torch.trunc, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf,
    "silu": F.silu, "softplus": lambda x: F.softplus(x, threshold=700), "relu": F.relu, "gelu": F.gelu,
    "leaky_relu": F.leaky_relu,
}  # fmt: skip
OF_POSITIVE = {
    "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal,
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum,
}  # fmt: skip
COMPARISONS = {
    "equal": torch.eq, "not_equal": torch.ne, "less": torch.lt, "less_equal": torch.le, "greater": torch.gt,
    "greater_equal": torch.ge,
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("x", [X, 30 * X, SCALAR, numpy.zeros((0, 3))], ids=["plain", "large", "scalar", "empty"])
def test_unary(name, x):
    check_against_torch(getattr(ops, name), UNARY[name], x)


@pytest.mark.parametrize("name", OF_POSITIVE)
def test_unary_of_positive_numbers(name):
    check_against_torch(getattr(ops, name), OF_POSITIVE[name], POSITIVE)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    "x, y",
    [(X, Y), (X, ROW), (COLUMN, ROW), (SCALAR, X), (X[:, None], Y), (X, X)],
    ids=["same", "row", "both", "scalar", "more dimensions", "ties"],
)
def test_binary(name, x, y):
    check_against_torch(getattr(ops, name), BINARY[name], x, y)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name):
    x, y = RNG.integers(0, 3, (4, 6)), RNG.integers(0, 3, 6)
    check_against_torch(getattr(ops, name), COMPARISONS[name], x, y)


@pytest.mark.parametrize(
    "name, reference",
    [("floor_divide", lambda x, y: torch.div(x, y, rounding_mode="floor")), ("remainder", torch.remainder)],
)
def test_whole_quotients(name, reference):
    integers = RNG.integers(-9, 10, (4, 6)), RNG.integers(1, 5, 6) * RNG.choice([-1, 1], 6)
    check_against_torch(getattr(ops, name), reference, *integers)
    check_against_torch(getattr(ops, name), reference, X * 5, Y)


PROGRAMS = {
    "relu6": (lambda x: ops.relu6(x * 5), lambda x: F.relu6(x * 5)),
    "hardtanh": (ops.hardtanh, F.hardtanh),
    "hardsigmoid": (lambda x: ops.hardsigmoid(x * 3), lambda x: F.relu6(x * 3 + 3) / 6),
    "hardswish": (lambda x: ops.hardswish(x * 3), lambda x: F.hardswish(x * 3)),
    "mish": (ops.mish, F.mish),
    "log_sigmoid": (ops.log_sigmoid, F.logsigmoid),
    "elu": (lambda x: ops.elu(x, alpha=0.7), lambda x: F.elu(x, alpha=0.7)),
    "tan": (ops.tan, torch.tan),
    "atan": (ops.atan, torch.atan),
    "sinh": (ops.sinh, torch.sinh),
    "cosh": (ops.cosh, torch.cosh),
    "isnan": (lambda x: ops.isnan(ops.log(x)), lambda x: torch.isnan(torch.log(x))),
    "isfinite": (lambda x: ops.isfinite(ops.log(x)), lambda x: torch.isfinite(torch.log(x))),
    "gelu tanh": (lambda x: ops.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "leaky slope": (lambda x: ops.leaky_relu(x, slope=0.3), lambda x: F.leaky_relu(x, 0.3)),
    "clamp": (lambda x: ops.clamp(x, low=-0.4, high=0.9), lambda x: torch.clamp(x, -0.4, 0.9)),
    "clamp below": (lambda x: ops.clamp(x, low=0.1), lambda x: torch.clamp(x, min=0.1)),
    "cube": (lambda x: x**3, lambda x: x**3),
    "numbers": (lambda x: 2 - (x * 3 + 1) / 4 - 5, lambda x: 2 - (x * 3 + 1) / 4 - 5),
    "number by tensor": (lambda x: 3 / (x * x + 1), lambda x: 3 / (x * x + 1)),
    "zeroth power": (lambda x: x**0, lambda x: x**0),
}


@pytest.mark.parametrize("label", PROGRAMS)
def test_programs(label):
    mine, theirs = PROGRAMS[label]
    check_against_torch(mine, theirs, X)


def test_where_and_masked_fill():
    check_against_torch(ops.where, torch.where, MASK, X, ROW)
    check_against_torch(ops.where, torch.where, MASK[:1], COLUMN, SCALAR)
    check_against_torch(lambda x, m: ops.masked_fill(x, m, value=-2), lambda x, m: x.masked_fill(m, -2), X, MASK[0])


def test_logic():
    a, b = MASK, MASK[::-1].copy()
    for name in ("logical_and", "logical_or"):
        check_against_torch(getattr(ops, name), getattr(torch, name), a, b)
    check_against_torch(ops.logical_not, torch.logical_not, a)


def test_erf_to_rounding_error():
    x = numpy.concatenate([numpy.linspace(-7, 7, 5001), [0.0, 0.46875, 1e-300, 1e-8, math.inf, -math.inf]])
    expected = numpy.array([math.erf(value) for value in x])
    numpy.testing.assert_allclose(ops.erf(x), expected, rtol=5e-16, atol=0)
    assert numpy.isnan(ops.erf(numpy.array([math.nan])))[0]


def test_nothing_overflows():
    x = numpy.array([-1e4, -800.0, 0.0, 800.0, 1e4])
    with numpy.errstate(over="raise", invalid="raise", divide="raise"):
        close(ops.sigmoid(x), [0, 0, 0.5, 1, 1], 1e-15)
        close(ops.softplus(x), [0, 0, math.log(2), 800, 1e4], 1e-15)
        close(ops.silu(x), [0, 0, 0, 800, 1e4], 1e-15)


@pytest.mark.parametrize("name", [*UNARY, *OF_POSITIVE])
def test_single_precision_stays_single(name):
    found = getattr(ops, name)(POSITIVE.astype("float32"))
    assert found.dtype == numpy.float32
    numpy.testing.assert_allclose(found, getattr(ops, name)(POSITIVE.astype("float32").astype(float)), rtol=2e-6)


CASTS = [("f64", "f32"), ("f32", "i64"), ("i64", "f64"), ("bool", "f32"), ("f32", "bool"), ("i64", "i32")]


@pytest.mark.parametrize("source, target", CASTS)
def test_cast(source, target):
    from sbp.dtype import numpy_name

    x = (RNG.standard_normal((3, 5)) * 4).astype(numpy_name(source))
    found = ops.cast(x, dtype=target)
    numpy.testing.assert_array_equal(found, x.astype(numpy_name(target)))
    assert found.dtype == numpy_name(target)


TYPES = {
    ("add", "f32[2]", "bf16[2]"): "f32",
    ("add", "f16[2]", "bf16[2]"): "f32",
    ("mul", "bool[2]", "f32[2]"): "f32",
    ("add", "i32[2]", "i64[2]"): "i64",
    ("less", "f32[2]", "f32[2]"): "bool",
    ("where", "bool[2]", "i64[2]", "i64[2]"): "i64",
}


@pytest.mark.parametrize("call", TYPES, ids=" ".join)
def test_element_types_of_results(call):
    name, *types = call
    assert REGISTRY[name].infer([parse_type(text) for text in types], {})[0].dtype == TYPES[call]


REFUSED = [
    ("add", ("f32[2]", "i64[2]"), {}, "cast"),
    ("add", ("bool[2]", "bool[2]"), {}, "truth values"),
    ("add", ("f32[2]", "f32[3]"), {}, "broadcast"),
    ("exp", ("i64[2]",), {}, "operator exp: takes floating"),
    ("scale", ("i64[2]",), {"factor": 0.5}, "not whole"),
    ("shift", ("i64[2]",), {"amount": 0.5}, "not whole"),
    ("pow", ("i64[2]",), {"exponent": -1}, "exponent"),
    ("clamp", ("f32[2]",), {"low": 1.0, "high": 0.0}, "above"),
    ("gelu", ("f32[2]",), {"approximate": "fast"}, "approximate"),
    ("logical_and", ("f32[2]", "bool[2]"), {}, "truth values"),
]


@pytest.mark.parametrize("name, types, attributes, message", REFUSED)
def test_refuses(name, types, attributes, message):
    with pytest.raises(RuleError, match=message):
        REGISTRY[name].infer([parse_type(text) for text in types], attributes)


def test_gradients_take_the_type_of_their_input():
    builder = GraphBuilder()
    x, y = builder.source("x", parse_type("bf16[3]")), builder.source("y", parse_type("f32[2,3]"))
    total = ops.add(x, y)
    grads = REGISTRY["add"].gradients([total], [x, y], [total], {})
    assert [(grad.dtype, grad.shape) for grad in grads] == [("bf16", (3,)), ("f32", (2, 3))]


def test_unbroadcast_sums_what_was_repeated():
    grad = RNG.standard_normal((3, 4, 5))
    program = Program(unbroadcast, grad, numpy.zeros((4, 1)))
    close(program.forward()[0], grad.sum(axis=(0, 2))[:, None], 1e-14)
