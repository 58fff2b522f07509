"""Modules: names and scopes, and numbers equal to PyTorch's modules of the same name."""

import numpy
import pytest

from sbp import nn
from sbp.autodiff import backward
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.initial import draw, draw_all
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder

FLOATS = Initial("normal", (0.0, 1.0))


def traced(module, shape, dtype="f32"):
    """The module's output, a loss that weighs its elements differently, and the gradients of x and all parameters."""
    builder = GraphBuilder()
    x = builder.source("x", TensorType(shape, dtype), "input", FLOATS)
    with builder:
        y = module(x)
    weights = builder.source("weights", TensorType(y.shape, dtype), "input", FLOATS)
    with builder:
        loss = ops.sum(y * weights)
    wrt = [x, *(s for s in builder.symbols.values() if s.value.kind == "parameter")]
    gradients = backward(builder, loss, wrt)
    return builder.finish([y, *gradients.values()]), y.name, {name: g.name for name, g in gradients.items()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 6)
        self.parts = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        x = self.fc(x)
        for part in self.parts:
            x = x + part(x)
        return self.norm(x)


def test_names_are_those_of_a_state_dict():
    model = nn.Sequential(Block(), nn.ReLU(), nn.Linear(6, 2))
    names = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert names == {
        "0.fc.weight": (6, 4),
        "0.fc.bias": (6,),
        "0.parts.0.weight": (6, 6),
        "0.parts.1.weight": (6, 6),
        "0.norm.weight": (6,),
        "0.norm.bias": (6,),
        "2.weight": (2, 6),
        "2.bias": (2,),
    }
    assert model.count_parameters() == 24 + 6 + 72 + 12 + 14
    assert [name for name, _ in model.named_modules()] == [
        "", "0", "0.fc", "0.parts", "0.parts.0", "0.parts.1", "0.norm", "1", "2",
    ]  # fmt: skip


def test_a_graph_uses_these_names_and_module_paths():
    model = nn.Sequential(Block(), nn.ReLU(), nn.Linear(6, 2))
    graph, *_ = traced(model, (3, 4))
    assert set(graph.parameters) == {name for name, _ in model.named_parameters()}
    forward = [(node.op, node.module, node.name) for node in graph.nodes if node.phase == "forward"]
    assert ("linear", "0.parts.1", "0.parts.1.linear") in forward
    assert ("layer_norm", "0.norm", "0.norm.layer_norm") in forward
    assert ("add", "0", "0.add_1") in forward
    assert ("relu", "1", "1.relu") in forward


def test_a_shared_parameter_is_one_value_under_its_first_name():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, ids):
            return self.head(self.wte(ids))

    model = Tied()
    assert [name for name, _ in model.named_parameters()] == ["wte.weight"]
    builder = GraphBuilder()
    ids = builder.source("ids", TensorType((3,), "i64"), "input", Initial("integers", (0, 7)))
    with builder:
        logits = model(ids)
    graph = builder.finish([logits])
    assert graph.parameters == ("wte.weight",)
    assert [graph.nodes[i].op for i, _ in graph.consumers["wte.weight"]] == ["embedding", "linear"]


def test_a_module_called_twice_uses_the_same_parameters():
    layer = nn.Linear(4, 4)
    builder = GraphBuilder()
    x = builder.source("x", TensorType((2, 4), "f32"))
    with builder:
        y = layer(layer(x))
    assert builder.finish([y]).parameters == ("weight", "bias")


def test_the_scope_around_a_root_module_prefixes_its_names():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((2, 4), "f32"))
    with builder, builder.scope("net"):
        y = nn.Sequential(nn.Linear(4, 4))(x)
    graph = builder.finish([y])
    assert graph.parameters == ("net.0.weight", "net.0.bias")
    assert graph.nodes[0].module == "net.0"


