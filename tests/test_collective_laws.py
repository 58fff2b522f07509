"""What any sane model of collectives obeys, over all presets and random clusters."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import clusters, placed

from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import TABLES, Cluster, presets
from sbp.planner.collective import collective_terms, placement, placements
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.physical import COLLECTIVES, LOCAL_STEPS

PAYLOADS = st.floats(0, 1e13)


@given(placed(), st.sampled_from(COLLECTIVES + LOCAL_STEPS), PAYLOADS, st.floats(1, 100))
def test_non_negative_finite_and_monotone_in_bytes(where, kind, payload, more):
    cluster, mesh, axis = where
    model = AnalyticCostModel(cluster)
    here = model.collective_seconds(kind, mesh, axis, payload)
    assert 0.0 <= here < math.inf
    assert here <= model.collective_seconds(kind, mesh, axis, payload * more)
    assert (here == 0.0) == (payload == 0.0 or mesh.shape[axis] == 1)


@given(placed(), PAYLOADS)
def test_all_reduce_against_its_halves(where, payload):
    """reduce-scatter <= all-reduce <= reduce-scatter + all-gather, and the sum is above by at most one start,
    where no switch sums."""
    cluster, mesh, axis = where
    model = AnalyticCostModel(cluster)
    whole, scatter, gather = (
        model.collective_seconds(kind, mesh, axis, payload) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    slack = 1e-9 * whole
    assert scatter <= whole + slack
    assert whole <= scatter + gather + slack
    if not any(tier.all_reduce_bandwidths for tier in cluster.tiers):
        start = sum(tier.latency_seconds for tier in cluster.tiers)
        assert scatter + gather <= whole + start + slack


@given(placed(), st.sampled_from(COLLECTIVES), PAYLOADS, st.integers(0, 2), st.floats(0.1, 1), st.data())
def test_a_slower_link_never_helps(where, kind, payload, at, factor, data):
    """Whatever is slower about it: bandwidths, latency, hops, ramp, or fewer links to share."""
    cluster, mesh, axis = where
    at %= len(cluster.tiers)
    tier = cluster.tiers[at]
    slower = data.draw(
        st.sampled_from(
            [
                replace(
                    tier,
                    bandwidth_bytes_per_second=tier.bandwidth_bytes_per_second * factor,
                    **{table: tuple((size, rate * factor) for size, rate in getattr(tier, table)) for table in TABLES},
                ),
                replace(tier, latency_seconds=tier.latency_seconds / factor),
                replace(tier, hop_seconds=tier.hop_seconds / factor),
                replace(tier, ramp_seconds_per_sqrt_byte=tier.ramp_seconds_per_sqrt_byte / factor),
                replace(tier, links=1),
            ]
        )
    )
    worse = replace(cluster, tiers=(*cluster.tiers[:at], slower, *cluster.tiers[at + 1 :]))
    here = AnalyticCostModel(cluster).collective_seconds(kind, mesh, axis, payload)
    there = AnalyticCostModel(worse).collective_seconds(kind, mesh, axis, payload)
    assert here <= there * (1 + 1e-12)


@given(clusters(), st.sampled_from(COLLECTIVES), st.floats(1, 1e13), st.data())
def test_crossing_nodes_is_never_cheaper_than_staying_inside(cluster, kind, payload, data):
    size = data.draw(st.integers(1, cluster.devices_per_node))
    rank = st.integers(0, cluster.size - 1)
    group = sorted(data.draw(st.lists(rank, min_size=size, max_size=size, unique=True)))
    crossing, inside = (
        collective_terms(kind, placement(cluster, ranks)).seconds(payload) for ranks in (group, range(size))
    )
    assert inside <= crossing


@pytest.mark.parametrize("name", presets())
def test_crossing_nodes_of_every_preset(name):
    """As the planner asks: axes of equal size across nodes and inside them, over nine decades of bytes."""
    cluster = Cluster.preset(name, nodes=8)
    for size in (2, 4, 8):
        if cluster.devices_per_node % size:
            continue
        across, inside = Mesh((size, cluster.size // size)), Mesh((cluster.size // size, size))
        model = AnalyticCostModel(cluster)
        for kind in COLLECTIVES:
            for payload in (1.0, 1e3, 1e6, 1e9):
                assert model.collective_seconds(kind, inside, 1, payload) <= model.collective_seconds(
                    kind, across, 0, payload
                ), (kind, size, payload)


@given(placed(), st.sampled_from(COLLECTIVES), PAYLOADS)
def test_the_slowest_group_decides(where, kind, payload):
    """An axis takes what its slowest group takes; alone, no group takes longer than beside the others."""
    cluster, mesh, axis = where
    together = AnalyticCostModel(cluster).collective_seconds(kind, mesh, axis, payload)
    if mesh.shape[axis] == 1 or payload == 0.0:
        assert together == 0.0
        return
    groups = mesh.groups(axis)
    each = [collective_terms(kind, group).seconds(payload) for group in placements(cluster, groups)]
    assert together == pytest.approx(max(each), rel=1e-12)
    for group, beside in zip(groups, each):
        assert collective_terms(kind, placement(cluster, group)).seconds(payload) <= beside * (1 + 1e-12)


@given(placed(), PAYLOADS)
def test_links_carry_what_must_pass_through_them(where, payload):
    """Independent count of bytes, rank by rank: no link is given more than its bandwidth, whatever the algorithm."""
    cluster, mesh, axis = where
    model = AnalyticCostModel(cluster)
    exchanged, gathered, scattered = (
        model.collective_seconds(kind, mesh, axis, payload) for kind in ("all_to_all", "all_gather", "reduce_scatter")
    )
    slack = 1 + 1e-9
    for group in mesh.groups(axis):
        inner = 1
        for tier in cluster.tiers:
            span = cluster.span(tier)
            per_rank = max(1.0, 1.0 if tier.links is None else tier.links / inner)
            rings, gathers, pairs = (
                per_rank * max([tier.bandwidth_bytes_per_second, *(b for _, b in getattr(tier, table))])
                for table in ("group_bandwidths", "gather_bandwidths", "exchange_bandwidths")
            )
            pairs, gathers = max(rings, pairs), max(rings, gathers)
            inside, outer = Counter(r // inner for r in group), Counter(r // span for r in group)
            for rank in group:
                there = outer[rank // span] - inside[rank // inner]
                assert exchanged * slack >= payload * there / len(group) / pairs
                if len(outer) == 1:
                    # What the ranks of an inner block lack comes in over this tier, on a link per rank.
                    assert gathered * slack >= payload * there / len(group) / (inside[rank // inner] * gathers)
                    assert scattered * slack >= payload * there / len(group) / (inside[rank // inner] * rings)
                    if tier.links is not None:
                        # What the block lacks comes in over its links, all of them together.
                        whole = tier.links * gathers / per_rank
                        assert gathered * slack >= payload * there / len(group) / whole
            inner = span


@given(clusters(most_nodes=3), st.sampled_from([(2,), (4,), (2, 2), (2, 3), (2, 2, 2)]), st.integers(1, 10**9))
def test_triangle_inequality_over_boxing_paths(cluster, shape, rows):
    """Between any three layouts: a detour never beats the path found, nor a direct step of one's own."""
    if math.prod(shape) > cluster.size:
        return
    space = BoxingTable(Mesh(shape), AnalyticCostModel(cluster)).space(TensorType((rows, 8), "f32"))
    direct = space.seconds
    for middle in range(len(space.layouts)):
        assert (direct <= (direct[:, [middle]] + direct[[middle], :]) * (1 + 1e-9)).all()
    for (before, after), step in space._steps.items():
        assert direct[before, after] <= step.seconds * (1 + 1e-12)


@given(clusters(), st.sampled_from(COLLECTIVES + LOCAL_STEPS), PAYLOADS)
def test_groups_of_one_rank_and_empty_payloads_are_free(cluster, kind, payload):
    model = AnalyticCostModel(cluster)
    assert model.collective_seconds(kind, Mesh((1, cluster.size)), 0, payload) == 0.0
    assert model.collective_seconds(kind, Mesh((cluster.size,)), 0, 0) == 0.0
