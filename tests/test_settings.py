"""Plans as settings of training frameworks: recognised from their layouts, priced where they are none, written out."""

import json
from dataclasses import replace

import pytest

from sbp import Cluster, auto_parallel, build, nn
from sbp.cli.main import run
from sbp.errors import PlanError
from sbp.graph import Initial
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.emitters import megatron_arguments, torchtitan
from sbp.planner.settings import ROLES, recognise, setting_json
from sbp.planner.styles import Styles

CLUSTER = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
SIZES = {"layers": 1, "heads": 4, "hidden": 64, "vocabulary": 256, "positions": 64}


def planned(mesh, *roles, **options):
    """The best plan of a small GPT under roles of the mesh axes."""
    styles = [ROLES[role] for role in roles]
    restriction = (lambda graph, mesh: Styles(graph, mesh, *styles)) if roles else None
    given = {"batch": 16, "sequence": 64, "mesh": mesh, "restriction": restriction, **options}
    return auto_parallel(build("gpt2", **SIZES), CLUSTER, **given)


LINE, GRID = Mesh((4,), ("a",)), Mesh((2, 2), ("a", "b"))
EXACT = [
    (LINE, ("data",), {"replicate": 4}),
    (LINE, ("data, sharded optimizer",), {"shard": 4}),
    (LINE, ("data, fully sharded",), {"shard": 4, "zero": 3}),
    (LINE, ("tensor",), {"tensor": 4}),
    (LINE, ("context",), {"context": 4}),
    (GRID, ("data", "tensor"), {"replicate": 2, "tensor": 2}),
    (GRID, ("data, fully sharded", "tensor"), {"shard": 2, "zero": 3, "tensor": 2}),
    (GRID, ("data", "data, fully sharded"), {"replicate": 2, "shard": 2, "zero": 3}),
    (GRID, ("data", "context"), {"replicate": 2, "context": 2}),
]


@pytest.mark.parametrize(("mesh", "roles", "degrees"), EXACT, ids=lambda item: str(item))
def test_plans_under_a_setting_are_that_setting(mesh, roles, degrees):
    found = recognise(planned(mesh, *roles))
    assert found.exact and found.loss_seconds == 0 and found.departures == () and found.tried == {}
    assert tuple(found.setting.roles.values()) == roles
    expected = {"replicate": 1, "shard": 1, "tensor": 1, "context": 1, **degrees}
    assert {key: getattr(found.setting, key) for key in expected} == expected
    assert found.setting.data * found.setting.tensor * found.setting.context == mesh.size
    assert found.setting.precision == "mixed" and (found.setting.batch, found.setting.length) == (16, 64)


