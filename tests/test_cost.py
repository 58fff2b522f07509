"""The cost model: laws as properties, hand-computed values, users' own models, and measured collectives."""

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.errors import ClusterError
from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster, Device, Tier, presets
from sbp.planner.collective import placement
from sbp.planner.cost import AnalyticCostModel, CheckedCostModel, CostModel, as_cost_model

MEASURED = Path(__file__).parents[2] / "shared" / "published_runs" / "collectives.csv"

DEVICE = Device("Chip", {"f32": 1e13, "bf16": 1e14}, 2**34, 1e12, 0.5, 1e-6)
BUS = Tier("bus", 4, 1e-5, 1e11, 0.5, hop_seconds=1e-6)
NET = Tier("net", None, 2e-5, 1e10, 1.0, hop_seconds=3e-6)
LAB = Cluster("lab", DEVICE, 4, 4, (BUS, NET))


def seconds(kind, mesh, axis, payload, cluster=LAB):
    return AnalyticCostModel(cluster).collective_seconds(kind, Mesh(mesh), axis, payload)


# Compute


def test_compute_is_a_roofline_with_one_launch():
    model = AnalyticCostModel(LAB)
    assert model.compute_seconds("matmul", 1e12, 8.0, "bf16") == pytest.approx(1e12 / (1e14 * 0.5) + 1e-6)
    assert model.compute_seconds("matmul", 1e12, 8.0, "f32") == pytest.approx(1e12 / (1e13 * 0.5) + 1e-6)
    assert model.compute_seconds("relu", 10.0, 1e9, "bf16") == pytest.approx(1e9 / 1e12 + 1e-6)


def test_views_and_nothing_are_free():
    assert AnalyticCostModel(LAB).compute_seconds("reshape", 5.0, 100.0, "f32") == 0.0
    assert AnalyticCostModel(LAB).compute_seconds("add", 0.0, 0.0, "f32") == 0.0
    assert AnalyticCostModel(LAB, views={"add"}).compute_seconds("add", 1.0, 1.0, "f32") == 0.0
    assert AnalyticCostModel(LAB, views=()).compute_seconds("reshape", 0.0, 100.0, "f32") > 0.0


@given(
    st.sampled_from(presets()),
    st.floats(0, 1e18),
    st.floats(0, 1e12),
    st.floats(1, 4),
    st.sampled_from(["f64", "f32", "bf16", "f16", "i64", "bool"]),
)
def test_compute_is_monotone_finite_and_never_above_the_roofline(name, flops, moved, more, dtype):
    model = AnalyticCostModel(Cluster.preset(name)) if name not in MODELS else MODELS[name]
    here = model.compute_seconds("op", flops, moved, dtype)
    assert 0.0 <= here < math.inf
    assert here <= model.compute_seconds("op", flops * more, moved, dtype)
    assert here <= model.compute_seconds("op", flops, moved * more, dtype)
    device = model.cluster.device
    assert here >= max(flops / device.peak(dtype), moved / device.memory_bandwidth_bytes_per_second) * (1 - 1e-12)


MODELS = {name: AnalyticCostModel(Cluster.preset(name, nodes=4)) for name in ("a100-80g", "v100-16g", "h100", "cpu")}


# Where groups meet


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ((0, 1, 2, 3), [("bus", 4, 4)]),
        ((4, 6), [("bus", 2, 2)]),
        ((3, 4), [("net", 2, 2)]),
        ((0, 4, 8, 12), [("net", 4, 4)]),
        (tuple(range(16)), [("bus", 4, 4), ("net", 4, 4)]),
        ((0, 2, 4, 6), [("bus", 2, 2), ("net", 2, 2)]),
        ((0, 1, 2, 3, 4), [("bus", 4, 1), ("net", 2, 2)]),
        ((5,), []),
    ],
)
def test_meetings(group, expected):
    assert [(m.tier.name, m.most, m.fewest) for m in placement(LAB, group).meetings] == expected


