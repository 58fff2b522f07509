"""Optimizers: three steps equal to PyTorch's, with every option, and the state they add to the graph."""

import numpy
import pytest

from sbp import nn, optim
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.initial import draw_all
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.training import training_step

CHOICES = {
    "sgd": ("SGD", {}),
    "sgd with decay": ("SGD", {"lr": 0.1, "weight_decay": 0.05}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "momentum with dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.05}),
    "nesterov": ("SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "adam": ("Adam", {}),
    "adam with decay": ("Adam", {"lr": 0.05, "betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.1}),
    "adamw": ("AdamW", {}),
    "adamw with options": ("AdamW", {"lr": 0.05, "betas": (0.7, 0.9), "eps": 1e-4, "weight_decay": 0.3}),
}


class Quadratic(nn.Module):
    """mean((x w - y)^2), and a parameter that the loss does not depend on."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter((4, 3), initial=Initial("normal", (0.0, 1.0)))
        self.unused = nn.Parameter((2,))

    def example_inputs(self, batch, sequence=None):
        normal = Initial("normal", (0.0, 1.0))
        return {"x": (TensorType((batch, 4), "f32"), normal), "y": (TensorType((batch, 3), "f32"), normal)}

    def forward(self, x, y):
        assert self.unused.shape == (2,)
        return ops.mse_loss(x @ self.w, y)


@pytest.mark.parametrize("label", CHOICES)
def test_three_steps_equal_pytorch(label):
    torch = pytest.importorskip("torch")
    kind, arguments = CHOICES[label]
    graph = training_step(Quadratic(), 5, optimizer=getattr(optim, kind)(**arguments), precision="f64")
    feeds = draw_all(graph, dtype="f64")
    w, x, y = (torch.tensor(feeds[name]) for name in "wxy")
    w.requires_grad_()
    theirs = getattr(torch.optim, kind)([w], **arguments)
    for step in range(3):
        found = evaluate(graph, feeds)
        theirs.zero_grad()
        ((x @ w - y) ** 2).mean().backward()
        theirs.step()
        numpy.testing.assert_allclose(found["w"], w.detach().numpy(), rtol=1e-12)
        for name in graph.updates:
            if name.startswith("w."):
                numpy.testing.assert_allclose(found[name], theirs.state[w][name[2:]].numpy(), rtol=1e-11)
        if optim.STEP in graph.updates:
            assert found[optim.STEP] == step + 1
        feeds.update((name, found[name]) for name in graph.updates)


@pytest.mark.parametrize(
    "optimizer, states",
    [
        (optim.SGD(), set()),
        (optim.SGD(momentum=0.9), {"w.momentum_buffer"}),
        (optim.SGD(momentum=0.9, dampening=0.1), {"w.momentum_buffer", "optimizer.step"}),
        (optim.Adam(), {"w.exp_avg", "w.exp_avg_sq", "optimizer.step"}),
        (optim.AdamW(), {"w.exp_avg", "w.exp_avg_sq", "optimizer.step"}),
    ],
)
def test_state_is_ordinary_state_of_the_graph(optimizer, states):
    graph = training_step(Quadratic(), 5, optimizer=optimizer)
    assert {name for name in graph.state if graph.values[name].kind == "optimizer"} == states
    assert set(graph.updates) == states | {"w"}
    for name in states - {"optimizer.step"}:
        assert graph.values[name].type == graph.values["w"].type == TensorType((4, 3), "f32")
    assert {node.phase for node in graph.nodes} == {"forward", "backward", "optimizer"}
    assert [node.phase for node in graph.nodes] == sorted(
        (node.phase for node in graph.nodes), key=["forward", "backward", "optimizer"].index
    )


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW"])
def test_defaults_are_those_of_pytorch(kind):
    torch = pytest.importorskip("torch")
    theirs = getattr(torch.optim, kind)([torch.zeros(1)]).defaults
    ours = vars(getattr(optim, kind)())
    assert ours == {name: theirs[name] for name in ours}


def test_a_parameter_without_gradient_is_left_alone():
    graph = training_step(Quadratic(), 5)
    assert "unused" not in graph.updates


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: optim.SGD(lr=-1), "SGD: lr must be at least 0, got -1"),
        (lambda: optim.SGD(lr=float("nan")), "SGD: lr must be at least 0, got nan"),
        (lambda: optim.SGD(nesterov=True), "nesterov needs a momentum"),
        (lambda: optim.AdamW(betas=(0.9, 1.0)), r"AdamW: betas must be two numbers .*got \(0.9, 1.0\)"),
        (lambda: optim.Adam(eps=-1e-8), "Adam: eps"),
        (lambda: optim.optimizer_named("lion"), "unknown optimizer 'lion'; known are sgd, momentum, adam, adamw"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(GraphError, match=message):
        make()


def test_optimizers_by_name():
    assert optim.optimizer_named("AdamW") == optim.AdamW()
    assert optim.optimizer_named(optim.SGD(lr=3.0)) == optim.SGD(lr=3.0)
