"""PyTorch modules as graphs: state, masks, losses, batch, precision, unknown operators, errors."""

from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="imports PyTorch modules")

import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch_models as models  # noqa: E402
from torch import nn  # noqa: E402
from torch_models import state_of  # noqa: E402

from sbp.errors import FrontendError, PlanError  # noqa: E402
from sbp.frontend.aten import attention  # noqa: E402
from sbp.frontend.torch import import_module, translation  # noqa: E402
from sbp.graph import Initial  # noqa: E402
from sbp.interpreter import evaluate  # noqa: E402
from sbp.optim import SGD  # noqa: E402
from sbp.planner.auto_parallel import auto_parallel  # noqa: E402

# -- masks known at import ---------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention under a mask that a function of the length makes, keys repeated for groups of queries."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 2).transpose(1, 2)
        k, v = (part(x).view(batch, length, 2, 2).transpose(1, 2) for part in (self.k, self.v))
        k, v = (part[:, :, None].expand(batch, 2, 2, length, 2).reshape(batch, 4, length, 2) for part in (k, v))
        mask = self.mask(length)
        if mask is not None:
            mask = mask.expand(batch, 1, length, length)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum((1, 3))


def rows(n):
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


def causal(n):
    i, j = rows(n)
    return j <= i


def added(n):
    return torch.full((n, n), torch.finfo(torch.float32).min).triu(1)


def windowed(n):
    i, j = rows(n)
    return (j <= i) & (j > i - 3)


def scattered(n):
    i, j = rows(n)
    return (i + j) % 3 != 1


@pytest.mark.parametrize(
    "mask, op, attributes",
    [
        (lambda n: None, "attention", {"causal": False}),
        (lambda n: torch.ones(n, n, dtype=torch.bool), "attention", {"causal": False}),
        (causal, "attention", {"causal": True, "offset": 0}),
        (added, "attention", {"causal": True, "offset": 0}),
        (windowed, "masked_attention", {"causal": True, "offset": 0}),
        (scattered, "masked_attention", {"causal": False}),
    ],
)
def test_masks_known_at_import(mask, op, attributes):
    module, x = Attention(mask).eval(), torch.randn(3, 6, 8)
    imported = import_module(module, x, training=False)
    (node,) = (node for node in imported.graph.nodes if "attention" in node.op)
    assert node.op == op
    assert attributes.items() <= dict(node.attributes).items()
    assert [imported.graph.values[name].shape for name in node.inputs[:3]] == [(3, 4, 6, 2), (3, 2, 6, 2), (3, 2, 6, 2)]
    found = evaluate(imported.graph, state_of(imported, x=x.numpy()))[imported.outputs["output"]]
    np.testing.assert_allclose(found, module(x).detach().numpy(), atol=1e-5)


