"""The logical graph: a program in global shapes, nodes in topological order, values in single assignment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sbp.errors import GraphError, SbpError
from sbp.operator import REGISTRY, TensorType
from sbp.rule import BoundRule

if TYPE_CHECKING:
    import networkx

SCHEMA = 1

KINDS = ("input", "parameter", "buffer", "optimizer", "activation", "gradient")
STATE_KINDS = ("parameter", "buffer", "optimizer")
PHASES = ("forward", "backward", "optimizer")
INITIALS = ("zeros", "ones", "constant", "normal", "uniform", "integers", "arange")


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
        place = "graph file"
        try:
            values: dict[str, Value] = {}
            for index, item in enumerate(data["values"]):
                place = f"graph file, value {index}"
                place = f"graph file, value {item['name']!r}"
                if item["name"] in values:
                    raise GraphError("is listed twice; every value is declared once.")
                values[item["name"]] = _value_from(item)
            nodes = []
            place = "graph file"
            for index, item in enumerate(data["nodes"]):
                place = f"graph file, node {index}"
                place = f"graph file, node {item['name']!r}"
                nodes.append(_node_from(item))
            place = "graph file"
            graph = cls(data["name"], values, tuple(nodes), tuple(data["outputs"]), dict(data["updates"]))
        except KeyError as error:
            raise GraphError(
                f"{place}: the field {error} is missing; write the graph again with Graph.to_json."
            ) from None
        except GraphError as error:
            raise GraphError(f"{place}: {error}") from None
        except (TypeError, AttributeError, IndexError, ValueError) as error:
            raise GraphError(
                f"{place}: a field has the wrong type ({error}); write the graph again with Graph.to_json."
            ) from None
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

    def __str__(self) -> str:
        counts = f"{len(self.sources)} sources, {len(self.nodes)} nodes, {len(self.parameters)} parameters"
        return f"graph {self.name}: {counts}"


def _value_from(item: Mapping[str, Any]) -> Value:
    initial = item.get("initial")
    return Value(
        item["name"],
        TensorType(tuple(item["shape"]), item["dtype"]),
        item["kind"],
        Initial(initial[0], tuple(map(_tuples, initial[1:]))) if initial else None,
    )


def _node_from(item: Mapping[str, Any]) -> Node:
    return Node(
        item["name"],
        item["op"],
        tuple(item["inputs"]),
        tuple(item["outputs"]),
        {key: _tuples(value) for key, value in item["attributes"].items()},
        item.get("module", ""),
        item.get("phase", "forward"),
    )


def _plain(value: Any) -> Any:
    """JSON has no infinities, and its writers differ in what they make of them; they are written by name."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _tuples(value: Any) -> Any:
    """The inverse of `_plain`."""
    if isinstance(value, Mapping):
        return float(value["float"])
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
