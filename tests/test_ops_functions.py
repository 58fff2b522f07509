"""Inverse functions, bits, further activations and distances against PyTorch."""

import numpy
import pytest
from operator_programs import Program, check_against_torch

from sbp.errors import RuleError
from sbp.ops import library as ops

torch = pytest.importorskip("torch")
functional = torch.nn.functional

RNG = numpy.random.default_rng(17)
X = RNG.standard_normal((3, 4, 6))
Y = RNG.standard_normal((3, 4, 6))
SMALL = RNG.uniform(-0.9, 0.9, (4, 5))
LARGE = RNG.uniform(1.1, 3.0, (4, 5))
POSITIVE = RNG.uniform(0.1, 0.9, (4, 5))

ONE = {
    "asin": (ops.asin, torch.asin, SMALL),
    "acos": (ops.acos, torch.acos, SMALL),
    "atanh": (ops.atanh, torch.atanh, SMALL),
    "asinh": (ops.asinh, torch.asinh, X),
    "acosh": (ops.acosh, torch.acosh, LARGE),
    "exp2": (ops.exp2, torch.exp2, X),
    "log2": (ops.log2, torch.log2, LARGE),
    "log10": (ops.log10, torch.log10, LARGE),
    "selu": (ops.selu, functional.selu, X),
    "celu": (lambda x: ops.celu(x, 1.5), lambda x: functional.celu(x, 1.5), X),
    "glu": (lambda x: ops.glu(x, 1), lambda x: functional.glu(x, 1), X),
    "softsign": (ops.softsign, functional.softsign, X),
    "softmin": (lambda x: ops.softmin(x, 1), lambda x: functional.softmin(x, 1), X),
    "hardshrink": (ops.hardshrink, functional.hardshrink, X),
    "softshrink": (ops.softshrink, functional.softshrink, X),
    "threshold": (lambda x: ops.threshold(x, 0.1, 2.0), lambda x: functional.threshold(x, 0.1, 2.0), X),
    "logit": (ops.logit, torch.logit, POSITIVE),
    "logit with eps": (lambda x: ops.logit(x, 0.2), lambda x: torch.logit(x, 0.2), POSITIVE),
    "normalize": (ops.normalize, functional.normalize, X),
    "p_norm": (lambda x: ops.p_norm(x, 3, axis=1), lambda x: torch.linalg.vector_norm(x, 3, dim=1), X),
}
TWO = {
    "atan2": (ops.atan2, torch.atan2, X, Y[:, :1]),
    "fmod": (ops.fmod, torch.fmod, X, LARGE[0, 0] + numpy.abs(Y)),
    "lerp": (lambda x, y: ops.lerp(x, y, 0.3), lambda x, y: torch.lerp(x, y, 0.3), X, Y),
    "cosine_similarity": (ops.cosine_similarity, functional.cosine_similarity, X, Y),
    "pairwise_distance": (ops.pairwise_distance, torch.cdist, X, Y[:, :3]),
    "prelu": (ops.prelu, functional.prelu, X, RNG.standard_normal(4)),
    "prelu of one": (ops.prelu, functional.prelu, X, RNG.standard_normal(1)),
}


@pytest.mark.parametrize("label", ONE)
def test_functions_of_one(label):
    mine, theirs, x = ONE[label]
    check_against_torch(mine, theirs, x)


@pytest.mark.parametrize("label", TWO)
def test_functions_of_two(label):
    mine, theirs, x, y = TWO[label]
    check_against_torch(mine, theirs, x, y, tolerance=1e-11)


def test_lerp_and_addmm():
    check_against_torch(ops.lerp, torch.lerp, X, Y, RNG.uniform(0, 1, X.shape))
    bias, x, w = RNG.standard_normal(5), RNG.standard_normal((3, 4)), RNG.standard_normal((4, 5))
    check_against_torch(
        lambda b, x, w: ops.addmm(b, x, w, 0.5, 2.0),
        lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
        bias,
        x,
        w,
    )


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor", "fmod"])
def test_whole_numbers(name):
    x, y = RNG.integers(-9, 9, (4, 5)), RNG.integers(1, 9, (5,))
    check_against_torch(getattr(ops, name), getattr(torch, name), x, y)
    if name != "fmod":
        check_against_torch(getattr(ops, name), getattr(torch, name), x > 0, y > 4)


def test_opposites():
    check_against_torch(ops.bitwise_not, torch.bitwise_not, RNG.integers(-9, 9, 7))
    check_against_torch(ops.bitwise_not, torch.bitwise_not, RNG.random(7) < 0.5)
    check_against_torch(ops.logical_xor, torch.logical_xor, RNG.random(9) < 0.5, RNG.random(9) < 0.5)


def test_infinite_and_undefined():
    x = numpy.array([1.0, numpy.inf, -numpy.inf, numpy.nan, -2.0])
    check_against_torch(ops.isinf, torch.isinf, x)
    found = Program(lambda x: ops.nan_to_num(x, 7.0, 5.0, -5.0), x, differentiate=False).forward()[0]
    numpy.testing.assert_array_equal(found, numpy.nan_to_num(x, nan=7.0, posinf=5.0, neginf=-5.0))


def test_equal_points_have_a_distance_without_slope():
    x = numpy.zeros((2, 3))
    program = Program(lambda x: ops.pairwise_distance(x, x), x)
    assert not program.forward()[0].any() and not program.gradient()[0].any()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Program(ops.bitwise_and, X, X), "whole numbers"),
        (lambda: Program(lambda x: ops.glu(x, 0), X), "must be even"),
        (lambda: Program(lambda x: ops.p_norm(x, 0), X), "above 0"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(RuleError, match=message):
        call()
