"""Reverse-mode differentiation of the graph being built: gradients are more nodes, in the phase "backward"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sbp.dtype import is_floating
from sbp.errors import GraphError, SbpError
from sbp.graph import Node
from sbp.operator import REGISTRY
from sbp.trace import GraphBuilder, Symbol


def backward(
    builder: GraphBuilder, loss: Symbol, wrt: Sequence[Symbol], seed: Symbol | None = None
) -> dict[str, Symbol]:
    """Add the nodes that compute the gradients of `loss`.

    A value that is used several times has its gradients added, in reverse program order. The nodes belong to the
    phase "backward" and to the module of the forward node that they differentiate. Nodes that no wanted gradient
    needs are not kept, so that nothing is spent on, say, the gradient of an image.

    Parameters
    ----------
    loss
        A floating scalar; or, with `seed`, any floating value.
    wrt
        Values whose gradients are wanted.
    seed
        The gradient of `loss` itself, of the same type; default one.

    Returns
    -------
    dict
        Gradients by the names of `wrt`. A value that the loss does not depend on has no entry.

    Raises
    ------
    GraphError
        The loss is not a scalar, an element of `wrt` is not floating, or a node on the way has no gradient or a wrong
        one.
    """
    if seed is None and loss.shape != ():
        raise GraphError(
            f"backward starts from a scalar, but {loss.value} is not; reduce it with mean or sum, or give seed."
        )
    if not is_floating(loss.dtype):
        raise GraphError(f"backward starts from a floating value, but {loss.value} holds integers.")
    if seed is not None and seed.value.type != loss.value.type:
        raise GraphError(f"the seed of backward is {seed.value.type}, the value it belongs to is {loss.value}.")
    for symbol in wrt:
        if not is_floating(symbol.dtype):
            raise GraphError(f"{symbol.value} holds integers, which have no gradient; leave it out of wrt.")
    wanted = {symbol.name for symbol in wrt}
    start = len(builder.nodes)
    path = _between(builder, wanted, loss.name)
    gradients: dict[str, Symbol] = {}
    if loss.name in wanted or any(loss.name in node.outputs for node in path):
        gradients[loss.name] = _one(builder, loss) if seed is None else seed
    # What a gradient function returns for inputs that do not lead to `wrt` is dropped.
    useful = wanted | {name for node in path for name in node.outputs}
    for node in reversed(path):
        arrived = [gradients.get(name) for name in node.outputs]
        if all(gradient is None for gradient in arrived):
            continue
        inputs = [builder.symbols[name] for name in node.inputs]
        outputs = [builder.symbols[name] for name in node.outputs]
        with builder, builder.at("backward", node.module):
            try:
                found = REGISTRY[node.op].gradients(arrived, inputs, outputs, dict(node.attributes))
            except SbpError as error:
                raise GraphError(f"gradient of node {node.name} ({node.op}): {error}") from error
            for symbol, gradient in zip(inputs, found):
                if gradient is None or symbol.name not in useful:
                    continue
                if gradient.value.type != symbol.value.type:
                    raise GraphError(
                        f"gradient of node {node.name} ({node.op}): that of its input {symbol.name!r} is "
                        f"{gradient.value.type}, it should be {symbol.value.type} as the input is."
                    )
                known = gradients.get(symbol.name)
                gradients[symbol.name] = gradient if known is None else REGISTRY["add"](known, gradient)
    result = {symbol.name: gradients[symbol.name] for symbol in wrt if symbol.name in gradients}
    _drop_unused(builder, start, result.values())
    return result


def _between(builder: GraphBuilder, wanted: set[str], loss: str) -> list[Node]:
    """The nodes on a path of floating values from one of `wanted` to the loss, in program order."""
    reached = set(wanted)
    downstream = []
    for node in builder.nodes:
        if any(name in reached for name in node.inputs):
            reached.update(name for name in node.outputs if is_floating(builder.values[name].dtype))
            downstream.append(node)
    needed = {loss}
    path = []
    for node in reversed(downstream):
        if any(name in needed for name in node.outputs):
            needed.update(name for name in node.inputs if name in reached)
            path.append(node)
    return path[::-1]


def _one(builder: GraphBuilder, loss: Symbol) -> Symbol:
    module = next((node.module for node in reversed(builder.nodes) if loss.name in node.outputs), "")
    with builder, builder.at("backward", module):
        return REGISTRY["full"](shape=loss.shape, value=1.0, dtype=loss.dtype)


def _drop_unused(builder: GraphBuilder, start: int, results: Iterable[Symbol]) -> None:
    """Remove those of the nodes from `start` on that no result needs."""
    needed = {symbol.name for symbol in results}
    kept = []
    for node in reversed(builder.nodes[start:]):
        if any(name in needed for name in node.outputs):
            needed.update(node.inputs)
            kept.append(node)
        else:
            for name in node.outputs:
                del builder.values[name], builder.symbols[name]
    builder.nodes[start:] = kept[::-1]
