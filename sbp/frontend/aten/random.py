"""Random numbers: a function of a seed, the step and the place, so that every layout draws the same ones."""

from __future__ import annotations

import zlib
from typing import Any

from sbp.frontend.translation import Context, as_type, translation
from sbp.nn.activation import random_step
from sbp.operator import TensorType
from sbp.ops import library as ops


def _seed(context: Context) -> int:
    return zlib.crc32(f"{context.builder.module}:{context.node.name}".encode())


@translation("aten.dropout", "aten.dropout_", "aten.feature_dropout", "aten.alpha_dropout")
def dropout(context: Context, x: Any, p: float, train: bool) -> Any:
    """Numbers differ from PyTorch's generator, their distribution does not."""
    if not train or p == 0:
        return x
    if str(context.node.target).startswith(("aten.feature_dropout", "aten.alpha_dropout")):
        raise NotImplementedError("dropout of whole features, or alpha dropout")
    with context.builder:
        step = random_step(context.builder)
    return ops.dropout(x, step, rate=float(p), seed=_seed(context))


@translation("aten.native_dropout")
def _(context, x, p, train):
    return dropout(context, x, p, True if train is None else train), None


def _drawn(context: Context, function: Any, **options: Any) -> Any:
    kind = context.dtype if context.dtype in ("f64", "f32", "bf16", "f16") else "f32"
    with context.builder:
        step = random_step(context.builder)
        drawn = function(step, shape=context.shape, seed=_seed(context), dtype=kind, **options)
    return as_type(drawn, context.dtype)


@translation("aten.rand", "aten.rand_like")
def _(context, *arguments, **options):
    return _drawn(context, ops.random_uniform)


@translation("aten.randn", "aten.randn_like")
def _(context, *arguments, **options):
    return _drawn(context, ops.random_normal)


@translation("aten.randint", "aten.randint_like")
def _(context, *arguments, **options):
    numbers = [item for item in arguments if isinstance(item, int)]
    low, high = numbers if len(numbers) == 2 else (0, numbers[0])
    drawn = _drawn_uniform(context, low, high)
    return as_type(ops.floor(drawn), context.dtype)


def _drawn_uniform(context: Context, low: float, high: float) -> Any:
    with context.builder:
        step = random_step(context.builder)
        return ops.random_uniform(
            step, shape=context.shape, seed=_seed(context), dtype="f64", low=float(low), high=float(high)
        )


@translation("aten.bernoulli.default", "aten.bernoulli.p")
def _(context, x, p=None):
    drawn = _drawn_uniform(context, 0.0, 1.0)
    truth = ops.less_number(drawn, number=p) if p is not None else ops.less(drawn, as_type(x, "f64"))
    return as_type(truth, context.dtype)


@translation("aten.randperm")
def _(context, count, **options):
    """The order of as many uniform numbers."""
    drawn = _drawn(Context(**{**vars(context), "types": (TensorType((count,), "f64"),)}), ops.random_uniform)
    return as_type(ops.argsort(drawn, axis=0), context.dtype)
