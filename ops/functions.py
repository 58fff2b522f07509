"""Further functions of one or two tensors, element by element: inverse and logarithmic ones, bits, activations."""

from __future__ import annotations

import math
import sys
from typing import Any

from sbp.dtype import dtype_named, is_floating
from sbp.errors import RuleError
from sbp.operator import Operator, TensorType, operator
from sbp.ops.activation import relu, sigmoid
from sbp.ops.broadcasting import unbroadcast
from sbp.ops.comparison import (
    equal_number,
    greater_number,
    less_number,
    logical_and,
    logical_not,
    logical_or,
    masked_fill,
    not_equal,
)
from sbp.ops.elementwise import (
    abs_,
    add,
    clamp,
    div,
    exp,
    expm1,
    floating,
    isnan,
    joined,
    log,
    mul,
    neg,
    pow_,
    reciprocal,
    rsqrt,
    scale,
    shift,
    sqrt,
    square,
    sub,
    trunc,
)
from sbp.ops.matmul import matmul
from sbp.ops.normalization import softmax
from sbp.ops.precision import one_type
from sbp.ops.reduction import sum_
from sbp.ops.slicing import split
from sbp.ops.views import normal_axis, reshape, unsqueeze

# -- inverse functions -------------------------------------------------------------------------------------------------


def _inverse(name: str, text: str, low: float, high: float, monotone: str = "", antitone: str = "") -> Operator:
    """The array module's function `name` on numbers between `low` and `high`."""

    def kernel(xp, x):
        return getattr(xp, name)(x)

    kernel.__name__, kernel.__doc__, kernel.__module__ = name.replace("arc", "a"), text, __name__
    op = operator("*d -> *d", dtype=floating, monotone=monotone, antitone=antitone)(kernel)
    for shape in ("4,6", "5", "2,1,3"):
        op.case(f"f32[{shape}]", ranges={"x": (low, high)})
    op.reasons = {"P(*) -> P(*)": "the parts of a number in its domain need not lie in it, and outside it is undefined"}
    return op


asin = _inverse("arcsin", "Inverse sine, in radians, of numbers between -1 and 1.", -0.9, 0.9)
acos = _inverse("arccos", "Inverse cosine, in radians, of numbers between -1 and 1.", -0.9, 0.9)
asinh = _inverse("arcsinh", "Inverse hyperbolic sine.", -2.0, 2.0, monotone="all")
acosh = _inverse("arccosh", "Inverse hyperbolic cosine of numbers of at least 1.", 1.5, 3.0)
atanh = _inverse("arctanh", "Inverse hyperbolic tangent of numbers between -1 and 1.", -0.9, 0.9)


@asin.gradient
def _(grad, x):
    return mul(grad, rsqrt(shift(neg(square(x)), amount=1)))


@acos.gradient
def _(grad, x):
    return neg(mul(grad, rsqrt(shift(neg(square(x)), amount=1))))


@asinh.gradient
def _(grad, x):
    return mul(grad, rsqrt(shift(square(x), amount=1)))


@acosh.gradient
def _(grad, x):
    return mul(grad, rsqrt(shift(square(x), amount=-1)))


@atanh.gradient
def _(grad, x):
    return mul(grad, reciprocal(shift(neg(square(x)), amount=1)))


@operator("*d, *d -> *d", dtype=floating)
def atan2(xp, y, x):
    """The angle of the point (x, y), in radians between -pi and pi."""
    return xp.arctan2(y, x)


@atan2.gradient
def _(grad, y, x):
    part = div(grad, add(square(x), square(y)))
    return unbroadcast(mul(part, x), y), unbroadcast(neg(mul(part, y)), x)


for _left, _right in (("4,6", "4,6"), ("5", "3,5"), ("4,1", "1,7")):
    atan2.case(f"f32[{_left}]", f"f32[{_right}]")


def exp2(x: Any) -> Any:
    """2 to the power x."""
    return exp(scale(x, factor=math.log(2)))


def log2(x: Any) -> Any:
    """Logarithm to base 2."""
    return scale(log(x), factor=1 / math.log(2))


def log10(x: Any) -> Any:
    """Logarithm to base 10."""
    return scale(log(x), factor=1 / math.log(10))


