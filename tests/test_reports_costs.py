"""Reports of users of other systems: what collectives cost on which links. Each test names its report."""

import dataclasses
from itertools import permutations, product

import pytest

from sbp.errors import MeshError
from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.links import axis_links
from sbp.planner.meshes import make_mesh
from sbp.planner.physical import COLLECTIVES
from sbp.report.summary import to_json
from sbp.report.text import report_text
from sbp.trace import GraphBuilder

MEGABYTE = 1 << 20


def costs_of(nodes, devices, preset="a100-80g"):
    return AnalyticCostModel(Cluster.preset(preset, nodes=nodes, devices_per_node=devices))


def test_r115_a_detour_is_never_cheaper_in_two_dimensions():
    """All triples of layouts of a matrix on (2, 2) and (2, 3), over two nodes."""
    kind = TensorType((64, 48), "f32")
    choices = [Split(0), Split(1), Broadcast(), Partial()]
    for shape in ((2, 2), (2, 3)):
        table = BoxingTable(Mesh(shape), costs_of(shape[0], shape[1]))
        layouts = [Layout(axes) for axes in product(choices, repeat=2)]
        seconds = {pair: table.seconds(kind, *pair) for pair in product(layouts, layouts)}
        for a, b, c in product(layouts, layouts, layouts):
            assert seconds[a, c] <= seconds[a, b] + seconds[b, c] + 1e-15, (a, b, c)


def test_r115_the_reported_detour_on_four_axes():
    table = BoxingTable(Mesh((2, 2, 2, 2)), costs_of(2, 8))
    kind = TensorType((1024, 1024), "f32")
    start, between, end = map(Layout.parse, ("B, S(0), B, B", "S(1), S(0), S(1), S(1)", "S(1), B, S(1), S(1)"))
    direct = table.seconds(kind, start, end)
    assert 0 < direct <= table.seconds(kind, start, between) + table.seconds(kind, between, end) + 1e-15


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize(("nodes", "devices"), [(1, 8), (8, 1), (2, 8)])
def test_r116_one_large_message_is_cheaper_than_many_small_ones(kind, nodes, devices):
    costs, mesh = costs_of(nodes, devices), Mesh((nodes * devices,))
    assert costs.collective_seconds(kind, mesh, 0, MEGABYTE) < 16 * costs.collective_seconds(kind, mesh, 0, 65536)


@pytest.mark.parametrize("preset", ["a100-80g", "h100"])
def test_r118_a_reduce_scatter_is_half_of_an_all_reduce(preset):
    """4 MB over 8 nodes of one rank: the halves make the whole, but for one start."""
    costs, mesh = costs_of(8, 1, preset), Mesh((8,))
    whole, scatter, gather = (
        costs.collective_seconds(kind, mesh, 0, 4 * MEGABYTE) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    start = costs.collective_seconds("reduce_scatter", mesh, 0, 1e-9)
    assert scatter < whole <= scatter + gather
    assert whole == pytest.approx(scatter + gather, abs=1.01 * start)
    assert start < 0.25 * whole


def test_r119_a_group_of_one_rank_per_node_pays_for_the_link_between_nodes():
    """(2, 8) on 2 nodes of 8: {0, 8}, {1, 9}, ... against {0, 1} of (8, 2)."""
    costs = costs_of(2, 8)
    across, inside = Mesh((2, 8)), Mesh((8, 2))
    assert across.groups(0)[:2] == ((0, 8), (1, 9)) and inside.groups(1)[0] == (0, 1)
    for kind in COLLECTIVES:
        for payload in (MEGABYTE, 256 * MEGABYTE, *((1, 1024, 65536) if kind == "all_reduce" else ())):
            between = costs.collective_seconds(kind, across, 0, payload)
            within = costs.collective_seconds(kind, inside, 1, payload)
            assert between > within


def test_r121_links_have_an_efficiency():
    """What programs see of a stated 300 GB/s: 80 % where nothing is measured; half of it takes twice as long."""
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=8)
    tier = dataclasses.replace(
        cluster.tiers[0],
        bandwidth_bytes_per_second=300e9,
        group_bandwidths=(),
        all_reduce_bandwidths=(),
        efficiency=0.8,
    )
    assert tier.bandwidth(8) == 240e9
    half = dataclasses.replace(tier, efficiency=0.4)
    seconds = [
        AnalyticCostModel(dataclasses.replace(cluster, tiers=(link, *cluster.tiers[1:]))).collective_seconds(
            "all_gather", Mesh((8,)), 0, 1e12
        )
        for link in (tier, half)
    ]
    assert seconds[0] == pytest.approx(7 / 8 * 1e12 / 240e9, rel=2e-3)
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=2e-3)


