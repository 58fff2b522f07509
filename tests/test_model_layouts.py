"""What the models' graphs admit: batch splits without communication, and Megatron's head and column splits."""

from dataclasses import replace
from fnmatch import fnmatch

import pytest

from sbp import models
from sbp.layout import Layout, Partial, Split, broadcast_layout
from sbp.training import training_step

MESH = (2,)
WHOLE = broadcast_layout(1)


def reductions(graph, stored):
    """Follow given layouts of the sources through the graph.

    Every node takes its inputs as they come, or a slice of what every rank has whole, which costs nothing. Where no
    signature does, only P may be made B, which is counted.

    Returns
    -------
    list
        (phase, value) of every value that had to be reduced, each once.
    """
    layouts = {}
    for name in graph.sources:
        found = [layout for pattern, layout in stored.items() if fnmatch(name, pattern)]
        layouts[name] = Layout.parse(found[0]) if found else WHOLE
    reduced = []
    for node in graph.nodes:
        signature = fitting(graph, node, layouts)
        if signature is None:
            for name in node.inputs:
                if isinstance(layouts[name][0], Partial):
                    reduced.append((node.phase, name))
                    layouts[name] = WHOLE
            signature = fitting(graph, node, layouts)
        assert signature, f"{node.name} ({node.op}) cannot take {', '.join(str(layouts[name]) for name in node.inputs)}"
        layouts.update(zip(node.outputs, signature.outputs))
    return reduced


def fitting(graph, node, layouts):
    """The signature that takes the inputs as they are, with as few slices as can be."""

    def slices(signature):
        pairs = [(found, layouts[name]) for found, name in zip(signature.inputs, node.inputs)]
        if any(found != held and not (held == WHOLE and isinstance(found[0], Split)) for found, held in pairs):
            return None
        return sum(found != held for found, held in pairs)

    counted = [
        (slices(signature), number, signature) for number, signature in enumerate(graph.rule(node).signatures(MESH))
    ]
    return min((item for item in counted if item[0] is not None), default=(0, 0, None))[2]


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "vit", "mlp"])
def test_a_split_batch_needs_reductions_of_gradients_only(name):
    graph = training_step(models.TINY[name].build(), 4, 8)
    found = reductions(graph, dict.fromkeys(graph.inputs, "S(0)"))
    assert {phase for phase, _ in found} == {"optimizer"}
    assert len(found) == len(graph.parameters)


MEGATRON = {
    "*.qkv.weight": "S(0)",
    "*.qkv.bias": "S(0)",
    "*.attn.proj.weight": "S(1)",
    "*.[qkv]_proj.weight": "S(0)",
    "*.o_proj.weight": "S(1)",
    "*.fc.weight": "S(0)",
    "*.fc.bias": "S(0)",
    "*.mlp.proj.weight": "S(1)",
    "*.gate_proj.weight": "S(0)",
    "*.up_proj.weight": "S(0)",
    "*.down_proj.weight": "S(1)",
}


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "bert", "vit"])
def test_megatrons_split_needs_two_reductions_per_layer_and_direction(name):
    """Shoeybi et al. 2019: heads and columns split; reduced are block outputs forward and block inputs backward.

    The gradients that Llama's separate projections give for one input are added before they are reduced. What is left
    for the optimizer are vectors: gradients of norms, which let the unreduced gradient pass.
    """
    config = replace(models.TINY[name], layers=3)
    graph = training_step(config.build(), 2, 8)
    moments = {f"{key}.*": layout for key, layout in MEGATRON.items()}
    found = reductions(graph, MEGATRON | moments)
    for phase in ("forward", "backward"):
        assert len([value for label, value in found if label == phase]) == 2 * config.layers
    assert all(len(graph.values[value].shape) == 1 for label, value in found if label == "optimizer")
