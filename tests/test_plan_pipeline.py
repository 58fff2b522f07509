"""Plans cut into stages and simulated: what the stages do together is what the plan does, on the links they have."""

import json

import pytest

from sbp.cli.main import run
from sbp.errors import PipelineError
from sbp.models import build
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.collective import transfers_seconds
from sbp.planner.pipeline import COMPUTE, P2P, uniform_pipeline
from sbp.planner.pipeline_file import save_pipeline
from sbp.planner.places import ONCE
from sbp.planner.plan_pipeline import plan_pipeline
from sbp.planner.simulator import simulate
from sbp.planner.stages import cut


@pytest.fixture(scope="module")
def plan():
    model = build("gpt2", layers=4, heads=4, hidden=128, vocabulary=256, positions=64)
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
    return auto_parallel(model, cluster, batch=8, sequence=64, mesh="dp=2,tp=2", pins={"h.*.weight": "B, B"})


def test_one_stage_and_one_micro_batch_are_the_plan(plan):
    step = simulate(plan_pipeline(plan.physical, plan.cluster), "gpipe")
    assert step.step_seconds == plan.cost.step_seconds
    assert step.exposed_communication_seconds == plan.cost.exposed_seconds
    assert step.peak_bytes == plan.timeline.step.peak_bytes


@pytest.mark.parametrize(
    ("stages", "chunks", "name"), [(1, 1, "1f1b"), (2, 1, "1f1b"), (4, 1, "gpipe"), (2, 2, "interleaved")]
)
def test_the_stages_do_what_the_plan_does(plan, stages, chunks, name):
    count = 6
    pipeline = plan_pipeline(plan.physical, plan.cluster, stages, chunks, count)
    step = simulate(pipeline, name)
    staged = cut(plan.physical, stages, chunks)
    expected = {"once": 0.0, "often": 0.0}
    for operation, (_, phase) in zip(staged.physical.operations, staged.places):
        expected["once" if phase == ONCE else "often"] += operation.seconds
    per_micro_batch = sum(task.seconds for segment in pipeline.segments.values() for task in segment.tasks)
    assert per_micro_batch == pytest.approx(expected["often"])
    assert sum(task.seconds for segment in pipeline.after for task in segment.tasks) == pytest.approx(expected["once"])
    assert len(step.runs) == stages * chunks * count * 2 + stages
    assert step.step_seconds >= (count * per_micro_batch) / stages / len(step.streams)
    assert (P2P in step.streams) == (stages > 1)


def test_stages_lie_behind_each_other_and_nodes_are_added(plan):
    inside = plan_pipeline(plan.physical, Cluster.preset("a100-80g", nodes=1), 2, 1, 4)
    outside = plan_pipeline(plan.physical, plan.cluster, 2, 1, 4)
    inner, outer = (tier.name for tier in plan.cluster.tiers[:2])
    assert (inside.links[P2P], outside.links[P2P]) == (inner, outer)
    size = outside.segments[0, "forward"].sends_bytes
    assert size > 0 and outside.segments[0, "forward"].sends_seconds == transfers_seconds(
        plan.cluster.with_nodes(2), [(rank, rank + 4) for rank in range(4)], size
    )
    assert inside.segments[0, "forward"].sends_seconds < outside.segments[0, "forward"].sends_seconds
    assert outside.compute_slowdown == plan.cluster.device.overlap_slowdown > 0


def test_more_stages_than_layers(plan):
    with pytest.raises(PipelineError, match="layers"):
        plan_pipeline(plan.physical, plan.cluster, 8, 1, 4)


def test_simulate_cuts_plans(plan, tmp_path, capsys):
    plan.save(tmp_path / "plan.json")
    cut = ["simulate", str(tmp_path / "plan.json"), "--stages", "2", "--micro-batches", "8", "--json"]
    assert run([*cut, "--schedule", "1f1b", "--schedule", "interleaved:2", "--schedule", "gpipe"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(item["schedule"], item["chunks"]) for item in found] == [("1f1b", 1), ("interleaved", 2), ("gpipe", 1)]
    assert all(item["stages"] == 2 and item["micro_batches"] == 8 for item in found)
    assert max(found[0]["peak_bytes"]) < max(found[2]["peak_bytes"])
    assert all(set(item["breakdown_seconds"]) >= {COMPUTE, P2P, "bubble"} for item in found)
    assert run([*cut, "--schedule", "zero-bubble", "--schedule", "1f1b"]) == 0
    zero_bubble, plain = json.loads(capsys.readouterr().out)
    assert zero_bubble["schedule"] == "zero-bubble"
    assert zero_bubble["breakdown_seconds"]["bubble"] < plain["breakdown_seconds"]["bubble"]
    save_pipeline(uniform_pipeline(2, 2, 1.0, 1.0), tmp_path / "pipeline.json")
    assert run(["simulate", str(tmp_path / "pipeline.json"), "--stages", "2"]) == 2
    assert "--stages cuts a plan" in capsys.readouterr().err
