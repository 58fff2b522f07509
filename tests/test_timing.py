"""The timeline of a physical plan: the simulator against the rule that it stands for, and its accounts."""

import numpy as np
import pytest
from hand_plans import mlp
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.mesh import Mesh
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.decisions import random_decisions
from sbp.planner.lowering import lower
from sbp.planner.memory import memory_profile
from sbp.planner.physical import COLLECTIVES, Box
from sbp.planner.pipeline import COMPUTE
from sbp.planner.timing import links_of, pipeline_of, predict_timeline

GRAPH = mlp(batch=512, features=(768, 1024, 512))
CLUSTER = Cluster.preset("a100-80g", nodes=2)
MESHES = (Mesh((1,), ("dp",)), Mesh((8,), ("dp",)), Mesh((2, 8), ("dp", "tp")), Mesh((2, 4), ("dp", "tp")))


few = settings(max_examples=30)


def plan(mesh, seed, cluster=CLUSTER):
    model = AnalyticCostModel(cluster)
    return lower(GRAPH, mesh, random_decisions(GRAPH, mesh, seed), model, BoxingTable(mesh, model))


def in_program_order(physical):
    """An operation starts when its inputs are there and its stream is free."""
    ready, free, found = {}, {}, []
    for operation in physical.operations:
        moves = isinstance(operation, Box) and operation.kind in COLLECTIVES
        stream = physical.mesh.names[operation.mesh_axis] if moves else COMPUTE
        start = max([free.get(stream, 0.0), *(ready.get(number, 0.0) for number in operation.inputs)])
        free[stream] = start + operation.seconds
        ready.update(dict.fromkeys(operation.outputs, free[stream]))
        found.append((start, free[stream], stream))
    return found


@few
@given(st.sampled_from(MESHES), st.integers(0, 10**6))
def test_operations_start_when_inputs_and_stream_allow(mesh, seed):
    physical = plan(mesh, seed)
    timeline = predict_timeline(physical)
    assert list(zip(timeline.start, timeline.stop, timeline.streams)) == in_program_order(physical)
    compute = sum(o.seconds for o, stream in zip(physical.operations, timeline.streams) if stream == COMPUTE)
    assert timeline.busy_seconds(COMPUTE) == pytest.approx(compute)
    assert timeline.exposed_seconds == pytest.approx(timeline.step_seconds - compute, abs=1e-12)
    assert sum(timeline.exposed_by_axis.values()) == pytest.approx(timeline.exposed_seconds, abs=1e-12)
    assert timeline.busy_seconds("no such axis") == 0.0


@few
@given(st.integers(0, 10**6))
def test_axes_on_one_link_slow_each_other_down(seed):
    """Two axes inside one node use the same link: never faster than apart, never slower than one after the other."""
    mesh = MESHES[3]
    physical, links = plan(mesh, seed), links_of(mesh, CLUSTER)
    assert len(set(links.values())) == 1
    apart, shared = predict_timeline(physical), predict_timeline(physical, links)
    total = sum(operation.seconds for operation in physical.operations)
    assert apart.step_seconds <= shared.step_seconds * (1 + 1e-12) <= total * (1 + 1e-9)


def test_sharing_a_link_is_seen_at_all():
    mesh = MESHES[3]
    links = links_of(mesh, CLUSTER)
    pairs = ((predict_timeline(plan(mesh, seed)), predict_timeline(plan(mesh, seed), links)) for seed in range(40))
    assert any(shared.step_seconds > apart.step_seconds * (1 + 1e-6) for apart, shared in pairs)


@few
@given(st.integers(0, 10**6))
def test_slower_kernels_beside_communication_lengthen_the_step(seed):
    physical = plan(MESHES[2], seed)
    plain, slowed = predict_timeline(physical), predict_timeline(physical, compute_slowdown=0.189)
    assert plain.step_seconds <= slowed.step_seconds * (1 + 1e-12)
    assert slowed.exposed_seconds == pytest.approx(slowed.step_seconds - plain.busy_seconds(COMPUTE), abs=1e-12)


@few
@given(st.integers(0, 10**6))
def test_memory_over_time_is_the_plans_where_nothing_overlaps(seed):
    """With one rank all is on one stream: the peak of the memory profile, and what is left at the end."""
    physical = plan(MESHES[0], seed)
    timeline, profile = predict_timeline(physical), memory_profile(physical)
    assert timeline.step.peak_bytes == (profile.peak_bytes,)
    times, held = timeline.step.memory[0]
    assert (np.diff(times) >= 0).all() and held[0] <= profile.peak_bytes


@few
@given(st.sampled_from(MESHES), st.integers(0, 10**6))
def test_memory_is_never_below_what_state_takes(mesh, seed):
    physical = plan(mesh, seed)
    step = predict_timeline(physical).step
    pipeline = pipeline_of(physical)
    (segment,) = pipeline.segments.values()
    state = sum(physical.registers[number].bytes for number in physical.sources.values())
    assert pipeline.resident_bytes == (state,)
    assert step.peak_bytes[0] >= state
    left = state + sum(task.allocates - task.frees for task in segment.tasks)
    assert step.memory[0][1][-1] == left


def test_the_links_of_axes():
    inner, outer = (tier.name for tier in CLUSTER.tiers[:2])
    assert links_of(Mesh((2, 8), ("dp", "tp")), CLUSTER) == {"dp": outer, "tp": inner}
    assert links_of(Mesh((16,), ("dp",)), CLUSTER) == {"dp": outer}
    assert links_of(Mesh((4, 4), ("dp", "tp")), CLUSTER) == {"dp": outer, "tp": inner}
    assert links_of(Mesh((1, 4), ("dp", "tp")), CLUSTER) == {"tp": inner}


def test_a_plan_without_operations():
    physical = plan(MESHES[0], 0)
    empty = type(physical)(physical.mesh, physical.registers, (), physical.sources, {}, {})
    timeline = predict_timeline(empty)
    assert timeline.step_seconds == 0.0 and timeline.exposed_seconds == 0.0 and timeline.streams == ()
