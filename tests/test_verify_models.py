"""Every model family, sharded for real against the unsharded program: the found plan, and plans drawn at random.

`SBP_RANDOM_PLANS=20` draws more plans per family and mesh than the few of a normal run (`make verify-models`).
"""

import os

import pytest

from sbp.mesh import Mesh
from sbp.models import TINY, build
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.decisions import random_decisions
from sbp.planner.lowering import lower
from sbp.runtime.verify import verify
from sbp.training import inference, training_step

RANDOM_PLANS = int(os.environ.get("SBP_RANDOM_PLANS", "2"))
MESHES = ((2,), (4,), (2, 2), (3,), (2, 3))
BATCH = 6


def cluster_of(mesh: Mesh) -> Cluster:
    return Cluster.preset("a100-80g", nodes=1, devices_per_node=mesh.size)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", TINY)
def test_found_plan(name, shape, training):
    mesh = Mesh(shape)
    plan = auto_parallel(f"tiny-{name}", cluster_of(mesh), batch=BATCH, mesh=mesh, training=training)
    verification = plan.verify()
    assert verification.passed, verification


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", TINY)
def test_random_plans(name, shape, training):
    mesh, module = Mesh(shape), build(f"tiny-{name}")
    costs = AnalyticCostModel(cluster_of(mesh))
    boxing = BoxingTable(mesh, costs)
    graph = training_step(module, BATCH) if training else inference(module, BATCH)
    for seed in range(RANDOM_PLANS):
        decisions = random_decisions(graph, mesh, seed).check(graph, mesh)
        verification = verify(graph, lower(graph, mesh, decisions, costs, boxing), seed)
        assert verification.passed, (seed, str(verification))
