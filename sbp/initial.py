"""Start values of sources: deterministic in (seed, value name), so that every process draws the same numbers."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy

from sbp.dtype import is_floating, numpy_name
from sbp.errors import GraphError
from sbp.graph import Graph, Initial, Value

_ARGUMENTS = {"zeros": 0, "ones": 0, "constant": 1, "normal": 2, "uniform": 2, "integers": 2, "arange": 0}


def default_initial(value: Value) -> Initial:
    """What a source without an `Initial` starts from: zeros for buffers and optimizer state, else normal(0, 1).

    Raises
    ------
    GraphError
        An integer input: which numbers are legal (an index below what?) only its author knows.
    """
    if value.kind in ("buffer", "optimizer"):
        return Initial("zeros", ())
    if not is_floating(value.dtype):
        raise GraphError(
            f"value {value.name!r} ({value.type}) holds integers but does not say which; "
            "declare it with Initial('integers', (low, high))."
        )
    return Initial("normal", (0.0, 1.0))


def generator(name: str, seed: int = 0) -> numpy.random.Generator:
    """A counter-based random generator that depends on the name and the seed only."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(digest, "little")))


def draw(value: Value, seed: int = 0, dtype: str | None = None) -> Any:
    """The start value of a source, as a NumPy array of its global shape.

    Parameters
    ----------
    value
        Its `initial` says how it is filled; without one see `default_initial`.
    seed
        The same seed and name always give the same numbers.
    dtype
        Replaces a floating element type (`"f64"` draws what `"f32"` does, in more digits); integers keep theirs.

    Raises
    ------
    GraphError
        An unknown kind of initial value, or the wrong number of parameters for it.
    """
    initial = default_initial(value) if value.initial is None else value.initial
    kind, parameters = initial.kind, initial.parameters
    if kind not in _ARGUMENTS:
        raise GraphError(f"value {value.name!r}: unknown initial {kind!r}; known are {', '.join(_ARGUMENTS)}.")
    if len(parameters) < _ARGUMENTS[kind]:
        raise GraphError(f"value {value.name!r}: initial {kind} takes {_ARGUMENTS[kind]} parameters, got {parameters}.")
    name = dtype if dtype is not None and is_floating(value.dtype) else value.dtype
    kept = numpy_name(name)
    if kind == "zeros":
        return numpy.zeros(value.shape, kept)
    if kind == "ones":
        return numpy.ones(value.shape, kept)
    if kind == "constant":
        return numpy.full(value.shape, parameters[0], kept)
    if kind == "arange":
        return numpy.arange(math.prod(value.shape)).reshape(value.shape).astype(kept)
    random = generator(value.name, seed)
    if kind == "normal":
        return random.normal(parameters[0], parameters[1], value.shape).astype(kept)
    if kind == "uniform":
        return random.uniform(parameters[0], parameters[1], value.shape).astype(kept)
    low, high = int(parameters[0]), int(parameters[1])
    if high <= low:
        raise GraphError(f"value {value.name!r}: initial integers needs low < high, got {low} and {high}.")
    return random.integers(low, high, value.shape).astype(kept)


def draw_all(graph: Graph, seed: int = 0, dtype: str | None = None) -> dict[str, Any]:
    """Start values of all inputs and all state of a graph, by name: what `sbp.interpreter.evaluate` is fed."""
    return {name: draw(graph.values[name], seed, dtype) for name in graph.sources}
