"""Where gradients stop in a traced program: `detach`, `torch.no_grad()`, and functions with a backward of their own.

PyTorch's decompositions turn `detach` into a plain alias and leave `no_grad` regions without a trace, so the places are
marked with an operator that survives them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sbp.errors import FrontendError
from sbp.frontend.program import source_line

REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operators of torch.export that hold a `with` block as a program of its own; decompositions inline them."""


@cache
def _stop() -> Any:
    """The operator `sbp.stop_gradient`: a copy of its input."""
    import torch

    stop = torch.library.custom_op("sbp::stop_gradient", torch.clone, mutates_args=(), schema="(Tensor x) -> Tensor")
    stop.register_fake(torch.empty_like)
    return torch.ops.sbp.stop_gradient.default


def is_region(node: Any) -> bool:
    """Whether a node of a traced program is a `with` block."""
    return node.op == "call_function" and str(node.target) in REGIONS


def mark_stops(program: Any) -> None:
    """Mark in a traced program, in place, where gradients stop that would reach a parameter."""
    from torch.export.graph_signature import InputKind

    trained = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.PARAMETER and program.state_dict[spec.target].requires_grad
    }
    graph = program.graph
    _mark(program.graph_module, {node for node in graph.nodes if node.op == "placeholder" and node.name in trained})


def _mark(owner: Any, reached: set[Any]) -> None:
    """Mark the graph of `owner`, in which gradients of parameters come from the nodes `reached`."""
    graph = owner.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or reached.isdisjoint(node.all_input_nodes):
            continue
        name = str(node.target)
        if name in ("aten.detach.default", "aten.detach_.default"):
            _follow(graph, node)
        elif name == REGIONS[0] and node.args[0] is False:
            for part in list(node.users):
                _follow(graph, part)
        else:
            reached.add(node)
            if is_region(node):
                first = next(index for index, item in enumerate(node.args) if _is_program(item))
                body = getattr(owner, node.args[first].target)
                places = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
                _mark(body, {place for place, item in zip(places, node.args[first + 1 :]) if item in reached})
    owner.recompile()


def _is_program(item: Any) -> bool:
    return getattr(item, "op", "") == "get_attr"


def _follow(graph: Any, node: Any) -> None:
    """Put the mark behind a node, for everything that uses it."""
    import torch

    made = node.meta.get("val")
    if not isinstance(made, torch.Tensor) or not made.is_floating_point():
        return
    if _changed(node):
        raise FrontendError(
            f"{source_line(node) or 'the model'}: what detach() or no_grad() gives is changed in place, and with it "
            "the tensor that it shares memory with; change a copy (x.detach().clone())."
        )
    with graph.inserting_after(node):
        mark = graph.call_function(_stop(), (node,))
    mark.meta = dict(node.meta)
    node.replace_all_uses_with(mark, delete_user_cb=lambda user: user is not mark)


def _changed(node: Any) -> bool:
    """Whether an operator changes in place what a node gives, or a view of it."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is None:
            continue
        if schema.is_mutable and user.args and user.args[0] is node:
            return True
        if any(item.alias_info is not None for item in schema.returns) and _changed(user):
            return True
    return False


@contextmanager
def no_grad_outside_autocast() -> Iterator[None]:
    """Refuse `no_grad` inside `autocast`, of which torch.export keeps no trace.

    Raises
    ------
    FrontendError
        It is entered.
    """
    import torch

    casts, still = torch.autocast, torch.no_grad
    enter, leave, stop = casts.__enter__, casts.__exit__, still.__enter__
    depth = 0

    def entered(self: Any) -> Any:
        nonlocal depth
        depth += 1
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        nonlocal depth
        depth -= 1
        return leave(self, *error)

    def stopped(self: Any) -> Any:
        if depth:
            raise FrontendError(
                "forward enters torch.no_grad() inside torch.autocast(), and torch.export loses it: gradients would "
                "not stop. Enter no_grad first, or detach() what it gives instead."
            )
        return stop(self)

    changed: tuple[tuple[Any, str, Any], ...] = (
        (casts, "__enter__", entered),
        (casts, "__exit__", left),
        (still, "__enter__", stopped),
    )
    before: tuple[tuple[Any, str, Any], ...] = (
        (casts, "__enter__", enter),
        (casts, "__exit__", leave),
        (still, "__enter__", stop),
    )
    for kind, name, function in changed:
        setattr(kind, name, function)
    try:
        yield
    finally:
        for kind, name, function in before:
            setattr(kind, name, function)


@contextmanager
def without_own_backward() -> Iterator[None]:
    """Refuse `torch.autograd.Function`s that are not PyTorch's own: only their forward could be traced.

    Raises
    ------
    FrontendError
        One is applied.
    """
    import torch

    function = torch.autograd.Function
    before = function.__dict__["apply"]

    def apply(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            raise FrontendError(
                f"{cls.__qualname__} ({inspect.getsourcefile(cls)}) is a torch.autograd.Function: the backward that it "
                "defines would not be followed. Write its forward with operators of PyTorch in a plain function, whose "
                "gradient is derived (x + (y - x).detach() has the value of y and the gradient of x), or import for "
                "inference (training=False)."
            )
        return before.__get__(None, cls)(*arguments, **keywords)

    setattr(function, "apply", classmethod(apply))  # noqa: B010
    try:
        yield
    finally:
        setattr(function, "apply", before)  # noqa: B010
