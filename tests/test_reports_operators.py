"""Reports of users of other systems: embedding, attention, convolution, norms, random numbers, scans on split tensors.

Each test names its report.
"""

import numpy
import pytest

from sbp.autodiff import backward
from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import parse_type
from sbp.ops import library as ops
from sbp.shards import scatter
from tests.report_programs import run_sharded, signatures

RNG = numpy.random.default_rng


def gradients(*names):
    """For `run_sharded`: the gradients of the result's sum."""
    return lambda builder, symbols, out: [backward(builder, out.sum(), [symbols[n] for n in names])[n] for n in names]


def test_r019_a_vocabulary_split_lookup_shifts_and_masks():
    table, ids = RNG(0).standard_normal((7, 3)), numpy.array([0, 3, 4, 6])
    run = run_sharded(
        lambda table, ids: ops.embedding(table, ids),
        {"table": table, "ids": ids},
        (2,),
        {"table": "S(0)", "embedding": "P"},
    )
    numpy.testing.assert_array_equal(run.values[0], table[ids])
    # On its own shard each rank fills the rows that it owns, and no others.
    rule = ops.embedding.bind([parse_type("f32[7,3]"), parse_type("i64[4]")], {})
    signature = next(s for s in rule.signatures((2,)) if str(s) == "(S(0)), (B) -> (P)")
    rows = []
    for rank, shard in enumerate(scatter(table, Layout.parse("S(0)"), Mesh((2,)), numpy, RNG(0))):
        attributes = ops.embedding.local_attributes({}, *rule.shards(signature, (2,), (rank,)))
        rows.append((ops.embedding.kernel(numpy, shard, ids, **attributes) != 0).any(axis=1).tolist())
    assert rows == [[True, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize(
    ("layout", "mesh"), [("S(0)", (2,)), ("S(1)", (2,)), ("S(0)", (4,)), ("S(1)", (3,)), ("B", (2,))]
)
def test_r046_random_numbers_do_not_depend_on_the_layout(layout, mesh):
    whole = ops.random_normal(shape=(4, 6), seed=0)
    run = run_sharded(
        lambda x: ops.random_normal(shape=(4, 6), seed=0) + x,
        {"x": numpy.zeros((4, 6))},
        mesh,
        {"random_normal": layout},
    )
    assert run.values[0].astype("float32").tobytes() == whole.tobytes()


def test_r047_r050_masks_agree_on_replicas_and_differ_between_shards():
    x = numpy.ones((4, 8))
    run = run_sharded(
        lambda x: ops.dropout(x, rate=0.5, seed=1), {"x": x}, (2, 2), {"x": "S(0), B", "dropout": "S(0), B"}
    )
    masks = [part != 0 for part in run.parts[0]]
    assert (masks[0] == masks[1]).all() and (masks[2] == masks[3]).all(), "equal along tp"
    assert (masks[0] != masks[2]).any(), "different along dp"
    numpy.testing.assert_array_equal(run.values[0], ops.dropout(x, rate=0.5, seed=1))
    rows = run_sharded(
        lambda x: ops.dropout(x, rate=0.5, seed=1), {"x": numpy.ones((8, 4))}, (2,), {"x": "S(0)", "dropout": "S(0)"}
    )
    assert (rows.parts[0][0] != rows.parts[0][1]).any()


def test_r051_head_counts_that_do_not_divide():
    """28 query heads and 4 key heads: on 8 ranks the heads cannot be split by groups, on the 4 of (4, 2) they can."""
    types = ("f32[2,28,4,2]", "f32[2,4,4,2]", "f32[2,4,4,2]")
    even = "S(1), S(1), S(1) -> S(1), S(1)"
    assert even in signatures(ops.attention, *types, mesh=(4,))
    split = [one for one in signatures(ops.attention, *types, mesh=(8,)) if one.startswith("S(1)")]
    for one in split:  # legal only if the ranks' query heads are those of their key heads; 4 key heads on 8 ranks
        assert one == even and -(-28 // 8) == 7 * -(-4 // 8)
    q, k, v = (
        RNG(0).standard_normal((2, 28, 4, 2)),
        RNG(1).standard_normal((2, 4, 4, 2)),
        RNG(2).standard_normal((2, 4, 4, 2)),
    )
    expected = ops.attention(q, k, v)[0]
    for mesh in ((8,), (4, 2)):
        run = run_sharded(lambda q, k, v: ops.attention(q, k, v)[0], {"q": q, "k": k, "v": v}, mesh)
        numpy.testing.assert_allclose(run.values[0], expected, rtol=1e-10, atol=1e-12)


def test_r053_query_heads_that_no_key_head_serves():
    q, k = numpy.zeros((1, 33, 4, 2)), numpy.zeros((1, 2, 4, 2))
    with pytest.raises(RuleError, match="33") as error:
        run_sharded(lambda q, k: ops.attention(q, k, k)[0], {"q": q, "k": k}, (2,))
    assert "operator attention" in str(error.value)


def test_r054_head_counts_are_a_matter_of_each_operator():
    even = ("f32[1,32,4,2]",) * 3
    odd = ("f32[1,25,4,2]",) * 3
    assert "S(1), S(1), S(1) -> S(1), S(1)" in signatures(ops.attention, *even, mesh=(4,))
    assert "S(2), B, B -> S(2), S(2)" in signatures(ops.attention, *odd, mesh=(4,))


def test_r075_gradients_have_the_shapes_of_their_arguments():
    """Query and key of 6 per head, value of 4, no mask: nothing takes another's place."""
    q, k, v = (
        RNG(0).standard_normal((1, 2, 3, 6)),
        RNG(1).standard_normal((1, 2, 5, 6)),
        RNG(2).standard_normal((1, 2, 5, 4)),
    )
    run = run_sharded(
        lambda q, k, v: ops.attention(q, k, v)[0],
        {"q": q, "k": k, "v": v},
        (2,),
        {"v": "S(1)"},
        gradients("q", "k", "v"),
    )
    assert [value.shape for value in run.values] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("pins", [{"x": "S(0)", "w": "B"}, {"x": "B", "w": "S(0)"}, {"x": "S(0)", "w": "S(0)"}])
def test_r060_r062_a_strided_convolution_without_bias(pins):
    torch = pytest.importorskip("torch")
    x, w = RNG(0).standard_normal((2, 1, 5, 5)), RNG(1).standard_normal((2, 1, 3, 3))
    run = run_sharded(lambda x, w: ops.conv2d(x, w, stride=2, padding=1), {"x": x, "w": w}, (2,), pins)
    expected = torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(w), stride=2, padding=1).numpy()
    numpy.testing.assert_allclose(run.values[0], expected, rtol=1e-10, atol=1e-12)
    assert all(
        len(one.split(" -> ")[0].split(", ")) == 2
        for one in signatures(ops.convolution, "f32[2,1,5,5]", "f32[2,1,3,3]")
    )


def test_r061_gradients_of_a_convolution_whose_input_is_split_along_its_width():
    torch = pytest.importorskip("torch")
    x, w = RNG(0).standard_normal((1, 3, 4, 8)), RNG(1).standard_normal((4, 3, 4, 4))
    run = run_sharded(
        lambda x, w: ops.conv2d(x, w, stride=4), {"x": x, "w": w}, (2,), {"x": "S(3)", "w": "B"}, gradients("x", "w")
    )
    tensors = [torch.tensor(array, requires_grad=True) for array in (x, w)]
    torch.nn.functional.conv2d(*tensors, stride=4).sum().backward()
    for found, tensor in zip(run.values, tensors):
        numpy.testing.assert_allclose(found, tensor.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_r063_batch_norm_of_split_channels_in_evaluation():
    x = RNG(0).standard_normal((2, 4, 3, 3))
    w, b, mean = (RNG(seed).standard_normal(4) for seed in (1, 2, 3))
    var = RNG(4).uniform(1, 2, 4)
    run = run_sharded(
        lambda x, w, b, mean, var: ops.batch_norm(x, w, b, mean, var, training=False)[0],
        {"x": x, "w": w, "b": b, "mean": mean, "var": var}, (2,),
        {"x": "S(1)", "w": "S(0)", "b": "S(0)", "mean": "S(0)", "var": "S(0)", "batch_norm_apply": "S(1)"},
    )  # fmt: skip
    c = (slice(None), None, None)
    numpy.testing.assert_allclose(run.values[0], (x - mean[c]) / numpy.sqrt(var[c] + 1e-5) * w[c] + b[c], rtol=1e-12)
    assert run.moved == 0 and run.layouts[0] == "(S(1))"


def test_r064_batch_norm_of_a_split_batch_takes_its_statistics_over_all_of_it():
    x = numpy.array([[0.0], [2.0], [4.0], [10.0]])
    run = run_sharded(
        lambda x, zero, one: ops.batch_norm(x, one, zero, zero, one, training=True, momentum=1.0)[1:],
        {"x": x, "zero": numpy.zeros(1), "one": numpy.ones(1)}, (2,), {"x": "S(0)"},
    )  # fmt: skip
    assert run.values[0].tolist() == [4.0]
    assert run.values[1][0] * 3 / 4 == pytest.approx(14.0, rel=1e-12), "the running variance is the unbiased one"


def test_r066_weight_gradients_of_a_norm_are_summed_over_the_split_rows():
    x, w = RNG(0).standard_normal((4, 2)), numpy.ones(2)
    run = run_sharded(
        lambda x, w: ops.layer_norm(x, w, w),
        {"x": x, "w": w}, (2,), {"x": "S(0)", "w": "B"}, gradients("w"),
    )  # fmt: skip
    normal = (x - x.mean(1, keepdims=True)) / numpy.sqrt(x.var(1, keepdims=True) + 1e-5)
    numpy.testing.assert_allclose(run.values[0], normal.sum(0) + 4.0, rtol=1e-9, atol=1e-9)


def test_r070_writing_by_global_positions():
    x, at, values = numpy.zeros(16), numpy.array([1, 9]), numpy.array([5.0, 7.0])
    run = run_sharded(
        lambda x, at, values: ops.scatter(x, at, values, axis=0),
        {"x": x, "at": at, "values": values},
        (2,),
        {"x": "S(0)", "scatter": "S(0)"},
    )
    expected = x.copy()
    expected[at] = values
    numpy.testing.assert_array_equal(run.values[0], expected)
    assert run.parts[0][1][1] == 7.0 and (run.parts[0][1] != 0).sum() == 1


def test_r073_a_piece_outside_of_the_tensor_is_refused():
    """Systems that move the start disagree per shard; here it is an error, as in torch.narrow."""
    with pytest.raises(RuleError, match="7"):
        run_sharded(lambda x: ops.narrow(x, 1, 7, 6), {"x": numpy.zeros((2, 8))}, (2,))
    x = numpy.arange(16).reshape(2, 8)
    run = run_sharded(lambda x: ops.narrow(x, 1, 2, 6), {"x": x}, (2,), {"x": "S(1)"})
    numpy.testing.assert_array_equal(run.values[0], x[:, 2:])
    held = scatter(run.values[0], Layout.parse("S(1)"), Mesh((2,)), numpy, RNG(0))
    assert [part[0].tolist() for part in held] == [[2, 3, 4], [5, 6, 7]]


def test_r076_a_cumulative_sum_does_not_start_again_on_every_shard():
    run = run_sharded(
        lambda x: ops.cumsum(x, axis=1), {"x": numpy.ones((8, 16), dtype="int64")}, (1, 2), {"x": "B, S(1)"}
    )
    assert (run.values[0] == numpy.arange(1, 17)).all()
    assert not any("S(1)" in one for one in signatures(ops.cumsum, "i64[8,16]", axis=1))


def test_r077_the_first_of_four_is_the_first():
    x = RNG(0).permutation(32).reshape(2, 16).astype("float64")
    one, four = (run_sharded(lambda x, k=k: ops.topk(x, k=k), {"x": x}, (4,), {"x": "S(1)"}) for k in (1, 4))
    numpy.testing.assert_array_equal(one.values[0][:, 0], four.values[0][:, 0])
    numpy.testing.assert_array_equal(one.values[1][:, 0], four.values[1][:, 0])
    numpy.testing.assert_array_equal(four.values[1], numpy.argsort(-x, axis=1)[:, :4])


def test_r079_the_gradient_of_a_cumulative_product():
    run = run_sharded(
        lambda x: ops.cumprod(x, axis=1), {"x": numpy.array([[1.0, 2, 3, 4]])}, (1,), None, gradients("x")
    )
    assert run.values[0].tolist() == [[33, 16, 10, 6]]


def test_r109_a_value_used_twice():
    x = RNG(0).standard_normal((4, 4))
    w = RNG(1).standard_normal((4, 4))
    run = run_sharded(lambda x, w: (x + x, x @ w, x @ w), {"x": x, "w": w}, (2,), {"x": "S(0)"})
    numpy.testing.assert_array_equal(run.values[0], 2 * x)
    numpy.testing.assert_allclose(run.values[2], x @ w, rtol=1e-12)


def test_r126_a_reduction_takes_in_the_whole_group():
    a, b, c = (RNG(seed).standard_normal((8, 8)) for seed in range(3))
    run = run_sharded(
        lambda a, b, c: a @ b @ c, {"a": a, "b": b, "c": c}, (4,),
        {"a": "B", "b": "S(1)", "c": "S(0)", "matmul": "S(1)", "matmul_1": "P"},
    )  # fmt: skip
    numpy.testing.assert_allclose(run.values[0], a @ b @ c, rtol=1e-10)
    assert Mesh((4,)).groups(0) == ((0, 1, 2, 3),)
    assert [kind for value, kind in run.boxing if value == "matmul_1"] in (["all_reduce"], ["reduce_scatter"], [])
