"""Operators as methods and Python operators of anything that can be passed to them (symbols, global tensors)."""

from __future__ import annotations

import math
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
        return _call("scale", self, factor=_inverse(other)) if _is_number(other) else _call("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        if _is_number(other):
            return _call("scale", _call("reciprocal", self), factor=other)
        return _call("div", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _call("floor_divide", self, _constant(other, self))

    def __rfloordiv__(self, other: Any) -> Any:
        return _call("floor_divide", _constant(other, self), self)

    def __mod__(self, other: Any) -> Any:
        return _call("remainder", self, _constant(other, self))

    def __rmod__(self, other: Any) -> Any:
        return _call("remainder", _constant(other, self), self)

    def __abs__(self) -> Any:
        return _call("abs", self)

    def __matmul__(self, other: Any) -> Any:
        return _call("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _call("matmul", other, self)

    def __pow__(self, exponent: float) -> Any:
        if not _is_number(exponent):
            raise GraphError(
                f"{self!r} ** {exponent!r}: the exponent must be a number; write exp(y * log(x)) for x > 0."
            )
        return _call("pow", self, exponent=exponent)

    def __rpow__(self, base: Any) -> Any:
        if not _is_number(base) or not base > 0:
            raise GraphError(f"{base!r} ** {self!r}: the base must be a number above 0.")
        return _call("exp", _call("scale", self, factor=math.log(base)))

    # A comparison gives truth values, element by element; what a tensor is compared with decides its operator.

    def __eq__(self, other: Any) -> Any:
        if not _is_comparable(other):
            return NotImplemented
        return _call("equal_number", self, number=other) if _is_number(other) else _call("equal", self, other)

    def __ne__(self, other: Any) -> Any:
        if not _is_comparable(other):
            return NotImplemented
        if _is_number(other):
            return _call("logical_not", _call("equal_number", self, number=other))
        return _call("not_equal", self, other)

    __hash__ = object.__hash__

    def __lt__(self, other: Any) -> Any:
        return _call("less_number", self, number=other) if _is_number(other) else _call("less", self, other)

    def __gt__(self, other: Any) -> Any:
        return _call("greater_number", self, number=other) if _is_number(other) else _call("greater", self, other)

    def __le__(self, other: Any) -> Any:
        if _is_number(other):  # not "not greater", which NaN is as well
            return _call("logical_or", self < other, self == other)
        return _call("less_equal", self, other)

    def __ge__(self, other: Any) -> Any:
        if _is_number(other):
            return _call("logical_or", self > other, self == other)
        return _call("greater_equal", self, other)

    def __invert__(self) -> Any:
        return _call("logical_not" if self.dtype == "bool" else "bitwise_not", self)  # type: ignore[attr-defined]

    def __and__(self, other: Any) -> Any:
        return _call("bitwise_and", self, _constant(other, self))

    def __or__(self, other: Any) -> Any:
        return _call("bitwise_or", self, _constant(other, self))

    def __xor__(self, other: Any) -> Any:
        return _call("bitwise_xor", self, _constant(other, self))

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __len__(self) -> int:
        if not self.shape:  # type: ignore[attr-defined]
            raise GraphError(f"{self!r} is a single number and has no length.")
        return self.shape[0]  # type: ignore[attr-defined]

    def __getitem__(self, key: Any) -> Any:
        from sbp.ops.subscript import take

        return take(self, key)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

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

    def max(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Maximum over dimensions (default all)."""
        return _call("max", self, axis=axis, keepdims=keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Any:
        """Minimum over dimensions (default all)."""
        return _call("min", self, axis=axis, keepdims=keepdims)

    @property
    def T(self) -> Any:
        """Dimensions in reversed order."""
        return _call("permute", self, order=tuple(reversed(range(len(self.shape)))))  # type: ignore[attr-defined]

    def astype(self, dtype: str) -> Any:
        """Another element type."""
        return _call("cast", self, dtype=dtype)


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return True
    return hasattr(value, "item") and getattr(value, "ndim", None) == 0 and not _is_tensor(value)


def _is_comparable(value: Any) -> bool:
    """Whether it has numbers; `None`, texts and functions are equal to no tensor, as a whole."""
    return _is_number(value) or isinstance(value, (list, tuple)) or hasattr(value, "__array__") or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "__sbp_apply__")


def _inverse(number: Any) -> float:
    """1 / number, of zero the infinity of its sign: x / 0 is then what it is in NumPy."""
    return 1 / number if number else math.copysign(math.inf, number)


def _constant(value: Any, beside: Any) -> Any:
    """A number as a tensor of one element, of the type of the tensor it stands beside; anything else as it is."""
    if not _is_number(value):
        return value
    full = REGISTRY["full"]
    return beside.__sbp_apply__(full, (), full.complete({"shape": (), "value": value, "dtype": beside.dtype}))


def _flat(values: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], (tuple, list)) else tuple(values)
