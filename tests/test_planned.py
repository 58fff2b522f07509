"""Verifying and running plans: which shapes, which batches, and what is refused before it starts."""

import itertools

import numpy
import pytest

from sbp.errors import PlanError
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.runtime.planned import batches_for, is_small, run_plan, verify_plan
from sbp.runtime.train import train_unsharded


def plan_of(model, **options):
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
    return auto_parallel(model, cluster, **{"batch": 8, "mesh": (4,), **options})


def test_large_plans_are_verified_scaled_down():
    plan = plan_of("gpt2", sequence=128)
    assert not is_small(plan.graph)
    verification = verify_plan(plan)
    assert verification.passed and verification.graph == "scaled gpt2"


def test_small_plans_are_verified_as_they_are():
    plan = plan_of("tiny-gpt2")
    assert is_small(plan.graph)
    assert verify_plan(plan).graph == "tiny-gpt2"


def test_a_large_graph_of_ones_own_cannot_be_scaled():
    plan = plan_of(plan_of("gpt2", sequence=128).graph, batch=None)
    with pytest.raises(PlanError, match="Plan.on"):
        verify_plan(plan)


@pytest.mark.parametrize("name", ["mlp", "dlrm", "resnet"])
def test_other_models_train_on_random_inputs(name):
    plan = plan_of(f"tiny-{name}", precision="f64")
    trained = run_plan(plan, 3)
    reference = train_unsharded(plan.graph, itertools.islice(batches_for(plan), 3), 3)
    numpy.testing.assert_allclose(trained.losses, reference.losses, rtol=1e-9)
    assert len(set(trained.losses)) == 3


def test_fifty_steps_of_a_small_gpt_equal_the_unsharded_run():
    from sbp.models import build

    model = build("gpt2", layers=2, heads=4, hidden=32, vocabulary=256, positions=32)
    for precision, tolerance in (("f64", 1e-5), ("f32", 1e-3)):
        plan = plan_of(model, sequence=32, precision=precision, mesh=(2, 2), pins={"tokens": "S(0), B"})
        assert plan.boxing
        trained = run_plan(plan, 50)
        reference = train_unsharded(plan.graph, itertools.islice(batches_for(plan), 50), 50)
        numpy.testing.assert_allclose(trained.losses, reference.losses, rtol=tolerance)
        assert trained.losses[-1] < trained.losses[0]


def test_what_is_refused():
    with pytest.raises(PlanError, match="inference"):
        run_plan(plan_of("tiny-mlp", training=False), 1)
    with pytest.raises(PlanError, match="this machine has"):
        run_plan(plan_of("gpt2-xl", batch=512), 1)
    with pytest.raises(PlanError, match="not a text"):
        run_plan(plan_of("tiny-mlp"), 1, text="x.txt")
    with pytest.raises(PlanError, match="too small for bytes"):
        run_plan(plan_of("tiny-gpt2"), 1)
