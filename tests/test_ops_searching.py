"""Scans, searching, counting, windows as tensors and scattering with a reduction, against PyTorch."""

import numpy
import pytest
from operator_programs import Program, check_against_torch

from sbp.errors import RuleError
from sbp.operator import TensorType
from sbp.ops import library as ops

torch = pytest.importorskip("torch")
functional = torch.nn.functional
RNG = numpy.random.default_rng(3)


def forward(function, *arrays):
    return Program(function, *arrays, differentiate=False).forward()[0]


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_of_equal_elements_the_last_is_named(name):
    x = numpy.array([[1.0, 3.0, 3.0, 2.0, 3.0], [-1.0, -1.0, -2.0, -2.0, 5.0]])
    expected = getattr(torch, name)(torch.from_numpy(x), 1)
    values, places = Program(lambda x: getattr(ops, name)(x, axis=1), x, differentiate=False).forward()
    assert (values == expected.values.numpy()).all() and (places == expected.indices.numpy()).all()


def test_logcumsumexp_of_very_different_numbers():
    """Neither overflows nor loses the small ones; -inf counts nothing, as in PyTorch."""
    x = numpy.array([[-numpy.inf, -1000.0, 0.0, 800.0, -3.0], [700.0, 700.0, -900.0, 1.0, 710.0]])
    found = forward(lambda x: ops.logcumsumexp(x, axis=1), x)
    numpy.testing.assert_allclose(found, torch.logcumsumexp(torch.from_numpy(x), 1).numpy(), rtol=1e-14)
    gradients = Program(lambda x: ops.logcumsumexp(x, axis=1), x[:, 1:]).gradient()
    assert numpy.isfinite(gradients[0]).all()


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("sequence, values", [((6,), (2, 5)), ((2, 3, 6), (2, 3, 4)), ((1,), (3,))])
def test_searchsorted_and_bucketize(sequence, values, right):
    rows, wanted = numpy.sort(RNG.integers(0, 9, sequence), axis=-1), RNG.integers(-1, 10, values)
    expected = torch.searchsorted(torch.from_numpy(rows), torch.from_numpy(wanted), right=right).numpy()
    assert (forward(lambda s, v: ops.searchsorted(s, v, right=right), rows, wanted) == expected).all()
    if len(sequence) == 1:
        assert (forward(lambda s, v: ops.bucketize(v, s, right=right), rows, wanted) == expected).all()


def test_isin_and_counts():
    x, tests = RNG.integers(0, 9, (4, 5)), RNG.integers(0, 9, 3)
    expected = torch.isin(torch.from_numpy(x), torch.from_numpy(tests)).numpy()
    assert (forward(ops.isin, x, tests) == expected).all()
    counts = torch.bincount(torch.from_numpy(x.ravel()), minlength=9).numpy()
    assert (forward(lambda x: ops.bincount(x, size=9), x) == counts).all()


@pytest.mark.parametrize("bins, low, high", [(4, -1.0, 1.0), (1, 0.0, 2.0), (7, -3.0, 0.5)])
def test_histc(bins, low, high):
    x = numpy.concatenate([RNG.standard_normal(50), [low, high, high, low - 1, high + 1, (low + high) / 2]])
    expected = torch.histc(torch.from_numpy(x), bins, low, high).numpy()
    assert (forward(lambda x: ops.histc(x, bins, low, high), x) == expected).all()


WINDOWS = [
    ((2, 3, 5, 6), {"kernel_size": 3}),
    ((1, 2, 7, 4), {"kernel_size": (2, 3), "stride": (2, 1), "padding": 1}),
    ((2, 1, 6, 5), {"kernel_size": 2, "dilation": 2, "stride": 2}),
]


@pytest.mark.parametrize("shape, where", WINDOWS)
def test_unfold_and_fold(shape, where):
    x = RNG.standard_normal(shape)
    check_against_torch(lambda x: ops.unfold(x, **where), lambda x: functional.unfold(x, **where), x)
    columns = RNG.standard_normal(functional.unfold(torch.zeros(shape), **where).shape)
    check_against_torch(
        lambda c: ops.fold(c, shape[2:], **where), lambda c: functional.fold(c, shape[2:], **where), columns
    )


def test_fold_of_another_number_of_windows_is_reported():
    with pytest.raises(RuleError, match=r"fold takes \(n, channels \* 4, 9\)"):
        Program(lambda c: ops.fold(c, (4, 4), 2), numpy.zeros((1, 4, 8)))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
@pytest.mark.parametrize("axis", [0, 1])
def test_scatter_reduce(reduce, axis, include_self):
    x, source = RNG.standard_normal((4, 5)), RNG.standard_normal((4, 5))
    source[0], source[:, 0] = 1.5, 1.5  # equal numbers share the gradient of an extremum
    index = RNG.integers(0, 4, (4, 5))
    given = {"include_self": include_self}
    check_against_torch(
        lambda x, i, s: ops.scatter_reduce(x, i, s, reduce, axis, **given),
        lambda x, i, s: x.scatter_reduce(axis, i, s, reduce, **given),
        x, index, source,
    )  # fmt: skip


def test_a_product_is_refused_with_what_to_do():
    with pytest.raises(RuleError, match="sum, mean, amax or amin, got 'prod'"):
        Program(lambda x, i: ops.scatter_reduce(x, i, x, "prod"), numpy.ones((2, 2)), numpy.zeros((2, 2), int))


def test_counts_of_other_than_integers_are_refused():
    with pytest.raises(RuleError, match="counts integers"):
        ops.bincount.infer([TensorType((3,), "f32")], {"size": 2})
