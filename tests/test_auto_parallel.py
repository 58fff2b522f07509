"""`auto_parallel` end to end: optimal, within memory, never worse than a baseline, equal from run to run."""

import json
from types import SimpleNamespace

import pytest

from sbp.errors import ClusterError, GraphError, InfeasibleError, LayoutError, MeshError, PlanError, SbpError
from sbp.graph import Graph
from sbp.layout import Broadcast, Layout, Split
from sbp.mesh import Mesh
from sbp.models import TINY, build
from sbp.optim import SGD
from sbp.planner import search as search_module
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.baselines import compare
from sbp.planner.cluster import Cluster
from sbp.planner.cost import as_cost_model
from sbp.planner.meshes import candidate_meshes
from sbp.planner.plan import Plan
from sbp.planner.search import objective_seconds
from sbp.planner.solver import Limits, Status
from sbp.planner.workload import workload

GPT = "tiny-gpt2"


def four() -> Cluster:
    return Cluster.preset("a100-80g", nodes=1, devices_per_node=4)


def plan_of(model=GPT, **options) -> Plan:
    return auto_parallel(model, four(), **{"batch": 8, "mesh": (4,), **options})


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_every_family_is_planned_and_proven(name, training):
    plan = plan_of(f"tiny-{name}", training=training)
    assert plan.status is Status.OPTIMAL
    assert plan.objective_seconds == objective_seconds(plan.physical)
    assert plan.lower_bound_seconds <= plan.objective_seconds
    assert plan.gap < 1e-9
    assert plan.memory.peak_bytes <= plan.memory.limit_bytes
    assert plan.verify().passed


def test_two_arguments_suffice():
    plan = auto_parallel("mlp", Cluster.preset("a100-80g", devices_per_node=2))
    assert plan.status is Status.OPTIMAL
    assert {tried.mesh.ndim for tried in plan.tried} == {1}


def test_meshes_respect_the_nodes():
    def shapes(nodes: int) -> list[tuple[int, ...]]:
        return [mesh.shape for mesh in candidate_meshes(Cluster.preset("a100-80g", nodes=nodes))]

    assert shapes(2) == [(16,), (2, 8), (4, 4), (8, 2)]
    assert shapes(1) == [(8,), (2, 4), (4, 2)]
    for mesh in candidate_meshes(Cluster.preset("a100-80g", nodes=3, devices_per_node=4)):
        assert mesh.size == 12 and (mesh.ndim == 1 or 4 % mesh.shape[1] == 0 or mesh.shape[1] % 4 == 0)


def test_the_best_mesh_wins():
    plan = auto_parallel(GPT, four(), batch=8)
    assert len(plan.tried) == 2
    for tried in plan.tried:
        if tried.objective_seconds is None:
            assert "stopped" in tried.outcome and tried.lower_bound_seconds > plan.objective_seconds
        else:
            assert plan.objective_seconds <= tried.objective_seconds


def test_equal_runs_give_equal_bytes(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan_of().save(first)
    plan_of().save(second)
    assert first.read_bytes() == second.read_bytes()


def test_save_and_load(tmp_path):
    plan = plan_of(pins={"h.*.mlp.fc.weight": "S(0)"})
    path = tmp_path / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again.to_json() == plan.to_json()
    assert again.layouts == plan.layouts
    assert again.cost == plan.cost
    assert again.memory == plan.memory
    assert again.verify().passed


@pytest.mark.parametrize("cut", [0, 10, 1000, -20])
def test_truncated_plan_file(tmp_path, cut):
    path = tmp_path / "plan.json"
    plan_of("tiny-mlp").save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(PlanError, match="plan.json"):
        Plan.load(path)


def test_damaged_plan_files(tmp_path):
    path = tmp_path / "plan.json"
    plan_of("tiny-mlp").save(path)
    good = json.loads(path.read_bytes())

    def fails(change, match):
        data = json.loads(json.dumps(good))
        change(data)
        path.write_text(json.dumps(data))
        with pytest.raises(PlanError, match=match):
            Plan.load(path)

    for field in good:
        if field not in ("objective_seconds", "format", "schema"):
            fails(lambda data, field=field: data.pop(field), field)
    fails(lambda data: data.update(schema=99), "schema")
    fails(lambda data: data.update(format="x"), "not a plan")
    fails(lambda data: data["mesh"].update(shape=[3]), "signature|layout|mesh")
    name = next(iter(good["sources"]))
    fails(lambda data: data["sources"].update({name: "(P)"}), name)
    fails(lambda data: data["sources"].update({name: "(S(7))"}), name)
    node = next(iter(good["signatures"]))
    fails(lambda data: data["signatures"].update({node: [["(B)"], ["(S(0))"]]}), node)
    fails(lambda data: data["kept"].update(nobody="(B)"), "nobody")
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "missing.json")