def test_a_mask_is_known_for_a_batch_that_could_not_be_computed():
    """Every sample has the same mask, so one is looked at, not 4,096 of a million elements."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module, x = Attention(causal), torch.randn(4096, 1024, 8)
    graph = import_module(module, x, training=False).graph
    (node,) = (node for node in graph.nodes if "attention" in node.op)
    assert node.op == "attention" and node.attributes["causal"]
    assert not any(value.dtype == "bool" for value in graph.values.values())


def test_a_mask_is_known_where_the_batch_is_dynamic():
    module = Attention(causal)
    graph = import_module(module, torch.randn(3, 6, 8), training=False, dynamic_batch=True, batch=50).graph
    (node,) = (node for node in graph.nodes if "attention" in node.op)
    assert node.op == "attention" and node.attributes["causal"] and graph.values["x"].shape == (50, 6, 8)


@pytest.mark.parametrize("high", [-1, 0, 2])
@pytest.mark.parametrize("low", [None, -2, 0])
def test_bands(high, low):
    i, j = torch.arange(6)[:, None], torch.arange(8)[None, :]
    matrix = (j <= i + high) & (True if low is None else j >= i + low)
    found = attention._band(matrix, 6, 8)
    empty_row = not bool(matrix.any(dim=1).all())
    assert found == (None if empty_row else (high, low))
    assert attention._band(matrix.flip(0), 6, 8) is None


# -- norms and rotary embeddings ---------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self, shift=0.0, power=2, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))
        self.shift, self.power, self.eps = shift, power, eps

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(self.power).mean(-1, keepdim=True) + self.eps)
        return (self.weight + self.shift) * wide.to(x.dtype)


@pytest.mark.parametrize("shift, power, fused", [(0.0, 2, True), (1.0, 2, True), (0.0, 4, False)])
def test_rms_norms_are_recognized(shift, power, fused):
    module, x = Norm(shift, power), torch.randn(4, 6)
    imported = import_module(module, x, training=False)
    assert any(node.op == "rms_norm" for node in imported.graph.nodes) == fused
    found = evaluate(imported.graph, state_of(imported, x=x.numpy()))[imported.outputs["output"]]
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-5)


class Rotary(nn.Module):
    def __init__(self, half):
        super().__init__()
        self.half = half

    def forward(self, x, cos, sin):
        turned = torch.cat((-x[..., self.half :], x[..., : self.half]), dim=-1)
        return x * cos + turned * sin


@pytest.mark.parametrize("half, fused", [(3, True), (2, False)])
def test_rotary_embeddings_are_recognized(half, fused):
    module, inputs = Rotary(half), (torch.randn(2, 4, 6), torch.randn(4, 6), torch.randn(1, 4, 6))
    imported = import_module(module, inputs, training=False)
    assert any(node.op == "rotate_halves" for node in imported.graph.nodes) == fused
    feeds = dict(zip(("x", "cos", "sin"), (item.numpy() for item in inputs)))
    found = evaluate(imported.graph, feeds)[imported.outputs["output"]]
    np.testing.assert_allclose(found, module(*inputs).numpy(), rtol=1e-5, atol=1e-6)


# -- state -------------------------------------------------------------------------------------------------------------


class State(nn.Module):
    """Tied, frozen and unused parameters, buffers that change or are not saved, a constant in the code."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Parameter(torch.rand(6), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(3))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("factor", torch.full((6,), 2.0), persistent=False)

    def forward(self, ids):
        self.seen.add_(ids.numel())
        x = self.norm(self.embedding(ids).flatten(0, 1)) * self.frozen * self.factor
        return self.head(x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))


def test_state_has_the_names_of_state_dict():
    torch.manual_seed(0)  # a running mean near 0 has a relative error of any size
    module, ids = State(), torch.randint(0, 7, (4, 5))
    imported = import_module(module, ids, loss=lambda out: out.square().mean(), optimizer=SGD(lr=1.0))
    graph = imported.graph
    assert imported.parameters["embedding.weight"] == ("embedding.weight", "head.weight")
    assert "head.weight" not in graph.values and "unused" not in graph.values
    assert set(graph.parameters) == {"embedding.weight", "norm.weight", "norm.bias"}
    assert graph.values["frozen"].kind == graph.values["factor"].kind == graph.values["seen"].kind == "buffer"
    changed = {"seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(graph.updates) == {*graph.parameters, *changed}
    state = imported.state_arrays()
    assert np.shares_memory(state["embedding.weight"], module.embedding.weight.detach().numpy())
    found = evaluate(graph, state_of(imported, ids=ids.numpy()))
    module(ids).square().mean().backward()
    for name in changed:
        np.testing.assert_allclose(found[name], module.state_dict()[name].numpy(), rtol=1e-5, err_msg=name)
    gradient = state["embedding.weight"] - found["embedding.weight"]
    np.testing.assert_allclose(gradient, module.embedding.weight.grad.numpy(), rtol=1e-3, atol=1e-5)


def test_importing_leaves_the_module_as_it_was():
    module = State().eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    import_module(module, torch.zeros(4, 5, dtype=torch.long), loss=lambda out: out.sum(), precision="bf16")
    assert not module.training and module.head.weight is module.embedding.weight
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_overlapping_parameters_are_refused():
    module = nn.Module()
    whole = torch.rand(6)
    module.a, module.b = nn.Parameter(whole), nn.Parameter(whole[2:4])
    module.forward = lambda x: (x * module.a).sum() + module.b.sum()
    with pytest.raises(FrontendError, match="b and a overlap in memory"):
        import_module(module, torch.rand(6))


def test_meta_modules_allocate_nothing_and_have_no_arrays():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(1 << 17, 1 << 17), nn.Linear(1 << 17, 10))
    imported = import_module(module, torch.empty(8, 1 << 17, device="meta"), loss=lambda out: out.sum())
    assert imported.graph.values["0.weight"].type.bytes == 1 << 36
    with pytest.raises(FrontendError, match="meta device"):
        imported.state_arrays()


