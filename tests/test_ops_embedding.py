"""Look-ups by integers against PyTorch, numbers that lie outside, and what shards hold."""

import numpy
import pytest
from operator_programs import check_against_torch

from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.operator import REGISTRY, parse_type
from sbp.ops import library as ops
from sbp.rule import Signature

RNG = numpy.random.default_rng(9)
TABLE = RNG.standard_normal((7, 3))
IDS = RNG.integers(0, 7, (4, 5))
X = RNG.standard_normal((4, 5, 6))

torch = pytest.importorskip("torch")
F = torch.nn.functional


def test_embedding():
    check_against_torch(ops.embedding, lambda table, ids: F.embedding(ids, table), TABLE, IDS)
    check_against_torch(ops.embedding, lambda table, ids: F.embedding(ids, table), TABLE, numpy.asarray(3))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bag(mode):
    check_against_torch(
        lambda table, ids: ops.embedding_bag(table, ids, mode=mode),
        lambda table, ids: F.embedding_bag(ids, table, mode=mode),
        TABLE,
        IDS,
    )


def test_one_hot():
    check_against_torch(lambda ids: ops.one_hot(ids, classes=8, dtype="i64"), lambda ids: F.one_hot(ids, 8), IDS)


def test_pick():
    index = RNG.integers(0, 6, (4, 5))
    check_against_torch(ops.pick, lambda x, i: x.gather(-1, i[..., None])[..., 0], X, index)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_along(axis):
    shape = list(X.shape)
    shape[axis] = 3
    index = RNG.integers(0, X.shape[axis], shape)
    check_against_torch(lambda x, i: ops.take_along(x, i, axis=axis), lambda x, i: x.gather(axis, i), X, index)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_index_select(axis):
    index = RNG.integers(0, X.shape[axis], 7)
    check_against_torch(lambda x, i: ops.index_select(x, i, axis=axis), lambda x, i: x.index_select(axis, i), X, index)


def test_numbers_outside_give_zeros():
    ids = numpy.array([-1, 0, 6, 7])
    found = ops.embedding(TABLE, ids)
    numpy.testing.assert_array_equal(found, [[0] * 3, TABLE[0], TABLE[6], [0] * 3])
    numpy.testing.assert_array_equal(ops.pick(TABLE[:4], ids), [0, TABLE[1, 0], 0, 0])
    back = ops.embedding_backward(numpy.ones((4, 3)), ids, rows=7)
    numpy.testing.assert_array_equal(back.sum(axis=1), [3, 0, 0, 0, 0, 0, 3])


def test_every_row_is_held_by_one_rank():
    op = REGISTRY["embedding"]
    rule = op.bind([parse_type("f64[7,3]"), parse_type("i64[4,5]")], {})
    signature = Signature((Layout.parse("S(0)"), Layout.parse("B")), (Layout.parse("P"),))
    assert rule.admits(signature, (4,))
    parts = []
    for rank in range(4):  # rows 0-1, 2-3, 4-5, 6
        inputs, outputs = rule.shards(signature, (4,), (rank,))
        parts.append(op.kernel(numpy, TABLE[inputs[0].slices], IDS, **op.local_attributes({}, inputs, outputs)))
    numpy.testing.assert_array_equal(sum(parts), TABLE[IDS])
    assert (sum((part != 0).any(axis=-1) for part in parts) == 1).all()


@pytest.mark.parametrize("ids", ["f32[4]", "bool[4]"])
def test_refuses_what_is_no_integer(ids):
    with pytest.raises(RuleError, match="looks up by integers"):
        REGISTRY["embedding"].infer([parse_type("f32[7,3]"), parse_type(ids)], {})