def test_meetings_over_three_tiers():
    rack = Tier("rack", 8, 0.0, 1e10)
    cluster = Cluster("lab", DEVICE, 6, 4, (BUS, rack, NET))
    assert [(m.tier.name, m.most, m.fewest) for m in placement(cluster, range(24)).meetings] == [
        ("bus", 4, 4),
        ("rack", 2, 2),
        ("net", 3, 3),
    ]
    assert [(m.tier.name, m.most, m.fewest) for m in placement(cluster, (0, 8, 16)).meetings] == [("net", 3, 3)]
    # Six nodes are one and a half blocks of 16 ranks: blocks that are not full are still connected by the last tier.
    pod = Cluster("lab", DEVICE, 6, 4, (BUS, Tier("pod", 16, 0.0, 1e10), NET))
    assert [(m.tier.name, m.most, m.fewest) for m in placement(pod, (0, 20)).meetings] == [("net", 2, 2)]


# Collectives by hand


def test_group_inside_a_node():
    payload = 1e8
    wire = 3 / 4 * payload / 5e10
    assert seconds("all_gather", (4, 4), 1, payload) == pytest.approx(1e-5 + 2e-6 + wire)
    assert seconds("reduce_scatter", (4, 4), 1, payload) == pytest.approx(1e-5 + 2e-6 + wire)
    assert seconds("all_to_all", (4, 4), 1, payload) == pytest.approx(1e-5 + 2e-6 + wire)
    assert seconds("all_reduce", (4, 4), 1, payload) == pytest.approx(1e-5 + 4e-6 + 2 * wire)


def test_group_with_one_member_per_node_has_a_nic_of_its_own():
    payload = 1e8
    assert seconds("all_gather", (4, 4), 0, payload) == pytest.approx(2e-5 + 6e-6 + 3 / 4 * payload / 1e10)


def test_group_over_nodes_uses_all_nics():
    # 16 ranks: 15/16 of the payload go round, a quarter of that over each of a node's four NICs (4 * 1e10 < 5e10).
    payload = 1e8
    latency = (1e-5 + 2e-6) + (2e-5 + 6e-6)
    assert seconds("all_gather", (16,), 0, payload) == pytest.approx(latency + 15 / 16 * payload / 4 / 1e10)
    fast = replace(LAB, tiers=(BUS, replace(NET, bandwidth_bytes_per_second=1e11)))
    assert seconds("all_gather", (16,), 0, payload, fast) == pytest.approx(latency + 15 / 16 * payload / 5e10)
    # All-to-all: 3/16 to the node's others, 12/16 to other nodes over one's own NIC.
    assert seconds("all_to_all", (16,), 0, payload) == pytest.approx(latency + 12 / 16 * payload / 1e10)


def test_square_root_term():
    ramp = replace(LAB, tiers=(replace(BUS, ramp_seconds_per_sqrt_byte=1e-8), NET))
    extra = seconds("all_gather", (4, 4), 1, 1e8, ramp) - seconds("all_gather", (4, 4), 1, 1e8)
    assert extra == pytest.approx(3 / 4 * 1e4 * 1e-8)


def test_the_worst_placed_group_decides():
    # Groups of two neighbours on a mesh of three pairs in nodes of three: (2, 3) crosses nodes, the others do not.
    three = Cluster("lab", DEVICE, 2, 3, (replace(BUS, span=3), NET))
    assert seconds("all_gather", (3, 2), 1, 1e6, three) == pytest.approx(2e-5 + 3e-6 + 0.5e6 / 1e10)
    assert seconds("all_gather", (2,), 0, 1e6, three) == pytest.approx(1e-5 + 1e-6 + 0.5e6 / 5e10)


def test_uneven_groups_are_priced_by_their_thinnest_node():
    # Five consecutive ranks: one of them alone in its node, so the whole ring goes through one NIC.
    latency = (1e-5 + 2e-6) + (2e-5 + 3e-6)
    assert seconds("all_gather", (5,), 0, 1e8) == pytest.approx(latency + 4 / 5 * 1e8 / 1e10)
    assert seconds("all_to_all", (5,), 0, 1e8) == pytest.approx(latency + 4 / 5 * 1e8 / 1e10)