# -- remainders, infinities, interpolation -----------------------------------------------------------------------------


@operator("*d, *d -> *d", dtype=joined)
def fmod(xp, x, y):
    """x - y * trunc(x / y), which has the sign of x."""
    return xp.fmod(x, y)


@fmod.gradient
def _(grad, x, y):
    return unbroadcast(grad, x), unbroadcast(neg(mul(grad, trunc(div(x, y)))), y)


fmod.case("i64[4,6]", "i64[4,6]", ranges={"y": (1, 5)})
fmod.case("i64[5,1]", "i64[3]", ranges={"y": (2, 5)})
fmod.case("f32[4,6]", "f32[6]", ranges={"y": (0.5, 2.0)})


@operator("*d -> *d", dtype=lambda x: "bool")
def isinf(xp, x):
    """Whether it is infinite, of either sign."""
    return xp.isinf(x)


isinf.case("f32[4,6]")
isinf.case("f32[5]")
isinf.case("i64[3,1]")
isinf.reasons = {"P* -> *": "an infinite sum or extremum may have finite parts, and the other way round"}


def lerp(x: Any, y: Any, weight: Any) -> Any:
    """x + weight * (y - x); the weight is a number or a tensor."""
    step = sub(y, x)
    return add(x, scale(step, factor=weight) if isinstance(weight, (int, float)) else mul(step, weight))