def test_two_modules_of_one_name_but_other_shapes_are_an_error():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((2, 4), "f32"))
    with builder:
        nn.Linear(4, 3)(x)
        with pytest.raises(
            GraphError, match=r"value 'weight' is f32\[3,4\], but the parameter of that name is f32\[5,4\]"
        ):
            nn.Linear(4, 5)(x)


def test_modules_need_a_builder_and_super_init():
    with pytest.raises(GraphError, match="no graph is being built"):
        nn.Linear(2, 2)(None)

    class Forgetful(nn.Module):
        def __init__(self):
            self.fc = nn.Linear(2, 2)

    with pytest.raises(GraphError, match=r"Forgetful\.fc: call super"):
        Forgetful()


def test_train_and_eval_reach_every_part():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5)))
    assert all(part.training for part in model.modules())
    model.eval()
    assert not any(part.training for part in model.modules())
    assert traced(model, (3, 4))[1] == "x"
    drops = [node for node in traced(model.train(), (3, 4))[0].nodes if node.op == "dropout"]
    assert [(node.module, node.phase) for node in drops] == [
        ("0", "forward"),
        ("1.0", "forward"),
        ("1.0", "backward"),
        ("0", "backward"),
    ]
    assert drops[0].attributes == drops[3].attributes != drops[1].attributes == drops[2].attributes


def test_assignment_replaces_and_repr_shows_the_tree():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    setattr(model, "0", nn.Linear(2, 4, bias=False))
    assert [name for name, _ in model.named_parameters()] == ["0.weight"]
    assert repr(model).splitlines() == [
        "Sequential(",
        "  (0): Linear(in_features=2, out_features=4, has_bias=False)",
        "  (1): ReLU()",
        ")",
    ]


TORCH = {
    "Linear": ((3, 5, 4), lambda m: m.Linear(4, 6)),
    "Linear without bias": ((5, 4), lambda m: m.Linear(4, 6, bias=False)),
    "LayerNorm": ((2, 3, 8), lambda m: m.LayerNorm(8, eps=1e-3)),
    "RMSNorm": ((2, 3, 8), lambda m: m.RMSNorm(8, eps=1e-3)),
    "GroupNorm": ((2, 6, 3, 4), lambda m: m.GroupNorm(3, 6)),
    "BatchNorm2d": ((4, 3, 2, 5), lambda m: m.BatchNorm2d(3)),
    "BatchNorm2d in inference": ((4, 3, 2, 5), lambda m: m.BatchNorm2d(3).eval()),
    "Conv2d": ((2, 4, 7, 6), lambda m: m.Conv2d(4, 6, (3, 2), stride=2, padding=1)),
    "Conv2d in groups": ((2, 4, 5, 5), lambda m: m.Conv2d(4, 6, 3, groups=2, bias=False, dilation=2)),
    "MaxPool2d": ((2, 3, 7, 8), lambda m: m.MaxPool2d(3, 2, padding=1)),
    "AvgPool2d": ((2, 3, 6, 8), lambda m: m.AvgPool2d(2)),
    "AdaptiveAvgPool2d": ((2, 3, 6, 8), lambda m: m.AdaptiveAvgPool2d((3, 2))),
    "AdaptiveAvgPool2d to one": ((2, 3, 5, 7), lambda m: m.AdaptiveAvgPool2d(1)),
    "GELU": ((3, 4), lambda m: m.GELU()),
    "GELU tanh": ((3, 4), lambda m: m.GELU(approximate="tanh")),
    "ReLU": ((3, 4), lambda m: m.ReLU()),
    "SiLU": ((3, 4), lambda m: m.SiLU()),
    "Sigmoid": ((3, 4), lambda m: m.Sigmoid()),
    "Tanh": ((3, 4), lambda m: m.Tanh()),
    "Softmax": ((3, 4, 5), lambda m: m.Softmax(dim=1)),
    "Flatten": ((3, 4, 5), lambda m: m.Sequential(m.Flatten(), m.Linear(20, 2))),
}


