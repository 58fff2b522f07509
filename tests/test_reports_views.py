"""Reports of users of other systems: views of split tensors, buffers that are not in order. Each names its report."""

import numpy
import pytest

from sbp.comm.inprocess import InProcessCommunicator
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.ops import library as ops
from sbp.shards import gather, scatter
from tests.report_programs import run_sharded, signatures

RNG = numpy.random.default_rng


def test_r012_a_view_that_mixes_a_split_trailing_dimension():
    x = numpy.arange(96.0).reshape(12, 8)
    run = run_sharded(lambda x: x.reshape(16, 6), {"x": x}, (4,), {"x": "S(1)"})
    numpy.testing.assert_array_equal(run.values[0], x.reshape(16, 6))
    assert run.boxing and run.moved > 0
    admitted = signatures(ops.reshape, "f32[12,8]", shape=(16, 6), mesh=(4,))
    assert not any(one.startswith("S(1) ->") for one in admitted)


def test_r014_flattening_a_split_trailing_dimension():
    x = numpy.arange(8.0).reshape(2, 4)
    held = scatter(x, Layout.parse("S(1)"), Mesh((2,)), numpy, RNG(0))
    assert held[0].ravel().tolist() == [0, 1, 4, 5], "not contiguous, so no S(0) of the flat tensor"
    admitted = signatures(ops.reshape, "f32[2,4]", shape=(8,))
    assert not any(one.startswith("S(1) ->") for one in admitted) and "S(0) -> S(0)" in admitted
    run = run_sharded(lambda x: x.reshape(8), {"x": x}, (2,), {"x": "S(1)"})
    assert run.values[0].tolist() == list(range(8)) and run.moved > 0


def test_r015_squeezing_a_split_dimension_of_size_one():
    x = RNG(0).standard_normal((1, 4))
    run = run_sharded(lambda x: ops.squeeze(x, 0), {"x": x}, (2,), {"x": "S(0)"})
    numpy.testing.assert_array_equal(run.values[0], x[0])
    layout = Layout.parse(run.layouts[0])
    assert [part.shape for part in run.parts[0]] == [layout.shard((4,), (2,), (rank,)).shape for rank in range(2)]


def test_r016_a_leading_dimension_of_size_one_keeps_the_split_next_to_it():
    x = RNG(0).standard_normal((1, 8, 4))
    admitted = signatures(ops.reshape, "f32[1,8,4]", shape=(1, 2, 4, 4), mesh=(2,))
    assert "S(1) -> S(1)" in admitted
    run = run_sharded(lambda x: x.reshape(1, 2, 4, 4), {"x": x}, (1, 2), {"x": "S(0), S(1)", "reshape": "S(0), S(1)"})
    numpy.testing.assert_array_equal(run.values[0], x.reshape(1, 2, 4, 4))
    assert run.boxing == [] and run.layouts == ["(B, S(1))"], "what stands on an axis of one rank is B"


def test_r017_a_mesh_axis_asks_for_its_own_size_only():
    """(4, 6, 36) -> (4, 6, 12, 3) on (4, 2): 12 is divisible by the 2 ranks of the axis, if not by all 8."""
    admitted = signatures(ops.reshape, "f32[4,6,36]", shape=(4, 6, 12, 3), mesh=(4, 2))
    assert "(B, S(2)) -> (B, S(2))" in admitted
    assert "(S(0), S(2)) -> (S(0), S(2))" in admitted
    assert "(S(2), S(2)) -> (S(2), S(2))" not in admitted, "12 rows on 8 ranks would cut through the minor dimension"


