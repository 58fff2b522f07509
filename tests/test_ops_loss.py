"""Losses against PyTorch, and the cross-entropy of classes that are split."""

import numpy
import pytest
from operator_programs import Program, check_against_torch, close

from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.ops import library as ops
from sbp.rule import Signature

RNG = numpy.random.default_rng(10)
LOGITS = RNG.standard_normal((3, 4, 7)) * 3
TARGETS = RNG.integers(0, 7, (3, 4))
IGNORED = numpy.where(RNG.random((3, 4)) < 0.3, -100, TARGETS)

torch = pytest.importorskip("torch")
F = torch.nn.functional


def reference(logits, targets, **options):
    shape = targets.shape
    found = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), **options)
    return found.reshape(shape) if options.get("reduction") == "none" else found


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction):
    check_against_torch(
        lambda x, t: ops.cross_entropy(x, t, reduction=reduction),
        lambda x, t: reference(x, t, reduction=reduction),
        LOGITS,
        TARGETS,
    )


@pytest.mark.parametrize("ignore_index, targets", [(-100, IGNORED), (2, TARGETS)])
def test_cross_entropy_with_ignored_targets(ignore_index, targets):
    assert (targets == ignore_index).any()
    for reduction in ("mean", "sum", "none"):
        check_against_torch(
            lambda x, t: ops.cross_entropy(x, t, ignore_index=ignore_index, reduction=reduction),  # noqa: B023
            lambda x, t: reference(x, t, ignore_index=ignore_index, reduction=reduction),  # noqa: B023
            LOGITS,
            targets,
        )


def test_cross_entropy_of_large_logits():
    check_against_torch(ops.cross_entropy, reference, LOGITS * 1000, TARGETS)


def test_the_gradient_of_logits_is_one_node():
    program = Program(ops.cross_entropy, LOGITS, TARGETS)
    wide = [node.op for node in program.graph.nodes if program.graph.values[node.outputs[0]].shape == LOGITS.shape]
    assert wide == ["log_probability_backward"]


def test_split_classes_communicate_rows_only():
    """Maximum, sum of exponentials and the target's logit come out Partial; the gradient comes out split."""
    graph = Program(ops.cross_entropy, LOGITS, TARGETS).graph
    by_name = {node.op: graph.rule(node) for node in graph.nodes}
    split, whole = Layout.parse("S(2)"), Layout.parse("B")

    def admits(op, inputs, output):
        return by_name[op].admits(Signature(inputs, (Layout.parse(output),)), (2,))

    assert admits("max", (split,), "P(max)")
    assert admits("sum_exp", (split, whole), "P")
    assert admits("log_probability", (split, whole, whole, whole), "P")
    assert admits("log_probability_backward", (whole, split, whole, whole, whole), "S(2)")


def test_other_losses():
    x, y, probability = LOGITS, RNG.standard_normal(LOGITS.shape), RNG.random(LOGITS.shape)
    for reduction in ("mean", "sum", "none"):
        check_against_torch(
            lambda a, b: ops.mse_loss(a, b, reduction=reduction),  # noqa: B023
            lambda a, b: F.mse_loss(a, b, reduction=reduction),  # noqa: B023
            x,
            y,
        )
        check_against_torch(
            lambda a, b: ops.binary_cross_entropy_with_logits(a, b, reduction=reduction),  # noqa: B023
            lambda a, b: F.binary_cross_entropy_with_logits(a, b, reduction=reduction),  # noqa: B023
            x,
            probability,
        )
    check_against_torch(ops.nll_loss, lambda a, t: F.nll_loss(a.reshape(-1, 7), t.reshape(-1)), LOGITS, TARGETS)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_distances(reduction):
    x, y = LOGITS, RNG.standard_normal(LOGITS.shape)
    options = {"reduction": reduction}
    check_against_torch(lambda a, b: ops.l1_loss(a, b, **options), lambda a, b: F.l1_loss(a, b, **options), x, y)
    options["beta"] = 1.5
    check_against_torch(
        lambda a, b: ops.smooth_l1_loss(a, b, **options), lambda a, b: F.smooth_l1_loss(a, b, **options), x, y
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "batchmean"])
@pytest.mark.filterwarnings("ignore:reduction")
def test_divergence(reduction):
    shape = LOGITS.shape
    x = torch.log_softmax(torch.from_numpy(LOGITS), -1).numpy()
    target = RNG.random(shape) * (RNG.random(shape) < 0.8)  # some are zero, whose logarithm is infinite
    target = target / target.sum(axis=-1, keepdims=True)
    program = Program(lambda a, b: ops.kl_div(a, b, reduction=reduction), x, target)
    expected = F.kl_div(torch.from_numpy(x), torch.from_numpy(target), reduction=reduction)
    close(program.forward()[0], expected.numpy(), 1e-12)


def test_sum_exp_alone():
    top = LOGITS.max(axis=-1) + 0.5
    check_against_torch(ops.sum_exp, lambda x, m: torch.exp(x - m[..., None]).sum(-1), LOGITS, top)


def test_half_precision_logits_give_a_single_precision_loss():
    logits = LOGITS.astype("float16")
    maximum = ops.max(logits, axis=-1)
    total = ops.sum_exp(logits, maximum)
    rows = ops.log_probability(logits, TARGETS, maximum, total)
    assert total.dtype == rows.dtype == numpy.float32
    expected = F.log_softmax(torch.from_numpy(logits.astype(float)), -1).numpy()
    close(rows, numpy.take_along_axis(expected, TARGETS[..., None], -1)[..., 0].astype("float32"), 1e-6)


def test_refuses_an_unknown_reduction():
    with pytest.raises(RuleError, match="reduction"):
        Program(lambda x: ops.mse_loss(x, x, reduction="average"), LOGITS)
