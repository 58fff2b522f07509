"""Models and plans for export tests: a PyTorch module and the graph of its training step, and plans of that graph."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch_plain import GPT, Llama

from sbp import Cluster, auto_parallel, build, nn, optim
from sbp.graph import Graph, Initial
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.decisions import random_decisions
from sbp.planner.styles import Styles
from sbp.training import training_step

GPT_SIZES = {"layers": 1, "heads": 4, "hidden": 32, "vocabulary": 63, "positions": 16}
LLAMA_SIZES = {
    "layers": 1, "heads": 4, "kv_heads": 2, "hidden": 32, "intermediate": 48, "vocabulary": 64, "theta": 500000.0,
    "eps": 1e-5,
}  # fmt: skip


class Images(nn.Module):
    """Convolution, batch norm and a head: buffers that change in the forward part."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5)
        self.head, self.loss = nn.Linear(5, 7), nn.CrossEntropyLoss()

    def example_inputs(self, batch, sequence=None):
        return {
            "images": (TensorType((batch, 3, 6, 6), "f32"), Initial("normal", (0.0, 1.0))),
            "targets": (TensorType((batch,), "i64"), Initial("integers", (0, 7))),
        }

    def forward(self, images, targets=None):
        logits = self.head(ops.mean(ops.relu(self.norm(self.conv(images))), axis=(2, 3)))
        return logits if targets is None else self.loss(logits, targets)


class TorchImages(torch.nn.Module):
    """The same in PyTorch."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.BatchNorm2d(5)
        self.head = torch.nn.Linear(5, 7)

    def forward(self, images, targets):
        logits = self.head(torch.relu(self.norm(self.conv(images))).mean(dim=(2, 3)))
        return torch.nn.functional.cross_entropy(logits, targets)


@dataclass(frozen=True)
class Model:
    """A module, always with the same values, and the graph of its step."""

    make: Callable[[], torch.nn.Module]
    trace: Callable[[], Graph]

    def module(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.make()

    @cached_property
    def graph(self) -> Graph:
        return self.trace()


ADAMW = optim.AdamW(lr=1e-2, eps=1e-3)
MODELS = {
    "gpt": Model(lambda: GPT(**GPT_SIZES), lambda: training_step(build("gpt2", **GPT_SIZES), 6, 12, ADAMW, "f32")),
    "llama": Model(
        lambda: Llama(**LLAMA_SIZES), lambda: training_step(build("llama-3-8b", **LLAMA_SIZES), 4, 8, ADAMW, "f32")
    ),
    "images": Model(TorchImages, lambda: training_step(Images(), 5, optimizer=optim.SGD(lr=0.1), precision="f32")),
}


def batch_for(graph, step):
    """Inputs of a step, global tensors."""
    generator, feeds = torch.Generator().manual_seed(100 + step), {}
    for name in graph.inputs:
        value = graph.values[name]
        if value.dtype == "i64":
            feeds[name] = torch.randint(0, int(value.initial.parameters[1]), value.shape, generator=generator)
        else:
            feeds[name] = torch.randn(value.shape, generator=generator)
    return feeds


def plan_on(graph, mesh, pins=None, styles=()):
    """A plan on a mesh of CPUs, with some layouts pinned, or with every axis parallelised in a usual way."""
    restriction = (lambda graph, mesh: Styles(graph, mesh, *styles)) if styles else None
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=mesh.size)
    return auto_parallel(graph, cluster, mesh=mesh, pins=pins, time_limit=10, restriction=restriction)


def drawn(plan, seed):
    """The plan with legal decisions at random in place of its own."""
    decisions = random_decisions(plan.graph, plan.mesh, seed)
    return replace(plan, decisions=decisions, lower_bound_seconds=0.0)
