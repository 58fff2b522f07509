"""Sending bytes between ranks, and links that several senders share: hand-computed values and laws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import clusters

from sbp.errors import ClusterError
from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster, Device, Tier
from sbp.planner.collective import placements, stage_transfer_seconds, transfer_seconds, transfers_seconds
from sbp.planner.cost import AnalyticCostModel

DEVICE = Device("Chip", {"f32": 1e13}, 2**34, 1e12)
BUS = Tier("bus", 4, 1e-5, 1e11, 1.0, hop_seconds=1e-6)
NET = Tier("net", None, 2e-5, 1e10, 1.0, hop_seconds=3e-6)
LAB = Cluster("lab", DEVICE, 4, 4, (BUS, NET))
ONE_CARD = replace(LAB, tiers=(BUS, replace(NET, links=1)))
TWO_CARDS = replace(LAB, tiers=(BUS, replace(NET, links=2)))


def test_inside_and_between_nodes():
    assert transfer_seconds(LAB, 0, 3, 1e8) == pytest.approx(1.1e-5 + 1e8 / 1e11)
    assert transfer_seconds(LAB, 3, 4, 1e8) == pytest.approx(2.3e-5 + 1e8 / 1e10)
    assert transfer_seconds(ONE_CARD, 3, 4, 1e8) == transfer_seconds(LAB, 3, 4, 1e8)
    assert transfer_seconds(LAB, 5, 5, 1e8) == transfer_seconds(LAB, 0, 9, 0) == 0.0
    with pytest.raises(ClusterError, match="has no rank 16; give one from 0 to 15"):
        transfer_seconds(LAB, 0, 16, 1.0)
    with pytest.raises(ClusterError, match="sharing must be 1 or more, got 0"):
        transfer_seconds(LAB, 0, 1, 1.0, 0)


def test_transfers_share_what_they_leave_or_enter_by():
    wire, start = 1e8 / 1e10, 2.3e-5
    pairs = [(rank, rank + 4) for rank in range(4)]
    assert transfers_seconds(LAB, pairs, 1e8) == pytest.approx(start + wire)
    assert transfers_seconds(TWO_CARDS, pairs, 1e8) == pytest.approx(start + 2 * wire)
    assert transfers_seconds(ONE_CARD, pairs, 1e8) == pytest.approx(start + 4 * wire)
    # Both directions at once are free of each other; two transfers into one rank are not.
    assert transfers_seconds(ONE_CARD, [(0, 4), (4, 0)], 1e8) == pytest.approx(start + wire)
    assert transfers_seconds(LAB, [(0, 8), (4, 8)], 1e8) == pytest.approx(start + 2 * wire)
    assert transfers_seconds(LAB, [(0, 4), (0, 8), (0, 12)], 1e8) == pytest.approx(start + 3 * wire)
    assert transfers_seconds(LAB, [], 1e8) == transfers_seconds(LAB, [(2, 2)], 1e8) == 0.0


def test_a_stage_scatters_over_its_cards_and_gathers_inside():
    sources, targets = range(4), range(4, 8)
    whole = stage_transfer_seconds(LAB, sources, targets, 1e8, scatter=False)
    assert whole == pytest.approx(2.3e-5 + 1e8 / 1e10)
    gather = 1e-5 + 2e-6 + 3 / 4 * 1e8 / 1e11
    assert stage_transfer_seconds(LAB, sources, targets, 1e8) == pytest.approx(2.3e-5 + 1e8 / 4 / 1e10 + gather)
    # One sender to a stage of four: each share leaves by the same link.
    assert stage_transfer_seconds(LAB, [0], targets, 1e8) == pytest.approx(2.3e-5 + 1e8 / 1e10 + gather)
    assert stage_transfer_seconds(LAB, sources, [4], 1e8) == pytest.approx(2.3e-5 + 4 * 1e8 / 1e10)
    assert stage_transfer_seconds(LAB, sources, targets, 0) == 0.0


def test_groups_of_an_axis_share_the_cards_of_a_node():
    """On (dp=4, tp=4), four dp groups leave every node: each has a card, or all share one."""

    def seconds(cluster, kind, shape, axis):
        return AnalyticCostModel(cluster).collective_seconds(kind, Mesh(shape), axis, 1e8)

    for kind in ("all_gather", "all_to_all"):
        start, wire = 2.6e-5, 3 / 4 * 1e8 / 1e10
        assert seconds(LAB, kind, (4, 4), 0) == pytest.approx(start + wire)
        assert seconds(TWO_CARDS, kind, (4, 4), 0) == pytest.approx(start + 2 * wire)
        assert seconds(ONE_CARD, kind, (4, 4), 0) == pytest.approx(start + 4 * wire)
        assert seconds(ONE_CARD, kind, (4, 4), 1) == seconds(LAB, kind, (4, 4), 1)
    # A group over all ranks: its four rings share the card, so the payload crosses it as if there were one ring.
    start = (1e-5 + 2e-6) + (2e-5 + 6e-6)
    assert seconds(ONE_CARD, "all_gather", (16,), 0) == pytest.approx(start + 15 / 16 * 1e8 / 1e10)
    assert seconds(ONE_CARD, "all_to_all", (16,), 0) == pytest.approx(start + 4 * 12 / 16 * 1e8 / 1e10)
    # Half the ranks: (2, 2) on two nodes of two would have two groups of one ring each.
    half = replace(ONE_CARD, nodes=2, devices_per_node=2, tiers=(replace(BUS, span=2), ONE_CARD.tiers[1]))
    assert seconds(half, "all_gather", (2, 2), 0) == pytest.approx(2.3e-5 + 2 * 1 / 2 * 1e8 / 1e10)


def test_as_many_links_as_ranks_is_the_default():
    equal = replace(LAB, tiers=(BUS, replace(NET, links=4)))
    for shape, axis in (((16,), 0), ((4, 4), 0), ((8, 2), 0), ((2, 8), 1), ((5, 3), 0)):
        for kind in ("all_reduce", "all_gather", "all_to_all"):
            first, second = (
                AnalyticCostModel(cluster).collective_seconds(kind, Mesh(shape), axis, 1e7) for cluster in (LAB, equal)
            )
            assert first == pytest.approx(second), (shape, axis, kind)


def test_crowds_are_counted_where_groups_lie_unevenly():
    # Groups of three on (5, 3): nodes hold one or two members of two or three groups.
    found = placements(ONE_CARD, Mesh((5, 3)).groups(1))
    shares = [[(m.tier.name, m.ring_links, m.member_links) for m in place.meetings] for place in found]
    assert shares[0] == [("bus", 1.0, 1.0)]
    assert shares[1] == [("bus", 1.0, 1.0), ("net", 1 / 2, 1 / 4)]


@given(clusters(), st.data(), st.floats(0, 1e12), st.floats(1, 100), st.integers(1, 9))
def test_transfers_are_monotone_and_never_cheaper_across_nodes(cluster, data, payload, more, sharing):
    source, target = (data.draw(st.integers(0, cluster.size - 1)) for _ in "ab")
    here = transfer_seconds(cluster, source, target, payload, sharing)
    assert (here == 0.0) == (source == target or payload == 0.0)
    assert here <= transfer_seconds(cluster, source, target, payload * more, sharing)
    assert here <= transfer_seconds(cluster, source, target, payload, sharing + 1)
    assert here == transfer_seconds(cluster, target, source, payload, sharing)
    if cluster.devices_per_node > 1 and cluster.node(source) != cluster.node(target):
        assert transfer_seconds(cluster, 0, 1, payload) <= here


@given(clusters(), st.data(), st.floats(1, 1e12))
def test_more_transfers_at_once_take_no_less(cluster, data, payload):
    rank = st.integers(0, cluster.size - 1)
    pairs = data.draw(st.lists(st.tuples(rank, rank), max_size=12))
    together = transfers_seconds(cluster, pairs, payload)
    assert transfers_seconds(cluster, pairs[1:], payload) <= together
    assert all(transfer_seconds(cluster, *pair, payload) <= together for pair in pairs)
    assert together <= sum(transfer_seconds(cluster, *pair, payload) for pair in pairs) * (1 + 1e-9)
