"""Arithmetic, element by element, with NumPy broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy

from sbp.dtype import dtype_named, holds, is_floating, numpy_name
from sbp.errors import RuleError
from sbp.operator import Operator, TensorType, operator
from sbp.ops.broadcasting import unbroadcast

_WIDTH = ("bool", "u8", "i8", "i32", "u32", "i64", "f16", "bf16", "f32", "f64")


# -- element types of results ------------------------------------------------------------------------------------------


def joined(*types: TensorType, **attributes: Any) -> str:
    """The element type of a result of several operands: the wider one of floating types or of integers; bool joins any.

    Raises
    ------
    RuleError
        Integers with floating numbers, signed with unsigned ones, or bool alone.
    """
    kinds = list(dict.fromkeys(t.dtype for t in types if t.dtype != "bool"))
    text = ", ".join(map(str, types))
    if not kinds:
        raise RuleError(f"arithmetic on truth values ({text}); use logical_and, logical_or, or cast them first")
    if len({is_floating(kind) for kind in kinds}) > 1 or len({kind[0] == "u" for kind in kinds}) > 1:
        raise RuleError(f"operands of different kinds ({text}); cast one of them")
    if {"f16", "bf16"} <= set(kinds):
        kinds.append("f32")
    return max(kinds, key=_WIDTH.index)


def floating(*types: TensorType, **attributes: Any) -> str:
    """The element type of a function that takes floating numbers only; raises `RuleError` for others."""
    if not all(is_floating(t.dtype) for t in types):
        raise RuleError(f"takes floating numbers, got {', '.join(map(str, types))}; cast them first")
    return joined(*types)


def numeric(x: TensorType, **attributes: Any) -> str:
    """The element type of a function of any numbers; raises `RuleError` for bool."""
    return joined(x)


# -- element types -----------------------------------------------------------------------------------------------------

_BITS = {"bool": 1, "u8": 8, "i8": 8, "i32": 32, "u32": 32, "i64": 64}


def _cast_linear(x: TensorType, *, dtype: str) -> str:
    dtype = dtype_named(dtype)
    if is_floating(x.dtype) and is_floating(dtype):
        return "all"
    # Integers wrap around, and what has wrapped in a part is wrong in a wider sum.
    both = _BITS.get(x.dtype, 0), _BITS.get(dtype, 0)
    return "all" if both[0] >= both[1] > 1 else ""


def _cast_monotone(x: TensorType, *, dtype: str) -> str:
    dtype = dtype_named(dtype)
    if is_floating(dtype) or x.dtype in ("bool", dtype):
        return "all"
    if is_floating(x.dtype):
        return ""  # a part may be infinite, and there is no such integer
    signed = dtype[0] == "i"
    if dtype == "bool":
        return "all" if x.dtype[0] == "u" else ""
    narrow = _BITS[x.dtype] + (x.dtype[0] == "u" and signed) > _BITS[dtype]
    return "" if narrow or (x.dtype[0] == "i" and not signed) else "all"


@operator("*d -> *d", linear=_cast_linear, monotone=_cast_monotone, dtype=lambda x, *, dtype: dtype_named(dtype))
def cast(xp, x, *, dtype):
    """Another element type. NumPy has no bfloat16: bf16 is held in float32 and its rounding is not imitated."""
    with numpy.errstate(invalid="ignore"):  # what an integer cannot hold becomes any integer, as in PyTorch
        return x.astype(numpy_name(dtype_named(dtype)))


@cast.gradient
def _(grad, x):
    return cast(grad, dtype=dtype_named(x.dtype)) if is_floating(dtype_named(x.dtype)) else None


cast.case("f32[4,6]", dtype="f64")
cast.case("f32[5]", dtype="i64")
cast.case("i64[2,3]", dtype="f32")
cast.case("bool[4,1]", dtype="f32")
cast.case("f32[7]", dtype="bool")
cast.case("i64[4]", dtype="i32")
cast.case("i32[5]", dtype="i64")
cast.reasons = {
    "P -> P": "integer parts may wrap around or exceed what the new type holds although their sum does not",
    "P* -> B": "a part may be zero where the value is not",
    "P(*) -> P(*)": "of floating parts one may be infinite, of integer ones outside the range of the new type",
}


# -- two operands ------------------------------------------------------------------------------------------------------


def _binary_cases(op: Operator, ranges: dict[str, tuple[float, float]] | None = None) -> None:
    for left, right in (("4,6", "4,6"), ("5", "3,5"), ("4,1", "1,7"), ("2,3,4", ""), ("1", "5")):
        op.case(f"f32[{left}]", f"f32[{right}]", ranges=ranges)


@operator("*d, *d -> *d", linear="all", monotone="each", dtype=joined)
def add(xp, x, y):
    """x + y."""
    return x + y


@add.gradient
def _(grad, x, y):
    return unbroadcast(grad, x), unbroadcast(grad, y)


_binary_cases(add)
add.case("i64[4,3]", "i64[3]")


@operator("*d, *d -> *d", linear="all", monotone="x", antitone="y", dtype=joined)
def sub(xp, x, y):
    """x - y."""
    return x - y


@sub.gradient
def _(grad, x, y):
    return unbroadcast(grad, x), unbroadcast(neg(grad), y)


_binary_cases(sub)


@operator("*d, *d -> *d", linear="each", dtype=joined)
def mul(xp, x, y):
    """x * y."""
    return x * y


@mul.gradient
def _(grad, x, y):
    return unbroadcast(mul(grad, y), x), unbroadcast(mul(grad, x), y)


_binary_cases(mul)


@operator("*d, *d -> *d", linear="x", dtype=floating)
def div(xp, x, y):
    """x / y."""
    return x / y


@div.gradient
def _(grad, x, y, *, out):
    quotient = div(grad, y)
    return unbroadcast(quotient, x), unbroadcast(neg(mul(quotient, out)), y)


_binary_cases(div, {"y": (0.5, 2.0)})
div.reasons = {
    "P(*), B -> P(*)": "would need the sign of y to be known",
    "B, P(*) -> P(*)": "would need the signs of both to be known",
}


@operator("*d, *d -> *d", dtype=joined)
def floor_divide(xp, x, y):
    """The whole number below x / y."""
    return xp.floor_divide(x, y)


@operator("*d, *d -> *d", dtype=joined)
def remainder(xp, x, y):
    """x - y * floor(x / y), which has the sign of y."""
    return xp.remainder(x, y)


@floor_divide.gradient
def _(grad, x, y):
    return None, None


@remainder.gradient
def _(grad, x, y):
    whole = floor_divide(x, y)
    return unbroadcast(grad, x), unbroadcast(neg(mul(grad, whole)), y)


for _op in (floor_divide, remainder):
    _op.case("i64[4,6]", "i64[4,6]", ranges={"y": (1, 5)})
    _op.case("i64[5,1]", "i64[3]", ranges={"y": (2, 5)})
    _op.case("f32[4,6]", "f32[6]", ranges={"y": (0.5, 2.0)})
    _op.reasons = {"P(*), B -> P(*)": "would need the sign of y to be known"}


@operator("*d, *d -> *d", monotone="each", passes=[("all", "max", "max")], dtype=joined)
def maximum(xp, x, y):
    """The larger of two."""
    return xp.maximum(x, y)


@maximum.gradient
def _(grad, x, y):
    return unbroadcast(mul(grad, exceeds(x, y)), x), unbroadcast(mul(grad, exceeds(y, x)), y)


_binary_cases(maximum)


@operator("*d, *d -> *d", monotone="each", passes=[("all", "min", "min")], dtype=joined)
def minimum(xp, x, y):
    """The smaller of two."""
    return xp.minimum(x, y)


@minimum.gradient
def _(grad, x, y):
    return unbroadcast(mul(grad, exceeds(y, x)), x), unbroadcast(mul(grad, exceeds(x, y)), y)


_binary_cases(minimum)


@operator("*d, *d -> *d", monotone="x", antitone="y", dtype=floating)
def exceeds(xp, x, y):
    """1 where x > y, 1/2 where they are equal, 0 elsewhere: the share of x in the gradient of a maximum."""
    kind = xp.result_type(x, y)
    return (x > y).astype(kind) + (x == y).astype(kind) * 0.5


_binary_cases(exceeds)


# -- one operand and numbers as attributes -----------------------------------------------------------------------------


def _whole(x: TensorType, number: float, what: str) -> str:
    if not is_floating(joined(x)) and (not math.isfinite(number) or number != int(number)):
        raise RuleError(f"{what} {number} is not whole, but {x} holds integers; cast it to a floating type first")
    return x.dtype


def _like(x: Any, number: float) -> Any:
    """A number in the kind of an array, so that it does not widen it."""
    return float(number) if x.dtype.kind == "f" else int(number)


def _by_sign(positive: bool) -> Callable[..., str]:
    def passing(x: TensorType, *, factor: float) -> str:
        return "all" if (factor > 0) == positive and factor != 0 and math.isfinite(factor) else ""

    return passing


@operator(
    "*d -> *d",
    linear=lambda x, *, factor: "all" if math.isfinite(factor) else "",
    monotone=_by_sign(True),
    antitone=_by_sign(False),
    dtype=lambda x, *, factor: _whole(x, factor, "factor"),
)
def scale(xp, x, *, factor):
    """x * factor, a number."""
    return x * _like(x, factor)


@scale.gradient
def _(grad, x, *, factor):
    return scale(grad, factor=factor)


scale.case("f32[4,6]", factor=2.5)
scale.case("f32[5]", factor=-1.5)
scale.case("i64[2,1,3]", factor=3)
scale.case("f32[]", factor=0.5)


@operator("*d -> *d", monotone="all", dtype=lambda x, *, amount: _whole(x, amount, "amount"))
def shift(xp, x, *, amount):
    """x + amount, a number."""
    return x + _like(x, amount)


@shift.gradient
def _(grad, x):
    return grad


shift.case("f32[4,6]", amount=2.5)
shift.case("i64[5]", amount=-1)
shift.case("f32[1,3]", amount=1.0)


def _power_type(x: TensorType, *, exponent: float) -> str:
    if exponent < 0 and not is_floating(joined(x)):
        raise RuleError(f"exponent {exponent} of integers {x}; cast them to a floating type first")
    return _whole(x, exponent, "exponent")


def _odd(x: TensorType, *, exponent: float) -> str:
    return "all" if is_floating(x.dtype) and exponent > 0 and exponent % 2 == 1 else ""


@operator("*d -> *d", name="pow", dtype=_power_type, monotone=_odd,
          linear=lambda x, *, exponent: "all" if exponent == 1 else "")  # fmt: skip
def pow_(xp, x, *, exponent):
    """x to the power of a number."""
    return x ** _like(x, exponent)


@pow_.gradient
def _(grad, x, *, exponent):
    if exponent == 0:
        return None
    if exponent == 1:
        return grad
    return mul(grad, scale(x if exponent == 2 else pow_(x, exponent=exponent - 1), factor=exponent))


pow_.case("f32[4,6]", exponent=2)
pow_.case("f32[5]", exponent=3)
pow_.case("f32[2,1,3]", exponent=-0.5, ranges={"x": (0.5, 2.0)})
pow_.case("i64[3]", exponent=2)
pow_.reasons = {"P(*) -> P(*)": "would need the sign of x to be known"}


def _unary(
    name: str, function: Callable, text: str, *, positive: bool = False, dtype: Any = floating, **passing: Any
) -> Operator:
    """A function of one operand; `positive` if its domain is the positive numbers."""

    def kernel(xp, x):
        return function(xp, x)

    kernel.__name__, kernel.__doc__, kernel.__module__ = name, text, __name__
    op = operator("*d -> *d", dtype=dtype, **passing)(kernel)
    ranges = {"x": (0.5, 2.0)} if positive else None
    for shape in ("4,6", "5", "2,1,3"):
        op.case(f"f32[{shape}]", ranges=ranges)
    if positive:
        op.reasons = {"P(*) -> P(*)": "the parts of a positive number need not be positive, where the function ends"}
    return op


neg = _unary("neg", lambda xp, x: -x, "-x.", dtype=numeric, linear="all", antitone="all")
abs_ = _unary("abs", lambda xp, x: xp.abs(x), "Absolute value.", dtype=numeric)
sign = _unary("sign", lambda xp, x: xp.sign(x), "-1, 0 or 1.", dtype=numeric, monotone="all")
square = _unary("square", lambda xp, x: x * x, "x * x.", dtype=numeric)
reciprocal = _unary("reciprocal", lambda xp, x: 1.0 / x, "1 / x.", positive=True)
exp = _unary("exp", lambda xp, x: xp.exp(x), "e to the power x.", monotone="all")
expm1 = _unary("expm1", lambda xp, x: xp.expm1(x), "exp(x) - 1, accurate near zero.", monotone="all")
log = _unary("log", lambda xp, x: xp.log(x), "Natural logarithm.", positive=True)
log1p = _unary("log1p", lambda xp, x: xp.log1p(x), "log(1 + x), accurate near zero.", positive=True)
sqrt = _unary("sqrt", lambda xp, x: xp.sqrt(x), "Square root.", positive=True)
rsqrt = _unary("rsqrt", lambda xp, x: 1.0 / xp.sqrt(x), "1 / sqrt(x).", positive=True)
sin = _unary("sin", lambda xp, x: xp.sin(x), "Sine of radians.")
cos = _unary("cos", lambda xp, x: xp.cos(x), "Cosine of radians.")
tan = _unary("tan", lambda xp, x: xp.tan(x), "Tangent of radians.")
atan = _unary("atan", lambda xp, x: xp.arctan(x), "Inverse tangent, in radians.", monotone="all")
sinh = _unary("sinh", lambda xp, x: xp.sinh(x), "Hyperbolic sine.", monotone="all")
cosh = _unary("cosh", lambda xp, x: xp.cosh(x), "Hyperbolic cosine.")
isfinite = _unary(
    "isfinite", lambda xp, x: xp.isfinite(x), "Whether it is neither infinite nor NaN.", dtype=lambda x: "bool"
)
isnan = _unary("isnan", lambda xp, x: xp.isnan(x), "Whether it is NaN.", dtype=lambda x: "bool")
isfinite.reasons = isnan.reasons = {"P* -> *": "infinite and undefined parts do not add up like numbers"}
floor = _unary("floor", lambda xp, x: xp.floor(x), "The next whole number below.", monotone="all")
ceil = _unary("ceil", lambda xp, x: xp.ceil(x), "The next whole number above.", monotone="all")
round_ = _unary("round", lambda xp, x: xp.rint(x), "The nearest whole number, halves to even.", monotone="all")
trunc = _unary("trunc", lambda xp, x: xp.trunc(x), "The whole number next to it towards zero.", monotone="all")


@neg.gradient
def _(grad, x):
    return neg(grad)


@abs_.gradient
def _(grad, x):
    return mul(grad, sign(x))


@square.gradient
def _(grad, x):
    return mul(grad, scale(x, factor=2))


@reciprocal.gradient
def _(grad, x, *, out):
    return neg(mul(grad, square(out)))


@exp.gradient
def _(grad, x, *, out):
    return mul(grad, out)


@expm1.gradient
def _(grad, x, *, out):
    return mul(grad, shift(out, amount=1))


@log.gradient
def _(grad, x):
    return div(grad, x)


@log1p.gradient
def _(grad, x):
    return div(grad, shift(x, amount=1))


@sqrt.gradient
def _(grad, x, *, out):
    return div(scale(grad, factor=0.5), out)


@rsqrt.gradient
def _(grad, x, *, out):
    return mul(grad, scale(pow_(out, exponent=3), factor=-0.5))


@sin.gradient
def _(grad, x):
    return mul(grad, cos(x))


@cos.gradient
def _(grad, x):
    return neg(mul(grad, sin(x)))


@tan.gradient
def _(grad, x, *, out):
    return mul(grad, shift(square(out), amount=1))


@atan.gradient
def _(grad, x):
    return div(grad, shift(square(x), amount=1))


@sinh.gradient
def _(grad, x):
    return mul(grad, cosh(x))


@cosh.gradient
def _(grad, x):
    return mul(grad, sinh(x))


def _flat(grad, x):
    """The gradient of a step function is zero wherever there is one."""
    return None


for _op in (sign, floor, ceil, round_, trunc):
    _op.gradient(_flat)


def _clamp_type(x: TensorType, *, low: float | None, high: float | None) -> str:
    if low is not None and high is not None and low > high:
        raise RuleError(f"clamp from {low} to {high}: the lower limit is above the upper one")
    if not all(limit is None or holds(x.dtype, limit) for limit in (low, high)):
        raise RuleError(f"clamp from {low} to {high}: {x} holds integers; cast it to a floating type first")
    return joined(x)


@operator("*d -> *d", monotone="all", dtype=_clamp_type)
def clamp(xp, x, *, low=None, high=None):
    """Limited to [low, high]; None is no limit."""
    if low is not None:
        x = xp.maximum(x, xp.asarray(low, dtype=x.dtype))
    if high is not None:
        x = xp.minimum(x, xp.asarray(high, dtype=x.dtype))
    return x


@clamp.gradient
def _(grad, x, *, low, high):
    return clamp_backward(grad, x, low=low, high=high)


clamp.case("f32[4,6]", low=-0.5, high=0.5)
clamp.case("f32[5]", low=0.0)
clamp.case("i64[3,1]", high=2)


@operator("*d, *d -> *d", linear="grad", monotone="grad")
def clamp_backward(xp, grad, x, *, low=None, high=None):
    """`grad` where x lies within [low, high], else 0."""
    inside = xp.ones(x.shape, dtype=bool)
    if low is not None:
        inside = inside & (x >= low)
    if high is not None:
        inside = inside & (x <= high)
    return xp.where(inside, grad, xp.zeros((), grad.dtype))


clamp_backward.case("f32[4,6]", "f32[4,6]", low=-0.5, high=0.5)
clamp_backward.case("f32[5]", "f32[5]", low=0.0)
clamp_backward.case("f32[2,1,3]", "f32[2,1,3]", high=0.25)