@pytest.mark.parametrize("label", TORCH)
def test_equals_the_module_of_pytorch(label):
    torch = pytest.importorskip("torch")
    shape, make = TORCH[label]
    graph, y, gradients = traced(make(nn), shape)
    feeds = draw_all(graph, seed=5, dtype="f64")
    found = evaluate(graph, feeds)

    reference = make(torch.nn).double()
    state = {name: torch.tensor(feeds[name]) for name in graph.state}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("num_batches_tracked") for name in missing if "running" not in name)
    x = torch.tensor(feeds["x"], requires_grad=True)
    expected = reference(x)
    (expected * torch.tensor(feeds["weights"])).sum().backward()

    numpy.testing.assert_allclose(found[y], expected.detach().numpy(), rtol=1e-9, atol=1e-12)
    numpy.testing.assert_allclose(found[gradients["x"]], x.grad.numpy(), rtol=1e-9, atol=1e-11)
    for name, parameter in reference.named_parameters():
        numpy.testing.assert_allclose(found[gradients[name]], parameter.grad.numpy(), rtol=1e-9, atol=1e-11)
    for name, buffer in reference.named_buffers():
        if name in graph.updates:
            numpy.testing.assert_allclose(found[name], buffer.numpy(), rtol=1e-9)
    assert ("running_var" in graph.updates) == (label == "BatchNorm2d")


LOSSES = {
    "CrossEntropyLoss": (lambda m: m.CrossEntropyLoss(ignore_index=2), (6, 5), "classes"),
    "MSELoss": (lambda m: m.MSELoss(), (6, 5), "numbers"),
    "BCEWithLogitsLoss": (lambda m: m.BCEWithLogitsLoss(), (6,), "numbers"),
}


@pytest.mark.parametrize("label", LOSSES)
def test_losses_equal_pytorch(label):
    torch = pytest.importorskip("torch")
    make, shape, kind = LOSSES[label]
    builder = GraphBuilder()
    logits = builder.source("logits", TensorType(shape, "f64"), "input", FLOATS)
    if kind == "classes":
        targets = builder.source("targets", TensorType(shape[:-1], "i64"), "input", Initial("integers", (0, shape[-1])))
    else:
        targets = builder.source("targets", TensorType(shape, "f64"), "input", Initial("uniform", (0.0, 1.0)))
    with builder:
        loss = make(nn)(logits, targets)
    gradient = backward(builder, loss, [logits])["logits"]
    graph = builder.finish([loss, gradient])
    feeds = draw_all(graph, seed=1, dtype="f64")
    found = evaluate(graph, feeds)

    x = torch.tensor(feeds["logits"], requires_grad=True)
    expected = make(torch.nn)(x, torch.tensor(feeds["targets"]))
    expected.backward()
    numpy.testing.assert_allclose(found[loss.name], expected.item(), rtol=1e-12)
    numpy.testing.assert_allclose(found[gradient.name], x.grad.numpy(), rtol=1e-10, atol=1e-14)


def test_self_attention_equals_pytorch_with_its_rows_reordered():
    torch = pytest.importorskip("torch")
    heads, size, width = 3, 4, 12
    graph, y, gradients = traced(nn.SelfAttention(width, heads), (2, 5, width))
    feeds = draw_all(graph, dtype="f64")
    found = evaluate(graph, feeds)

    def reorder(array):  # (heads, 3, size) rows -> PyTorch's (3, heads, size)
        return array.reshape(heads, 3, size, -1).swapaxes(0, 1).reshape(array.shape)

    reference = torch.nn.MultiheadAttention(width, heads, batch_first=True).double()
    renamed = {
        "in_proj_weight": "qkv.weight",
        "in_proj_bias": "qkv.bias",
        "out_proj.weight": "proj.weight",
        "out_proj.bias": "proj.bias",
    }
    reference.load_state_dict(
        {k: torch.tensor(reorder(feeds[v]) if k.startswith("in") else feeds[v]) for k, v in renamed.items()}
    )
    x = torch.tensor(feeds["x"], requires_grad=True)
    expected, _ = reference(x, x, x)
    (expected * torch.tensor(feeds["weights"])).sum().backward()
    numpy.testing.assert_allclose(found[y], expected.detach().numpy(), rtol=1e-9, atol=1e-12)
    numpy.testing.assert_allclose(found[gradients["x"]], x.grad.numpy(), rtol=1e-9, atol=1e-11)
    for name, parameter in reference.named_parameters():
        gradient = found[gradients[renamed[name]]]
        gradient = reorder(gradient) if name.startswith("in") else gradient
        numpy.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "causal", "padding", "both"])
