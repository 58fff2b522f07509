"""Random numbers: their distribution, and that neither layout nor shape of the shard changes them."""

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.operator import REGISTRY, TensorType, parse_type
from sbp.ops import library as ops

ONES = numpy.ones((400, 500))


def test_dropout_keeps_the_mean_and_drops_the_rate():
    found = ops.dropout(ONES, rate=0.3, seed=1)
    kept = found != 0
    # five standard deviations of a binomial share
    assert abs(kept.mean() - 0.7) < 5 * (0.3 * 0.7 / ONES.size) ** 0.5
    numpy.testing.assert_allclose(found[kept], 1 / 0.7, rtol=1e-15)


def test_rates_at_the_ends():
    numpy.testing.assert_array_equal(ops.dropout(ONES, rate=0.0), ONES)
    numpy.testing.assert_array_equal(ops.dropout(ONES, rate=1.0), 0 * ONES)


def test_seeds_and_steps_give_unrelated_masks():
    masks = [ops.dropout(ONES, rate=0.5, seed=seed) != 0 for seed in (0, 1, 2)]
    masks += [ops.dropout(ONES, numpy.asarray(step), rate=0.5, seed=0) != 0 for step in (0, 1, 2)]
    for i in range(len(masks)):
        for j in range(i):
            assert abs((masks[i] == masks[j]).mean() - 0.5) < 5 * 0.5 / ONES.size**0.5
    again = ops.dropout(ONES, numpy.asarray(2), rate=0.5, seed=0) != 0
    numpy.testing.assert_array_equal(again, masks[-1])


def test_neighbours_are_independent():
    mask = ops.dropout(ONES, rate=0.5, seed=3) != 0
    for shifted in (mask[1:] == mask[:-1], mask[:, 1:] == mask[:, :-1]):
        assert abs(shifted.mean() - 0.5) < 5 * 0.5 / shifted.size**0.5


def test_bits_are_these():
    """The numbers are part of what a saved run means: they may not change."""
    from sbp.ops.random import random_bits

    found = random_bits(numpy, (2, 2), (0, 0), (2, 2), 5)
    assert found.dtype == numpy.uint64
    assert [int(value) for value in found.ravel()] == [reference_bits(5, index) for index in range(4)]


def reference_bits(seed: int, index: int) -> int:
    """The same in Python's integers."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(z):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    key = mix((seed * golden + golden) & mask)
    return mix((mix(index + 1) * golden + key) & mask)


shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@given(shapes, st.data(), st.sampled_from([(2,), (3,), (2, 2)]))
def test_the_mask_does_not_depend_on_the_layout(shape, data, mesh):
    axes = st.sampled_from(["B", *(f"S({axis})" for axis in range(len(shape)))])
    layout = Layout.parse(", ".join(data.draw(axes) for _ in mesh))
    op = REGISTRY["dropout"]
    x = numpy.ones(shape)
    whole = op.kernel(numpy, x, rate=0.5, seed=4)
    for place in numpy.ndindex(*mesh):
        box = layout.shard(shape, mesh, place)
        attributes = op.local_attributes({"rate": 0.5, "seed": 4}, (box,), (box,))
        numpy.testing.assert_array_equal(op.kernel(numpy, x[box.slices], **attributes), whole[box.slices])


@pytest.mark.parametrize("name, mean, deviation", [("random_uniform", 0.5, 12**-0.5), ("random_normal", 0.0, 1.0)])
def test_moments(name, mean, deviation):
    found = REGISTRY[name].kernel(numpy, shape=(400, 500), seed=2, dtype="f64")
    assert abs(found.mean() - mean) < 5 * deviation / found.size**0.5
    assert abs(found.std() - deviation) < 0.01 * deviation
    moved = {"random_uniform": {"low": -2.0, "high": 4.0}, "random_normal": {"mean": 1.0, "std": 3.0}}[name]
    other = REGISTRY[name].kernel(numpy, shape=(400, 500), seed=2, dtype="f64", **moved)
    numpy.testing.assert_allclose(numpy.corrcoef(found.ravel(), other.ravel())[0, 1], 1.0, rtol=1e-12)
    assert abs(other.mean() - 1.0) < 0.05


def test_a_scalar_is_random_too():
    assert REGISTRY["random_uniform"].kernel(numpy, shape=(), seed=1).shape == ()
    assert ops.dropout(numpy.asarray(1.0), rate=0.5, seed=1) in (0.0, 2.0)


REFUSED = [
    ("f32[4]", {"rate": 1.5}, "between 0 and 1"),
    ("i64[4]", {"rate": 0.5}, "floating"),
]


@pytest.mark.parametrize("text, attributes, message", REFUSED)
def test_refuses(text, attributes, message):
    with pytest.raises(RuleError, match=message):
        REGISTRY["dropout"].infer([parse_type(text)], attributes)


def test_refuses_a_step_that_is_no_scalar():
    with pytest.raises(RuleError, match="scalar"):
        REGISTRY["dropout"].infer([TensorType((4,), "f32"), TensorType((4,), "i64")], {"rate": 0.5})
