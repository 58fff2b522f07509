"""Reports of users of other systems: pending sums, scalars, integers and booleans. Each test names its report."""

import math

import numpy
import pytest

from sbp.autodiff import backward
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.ops import library as ops
from sbp.shards import gather
from tests.report_programs import run_sharded, signatures

RNG = numpy.random.default_rng


def passes_sum(op, *types, **attributes):
    return {one for one in signatures(op, *types, **attributes) if one.split(" -> ")[0].split(", ").count("P")}


def test_r023_a_number_added_to_a_pending_sum_is_added_once():
    x = numpy.arange(10)
    run = run_sharded(lambda x: x.sum() + 10, {"x": x}, (2,), {"x": "S(0)", "sum": "P"})
    assert run.values[0] == 55
    assert not passes_sum(ops.shift, "f32[4]", amount=10)


def test_r024_clamping_waits_for_the_sum():
    assert not passes_sum(ops.clamp, "f32[4]", high=2.0)
    parts = [numpy.array(100.0), numpy.array(44.0)]
    assert min(gather(parts, Layout.parse("P"), Mesh((2,)), ()), 2.0) == 2.0
    x = numpy.array([100.0, 44.0])
    run = run_sharded(lambda x: ops.clamp(x.sum(), high=2.0), {"x": x}, (2,), {"x": "S(0)", "sum": "P"})
    assert run.values[0] == 2.0


def test_r025_maxima_and_norms_wait_for_the_sum():
    rows = numpy.array([[1.0, 4.0], [4.0, 1.0]])  # one part per rank: summed over the split axis they are (5, 5)
    run = run_sharded(
        lambda x: (ops.max(x.sum(0), 0), ops.norm(x.sum(0))), {"x": rows}, (2,), {"x": "S(0)", "sum": "P", "sum_1": "P"}
    )
    assert run.values[0] == 5.0
    assert run.values[1] == pytest.approx(math.sqrt(50), rel=1e-12)
    assert not passes_sum(ops.max, "f32[2]", axis=0)


def test_r030_r028_the_gradient_of_a_pending_sum_is_whole():
    """y = x w with a pending sum, and an identity between y and the loss: the gradient is B on both ends, dx == dy."""
    x, w = RNG(0).standard_normal((4, 6)), RNG(1).standard_normal((6, 3))

    def gradient(with_identity):
        def program(x, w):
            y = ops.matmul(x, w)
            return (ops.scale(y, factor=1.0) if with_identity else y).sum()

        def back(builder, symbols, loss):
            grads = backward(builder, loss, list(symbols.values()))
            return [grads["x"], grads["w"]]

        pins = {"x": "S(1)", "w": "S(0)", "matmul": "P"}
        return run_sharded(program, {"x": x, "w": w}, (2,), pins, back)

    for run in (gradient(False), gradient(True)):
        numpy.testing.assert_allclose(run.values[0], numpy.broadcast_to(w.sum(1), (4, 6)), rtol=1e-12)
        numpy.testing.assert_allclose(run.values[1], numpy.broadcast_to(x.sum(0)[:, None], (6, 3)), rtol=1e-12)
    assert "B -> B" in signatures(ops.scale, "f32[4,3]", factor=1.0)
    assert "P -> P" in signatures(ops.scale, "f32[4,3]", factor=1.0)


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
def test_r032_numbers_are_part_of_what_is_remembered(mesh):
    run = run_sharded(lambda x: [x.mean() * i for i in (1, 2, 3)], {"x": numpy.array([1.0])}, mesh)
    assert [float(value) for value in run.values] == [1.0, 2.0, 3.0]


def test_r036_the_gradient_of_a_mean_counts_what_went_in():
    x = RNG(0).standard_normal((4, 2))
    run = run_sharded(
        lambda x: x.mean(0).sum(), {"x": x}, (2,), {"x": "S(0)"},
        lambda builder, symbols, loss: [backward(builder, loss, [symbols["x"]])["x"]],
    )  # fmt: skip
    assert (run.values[0] == 0.25).all() and run.values[0].shape == (4, 2)