def test_fake_modules_import_as_well():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        module = nn.Linear(1 << 17, 1 << 17)
    graph = import_module(module, torch.zeros(8, 1 << 17), loss=lambda out: out.sum()).graph
    assert graph.values["weight"].type.bytes == 1 << 36


class Of(nn.Module):
    """A forward pass given as a function of the module, and its tensors."""

    def __init__(self, forward, **tensors):
        super().__init__()
        self.run = forward
        for name, tensor in tensors.items():
            if isinstance(tensor, (nn.Parameter, nn.Module)):
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *arguments, **keywords):
        return self.run(self, *arguments, **keywords)


# -- inputs, losses, batch, precision ----------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, pair, *, extra=None, flag=True):
        x, more = pair
        x = self.fc(x + more["b"])
        return {"logits": x if extra is None else x + extra["deep"][0], "number": 3}


def test_nested_inputs_have_dotted_names():
    tensors = torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 3)
    inputs = (((tensors[0], {"b": tensors[1]}),), {"extra": {"deep": [tensors[2]]}})
    imported = import_module(Nested(), inputs, training=False)
    assert dict(imported.inputs) == {"pair.0": 0, "pair.1.b": 0, "extra.deep.0": "extra"}
    assert set(imported.outputs) == {"logits"}


class Weighted(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, out, first, second):
        return ((out["logits"] * self.scale - first) ** 2 + second).mean()


def test_losses_may_have_targets_and_parameters():
    x = torch.randn(5, 4)
    targets = {"second": torch.randn(5, 3), "first": torch.randn(5, 3)}
    imported = import_module(Nested(), ((x, {"b": x.clone()}),), loss=Weighted(), targets=targets)
    assert imported.inputs["targets.first"] == ("targets", "first")
    assert "loss.scale" in imported.graph.parameters
    assert {node.module for node in imported.forward.nodes} == {"", "fc", "loss"}


def test_one_tensor_given_twice_stays_two_inputs():
    x = torch.randn(5, 4)
    imported = import_module(Nested(), ((x, {"b": x}),), training=False)
    assert set(imported.inputs) == {"pair.0", "pair.1.b"}


@dataclass
class Answer:
    logits: torch.Tensor
    states: dict


def test_nested_outputs_have_dotted_names():
    module = Of(lambda self, x: Answer(x + 1, {"last": (x, [x * 2, None])}))
    imported = import_module(module, torch.randn(5, 4), training=False)
    assert set(imported.outputs) == {"logits", "states.last.0", "states.last.1.0"}


def averaged(self, x):
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return (x - self.mean) @ self.w.T


def looked_up(self, x):
    with torch.no_grad():
        target = self.other(self.norm(x)) * self.w.sum()
    return self.norm(x) @ self.w.T - target + (x @ self.w.T).detach() * self.w.mean()


