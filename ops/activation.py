"""Activation functions. Those whose gradient takes several steps have an operator for it, one pass over memory."""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import RuleError
from sbp.operator import Operator, TensorType, operator
from sbp.ops.broadcasting import of_type
from sbp.ops.elementwise import (
    add,
    clamp,
    exp,
    expm1,
    floating,
    mul,
    neg,
    numeric,
    scale,
    shift,
    square,
)

# Rational approximations of erf and erfc: W. J. Cody, "Rational Chebyshev approximations for the error function",
# Mathematics of Computation 23 (1969), in the form of his SPECFUN routine CALERF.
_NEAR = (
    (
        1.85777706184603153e-1,
        3.16112374387056560e0,
        1.13864154151050156e2,
        3.77485237685302021e2,
        3.20937758913846947e3,
    ),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
_FAR = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
     2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
_BORDER = 0.46875
_SATURATED = 6.0  # beyond it 1 - erf(x) is below half a unit in the last place of 1


def _ratio(tables, x):
    """The quotient of two polynomials given by coefficients of falling powers."""
    above, below = tables
    top, bottom = x * above[0] + above[1], x * below[0] + below[1]
    for a, b in zip(above[2:], below[2:]):
        top, bottom = top * x + a, bottom * x + b
    return top / bottom


def error_function(xp, x):
    """erf(x) to rounding error, in the array module's own operations."""
    magnitude = xp.abs(x)
    near = xp.minimum(magnitude, x.dtype.type(_BORDER))
    small = near * _ratio(_NEAR, near * near)
    far = xp.clip(magnitude, _BORDER, _SATURATED)
    large = 1 - xp.exp(-far * far) * _ratio(_FAR, far)
    found = xp.where(magnitude <= _BORDER, small, large)
    return xp.where(xp.isnan(x), x, xp.copysign(found, x))


def _define(name: str, function, text: str, **passing) -> Operator:
    def kernel(xp, x):
        return function(xp, x)

    kernel.__name__, kernel.__doc__, kernel.__module__ = name, text, __name__
    op = operator("*d -> *d", dtype=floating, **passing)(kernel)
    for shape in ("4,6", "5", "2,1,3"):
        op.case(f"f32[{shape}]")
    return op


def _define_backward(name: str, function, text: str, of: str, **passing) -> Operator:
    """An operator (grad, what) -> grad * derivative at what, the input or the output of the activation."""
    if of == "out":

        def kernel(xp, grad, out):
            return grad * function(xp, out)

    else:

        def kernel(xp, grad, x):
            return grad * function(xp, x)

    kernel.__name__, kernel.__doc__, kernel.__module__ = name, text, __name__
    op = operator("*d, *d -> *d", linear="grad", dtype=lambda grad, other: other.dtype, **passing)(kernel)
    for shape in ("4,6", "5", "2,1,3"):
        op.case(f"f32[{shape}]", f"f32[{shape}]")
    return op


def _sigmoid(xp, x):
    # exp of a negative number only, so that nothing overflows
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, 1 / (1 + small), small / (1 + small))


erf = _define("erf", error_function, "Error function.", monotone="all")
tanh = _define("tanh", lambda xp, x: xp.tanh(x), "Hyperbolic tangent.", monotone="all")
sigmoid = _define("sigmoid", _sigmoid, "1 / (1 + exp(-x)).", monotone="all")
silu = _define("silu", lambda xp, x: x * _sigmoid(xp, x), "x * sigmoid(x), also called swish.")
softplus = _define(
    "softplus", lambda xp, x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))), "log(1 + exp(x)).", monotone="all"
)

tanh_backward = _define_backward("tanh_backward", lambda xp, y: 1 - y * y, "grad * (1 - out^2), out = tanh(x).", "out")
sigmoid_backward = _define_backward(
    "sigmoid_backward", lambda xp, y: y * (1 - y), "grad * out * (1 - out), out = sigmoid(x).", "out"
)


def _silu_slope(xp, x):
    s = _sigmoid(xp, x)
    return s * (1 + x * (1 - s))


silu_backward = _define_backward("silu_backward", _silu_slope, "grad times the derivative of silu at x.", "x")
softplus_backward = _define_backward("softplus_backward", _sigmoid, "grad * sigmoid(x).", "x", monotone="grad")


@erf.gradient
def _(grad, x):
    return mul(grad, scale(exp(scale(square(x), factor=-1)), factor=2 / math.sqrt(math.pi)))


@tanh.gradient
def _(grad, x, *, out):
    return tanh_backward(grad, out)


@sigmoid.gradient
def _(grad, x, *, out):
    return sigmoid_backward(grad, out)


@silu.gradient
def _(grad, x):
    return silu_backward(grad, x)


@softplus.gradient
def _(grad, x):
    return softplus_backward(grad, x)


