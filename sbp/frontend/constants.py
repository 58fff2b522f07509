"""What a traced PyTorch program computes from nothing but numbers: masks, positions. Found by running that part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MOST_ELEMENTS = 1 << 28
"""Larger values are not computed; they stay what the program makes of them."""


class Constants:
    """Values of the nodes that depend on no input and no state, computed when asked for.

    A dimension along which a value does not change is kept with stride 0, so that a mask that every sample of a large
    batch has is computed once.

    Parameters
    ----------
    known
        Values of placeholders that are constant (tensors written in the model's code).
    number
        Makes an integer of a size that may be symbolic.
    """

    def __init__(self, known: Mapping[Any, Any], number: Callable[[Any], Any]) -> None:
        self._values: dict[Any, Any] = dict(known)
        self._constant: dict[Any, bool] = dict.fromkeys(known, True)
        self._number = number

    def is_constant(self, node: Any) -> bool:
        """Whether the node depends on nothing but constants."""
        found = self._constant.get(node)
        if found is None:
            found = self._constant[node] = self._judge(node)
        return found

    def _judge(self, node: Any) -> bool:
        """Nodes are asked in program order, so that their inputs have been judged."""
        import torch

        if node.op != "call_function":
            return False
        if _is_number(node):  # a size, which is known even where it is that of an input
            return True
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            return False
        return all(self.is_constant(item) for item in node.all_input_nodes)

    def value(self, node: Any) -> Any:
        """The node's value, or None where it is not constant, too large, or cannot be computed here."""
        if not self.is_constant(node):
            return None
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: Any) -> Any:
        import torch
        from torch.fx.node import map_aggregate

        if _is_number(node):
            return self._number(node.meta["val"])
        inputs = {item: self.value(item) for item in node.all_input_nodes}
        if any(value is None for value in inputs.values()):
            return None
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ()) or _is_untagged_pointwise(node)
        shape = self._shape(node)
        if pointwise and shape is not None:
            inputs = {item: _narrowed(value) for item, value in inputs.items()}
        elements = _elements(inputs.values()) if pointwise else _product(shape or ())
        if elements > MOST_ELEMENTS and not _is_view(node):
            return None

        def real(item: Any) -> Any:
            if isinstance(item, torch.fx.Node):
                return inputs[item]
            if isinstance(item, torch.device):
                return torch.device("cpu")
            return self._number(item)

        arguments, options = map_aggregate(node.args, real), map_aggregate(node.kwargs, real)
        try:
            with torch.no_grad():
                found = node.target(*arguments, **options)
        except (RuntimeError, ValueError, TypeError, NotImplementedError, IndexError):
            return None
        if not isinstance(found, torch.Tensor):
            return found
        if pointwise and shape is not None:
            return found.expand(shape)
        return _with_repetition(found)

    def _shape(self, node: Any) -> tuple[int, ...] | None:
        import torch

        made = node.meta.get("val")
        return tuple(self._number(size) for size in made.shape) if isinstance(made, torch.Tensor) else None


def _is_number(node: Any) -> bool:
    import torch

    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _elements(values: Any) -> int:
    """How many elements an operation on these, broadcast together, makes."""
    import torch

    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    return _product(torch.broadcast_shapes(*shapes)) if shapes else 1


def _is_view(node: Any) -> bool:
    return str(node.target) in (
        "aten.expand.default", "aten.unsqueeze.default", "aten.slice.Tensor", "aten.transpose.int",
        "aten.permute.default", "aten.select.int", "aten.squeeze.dim",
    )  # fmt: skip


def _is_untagged_pointwise(node: Any) -> bool:
    """Operators that work element by element but that PyTorch does not mark as such."""
    _, _, name = str(node.target).partition("aten.")
    return name.split(".")[0] in (
        "to", "_to_copy", "clone", "contiguous", "alias", "lift_fresh", "lift_fresh_copy", "__and__", "__or__",
        "__xor__", "masked_fill",
    )  # fmt: skip


def _narrowed(value: Any) -> Any:
    """Dimensions that only repeat, cut to size one."""
    for dim in range(getattr(value, "ndim", 0)):
        if value.stride(dim) == 0 and value.shape[dim] > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _with_repetition(value: Any) -> Any:
    """The same values, dimensions along which they do not change with stride 0."""
    shape = value.shape
    if value.numel() == 0:
        return value
    for dim in range(value.ndim):
        if value.shape[dim] > 1:
            first = value.narrow(dim, 0, 1)
            if value.stride(dim) == 0 or bool((value == first).all()):
                value = first
    return value.expand(shape)