def halved(self, x):
    with torch.autocast("cpu", enabled=False):
        return (self.norm(x) @ self.w.T).detach() * self.w.sum()


@pytest.mark.parametrize("forward", [averaged, looked_up, halved])
def test_gradients_stop_and_buffers_change_where_pytorch_says(forward):
    """With batch normalization, for which PyTorch decomposes the program, and so loses `detach` and `no_grad`."""
    torch.manual_seed(0)
    module = Of(forward, w=nn.Parameter(torch.randn(4, 4)), mean=torch.zeros(4), norm=nn.BatchNorm1d(4),
                other=nn.Linear(4, 4))  # fmt: skip
    example = models.Example(module, torch.randn(6, 4), lambda out, targets: (out - targets).square().mean(),
                             torch.randn(6, 4))  # fmt: skip
    imported = import_module(module, example.inputs, loss=example.loss, targets=example.targets, optimizer=SGD(lr=1.0))
    assert set(imported.graph.updates) & {"mean", "norm.running_mean"}
    assert max(models.errors_against_eager(example, imported)) < 1e-5


def test_assertions_on_values_may_be_left_out():
    """torch.linalg.inv checks its result; the check orders effects, and nothing reads it."""
    x = torch.randn(4, 4)
    imported = import_module(Of(lambda self, x: torch.linalg.inv(x)), x, training=False, on_unknown="replicate")
    assert [item.operator for item in imported.replicated] == ["aten.linalg_inv_ex.default"]
    (found,) = evaluate(imported.graph, {next(iter(imported.inputs)): x.numpy()}).values()
    np.testing.assert_allclose(found, torch.linalg.inv(x).numpy(), rtol=1e-3, atol=1e-4)


def test_dynamic_batch():
    example = models.nano_gpt()
    imported = import_module(
        example.module, example.inputs, loss=example.loss, targets=example.targets, dynamic_batch=True, batch=512
    )
    assert imported.graph.values["idx"].shape == (512, models.SEQUENCE)
    fixed = import_module(
        example.module, models.tokens(512, 16), loss=example.loss, targets=models.tokens(512, 16), batch=512
    )
    assert [(node.op, node.module, node.attributes) for node in imported.graph.nodes] == [
        (node.op, node.module, node.attributes) for node in fixed.graph.nodes
    ]


@pytest.mark.parametrize(
    "precision, stored, computed", [("mixed", "f32", "bf16"), ("bf16", "bf16", "bf16"), ("f64", "f64", "f64")]
)
def test_precision(precision, stored, computed):
    example = models.nano_gpt()
    imported = import_module(
        example.module, example.inputs, loss=example.loss, targets=example.targets, precision=precision
    )
    graph = imported.graph
    assert {graph.values[name].dtype for name in graph.parameters} == {stored}
    products = [node for node in graph.nodes if node.op in ("linear", "matmul", "attention")]
    assert {graph.values[node.inputs[0]].dtype for node in products} == {computed}
    assert graph.values[imported.outputs["loss"]].dtype == ("f64" if precision == "f64" else "f32")
    assert models.errors_against_eager(
        example, import_module(example.module, example.inputs, loss=example.loss, targets=example.targets,
                               precision=precision, optimizer=SGD(lr=1.0))
    ) < (1e-5, 1e-5)  # fmt: skip


def test_example_values_say_how_inputs_are_drawn():
    ids, mask = torch.tensor([[3, 9], [0, 4]]), torch.ones(2, 2, dtype=torch.long)
    graph = import_module(Of(lambda self, ids, mask: (self.w[ids] * mask).sum(), w=nn.Parameter(torch.rand(10))),
                          {"ids": ids, "mask": mask}).graph  # fmt: skip
    assert graph.values["ids"].initial == Initial("integers", (0, 10))
    assert graph.values["mask"].initial == Initial("constant", (1,))


