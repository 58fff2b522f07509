"""Training with a plan: the same losses and the same state as unsharded."""

import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import mlp, random_plan

from sbp.comm.inprocess import InProcessCommunicator
from sbp.errors import PlanError
from sbp.mesh import Mesh
from sbp.runtime.train import train, train_unsharded


def batches(count, graph, dtype="f8"):
    random = numpy.random.default_rng(5)
    for _ in range(count):
        yield {name: random.standard_normal(graph.values[name].shape).astype(dtype) for name in graph.inputs}


@pytest.mark.parametrize("shape, seed", [((2,), 1), ((4,), 2), ((2, 2), 3), ((2, 3), 4)])
def test_losses_equal_the_unsharded_run(shape, seed):
    graph = mlp()
    plan = random_plan(graph, Mesh(shape), seed)
    found = train(graph, plan, batches(30, graph), 30, floating="f64")
    expected = train_unsharded(graph, batches(30, graph), 30, floating="f64")
    numpy.testing.assert_allclose(found.losses, expected.losses, rtol=1e-9)
    assert set(found.state) == set(graph.state) and found.state["step"] == 30
    for name, array in found.state.items():
        numpy.testing.assert_allclose(array, expected.state[name], rtol=1e-7, atol=1e-10, err_msg=name)


def test_loss_falls_and_progress_is_told():
    graph = mlp()
    batch = next(batches(1, graph))
    seen = []
    found = train(graph, random_plan(graph, Mesh((2,)), 1), [batch] * 40, 40, progress=lambda *each: seen.append(each))
    assert seen == list(enumerate(found.losses)) and len(seen) == 40
    assert found.losses[-1] < 0.5 * found.losses[0]


def test_continues_from_a_checkpoint():
    graph, mesh = mlp(), Mesh((2, 2))
    given = list(batches(8, graph))
    plan, other = (random_plan(graph, mesh, seed) for seed in (1, 2))
    whole = train(graph, plan, given, 8, floating="f64")
    first = train(graph, plan, given[:5], 5, floating="f64")
    rest = train(graph, other, given[5:], 3, floating="f64", state=first.state, communicator=InProcessCommunicator(4))
    numpy.testing.assert_allclose((*first.losses, *rest.losses), whole.losses, rtol=1e-9)


def test_seed_decides_the_start():
    graph = mlp()
    plan = random_plan(graph, Mesh((2,)), 1)
    one, same, other = (train(graph, plan, batches(1, graph), 1, seed=seed).losses for seed in (1, 1, 2))
    assert one == same != other


def test_errors():
    graph = mlp()
    plan = random_plan(graph, Mesh((2,)), 1)
    with pytest.raises(PlanError, match="ended after 2 of 3 steps"):
        train(graph, plan, batches(2, graph), 3)
    with pytest.raises(PlanError, match="batch 0 lacks the input y of graph mlp"):
        train(graph, plan, [{"x": numpy.ones((6, 5))}], 1)
    with pytest.raises(PlanError, match=r"'relu' is not; its outputs are mean: f32\[\]"):
        train(graph, plan, batches(1, graph), 1, loss="relu")
    with pytest.raises(PlanError, match="has no state z"):
        train(graph, plan, batches(1, graph), 1, state={"z": 1})
