"""ONNX's operators that act element by element."""

from __future__ import annotations

from collections.abc import Callable

from sbp.frontend.onnx_operators.node import element_type, onnx_translation
from sbp.frontend.translation import as_type
from sbp.ops import library as ops

for _name, _function in {
    "Neg": ops.neg, "Abs": ops.abs, "Sqrt": ops.sqrt, "Exp": ops.exp, "Log": ops.log, "Reciprocal": ops.reciprocal,
    "Erf": ops.erf, "Tanh": ops.tanh, "Sigmoid": ops.sigmoid, "Relu": ops.relu, "Softplus": ops.softplus,
    "HardSwish": ops.hardswish, "Softsign": ops.softsign, "Floor": ops.floor, "Ceil": ops.ceil, "Round": ops.round,
    "Sign": ops.sign, "Sin": ops.sin, "Cos": ops.cos, "Tan": ops.tan, "Asin": ops.asin, "Acos": ops.acos,
    "Atan": ops.atan, "Sinh": ops.sinh, "Cosh": ops.cosh, "Asinh": ops.asinh, "Acosh": ops.acosh, "Atanh": ops.atanh,
    "IsNaN": ops.isnan, "Not": ops.logical_not, "Mish": ops.mish, "Identity": lambda x: x,
}.items():  # fmt: skip
    onnx_translation(_name)(lambda node, x, function=_function: function(x))

for _name, _function in {
    "Add": ops.add, "Sub": ops.sub, "Mul": ops.mul, "Equal": ops.equal, "Greater": ops.greater, "Less": ops.less,
    "GreaterOrEqual": ops.greater_equal, "LessOrEqual": ops.less_equal, "And": ops.logical_and, "Or": ops.logical_or,
    "Xor": ops.logical_xor, "PRelu": ops.prelu,
}.items():  # fmt: skip
    onnx_translation(_name)(lambda node, x, y, function=_function: function(x, y))


@onnx_translation("Div")
def _(node, x, y):
    if x.dtype.startswith(("i", "u")):  # whole numbers are divided towards zero
        return as_type(ops.trunc(ops.div(as_type(x, "f64"), as_type(y, "f64"))), x.dtype)
    return ops.div(x, y)


@onnx_translation("Pow")
def _(node, x, exponent):
    value = node.constant(1)
    if value is not None and value.size == 1:
        number = float(value.reshape(-1)[0])
        special: dict[float, Callable] = {1.0: lambda x: x, 2.0: ops.square, 0.5: ops.sqrt}
        return special[number](x) if number in special else ops.pow(x, exponent=number)
    return ops.exp(ops.mul(ops.log(x), as_type(exponent, x.dtype)))


@onnx_translation("Mod")
def _(node, x, y):
    return ops.fmod(x, y) if node.get("fmod", 0) else ops.remainder(x, y)


for _name, _function in {"Max": ops.maximum, "Min": ops.minimum, "Sum": ops.add}.items():

    @onnx_translation(_name)
    def _(node, first, *others, function=_function):
        for other in others:
            first = function(first, other)
        return first


@onnx_translation("Mean")
def _(node, *inputs):
    total = inputs[0]
    for other in inputs[1:]:
        total = ops.add(total, other)
    return ops.scale(total, factor=1 / len(inputs))


@onnx_translation("Gelu")
def _(node, x):
    return ops.gelu(x, approximate=node.get("approximate", "none"))


@onnx_translation("LeakyRelu")
def _(node, x):
    return ops.leaky_relu(x, slope=node.get("alpha", 0.01))


@onnx_translation("Elu")
def _(node, x):
    return ops.elu(x, alpha=node.get("alpha", 1.0))


@onnx_translation("Selu")
def _(node, x):
    return ops.selu(x)


@onnx_translation("HardSigmoid")
def _(node, x):
    line = ops.shift(ops.scale(x, factor=node.get("alpha", 0.2)), amount=node.get("beta", 0.5))
    return ops.clamp(line, low=0, high=1)


@onnx_translation("Clip")
def _(node, x, low=None, high=None):
    bounds = []
    for index, key in ((1, "min"), (2, "max")):
        given = node.get(key)
        value = node.constant(index) if given is None else given
        bounds.append(None if value is None else float(value))
    return ops.clamp(x, low=bounds[0], high=bounds[1]) if bounds != [None, None] else x


@onnx_translation("Where")
def _(node, condition, x, y):
    return ops.where(condition, x, y)


@onnx_translation("Cast", "CastLike")
def _(node, x, like=None):
    return as_type(x, element_type(node.get("to")) if like is None else like.dtype)


@onnx_translation("Dropout")
def _(node, x, *ratio):
    """As in inference, which is what an exported model is for."""
    return x
