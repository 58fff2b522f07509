"""Recompute: the same numbers, fewer activations alive at once."""

import numpy
import pytest

from sbp.initial import draw_all
from sbp.interpreter import evaluate
from sbp.models import TINY, build
from sbp.passes.recompute import block_of, with_recompute
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.training import training_step


@pytest.mark.parametrize(
    "module, block",
    [
        ("h.3.mlp.fc", "h.3"),
        ("layers.11", "layers.11"),
        ("layer1.0.conv2", "layer1.0"),
        ("encoder.layer.2.attn.0", "encoder.layer.2"),
        ("ln_f", None),
        ("loss", None),
        ("", None),
    ],
)
def test_blocks(module, block):
    assert block_of(module) == block


@pytest.mark.parametrize("name", TINY)
def test_same_numbers(name):
    graph = training_step(build(f"tiny-{name}"), 4, precision="f64")
    again = with_recompute(graph)
    arrays = draw_all(graph, 0, "f64")
    before, after = evaluate(graph, arrays), evaluate(again, arrays)
    assert before.keys() == after.keys()
    for value in before:
        numpy.testing.assert_array_equal(before[value], after[value], err_msg=value)


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "bert", "vit", "resnet"])
def test_backward_reads_nothing_from_inside_a_block(name):
    graph = with_recompute(training_step(build(f"tiny-{name}"), 4))
    forward = {n.name: block_of(n.module) for n in graph.nodes if n.phase == "forward"}
    leaving = {
        value
        for node in graph.nodes
        if node.phase == "forward"
        for value in node.inputs
        if value in graph.producers and forward.get(graph.nodes[graph.producers[value][0]].name) != forward[node.name]
    }
    read_later = {value for node in graph.nodes if node.phase == "backward" for value in node.inputs}
    for value in read_later & set(graph.producers):
        producer = graph.nodes[graph.producers[value][0]]
        inside = producer.phase == "forward" and block_of(producer.module) is not None
        assert not inside or value in leaving, value


def test_masks_come_out_the_same():
    graph = training_step(build("tiny-gpt2", dropout=0.3), 4, precision="f64")
    again = with_recompute(graph)
    assert any(node.op == "dropout" and node.name.endswith(".again") for node in again.nodes)
    arrays = draw_all(graph, 0, "f64")
    before, after = evaluate(graph, arrays), evaluate(again, arrays)
    for value in before:
        numpy.testing.assert_array_equal(before[value], after[value], err_msg=value)


def test_planned_where_nothing_fits_otherwise(tmp_path):
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    options = {"batch": 64, "sequence": 12, "mesh": (2,)}
    model = build("tiny-gpt2", layers=8, vocabulary=8)
    free = auto_parallel(model, cluster, recompute="none", **options)
    full = auto_parallel(model, cluster, recompute="full", **options)
    assert full.memory.peak_bytes < 0.7 * free.memory.peak_bytes
    assert full.objective_seconds > free.objective_seconds
    assert auto_parallel(model, cluster, **options).model["recompute"] is False
    limit = (full.memory.peak_bytes + free.memory.peak_bytes) // 2
    needed = max(full.memory.peak_bytes, full.arena.size_bytes)
    chosen = auto_parallel(model, cluster, memory_limit=needed, **options)
    assert chosen.memory.peak_bytes <= needed < limit
    assert chosen.model["recompute"] is True
    assert full.verify().passed
    assert full.verify(scaled=True).passed
