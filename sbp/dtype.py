"""Element types by their short names, as they are written in messages: f32[2048,256]."""

from __future__ import annotations

from sbp.errors import GraphError

SIZES = {"f64": 8, "f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "u32": 4, "i8": 1, "u8": 1, "bool": 1}
"""Bytes per element."""

FLOATING = ("f64", "f32", "bf16", "f16")

_ALIASES = {
    "float64": "f64", "double": "f64", "float32": "f32", "float": "f32", "bfloat16": "bf16", "float16": "f16",
    "half": "f16", "int64": "i64", "long": "i64", "int32": "i32", "int": "i32", "uint32": "u32", "int8": "i8",
    "uint8": "u8",
}  # fmt: skip

_NUMPY = {
    "f64": "float64", "f32": "float32", "bf16": "float32", "f16": "float16", "i64": "int64", "i32": "int32",
    "u32": "uint32", "i8": "int8", "u8": "uint8", "bool": "bool",
}  # fmt: skip


def dtype_named(name: object) -> str:
    """The short name of an element type given by any usual name (`"float32"`, `numpy.float32`, `torch.float32`)."""
    text = getattr(name, "__name__", None) or str(name)
    text = text.rpartition(".")[2]
    short = _ALIASES.get(text, text)
    if short not in SIZES:
        raise GraphError(f"unknown element type {name!r}; known are {', '.join(SIZES)}.")
    return short


def is_floating(dtype: str) -> bool:
    """Whether values of this type have gradients."""
    return dtype in FLOATING


def numpy_name(dtype: str) -> str:
    """The NumPy type that holds it; NumPy has no bfloat16, so bf16 is held in float32."""
    return _NUMPY[dtype_named(dtype)]


def holds(dtype: str, value: float) -> bool:
    """Whether an element of this type can be the number; NumPy would make an integer of 0.5 and of infinity, too.

    Floating types hold every number, rounded; truth values every number as well, which is true unless it is zero.
    """
    if is_floating(dtype) or dtype == "bool":
        return True
    bits = 8 * SIZES[dtype]
    low, high = (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return low <= value <= high and value == int(value)
