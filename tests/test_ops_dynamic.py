"""Boxes at places that data says, against NumPy with the place held inside the tensor, as XLA holds it."""

from itertools import product

import numpy
import pytest
from operator_programs import Program

import sbp
from sbp.errors import RuleError
from sbp.ops import library as ops

RNG = numpy.random.default_rng(31)
X = RNG.standard_normal((3, 5))


def held(starts, sizes, shape=X.shape):
    """The box in NumPy's slices, moved into the tensor."""
    first = [min(max(start, 0), whole - size) for start, size, whole in zip(starts, sizes, shape)]
    return tuple(slice(low, low + size) for low, size in zip(first, sizes))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 4), (1, 5), (3, 5), (0, 3)])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_boxes_are_cut_out_and_written(sizes, as_tensors):
    update = RNG.standard_normal(sizes)
    for starts in product((-2, 0, 1, 7), (-9, 0, 2, 4)):
        given = [numpy.asarray(start) for start in starts] if as_tensors else starts
        box, expected = held(starts, sizes), X.copy()
        numpy.testing.assert_array_equal(ops.dynamic_slice(X, given, sizes), X[box])
        expected[box] = update
        numpy.testing.assert_array_equal(ops.dynamic_update_slice(X, update, given), expected)


@pytest.mark.parametrize("mesh", [2, 3, 7])
@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "B", "P"])
def test_no_layout_moves_a_place(layout, mesh):
    """A start beyond the end is held in global numbers, not in those of a shard."""
    x, update = sbp.from_numpy(X, layout, mesh), RNG.standard_normal((2, 3))
    for start in (-1, 0, 2, 9):
        place = sbp.from_numpy(start, None, mesh)
        for starts in ((start, start), (place, place)):
            box, expected = held((start, start), (2, 3)), X.copy()
            expected[box] = update
            numpy.testing.assert_array_equal(ops.dynamic_slice(x, starts, (2, 3)).numpy(), X[box])
            part = sbp.from_numpy(update, layout, mesh)
            numpy.testing.assert_allclose(ops.dynamic_update_slice(x, part, starts).numpy(), expected, atol=1e-15)


def test_two_columns_as_users_reported_them():
    x, column = sbp.from_numpy(numpy.arange(4).reshape(2, 2), "S(1)", 2), sbp.full((2, 1), 99, None, 2, "i64")
    assert ops.dynamic_update_slice(x, column, (0, 2)).numpy().tolist() == [[0, 99], [2, 99]]
    cut = ops.dynamic_slice(sbp.from_numpy(numpy.arange(16).reshape(2, 8), "B", 2), (0, 7), (2, 6)).to_layout("S(1)")
    assert [cut.to_local(rank)[0].tolist() for rank in (0, 1)] == [[2, 3, 4], [5, 6, 7]]


def test_gradients_go_where_the_numbers_went():
    update = RNG.standard_normal((2, 3))
    start = numpy.asarray(9)
    program = Program(lambda x, u, s: ops.dynamic_update_slice(x, u, (s, 1)), X, update, start)
    found, box = program.run(), held((9, 1), (2, 3))
    weight = program.feeds["w0"]
    outside = weight.copy()
    outside[box] = 0
    numpy.testing.assert_array_equal(found[program.gradients["x0"]], outside)
    numpy.testing.assert_array_equal(found[program.gradients["x1"]], weight[box])
    program = Program(lambda x, s: ops.dynamic_slice(x, (s, 1), (2, 3)), X, start)
    inside = numpy.zeros(X.shape)
    inside[box] = program.feeds["w0"]
    numpy.testing.assert_array_equal(program.run()[program.gradients["x0"]], inside)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.dynamic_slice(X, (0,), (2, 2)), "one start and one size per dimension"),
        (
            lambda: ops.dynamic_slice(X, (0, 0), (4, 2)),
            r"a box \[4, 2\] with 2 starts does not lie in the shape \[3, 5\]",
        ),
        (lambda: ops.dynamic_slice(X, (0, 0), (-1, 2)), "does not lie in the shape"),
        (lambda: ops.dynamic_slice(X, (0.5, 0), (1, 2)), "a start is a whole number"),
        (lambda: ops.dynamic_slice(X, (0, numpy.arange(2)), (1, 2)), "a start is a whole number"),
        (lambda: ops.dynamic_update_slice(X, X[None], (0, 0)), "does not lie in the shape"),
    ],
)
def test_boxes_that_do_not_fit(call, message):
    with pytest.raises(RuleError, match=message):
        call()
