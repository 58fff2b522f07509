"""Small random graphs for tests that enumerate every plan."""

from __future__ import annotations

import random

from sbp.graph import Graph
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder

SIZES = (4, 6, 8)


def random_graph(seed: int, nodes: int = 6, views: bool = False) -> Graph:
    """A graph of up to `nodes` operators with shared values, two phases and, half of the time, a state update.

    With `views` half of the values are seen in another shape, and the state's next value is read as well.
    """
    generator = random.Random(seed)
    builder = GraphBuilder(f"random {seed}")
    width = generator.choice(SIZES)
    with builder:
        values = [builder.source("x", TensorType((generator.choice(SIZES), width), "f32"))]
        weights = [builder.source("w", TensorType((width, width), "f32"), "parameter")]
        for number in range(nodes):
            phase = "forward" if number < nodes // 2 else "backward"
            with builder.at(phase):
                x = generator.choice(values[-3:])
                kind = generator.choice(("matmul", "relu", "add", "exp", "scale", "softmax", "total"))
                if kind == "matmul":
                    values.append(ops.matmul(x, generator.choice(weights)))
                elif kind == "add":
                    values.append(ops.add(x, generator.choice(values)))
                elif kind == "scale":
                    values.append(ops.scale(x, factor=0.5))
                elif kind == "softmax":
                    values.append(ops.softmax(x, axis=-1))
                elif kind == "total" and number == nodes - 1:
                    values.append(ops.sum(x, axis=None))
                else:
                    values.append({"relu": ops.relu, "exp": ops.exp}.get(kind, ops.relu)(x))
                if views and generator.random() < 0.5 and values[-1].ndim == 2:
                    seen = ops.reshape(ops.detach(values[-1]), shape=(values[-1].shape[0], 2, -1))
                    values.append(ops.reshape(ops.exp(seen), shape=values[-1].shape))
        if generator.random() < 0.5:
            with builder.at("optimizer"):
                new = ops.scale(weights[0], factor=0.9)
                builder.update(weights[0], new)
                if views:
                    return builder.finish([values[-1], ops.sum(ops.exp(new), axis=None)])
        return builder.finish([values[-1]])
