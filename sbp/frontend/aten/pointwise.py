"""Element by element: arithmetic with PyTorch's type promotion, comparisons, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sbp.dtype import is_floating
from sbp.frontend.aten import fusion
from sbp.frontend.translation import Context, as_type, filled, tensor, translation
from sbp.ops import library as ops
from sbp.trace import Symbol

# -- arithmetic --------------------------------------------------------------------------------------------------------


def add(context: Context, x: Any, y: Any, alpha: Any = 1) -> Any:
    """x + alpha * y in the type of the result, either of them a tensor or a number."""
    if not isinstance(x, Symbol):
        x, y = (y, x) if alpha == 1 else (tensor(context, x, context.dtype), y)
    x = as_type(x, context.dtype)
    if not isinstance(y, Symbol):
        amount = y * alpha
        return x if amount == 0 else ops.shift(x, amount=amount)
    y = as_type(y, context.dtype)
    if alpha == -1:
        return ops.sub(x, y)
    return ops.add(x, y if alpha == 1 else ops.scale(y, factor=alpha))


@translation("aten.add", "aten.add_", "aten.__add__")
def _(context, x, y, *, alpha=1):
    if context.dtype == "bool":
        return ops.logical_or(tensor(context, x, "bool"), tensor(context, y, "bool"))
    fused = fusion.rotary(context) if alpha == 1 else None
    return add(context, x, y, alpha) if fused is None else fused


@translation("aten.sub", "aten.sub_")
def _(context, x, y, *, alpha=1):
    return add(context, x, y, -alpha)


@translation("aten.rsub")
def _(context, x, y, *, alpha=1):
    return add(context, ops.neg(as_type(x, context.dtype) if alpha == 1 else ops.scale(x, factor=alpha)), y)


@translation("aten.mul", "aten.mul_", "aten.__mul__")
def multiply(context: Context, x: Any, y: Any) -> Any:
    """x * y in the type of the result."""
    if not isinstance(x, Symbol):
        x, y = y, x
    if context.dtype == "bool":
        return ops.logical_and(x, tensor(context, y, "bool"))
    fused = fusion.rms_norm(context) if isinstance(y, Symbol) else None
    if fused is not None:
        return fused
    x = as_type(x, context.dtype)
    if not isinstance(y, Symbol):
        return x if y == 1 else ops.scale(x, factor=y)
    return ops.mul(x, as_type(y, context.dtype))


@translation("aten.div", "aten.div_", "aten.true_divide")
def _(context, x, y, *, rounding_mode=None):
    x = tensor(context, x, context.dtype)
    if rounding_mode == "floor":
        return ops.floor_divide(x, tensor(context, y, context.dtype))
    if rounding_mode == "trunc":
        wide = "f32" if context.dtype in ("f16", "bf16") else context.dtype if is_floating(context.dtype) else "f64"
        return as_type(ops.trunc(ops.div(as_type(x, wide), tensor(context, y, wide))), context.dtype)
    if not isinstance(y, Symbol) and y != 0:
        return x if y == 1 else ops.scale(x, factor=1 / y)
    return ops.div(x, tensor(context, y, context.dtype))


@translation("aten.floor_divide")
def _(context, x, y):
    return ops.floor_divide(tensor(context, x, context.dtype), tensor(context, y, context.dtype))


@translation("aten.remainder")
def _(context, x, y):
    return ops.remainder(tensor(context, x, context.dtype), tensor(context, y, context.dtype))


@translation("aten.fmod")
def _(context, x, y):
    return ops.fmod(tensor(context, x, context.dtype), tensor(context, y, context.dtype))


@translation("aten.maximum", "aten.clamp_min.Tensor", "aten.max.other")
def _(context, x, y):
    return ops.maximum(as_type(x, context.dtype), as_type(y, context.dtype))


@translation("aten.minimum", "aten.clamp_max.Tensor", "aten.min.other")
def _(context, x, y):
    return ops.minimum(as_type(x, context.dtype), as_type(y, context.dtype))


@translation("aten.atan2")
def _(context, y, x):
    return ops.atan2(as_type(y, context.dtype), as_type(x, context.dtype))


@translation("aten.pow", "aten.pow_")
def _(context, x, exponent):
    if isinstance(x, Symbol) and not isinstance(exponent, Symbol):
        x = as_type(x, context.dtype)
        special: dict[Any, Callable] = {1: lambda x: x, 2: ops.square, 0.5: ops.sqrt, -0.5: ops.rsqrt}
        if exponent == -1 and is_floating(context.dtype):
            return ops.reciprocal(x)
        if exponent in special and (exponent in (1, 2) or is_floating(context.dtype)):
            return special[exponent](x)
        return ops.pow(x, exponent=exponent)
    base = tensor(context, x, context.dtype)  # of a positive number: e to the power exponent * log(base)
    return ops.exp(ops.mul(ops.log(base), as_type(exponent, context.dtype)))


@translation("aten.addcmul")
def _(context, x, a, b, *, value=1):
    return add(context, x, ops.mul(as_type(a, context.dtype), as_type(b, context.dtype)), value)


@translation("aten.addcdiv")
def _(context, x, a, b, *, value=1):
    return add(context, x, ops.div(as_type(a, context.dtype), as_type(b, context.dtype)), value)


@translation("aten.lerp")
def _(context, x, y, weight):
    return ops.lerp(x, y, weight)


# -- functions of one tensor -------------------------------------------------------------------------------------------

_NUMERIC: dict[str, Callable] = {
    "neg": ops.neg, "abs": ops.abs, "sign": ops.sign, "square": ops.square, "floor": ops.floor, "ceil": ops.ceil,
    "round": ops.round, "trunc": ops.trunc, "relu": ops.relu, "relu6": ops.relu6,
}  # fmt: skip
_FLOATING: dict[str, Callable] = {
    "exp": ops.exp, "exp2": ops.exp2, "expm1": ops.expm1, "log": ops.log, "log1p": ops.log1p, "log2": ops.log2,
    "log10": ops.log10, "sqrt": ops.sqrt, "rsqrt": ops.rsqrt, "reciprocal": ops.reciprocal, "sin": ops.sin,
    "cos": ops.cos, "tan": ops.tan, "sinh": ops.sinh, "cosh": ops.cosh, "asin": ops.asin, "acos": ops.acos,
    "atan": ops.atan, "asinh": ops.asinh, "acosh": ops.acosh, "atanh": ops.atanh, "erf": ops.erf,
    "sigmoid": ops.sigmoid, "tanh": ops.tanh, "silu": ops.silu, "mish": ops.mish, "hardswish": ops.hardswish,
    "hardsigmoid": ops.hardsigmoid, "selu": ops.selu, "log_sigmoid": ops.log_sigmoid,
}  # fmt: skip
_INTEGERS_STAY = ("floor", "ceil", "round", "trunc")


def _of_one(function: Callable, name: str) -> Callable:
    def translate(context: Context, x: Any) -> Any:
        x = as_type(x, context.dtype)
        return x if name in _INTEGERS_STAY and not is_floating(x.dtype) else function(x)

    return translate


for _name, _function in {**_NUMERIC, **_FLOATING}.items():
    translation(f"aten.{_name}", f"aten.{_name}_")(_of_one(_function, _name))


@translation("aten.gelu")
def _(context, x, *, approximate="none"):
    return ops.gelu(x, approximate=approximate)


@translation("aten.leaky_relu", "aten.leaky_relu_")
def _(context, x, negative_slope=0.01):
    return ops.leaky_relu(x, slope=negative_slope)


@translation("aten.elu", "aten.elu_")
def _(context, x, alpha=1.0, scale=1.0, input_scale=1.0):
    inner = x if input_scale == 1 else ops.scale(x, factor=input_scale)
    out = ops.elu(inner, alpha=alpha)
    return out if scale == 1 else ops.scale(out, factor=scale)


@translation("aten.softplus")
def _(context, x, beta=1, threshold=20):
    """Above the threshold PyTorch returns x itself, from which this differs by less than exp(-threshold)."""
    out = ops.softplus(x if beta == 1 else ops.scale(x, factor=beta))
    return out if beta == 1 else ops.scale(out, factor=1 / beta)


@translation("aten.prelu")
def _(context, x, weight):
    if len(x.shape) > 1 and weight.shape != ():
        weight = ops.reshape(weight, shape=(1, -1, *(1,) * (len(x.shape) - 2)))
    return ops.prelu(x, weight)


@translation("aten.glu")
def _(context, x, dim=-1):
    return ops.glu(x, axis=dim)


@translation("aten.clamp", "aten.clamp_", "aten.hardtanh", "aten.hardtanh_")
def clamp(context: Context, x: Any, low: Any = None, high: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """Bounded by numbers or tensors."""
    low, high = low if min is None else min, high if max is None else max
    if str(context.node.target).startswith("aten.hardtanh"):
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    x = as_type(x, context.dtype)
    if isinstance(low, Symbol):
        x, low = ops.maximum(x, as_type(low, context.dtype)), None
    if isinstance(high, Symbol):
        x, high = ops.minimum(x, as_type(high, context.dtype)), None
    return x if low is None and high is None else ops.clamp(x, low=low, high=high)


@translation("aten.clamp_min")
def _(context, x, low):
    return clamp(context, x, low)


@translation("aten.clamp_max")
def _(context, x, high):
    return clamp(context, x, None, high)


@translation("aten.threshold")
def _(context, x, threshold, value):
    return ops.threshold(x, threshold, value)


@translation("aten.logit")
def _(context, x, eps=None):
    return ops.logit(x, eps)


@translation("aten.nan_to_num")
def _(context, x, nan=None, posinf=None, neginf=None):
    return ops.nan_to_num(x, nan or 0.0, posinf, neginf)


# -- comparisons and truth values --------------------------------------------------------------------------------------

_WIDTH = ("bool", "u8", "i8", "i32", "i64", "f16", "bf16", "f32", "f64")


def _common(x: Any, y: Any) -> str:
    """The type in which two operands are compared; a number takes the tensor's kind where it can."""
    tensors = [item.dtype for item in (x, y) if isinstance(item, Symbol)]
    numbers = [item for item in (x, y) if not isinstance(item, Symbol)]
    if {"f16", "bf16"} <= set(tensors):
        return "f32"
    widest = max(tensors, key=_WIDTH.index)
    if any(isinstance(number, float) and not is_floating(widest) for number in numbers):
        return "f32"
    return "i64" if widest == "bool" and any(not isinstance(number, bool) for number in numbers) else widest


