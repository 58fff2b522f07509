"""Micro-batches that weigh differently: the step of a pipeline is that of the whole batch, not a mean of means."""

import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import random_plan, replicated_plan

from sbp import nn
from sbp.errors import PipelineError
from sbp.graph import Initial
from sbp.initial import draw
from sbp.interpreter import evaluate
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.optim import SGD
from sbp.planner.accumulation import COUNTED, MEAN, SUM, accumulation_of
from sbp.planner.stages import cut
from sbp.runtime.actors import PipelineExecutor
from sbp.training import training_step

IGNORED, CLASSES, SAMPLES, TOKENS = -100, 6, 2, 5


class Classifier(nn.Module):
    """Four layers over tokens, and a loss of logits, targets and the last hidden values."""

    def __init__(self, loss):
        super().__init__()
        widths = (7, 8, 8, 8, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))
        self.loss = loss

    def forward(self, x, targets):
        for at, layer in enumerate(self.layers):
            x = layer(x if at == 0 else ops.tanh(x))
        return self.loss(x, targets)

    def example_inputs(self, batch, sequence=None):
        return {
            "x": (TensorType((batch, TOKENS, 7), "f32"), Initial("normal", (0.0, 1.0))),
            "targets": (TensorType((batch, TOKENS), "i64"), Initial("integers", (0, CLASSES))),
        }


def ignoring(logits, targets):
    return ops.cross_entropy(logits, targets, ignore_index=IGNORED)


def total(logits, targets):
    return ops.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def per_token(logits, targets):
    return ops.scale(total(logits, targets), factor=1 / (logits.shape[0] * logits.shape[1]))


def doubled(logits, targets):
    return ops.scale(total(logits, targets), factor=2.0)


def plain(logits, targets):
    return ops.cross_entropy(logits, targets)


def mean_of_two_kinds(logits, targets):
    return ops.add(ops.mean(ops.square(logits)), ops.cross_entropy(logits, targets))


def step_of(loss, samples):
    return training_step(Classifier(loss), samples, optimizer=SGD(lr=0.5), precision="f64")


def batch_of(graph, kept, seed=0):
    """The inputs; of sample i the first kept[i] targets are not ignored."""
    arrays = {name: draw(graph.values[name], seed, "f64") for name in (*graph.state, *graph.inputs)}
    targets = arrays["targets"].copy()
    for sample, count in enumerate(kept):
        targets[sample, count:] = IGNORED
    return {**arrays, "targets": targets}


def compare(loss, kept, plan, stages, order):
    """The pipeline's loss and its state after a step against the unsharded program of the whole batch."""
    whole, micro = step_of(loss, len(kept)), step_of(loss, SAMPLES)
    arrays = batch_of(whole, kept)
    expected = evaluate(whole, arrays)
    count = len(kept) // SAMPLES
    pipeline = PipelineExecutor(cut(plan(micro), stages), count, order, floating="f64")
    state = pipeline.place({name: arrays[name] for name in micro.state})
    feeds = [
        pipeline.place({name: arrays[name][SAMPLES * at : SAMPLES * (at + 1)] for name in micro.inputs})
        for at in range(count)
    ]
    step = pipeline.run(state, feeds)
    (name,) = micro.outputs
    assert pipeline.collect_losses(step)[name] == pytest.approx(float(expected[name]), rel=1e-12)
    found = pipeline.collect_state(step.state)
    moved = 0
    for value in micro.updates:
        numpy.testing.assert_allclose(found[value], expected[value], rtol=1e-10, atol=1e-13, err_msg=value)
        moved += not numpy.array_equal(expected[value], arrays[value])
    assert moved
    return step


UNEQUAL = [(5, 5, 1, 0, 2, 3), (0, 0, 4, 5, 1, 1), (5, 5, 5, 5, 0, 0), (3, 0, 0, 1)]


@pytest.mark.parametrize("kept", UNEQUAL)
@pytest.mark.parametrize("stages, order", [(2, "1f1b"), (4, "gpipe")])
def test_unequal_counts_equal_the_whole_batch(kept, stages, order):
    """Micro-batches without any counted token included: their own loss is 0 / 0."""
    step = compare(ignoring, kept, lambda graph: replicated_plan(graph, Mesh((1,))), stages, order)
    counts = numpy.array(kept).reshape(-1, SAMPLES).sum(axis=1)
    assert step.shares == pytest.approx(counts / counts.sum())


@pytest.mark.parametrize("seed", range(3))
def test_unequal_counts_on_a_mesh(seed):
    """Any layouts: the count is Partial on some axis first and whole where it is read."""
    compare(ignoring, UNEQUAL[0], lambda graph: random_plan(graph, Mesh((2, 2)), seed), 2, "1f1b")


@pytest.mark.parametrize("loss", [total, per_token, doubled, plain, mean_of_two_kinds])
def test_other_reductions_equal_the_whole_batch(loss):
    kept = (5,) * 6 if loss in (plain, mean_of_two_kinds) else UNEQUAL[0]
    compare(loss, kept, lambda graph: replicated_plan(graph, Mesh((2,))), 2, "1f1b")


def test_r080_the_mean_of_a_batch_is_not_the_mean_of_its_means():
    """Micro-batches of 5 and 1 counted tokens: token means (m1, m2) give (5 m1 + m2) / 6, not (m1 + m2) / 2."""
    micro = step_of(ignoring, SAMPLES)
    pipeline = PipelineExecutor(cut(replicated_plan(micro, Mesh((1,))), 2), 2, floating="f64")
    arrays = batch_of(step_of(ignoring, 4), (3, 2, 1, 0))
    state = pipeline.place({name: arrays[name] for name in micro.state})
    feeds = [pipeline.place({n: arrays[n][a : a + 2] for n in micro.inputs}) for a in (0, 2)]
    step = pipeline.run(state, feeds)
    (name,) = micro.outputs
    first, second = map(float, pipeline.collect_outputs(step.outputs)[name])
    assert pipeline.collect_losses(step)[name] == pytest.approx((5 * first + second) / 6, rel=1e-12)
    assert abs(first - second) > 1e-3 and step.shares == pytest.approx((5 / 6, 1 / 6))


def test_r083_gradients_are_divided_once_by_the_number_of_all_tokens():
    """n = (3, 1) tokens: the same step as one batch of 4."""
    step = compare(ignoring, (3, 0, 1, 0), lambda graph: replicated_plan(graph, Mesh((1,))), 2, "1f1b")
    assert step.shares == (0.75, 0.25)


@pytest.mark.parametrize(
    "loss, kind", [(ignoring, COUNTED), (total, SUM), (doubled, SUM), (per_token, MEAN), (plain, MEAN)]
)
def test_what_a_loss_is(loss, kind):
    assert accumulation_of(replicated_plan(step_of(loss, SAMPLES), Mesh((1,)))).kind == kind


def test_losses_without_weights_are_refused():
    def twice(logits, targets):
        return ops.add(ignoring(logits, targets), ops.cross_entropy(logits, targets, ignore_index=1))

    def by_root(logits, targets):
        counted = ops.sum(ops.logical_not(ops.equal_number(targets, number=IGNORED)))
        return ops.div(total(logits, targets), ops.sqrt(ops.cast(counted, dtype=logits.dtype)))

    for loss, message in ((twice, "different counts"), (by_root, "not a count")):
        with pytest.raises(PipelineError, match=message):
            cut(replicated_plan(step_of(loss, SAMPLES), Mesh((1,))), 2)
