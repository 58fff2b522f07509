"""A small convolutional network, and plans of it in which rows or columns of pictures are split."""

from hand_plans import physical

from sbp.autodiff import backward
from sbp.graph import Initial
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder


def network(batch, channels, height, width):
    """Two convolutions with different windows, both pools, mean square, all gradients."""
    builder = GraphBuilder("rows")
    normal = Initial("normal", (0.0, 0.5))
    x = builder.source("x", TensorType((batch, 3, height, width), "f32"), "input", normal)
    shapes = {"w0": (channels, 3, 3, 3), "w1": (channels, channels, 3, 2)}
    weights = [builder.source(name, TensorType(s, "f32"), "parameter", normal) for name, s in shapes.items()]
    with builder:
        hidden = ops.relu(ops.convolution(x, weights[0], padding=1))
        hidden = ops.max_pool2d(hidden, kernel_size=3, stride=2, padding=1)
        hidden = ops.convolution(hidden, weights[1], stride=2, padding=1, dilation=(2, 1))
        hidden = ops.avg_pool2d(hidden, kernel_size=2, stride=1, padding=1, count_include_pad=False)
        loss = ops.mean(ops.square(hidden))
    gradients = backward(builder, loss, [x, *weights])
    return builder.finish([loss, *gradients.values()])


def split_plan(graph, mesh, layout):
    """Everything that can read or make its first operand in the layout does, all else is broadcast."""

    def choose(name, found):
        return next((s for s in found if layout in map(str, (*s.inputs[:1], *s.outputs[:1]))), found[0])

    return physical(graph, mesh, choose, lambda _, found: found[0])
