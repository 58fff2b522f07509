"""Whole models imported from PyTorch: every loss, gradient and running statistic equals eager PyTorch's."""

import pytest

torch = pytest.importorskip("torch", reason="imports PyTorch models")

import torch_models as models  # noqa: E402

from sbp.frontend.torch import import_module  # noqa: E402
from sbp.optim import SGD  # noqa: E402
from sbp.planner.auto_parallel import auto_parallel  # noqa: E402


def imported_and_compared(example):
    imported = import_module(
        example.module, example.inputs, loss=example.loss, targets=example.targets, optimizer=SGD(lr=1.0)
    )
    loss, gradients = models.errors_against_eager(example, imported)
    assert loss < 1e-5 and gradients < 2e-5, (loss, gradients)
    assert not imported.replicated
    return imported


@pytest.mark.parametrize("name", models.PLAIN)
def test_plain_modules(name):
    imported_and_compared(models.PLAIN[name]())


@pytest.mark.filterwarnings("ignore:divide by zero")  # T5 takes the logarithm of distances, then leaves out those of 0
@pytest.mark.parametrize("name", models.HUGGING_FACE)
def test_hugging_face(name):
    pytest.importorskip("transformers", reason="builds Hugging Face's models")
    imported_and_compared(models.HUGGING_FACE[name]())


@pytest.mark.parametrize("name", ["ResNet-50", "DLRM", "nanoGPT"])
def test_a_plan_of_an_imported_model_computes_what_it_computes(name):
    example = models.PLAIN[name]()
    imported = import_module(example.module, example.inputs, loss=example.loss, targets=example.targets)
    graph = imported.graph
    pins = {"dense": "S(0)"} if name == "DLRM" else {"*.weight": "S(0)"} if name == "nanoGPT" else {"x": "S(0)"}
    plan = auto_parallel(graph, "cpu", nodes=1, mesh=(4,), pins=pins)
    feeds = models.feeds_of(example, imported)
    assert plan.verify(feeds={key: feeds[key] for key in feeds if key in graph.sources}).passed