def test_short_integers_are_held_in_wider_ones():
    """Inputs and buffers as well as what is computed: there is no i16."""
    counts, moved = torch.arange(4, dtype=torch.int16), torch.tensor([5, -2, 0, 7], dtype=torch.int16)
    module = Of(lambda self, x, moved: x * self.counts + moved, counts=counts)
    x = torch.randn(8, 4)
    imported = import_module(module, {"x": x, "moved": moved}, training=False)
    assert {imported.graph.values[name].dtype for name in ("counts", "moved")} == {"i32"}
    feeds = {"x": x.numpy(), "moved": moved.numpy(), **imported.state_arrays()}
    (found,) = evaluate(imported.graph, feeds).values()
    np.testing.assert_allclose(found, module(x, moved).numpy(), rtol=1e-6, atol=1e-6)


def test_nodes_know_their_modules_and_lines():
    example = models.nano_gpt()
    imported = import_module(example.module, example.inputs, loss=example.loss, targets=example.targets)
    assert imported.modules["h.1.c_fc.linear"] == "h.1.c_fc"
    lines = Path(models.__file__).read_text().splitlines()
    file, _, number = imported.lines["h.1.c_fc.linear"].rpartition(":")
    assert file == models.__file__ and "self.c_out(F.gelu(self.c_fc(" in lines[int(number) - 1]
    layers = [[(n.op, n.attributes) for n in imported.graph.nodes if n.module.startswith(f"h.{k}")] for k in (0, 1)]
    assert layers[0] == layers[1]


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_keeps_what_it_should():
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.25))
    x = torch.randn(512, 8)
    training = import_module(module, x, loss=lambda out: (out == 0).float().mean() + 0 * out.sum())
    (node,) = (node for node in training.forward.nodes if node.op == "dropout")
    assert node.attributes["rate"] == 0.25
    found = evaluate(training.graph, state_of(training, input=x.numpy()))
    assert abs(float(found[training.outputs["loss"]]) - 0.25) < 0.01
    inference = import_module(module, x, training=False).graph
    assert not any(node.op == "dropout" for node in inference.nodes)


def test_dropout_inside_attention():
    """Its mean over many samples is what attention without dropout gives."""
    module = Of(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).mean(0) * self.w,
                w=nn.Parameter(torch.ones(())))  # fmt: skip
    q, k, v = (torch.randn(1, 1, 4, 4).expand(4096, 1, 4, 4).contiguous() for _ in range(3))
    imported = import_module(module, {"q": q, "k": k, "v": v}, loss=torch.sum)
    assert any(node.op == "dropout" for node in imported.forward.nodes)
    found = evaluate(imported.forward, state_of(imported, q=q.numpy(), k=k.numpy(), v=v.numpy()))
    expected = float(F.scaled_dot_product_attention(q[:1], k[:1], v[:1]).sum())
    assert abs(float(found[imported.outputs["loss"]]) - expected) < 0.1


# -- operators without translation -------------------------------------------------------------------------------------


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = torch.special.i0(self.a(x))
        values, places = torch.kthvalue(self.b(hidden), 2, dim=-1)
        return values.sum() + torch.special.i0(values).sum() + places.sum() * 0.5


def test_one_error_lists_all_unknown_operators():
    with pytest.raises(FrontendError) as caught:
        import_module(Unknown(), torch.randn(6, 8))
    text = str(caught.value)
    assert "2 operators have no translation" in text
    assert "aten.i0.default" in text and "aten.kthvalue.default" in text
    assert f"{__file__}:" in text and '@translation("aten.i0.default")' in text and "replicate" in text


