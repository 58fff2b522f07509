"""The logical graph: a program in global shapes, nodes in topological order, values in single assignment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from types import NoneType
from typing import TYPE_CHECKING, Any

from sbp.errors import GraphError, SbpError
from sbp.fields import Field
from sbp.operator import REGISTRY, Operator, TensorType
from sbp.rule import BoundRule

if TYPE_CHECKING:
    import networkx

SCHEMA = 1

KINDS = ("input", "parameter", "buffer", "optimizer", "activation", "gradient")
STATE_KINDS = ("parameter", "buffer", "optimizer")
PHASES = ("forward", "backward", "optimizer")
INITIALS = ("zeros", "ones", "constant", "normal", "uniform", "integers", "arange")
_PARAMETERS = {"constant": 1, "normal": 2, "uniform": 2, "integers": 2}


@dataclass(frozen=True, slots=True)
class Initial:
    """How a source value is filled at the start: `kind` is zeros, ones, constant, normal, uniform, integers or arange.

    `parameters`: constant (value), normal (mean, std), uniform (low, high), integers (low, high; high excluded).
    """

    kind: str = "normal"
    parameters: tuple[float, ...] = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program. `kind` says what it is kept for (one of `KINDS`)."""

    name: str
    type: TensorType
    kind: str = "activation"
    initial: Initial | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.type.shape

    @property
    def dtype(self) -> str:
        """Element type."""
        return self.type.dtype

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class Node:
    """One operator applied to values. `module` is the path of the module it came from, `phase` one of `PHASES`."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    module: str = ""
    phase: str = "forward"


@dataclass(frozen=True)
class Graph:
    """A program: sources (inputs and state), nodes in topological order, outputs, and the state's next values.

    Parameters
    ----------
    updates
        State value -> the value it takes after the step; both have one type and, in a plan, one stored layout.
    """

    name: str
    values: Mapping[str, Value]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    updates: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def producers(self) -> Mapping[str, tuple[int, int]]:
        """Value -> (index of the node that makes it, which output); sources are absent."""
        return {name: (i, k) for i, node in enumerate(self.nodes) for k, name in enumerate(node.outputs)}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Value -> ((index of a node that reads it, which input), ...) in program order."""
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.values}
        for i, node in enumerate(self.nodes):
            for k, name in enumerate(node.inputs):
                found[name].append((i, k))
        return {name: tuple(places) for name, places in found.items()}

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Values that no node makes: inputs, then state, in order of declaration."""
        made = set(self.producers)
        return tuple(name for name in self.values if name not in made)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Sources that are fed at every step."""
        return tuple(name for name in self.sources if self.values[name].kind == "input")

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Sources that live from step to step: parameters, buffers, optimizer state."""
        return tuple(name for name in self.sources if self.values[name].kind in STATE_KINDS)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Trainable state."""
        return tuple(name for name in self.sources if self.values[name].kind == "parameter")

    def types(self, names: Iterable[str]) -> tuple[TensorType, ...]:
        """Types of several values."""
        return tuple(self.values[name].type for name in names)

    def rule(self, node: Node) -> BoundRule:
        """The node's bound rule."""
        return REGISTRY[node.op].bind(self.types(node.inputs), node.attributes)

    def validate(self) -> Graph:
        """Check names, order, types and state; returns itself.

        Raises
        ------
        GraphError
            Names the node and the value, with the expected and the found type.
        """
        known = set(self.sources)
        seen: set[str] = set()
        for node in self.nodes:
            place = f"node {node.name} ({node.op})"
            if node.name in seen:
                raise GraphError(f"{place}: its name is used twice; node names must be unique.")
            seen.add(node.name)
            for name in node.inputs:
                if name not in self.values:
                    raise GraphError(f"{place}: reads the unknown value {name!r}; declare it or make it first.")
                if name not in known:
                    raise GraphError(f"{place}: reads {name!r} before it is made; nodes must be in topological order.")
            if node.phase not in PHASES:
                raise GraphError(f"{place}: its phase {node.phase!r} is none of {', '.join(PHASES)}.")
            try:
                inferred = REGISTRY[node.op].infer(self.types(node.inputs), node.attributes)
            except SbpError as error:
                reads = ", ".join(str(self.values[name]) for name in node.inputs) or "no values"
                raise GraphError(f"{place}, which reads {reads}: {error}") from None
            except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
                # Rules are functions of the attributes and trust their types.
                reads = ", ".join(str(self.values[name]) for name in node.inputs) or "no values"
                given = ", ".join(f"{key}={value!r}" for key, value in node.attributes.items()) or "none"
                raise GraphError(
                    f"{place}, which reads {reads}: operator {node.op} does not take the attributes {given} here "
                    f"({type(error).__name__}: {error}); correct them."
                ) from None
            if len(inferred) != len(node.outputs):
                raise GraphError(f"{place}: lists {len(node.outputs)} outputs, the operator has {len(inferred)}.")
            for name, expected in zip(node.outputs, inferred):
                if name in known:
                    raise GraphError(f"{place}: makes {name!r}, which already has a value; every value is made once.")
                found = self.values.get(name)
                if found is None:
                    raise GraphError(f"{place}: makes {name!r}, which is not declared among the values.")
                if found.type != expected:
                    raise GraphError(f"{place}: {name!r} is declared {found.type}, the operator makes {expected}.")
                known.add(name)
        for name in self.outputs:
            if name not in known:
                raise GraphError(f"graph {self.name}: output {name!r} is never made.")
        for name, value in self.values.items():
            if value.name != name:
                raise GraphError(f"value {value.name!r} is listed under the name {name!r}; both must be the same.")
            if value.initial is not None and value.initial.kind not in INITIALS:
                raise GraphError(
                    f"value {name!r}: its initial kind {value.initial.kind!r} is none of {', '.join(INITIALS)}."
                )
            if value.kind not in KINDS:
                raise GraphError(f"value {name!r}: kind {value.kind!r} is none of {', '.join(KINDS)}.")
            if name not in self.producers and value.kind not in ("input", *STATE_KINDS):
                raise GraphError(f"value {name!r} is an {value.kind}, but no node makes it.")
        states = set(self.state)
        for state, new in self.updates.items():
            if state not in states or new not in known:
                raise GraphError(
                    f"update {state!r} -> {new!r}: the first must be state and the second a value that is made."
                )
            old_type, new_type = self.values[state].type, self.values[new].type
            if old_type != new_type:
                raise GraphError(f"update {state!r}: is {old_type}, its next value {new!r} is {new_type}.")
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain data for a JSON writer; `from_json` reads it back."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "values": [
                {
                    "name": value.name,
                    "shape": list(value.shape),
                    "dtype": value.dtype,
                    "kind": value.kind,
                    **(
                        {"initial": [value.initial.kind, *map(_plain, value.initial.parameters)]}
                        if value.initial
                        else {}
                    ),
                }
                for value in self.values.values()
            ],
            "nodes": [
                {
                    "name": node.name,
                    "op": node.op,
                    "inputs": list(node.inputs),
                    "outputs": list(node.outputs),
                    "attributes": {key: _plain(item) for key, item in node.attributes.items()},
                    "module": node.module,
                    "phase": node.phase,
                }
                for node in self.nodes
            ],
            "outputs": list(self.outputs),
            "updates": dict(self.updates),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Read what `to_json` wrote; missing or wrong fields raise `GraphError` naming them."""
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise GraphError(f"this is not a graph of schema {SCHEMA}; write it again with Graph.to_json.")
        file = Field(data, "graph file", GraphError)
        values: dict[str, Value] = {}
        for index, item in enumerate(file["values"].list()):
            name = item.at(f"graph file, value {index}")["name"].text()
            place = f"graph file, value {name!r}"
            if name in values:
                raise GraphError(f"{place}: is listed twice; every value is declared once.")
            values[name] = _value_from(item.at(place))
        nodes = []
        for index, item in enumerate(file["nodes"].list()):
            name = item.at(f"graph file, node {index}")["name"].text()
            nodes.append(_node_from(item.at(f"graph file, node {name!r}")))
        updates = {name: item.text() for name, item in file["updates"].mapping().items()}
        graph = cls(file["name"].text(), values, tuple(nodes), file["outputs"].texts(), updates)
        return graph.validate()

    def to_networkx(self) -> networkx.MultiDiGraph:
        """Nodes and sources as a networkx graph, one edge per use of a value (edge attribute `value`)."""
        import networkx

        result = networkx.MultiDiGraph(name=self.name)
        for name in self.sources:
            result.add_node(name, kind=self.values[name].kind)
        for node in self.nodes:
            result.add_node(node.name, op=node.op, module=node.module, phase=node.phase)
            for name in node.inputs:
                made = self.producers.get(name)
                result.add_edge(self.nodes[made[0]].name if made else name, node.name, value=name)
        return result

    def _repr_html_(self) -> str:
        from sbp.report.html import graph_html

        return graph_html(self)

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        sizes = {"source": self.sources, "node": self.nodes, "parameter": self.parameters}
        counts = (f"{len(items)} {what}{'' if len(items) == 1 else 's'}" for what, items in sizes.items())
        return f"graph {self.name}: {', '.join(counts)}"


def _value_from(item: Field) -> Value:
    name, dtype, kind = item["name"].text(), item["dtype"].text(), item["kind"].text()
    shape = tuple(size.whole() for size in item["shape"].list())
    try:
        kept = TensorType(shape, dtype)
    except SbpError as error:
        raise GraphError(f"{item.place}: {error}") from None
    initial = item.get("initial", None)
    return Value(name, kept, kind, None if initial.value is None else _initial_from(initial))


def _initial_from(item: Field) -> Initial:
    parts = item.list()
    if not parts:
        raise item.wrong("a list of a kind and its parameters")
    kind = parts[0].text()
    count = _PARAMETERS.get(kind, 0)
    parameters = []
    for part in parts[1:]:
        parameter = part.plain()
        if isinstance(parameter, bool) or not isinstance(parameter, (int, float)):
            raise part.wrong("a number")
        parameters.append(parameter)
    if len(parameters) < count:
        raise item.wrong(f"a list of {kind!r} and {count} number{'s' if count > 1 else ''}")
    return Initial(kind, tuple(parameters))


def _node_from(item: Field) -> Node:
    node = Node(
        item["name"].text(),
        item["op"].text(),
        item["inputs"].texts(),
        item["outputs"].texts(),
        {key: value.plain() for key, value in item["attributes"].mapping().items()},
        item.get("module", "").text(),
        item.get("phase", "forward").text(),
    )
    if node.op in REGISTRY:
        for key, field_ in item["attributes"].mapping().items():
            expected = _expected(REGISTRY[node.op], key, node.attributes[key])
            if expected:
                raise field_.wrong(expected)
    return node


def _expected(op: Operator, key: str, value: Any) -> str:
    """What an attribute must be, judged by its default and the operator's example calls; "" if it may be this."""
    samples = [case.attributes[key] for case in op.cases if key in case.attributes]
    default = op.defaults.get(key, Parameter.empty)
    samples += [] if default is Parameter.empty else [default]
    if all(sample is None for sample in samples):
        return ""
    if value is None:
        return "" if any(sample is None for sample in samples) else _described(samples)
    if not isinstance(value, tuple) and all(isinstance(sample, (tuple, NoneType)) for sample in samples):
        return _described(samples)
    if isinstance(value, tuple) and not any(_may_be_list(sample) for sample in samples):
        return _described(samples)
    kinds = {kind for sample in samples for kind in _leaf_kinds(sample)}
    return _described(samples) if kinds and not _leaf_kinds(value) <= kinds else ""


def _may_be_list(sample: Any) -> bool:
    """A whole number may stand for one per dimension; a fraction, a truth value or a text may not."""
    return isinstance(sample, (tuple, list)) or type(sample) is int


def _leaf_kinds(value: Any) -> set[str]:
    """The kinds of what a value is or holds; integers and truth values stand for numbers."""
    if isinstance(value, (tuple, list)):
        return {kind for item in value for kind in _leaf_kinds(item)}
    return {"null" if value is None else "a text" if isinstance(value, str) else "a number"}


def _described(samples: list[Any]) -> str:
    found = {"a list" if isinstance(sample, (tuple, list)) else "".join(_leaf_kinds(sample)) for sample in samples}
    return " or ".join(sorted(found, key=lambda kind: (kind == "null", kind)))


def _plain(value: Any) -> Any:
    """JSON has no infinities, and its writers differ in what they make of them; they are written by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
