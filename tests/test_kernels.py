"""Kernel times: tiles and waves, alignment, the roofline they never beat, and what the planner asks of them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.mesh import Mesh
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel, CheckedCostModel
from sbp.planner.kernels import CONSTANTS, TILES, Kernels, is_aligned

A100 = Cluster.preset("a100-80g").device
SIZES = st.integers(1, 4096)


def waves_by_hand(m, n, units, last_wave):
    """Full-size waves of every tile shape, by listing the tiles; in output elements at the ceiling."""
    best = np.inf
    for rows, columns, efficiency in TILES:
        tiles = len([(i, j) for i in range(0, m, rows) for j in range(0, n, columns)])
        full, rest = tiles // units, tiles % units
        best = min(best, (full + (rest / units) ** last_wave) * units * rows * columns / efficiency)
    return best


@pytest.mark.parametrize(("m", "n"), [(256, 128), (2048, 2048), (2048, 2056), (1000, 4000), (108 * 256, 128), (64, 64)])
def test_waves_are_those_of_listed_tiles(m, n):
    k, rate = 4096, 312e12 * A100.matmul_ceiling
    expected = 2 * k * waves_by_hand(m, n, 108, CONSTANTS.last_wave) / rate
    assert Kernels(A100).waves_seconds(1, m, n, k, "bf16") == pytest.approx(expected, rel=1e-12)


def test_few_tiles_more_than_a_wave_cost_much_of_another_wave():
    kernels = Kernels(A100)
    # 108 and 112 tiles
    full, more = (kernels.matmul_seconds(1, rows * 256, 4 * 128, 8192, "bf16") for rows in (27, 28))
    assert 1.2 < more / full < 2.0


def test_full_waves_reach_the_ceiling():
    m, n, k = 108 * 256, 1024, 8192
    rate = 2.0 * m * n * k / Kernels(A100).matmul_seconds(1, m, n, k, "bf16")
    assert rate == pytest.approx(312e12 * A100.matmul_ceiling, rel=0.01)


@given(st.integers(1, 8), SIZES, SIZES, SIZES)
def test_no_product_beats_the_roofline(batch, m, n, k):
    seconds = Kernels(A100).matmul_seconds(batch, m, n, k, "bf16")
    flops, moved = 2.0 * batch * m * n * k, 2.0 * batch * (m * k + k * n + m * n)
    assert seconds >= max(flops / (312e12 * A100.matmul_ceiling), moved / 2039e9) * (1 - 1e-12)


@given(st.integers(1, 8), SIZES, SIZES, SIZES)
def test_a_longer_inner_dimension_never_costs_less(batch, m, n, k):
    kernels = Kernels(A100)
    assert kernels.waves_seconds(batch, m, n, 8 * k, "bf16") <= kernels.waves_seconds(batch, m, n, 8 * k + 8, "bf16")


def test_unaligned_sizes_miss_the_matrix_units():
    """BLOOM's prequel: 14400 hidden with heads of 225 took a third longer than 14336 with heads of 224."""
    assert is_aligned(2, 224, 2048) and not is_aligned(2, 225, 2048)
    kernels = Kernels(A100)
    aligned, unaligned = (kernels.scores_matmul_seconds(32, 2048, 2048, size, "bf16") for size in (224, 225))
    assert unaligned > 5 * aligned


def test_a_device_without_multiprocessors_has_no_waves():
    plain = replace(A100, multiprocessors=None)
    seconds = Kernels(plain).waves_seconds(1, 130, 130, 128, "bf16")
    assert seconds == pytest.approx(2 * 130 * 130 * 128 / (312e12 * 0.869 * CONSTANTS.unaligned))
    assert Kernels(plain).matmul_seconds(1, 0, 5, 5, "f32") == 0.0


def test_the_cost_model_prices_products_by_their_sizes():
    model = AnalyticCostModel(Cluster.preset("a100-80g"))
    m, n, k = 109 * 256, 128, 8192
    flops, moved = 2.0 * m * n * k, 2.0 * (m * k + k * n + m * n)
    by_size = model.product_seconds("linear", (1, m, n, k), flops, moved, "bf16")
    assert by_size > model.compute_seconds("linear", flops, moved, "bf16")
    without = AnalyticCostModel(replace(model.cluster, device=replace(A100, multiprocessors=None)))
    assert without.product_seconds("linear", (1, m, n, k), flops, moved, "bf16") == without.compute_seconds(
        "linear", flops, moved, "bf16"
    )


class ByFlops:
    """A user's model without a method for products."""

    def compute_seconds(self, op, flops, bytes, dtype):
        return flops + bytes

    def collective_seconds(self, kind, mesh, axis, bytes):
        return bytes


class BySizes(ByFlops):
    """... and with one."""

    def __init__(self):
        self.asked = set()

    def product_seconds(self, op, sizes, flops, bytes, dtype):
        assert flops == 2.0 * np.prod(sizes)
        self.asked.add(op)
        return float(np.prod(sizes))


def test_a_users_model_may_price_products():
    plain = CheckedCostModel(ByFlops())
    assert plain.product_seconds("linear", (1, 2, 3, 4), 48.0, 5.0, "f32") == 53.0
    model = BySizes()
    auto_parallel("tiny-gpt2", Cluster.preset("cpu"), batch=8, sequence=8, mesh=Mesh((4,)), cost_model=model)
    assert model.asked == {"linear", "matmul", "linear_weight_gradient"}
