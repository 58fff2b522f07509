"""Reports of users of other systems: plans saved, loaded for other sizes or machines, printed; and what imports need.

Each test names its report.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import sbp
from sbp import nn
from sbp.cli.main import run as command
from sbp.comm.inprocess import InProcessCommunicator
from sbp.errors import MeshError, PlanError
from sbp.graph import Initial
from sbp.operator import TensorType
from sbp.optim import SGD
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.plan import Plan
from sbp.planner.solver import Status
from sbp.runtime.executor import Executor
from sbp.training import training_step

ROOT = Path(__file__).parent.parent
FOUR = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x, targets):
        return nn.MSELoss()(self.down(self.up(x)), targets)

    def example_inputs(self, batch, sequence=None):
        kind = TensorType((batch, sequence, 64), "f32")
        return {"x": (kind, Initial()), "targets": (kind, Initial())}


def step(sequence):
    return training_step(Net(), 4, sequence, optimizer=SGD(lr=0.1), precision="f32", name=f"net of {sequence}")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A plan for sequences of 32, tensor parallel along the hidden dimension, in a file."""
    pins = {"up.linear": "S(2)", "down.linear": "P", "x": "B", "targets": "B"}
    plan = auto_parallel(step(32), FOUR, mesh=(4,), pins=pins)
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.save(path)
    return path


def test_r162_a_plan_for_other_sizes_is_priced_anew(saved):
    """Sequences of 8 instead of 32: layouts stay, activations move a quarter, proofs are not taken over."""
    plan = Plan.load(saved)
    small = plan.on(step(8))
    assert small.layouts == plan.layouts
    large_steps, small_steps = plan.boxing, small.boxing
    assert [(s.value, s.kind) for s in small_steps] == [(s.value, s.kind) for s in large_steps]
    activations = [
        (large, little) for large, little in zip(large_steps, small_steps) if 32 in plan.graph.values[large.value].shape
    ]
    assert activations and any(large.kind in ("all_reduce", "reduce_scatter") for large, _ in activations)
    for large, little in activations:
        assert little.bytes * 4 == large.bytes and little.seconds <= large.seconds
    assert small.objective_seconds < plan.objective_seconds
    assert small.cost.flops < 0.3 * plan.cost.flops
    assert small.memory.by_kind["parameter"] == plan.memory.by_kind["parameter"]
    assert plan.status is Status.OPTIMAL
    assert small.status is Status.FEASIBLE and small.lower_bound_seconds == 0 and small.gap == 1.0
    assert "net of 32" in small.reason and small.tried == () and small.memory_limit is None
    assert small.verify().passed


def test_r162_other_sizes_keep_no_proof_in_files(saved, tmp_path):
    small = Plan.load(saved).on(step(8))
    small.save(tmp_path / "small.json")
    again = Plan.load(tmp_path / "small.json")
    assert again.status is Status.FEASIBLE and again.to_json() == small.to_json()
    assert "nothing is proven for these sizes" in again.reason


def test_r163_a_plan_is_not_applied_to_another_mesh(saved):
    plan = Plan.load(saved)
    with pytest.raises(PlanError, match=r"the plan is for mesh\(x=4\) with 4 ranks, the communicator has 1"):
        Executor(plan.physical, communicator=InProcessCommunicator(1))
    with pytest.raises(PlanError, match=r"4 ranks, the communicator has 2"):
        plan.run(steps=1, communicator=InProcessCommunicator(2))
    data = json.loads(saved.read_text())
    data["mesh"]["shape"] = [1]
    with pytest.raises(MeshError, match=r"mesh\(x=1\) has 1 rank, but .* = 4"):
        Plan.from_json(data)
    data["cluster"]["nodes"], data["cluster"]["devices_per_node"] = 1, 1
    with pytest.raises(PlanError, match="objective_seconds is .* but the plan of the file costs"):
        Plan.from_json(data)
    del data["objective_seconds"]
    data["lower_bound_seconds"], data["status"] = 0.0, "feasible"
    loaded = Plan.from_json(data)  # a file edited to one rank throughout is a plan for one rank, and says so
    assert loaded.mesh.size == 1 and loaded.verify().passed