def test_unknown_operators_may_run_whole():
    module, x = Unknown(), torch.randn(6, 8)
    imported = import_module(module, x, on_unknown="replicate", optimizer=SGD(lr=1.0))
    assert {item.operator for item in imported.replicated} == {"aten.i0.default", "aten.kthvalue.default"}
    state = state_of(imported, x=x.numpy())
    found = evaluate(imported.graph, state)
    loss = module(x)
    loss.backward()
    np.testing.assert_allclose(found[imported.outputs["loss"]], float(loss), rtol=1e-5)
    gradient = state["a.weight"] - found["a.weight"]
    np.testing.assert_allclose(gradient, module.a.weight.grad.numpy(), atol=1e-4)
    plan = auto_parallel(imported.graph, "cpu", nodes=1, mesh=(4,), pins={"x": "S(0)"})
    assert plan.verify(rtol=1e-6).passed


def test_users_register_translations():
    from sbp.ops import library as ops

    try:

        @translation("aten.special_i0.default")
        def _(context, x):
            return ops.exp(x)

        module = nn.Module()
        module.forward = lambda x: torch.special.i0(x)
        graph = import_module(module, torch.randn(3), training=False).graph
    finally:
        del translation._entries["aten.special_i0.default"]
    assert [node.op for node in graph.nodes] == ["exp"]


# -- errors ------------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x.sum()
        return (x * x).sum()


class Masked(nn.Module):
    def forward(self, x):
        return x[x > 0].sum()


class Broken(nn.Module):
    def forward(self, x):
        return self.nothing(x)


class Sized(nn.Module):
    def forward(self, x):
        return x.view(6, 2, 4).sum()


