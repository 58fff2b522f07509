"""From module to step: phases, precision, what mixed precision casts, inference, and that training learns."""

import numpy
import pytest

from sbp import models, nn, optim
from sbp.data import batches
from sbp.errors import GraphError
from sbp.graph import Graph, Initial
from sbp.initial import draw_all
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.passes import replay, with_precision
from sbp.training import inference, trace, training_step


def types_of(graph, op, phase="forward"):
    found = [node for node in graph.nodes if node.op == op and node.phase == phase]
    assert found, f"no {op} in {phase}"
    return {tuple(graph.values[name].dtype for name in (*node.inputs, *node.outputs)) for node in found}


@pytest.mark.parametrize("name", models.TINY)
@pytest.mark.parametrize("precision", ["mixed", "bf16", "f32"])
def test_precision_changes_types_and_nothing_else(name, precision):
    """Held in float64 throughout, every precision's graph gives the numbers of the f64 graph."""
    module = models.TINY[name].build()
    exact = training_step(module, 2, 6, precision="f64")
    feeds = draw_all(exact, seed=2, dtype="f64")
    expected = evaluate(exact, feeds)
    graph = training_step(module, 2, 6, precision=precision)
    found = evaluate(graph, feeds)
    assert set(graph.updates) == set(exact.updates)
    numpy.testing.assert_allclose(found[graph.outputs[0]], expected[exact.outputs[0]], rtol=1e-12)
    for state in exact.updates:
        numpy.testing.assert_allclose(found[state], expected[state], rtol=1e-9, atol=1e-12, err_msg=state)


def test_mixed_precision_of_a_gpt():
    graph = training_step(models.TINY["gpt2"].build(), 2, 6)
    assert {graph.values[name].dtype for name in graph.parameters} == {"f32"}
    assert {graph.values[name].dtype for name in graph.state if name.endswith("exp_avg")} == {"f32"}
    assert types_of(graph, "linear") == {("bf16", "bf16", "bf16")}
    assert types_of(graph, "layer_norm") == {("bf16", "f32", "f32", "bf16")}
    assert types_of(graph, "linear_weight_gradient", "backward") == {("bf16", "bf16", "bf16")}
    assert types_of(graph, "adamw_update", "optimizer") == {("f32",) * 4 + ("i64",) + ("f32",) * 3}
    assert graph.values[graph.outputs[0]].dtype == "f32"
    # The tied embedding is cast once and used twice; both gradients are added before they are widened.
    casts = [node for node in graph.nodes if node.op == "cast" and node.inputs == ("wte.weight",)]
    assert len(casts) == 1 and casts[0].module == "wte"
    users = [graph.nodes[i].op for i, _ in graph.consumers[casts[0].outputs[0]] if graph.nodes[i].phase == "forward"]
    assert users == ["embedding", "linear"]


def test_every_parameter_is_cast_at_most_once():
    for name in models.TINY:
        graph = training_step(models.TINY[name].build(), 2, 6)
        cast = [node.inputs[0] for node in graph.nodes if node.op == "cast" and node.inputs[0] in graph.parameters]
        assert len(cast) == len(set(cast))


def test_tables_that_are_only_looked_up_are_not_cast():
    graph = training_step(models.TINY["dlrm"].build(), 4)
    assert types_of(graph, "embedding") == {("f32", "i64", "f32")}
    assert types_of(graph, "embedding_backward", "backward") == {("f32", "i64", "f32")}
    assert types_of(graph, "linear") == {("bf16",) * 3}


def test_batch_norm_keeps_its_statistics_wide():
    graph = training_step(models.TINY["resnet"].build(), 4)
    assert types_of(graph, "convolution") == {("bf16",) * 3}
    assert types_of(graph, "channel_mean") == {("bf16", "f32")}
    assert types_of(graph, "batch_norm_apply") == {("bf16", "f32", "f32", "f32", "f32", "bf16")}
    assert types_of(graph, "moving_average") == {("f32",) * 3}
    layers = [node.module for node in graph.nodes if node.op == "batch_norm_apply"]
    assert [name for name in graph.updates if name.endswith("running_var")] == [f"{m}.running_var" for m in layers]