def test_multihead_attention_equals_pytorch(batch_first, masks):
    torch = pytest.importorskip("torch")
    arrange = (lambda b, s, e: (b, s, e)) if batch_first else (lambda b, s, e: (s, b, e))
    builder = GraphBuilder()
    x = builder.source("x", TensorType(arrange(2, 5, 12), "f32"), "input", FLOATS)
    memory = builder.source("memory", TensorType(arrange(2, 5, 12), "f32"), "input", FLOATS)
    padding = numpy.zeros((2, 5), bool)
    padding[1, 3:] = True
    forbidden = numpy.triu(numpy.ones((5, 5), bool), 1)
    chosen = {}
    if masks in ("padding", "both"):
        chosen["key_padding_mask"] = padding
    if masks == "both":
        chosen["attn_mask"] = forbidden
    symbols = {name: builder.source(name, TensorType(mask.shape, "bool")) for name, mask in chosen.items()}
    with builder:
        y, weights = nn.MultiheadAttention(12, 3, batch_first=batch_first)(
            x, memory, memory, is_causal=masks == "causal", **symbols
        )
    graph = builder.finish([y])
    feeds = {name: draw(graph.values[name], 1, "f64") for name in graph.sources if name not in chosen} | chosen
    found = evaluate(graph, feeds)[y.name]
    assert weights is None
    reference = torch.nn.MultiheadAttention(12, 3, batch_first=batch_first).double()
    reference.load_state_dict({name: torch.tensor(feeds[name]) for name in graph.parameters})
    extra = {name: torch.tensor(mask) for name, mask in chosen.items()}
    if masks == "causal":
        extra = {"is_causal": True, "attn_mask": torch.tensor(forbidden)}
    expected, _ = reference(*(torch.tensor(feeds[n]) for n in ("x", "memory", "memory")), need_weights=False, **extra)
    numpy.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-9, atol=1e-12)


def test_splitting_the_fused_projection_splits_whole_heads():
    """The reshape after `qkv` admits the split of its output features, and it becomes the split of heads."""
    builder = GraphBuilder()
    x = builder.source("x", TensorType((2, 5, 16), "f32"))
    with builder:
        y = nn.SelfAttention(16, 4, causal=True)(x)
    graph = builder.finish([y])
    reshape = next(node for node in graph.nodes if node.op == "reshape")
    assert "(S(2)) -> (S(2))" in {str(signature) for signature in graph.rule(reshape).signatures((2,))}


def test_shapes_that_do_not_fit_are_named():
    with pytest.raises(GraphError, match="embed_dim 10 is not a multiple of num_heads 3"):
        nn.SelfAttention(10, 3)
    with pytest.raises(GraphError, match="7 channels cannot be divided into 2"):
        nn.GroupNorm(2, 7)
    with pytest.raises(GraphError, match="multiples of groups 3"):
        nn.Conv2d(6, 4, 3, groups=3)
    with pytest.raises(GraphError, match="drops nothing"):
        nn.MultiheadAttention(4, 2, dropout=0.1)
    with pytest.raises(GraphError, match="below 1, got 1"):
        nn.Dropout(1)
