"""Softmax and norms against PyTorch, forward and gradients; batch norm over a split batch; half precision."""

import numpy
import pytest
from operator_programs import check_against_torch, close

from sbp.autodiff import backward
from sbp.errors import RuleError
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder

torch = pytest.importorskip("torch")
functional = torch.nn.functional


BUFFERS = ("mean", "variance")


def draw(*shapes, offset=0.0):
    rng = numpy.random.default_rng(5)
    return [rng.standard_normal(shape) + offset for shape in shapes]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name, axis):
    check_against_torch(
        lambda x: getattr(ops, name)(x, axis=axis), lambda x: getattr(functional, name)(x, dim=axis), *draw((3, 4, 5))
    )


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_of_huge_numbers_is_finite(name):
    x = numpy.array([[1e4, 1e4 - 1, -1e4], [-1e30, 0, 1e30]])
    check_against_torch(getattr(ops, name), lambda x: getattr(functional, name)(x, dim=-1), x)


@pytest.mark.parametrize("shape", [(2, 3, 6), (5, 1), (4,)])
def test_layer_norm(shape):
    check_against_torch(
        lambda x, w, b: ops.layer_norm(x, w, b, eps=1e-3),
        lambda x, w, b: functional.layer_norm(x, shape[-1:], w, b, eps=1e-3),
        *draw(shape, shape[-1:], shape[-1:]),
    )


def test_layer_norm_far_from_zero():
    """Two passes: the variance of numbers near 1e6 keeps its digits."""
    x, w, b = draw((3, 64), (64,), (64,))
    close(ops.layer_norm(x + 1e6, w, b), ops.layer_norm(x, w, b), 1e-9)


@pytest.mark.parametrize("shape", [(2, 3, 6), (5, 2)])
def test_rms_norm(shape):
    check_against_torch(
        lambda x, w: ops.rms_norm(x, w, eps=1e-3),
        lambda x, w: functional.rms_norm(x, shape[-1:], w, eps=1e-3),
        *draw(shape, shape[-1:]),
    )


@pytest.mark.parametrize("shape, groups", [((2, 6, 3, 2), 3), ((3, 4), 2), ((2, 4, 5), 1), ((2, 3, 4), 3)])
def test_group_norm(shape, groups):
    check_against_torch(
        lambda x, w, b: ops.group_norm(x, w, b, groups=groups),
        lambda x, w, b: functional.group_norm(x, groups, w, b),
        *draw(shape, shape[1:2], shape[1:2]),
    )


def test_instance_norm():
    check_against_torch(
        ops.instance_norm,
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
        *draw((2, 3, 4, 5), (3,), (3,)),
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 2, 2), (6, 5), (2, 3, 7)])
def test_batch_norm_and_its_running_statistics(shape, training):
    rng = numpy.random.default_rng(1)
    channels = shape[1]
    mean, variance = rng.standard_normal(channels), rng.uniform(0.5, 2, channels)
    x, weight, bias = draw(shape, (channels,), (channels,), offset=2.0)

    feeds = {"x": x, "weight": weight, "bias": bias, "mean": mean, "variance": variance, "seed": draw(shape)[0]}
    builder = GraphBuilder("batch_norm")
    sources = {
        name: builder.source(name, TensorType(array.shape, "f64"), "buffer" if name in BUFFERS else "input")
        for name, array in feeds.items()
    }
    arguments = [sources[name] for name in ("x", "weight", "bias", "mean", "variance")]
    made, new_mean, new_variance = ops.batch_norm(*arguments, training=training, momentum=0.3)
    if training:
        builder.update(sources["mean"], new_mean)
        builder.update(sources["variance"], new_variance)
    gradients = backward(builder, made, arguments[:3], seed=sources["seed"])
    found = evaluate(builder.finish([made, *gradients.values()]), feeds)

    tensors = [torch.from_numpy(array.copy()).requires_grad_() for array in (x, weight, bias)]
    running = torch.from_numpy(mean.copy()), torch.from_numpy(variance.copy())
    out = functional.batch_norm(tensors[0], *running, tensors[1], tensors[2], training=training, momentum=0.3)
    close(found[made.name], out.detach().numpy(), 1e-12)
    if training:
        close(found["mean"], running[0].numpy(), 1e-12)
        close(found["variance"], running[1].numpy(), 1e-12)
    out.backward(torch.from_numpy(feeds["seed"]))
    for name, theirs in zip(("x", "weight", "bias"), tensors):
        close(found[gradients[name].name], theirs.grad.numpy(), 1e-12)


@pytest.mark.parametrize("sizes", [(4, 2), (6, 0), (3, 3)])
def test_batch_statistics_are_those_of_the_whole_batch(sizes):
    """Ranks with unequal shares of the batch, one of them empty, add up to the statistics of all samples."""
    (x,) = draw((6, 3, 2))
    parts = numpy.split(x, [sizes[0]])
    mean = sum(ops.channel_mean(part, count=12) for part in parts)
    close(mean, x.mean(axis=(0, 2)), 1e-12)
    close(sum(ops.channel_variance(part, mean, count=12) for part in parts), x.var(axis=(0, 2)), 1e-12)


def test_half_precision_keeps_wide_statistics():
    """Sums of 65536 numbers overflow 16 bits or lose the small ones; the kernels sum in 32 bits."""
    x = numpy.full((4, 65536), 300.0, numpy.float16)
    x[:, ::2] = 302.0
    ones, zeros = numpy.ones(65536, numpy.float16), numpy.zeros(65536, numpy.float16)
    found = ops.layer_norm(x, ones, zeros)
    assert found.dtype == numpy.float16
    close(found[:, :2].astype(float), numpy.tile([1.0, -1.0], (4, 1)), 1e-2)
    assert ops.channel_mean.infer([TensorType((4, 8), "bf16")], {})[0].dtype == "f32"


@pytest.mark.parametrize(
    "op, shapes, attributes, message",
    [
        (ops.group_norm, [(2, 5), (5,), (5,)], {"groups": 2}, "does not divide the channels"),
        (ops.softmax, [(2, 5)], {"axis": 2}, "axis 2 is not a dimension"),
        (ops.layer_norm, [(2, 5), (4,), (4,)], {}, "layer_norm"),
    ],
)
def test_wrong_arguments_are_reported(op, shapes, attributes, message):
    with pytest.raises(RuleError, match=message):
        op.infer([TensorType(shape, "f32") for shape in shapes], attributes)