def test_an_explicit_cast_is_kept_and_widens_what_follows():
    class Sensitive(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.out = nn.Linear(4, 1)

        def example_inputs(self, batch, sequence=None):
            return {"x": (TensorType((batch, 4), "f32"), Initial("normal", (0.0, 1.0)))}

        def forward(self, x):
            return ops.mean(self.out(ops.exp(nn.in_full_precision(self.fc(x)))))

    graph = with_precision(trace(Sensitive(), 3), "mixed")
    assert types_of(graph, "exp") == {("f32", "f32")}
    assert types_of(graph, "linear") == {("bf16", "bf16", "bf16")}
    plain = with_precision(trace(Sensitive(), 3), "f32")
    assert not any(node.op == "cast" for node in plain.nodes)
    assert {value.dtype for value in with_precision(trace(Sensitive(), 3), "f64").values.values()} == {"f64"}


def test_precision_comes_before_gradients():
    graph = training_step(models.TINY["mlp"].build(), 2)
    with pytest.raises(GraphError, match="before gradients are added"):
        with_precision(graph, "bf16")
    with pytest.raises(GraphError, match="unknown precision 'fp8'; known are mixed"):
        training_step(models.TINY["mlp"].build(), 2, precision="fp8")


def test_equal_layers_have_equal_nodes():
    graph = training_step(models.build(models.TINY["gpt2"], layers=4), 2, 6)

    def layer(index):
        prefix = f"h.{index}."
        found = [node for node in graph.nodes if node.module.startswith(prefix)]
        return [
            (node.op, node.phase, graph.types(node.inputs), graph.types(node.outputs), dict(node.attributes))
            for node in found
        ]

    assert len(layer(1)) > 40
    assert layer(0) == layer(1) == layer(2) == layer(3)


def test_the_graph_survives_json():
    graph = training_step(models.TINY["bert"].build(), 2, 6)
    again = Graph.from_json(graph.to_json())
    assert again.nodes == graph.nodes and again.values == graph.values and again.updates == graph.updates


def test_tracing_is_deterministic():
    first, second = (training_step(models.TINY["llama-3"].build(), 2, 6).to_json() for _ in range(2))
    assert first == second


def test_replay_makes_the_same_graph():
    graph = training_step(models.TINY["gpt2"].build(), 2, 6, precision="f64")
    builder, symbols = replay(graph)
    again = builder.finish([symbols[name] for name in graph.outputs])
    assert again.nodes == graph.nodes and again.values == graph.values and again.updates == graph.updates
    assert again.sources == graph.sources and again.outputs == graph.outputs


def test_inference_has_no_state_changes_and_stores_what_it_computes_in():
    graph = inference(models.TINY["gpt2"].build(), 2, 6)
    assert graph.inputs == ("tokens",) and not graph.updates
    assert {node.phase for node in graph.nodes} == {"forward"}
    assert {graph.values[name].dtype for name in graph.parameters} == {"bf16"}
    assert not any(node.op == "cast" for node in graph.nodes)
    assert graph.values[graph.outputs[0]].type == TensorType((2, 6, 61), "bf16")


def test_modes_are_restored():
    module = models.build(models.TINY["gpt2"], dropout=0.1)
    module.h[0].eval()
    inference(module, 2, 6)
    assert module.training and not module.h[0].training and module.h[1].training


def test_dropout_changes_from_step_to_step_and_place_to_place():
    module = models.build(models.TINY["gpt2"], dropout=0.5)
    graph = training_step(module, 2, 6, optimizer=optim.SGD(lr=0.0), precision="f64")
    assert graph.values["random.step"].kind == "buffer"
    masks = [node for node in graph.nodes if node.op == "dropout" and node.phase == "forward"]
    assert len(masks) == 5 and len({node.attributes["seed"] for node in masks}) == 5
    assert not any(node.op == "dropout" for node in inference(module, 2, 6).nodes)
    feeds = draw_all(graph, dtype="f64")
    losses = []
    for _ in range(3):
        found = evaluate(graph, feeds)
        losses.append(float(found[graph.outputs[0]]))
        feeds.update((name, found[name]) for name in graph.updates)
    assert feeds["random.step"] == 3
    assert len(set(losses)) == 3
    feeds["random.step"] = numpy.int64(0)
    assert evaluate(graph, feeds)[graph.outputs[0]] == losses[0]


def test_a_byte_level_gpt_learns():
    config = models.GPTConfig(layers=1, heads=2, hidden=16, vocabulary=256, positions=16)
    graph = training_step(config.build(), 8, 16, optimizer=optim.AdamW(lr=0.02), precision="f32")
    feeds = draw_all(graph)
    losses = []
    for batch, _ in zip(batches(batch=8, sequence=16), range(60)):
        found = evaluate(graph, {**feeds, **batch}, floating=None)
        losses.append(float(found[graph.outputs[0]]))
        feeds.update((name, found[name]) for name in graph.updates)
    assert abs(losses[0] - numpy.log(256)) < 0.1
    assert sum(losses[-10:]) / 10 < 3.6


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: training_step(models.TINY["gpt2"].build(), 0, 6), "batch and sequence must be at least 1"),
        (lambda: training_step(models.TINY["gpt2"].build(), 2, 13), "sequence of 13 is longer than its 12 positions"),
        (lambda: training_step(nn.Linear(2, 2), 2), "Linear does not say what its inputs are"),
    ],
)
def test_errors(call, message):
    with pytest.raises(GraphError, match=message):
        call()


def test_inputs_can_be_given_for_a_module_that_does_not_know_them():
    inputs = {"x": (TensorType((3, 4), "f32"), Initial("normal", (0.0, 1.0)))}
    graph = inference(nn.Linear(4, 2), 3, inputs=inputs, precision="f32")
    assert graph.values[graph.outputs[0]].shape == (3, 2)
    with pytest.raises(GraphError, match=r"needs one scalar loss, the module returns .*f32\[3,2\]"):
        training_step(nn.Linear(4, 2), 3, inputs=inputs, precision="f32")
