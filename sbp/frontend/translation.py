"""The table that says what an operator of another framework is in operators of `sbp`, and what its entries are given.

An entry is a function of a `Context` and the operator's own arguments, tensors as symbols of the graph being built,
that returns the symbol of the result (or a tuple of them)::

    @translation("aten.addcmul")
    def _(context, x, a, b, *, value=1):
        return x + a * b * value

A name with overload ("aten.sum.dim_IntList") goes before one without ("aten.sum"), which covers all overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sbp.dtype import is_floating
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder, Symbol

Translate = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A translation; of the arguments at the places or of the names `by_node` it is given the nodes, not symbols."""

    function: Translate
    by_node: tuple[int | str, ...] = ()


class Table:
    """Translations by operator name; `translation` is the one of PyTorch's operators."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __call__(self, *names: str, by_node: tuple[int | str, ...] = ()) -> Callable[[Translate], Translate]:
        """Decorator that enters a function under names; a later entry replaces an earlier one.

        Parameters
        ----------
        by_node
            Places and names of tensor arguments that the function may not need: it is given the nodes that make them,
            and asks `context.operand` for their symbols.
        """

        def enter(function: Translate) -> Translate:
            for name in names:
                self._entries[name] = Entry(function, by_node)
            return function

        return enter

    def find(self, name: str) -> Entry | None:
        """The entry for a name with overload, or for the operator without it."""
        return self._entries.get(name) or self._entries.get(name.rpartition(".")[0])

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


translation = Table()
"""Of `torch.ops.aten`, filled by the modules of `sbp.frontend.aten` and by users: `@translation("aten.name")`."""


@dataclass
class Context:
    """What a translation may need besides the arguments.

    Parameters
    ----------
    builder
        The graph being built.
    types
        Type of every tensor that the operator returns, as the other framework says.
    node
        The operator's node in the other framework's graph.
    constant
        The value (a tensor of the other framework) of what does not depend on inputs or state: a function of a node,
        None where it is not known.
    operand
        The symbol that stands for a node of the other framework's graph.
    notes
        Kept from one translation to the next of the same program: what was costly to find out.
    """

    builder: GraphBuilder
    types: tuple[TensorType, ...]
    node: Any
    constant: Callable[[Any], Any]
    operand: Callable[[Any], Any]
    notes: dict[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the (first) result."""
        return self.types[0].shape

    @property
    def dtype(self) -> str:
        """Element type of the (first) result."""
        return self.types[0].dtype


def as_type(x: Symbol, dtype: str) -> Symbol:
    """The tensor in an element type."""
    return x if x.dtype == dtype else ops.cast(x, dtype=dtype)


def broadcast(x: Symbol, shape: tuple[int, ...]) -> Symbol:
    """The tensor repeated to a shape."""
    return x if x.shape == tuple(shape) else ops.expand(x, shape=tuple(shape))


def reshaped(x: Symbol, shape: tuple[int, ...]) -> Symbol:
    """The tensor in a shape."""
    return x if x.shape == tuple(shape) else ops.reshape(x, shape=tuple(shape))


def filled(context: Context, value: Any, shape: tuple[int, ...] = (), dtype: str | None = None) -> Symbol:
    """A tensor of one number."""
    dtype = dtype or context.dtype
    number = bool(value) if dtype == "bool" else float(value) if is_floating(dtype) else int(value)
    with context.builder:
        return ops.full(shape=tuple(shape), value=number, dtype=dtype)


def tensor(context: Context, value: Any, dtype: str) -> Symbol:
    """A symbol, or a number as a tensor without dimensions, in an element type."""
    return as_type(value, dtype) if isinstance(value, Symbol) else filled(context, value, (), dtype)


def drop_unused(builder: GraphBuilder, outputs: Iterable[str]) -> None:
    """Remove nodes and sources that reach neither an output nor an update."""
    needed = {*outputs, *builder.updates.values()}
    kept = []
    for node in reversed(builder.nodes):
        if any(name in needed for name in node.outputs):
            needed.update(node.inputs)
            kept.append(node)
        else:
            for name in node.outputs:
                del builder.values[name], builder.symbols[name]
    builder.nodes[:] = kept[::-1]
    made = {name for node in builder.nodes for name in node.outputs}
    for name in list(builder.values):
        if name not in made and name not in needed and name not in builder.updates:
            del builder.values[name], builder.symbols[name]
