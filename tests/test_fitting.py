"""Fitted link constants: optimality conditions, recovery of known constants, and what outliers do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import DEVICE

from sbp.errors import ClusterError
from sbp.planner.cluster import Cluster, Tier
from sbp.planner.collective import collective_terms, placement
from sbp.planner.fitting import Sample, fit_relative, fit_tier, nonnegative_least_squares
from sbp.planner.list_calls import ListCalls

BUS = Tier("bus", 8, 2e-5, 1e11, 1.0, 3e-6, 5e-9)
NET = Tier("net", None, 4e-5, 1e10, 1.0, 8e-6, 7e-9)
SWITCH = replace(BUS, group_bandwidths=((2, 5e10), (4, 8e10)), all_reduce_bandwidths=((4, 1.2e11),))
GATHER = replace(BUS, group_bandwidths=((2, 5e10), (4, 8e10)), gather_bandwidths=((2, 1e11), (4, 3e11)))
UNEVEN = replace(SWITCH, exchange_bandwidths=((2, 1e10), (4, 2e10)))


def measured(bus, net, sizes, kinds, groups, noise=0.0):
    """Samples that the model itself would give."""
    cluster = Cluster("lab", DEVICE, 4, 8, (bus, net))
    random = np.random.default_rng(0)
    found = []
    for ranks in groups:
        group = placement(cluster, ranks)
        for kind in kinds:
            for size in sizes:
                seconds = collective_terms(kind, group).seconds(size) * float(np.exp(random.normal(0, noise)))
                found.append(Sample(kind, group, size, seconds))
    return found


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(4.0**power for power in range(5, 16))


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 20))
def test_nonnegative_least_squares_is_optimal(seed, unknowns, more):
    """Karush-Kuhn-Tucker: no unknown is negative, the gradient is 0 where one is positive and not uphill elsewhere."""
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(unknowns + more, unknowns)), random.normal(size=unknowns + more)
    found = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()
    assert np.abs(gradient[found > 0]).max(initial=0) < 1e-8
    assert gradient.min() > -1e-8


def test_least_squares_of_dependent_and_empty_columns():
    column = np.arange(1.0, 5.0)
    matrix = np.stack([column, 2 * column, 0 * column], axis=1)
    found = nonnegative_least_squares(matrix, 3 * column)
    assert matrix @ found == pytest.approx(3 * column) and found[2] == 0.0
    assert nonnegative_least_squares(matrix, -column) == pytest.approx(0.0)


def test_a_few_disturbed_measurements_change_nothing():
    sizes = np.geomspace(1.0, 1e6, 20)
    seconds = 3.0 + 0.01 * sizes
    seconds[[2, 11, 17]] *= 5
    found = fit_relative({"start": np.ones(20), "rate": sizes}, seconds)
    assert found == pytest.approx({"start": 3.0, "rate": 0.01}, rel=1e-3)


@pytest.mark.parametrize(
    ("tier", "tables"),
    [
        (BUS, ()),
        (SWITCH, ("group", "all_reduce")),
        (GATHER, ("group", "gather")),
        (UNEVEN, ("group", "all_reduce", "exchange")),
    ],
)
def test_constants_of_a_tier_come_back(tier, tables):
    samples = measured(tier, NET, SIZES, KINDS, [range(2), range(4)])
    start = Tier("bus", 8, 0.0, 1e9, 0.5)
    found = fit_tier(start, samples, tables)
    assert found.latency_seconds == pytest.approx(tier.latency_seconds, rel=1e-4)
    assert found.hop_seconds == pytest.approx(tier.hop_seconds, rel=1e-3)
    assert found.ramp_seconds_per_sqrt_byte == pytest.approx(tier.ramp_seconds_per_sqrt_byte, rel=1e-3)
    for members in (2, 4):
        assert found.bandwidth(members) == pytest.approx(tier.bandwidth(members), rel=1e-4)
        assert found.bandwidth(members, True) == pytest.approx(tier.bandwidth(members, True), rel=1e-3)
        assert found.gather_bandwidth(members) == pytest.approx(tier.gather_bandwidth(members), rel=1e-3)
        assert found.exchange_bandwidth(members) == pytest.approx(tier.exchange_bandwidth(members), rel=1e-4)
    assert found.efficiency <= 1.0


def test_an_outer_tier_is_fitted_with_the_inner_ones_known():
    samples = measured(BUS, NET, SIZES, KINDS[:3], [(0, 8), (0, 8, 16, 24), range(16)])
    found = fit_tier(replace(NET, latency_seconds=0.0, hop_seconds=0.0, bandwidth_bytes_per_second=1e9), samples)
    assert found.latency_seconds == pytest.approx(NET.latency_seconds, rel=1e-3)
    assert found.hop_seconds == pytest.approx(NET.hop_seconds, rel=1e-3)
    assert found.bandwidth(2) == pytest.approx(1e10, rel=1e-3)


def test_noise_averages_out():
    samples = measured(BUS, NET, SIZES, KINDS, [range(2), range(4), range(8)], noise=0.1)
    found = fit_tier(Tier("bus", 8, 0.0, 1e9), samples)
    fitted, true = (placement(Cluster("lab", DEVICE, 1, 8, (tier,)), range(8)) for tier in (found, BUS))
    errors = [
        collective_terms("all_reduce", fitted).seconds(size) / collective_terms("all_reduce", true).seconds(size) - 1
        for size in SIZES
    ]
    assert np.abs(errors).mean() < 0.04


def test_what_cannot_be_fitted():
    with pytest.raises(ClusterError, match="bus cannot be fitted to nothing"):
        fit_tier(BUS, [])
    with pytest.raises(ClusterError, match="does not meet on tier bus"):
        fit_tier(BUS, measured(BUS, NET, (1e6,), KINDS, [(0, 8)]))


def test_calls_on_lists_cost_kernels_and_copies():
    lists = ListCalls(call_seconds=1e-4, kernel_seconds=1e-5, copy_efficiency=0.5)
    traffic = 2 * 1e6 / (DEVICE.memory_bandwidth_bytes_per_second * 0.5)
    assert lists.seconds("all_reduce", 4, 1e6, DEVICE) == pytest.approx(traffic)
    assert lists.seconds("all_gather", 4, 1e6, DEVICE) == pytest.approx(1e-4 + 8e-5 + 2 * traffic)
    assert lists.seconds("reduce_scatter", 4, 1e6, DEVICE) == pytest.approx(1e-4 + 8e-5 + 2 * traffic)
    assert lists.seconds("all_to_all", 4, 1e6, DEVICE) == pytest.approx(1e-4 + 4e-5 + 2 * traffic)