class Squared(torch.autograd.Function):
    """With a backward that is not the derivative of its forward."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        return 100 * gradient


def detached_changed(self, x):
    y = self.norm(x) @ self.w
    y.detach()[0].mul_(2)
    return y.sum()


def stopped_within_cast(self, x):
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        y = x @ self.w
    return (x * y.sum() * self.w.sum()).sum()


def frozen(module):
    return module.requires_grad_(False)


class Changing(nn.Module):
    def forward(self, x):
        x.add_(1)
        return x.sum()


X = torch.randn(6, 8)


@pytest.mark.parametrize(
    "module, inputs, options, says",
    [
        (Branching(), X, {}, f"at {__file__}:.*depends on the values of a tensor.*torch.where"),
        (Masked(), X, {}, f"aten.index.Tensor .*{__file__}:.*depends on the values of a tensor"),
        (Broken(), X, {}, f"at {__file__}:.*has no attribute 'nothing'"),
        (Sized(), X, {"dynamic_batch": True}, "cannot take every batch size"),
        (Changing(), X, {}, "changes its input x in place"),
        (Broken(), (X, X), {}, r"do not fit Broken.forward\(x\): too many"),
        (Broken(), {"y": X}, {}, "missing a required argument: 'x'"),
        (Broken(), 3, {}, "example_inputs is a tensor"),
        (Broken(), (3,), {}, "hold no tensor"),
        ("model", X, {}, "takes a torch.nn.Module, got str"),
        (nn.Linear(8, 8), X, {}, r"needs one scalar loss, Linear returns a tensor of shape \[6, 8\].*loss=callable"),
        (nn.Linear(8, 8), X, {"training": False, "optimizer": "sgd"}, "inference has no loss and no optimizer"),
        (nn.Linear(8, 8), X, {"on_unknown": "skip"}, "on_unknown is one of error, replicate"),
        (nn.Linear(8, 8), X, {"training": False, "batch": 9}, "the example inputs have other sizes"),
        (nn.Linear(8, 8), X, {"training": False, "dynamic_batch": {"z": 0}}, "the inputs are input"),
        (nn.Linear(8, 8), X[:1], {"training": False, "dynamic_batch": True}, "at least 2 samples"),
        (nn.Linear(8, 8), X.to(torch.complex64), {"training": False}, "input holds complex numbers"),
        (nn.Linear(8, 8), X, {"loss": lambda out: out}, r"loss returns a float32 tensor of shape \[6, 8\]"),
        (nn.Linear(8, 8), X, {"loss": lambda out: (out > 0).sum()}, "loss returns a int64 tensor"),
        (nn.Linear(8, 8), X, {"loss": lambda out: None}, "loss returns NoneType"),
        (nn.Linear(8, 8), X, {"loss": lambda out: (out.sum(), out)}, "loss returns tuple"),
        (nn.Linear(8, 8), X, {"loss": lambda out, y: out.sum()}, "0 targets: missing a required argument: 'y'"),
        (nn.Linear(8, 8), X, {"loss": torch.nn.MSELoss(), "targets": (X, X)}, "2 targets: too many"),
        (nn.Linear(8, 8), X, {"loss": torch.nn.MSELoss, "targets": X}, r"give loss=MSELoss\(\)"),
        (nn.Linear(8, 8), X, {"loss": "mse"}, "loss is a callable"),
        (nn.Linear(8, 8), X, {"targets": X}, "no loss is given"),
        (nn.Linear(8, 8), X, {"loss": lambda out: out.detach().sum()}, "depends on no parameter that requires"),
        (frozen(nn.Linear(8, 8)), X, {"loss": torch.sum}, "depends on no parameter that requires a gradient"),
        (nn.Linear(8, 8), X, {"training": False, "dynamic_batch": {"input": 2}}, "dimension 2 of input"),
        (nn.Linear(8, 8), X, {"training": False, "dynamic_batch": True, "batch": 0}, "a positive number"),
        (Of(lambda self, x: Squared.apply(x @ self.w).sum(), w=nn.Parameter(X.T)), X, {},
         f"Squared .{__file__}. is a torch.autograd.Function: the backward"),
        (Of(stopped_within_cast, w=nn.Parameter(X.T)), X, {}, "no_grad.. inside torch.autocast"),
        (Of(detached_changed, w=nn.Parameter(X.T), norm=nn.BatchNorm1d(8)), X, {}, f"{__file__}:.*changed in place"),
        (Of(lambda self, x: x * x.max().item()), X, {"training": False},
         f"{__file__}:.*depends on the values of a tensor"),
        (Of(lambda self, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))), X, {"training": False},
         "programs? of its own .torch.cond"),
        (Of(lambda self, x: {"a": [x], "a.0": x + 1}), X, {"training": False},
         "two outputs of the module are named a.0"),
    ],
)  # fmt: skip
def test_errors_say_where_and_what_to_do(module, inputs, options, says):
    import re

    with pytest.raises(FrontendError) as caught:
        import_module(module, inputs, **options)
    assert re.search(says, str(caught.value)), str(caught.value)


# -- auto_parallel -----------------------------------------------------------------------------------------------------


def test_auto_parallel_takes_modules():
    example = models.nano_gpt()
    plan = auto_parallel(
        example.module, "cpu", nodes=1, mesh=(4,), example_inputs=example.inputs, loss=example.loss,
        targets=example.targets, batch=8, pins={"idx": "S(0)"},
    )  # fmt: skip
    assert plan.graph.values["idx"].shape == (8, 16)
    assert plan.verify().passed
    forward = auto_parallel(
        example.module, "cpu", nodes=1, mesh=(4,), example_inputs=example.inputs, training=False, recompute="none"
    )
    assert forward.graph.outputs == ("lm_head.linear",)


def test_auto_parallel_says_what_a_module_lacks():
    module = nn.Linear(8, 8)
    with pytest.raises(FrontendError, match="give example_inputs="):
        auto_parallel(module, "cpu", nodes=1)
    with pytest.raises(FrontendError, match="belong to a torch.nn.Module, the model is a str"):
        auto_parallel("gpt2", "cpu", example_inputs=X)
    with pytest.raises(FrontendError, match="leave sequence out"):
        auto_parallel(module, "cpu", nodes=1, example_inputs=X, loss=torch.sum, sequence=4)
    with pytest.raises(PlanError, match="inference has no optimizer"):
        auto_parallel(module, "cpu", nodes=1, example_inputs=X, training=False, optimizer="sgd")
