"""Imported models under a plan in one process: loss, gradients and buffers as PyTorch's own; constants come along."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")

import torch.distributed as dist  # noqa: E402
import torch_models  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from sbp import Cluster, auto_parallel  # noqa: E402
from sbp.frontend.torch import import_module  # noqa: E402
from sbp.runtime.torch_program import ExportError  # noqa: E402

CLUSTER = Cluster.preset("cpu", nodes=1, devices_per_node=1)
HUGGING_FACE = ("mixtral", "t5", "mamba")
PLAIN = ("resnet", "dlrm")


@pytest.fixture
def one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _example(name):
    if name in HUGGING_FACE:
        pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
    return getattr(torch_models, name)()


def _fed(value, example, imported):
    """The example's tensor for an input of the imported graph."""
    place = imported.inputs[value]
    if isinstance(place, tuple):
        targets = example.targets if isinstance(example.targets, tuple) else (example.targets,)
        return targets[int(place[1])]
    inputs = (example.inputs,) if isinstance(example.inputs, torch.Tensor) else example.inputs
    return inputs[place]


@pytest.mark.parametrize("name", HUGGING_FACE + PLAIN)
def test_loss_gradients_and_buffers(name, one):
    example = _example(name)
    reference = copy.deepcopy(example.module)
    imported = import_module(
        example.module, example.inputs, loss=example.loss, targets=example.targets, optimizer="sgd"
    )
    plan = auto_parallel(imported.graph, CLUSTER, mesh=(1,))
    module = plan.to_torch(imported, one)
    loss = module(**{value: _fed(value, example, imported) for value in imported.graph.inputs})
    loss.backward()

    inputs = example.inputs
    positional = inputs if isinstance(inputs, tuple) else (inputs,) if isinstance(inputs, torch.Tensor) else ()
    made = reference(*positional, **(inputs if isinstance(inputs, dict) else {}))
    targets = example.targets if isinstance(example.targets, tuple) else (example.targets,)
    expected = made.loss if example.loss is None else example.loss(made, *targets)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wrong = scale = 0.0
    found = dict(module.named_parameters())
    for key, parameter in reference.named_parameters():
        if parameter.grad is not None:
            wrong += (found[key].grad.full_tensor() - parameter.grad).square().sum().item()
            scale += parameter.grad.square().sum().item()
    assert scale > 0 and (wrong / scale) ** 0.5 < 1e-5
    buffers = dict(module.named_buffers())
    for key, buffer in reference.named_buffers():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(buffers[key], buffer, rtol=1e-5, atol=1e-6)
    assert module.sbp.report.on_host == ()


class Weighted(torch.nn.Module):
    """A tensor written in the code: a constant of the program, in no state_dict."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return (self.linear(x) * torch.tensor([1.0, 2.0, 4.0])).square().sum()


def test_constants_of_the_program_come_with_the_import(one):
    torch.manual_seed(0)
    module, x = Weighted(), torch.ones(2, 3)
    expected = module(x).item()
    imported = import_module(module, (x,))
    assert [tensor.tolist() for tensor in imported.constants.values()] == [[1.0, 2.0, 4.0]]
    plan = auto_parallel(imported.graph, CLUSTER, mesh=(1,))
    with pytest.raises(ExportError, match=r"buffer .* none of that name; .*in its Imported"):
        plan.to_torch(module, one)
    assert plan.to_torch(imported, one)(x).item() == pytest.approx(expected, rel=1e-6)
