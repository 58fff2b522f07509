"""Plans run in PyTorch: training under torchrun and gloo equals single-process PyTorch, collective by collective."""

import json

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")

from torch_export_cases import MODELS, drawn, plan_on
from torch_launch import torchrun

from sbp.mesh import Mesh
from sbp.planner.styles import DataParallel, FullyShardedDataParallel, TensorParallel

TOLERANCE = 2e-5
"""Relative, for losses and norms of gradients in float32; sums are made in another order."""

LINE, GRID, TWO = Mesh((4,), ("dp",)), Mesh((2, 2), ("dp", "tp")), Mesh((2,), ("dp",))
SEQUENCE = TensorParallel(sequence=True)


def _zero1(mesh):
    """Parameters everywhere, optimizer state in shards."""
    shards, whole = (", ".join([text] * mesh.ndim) for text in ("S(0)", "B"))
    return {"h.*.mlp.*.weight": whole, "h.*.mlp.*.exp_avg*": shards, "tokens": "S(0)" + ", B" * (mesh.ndim - 1)}


def plans(processes):
    """Name -> model, plan."""
    found = {}
    if processes == 2:
        gpt, llama = MODELS["gpt"].graph, MODELS["llama"].graph
        found["data parallel"] = "llama", plan_on(llama, TWO, styles=(DataParallel(),))
        found["ZeRO-1"] = "gpt", plan_on(gpt, TWO, _zero1(TWO))
        found["random"] = "gpt", drawn(found["ZeRO-1"][1], 0)
        return found
    for mesh, styles in (
        (LINE, ("llama", FullyShardedDataParallel())),
        (LINE, ("gpt", SEQUENCE)),
        (LINE, ("images", DataParallel())),
        (GRID, ("gpt", DataParallel(), SEQUENCE)),
        (GRID, ("llama", FullyShardedDataParallel(), FullyShardedDataParallel())),
    ):
        model, *used = styles
        name = f"{' x '.join(type(style).__name__ for style in used)} {model} on {mesh}"
        found[name] = model, plan_on(MODELS[model].graph, mesh, styles=tuple(used))
    found[f"ZeRO-1 gpt on {GRID}"] = "gpt", plan_on(MODELS["gpt"].graph, GRID, _zero1(GRID))
    for name, (model, plan) in list(found.items()):
        found[f"random like {name}"] = model, drawn(plan, len(found))
    return found


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    """Name -> plan and what the processes printed."""
    folder = tmp_path_factory.mktemp("plans")
    cases, made = [], plans(request.param)
    for number, (name, (model, plan)) in enumerate(made.items()):
        plan.save(folder / f"{number}.json")
        cases.append({"name": name, "model": model, "plan": f"{number}.json", "steps": 3})
    (folder / "cases.json").write_text(json.dumps(cases))
    output = torchrun(request.param, "torch_export_program.py", folder)
    found = [json.loads(line.partition(" ")[2]) for line in output.splitlines() if line.startswith("CASE ")]
    assert [case["name"] for case in found] == list(made)
    return {case["name"]: (made[case["name"]][1], case) for case in found}


def test_training_equals_single_process_pytorch(results):
    for name, (_, case) in results.items():
        assert len(case["seen"]) == len(case["expected"]) == 6
        for seen, expected in zip(case["seen"], case["expected"]):
            assert seen == pytest.approx(expected, rel=TOLERANCE), name
        assert case["expected"][2] < case["expected"][0], f"{name}: the reference does not learn"
        assert case["state"] < 1e-4, f"{name}: parameters differ by {case['state']}"


def test_the_module_stays_a_module(results):
    for name, (_, case) in results.items():
        assert case["returned"] and case["names"] and case["shapes"], name


def test_pytorch_counts_the_collectives_that_the_report_says(results):
    total = 0
    for name, (_, case) in results.items():
        if case["counts"] is not None:
            assert case["counts"] == case["said"] and not case["others"], name
            total += sum(case["counts"].values())
    assert total > 50


def test_only_gathers_after_the_update_are_left_out(results):
    """Reductions and what forward and backward exchange are called as often as planned."""
    for name, (plan, case) in results.items():
        if case["differences"] == 0:
            after = [
                step for step in plan.boxing if step.phase == "optimizer" and step.value in plan.graph.updates.values()
            ]
            assert case["said"] == case["planned"] and not after, name
            assert "everything is as planned" in case["text"]
        else:
            assert case["said"].get("all_gather", 0) <= case["planned"].get("all_gather", 0), name


def test_no_kernel_ran_on_the_host(results):
    assert all(case["on_host"] == [] for _, case in results.values())
