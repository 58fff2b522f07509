"""Reductions and statistics against PyTorch, of nothing, and what they refuse."""

import math

import numpy
import pytest
from operator_programs import Program, check_against_torch, close

from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.operator import REGISTRY, TensorType, parse_type
from sbp.ops import library as ops
from sbp.rule import Signature

RNG = numpy.random.default_rng(8)
X = RNG.standard_normal((3, 4, 5))
TIES = numpy.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
ZEROS = numpy.array([[2.0, 0.0, 3.0], [0.0, 4.0, 0.0], [1.0, 5.0, -2.0]])

torch = pytest.importorskip("torch")

AXES = [None, 0, -1, (0, 2), (1,)]
REFERENCES = {
    "sum": lambda x, axis, keep: torch.sum(x, dim=axis, keepdim=keep),
    "mean": lambda x, axis, keep: torch.mean(x, dim=axis, keepdim=keep),
    "max": lambda x, axis, keep: torch.amax(x, dim=() if axis is None else axis, keepdim=keep),
    "min": lambda x, axis, keep: torch.amin(x, dim=() if axis is None else axis, keepdim=keep),
    "var": lambda x, axis, keep: torch.var(x, dim=axis, keepdim=keep),
    "std": lambda x, axis, keep: torch.std(x, dim=axis, keepdim=keep),
    "logsumexp": lambda x, axis, keep: torch.logsumexp(x, dim=(0, 1, 2) if axis is None else axis, keepdim=keep),
    "norm": lambda x, axis, keep: torch.linalg.vector_norm(x, dim=axis, keepdim=keep),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("axis", AXES, ids=str)
@pytest.mark.parametrize("keepdims", [False, True])
def test_equals_pytorch(name, axis, keepdims):
    check_against_torch(
        lambda x: getattr(ops, name)(x, axis=axis, keepdims=keepdims), lambda x: REFERENCES[name](x, axis, keepdims), X
    )


@pytest.mark.parametrize("name, reference", [("max", torch.amax), ("min", torch.amin)])
def test_an_extremum_shares_its_gradient_between_equals(name, reference):
    check_against_torch(lambda x: getattr(ops, name)(x, axis=1), lambda x: reference(x, dim=1), TIES)


def test_products_and_their_gradients_with_zeros():
    check_against_torch(lambda x: ops.prod(x, axis=1), lambda x: torch.prod(x, dim=1), ZEROS)
    check_against_torch(lambda x: ops.prod(x, axis=0, keepdims=True), lambda x: torch.prod(x, 0, keepdim=True), ZEROS)
    check_against_torch(lambda x: ops.prod(x), lambda x: torch.prod(x), X[0])


@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_places_of_extrema(name):
    mine, reference = getattr(ops, name), getattr(torch, name)
    check_against_torch(lambda x: mine(x, axis=1), lambda x: reference(x, dim=1), X)
    check_against_torch(lambda x: mine(x, axis=-1, keepdims=True), lambda x: reference(x, dim=-1, keepdim=True), X)
    check_against_torch(lambda x: mine(x), lambda x: reference(x), X)


def test_correction_of_the_variance():
    check_against_torch(lambda x: ops.var(x, axis=1, correction=0), lambda x: torch.var(x, dim=1, correction=0), X)


def test_logsumexp_of_large_numbers():
    program = Program(lambda x: ops.logsumexp(x, axis=0), numpy.array([1000.0, 1000.0, -1000.0]))
    close(program.forward()[0], 1000 + math.log(2), 1e-15)
    close(program.gradient()[0] / program.feeds["w0"], [0.5, 0.5, 0.0], 1e-15)


OF_NOTHING = [
    ("sum", "float64", 0.0), ("prod", "float64", 1.0), ("max", "float64", -math.inf), ("min", "float64", math.inf),
    ("max", "int32", -(2**31)), ("min", "int64", 2**63 - 1), ("max", "bool", False), ("min", "bool", True),
]  # fmt: skip


@pytest.mark.parametrize("name, dtype, expected", OF_NOTHING)
def test_of_nothing(name, dtype, expected):
    found = getattr(ops, name)(numpy.zeros((3, 0), dtype), axis=1)
    numpy.testing.assert_array_equal(found, numpy.full(3, expected))
    assert found.dtype == dtype
    assert getattr(ops, name)(numpy.zeros((3, 0), dtype), axis=1, keepdims=True).shape == (3, 1)


def test_truth_values_are_counted():
    found = ops.sum(X > 0)
    assert found == (X > 0).sum() and found.dtype == numpy.int64


def test_half_precision_sums_in_single():
    x = numpy.full(4096, 100.0, "float16")  # the sum exceeds what float16 holds on the way, the mean does not
    assert ops.mean(x) == 100 and ops.mean(x).dtype == numpy.float16


def test_a_mean_of_shards_divides_by_the_global_count():
    op = REGISTRY["mean"]
    rule = op.bind([TensorType((5, 3), "f32")], {"axis": 0})
    signature = Signature((Layout.parse("S(0)"),), (Layout.parse("P"),))
    assert rule.admits(signature, (2,))
    x = RNG.standard_normal((5, 3))
    total = 0
    for rank in range(2):
        inputs, outputs = rule.shards(signature, (2,), (rank,))
        total = total + op.kernel(numpy, x[inputs[0].slices], **op.local_attributes({"axis": 0}, inputs, outputs))
    numpy.testing.assert_allclose(total, x.mean(axis=0), rtol=1e-14)


REFUSED = [
    ("sum", "f32[4]", {"axis": 1}, "no dimension 1"),
    ("sum", "f32[4,2]", {"axis": (0, -2)}, "twice"),
    ("mean", "i64[4]", {}, "cast"),
    ("argmax", "f32[4]", {"axis": 2}, "no dimension 2"),
]


@pytest.mark.parametrize("name, text, attributes, message", REFUSED)
def test_refuses(name, text, attributes, message):
    with pytest.raises(RuleError, match=message):
        REGISTRY[name].infer([parse_type(text)], attributes)
