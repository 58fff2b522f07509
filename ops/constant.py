"""Values made of nothing but their shape."""

from __future__ import annotations

from sbp.dtype import dtype_named, holds, numpy_name
from sbp.errors import RuleError
from sbp.operator import operator


def _rule(*, shape, value, dtype):
    names = [f"d{index}" for index in range(len(shape))]
    return f"-> {' '.join(names)}", dict(zip(names, shape))


def _filled(*, shape, value, dtype):
    kind = dtype_named(dtype)
    if not holds(kind, value):
        raise RuleError(f"value {value} is none of the whole numbers that {kind} holds")
    return kind


@operator(_rule, dtype=_filled)
def full(xp, *, shape, value, dtype="f32"):
    """A tensor of `shape` with `value` in every element."""
    return xp.full(shape, value, numpy_name(dtype))


full.flops = lambda: 0


@full.localize
def _(attributes, inputs, outputs):
    return {**attributes, "shape": outputs[0].shape}


full.case(shape=(4, 6), value=2.5)
full.case(shape=(5, 1), value=-1.0)
full.case(shape=(), value=1.0)


@operator(lambda *, size, start, step, dtype: ("-> n", {"n": size}), dtype=lambda *, size, start, step, dtype: dtype)
def arange(xp, *, size, start=0, step=1, dtype="i64"):
    """start, start + step, ...: `size` numbers."""
    return (xp.arange(size) * step + start).astype(numpy_name(dtype))


arange.flops = lambda: 0


@arange.localize
def _(attributes, inputs, outputs):
    box = outputs[0]
    start = attributes["start"] + box.offset[0] * attributes["step"]
    return {**attributes, "size": box.shape[0], "start": start}


arange.case(size=6)
arange.case(size=5, start=2, step=3)
arange.case(size=7, start=0.5, step=-0.25, dtype="f32")