def addmm(bias: Any, x: Any, w: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    """beta * bias + alpha * x @ w."""
    product = matmul(x, w)
    product = product if alpha == 1 else scale(product, factor=alpha)
    return add(bias if beta == 1 else scale(bias, factor=beta), product)


# -- logic and bits ----------------------------------------------------------------------------------------------------


def logical_xor(x: Any, y: Any) -> Any:
    """One, but not both, of truth values."""
    return not_equal(x, y)


def _whole_numbers(*types: TensorType) -> str:
    if any(is_floating(t.dtype) for t in types):
        raise RuleError(f"takes whole numbers or truth values, got {', '.join(map(str, types))}; cast them first")
    return one_type(*types)


def _bits(name: str, text: str, **passing: Any) -> Operator:
    def kernel(xp, x, y):
        return getattr(xp, name)(x, y)

    kernel.__name__, kernel.__doc__, kernel.__module__ = name, text, __name__
    op = operator("*d, *d -> *d", dtype=_whole_numbers, **passing)(kernel)
    op.case("i64[4,6]", "i64[4,6]", ranges={"x": (0, 8), "y": (0, 8)})
    op.case("i32[5]", "i32[3,5]")
    op.case("bool[4,1]", "bool[1,3]")
    op.reasons = {"P(m*, P(m* -> *": "of truth values only, where logical_and and logical_or admit it"}
    return op


def _truth_only(x: TensorType, *others: TensorType) -> str:
    """With whole numbers, more in one operand may be less in the result."""
    return "each" if x.dtype == "bool" else ""


bitwise_and = _bits("bitwise_and", "The bits that both have.", monotone=_truth_only)
bitwise_or = _bits("bitwise_or", "The bits that one or both have.", monotone=_truth_only)
bitwise_xor = _bits("bitwise_xor", "The bits that one has and the other has not.")


@operator("*d -> *d", dtype=_whole_numbers, antitone="all")
def bitwise_not(xp, x):
    """All bits the other way round."""
    return xp.invert(x)


bitwise_not.case("i64[4,6]")
bitwise_not.case("i32[5]")
bitwise_not.case("bool[3,1]")


# -- activations -------------------------------------------------------------------------------------------------------

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def selu(x: Any) -> Any:
    """The self-normalizing unit (Klambauer et al., 2017)."""
    low = scale(expm1(clamp(x, high=0.0)), factor=_SELU_SCALE * _SELU_ALPHA)
    return add(scale(relu(x), factor=_SELU_SCALE), low)


def celu(x: Any, alpha: float = 1.0) -> Any:
    """x above 0, alpha * (exp(x / alpha) - 1) below (Barron, 2017)."""
    return add(relu(x), scale(expm1(scale(clamp(x, high=0.0), factor=1 / alpha)), factor=alpha))


def prelu(x: Any, weight: Any) -> Any:
    """x above 0, weight * x below; x (n, c, *spatial), weight (c,) or (1,)."""
    if len(x.shape) > 1 and weight.shape != (1,):
        weight = reshape(weight, shape=(-1, *(1,) * (len(x.shape) - 2)))
    return add(relu(x), mul(weight, clamp(x, high=0.0)))


def glu(x: Any, axis: int = -1) -> Any:
    """The first half of a dimension times the sigmoid of the second (Dauphin et al., 2017)."""
    at = normal_axis(axis, len(x.shape))
    if x.shape[at] % 2:
        raise RuleError(f"glu: dimension {at} of {list(x.shape)} must be even")
    first, second = split(x, sizes=(x.shape[at] // 2,) * 2, axis=at)
    return mul(first, sigmoid(second))


def softsign(x: Any) -> Any:
    """x / (1 + |x|)."""
    return div(x, shift(abs_(x), amount=1.0))


def softmin(x: Any, axis: int = -1) -> Any:
    """`softmax` of -x."""
    return softmax(neg(x), axis=axis)


def hardshrink(x: Any, limit: float = 0.5) -> Any:
    """0 within [-limit, limit], x elsewhere."""
    outside = logical_or(greater_number(x, number=limit), less_number(x, number=-limit))
    return masked_fill(x, logical_not(outside), value=0)


def softshrink(x: Any, limit: float = 0.5) -> Any:
    """x moved by `limit` towards 0, and 0 within."""
    return sub(x, clamp(x, low=-limit, high=limit))


def threshold(x: Any, limit: float, value: float) -> Any:
    """x above `limit`, `value` elsewhere."""
    return masked_fill(x, logical_not(greater_number(x, number=limit)), value=value)


def logit(x: Any, eps: float | None = None) -> Any:
    """log(x / (1 - x)) of numbers between 0 and 1, first limited to [eps, 1 - eps] if `eps` is given."""
    x = x if eps is None else clamp(x, low=eps, high=1 - eps)
    return sub(log(x), log(shift(neg(x), amount=1)))


# -- distances ---------------------------------------------------------------------------------------------------------


def normalize(x: Any, axis: int = 1, eps: float = 1e-12) -> Any:
    """x divided by its Euclidean norm along a dimension, or by `eps` where that is smaller."""
    return div(x, clamp(sqrt(sum_(square(x), axis=axis, keepdims=True)), low=eps))


def cosine_similarity(x: Any, y: Any, axis: int = 1, eps: float = 1e-8) -> Any:
    """Product of x and y along a dimension over the product of their norms, each at least `eps`."""
    return sum_(mul(normalize(x, axis, eps), normalize(y, axis, eps)), axis=axis)


def p_norm(x: Any, p: float = 2.0, axis: Any = None, keepdims: bool = False) -> Any:
    """The p-norm over dimensions, for finite p above 0."""
    if not 0 < p < math.inf:
        raise RuleError(f"p must be finite and above 0, got {p}; use max or min of abs for infinite ones")
    total = sum_(pow_(abs_(x), exponent=p), axis=axis, keepdims=keepdims)
    return pow_(total, exponent=1 / p)


def pairwise_distance(x: Any, y: Any) -> Any:
    """Euclidean distances (*b, m, n) between rows x (*b, m, d) and y (*b, n, d), as torch.cdist."""
    apart = sub(unsqueeze(x, axis=-2), unsqueeze(y, axis=-3))
    total = sum_(square(apart), axis=-1)
    zero = equal_number(total, number=0)  # whose root has no slope
    return masked_fill(sqrt(masked_fill(total, zero, value=1)), zero, value=0)


def nan_to_num(x: Any, nan: float = 0.0, highest: float | None = None, lowest: float | None = None) -> Any:
    """x with other numbers for what is undefined or infinite; default the largest and smallest of x's type."""
    largest = {"f64": sys.float_info.max, "f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "f16": 65504.0}
    limit = largest[dtype_named(x.dtype)]
    above = logical_and(isinf(x), greater_number(x, number=0))
    below = logical_and(isinf(x), less_number(x, number=0))
    x = masked_fill(masked_fill(x, isnan(x), value=nan), above, value=limit if highest is None else highest)
    return masked_fill(x, below, value=-limit if lowest is None else lowest)
