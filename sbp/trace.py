"""Building a graph by running ordinary Python on symbols: every operator applied to a symbol adds a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sbp.errors import GraphError, RuleError
from sbp.graph import Graph, Initial, Node, Value
from sbp.operator import CURRENT, Operator, TensorType
from sbp.ops.methods import TensorMethods


class Symbol(TensorMethods):
    """A value of the graph being built, with the operators as methods."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: GraphBuilder, value: Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def name(self) -> str:
        """The value's name."""
        return self.value.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.value.shape

    @property
    def dtype(self) -> str:
        """Element type."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.value.shape)

    def __sbp_apply__(self, op: Operator, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        return self.builder.apply(op, inputs, attributes)

    def __bool__(self) -> bool:
        raise GraphError(
            f"{self!r} has no value while a program is traced, so that nothing can branch on it; choose with "
            "sbp.ops.library.where, or ask `is None` where that is meant."
        )

    def __repr__(self) -> str:
        return f"<{self.value}>"


class GraphBuilder:
    """Collects values and nodes; `finish` gives the validated graph.

    `with builder:` makes it the current one, which operators without tensor inputs use.
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self.values: dict[str, Value] = {}
        self.symbols: dict[str, Symbol] = {}
        self.nodes: list[Node] = []
        self.updates: dict[str, str] = {}
        self.phase = "forward"
        self._module: list[str] = []
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()  # node names; those of nodes with several outputs are not among the values
        self._tokens: list[Any] = []

    def __enter__(self) -> GraphBuilder:
        self._tokens.append(CURRENT.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        CURRENT.reset(self._tokens.pop())

    def source(self, name: str, type: TensorType, kind: str = "input", initial: Initial | None = None) -> Symbol:
        """Declare an input or a state value."""
        if name in self.values:
            raise GraphError(f"value {name!r} is declared twice; names must be unique.")
        return self._declare(Value(name, type, kind, initial))

    def _declare(self, value: Value) -> Symbol:
        self.values[value.name] = value
        symbol = self.symbols[value.name] = Symbol(self, value)
        return symbol

    def apply(self, op: Operator, inputs: Sequence[Any], attributes: Mapping[str, Any], name: str | None = None) -> Any:
        """Add a node; returns its output symbol, or a tuple of them. `name` is used as it is while it is free."""
        for item in inputs:
            if not isinstance(item, Symbol) or item.builder is not self:
                raise GraphError(
                    f"operator {op.name} in module {self.module or self.name!r}: every tensor must be a value of the "
                    f"graph being built, got {type(item).__name__}; pass numbers through scale/shift or as attributes."
                )
        types = [item.value.type for item in inputs]
        try:
            made = op.infer(types, attributes)
        except (RuleError, GraphError) as error:
            raise type(error)(f"{error} (in module {self.module})" if self.module else str(error)) from None
        name = self.unique(name or (f"{self.module}.{op.name}" if self.module else op.name))
        self._taken.add(name)
        kind = "gradient" if self.phase == "backward" else "activation"
        outputs = [f"{name}:{label}" for label in op.output_names] if op.several else [name]
        if op.several and len(op.output_names) == 1:  # as many outputs as the attributes say
            outputs = [f"{name}:{index}" for index in range(len(made))]
        self.nodes.append(
            Node(
                name,
                op.name,
                tuple(item.name for item in inputs),
                tuple(outputs),
                dict(attributes),
                self.module,
                self.phase,
            )
        )
        symbols = tuple(self._declare(Value(label, t, kind)) for label, t in zip(outputs, made))
        return symbols if op.several else symbols[0]

    def unique(self, base: str) -> str:
        """`base`, or base_1, base_2, ... when it is taken."""
        count = self._counts.get(base, 0)
        self._counts[base] = count + 1
        name = base if count == 0 else f"{base}_{count}"
        return self.unique(base) if name in self.values or name in self._taken else name

    @property
    def module(self) -> str:
        """Path of the module whose code is being run."""
        return ".".join(self._module)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes added inside belong to the module `name` of the current one."""
        self._module.append(name)
        try:
            yield
        finally:
            self._module.pop()

    @contextmanager
    def at(self, phase: str, module: str = "") -> Iterator[None]:
        """Nodes added inside have this phase and module path."""
        before = self.phase, self._module
        self.phase, self._module = phase, [module] if module else []
        try:
            yield
        finally:
            self.phase, self._module = before

    def update(self, state: Symbol, new: Symbol) -> None:
        """The state value becomes `new` after the step."""
        self.updates[state.name] = new.name

    def finish(self, outputs: Sequence[Symbol]) -> Graph:
        """The validated graph."""
        graph = Graph(
            self.name, dict(self.values), tuple(self.nodes), tuple(s.name for s in outputs), dict(self.updates)
        )
        return graph.validate()


def current_builder() -> GraphBuilder:
    """The builder of the innermost `with builder:`."""
    builder = CURRENT.get()
    if builder is None:
        raise GraphError("no graph is being built here; use `with GraphBuilder() as builder:` around this code.")
    return builder