def test_pins_hold():
    plan = plan_of(mesh=(2, 2), pins={"h.*.mlp.fc.weight": "S(1), B", "tokens": "S(0), B"})
    for layer in range(2):
        assert plan.layouts[f"h.{layer}.mlp.fc.weight"] == Layout((Split(1), Broadcast()))
    assert plan.layouts["tokens"] == Layout((Split(0), Broadcast()))
    assert plan.pins == {"h.*.mlp.fc.weight": "(S(1), B)", "tokens": "(S(0), B)"}
    free = plan_of(mesh=(2, 2))
    assert free.objective_seconds <= plan.objective_seconds * (1 + 1e-9)
    assert plan.verify().passed


def test_pins_on_activations():
    value = "h.0.mlp.act.gelu"
    plan = plan_of(pins={value: "S(1)"})
    assert plan.layouts[value] == Layout((Split(1),))


@pytest.mark.parametrize(
    "pins, error, match",
    [
        ({"h.*.nothing": "B"}, PlanError, "matches no value"),
        ({"h.0.mlp.fc.weigh": "B"}, PlanError, "h.0.mlp.fc.weight"),
        ({"h.0.mlp.fc.weight": "S(2)"}, LayoutError, "h.0.mlp.fc.weight.*dimension 2"),
        ({"h.0.mlp.fc.weight": "S(0), B"}, LayoutError, "2 entries"),
        ({"h.0.mlp.fc.weight": "Q"}, LayoutError, "'Q' is not an SBP"),
        ({"h.0.mlp.fc.weight": "P"}, PlanError, "cannot be stored Partial"),
        ({"h.0.*.fc.weight": "B", "h.0.mlp.*.weight": "S(0)"}, PlanError, "both match"),
    ],
)
def test_wrong_pins(pins, error, match):
    with pytest.raises(error, match=match):
        plan_of(pins=pins)


def test_conflicting_pins_are_named():
    """A nonlinear function cannot come out Partial: only the pin to blame is named."""
    with pytest.raises(InfeasibleError, match="h.0.mlp.act.gelu"):
        plan_of(pins={"h.0.mlp.act.gelu": "P", "tokens": "B"})


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"mesh": (3,)}, MeshError, "4"),
        ({"mesh": "2,x"}, MeshError, "2,x"),
        ({"batch": 0}, PlanError, "batch"),
        ({"batch": "8"}, PlanError, "batch"),
        ({"batch": 8.5}, PlanError, "batch"),
        ({"batch": True}, PlanError, "batch"),
        ({"batch": 10**20}, GraphError, "bytes"),
        ({"sequence": -1}, PlanError, "sequence"),
        ({"time_limit": None}, PlanError, "time_limit"),
        ({"time_limit": "5"}, PlanError, "time_limit"),
        ({"time_limit": float("nan")}, PlanError, "time_limit"),
        ({"memory_limit": "40GiB"}, PlanError, "memory_limit"),
        ({"memory_limit": float("inf")}, PlanError, "memory_limit"),
        ({"threads": 0}, PlanError, "threads"),
        ({"seed": "a"}, PlanError, "seed"),
        ({"optimizer": SGD}, PlanError, r"SGD\(\)"),
        ({"optimizer": SGD(), "training": False}, PlanError, "inference"),
        ({"pins": {3: "B"}}, PlanError, "pins"),
        ({"pins": [("a", "b")]}, PlanError, "pins"),
        ({"pins": {"h.0.ln_1.layer_norm": "P(max)"}}, InfeasibleError, "h.0.ln_1.layer_norm"),
        ({"recompute": "some"}, PlanError, "recompute"),
        ({"memory_limit": 0}, PlanError, "memory_limit"),
        ({"precision": "f12"}, SbpError, "f12"),
        ({"optimizer": "magic"}, GraphError, "magic"),
    ],
)
def test_bad_options(options, error, match):
    with pytest.raises(error, match=match):
        plan_of(**options)


def test_huge_clusters_are_refused_at_once():
    with pytest.raises(PlanError, match="devices"):
        auto_parallel("tiny-mlp", "cpu", nodes=10**9)


def test_graphs_of_ones_own():
    graph = plan_of("tiny-mlp").graph
    assert plan_of(graph, batch=None).status is Status.OPTIMAL
    with pytest.raises(PlanError, match="finished graph"):
        plan_of(graph, batch=4)
    with pytest.raises(PlanError, match="nothing to plan"):
        plan_of(Graph("empty", {}, (), ()), batch=None)


def test_bad_model_and_cluster():
    with pytest.raises(GraphError, match="gpt2"):
        auto_parallel("gpt-2", four())
    with pytest.raises(GraphError, match="int"):
        auto_parallel(3, four())
    with pytest.raises(ClusterError, match="a100-80g"):
        auto_parallel(GPT, "a100-80gb")


def test_too_large_says_what_is_missing():
    with pytest.raises(InfeasibleError, match=r"parameter .* optimizer .* too\s+much"):
        auto_parallel("llama-3-70b", Cluster.preset("a100-80g", nodes=1), batch=8, sequence=128, mesh=(8,))


