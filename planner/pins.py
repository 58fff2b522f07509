"""Pins: layouts that a user fixes by name, `{"h.*.mlp.fc.weight": "S(1), B"}`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from sbp.errors import LayoutError, PlanError
from sbp.graph import Graph, Node
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.models import is_preset
from sbp.rule import Signature


class Pins:
    """A restriction (see `sbp.planner.strategies.Restriction`) that holds named values in given layouts.

    A pattern is a name or a glob; it matches values (parameters, inputs, optimizer state, activations by the name of
    the node that makes them). A pinned source is stored in the layout, any other value is made in it.

    Raises
    ------
    PlanError, LayoutError
        A pattern that matches nothing (with near names), a layout that does not fit the mesh or the value's shape, two
        patterns that pin one value differently.
    """

    def __init__(self, graph: Graph, mesh: Mesh, pins: Mapping[str, str | Layout]) -> None:
        self.layouts: dict[str, Layout] = {}
        self.patterns: dict[str, str] = {}
        for pattern, wanted in pins.items():
            try:
                layout = Layout.parse(wanted)
            except LayoutError as error:
                raise LayoutError(f"pin {pattern!r}: {error}") from None
            names = [name for name in graph.values if fnmatchcase(name, pattern)]
            if not names:
                near = get_close_matches(pattern, graph.values, n=3, cutoff=0.5)
                listed = f"`sbp models {graph.name} --values`" if is_preset(graph.name) else "Graph.values"
                hint = f"near names: {', '.join(near)}" if near else f"{listed} lists them"
                raise PlanError(f"pin {pattern!r} matches no value of {graph.name}; {hint}.")
            for name in names:
                value = graph.values[name]
                layout.check(value.shape, mesh.shape, f"pin {pattern!r} on {name}: {value.type} on {mesh}")
                layout = layout.normal(mesh.shape)
                if name not in graph.producers and layout.has_partial:
                    raise PlanError(
                        f"pin {pattern!r}: {name} is an input or state and cannot be stored Partial ({layout})."
                    )
                if self.layouts.setdefault(name, layout) != layout:
                    raise PlanError(
                        f"pins {self.patterns[name]!r} and {pattern!r} both match {name} and give it "
                        f"{self.layouts[name]} and {layout}; remove one."
                    )
                self.patterns[name] = pattern

    def key(self, graph: Graph, node: Node) -> Hashable:
        """The pinned layouts of the node's outputs."""
        return tuple(self.layouts.get(name) for name in node.outputs)

    def allows(self, graph: Graph, node: Node, signature: Signature) -> bool:
        """Outputs come out as pinned."""
        return all(self.layouts.get(name, made) == made for name, made in zip(node.outputs, signature.outputs))

    def allows_source(self, graph: Graph, value: str, layout: Layout) -> bool:
        """Stored as pinned."""
        return self.layouts.get(value, layout) == layout

    def describe(self, graph: Graph, place: str) -> str:
        """The pins on a value, or on a node's outputs."""
        names = (
            [place]
            if place in self.layouts
            else [n for node in graph.nodes if node.name == place for n in node.outputs]
        )
        said = dict.fromkeys(f"the pin {self.patterns[n]!r} = {self.layouts[n]}" for n in names if n in self.layouts)
        return ", ".join(said) or "the pins"


class Both:
    """Two restrictions at once."""

    def __init__(self, *parts) -> None:
        self.parts = [part for part in parts if part is not None]

    def key(self, graph: Graph, node: Node) -> Hashable:
        """Both keys."""
        return tuple(part.key(graph, node) for part in self.parts)

    def allows(self, graph: Graph, node: Node, signature: Signature) -> bool:
        """Both allow it."""
        return all(part.allows(graph, node, signature) for part in self.parts)

    def allows_source(self, graph: Graph, value: str, layout: Layout) -> bool:
        """Both allow it."""
        return all(part.allows_source(graph, value, layout) for part in self.parts)

    def describe(self, graph: Graph, place: str) -> str:
        """What either says."""
        return " and ".join(part.describe(graph, place) for part in self.parts)
