"""Operators as methods and Python operators of anything that can be passed to them (symbols, global tensors)."""

from __future__ import annotations

from typing import Any

from sbp.errors import GraphError
from sbp.operator import REGISTRY


def _call(name: str, *inputs: Any, **attributes: Any) -> Any:
    return REGISTRY[name](*inputs, **attributes)


class TensorMethods:
    """Mixin: `x + y`, `x @ y`, `x.reshape(...)`; a number on either side becomes an attribute, not a tensor."""

    __slots__ = ()
    __array_priority__ = 1000  # NumPy scalars and arrays on the left defer to this class

    def __add__(self, other: Any) -> Any:
        return _call("shift", self, amount=other) if _is_number(other) else _call("add", self, other)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return _call("neg", self)

    def __sub__(self, other: Any) -> Any:
        return _call("shift", self, amount=-other) if _is_number(other) else _call("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return _call("shift", _call("neg", self), amount=other) if _is_number(other) else _call("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return _call("scale", self, factor=other) if _is_number(other) else _call("mul", self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return _call("scale", self, factor=1 / other) if _is_number(other) else _call("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        if _is_number(other):
            return _call("scale", _call("reciprocal", self), factor=other)
        return _call("div", other, self)

    def __matmul__(self, other: Any) -> Any:
        return _call("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _call("matmul", other, self)

    def __pow__(self, exponent: float) -> Any:
        return _call("pow", self, exponent=exponent)

    def __getitem__(self, key: Any) -> Any:
        from sbp.ops.subscript import take

        return take(self, key)

    def __iter__(self) -> Any:
        return (self[index] for index in range(self.shape[0]))  # type: ignore[attr-defined]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise GraphError(f"{self!r} is a value and cannot be written into; write x = x.updated({key!r}, value).")

    def updated(self, key: Any, value: Any) -> Any:
        """A tensor like this one with `value`, a number or a tensor, at [key]: what x[key] = value would make of it."""
        from sbp.ops.subscript import put

        return put(self, key, value)

    def reshape(self, *shape: Any) -> Any:
        """The same elements in another shape; one size may be -1."""
        return _call("reshape", self, shape=_flat(shape))

    def permute(self, *order: Any) -> Any:
        """Dimensions in another order."""
        return _call("permute", self, order=_flat(order))

    def transpose(self, first: int = -2, second: int = -1) -> Any:
        """Two dimensions exchanged."""
        return _call("transpose", self, first=first, second=second)

    def expand(self, *shape: Any) -> Any:
        """Dimensions of size one repeated, new ones added on the left."""
        return _call("expand", self, shape=_flat(shape))

    def sum(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Sum over dimensions (default all)."""
        return _call("sum", self, axis=axis, keepdims=keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Mean over dimensions (default all)."""
        return _call("mean", self, axis=axis, keepdims=keepdims)

    def astype(self, dtype: str) -> Any:
        """Another element type."""
        return _call("cast", self, dtype=dtype)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0 and not hasattr(value, "__sbp_apply__")


def _flat(values: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else tuple(values)
