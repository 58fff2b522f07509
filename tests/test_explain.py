"""Why a value lies as it does: said from the operator's rule and the plan's boxing. Tests of reports name them."""

import json

import pytest

from sbp.autodiff import backward
from sbp.cli.main import run as command
from sbp.errors import PlanError
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.trace import GraphBuilder


def planned(function, mesh, pins=None, gradient_of=None, **types):
    builder = GraphBuilder("net")
    with builder:
        symbols = {name: builder.source(name, TensorType(*kind)) for name, kind in types.items()}
        made = function(**symbols)
        if gradient_of is not None:
            made = ops.tanh(backward(builder, made.sum(), [symbols[gradient_of]])[gradient_of])  # needs it whole
    graph = builder.finish(list(made) if isinstance(made, tuple) else [made])
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=mesh.size)
    return auto_parallel(graph, cluster, mesh=mesh, pins=pins, least_fill=0.0)


@pytest.fixture(scope="module")
def norm():
    """The gradient of a layer norm's weight, under a sequence that is split along tp."""
    return planned(
        lambda x, w, b: ops.layer_norm(x, w, b), Mesh((2, 2), ("dp", "tp")), 
        {"x": "B, S(0)", "layer_norm_backward:dx": "B, S(0)", "layer_norm_backward:dweight": "B, P"},
        "w", x=((64, 8), "f32"), w=((8,), "f32"), b=((8,), "f32"),
    )  # fmt: skip


def test_r067_why_a_norm_under_a_split_sequence_sums_its_weights_gradient(norm):
    """The text names the mesh axis, the split dimension that is summed over, the collective, and its bytes."""
    explanation = norm.explain("layer_norm_backward:dweight")
    assert explanation.axes["tp"] == (
        "parts of a sum over tp, since dimension 0 of expand, over which the operator takes the sum, is split: each "
        "rank has that of its own part"
    )
    assert explanation.axes["dp"] == "every rank makes all of it"
    (step,) = explanation.steps
    assert step.axis == "tp" and step.kind in ("all_reduce", "reduce_scatter") and step.bytes == 8 * 4
    assert f"then {step.kind} along tp, forward: (B, P) -> {step.after}, 32 bytes per rank" in str(explanation)
    assert explanation.readers == {str(step.after): ("tanh",)}


def test_r051_why_heads_are_not_split():
    """28 query heads serve 4 key heads in groups of 7: chunks of 4 would cut through a group."""
    types = {"q": ((2, 28, 4, 2), "f32"), "k": ((2, 4, 4, 2), "f32"), "v": ((2, 4, 4, 2), "f32")}
    eight = planned(lambda q, k, v: ops.attention(q, k, v)[0], Mesh((8,), ("tp",)), **types)
    why = [line for line in eight.explain("attention:out").unsplit["tp"] if line.startswith("dimension 1")]
    assert (
        why == ["dimension 1 (size 28) over 8 ranks: it is 4 pieces of 7 (kv), and chunks of 4 would cut through some"]
        or why == []
    ), why  # a rule that splits 28 heads over 8 ranks must have a reason to
    four = planned(lambda q, k, v: ops.attention(q, k, v)[0], Mesh((2, 4), ("dp", "tp")), **types)
    assert not any(line.startswith("dimension 1") for line in four.explain("attention:out").unsplit["tp"])


def test_r017_why_a_view_does_not_split_a_minor_dimension():
    plan = planned(lambda x: x.reshape(6, 6), Mesh((4,), ("tp",)), x=((6, 2, 3), "f32"))
    text = str(plan.explain("reshape"))
    assert "dimension 1 (size 6) over 4 ranks" in text and "would cut through some" in text


def test_what_parts_come_from():
    """A product's parts come from the dimension it sums over, those of what is linear in it from its input."""
    plan = planned(
        lambda x, w: ops.scale(x @ w, factor=2.0), Mesh((2,), ("tp",)), {"x": "S(1)", "matmul": "P", "scale": "P"},
        x=((64, 32), "f32"), w=((32, 16), "f32"),
    )  # fmt: skip
    assert plan.explain("matmul").axes["tp"].startswith("parts of a sum over tp, since dimension 1 of x")
    assert plan.explain("scale").axes["tp"] == "parts of a sum, as matmul is, which the operator passes on"
    assert plan.explain("scale").steps[0].kind in ("all_reduce", "reduce_scatter")
    assert plan.explain("x").made == "x: input, f32[64,32] stored as (S(1)) on mesh(tp=2)"
    assert plan.explain("x").axes == {"tp": "dimension 1 is split over 2 ranks"}
    assert list(plan.explain("x").readers.values()) == [("matmul",)]
    assert "matmul: matmul(f32[64,32] (S(1)), f32[32,16] (S(0))) -> f32[64,16] (P) on mesh(tp=2)" in str(
        plan.explain("matmul")
    )


def test_a_maximum_has_parts_of_a_maximum():
    plan = planned(lambda x: ops.max(x, 0), Mesh((2,), ("tp",)), {"x": "S(0)", "max": "P(max)"}, x=((64, 32), "f32"))
    assert plan.explain("max").axes["tp"].startswith("parts of a max over tp, since dimension 0 of x")


def test_every_value_of_a_model_has_an_explanation():
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
    plan = auto_parallel("tiny-gpt2", cluster, batch=8, mesh="dp=2,tp=2", pins={"h.?.mlp.fc.weight": "B, S(0)"})
    for name in plan.graph.values:
        explanation = plan.explain(name)
        assert explanation.value == name and set(explanation.axes) == {"dp", "tp"} and str(explanation)
        readers = {reader for names in explanation.readers.values() for reader in names}
        assert readers == {node.name for node in plan.graph.nodes if name in node.inputs}
    moved = [step for name in plan.graph.values for step in plan.explain(name).steps]
    assert sorted(map(str, moved)) == sorted(map(str, plan.boxing)), "every step belongs to one value"


def test_names_that_are_none(norm, tmp_path, capsys):
    with pytest.raises(PlanError, match="the plan has no value 'layer_nrm'; near names: "):
        norm.explain("layer_nrm")
    path = str(tmp_path / "plan.json")
    norm.save(path)
    assert command(["report", path, "--explain", "x", "--explain", "w"]) == 0
    assert capsys.readouterr().out.count("stored as") == 2
    assert command(["report", path, "--explain", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["value"] == "x"
    assert command(["report", path, "--explain", "y"]) == 2
    assert "no value 'y'" in capsys.readouterr().err
