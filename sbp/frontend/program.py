"""From a program traced by torch.export to the forward graph: every node by its entry in the table of translations."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sbp.errors import FrontendError, SbpError
from sbp.frontend.constants import Constants
from sbp.frontend.translation import Context, as_type, drop_unused, translation
from sbp.graph import Graph, Initial
from sbp.operator import TensorType
from sbp.trace import GraphBuilder, Symbol

_DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "requires_grad")
"""Options that say nothing about values."""


@dataclass(frozen=True)
class Source:
    """What a placeholder of the traced program is.

    Parameters
    ----------
    name
        Of the value in the graph.
    kind
        "input", "parameter" or "buffer".
    initial
        How it starts; None: as its kind does.
    stored
        Element type in which it is kept between steps or fed, where that is not the one computed in.
    """

    name: str
    kind: str
    initial: Initial | None = None
    stored: str | None = None


@dataclass(frozen=True)
class Unknown:
    """An operator without translation, where it stands in the model, and why its entry does not take it."""

    operator: str
    module: str
    line: str
    reason: str = ""

    def __str__(self) -> str:
        place = f"in {self.module or 'the model itself'}" + (f", {self.line}" if self.line else "")
        return f"{self.operator} ({place})" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Translated:
    """The forward graph of a program, and what was noted on the way.

    Parameters
    ----------
    lines
        Node -> where in the model's source it comes from, as "file:line".
    folded
        Names of buffers that hold constants of the program, with their values (tensors).
    replicated
        Operators that run through PyTorch on whole tensors.
    """

    graph: Graph
    lines: Mapping[str, str]
    folded: Mapping[str, Any]
    replicated: tuple[Unknown, ...]


class Sizes:
    """Integers for sizes; those that depend on the dynamic batch dimension, for one batch size."""

    def __init__(self, symbols: Mapping[Any, int]) -> None:
        self._symbols = dict(symbols)

    def __call__(self, item: Any) -> Any:
        """The integer that a symbolic size is; anything else as it is."""
        import torch

        if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            value = item.node.expr.subs(self._symbols)
            if value.free_symbols:
                raise FrontendError(
                    f"a size ({item}) depends on the values of a tensor: indexing by a mask, nonzero, unique or "
                    ".item(). A plan's shapes are fixed; write it with torch.where, or multiply by the mask."
                )
            if isinstance(item, torch.SymBool):
                return bool(value)
            return float(value) if isinstance(item, torch.SymFloat) else int(value)
        return item

    def type(self, made: Any) -> TensorType:
        """Of a tensor of the traced program."""
        name = str(made.dtype).rpartition(".")[2]
        name = {"int16": "int32"}.get(name, name)
        if name.startswith("complex"):
            raise FrontendError(
                "complex numbers have no element type here; write them as pairs of real ones (torch.view_as_real)."
            )
        return TensorType(tuple(self(size) for size in made.shape), name)


def module_path(node: Any, strip: str = "") -> str:
    """Path of the innermost module that a node was traced in; outside of the one named `strip` it is "loss"."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    path = re.sub(r"@\d+$", "", paths[-1]) if paths else ""
    path = path.removeprefix("L['self'].").replace("L['self']", "")
    if not strip:
        return path
    if path == strip:
        return ""
    return path.removeprefix(f"{strip}.") if path.startswith(f"{strip}.") else path or "loss"


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def source_line(node: Any) -> str:
    """Where the model's own code (PyTorch's, if there is none) made a node, as "file:line"; "" if it does not say."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if "/torch/" not in file and "sbp/frontend" not in file]
    return "{}:{}".format(*(own or frames)[-1]) if frames else ""


class _Translator:
    def __init__(
        self,
        name: str,
        sources: Mapping[str, Source],
        known: Mapping[str, Any],
        sizes: Sizes,
        wrapped: str,
        on_unknown: str,
    ) -> None:
        self.builder = GraphBuilder(name)
        self.sources = sources
        self.known = known
        self.sizes = sizes
        self.wrapped = wrapped
        self.on_unknown = on_unknown
        self.symbols: dict[Any, Any] = {}
        self.placeholders: dict[str, Any] = {}
        self.unknown: list[Unknown] = []
        self.lines: dict[str, str] = {}
        self.folded: dict[str, Any] = {}
        self.notes: dict[Any, Any] = {}
        self.constants = Constants({}, sizes)

    def run(self, nodes: Iterable[Any]) -> None:
        """Translate in program order; constants only where something else needs them."""
        nodes = list(nodes)
        self.placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
        self.constants = Constants(
            {node: self.known[name] for name, node in self.placeholders.items() if name in self.known}, self.sizes
        )
        for node in nodes:
            if node.op == "placeholder":
                source = self.sources.get(node.name)
                if source is not None and source.kind == "input" and node.users:
                    self._declare(node, source)
            elif node.op == "call_function" and not self._left_out(node):
                self._translate(node)
            elif node.op not in ("call_function", "output"):
                users = ", ".join(sorted({f"{user.target} ({source_line(user)})" for user in node.users}))
                raise FrontendError(
                    f"{self.builder.name}: {users or node.target} holds a program of its own (torch.cond, a loop), "
                    "which has no translation; write both branches out and choose with torch.where."
                )

    def _left_out(self, node: Any) -> bool:
        return not node.users or self.constants.is_constant(node) or _only_orders(node)

    def _declare(self, node: Any, source: Source) -> None:
        made = self.sizes.type(node.meta["val"])
        known = self.builder.symbols.get(source.name)
        stored = TensorType(made.shape, source.stored or made.dtype)
        symbol = known or self.builder.source(source.name, stored, source.kind, source.initial)
        if symbol.dtype != made.dtype:
            module = source.name.rpartition(".")[0] if source.kind != "input" else ""
            with self.builder, self.builder.at("forward", module):
                symbol = as_type(symbol, made.dtype)
        self.symbols[node] = symbol

    def operand(self, node: Any) -> Any:
        """The symbol of a node; those of state and of constants are made at their first use."""
        if node not in self.symbols:
            if node.op == "placeholder" and node.name in self.known:
                self.symbols[node] = self._fold(node, self.known[node.name])
            elif node.op == "placeholder":
                self._declare(node, self.sources[node.name])
            elif node.op == "call_function":
                for item in node.all_input_nodes:
                    self.operand(item)
                self._translate(node)
        return self.symbols[node]

    def _fold(self, node: Any, value: Any) -> Symbol:
        """A constant of the program as a buffer that holds it."""
        kind = self.sizes.type(value)
        name = self.builder.unique(f"constant.{node.name}")
        self.folded[name] = value
        flat = value.reshape(-1)
        uniform = bool(flat.numel()) and bool((flat == flat[0]).all())
        initial = Initial("constant", (flat[0].item(),)) if uniform else None
        return self.builder.source(name, kind, "buffer", initial)

    def _translate(self, node: Any) -> None:
        if node.target is operator.getitem:
            self.symbols[node] = self.operand(node.args[0])[node.args[1]]
            return
        made = node.meta.get("val")
        if not _tensors(made):
            try:
                self.symbols[node] = self.sizes(made)
            except FrontendError as error:
                raise FrontendError(f"{self.builder.name} at {source_line(node) or node.target}: {error}") from None
            return
        path = module_path(node, self.wrapped)
        try:
            types = tuple(self.sizes.type(item) for item in _tensors(made))
        except FrontendError as error:
            place = Unknown(str(node.target), path, source_line(node))
            raise FrontendError(f"{self.builder.name}: {place}: {error}") from None
        before = len(self.builder.nodes)
        with self.builder, self.builder.at("forward", path):
            found = self._apply(node, types)
            self.symbols[node] = self._as_declared(node, found, made, types)
        line = source_line(node)
        for added in self.builder.nodes[before:]:
            self.lines.setdefault(added.name, line)

    def _apply(self, node: Any, types: tuple[TensorType, ...]) -> Any:
        name = str(node.target)
        entry = translation.find(name)
        reason = ""
        if entry is not None:
            context = Context(self.builder, types, node, self.constants.value, self.operand, self.notes)
            arguments = [self._argument(item, index in entry.by_node) for index, item in enumerate(node.args)]
            options = {
                key: self._argument(item, key in entry.by_node)
                for key, item in node.kwargs.items()
                if key not in _DROPPED
            }
            kept = len(self.builder.nodes)
            try:
                return entry.function(context, *arguments, **options)
            except (SbpError, NotImplementedError, TypeError, KeyError, AttributeError, IndexError) as error:
                if isinstance(error, FrontendError):
                    raise
                known = isinstance(error, (SbpError, NotImplementedError))
                reason = str(error) if known else f"{type(error).__name__}: {error}"
                _forget(self.builder, kept)
        return self._without_entry(node, types, reason)

    def _without_entry(self, node: Any, types: tuple[TensorType, ...], reason: str) -> Any:
        value = self.constants.value(node)
        if value is not None and len(types) == 1:
            return self._fold(node, value)
        place = Unknown(str(node.target), module_path(node, self.wrapped), source_line(node), reason)
        self.unknown.append(place)
        if self.on_unknown == "replicate":
            from sbp.frontend.fallback import run_whole

            return run_whole(node, types, self.operand, self.sizes)
        # The walk goes on, so that one error lists all unknown operators.
        stand_in = tuple(
            self.builder.source(self.builder.unique(f"unknown.{node.name}"), kind, "input") for kind in types
        )
        return stand_in if isinstance(node.meta["val"], (tuple, list)) else stand_in[0]

    def _argument(self, item: Any, by_node: bool) -> Any:
        import torch
        from torch.fx.node import map_aggregate

        def real(part: Any) -> Any:
            if isinstance(part, torch.fx.Node):
                return part if by_node else self.operand(part)
            return self.sizes(part)

        found = map_aggregate(item, real)
        return list(found) if isinstance(found, (list, tuple)) else found

    def _as_declared(self, node: Any, found: Any, made: Any, types: tuple[TensorType, ...]) -> Any:
        """The result in the type that PyTorch says; a shape that differs is a mistake of the entry."""
        several = isinstance(made, (tuple, list))
        results = list(found) if isinstance(found, (tuple, list)) else [found]
        expected = [self.sizes.type(item) if _tensors(item) else None for item in (made if several else (made,))]
        for index, (result, kind) in enumerate(zip(results, expected)):
            if not isinstance(result, Symbol) or kind is None:
                continue
            if result.shape != kind.shape:
                raise FrontendError(
                    f"the translation of {node.target} in {module_path(node, self.wrapped) or 'the model'} "
                    f"({source_line(node)}) gives {result.value.type}, PyTorch {kind}; correct it."
                )
            results[index] = as_type(result, kind.dtype)
        return tuple(results) if several else results[0]


def _only_orders(node: Any) -> bool:
    """Whether a node makes a token, of which nothing but the order of effects (assertions on values) is to be read."""
    if node.target is operator.getitem:
        return node.args[1] == 0 and str(node.args[0].target) == "with_effects"
    return str(node.target) == "with_effects" and all(_only_orders(user) for user in node.users)


def _tensors(made: Any) -> list[Any]:
    import torch

    if isinstance(made, torch.Tensor):
        return [made]
    return [item for item in made if isinstance(item, torch.Tensor)] if isinstance(made, (tuple, list)) else []


def _forget(builder: GraphBuilder, kept: int) -> None:
    """Undo the nodes that a translation added before it failed."""
    for node in builder.nodes[kept:]:
        for name in node.outputs:
            del builder.values[name], builder.symbols[name]
    del builder.nodes[kept:]


def translate(
    name: str,
    nodes: Iterable[Any],
    outputs: Mapping[str, Any],
    updates: Mapping[str, Any],
    sources: Mapping[str, Source],
    known: Mapping[str, Any],
    sizes: Sizes,
    wrapped: str,
    on_unknown: str,
) -> Translated:
    """The forward graph.

    Parameters
    ----------
    nodes
        Of the traced program, in order.
    outputs
        Name -> node of what the graph gives.
    updates
        Placeholder's name of a buffer -> node that is its next value.
    sources
        Placeholder's name -> what it is.
    known
        Placeholder's name -> value of a constant.
    wrapped
        Name of the attribute under which the model stands in what was traced.

    Raises
    ------
    FrontendError
        Operators without translation, all of them in one error.
    """
    work = _Translator(name, sources, known, sizes, wrapped, on_unknown)
    work.run(nodes)
    builder = work.builder
    with builder:
        made = [work.operand(node) for node in outputs.values()]
        for placeholder, node in updates.items():
            work.operand(work.placeholders[placeholder])  # declares it, where nothing else reads it
            state = builder.symbols[sources[placeholder].name]
            builder.update(state, as_type(work.operand(node), state.dtype))
    if work.unknown and on_unknown == "error":
        raise FrontendError(_unknown_message(name, work.unknown))
    drop_unused(builder, [symbol.name for symbol in made])
    graph = builder.finish(made)
    return Translated(graph, work.lines, work.folded, tuple(work.unknown))


def _unknown_message(name: str, unknown: list[Unknown]) -> str:
    by_operator: dict[tuple[str, str], list[Unknown]] = {}
    for item in unknown:
        by_operator.setdefault((item.operator, item.reason), []).append(item)
    lines = []
    for (label, reason), items in by_operator.items():
        places = ", ".join(
            f"{item.module or 'the model itself'}{f' ({item.line})' if item.line else ''}" for item in items[:3]
        )
        more = f" and {len(items) - 3} more" if len(items) > 3 else ""
        lines.append(f"  {label} in {places}{more}" + (f": {reason}" if reason else ""))
    first = unknown[0].operator
    return (
        f"{name}: {len(by_operator)} operator{'s have' if len(by_operator) > 1 else ' has'} no translation:\n"
        + "\n".join(lines)
        + "\nWrite one before importing:\n"
        "  from sbp.frontend.torch import translation\n"
        "  from sbp.ops import library as ops\n"
        f'  @translation("{first}")\n'
        "  def _(context, x, ...):  # the operator's arguments, tensors as symbols\n"
        "      return ...  # in operators of sbp; @sbp.operator defines new ones with their rule\n"
        'or give on_unknown="replicate", which runs these operators through PyTorch on every rank, on whole tensors.'
    )
