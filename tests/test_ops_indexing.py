"""Indexing by tensors, writing to places, diagonals and shuffles against PyTorch."""

import numpy
import pytest
from operator_programs import Program, check_against_torch, close

from sbp.errors import RuleError
from sbp.ops import library as ops

torch = pytest.importorskip("torch")

RNG = numpy.random.default_rng(23)
X = RNG.standard_normal((4, 5, 3, 2))
ROWS = numpy.array([[1, 3, -2], [0, -4, 2]])
COLUMNS = numpy.array([4, 0, -2])


def test_index():
    check_against_torch(ops.index, lambda x, i: x[i], X, ROWS)
    check_against_torch(ops.index, lambda x, i, j: x[i, j], X, ROWS, COLUMNS)
    check_against_torch(lambda x, i: ops.index(x, i, axis=2), lambda x, i: x[:, :, i], X, numpy.array([[2, -3]]))
    check_against_torch(lambda x, i, j: ops.index(x, i, j, axis=1), lambda x, i, j: x[:, i, j], X, COLUMNS, COLUMNS % 3)


@pytest.mark.parametrize("accumulate", [False, True])
def test_index_put(accumulate):
    def both(axis, index, arrays, places):
        def theirs(x, values, *indices):
            key = (*(torch.arange(x.shape[at]).reshape(-1, *(1,) * places) for at in range(axis)), *indices)
            return x.index_put(key, values, accumulate=accumulate)

        check_against_torch(
            lambda x, values, *indices: ops.index_put(x, indices, values, accumulate, axis), theirs, *arrays, *index
        )

    both(0, (ROWS[0],), (X, RNG.standard_normal((3, 5, 3, 2))), 1)
    both(0, (ROWS[0], COLUMNS), (X, RNG.standard_normal((3, 3, 2))), 1)
    both(0, (ROWS[0],), (X, RNG.standard_normal((5, 1, 2))), 1)
    both(1, (COLUMNS, COLUMNS % 3), (X, RNG.standard_normal((4, 3, 2))), 1)
    if accumulate:
        both(0, (numpy.array([1, 1, 1]),), (X, RNG.standard_normal((3, 5, 3, 2))), 1)


def test_rows_put_at_equal_places_and_outside():
    program = Program(
        ops.put_rows, numpy.zeros((3, 1)), numpy.array([1, 1, 5, -1]), numpy.array([[1.0], [2], [3], [4]])
    )
    numpy.testing.assert_array_equal(program.forward()[0], [[0], [2], [0]])
    for found, expected in zip(program.gradient(), program.differences()):
        close(found, expected, 1e-8)


def test_gather_takes_a_smaller_index():
    index = RNG.integers(0, 5, (2, 7, 3, 1))
    check_against_torch(lambda x, i: ops.gather(x, i, 1), lambda x, i: torch.gather(x, 1, i), X, index)
    with pytest.raises(RuleError, match="is larger than"):
        Program(lambda x, i: ops.gather(x, i, 1), X, RNG.integers(0, 5, (5, 7, 3, 1)))


def test_slices_written_back():
    piece = RNG.standard_normal((4, 2, 3, 2))
    for start in (0, 1, 3):
        check_against_torch(
            lambda x, s, a=start: ops.slice_scatter(x, s, 1, a),
            lambda x, s, a=start: torch.slice_scatter(x, s, 1, a, a + 2),
            X,
            piece,
        )
    check_against_torch(
        lambda x, s: ops.select_scatter(x, s, 2, -1), lambda x, s: torch.select_scatter(x, s, 2, -1), X, X[:, :, 0]
    )
    with pytest.raises(RuleError, match="exceed dimension 1"):
        Program(lambda x, s: ops.slice_scatter(x, s, 1, 4), X, piece)


@pytest.mark.parametrize("offset", [-5, -4, -2, 0, 1, 4, 6])
@pytest.mark.parametrize("first, second", [(0, 1), (1, -1), (-1, 0)])
def test_diagonal(offset, first, second):
    wide = abs(offset) <= min(X.shape[first], X.shape[second])  # PyTorch refuses diagonals far outside
    check = (lambda x: ops.diagonal(x, offset, first, second), lambda x: torch.diagonal(x, offset, first, second), X)
    if wide:
        check_against_torch(*check)


def test_diagonal_embed_and_shuffles():
    check_against_torch(ops.diagonal_embed, torch.diag_embed, X)
    image = RNG.standard_normal((2, 8, 3, 5))
    check_against_torch(lambda x: ops.pixel_shuffle(x, 2), lambda x: torch.nn.functional.pixel_shuffle(x, 2), image)
    image = RNG.standard_normal((2, 3, 4, 6))
    check_against_torch(lambda x: ops.pixel_unshuffle(x, 2), lambda x: torch.nn.functional.pixel_unshuffle(x, 2), image)


@pytest.mark.parametrize(
    "text, shapes",
    [
        ("iij->ij", [(3, 3, 2)]),
        ("iji,ji->j", [(3, 2, 3), (2, 3)]),
        ("iii->", [(3, 3, 3)]),
        ("ii->i", [(4, 4)]),
        ("ijij->ji", [(2, 3, 2, 3)]),
        ("kiij,kj->k", [(2, 3, 3, 4), (2, 4)]),
        ("...ii->...i", [(2, 2, 3, 3)]),
        ("...ii,...i->...", [(1, 2, 3, 3), (4, 2, 3)]),
    ],
)
def test_einsum_of_diagonals(text, shapes):
    arrays = [RNG.standard_normal(shape) for shape in shapes]
    check_against_torch(lambda *xs: ops.einsum(*xs, subscripts=text), lambda *xs: torch.einsum(text, *xs), *arrays)