def test_r037_positions_are_global_and_ties_take_the_lowest():
    x = numpy.arange(8).reshape(1, 8) >= 4
    run = run_sharded(lambda x: ops.argmax(x, axis=1), {"x": x}, (2,), {"x": "S(1)"})
    assert run.values[0].tolist() == [4] and run.values[0].dtype == numpy.int64
    assert not any("P" in one.replace("P(", "") for one in signatures(ops.argmax, "bool[1,8]", axis=1))
    assert not passes_sum(ops.logical_not, "bool[4]") and not passes_sum(ops.cast, "bool[4]", dtype="bool")


def test_r027_there_is_no_pending_average_to_confuse_with_a_sum():
    """A pending average is a pending sum scaled: parts 2 and 4 are 6, however they are divided."""
    from sbp.errors import LayoutError

    with pytest.raises(LayoutError, match="one of sum, max, min"):
        Layout.parse("P(avg)")
    assert gather([numpy.array(2.0), numpy.array(4.0)], Layout.parse("P"), Mesh((2,)), ()) == 6.0


def test_r082_ignored_labels_count_nowhere():
    """Means over what is kept, summed and counted over the split sequence: (1 + 3) / 2, not a mean of means."""
    logits = RNG(0).standard_normal((4, 5))
    labels = numpy.array([1, -100, 2, -100])
    run = run_sharded(
        lambda logits, labels: ops.cross_entropy(logits, labels, ignore_index=-100),
        {"logits": logits, "labels": labels}, (2,), {"logits": "S(0)", "labels": "S(0)"},
    )  # fmt: skip
    shifted = logits - numpy.log(numpy.exp(logits).sum(1, keepdims=True))
    assert run.values[0] == pytest.approx(-(shifted[0, 1] + shifted[2, 2]) / 2, rel=1e-12)


def test_r022_cross_entropy_of_a_split_vocabulary():
    logits, labels = numpy.arange(24.0).reshape(3, 8) / 4, numpy.array([1, 5, 7])
    run = run_sharded(
        lambda logits, labels: ops.cross_entropy(logits, labels),
        {"logits": logits, "labels": labels},
        (4,),
        {"logits": "S(1)"},
    )
    expected = (numpy.log(numpy.exp(logits).sum(1)) - logits[numpy.arange(3), labels]).mean()
    assert run.values[0] == pytest.approx(expected, rel=1e-9)


def test_r084_a_norm_counts_every_element_once():
    a, b = numpy.array([3.0, 0.0]), numpy.array([4.0])
    run = run_sharded(lambda a, b: ops.global_norm([a, b]), {"a": a, "b": b}, (2,), {"a": "S(0)", "b": "B"})
    assert run.values[0] == pytest.approx(5.0, rel=1e-12)


@pytest.mark.parametrize("layouts", [("S(0), B", "B, B"), ("S(0), S(0)", "B, S(0)"), ("B, S(0)", "S(0), B")])
def test_r085_whatever_the_layouts(layouts):
    a, b = RNG(0).standard_normal(6), RNG(1).standard_normal(5)
    run = run_sharded(lambda a, b: ops.global_norm([a, b]), {"a": a, "b": b}, (2, 2), dict(zip("ab", layouts)))
    assert run.values[0] == pytest.approx(math.sqrt((a * a).sum() + (b * b).sum()), rel=1e-12)


@pytest.mark.parametrize("name", ["complex64", "complex128", "torch.complex64"])
def test_r038_complex_numbers_are_refused_where_they_come_in(name):
    """Not somewhere inside of a collective: no element type of the language is complex."""
    from sbp.errors import GraphError
    from sbp.operator import TensorType

    with pytest.raises(GraphError, match=f"unknown element type '{name}'; known are f64, f32"):
        TensorType((1,), name)
