"""An exported module as its user meets it, in one process: what it keeps, what it takes, what it refuses."""

from dataclasses import replace

import numpy
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch_export_cases import GPT_SIZES, MODELS, batch_for, plan_on  # noqa: E402
from torch_plain import GPT  # noqa: E402

from sbp import Cluster, auto_parallel, build, nn, optim  # noqa: E402
from sbp.comm.interface import CommunicationError  # noqa: E402
from sbp.graph import Initial  # noqa: E402
from sbp.initial import draw_all  # noqa: E402
from sbp.interpreter import evaluate  # noqa: E402
from sbp.layout import Layout  # noqa: E402
from sbp.mesh import Mesh  # noqa: E402
from sbp.operator import TensorType  # noqa: E402
from sbp.runtime.torch_program import ExportError  # noqa: E402
from sbp.training import training_step  # noqa: E402

ONE = Mesh((1,), ("dp",))


@pytest.fixture
def one():
    """The device mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gpt_plan():
    return plan_on(MODELS["gpt"].graph, ONE)


def single(graph):
    return auto_parallel(graph, Cluster.preset("cpu", nodes=1, devices_per_node=1), mesh=ONE)


def test_gradients_accumulate_and_frozen_parameters_have_none(one, gpt_plan):
    module = MODELS["gpt"].module()
    module.wpe.weight.requires_grad_(False)
    gpt_plan.to_torch(module, one)
    batch = batch_for(gpt_plan.graph, 0)
    module(**batch).backward()
    first = {name: p.grad.full_tensor().clone() for name, p in module.named_parameters() if p.grad is not None}
    assert "wpe.weight" not in first and len(first) == len(list(module.parameters())) - 1
    (2 * module(**batch)).backward()
    for name, parameter in module.named_parameters():
        if name in first:
            torch.testing.assert_close(parameter.grad.full_tensor(), 3 * first[name])


def test_tied_parameters_stay_tied(one, gpt_plan):
    module = gpt_plan.to_torch(MODELS["gpt"].module(), one)
    assert module.lm_head.weight is module.wte.weight and isinstance(module.wte.weight, DTensor)
    assert {"lm_head.weight", "wte.weight"} <= set(module.state_dict())


def test_evaluation_without_gradients(one, gpt_plan):
    module, reference = gpt_plan.to_torch(MODELS["gpt"].module(), one), MODELS["gpt"].module()
    batch = batch_for(gpt_plan.graph, 0)
    module.eval()
    with torch.no_grad():
        loss = module(**batch)
    assert not loss.requires_grad and float(loss) == pytest.approx(reference(**batch).item(), rel=1e-6)


def test_checkpoints_go_both_ways(one, gpt_plan, tmp_path):
    from torch.distributed import checkpoint

    module = gpt_plan.to_torch(MODELS["gpt"].module(), one)
    checkpoint.save(module.state_dict(), checkpoint_id=str(tmp_path))
    torch.manual_seed(9)
    other = gpt_plan.to_torch(GPT(**GPT_SIZES), one)
    plain = GPT(**GPT_SIZES)
    batch = batch_for(gpt_plan.graph, 0)
    assert float(other(**batch)) != pytest.approx(float(module(**batch)), rel=1e-3)
    for fresh in (other, plain):
        state = fresh.state_dict()
        checkpoint.load(state, checkpoint_id=str(tmp_path))
        fresh.load_state_dict(state)
        assert float(fresh(**batch)) == pytest.approx(float(module(**batch)), rel=1e-6)


def test_modules_on_the_meta_device_get_empty_parameters(one, gpt_plan):
    with torch.device("meta"):
        module = GPT(**GPT_SIZES)
    gpt_plan.to_torch(module, one)
    assert all(not parameter.is_meta for parameter in module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    loss = module(**batch_for(gpt_plan.graph, 0))
    assert float(loss) == pytest.approx(numpy.log(GPT_SIZES["vocabulary"]), rel=1e-6)


class Shifts(nn.Module):
    """Two parameters with one gradient, and a third that is not used."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter((4,), "f32"), nn.Parameter((4,), "f32")
        self.loss = nn.MSELoss()

    def example_inputs(self, batch, sequence=None):
        kind = TensorType((batch, 4), "f32"), Initial("normal", (0.0, 1.0))
        return {"x": kind, "targets": kind}

    def forward(self, x, targets=None):
        return self.loss(x + (self.a + self.b), targets)