_COMPARISONS: dict[str, tuple[Callable, Callable | None]] = {
    "eq": (ops.equal, ops.equal_number),
    "ne": (ops.not_equal, lambda x, number: ops.logical_not(ops.equal_number(x, number=number))),
    "lt": (ops.less, ops.less_number),
    "gt": (ops.greater, ops.greater_number),
    "le": (ops.less_equal, lambda x, number: ops.logical_not(ops.greater_number(x, number=number))),
    "ge": (ops.greater_equal, lambda x, number: ops.logical_not(ops.less_number(x, number=number))),
}


def _comparison(compare: Callable, with_number: Callable | None) -> Callable:
    def translate(context: Context, x: Any, y: Any) -> Any:
        kind = _common(x, y)
        x = tensor(context, x, kind)
        if isinstance(y, Symbol):
            return compare(x, as_type(y, kind))
        # le and ge by the opposite comparison would be wrong for numbers that are not (NaN) ones.
        if with_number is None or (with_number.__name__ == "<lambda>" and compare is not ops.not_equal
                                   and is_floating(kind)):
            return compare(x, filled(context, y, (), kind))
        return with_number(x, number=y)

    return translate


for _name, (_compare, _with_number) in _COMPARISONS.items():
    translation(f"aten.{_name}")(_comparison(_compare, _with_number))