def test_local_steps_cost_memory_traffic():
    assert seconds("slice", (4, 4), 0, 1e9) == pytest.approx(1e-6 + 2 / 4 * 1e9 / 1e12)
    assert seconds("fill", (4, 4), 0, 1e9) == pytest.approx(1e-6 + 1e9 / 1e12)
    assert seconds("pad", (4, 4), 0, 1e9) == pytest.approx(1e-6 + 1.25 * 1e9 / 1e12)


# Errors


def test_bad_questions():
    model = AnalyticCostModel(LAB)
    with pytest.raises(ClusterError, match="no boxing step is called 'gather'.*all_reduce"):
        model.collective_seconds("gather", Mesh((4,)), 0, 1.0)
    with pytest.raises(ClusterError, match="has no axis 1"):
        model.collective_seconds("all_reduce", Mesh((4,)), 1, 1.0)
    with pytest.raises(ClusterError, match=r"mesh\(x=17\) has 17 ranks, but the cluster lab .* has 16"):
        model.collective_seconds("all_reduce", Mesh((17,)), 0, 1.0)


class Constant:
    def __init__(self, answer):
        self.answer = answer

    def compute_seconds(self, op, flops, bytes, dtype):
        return self.answer

    def collective_seconds(self, kind, mesh, axis, bytes):
        return self.answer


@pytest.mark.parametrize("answer", [math.nan, math.inf, -math.inf, -1e-9, None, "fast", [1.0], 1j])
def test_a_users_model_is_checked(answer):
    model = as_cost_model(Constant(answer))
    with pytest.raises(ClusterError, match=r"Constant\.compute_seconds\('matmul', 2\.0, 8\.0, 'f32'\) returned"):
        model.compute_seconds("matmul", 2.0, 8.0, "f32")
    with pytest.raises(ClusterError, match=r"Constant\.collective_seconds\('all_reduce', mesh\(dp=2\), 0, 64\.0\)"):
        model.collective_seconds("all_reduce", Mesh((2,), ("dp",)), 0, 64.0)


def test_a_users_model_that_answers_well_is_used():
    model = as_cost_model(Constant(np.float32(0.5)))
    assert model.compute_seconds("matmul", 2.0, 8.0, "f32") == 0.5
    assert type(model.compute_seconds("matmul", 2.0, 8.0, "f32")) is float
    assert as_cost_model(model) is model and isinstance(model, CostModel) and isinstance(model, CheckedCostModel)


def test_as_cost_model():
    assert as_cost_model(LAB).collective_seconds("all_gather", Mesh((4, 4)), 1, 1e8) == seconds(
        "all_gather", (4, 4), 1, 1e8
    )
    analytic = AnalyticCostModel(LAB)
    assert as_cost_model(analytic) is analytic and isinstance(analytic, CostModel)
    with pytest.raises(
        ClusterError, match="float is no cost model: it lacks the method compute_seconds and collective_seconds"
    ):
        as_cost_model(1.0)


# Measurements


def test_measured_collectives():
    """Bounds on what `benchmarks/collectives.py` prints, from the presets and from constants fitted to other points."""
    if not MEASURED.is_file():
        pytest.skip(f"the table of measured collectives is not at {MEASURED}")
    path = Path(__file__).parents[1] / "benchmarks" / "collectives.py"
    spec = importlib.util.spec_from_file_location("benchmark_collectives", path)
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = benchmark  # dataclasses look their module up
    spec.loader.exec_module(benchmark)
    points = benchmark.compare(MEASURED)
    assert len(points) > 400
    bounds = {
        "A100-80G-SXM": 0.07,
        "V100-SXM2": 0.05,
        "H200-141G-SXM": 0.03,
        "B200-SXM": 0.09,
        "MI300X": 0.01,
        "MI200(GCD)": 0.065,
    }
    for gpu, bound in bounds.items():
        assert mean(abs(point.error) for point in points if point.measured.gpu == gpu) < bound, gpu
    assert mean(abs(point.error) for point in points) < 0.065
    assert mean(abs(point.error) for point in benchmark.held_out(MEASURED)) < 0.07