class Experts(nn.Module):
    """Four experts of one hidden layer, their weights stacked."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter((4, 16, 32), "f32"), nn.Parameter((4, 32, 16), "f32")

    def forward(self, x):
        return ops.matmul(ops.relu(ops.matmul(x, self.up)), self.down)


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts, self.loss = nn.Linear(16, 4, bias=False), Experts(), nn.MSELoss()

    def example_inputs(self, batch, sequence=None):
        kind = TensorType((batch, 12, 16), "f32"), Initial("normal", (0.0, 1.0))
        return {"x": kind, "targets": kind}

    def forward(self, x, targets=None):
        weights, chosen, slots, _ = ops.top_k_gating(self.router(x), k=2, capacity=6)
        taken = ops.dispatch(x, weights, chosen, slots, experts=4, capacity=6)
        return self.loss(ops.combine(self.experts(taken), weights, chosen, slots), targets)


@pytest.mark.parametrize(("mesh", "roles"), [(LINE, ("experts",)), (GRID, ("data", "experts"))])
def test_experts(mesh, roles):
    styles = [ROLES[role] for role in roles]
    plan = auto_parallel(
        Mixture(), CLUSTER, batch=8, mesh=mesh, precision="f32", restriction=lambda g, m: Styles(g, m, *styles)
    )
    assert str(plan.layouts["experts.up"][-1]) == "S(0)" and str(plan.layouts["router.weight"][-1]) == "B"
    found = recognise(plan)
    assert found.exact and tuple(found.setting.roles.values()) == roles
    assert found.setting.experts == mesh.shape[-1] and found.setting.data == 4
    assert f"--expert-model-parallel-size {mesh.shape[-1]}" in megatron_arguments(found.setting)
    assert plan.verify()


def test_sharded_optimizer_is_stage_one_or_two():
    assert recognise(planned(LINE, "data, sharded optimizer")).setting.zero in (1, 2)
    assert recognise(planned(LINE, "data")).setting.zero == 0


def test_one_other_layout_makes_it_another_plan():
    """A data-parallel plan that stores one optimizer state in shards is not data parallelism any more."""
    plan = planned(LINE, "data")
    name = "h.0.mlp.fc.weight.exp_avg"
    sources = {**plan.decisions.sources, name: Layout.parse("S(0)")}
    other = replace(plan, decisions=replace(plan.decisions, sources=sources))
    found = recognise(other, time_limit=10)
    assert not found.exact and [item.place for item in found.departures] == [name]
    assert found.setting.roles == {"a": "data"}
    assert found.setting_seconds == pytest.approx(plan.objective_seconds)
    assert found.loss_seconds == pytest.approx(plan.objective_seconds - other.objective_seconds)


def test_the_nearest_setting_is_the_cheapest_tried_and_costs_no_less_than_a_free_plan():
    plan = planned(LINE)
    found = recognise(plan, time_limit=20)
    assert plan.gap < 1e-9 and not found.exact and len(found.tried) == 3
    assert found.setting_seconds == min(found.tried.values())
    assert found.loss_seconds > 0
    data = setting_json(found)
    assert data["loss_seconds"] == data["setting_seconds"] - data["plan_seconds"]
    assert data["departures"] == len(found.departures) > 0
    json.dumps(data)


def test_inference_has_no_setting():
    plan = auto_parallel(build("gpt2", **SIZES), CLUSTER, batch=16, sequence=64, mesh=LINE, training=False)
    with pytest.raises(PlanError, match="training step"):
        recognise(plan)


def test_megatron_arguments():
    setting = recognise(planned(GRID, "data, fully sharded", "tensor")).setting
    arguments = dict(item.partition(" ")[::2] for item in megatron_arguments(setting))
    assert arguments["--tensor-model-parallel-size"] == "2" and arguments["--micro-batch-size"] == "8"
    assert arguments["--data-parallel-sharding-strategy"] == "optim_grads_params"
    assert arguments["--global-batch-size"] == "16" and arguments["--seq-length"] == "64" and "--bf16" in arguments
    assert "--sequence-parallel" not in arguments
    sequence = megatron_arguments(replace(setting, sequence=True, zero=0, recompute=True))
    assert "--sequence-parallel" in sequence and "--recompute-granularity full" in sequence
    assert not any("fsdp" in item or "distributed-optimizer" in item for item in sequence)
    assert "--use-distributed-optimizer" in megatron_arguments(replace(setting, zero=1))


def test_torchtitan_configuration_is_toml():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer read TOML")
    plan = planned(GRID, "data", "data, fully sharded")
    found = recognise(plan)
    data = tomllib.loads(torchtitan(plan, found))
    assert data["parallelism"] == {
        "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "tensor_parallel_degree": 1,
        "context_parallel_degree": 1, "pipeline_parallel_degree": 1, "expert_parallel_degree": 1,
        "fsdp_reshard_after_forward": "always" if found.setting.regather else "never",
    }  # fmt: skip
    assert data["training"] == {
        "local_batch_size": 4, "global_batch_size": 16, "seq_len": 64, "mixed_precision_param": "bfloat16"
    }  # fmt: skip
    assert data["activation_checkpoint"] == {"mode": "none"}


def test_a_tensor_axis_that_is_not_the_last_is_noted():
    plan = planned(GRID, "tensor", "data")
    assert "a is not the last axis" in torchtitan(plan, recognise(plan))


@pytest.mark.parametrize("form", ["megatron", "torchtitan"])
def test_command(form, tmp_path, capsys):
    planned(LINE, "data, fully sharded").save(tmp_path / "plan.json")
    assert run(["export", str(tmp_path / "plan.json"), "--format", form, "--quiet"]) == 0
    output = capsys.readouterr()
    assert output.err == "" and "The plan is this setting" in output.out
    assert ("optim_grads_params" if form == "megatron" else "data_parallel_shard_degree = 4") in output.out
    assert run(["export", str(tmp_path / "plan.json"), "--format", form, "--out", str(tmp_path / "text")]) == 0
    capsys.readouterr()
    assert (tmp_path / "text").read_text() == output.out
    assert run(["export", str(tmp_path / "plan.json"), "--format", form, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setting"]["zero_stage"] == 3
    assert run(["export", str(tmp_path / "none.json"), "--format", form]) == 2
    assert "none.json" in capsys.readouterr().err
