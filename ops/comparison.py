"""Comparisons, logic on truth values, and choosing by them."""

from __future__ import annotations

from typing import Any

from sbp.dtype import holds
from sbp.errors import RuleError
from sbp.operator import Operator, TensorType, operator
from sbp.ops.broadcasting import unbroadcast
from sbp.ops.elementwise import joined


def _comparable(x: TensorType, y: TensorType) -> str:
    if x.dtype != "bool" or y.dtype != "bool":
        joined(x, y)  # raises for what cannot be compared without a cast
    return "bool"


def _cases(op: Operator, dtype: str = "f32") -> None:
    for left, right in (("4,6", "4,6"), ("5", "3,5"), ("4,1", "1,7"), ("4,6", "")):
        op.case(f"{dtype}[{left}]", f"{dtype}[{right}]")


@operator("*d, *d -> *d", dtype=_comparable)
def equal(xp, x, y):
    """x == y."""
    return xp.equal(x, y)


@operator("*d, *d -> *d", dtype=_comparable)
def not_equal(xp, x, y):
    """x != y."""
    return xp.not_equal(x, y)


@operator("*d, *d -> *d", antitone="x", monotone="y", dtype=_comparable)
def less(xp, x, y):
    """x < y."""
    return xp.less(x, y)


@operator("*d, *d -> *d", antitone="x", monotone="y", dtype=_comparable)
def less_equal(xp, x, y):
    """x <= y."""
    return xp.less_equal(x, y)


@operator("*d, *d -> *d", monotone="x", antitone="y", dtype=_comparable)
def greater(xp, x, y):
    """x > y."""
    return xp.greater(x, y)


@operator("*d, *d -> *d", monotone="x", antitone="y", dtype=_comparable)
def greater_equal(xp, x, y):
    """x >= y."""
    return xp.greater_equal(x, y)


for _op in (equal, not_equal):
    _cases(_op, "i64")
for _op in (less, less_equal, greater, greater_equal):
    _cases(_op)
    _op.case("i64[5]", "i64[5]")


def _with_number(x: TensorType, *, number: float) -> str:
    return "bool"


@operator("*d -> *d", dtype=_with_number)
def equal_number(xp, x, *, number):
    """x == number."""
    return xp.equal(x, number)


@operator("*d -> *d", dtype=_with_number, antitone="all")
def less_number(xp, x, *, number):
    """x < number."""
    return xp.less(x, number)


@operator("*d -> *d", dtype=_with_number, monotone="all")
def greater_number(xp, x, *, number):
    """x > number."""
    return xp.greater(x, number)


for _op in (equal_number, less_number, greater_number):
    _op.case("i64[4,6]", number=2)
    _op.case("i64[3,5]", number=-1)
    _op.case("i64[2,1,3]", number=0)


less_number.case("f32[5]", number=0.25)
greater_number.case("f32[3,1]", number=0.25)


def _truth(*types: TensorType) -> str:
    if any(t.dtype != "bool" for t in types):
        raise RuleError(f"takes truth values, got {', '.join(map(str, types))}; compare, or cast them to bool first")
    return "bool"


@operator("*d, *d -> *d", monotone="each", passes=[("all", "min", "min")], dtype=_truth)
def logical_and(xp, x, y):
    """Both."""
    return xp.logical_and(x, y)


@operator("*d, *d -> *d", monotone="each", passes=[("all", "max", "max")], dtype=_truth)
def logical_or(xp, x, y):
    """One or both."""
    return xp.logical_or(x, y)


@operator("*d -> *d", antitone="all", dtype=_truth)
def logical_not(xp, x):
    """The opposite."""
    return xp.logical_not(x)


for _op in (logical_and, logical_or):
    _cases(_op, "bool")
logical_not.case("bool[4,6]")
logical_not.case("bool[5]")
logical_not.case("bool[2,1,3]")


def _choice(condition: TensorType, x: TensorType, y: TensorType) -> str:
    _truth(condition)
    return x.dtype if x.dtype == y.dtype else joined(x, y)


@operator("*d, *d, *d -> *d", linear="x y", monotone="x y | x | y", dtype=_choice)
def where(xp, condition, x, y):
    """x where the condition holds, y elsewhere."""
    return xp.where(condition, x, y)


@where.gradient
def _(grad, condition, x, y):
    return (
        None,
        unbroadcast(masked_fill(grad, logical_not(condition), value=0), x),
        unbroadcast(masked_fill(grad, condition, value=0), y),
    )


where.case("bool[4,6]", "f32[4,6]", "f32[4,6]")
where.case("bool[5]", "f32[3,1]", "f32[3,5]")
where.case("bool[2,1]", "f32[1,3]", "f32[]")
where.case("bool[3]", "i64[3]", "i64[1]")


def _filled(x: TensorType, mask: TensorType, *, value: Any) -> str:
    _truth(mask)
    if not holds(x.dtype, value):
        raise RuleError(f"value {value} is none of the whole numbers that {x} holds; cast it to a floating type first")
    return x.dtype


@operator("*d, *d -> *d", monotone="x", linear=lambda *types, value: "x" if value == 0 else "", dtype=_filled)
def masked_fill(xp, x, mask, *, value):
    """`value` where the mask holds, x elsewhere."""
    return xp.where(mask, xp.asarray(value, dtype=x.dtype), x)


@masked_fill.gradient
def _(grad, x, mask):
    return unbroadcast(masked_fill(grad, mask, value=0), x), None


masked_fill.case("f32[4,6]", "bool[4,6]", value=0)
masked_fill.case("f32[2,3,5]", "bool[3,5]", value=-1.5)
masked_fill.case("f32[4,1]", "bool[1,5]", value=0.0)
masked_fill.case("i64[3,5]", "bool[5]", value=2)
