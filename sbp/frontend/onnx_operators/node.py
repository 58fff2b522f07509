"""The table of ONNX's operators, and the nodes that its entries translate.

An entry is a function of a `Node` and the operator's inputs, tensors as symbols; what is known at import (shapes, axes)
it reads with `node.constant`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sbp.frontend.translation import Table
from sbp.trace import GraphBuilder

onnx_translation = Table()
"""Of ONNX operators by name; users add theirs: `@onnx_translation("Name")`."""

_TYPES = {1: "f32", 2: "u8", 3: "i8", 6: "i32", 7: "i64", 9: "bool", 10: "f16", 11: "f64", 12: "u32", 16: "bf16"}
"""Element types by their number in TensorProto; others are not held here."""


@dataclass
class Node:
    """An ONNX node being translated.

    Parameters
    ----------
    attributes
        Its attributes as Python values.
    constant
        Value of input i (a NumPy array) where it is known at import, else None.
    outputs
        How many outputs are used.
    """

    builder: GraphBuilder
    name: str
    attributes: Mapping[str, Any]
    constant: Callable[[int], Any]
    outputs: int
    opset: int

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        return self.attributes.get(name, default)

    def known(self, index: int, what: str, default: Any = None) -> Any:
        """The value of input i; raises `NotImplementedError` if only the data says it."""
        value = self.constant(index)
        if value is None and default is None:
            raise NotImplementedError(f"{what} that the data says")
        return default if value is None else value

    def axes(self, index: int = 1, name: str = "axes") -> tuple[int, ...] | None:
        """Axes from the attribute of older opsets or the input of newer ones; None: all."""
        given = self.get(name)
        if given is None:
            given = self.constant(index)
        return None if given is None else tuple(int(axis) for axis in (given if hasattr(given, "__len__") else [given]))


def element_type(number: int) -> str:
    """The name of an element type of TensorProto; raises `NotImplementedError` for what is not held here."""
    if number not in _TYPES:
        raise NotImplementedError(f"element type {number} of TensorProto")
    return _TYPES[number]