def test_r163_a_plan_is_not_applied_to_another_program(saved):
    other = training_step(Net(), 4, 32, optimizer=sbp.optim.Adam(), precision="f32")
    with pytest.raises(PlanError):
        Plan.load(saved).on(other)


def test_r155_r158_a_printed_plan_says_where_things_lie_and_what_moves(saved, capsys):
    plan = Plan.load(saved)
    text = str(plan)
    assert "mesh(x=4)" in text and "Layouts on" in text and "Memory per device" in text
    assert command(["report", str(saved)]) == 0
    whole = capsys.readouterr().out
    for name in ("up.weight", "down.weight"):
        assert name in whole
    kinds = {boxing.kind for boxing in plan.boxing if boxing.kind not in ("slice", "fill", "pad")}
    assert kinds and all(kind in whole or kind.replace("_", "-") in whole for kind in kinds)
    assert command(["report", str(saved), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layouts"] == {name: str(layout) for name, layout in plan.layouts.items()}
    assert data["objective_seconds"] == plan.objective_seconds
    moved = {(item["value"], item["kind"]): item["bytes"] for item in data["boxing"]}
    assert set(moved) <= {(boxing.value, boxing.kind) for boxing in plan.boxing}
    assert moved and all(size > 0 for size in moved.values())


def test_r155_every_field_of_a_plan_file_is_documented(tmp_path):
    """The list has what a file has, no less and no more."""
    from sbp.planner.plan_fields import FIELDS, describe

    by_name, plain = {"pins", "sources", "signatures", "outputs", "kept"}, {"graph.updates", "model.optimizer"}
    plain |= {"cluster", "model.config", "arena", "tried[].mesh", "graph.nodes[].attributes"}
    found = set()

    def walk(value, path):
        if path:
            found.add(path.removesuffix("[]"))
        if path in plain or path in {f"{name}.*" for name in by_name}:
            return
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}.*" if path in by_name else f"{path}.{key}".lstrip("."))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for item in value:
                walk(item, f"{path}[]")

    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)
    auto_parallel(
        "tiny-gpt2", cluster, batch=8, mesh=(2, 2), pins={"h.0.mlp.fc.weight": "S(0), B"}, memory_limit=10**8
    ).save(tmp_path / "plan.json", offsets=True)
    walk(json.loads((tmp_path / "plan.json").read_text()), "")
    assert found == set(FIELDS), found ^ set(FIELDS)
    assert len(describe().splitlines()) == len(FIELDS)
    assert all(len(says.split()) >= 1 for says in FIELDS.values())


