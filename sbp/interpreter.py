"""Runs a graph as one device would: the reference that every sharded run is compared with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy

from sbp.dtype import is_floating, numpy_name
from sbp.errors import GraphError, SbpError
from sbp.graph import Graph, Node, Value
from sbp.operator import REGISTRY


def evaluate(
    graph: Graph,
    feeds: Mapping[str, Any],
    xp: Any = numpy,
    floating: str | None = "f64",
    keep: Collection[str] = (),
) -> dict[str, Any]:
    """Run a graph unsharded.

    Parameters
    ----------
    feeds
        An array in the global shape for every input and every state value, by name (`sbp.initial.draw_all` draws them).
    xp
        Array module: NumPy, or CuPy.
    floating
        Element type in which all floating values are held, whatever the graph says; casts between floating types
        then change nothing. None keeps the graph's own types (bf16 is held in float32, its rounding is not imitated).
    keep
        Further values to return: names, such as those of activations or gradients.

    Returns
    -------
    dict
        The outputs by their names, the new values of the updated state by the *state's* names, and what `keep` names.

    Raises
    ------
    GraphError
        A source that is not fed or has another shape, an unknown name in `keep`, or a kernel that fails: the message
        names the node.
    """
    for name in keep:
        if name not in graph.values:
            raise GraphError(f"graph {graph.name}: keep names the unknown value {name!r}.")
    kept = {*graph.outputs, *graph.updates.values(), *keep}
    last_use = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    arrays: dict[str, Any] = {}
    for name in graph.sources:
        if name in last_use or name in kept:
            arrays[name] = _fed(graph.values[name], feeds, xp, floating)
    for index, node in enumerate(graph.nodes):
        results = run_node(node, [arrays[name] for name in node.inputs], xp, floating)
        for name, result in zip(node.outputs, results):
            value = graph.values[name]
            if tuple(result.shape) != value.shape:
                raise GraphError(
                    f"node {node.name} ({node.op}): its kernel made {name!r} of shape {list(result.shape)}, "
                    f"the graph says {value.type}."
                )
            if name in kept or name in last_use:
                arrays[name] = xp.asarray(result, dtype=held_in(value.dtype, floating))
        for name in node.inputs:
            if last_use[name] == index and name not in kept:
                arrays.pop(name, None)
    found = {name: arrays[name] for name in (*graph.outputs, *keep)}
    found.update((state, arrays[new]) for state, new in graph.updates.items())
    return found


def run_node(node: Node, inputs: list[Any], xp: Any, floating: str | None = None) -> tuple[Any, ...]:
    """Run one node's kernel on whole arrays; an exception inside it becomes a `GraphError` that names the node."""
    op = REGISTRY[node.op]
    attributes = attributes_in(op.complete(node.attributes), floating)
    try:
        result = op.kernel(xp, *inputs, **attributes)
    except SbpError:
        raise
    except (ValueError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in inputs)
        raise GraphError(f"node {node.name} ({node.op}) on ({shapes}): {type(error).__name__}: {error}") from error
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def attributes_in(attributes: Mapping[str, Any], floating: str | None) -> dict[str, Any]:
    """Attributes with a floating element type (`dtype=`) replaced, so that a cast keeps the overriding precision."""
    if floating is None:
        return dict(attributes)
    return {
        key: floating if key == "dtype" and isinstance(value, str) and is_floating(value) else value
        for key, value in attributes.items()
    }


def held_in(dtype: str, floating: str | None) -> str:
    """The NumPy type of an array for an element type, under an overriding floating type."""
    return numpy_name(floating if floating is not None and is_floating(dtype) else dtype)


def _fed(value: Value, feeds: Mapping[str, Any], xp: Any, floating: str | None) -> Any:
    if value.name not in feeds:
        raise GraphError(f"{value.kind} {value.name!r} ({value.type}) is not fed; give an array of that shape.")
    array = xp.asarray(feeds[value.name], dtype=held_in(value.dtype, floating))
    if tuple(array.shape) != value.shape:
        raise GraphError(
            f"{value.kind} {value.name!r} is {value.type}, but was fed an array of shape {list(array.shape)}."
        )
    return array