def test_r123_an_axis_over_a_slow_link_is_priced_at_the_slow_link():
    """2 nodes of 4: the inner axes of (2, 4) and (4, 2) stay in a node, the others and (8,) cross over."""
    costs = costs_of(2, 4)
    payload = 64 * MEGABYTE

    def seconds(shape, axis):
        return costs.collective_seconds("all_gather", Mesh(shape), axis, payload)

    slow = {"(4, 2) axis 0": seconds((4, 2), 0), "(8,)": seconds((8,), 0), "(2, 4) axis 0": seconds((2, 4), 0)}
    fast = {"(2, 4) axis 1": seconds((2, 4), 1), "(4, 2) axis 1": seconds((4, 2), 1)}
    assert max(fast.values()) < min(slow.values())
    assert Mesh((4, 2)).groups(0)[0] == (0, 2, 4, 6)
    slower = dataclasses.replace(
        costs.cluster,
        tiers=tuple(
            dataclasses.replace(
                tier, bandwidth_bytes_per_second=tier.bandwidth_bytes_per_second / 10, group_bandwidths=()
            )
            if tier.span is None
            else tier
            for tier in costs.cluster.tiers
        ),
    )
    crossing = AnalyticCostModel(slower)
    assert crossing.collective_seconds("all_gather", Mesh((4, 2)), 0, payload) > 5 * seconds((4, 2), 0)
    assert crossing.collective_seconds("all_gather", Mesh((2, 4)), 1, payload) == seconds((2, 4), 1)


def planned(shape, nodes, devices):
    builder = GraphBuilder("net")
    x, w = (builder.source(name, TensorType((256, 256), "f32")) for name in "xw")
    cluster = Cluster.preset("a100-80g", nodes=nodes, devices_per_node=devices)
    return auto_parallel(builder.finish([x @ w]), cluster, mesh=shape, time_limit=5)


def test_r121_reports_state_what_links_reach_beside_what_they_are_sold_as():
    """Of 300 GB/s inside a node an all-gather over 8 reaches about 80 %; text and JSON have both."""
    plan = planned((8,), 1, 8)
    (links,) = to_json(plan)["links"]
    assert links["tiers"] == ["nvlink"] and links["stated_bytes_per_second"] == 300e9
    assert 0.7 < links["reached_bytes_per_second"] / 300e9 < 0.85
    seconds = plan.costs.collective_seconds("all_gather", plan.mesh, 0, 2.0**30)
    assert links["reached_bytes_per_second"] == pytest.approx(7 / 8 * 2**30 / seconds)
    (line,) = [line.split() for line in report_text(plan).splitlines() if " nvlink " in line]
    assert line[:4] == ["x", "8", "nvlink", "300"]
    assert float(line[4]) == pytest.approx(links["reached_bytes_per_second"] / 1e9, rel=1e-3)


def test_r123_an_axis_over_two_kinds_of_links_is_warned_of():
    """2 nodes of 4: (2, 4) keeps the inner axis inside; the outer axis of (4, 2) meets inside and outside of nodes."""
    tidy, mixed, flat = planned((2, 4), 2, 4), planned((4, 2), 2, 4), planned((8,), 2, 4)
    assert [links.tiers for links in axis_links(tidy.mesh, tidy.cluster, tidy.costs)] == [("infiniband",), ("nvlink",)]
    assert "mixed links" not in str(tidy)
    outer, inner = axis_links(mixed.mesh, mixed.cluster, mixed.costs)
    assert outer.tiers == ("nvlink", "infiniband") and outer.mixed and inner.tiers == ("nvlink",)
    assert outer.reached_bytes_per_second < inner.reached_bytes_per_second / 3
    assert "mixed links: x meets over nvlink and infiniband: the slowest decides" in str(mixed)
    assert "mixed links" not in str(flat), "a mesh of one axis has no other order"
    assert axis_links(Mesh((1, 8)), tidy.cluster, tidy.costs)[0].axis == "y", "axes of one rank use no link"


@pytest.mark.parametrize(("heavy", "light"), [("tp", "dp"), ("dp", "tp")])
def test_r125_the_axis_with_the_traffic_gets_the_fast_links(heavy, light):
    """2 x 4 on 2 nodes of 4 devices: whichever axis moves most lies inside of the nodes as far as it can."""
    cluster = Cluster.preset("a100-80g", nodes=2, devices_per_node=4)
    traffic = [(heavy, "all_reduce", 64.0 * MEGABYTE)] * 8 + [(light, "all_reduce", MEGABYTE)]
    for sizes in ({"dp": 2, "tp": 4}, {"tp": 4, "dp": 2}, {"dp": 4, "tp": 2}):
        made = make_mesh(sizes, cluster, traffic)
        assert made.names == (light, heavy) and made == make_mesh(sizes, cluster, traffic)
        costs = AnalyticCostModel(cluster)

        def seconds(mesh, costs=costs):
            return sum(
                costs.collective_seconds(kind, mesh, mesh.names.index(axis), size) for axis, kind, size in traffic
            )

        orders = [Mesh(tuple(sizes[name] for name in names), names) for names in permutations(sizes)]
        assert seconds(made) == min(map(seconds, orders)) < max(map(seconds, orders))
    assert make_mesh({"b": 4, "a": 2}, cluster, []).names == ("b", "a"), "nothing to choose by: as it was asked for"
    with pytest.raises(MeshError, match="the traffic names the axis 'pp'; the mesh has 'dp', 'tp'"):
        make_mesh({"dp": 2, "tp": 4}, cluster, [("pp", "all_reduce", 1.0)])
    with pytest.raises(MeshError, match="choose sizes whose product is 8"):
        make_mesh({"dp": 2, "tp": 2}, cluster, [])