class TorchShifts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
        self.unused = torch.nn.Parameter(torch.ones(2))


def test_gradients_do_not_share_memory(one):
    """Clipping scales gradients in place; what is one value in the plan must not be scaled twice."""
    module = single(training_step(Shifts(), 3, precision="f32")).to_torch(TorchShifts(), one)
    module(torch.zeros(3, 4), torch.zeros(3, 4)).backward()
    before = module.a.grad.full_tensor().clone()
    torch.nn.utils.clip_grad_norm_([module.a, module.b], 0.1)
    assert module.a.grad.to_local().data_ptr() != module.b.grad.to_local().data_ptr()
    norm = torch.cat([module.a.grad.full_tensor(), module.b.grad.full_tensor()]).norm()
    assert float(norm) == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close(module.a.grad.full_tensor() / module.a.grad.full_tensor().norm(), before / before.norm())


def test_parameters_that_the_plan_does_not_read(one):
    module = single(training_step(Shifts(), 3, precision="f32")).to_torch(TorchShifts(), one)
    assert isinstance(module.unused, DTensor) and module.unused.grad is None
    assert [d.place for d in module.sbp.report.differences] == ["unused"]
    assert "unused: planned not read" in str(module.sbp.report)
    torch.optim.AdamW(module.parameters()).step()


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.loss = nn.MSELoss()

    def example_inputs(self, batch, sequence=None):
        kind = Initial("normal", (0.0, 1.0))
        return {"x": (TensorType((batch, 6), "f32"), kind), "targets": (TensorType((batch, 3), "f32"), kind)}

    def forward(self, x, targets=None):
        y = self.second(self.drop(self.first(x)))
        return y if targets is None else self.loss(y, targets)


class TorchDropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)