def test_r166_r142_planning_needs_no_gpu_and_no_gpu_library(tmp_path):
    """4 nodes of 8 from a file, where CuPy and mpi4py cannot even be imported."""
    path = tmp_path / "cluster.yaml"
    Cluster.preset("h100", nodes=4, devices_per_node=8).save(path)
    script = f"""
import sys
for name in ("cupy", "cuda", "mpi4py", "torch", "plotly"):
    sys.modules[name] = None
import sbp
plan = sbp.auto_parallel("tiny-gpt2", {str(path)!r}, batch=32, mesh=(4, 8))
print(plan.mesh.size, plan.cluster.nodes, plan.status.value)
x = sbp.randn((4, 4), "S(0)", 2)
print((x @ x).shape)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[0].startswith("32 4 ") and "(4, 4)" in run.stdout


def test_r142_what_is_missing_is_named_with_the_line_that_installs_it(monkeypatch):
    from sbp.comm.interface import CommunicationError
    from sbp.comm.nccl import NCCLCommunicator

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CommunicationError, match=r"pip install 'sbp\[cuda\]'"):
        NCCLCommunicator()


# -- checkpoints -------------------------------------------------------------------------------------------------------


def held(tensor):
    return [tensor.to_local(rank) for rank in range(tensor.mesh.size)]


def test_r088_empty_shards_are_saved_and_loaded(tmp_path):
    """6 elements over 4 ranks: the fourth holds none, and there is no file of it to miss."""
    x = sbp.arange(6, layout="S(0)", mesh=4)
    pieces = held(x)
    assert [len(piece) for piece in pieces] == [2, 2, 2, 0]
    sbp.save(tmp_path, {"x": x})
    again = sbp.load(tmp_path, "S(0)", 4)["x"]
    assert [piece.tolist() for piece in held(again)] == [[0, 1], [2, 3], [4, 5], []] and again.dtype == "i64"
    again = sbp.from_local(pieces, "S(0)", 4)
    assert again.shape == (6,) and again.numpy().tolist() == list(range(6))
    with pytest.raises(sbp.errors.LayoutError, match=r"ranks \[0, 1, 2\], but this process holds \[0, 1, 2, 3\]"):
        sbp.from_local(pieces[:3], "S(0)", 4)


@pytest.mark.parametrize("ranks", [1, 4, 3, 16])
def test_r089_state_saved_on_two_ranks_is_loaded_on_others(ranks, tmp_path):
    array = numpy.random.default_rng(0).standard_normal((8, 3))
    two = sbp.from_numpy(array, "S(0)", 2)
    sbp.save(tmp_path, {"w": two})
    other = sbp.load(tmp_path, "S(0)", ranks)["w"]
    numpy.testing.assert_array_equal(other.numpy(), array)
    assert [len(piece) for piece in held(other)] == [
        max(0, min(-(-8 // ranks), 8 - at * -(-8 // ranks))) for at in range(ranks)
    ]
    if ranks != 2:
        with pytest.raises(sbp.errors.LayoutError, match=r"rank 0 .*\[4, 3\], expected \[.*, 3\]|this process holds"):
            sbp.from_local(held(two), "S(0)", ranks, (8, 3))


def test_r089_a_checkpoint_of_another_model_is_named():
    from sbp.runtime.train import train

    graph = step(8)
    plan = auto_parallel(graph, FOUR, mesh=(4,))
    with pytest.raises(PlanError, match="no state up.wait; the checkpoint is of another model"):
        train(graph, plan.physical, [], 0, state={"up.wait": numpy.zeros((128, 64))})
    with pytest.raises(PlanError, match=r"up.weight is f32\[128,64\], but was given an array of shape \[64, 64\]"):
        train(graph, plan.physical, [], 0, state={"up.weight": numpy.zeros((64, 64))})


def test_r090_rows_are_saved_by_their_place_in_the_tensor(tmp_path):
    """[gate; up] of 16 rows on 4 ranks by halves, as two tensors: on 2 ranks, rows come back 0 to 15."""
    rows = numpy.arange(16.0)[:, None] * numpy.ones((1, 2))
    weight = sbp.from_numpy(rows, "S(0)", 4)
    gate, up = sbp.ops.library.split(weight, sizes=(8, 8))
    per_rank = [numpy.concatenate(pair) for pair in zip(held(gate.to_layout("S(0)")), held(up.to_layout("S(0)")))]
    assert per_rank[1][:, 0].tolist() == [2, 3, 10, 11]
    with pytest.raises(AssertionError):  # taken for a split of the whole, the halves would be interleaved
        numpy.testing.assert_array_equal(sbp.from_local(per_rank, "S(0)", 4).numpy(), rows)
    halves = [
        sbp.from_local([piece[part] for piece in per_rank], "S(0)", 4).numpy() for part in (slice(0, 2), slice(2, 4))
    ]
    joined = sbp.from_numpy(numpy.concatenate(halves), "S(0)", 2)
    assert joined.numpy()[:, 0].tolist() == list(range(16))
    sbp.save(tmp_path, {"gate": gate.to_layout("S(0)"), "up": up.to_layout("S(0)"), "whole": weight})
    on_two = sbp.load(tmp_path, "S(0)", 2)
    assert [piece[:, 0].tolist() for piece in held(on_two["gate"])] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [piece[:, 0].tolist() for piece in held(on_two["up"])] == [[8, 9, 10, 11], [12, 13, 14, 15]]
    # Files read in any order: where rows belong is in the index, and in each file.
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    index["tensors"]["whole"]["pieces"].reverse()
    (tmp_path / "checkpoint.json").write_text(json.dumps(index))
    loaded = sbp.load(tmp_path, "S(0)", 2)["whole"]
    assert loaded.numpy()[:, 0].tolist() == list(range(16))
    assert [piece[:, 0].tolist() for piece in held(loaded)] == [list(range(8)), list(range(8, 16))]