@operator("*d -> *d", monotone="all", dtype=numeric)
def relu(xp, x):
    """The larger of x and 0."""
    return xp.maximum(x, x.dtype.type(0))


@relu.gradient
def _(grad, x, *, out):
    return relu_backward(grad, out)


relu.case("f32[4,6]")
relu.case("f32[5]")
relu.case("i64[2,1,3]")


@operator("*d, *d -> *d", linear="grad", monotone="grad")
def relu_backward(xp, grad, out):
    """`grad` where out = relu(x) is above 0, else 0."""
    return xp.where(out > 0, grad, xp.zeros((), grad.dtype))


relu_backward.case("f32[4,6]", "f32[4,6]")
relu_backward.case("f32[5]", "f32[5]")
relu_backward.case("f32[2,1,3]", "f32[2,1,3]")


def _rising(x: TensorType, *, slope: float) -> str:
    return "all" if slope >= 0 else ""


@operator("*d -> *d", monotone=_rising, dtype=floating)
def leaky_relu(xp, x, *, slope=0.01):
    """x above 0, slope * x below."""
    return xp.where(x > 0, x, x * slope)


@leaky_relu.gradient
def _(grad, x, *, slope):
    return leaky_relu_backward(grad, x, slope=slope)


leaky_relu.case("f32[4,6]")
leaky_relu.case("f32[5]", slope=0.2)
leaky_relu.case("f32[2,1,3]", slope=-0.5)


@operator("*d, *d -> *d", linear="grad", monotone=lambda grad, x, *, slope: "grad" if slope >= 0 else "")
def leaky_relu_backward(xp, grad, x, *, slope=0.01):
    """`grad` where x is above 0, else slope * grad."""
    return xp.where(x > 0, grad, grad * slope)


leaky_relu_backward.case("f32[4,6]", "f32[4,6]")
leaky_relu_backward.case("f32[5]", "f32[5]", slope=0.2)
leaky_relu_backward.case("f32[2,1,3]", "f32[2,1,3]", slope=-0.5)

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def _gelu_type(*types: TensorType, approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise RuleError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    return floating(types[-1])


@operator("*d -> *d", dtype=_gelu_type)
def gelu(xp, x, *, approximate="none"):
    """x times the normal distribution function at x; "tanh" is its usual approximation (Hendrycks and Gimpel, 2016)."""
    if approximate == "tanh":
        return 0.5 * x * (1 + xp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x)))
    return 0.5 * x * (1 + error_function(xp, x * math.sqrt(0.5)))


@gelu.gradient
def _(grad, x, *, approximate):
    return gelu_backward(of_type(grad, x), x, approximate=approximate)


gelu.case("f32[4,6]")
gelu.case("f32[5]", approximate="tanh")
gelu.case("f32[2,1,3]")


@operator("*d, *d -> *d", linear="grad", dtype=_gelu_type)
def gelu_backward(xp, grad, x, *, approximate="none"):
    """`grad` times the derivative of gelu at x."""
    if approximate == "tanh":
        t = xp.tanh(_TANH_SCALE * (x + _TANH_CUBE * x * x * x))
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _TANH_SCALE * (1 + 3 * _TANH_CUBE * x * x))
    density = xp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return grad * (0.5 * (1 + error_function(xp, x * math.sqrt(0.5))) + x * density)


gelu_backward.case("f32[4,6]", "f32[4,6]")
gelu_backward.case("f32[5]", "f32[5]", approximate="tanh")
gelu_backward.case("f32[2,1,3]", "f32[2,1,3]")


# -- put together from the ones above ----------------------------------------------------------------------------------


def relu6(x: Any) -> Any:
    """x limited to [0, 6]."""
    return clamp(x, low=0.0, high=6.0)


def hardtanh(x: Any, low: float = -1.0, high: float = 1.0) -> Any:
    """x limited to [low, high]."""
    return clamp(x, low=low, high=high)


def hardsigmoid(x: Any) -> Any:
    """x / 6 + 1/2 limited to [0, 1]."""
    return clamp(shift(scale(x, factor=1 / 6), amount=0.5), low=0.0, high=1.0)


def hardswish(x: Any) -> Any:
    """x * hardsigmoid(x)."""
    return mul(x, hardsigmoid(x))


def mish(x: Any) -> Any:
    """x * tanh(softplus(x))."""
    return mul(x, tanh(softplus(x)))


def log_sigmoid(x: Any) -> Any:
    """log(sigmoid(x)), which does not underflow."""
    return neg(softplus(neg(x)))


def elu(x: Any, alpha: float = 1.0) -> Any:
    """x above 0, alpha * (exp(x) - 1) below."""
    return add(relu(x), scale(expm1(clamp(x, high=0.0)), factor=alpha))