def test_dropout_draws_new_masks_every_step_and_the_same_ones_backward(one):
    """Against the interpreter, which runs the same graph with the same counter of steps."""
    graph = training_step(Dropped(), 5, optimizer=optim.SGD(lr=0.1), precision="f32")
    module = single(graph).to_torch(TorchDropped(), one)
    feeds = draw_all(graph, seed=3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.to_local().copy_(torch.from_numpy(feeds[name]))
    optimizer, seen = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(3):
        made = evaluate(graph, feeds, floating=None)
        loss = module(*(torch.from_numpy(numpy.array(feeds[name])) for name in graph.inputs))
        seen.append(float(loss))
        assert seen[-1] == pytest.approx(float(made[graph.outputs[0]]), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        feeds.update((name, made[name]) for name in graph.updates)
        for name, parameter in module.named_parameters():
            numpy.testing.assert_allclose(parameter.full_tensor().detach().numpy(), made[name], 1e-5, 1e-6)
    assert {d.place for d in module.sbp.report.differences} == {"dropout", "random.step"}
    module.eval()
    with pytest.raises(ExportError, match="training=False"):
        module(torch.zeros(5, 6), torch.zeros(5, 3))


@pytest.mark.parametrize(("options", "tolerance"), [({"recompute": "full"}, 1e-5), ({"precision": "mixed"}, 2e-2)])
def test_recompute_and_mixed_precision(one, options, tolerance):
    """Layers run again in the backward part; bf16 between parameters and gradients in float32."""
    plan = auto_parallel(
        build("gpt2", **GPT_SIZES), Cluster.preset("cpu", nodes=1, devices_per_node=1), mesh=ONE, batch=6, sequence=12,
        **{"precision": "f32", **options},
    )  # fmt: skip
    if "recompute" in options:
        assert any(node.phase == "backward" and node.op == "gelu" for node in plan.graph.nodes)
    else:
        assert any(value.dtype == "bf16" for value in plan.graph.values.values())
    module, reference = plan.to_torch(MODELS["gpt"].module(), one), MODELS["gpt"].module()
    batch = batch_for(plan.graph, 0)
    loss, expected = module(**batch), reference(**batch)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    wrong = scale = 0.0
    for parameter, other in zip(module.parameters(), reference.parameters()):
        assert parameter.grad.dtype == torch.float32
        wrong += (parameter.grad.full_tensor() - other.grad).square().sum().item()
        scale += other.grad.square().sum().item()
    assert (wrong / scale) ** 0.5 < 3 * tolerance


def test_inference(one):
    plan = auto_parallel(
        build("gpt2", **GPT_SIZES), Cluster.preset("cpu", nodes=1, devices_per_node=1), mesh=ONE, batch=6, sequence=12,
        training=False, precision="f32",
    )  # fmt: skip
    module, reference = plan.to_torch(MODELS["gpt"].module(), one), MODELS["gpt"].module()
    tokens = batch_for(plan.graph, 0)["tokens"]
    logits = module.eval()(tokens)
    assert not logits.requires_grad
    torch.testing.assert_close(logits, reference(tokens), rtol=1e-5, atol=1e-4)


def test_what_is_refused(one, gpt_plan):
    fresh = MODELS["gpt"].module
    with pytest.raises(ExportError, match=r"torch.nn.Module or an Imported, got dict"):
        gpt_plan.to_torch({}, one)
    with pytest.raises(ExportError, match=r"device_mesh is a tuple; give init_device_mesh\(device, \(1,\)"):
        gpt_plan.to_torch(fresh(), (1,))
    with pytest.raises(ExportError, match=r"wpe.weight: the plan has f32\[16,32\], .* torch.float64; convert"):
        gpt_plan.to_torch(fresh().double(), one)
    with pytest.raises(ExportError, match=r"of shape \[64, 32\]"):
        gpt_plan.to_torch(GPT(**{**GPT_SIZES, "vocabulary": 64}), one)
    with pytest.raises(ExportError, match=r"has the parameter .*wpe.weight.* the module has none of that name"):
        gpt_plan.to_torch(torch.nn.Linear(2, 2), one)
    module = gpt_plan.to_torch(fresh(), one)
    with pytest.raises(ExportError, match="runs a plan already"):
        gpt_plan.to_torch(module, one)
    batch = batch_for(gpt_plan.graph, 0)
    for wrong, text in (
        ({"tokens": batch["tokens"]}, "targets missing"),
        ({**batch, "mask": batch["tokens"]}, "mask unknown"),
        ({**batch, "tokens": batch["tokens"][:, :3]}, r"planned as i64\[6,12\].*shape \[6, 3\]"),
        ({**batch, "tokens": [1, 2]}, "'tokens' is a list"),
    ):
        with pytest.raises(ExportError, match=text):
            module(**wrong)
    with pytest.raises(ExportError, match="3 too many positional"):
        module(batch["tokens"], batch["targets"], batch["targets"])
    loss = module(**batch)
    loss.backward(retain_graph=True)
    with pytest.raises(ExportError, match="once for every forward"):
        loss.backward()


def test_another_mesh_is_refused(one):
    with pytest.raises(CommunicationError, match=r"init_device_mesh\(device, \(2,\)"):
        plan_on(MODELS["gpt"].graph, Mesh((2,), ("dp",))).to_torch(MODELS["gpt"].module(), one)


# -- several ranks, of which this process is the first and the others are not there ------------------------------------


@pytest.fixture
def four():
    """Process groups that do nothing: for what happens before anything is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def _pinned(pins):
    """A data-parallel GPT with some layouts of state changed."""
    plan = plan_on(MODELS["gpt"].graph, Mesh((4,), ("dp",)))
    sources = {**plan.decisions.sources, **{name: Layout.parse(text) for name, text in pins.items()}}
    return replace(plan, decisions=replace(plan.decisions, sources=sources), lower_bound_seconds=0.0)


def test_strict_refuses_what_would_differ(four):
    plan = _pinned({"h.0.mlp.fc.weight.exp_avg": "S(0)", "h.0.mlp.fc.weight": "B"})
    with pytest.raises(ExportError, match=r"strict, .*h.0.mlp.fc.weight"):
        plan.to_torch(MODELS["gpt"].module(), four, strict=True)
    same = _pinned({})
    assert same.to_torch(MODELS["gpt"].module(), four, strict=True).sbp.report.differences == ()


def test_parameters_have_the_planned_placements(four):
    names = {"h.0.mlp.fc.weight": "S(0)", "h.0.mlp.proj.weight": "S(1)", "h.0.ln_1.bias": "B"}
    state = {f"{name}.{kind}": text for name, text in names.items() for kind in ("exp_avg", "exp_avg_sq")}
    module = _pinned({**names, **state}).to_torch(MODELS["gpt"].module(), four)
    assert module.h[0].mlp.fc.weight.placements == (Shard(0),)
    assert module.h[0].mlp.fc.weight.to_local().shape == (32, 32)
    assert module.h[0].mlp.proj.weight.placements == (Shard(1),)
    assert module.h[0].ln_1.bias.placements == (Replicate(),)
    assert module.wte.weight.shape == (63, 32)