for _name, _function in {"isnan": ops.isnan, "isinf": ops.isinf, "isfinite": ops.isfinite}.items():
    translation(f"aten.{_name}")(lambda context, x, function=_function: function(x))


def _logical(truth: Callable, bits: Callable | None) -> Callable:
    def translate(context: Context, x: Any, y: Any) -> Any:
        if bits is None or context.dtype == "bool":
            return truth(tensor(context, x, "bool"), tensor(context, y, "bool"))
        return bits(tensor(context, x, context.dtype), tensor(context, y, context.dtype))

    return translate


for _names, _truth, _bits in (
    (("logical_and",), ops.logical_and, None),
    (("logical_or",), ops.logical_or, None),
    (("logical_xor",), ops.logical_xor, None),
    (("bitwise_and", "__and__"), ops.logical_and, ops.bitwise_and),
    (("bitwise_or", "__or__"), ops.logical_or, ops.bitwise_or),
    (("bitwise_xor", "__xor__"), ops.logical_xor, ops.bitwise_xor),
):
    translation(*(f"aten.{name}" for name in _names))(_logical(_truth, _bits))


@translation("aten.logical_not")
def _(context, x):
    return ops.logical_not(as_type(x, "bool"))


@translation("aten.bitwise_not")
def _(context, x):
    return ops.logical_not(x) if x.dtype == "bool" else ops.bitwise_not(x)


@translation("aten.where")
def _(context, condition, x, y):
    condition = as_type(condition, "bool")
    if not isinstance(y, Symbol) and isinstance(x, Symbol) and x.dtype == context.dtype and x.shape == context.shape:
        return ops.masked_fill(x, ops.logical_not(condition), value=y)
    if not isinstance(x, Symbol) and isinstance(y, Symbol) and y.dtype == context.dtype and y.shape == context.shape:
        return ops.masked_fill(y, condition, value=x)
    return ops.where(condition, tensor(context, x, context.dtype), tensor(context, y, context.dtype))


@translation("aten.masked_fill", "aten.masked_fill_")
def _(context, x, mask, value):
    if isinstance(value, Symbol):
        return ops.where(mask, as_type(value, x.dtype), x)
    return ops.masked_fill(x, mask, value=value)


# -- element types and copies ------------------------------------------------------------------------------------------


@translation(
    "aten.to", "aten._to_copy", "aten.type_as", "aten.clone", "aten.contiguous", "aten.alias", "aten.lift_fresh_copy",
    "aten.lift_fresh", "aten.float", "aten.half", "aten.bfloat16", "aten.double", "aten.long", "aten.int", "aten.bool",
    "prims.convert_element_type",
)  # fmt: skip
def _(context, x, *arguments, **options):
    """A copy, possibly in another element type, which the result says."""
    return as_type(x, context.dtype)


@translation("aten.detach", "aten.detach_", "sbp.stop_gradient")
def _(context, x):
    return ops.detach(x)