def test_r055_grouped_heads_expanded_and_flattened():
    k = RNG(0).standard_normal((2, 2, 6))
    expected = numpy.repeat(k, 2, axis=0).reshape(4, 12)
    for layout in ("S(0)", "S(1)", "S(2)", "B"):
        run = run_sharded(
            lambda k: ops.unsqueeze(k, 1).expand(2, 2, 2, 6).reshape(4, 2, 6).reshape(4, 12),
            {"k": k},
            (2,),
            {"k": layout},
        )
        numpy.testing.assert_array_equal(run.values[0], expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_r033_operands_keep_their_order(axis):
    a, b = RNG(0).standard_normal((4, 2)), RNG(1).uniform(1, 2, (4, 2))
    for pins in ({"a": f"S({axis})", "b": f"S({axis})"}, {"a": f"S({axis})", "b": f"S({1 - axis})"}):
        run = run_sharded(lambda a, b: (a - b, a / b), {"a": a, "b": b}, (2,), pins)
        numpy.testing.assert_array_equal(run.values[0], a - b)
        numpy.testing.assert_allclose(run.values[1], a / b, rtol=1e-15)


def test_r057_a_fused_weight_is_cut_by_meaning_not_by_position():
    """[q; k; v] of 2 heads, split in two: the first half is all of q and half of k, so cutting it needs boxing."""
    x, w = RNG(0).standard_normal((3, 4)), RNG(1).standard_normal((12, 4))
    run = run_sharded(
        lambda x, w: ops.split(ops.matmul(x, w.transpose()), sizes=(4, 4, 4), axis=1),
        {"x": x, "w": w},
        (2,),
        {"w": "S(0)"},
    )
    for found, expected in zip(run.values, numpy.split(x @ w.T, 3, axis=1)):
        numpy.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not any(one.startswith("S(1) ->") for one in signatures(ops.split, "f32[3,12]", sizes=(4, 4, 4), axis=1)), (
        "the chunks of the fused dimension are not those of q, k and v"
    )


def test_r058_a_gather_joins_in_order_of_the_tensor():
    """Fused rows by rank, [q0 k0 v0] and [q1 k1 v1], are no split of [q; k; v]; a split gives rows back in order."""
    rows = numpy.arange(12.0).reshape(12, 1)
    held = scatter(rows, Layout.parse("S(0)"), Mesh((2,)), numpy, RNG(0))
    assert held[0].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert gather(held, Layout.parse("S(0)"), Mesh((2,)), (12, 1)).ravel().tolist() == list(range(12))
    q, k, v = numpy.split(rows, 3)
    joined = run_sharded(
        lambda q, k, v: ops.concat(q, k, v, axis=0),
        {"q": q, "k": k, "v": v},
        (2,),
        {"q": "S(0)", "k": "S(0)", "v": "S(0)"},
    )
    assert joined.values[0].ravel().tolist() == list(range(12))


def test_r133_reduce_scatter_of_a_transposed_buffer():
    x = numpy.arange(24.0).reshape(4, 3, 2).transpose(0, 2, 1)
    assert not x.flags.c_contiguous
    communicator = InProcessCommunicator(4)
    parts = communicator.reduce_scatter(
        dict.fromkeys(range(4), x), ((0, 1, 2, 3),), axis=0, sizes=((1, 1, 1, 1),), reduce="sum"
    )
    assert parts[0].tolist() == [[[0, 8, 16], [4, 12, 20]]]


def test_r134_scatter_of_a_transposed_tensor():
    b = numpy.array([[4, 5], [6, 7]]).T
    whole = numpy.stack([b, b])
    held = scatter(whole, Layout.parse("S(0)"), Mesh((2,)), numpy, RNG(0))
    assert held[1].tolist() == [[[4, 6], [5, 7]]]
    assert all(part.flags.c_contiguous for part in held)


def test_r091_two_axes_that_split_one_dimension_nest_in_order():
    """Split by tp then dp on (2, 2): the layout's order says who is outer, and rows come back 0..7 either way."""
    x = numpy.arange(8.0)
    mesh = Mesh((2, 2), ("dp", "tp"))
    held = scatter(x, Layout.parse("S(0), S(0)"), mesh, numpy, RNG(0))
    assert [part.tolist() for part in held] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert gather(held, Layout.parse("S(0), S(0)"), mesh, (8,)).tolist() == list(range(8))
    inner_first = Mesh((2, 2), ("tp", "dp"))
    held = scatter(x, Layout.parse("S(0), S(0)"), inner_first, numpy, RNG(0))
    assert held[inner_first.rank((0, 1))].tolist() == [2, 3]


def test_r148_a_matrix_product_of_layouts_that_do_not_match_is_boxed_for_nothing():
    x, w = RNG(0).standard_normal((4, 5)), RNG(1).standard_normal((5, 8))
    run = run_sharded(lambda x, w: x @ w, {"x": x, "w": w}, (2,), {"x": "B", "w": "S(0)", "matmul": "P"})
    numpy.testing.assert_allclose(run.values[0], x @ w, rtol=1e-12)
    assert ("x", "slice") in run.boxing, "x is cut without communication"
    assert "S(1), S(0) -> P" in signatures(ops.matmul, "f32[4,5]", "f32[5,8]")


def test_r021_a_tied_weight_is_stored_once_and_used_both_ways():
    table, ids = RNG(0).standard_normal((8, 4)), numpy.array([1, 7, 3])
    run = run_sharded(
        lambda table, ids: ops.embedding(table, ids) @ table.transpose(),
        {"table": table, "ids": ids},
        (2,),
        {"table": "S(0)"},
    )
    numpy.testing.assert_allclose(run.values[0], table[ids] @ table.T, rtol=1e-12)
    assert str(run.plan.layouts["table"]) == "(S(0))"
    assert "S(0), B -> P" in signatures(ops.embedding, "f32[8,4]", "i64[3]")