def test_memory_limit_is_kept():
    free = plan_of()
    limit = int(free.memory.peak_bytes * 0.9)
    plan = plan_of(memory_limit=limit, time_limit=10.0)
    assert plan.memory.peak_bytes <= limit
    assert plan.objective_seconds >= free.objective_seconds * (1 - 1e-9)
    assert plan.lower_bound_seconds <= plan.objective_seconds
    assert plan.verify().passed
    with pytest.raises(InfeasibleError, match="bytes|GiB"):
        plan_of(memory_limit=2000)


def test_state_is_split_where_memory_asks_for_it():
    """ZeRO is no switch: under a limit below what whole copies of the state need, the search stores it split."""
    model = build("mlp", widths=(1024, 1024, 1024))
    options = {"batch": 4096, "mesh": (4,), "precision": "f32"}
    whole = {f"layers.{layer}.weight{kind}": "B" for layer in (0, 1) for kind in ("", ".exp_avg", ".exp_avg_sq")}
    data_parallel = auto_parallel(model, four(), pins=whole, **options)
    limit = int(data_parallel.memory.peak_bytes * 0.65)
    with pytest.raises(InfeasibleError):
        auto_parallel(model, four(), pins=whole, memory_limit=limit, **options)
    split = auto_parallel(model, four(), memory_limit=limit, **options)
    assert split.memory.peak_bytes <= limit
    assert split.memory.by_kind["optimizer"] < data_parallel.memory.by_kind["optimizer"] / 3
    assert any(not split.layouts[name].is_broadcast for name in whole)


class Broken:
    def __init__(self, value):
        self.value = value

    def compute_seconds(self, op, flops, bytes, dtype):
        return self.value

    def collective_seconds(self, kind, mesh, axis, bytes):
        return 1e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_users_cost_model_is_checked(value):
    with pytest.raises(ClusterError, match="compute_seconds"):
        plan_of("tiny-mlp", cost_model=Broken(value))


def test_never_worse_than_a_baseline():
    for name in ("tiny-gpt2", "tiny-mlp", "tiny-dlrm", "tiny-resnet"):
        comparison = compare(name, four(), batch=8)
        rows = {row.name: row for row in comparison.rows}
        assert "data parallel" in rows and "ZeRO-3 / FSDP" in rows
        for row in comparison.rows[1:]:
            assert row.plan is not None, row.reason
            assert comparison.found.objective_seconds <= row.plan.objective_seconds * (1 + 1e-9), (name, row.name)


def test_baselines_are_what_they_are_called():
    comparison = compare("tiny-gpt2", four(), batch=8)
    plans = {row.name: row.plan for row in comparison.rows}
    data = plans["data parallel"]
    assert all(data.layouts[name].is_broadcast for name in data.graph.state)
    assert all(data.layouts[name] == Layout.parse("S(0)") for name in data.graph.inputs)
    assert {step.kind for step in data.boxing if step.phase == "backward"} <= {"all_reduce"}
    sharded = plans["ZeRO-3 / FSDP"]
    assert all(
        not sharded.layouts[n].is_broadcast for n in sharded.graph.parameters if max(sharded.graph.values[n].shape) >= 4
    )
    tensor = plans["tensor parallel"]
    for layer in range(2):
        assert tensor.layouts[f"h.{layer}.mlp.fc.weight"] == Layout.parse("S(0)")
        assert tensor.layouts[f"h.{layer}.mlp.proj.weight"] == Layout.parse("S(1)")
        assert tensor.layouts[f"h.{layer}.attn.qkv.weight"] == Layout.parse("S(0)")
    for plan in plans.values():
        assert plan.verify().passed


def test_three_axes():
    plan = auto_parallel(
        "tiny-mlp", Cluster.preset("a100-80g", nodes=1), batch=8, mesh=Mesh((2, 2, 2), ("a", "b", "c"))
    )
    assert plan.status is Status.OPTIMAL
    assert plan.verify().passed


@pytest.mark.parametrize(("building", "left"), [(0.0, 40.0), (15.0, 25.0), (100.0, 10.0)])
def test_building_a_problem_counts_in_the_time_limit(building, left, monkeypatch):
    """By a clock that stands still but while the problem is built."""
    now, given = [0.0], []
    formulate, solve = search_module.formulate, search_module.solve

    def slowly(*arguments):
        now[0] += building
        return formulate(*arguments)

    def noting(problem, limits, **options):
        given.append(limits.time_limit)
        return solve(problem, limits, **options)

    monkeypatch.setattr(search_module, "formulate", slowly)
    monkeypatch.setattr(search_module, "solve", noting)
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    graph = workload("tiny-mlp", 4, batch=8).graph
    search_module.search(graph, Mesh((4,)), as_cost_model(Cluster.preset("cpu")), None, Limits(40.0))
    assert given[0] == left
