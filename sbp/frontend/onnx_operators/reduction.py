"""ONNX's reductions, scans and searches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sbp.frontend.onnx_operators.node import Node, onnx_translation
from sbp.ops import library as ops
from sbp.trace import Symbol


def _reduction(function: Callable) -> Callable:
    def translate(node: Node, x: Symbol, axes: Any = None) -> Symbol:
        chosen = node.axes()
        if not chosen:
            if node.get("noop_with_empty_axes", 0):
                return x
            chosen = None
        return function(x, axis=chosen, keepdims=bool(node.get("keepdims", 1)))

    return translate


_REDUCTIONS: dict[str, Callable] = {
    "ReduceSum": ops.sum, "ReduceMean": ops.mean, "ReduceMax": ops.max, "ReduceMin": ops.min, "ReduceProd": ops.prod,
    "ReduceL2": lambda x, **where: ops.sqrt(ops.sum(ops.square(x), **where)),
    "ReduceL1": lambda x, **where: ops.sum(ops.abs(x), **where), "ReduceLogSumExp": ops.logsumexp,
    "ReduceSumSquare": lambda x, **where: ops.sum(ops.square(x), **where),
}  # fmt: skip
for _name, _function in _REDUCTIONS.items():
    onnx_translation(_name)(_reduction(_function))


@onnx_translation("ArgMax")
def _(node, x):
    return ops.argmax(x, axis=node.get("axis", 0), keepdims=bool(node.get("keepdims", 1)))


@onnx_translation("ArgMin")
def _(node, x):
    return ops.argmin(x, axis=node.get("axis", 0), keepdims=bool(node.get("keepdims", 1)))


@onnx_translation("TopK")
def _(node, x, k):
    return ops.topk(
        x, k=int(node.known(1, "k").reshape(-1)[0]), axis=node.get("axis", -1), largest=bool(node.get("largest", 1))
    )


@onnx_translation("CumSum")
def _(node, x, axis):
    if node.get("exclusive", 0):
        raise NotImplementedError("CumSum that leaves out each element itself")
    where = int(node.known(1, "an axis").reshape(-1)[0])
    return ops.cumsum(x, axis=where, reverse=bool(node.get("reverse", 0)))
