"""Placements as plain data: complete, in DTensor's words, and those of the plan."""

import json

import pytest

from sbp import Cluster, Layout, auto_parallel, build
from sbp.cli.main import run
from sbp.planner.placements import modules_of

PINS = {"h.*.mlp.fc.weight": "B, S(0)", "h.*.mlp.proj.weight": "S(0), S(1)", "tokens": "S(0), B"}


@pytest.fixture(scope="module")
def plan():
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)
    model = build("gpt2", layers=2, heads=4, hidden=32, vocabulary=256, positions=32)
    return auto_parallel(model, cluster, batch=8, sequence=32, mesh="dp=2,tp=2", pins=PINS, precision="f32")


def layouts(item):
    """All placements inside plain data."""
    if isinstance(item, dict):
        for value in item.values():
            yield from layouts(value)
    elif isinstance(item, list):
        if item and all(isinstance(text, str) and text.endswith(")") for text in item):
            yield item
        else:
            for value in item:
                yield from layouts(value)


def test_the_document(plan):
    data = json.loads(json.dumps(plan.placements()))
    assert (data["format"], data["schema"]) == ("sbp-placements", 1)
    assert data["mesh"] == {"shape": [2, 2], "names": ["dp", "tp"]}
    assert set(data) == {
        "format", "schema", "mesh", "parameters", "buffers", "inputs", "outputs", "modules"
    }  # fmt: skip
    assert set(data["parameters"]) == set(plan.graph.parameters)
    found = list(layouts(data["parameters"])) + list(layouts(data["modules"]))
    assert len(found) > 100 and all(len(Layout.parse(texts)) == 2 for texts in found)
    fc = data["parameters"]["h.1.mlp.fc.weight"]
    assert fc["stored"] == ["Replicate()", "Shard(0)"] and fc["shape"] == [128, 32] and fc["dtype"] == "f32"
    assert set(fc["optimizer_state"]) == {"h.1.mlp.fc.weight.exp_avg", "h.1.mlp.fc.weight.exp_avg_sq"}
    assert data["parameters"]["h.0.mlp.proj.weight"]["stored"] == ["Shard(0)", "Shard(1)"]
    assert data["inputs"]["tokens"]["stored"] == ["Shard(0)", "Replicate()"]


def test_they_are_the_plans(plan):
    data = plan.placements()
    for name, item in data["parameters"].items():
        assert Layout.parse(item["stored"]) == plan.decisions.sources[name]
        used = {
            plan.decisions.signatures[plan.graph.nodes[at].name].inputs[operand]
            for at, operand in plan.graph.consumers[name]
            if plan.graph.nodes[at].phase != "optimizer"
        }
        assert {Layout.parse(texts) for texts in item["used"]} == used
        node = next(n for n in plan.graph.nodes if n.op == "adamw_update" and n.inputs[0] == name)
        assert Layout.parse(item["updated"]) == plan.decisions.signatures[node.name].inputs[0]
    for name, item in data["outputs"].items():
        assert Layout.parse(item["made"]) == plan.layouts[name]
        assert Layout.parse(item["stored"]) == plan.decisions.outputs[name]


def test_modules_have_what_crosses_them(plan):
    modules = plan.placements()["modules"]
    assert list(modules) == modules_of(plan.graph) and {"h.0", "h.0.attn", "h.1.mlp.fc"} <= set(modules)
    mlp = modules["h.0.mlp"]
    assert [item["shape"] for item in mlp["inputs"]] == [[8, 32, 32]]
    assert [item["shape"] for item in mlp["outputs"]] == [[8, 32, 32]]
    # What leaves the first layer enters the second, made alike.
    leaves, enters = modules["h.0"]["outputs"], modules["h.1"]["inputs"]
    assert [(item["value"], item["made"]) for item in leaves] == [(item["value"], item["made"]) for item in enters]
    for crossing in (item for module in modules.values() for side in module.values() for item in side):
        assert Layout.parse(crossing["made"]) == plan.layouts[crossing["value"]]
        assert crossing["used"] and crossing["value"] not in plan.graph.parameters


def test_plan_files_may_hold_them(plan):
    assert plan.to_json(placements=True)["placements"] == plan.placements()
    assert "placements" not in plan.to_json()
    assert type(plan).from_json(plan.to_json(placements=True)).placements() == plan.placements()


def test_command(plan, tmp_path, capsys):
    plan.save(tmp_path / "plan.json")
    assert run(["export", str(tmp_path / "plan.json"), "--format", "torch-json"]) == 0
    assert json.loads(capsys.readouterr().out) == plan.placements()
    out = tmp_path / "placements.json"
    assert run(["export", str(tmp_path / "plan.json"), "--format", "torch-json", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == plan.placements()
    assert run(["export", str(tmp_path / "plan.json"), "--format", "nemo"]) == 2
    capsys.readouterr()
    nowhere = str(tmp_path / "no" / "placements.json")
    assert run(["export", str(tmp_path / "plan.json"), "--format", "torch-json", "--out", nowhere]) == 2
    assert "make it first" in capsys.readouterr().err
