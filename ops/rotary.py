"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from sbp.errors import RuleError
from sbp.operator import operator
from sbp.ops.broadcasting import of_type, unbroadcast
from sbp.ops.elementwise import joined, mul, neg
from sbp.ops.slicing import concat, narrow


def _rotary_rule(x: tuple[int, ...], **_: object) -> str:
    if x and x[-1] % 2:
        raise RuleError(f"rotates pairs of channels, so the last dimension must be even, got {x[-1]}")
    return "*b s d^ -> *b s d^"


@operator(_rotary_rule, linear="all")
def rotary(xp, x, *, theta=10000.0, offset=0, interleaved=False, inverse=False):
    """Rotate pairs of channels of x (*b, s, d) by position * theta ** (-2 i / d), positions counted from `offset`.

    Pair i is channels (i, i + d / 2), as in Llama's published code at Hugging Face, or with `interleaved`
    (2 i, 2 i + 1), as in the paper. `inverse` rotates back.
    """
    s, d = x.shape[-2:]
    angles = xp.arange(offset, offset + s)[:, None] * (float(theta) ** (-2.0 * xp.arange(d // 2) / d))[None, :]
    cos, sin = xp.cos(angles).astype(x.dtype), xp.sin(-angles if inverse else angles).astype(x.dtype)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, d // 2), slice(d // 2, d))
    a, b = x[..., first], x[..., second]
    out = xp.empty_like(x)
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


@rotary.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[0].offset[-2]}


@rotary.gradient
def _(grad, x, *, theta, offset, interleaved, inverse):
    return rotary(grad, theta=theta, offset=offset, interleaved=interleaved, inverse=not inverse)


rotary.flops = lambda b, s, d: 3 * b * s * d
rotary.case("f32[2,3,4,6]", theta=100.0)
rotary.case("f32[1,5,2]", offset=3, interleaved=True)
rotary.case("f32[7,4]", inverse=True)


def _table_pattern(x: tuple[int, ...], table: tuple[int, ...]) -> str:
    """The pattern of angles that broadcast to x: dimensions of size one are repeated, the channels stay whole."""
    added = len(x) - len(table)
    if added < 0 or not table or table[-1] != x[-1] or x[-1] % 2:
        raise RuleError(
            f"rotates halves of the even last dimension of x {list(x)} by tables that broadcast to it, "
            f"got {list(table)}"
        )
    names = ["1" if size == 1 else f"d{added + at}" for at, size in enumerate(table[:-1])]
    return " ".join([*names, "c^"])


def _rotate_rule(x: tuple[int, ...], cos: tuple[int, ...], sin: tuple[int, ...], *, inverse: bool) -> str:
    pattern = " ".join([*(f"d{at}" for at in range(len(x) - 1)), "c^"])
    return f"{pattern}, {_table_pattern(x, cos)}, {_table_pattern(x, sin)} -> {pattern}"


def _halves_exchanged(xp, x, inverse: bool):
    """(-second half, first half) of the last dimension, or (second, -first)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return xp.concatenate([second, -first] if inverse else [-second, first], axis=-1)


@operator(_rotate_rule, linear="x | cos sin", dtype=joined)
def rotate_halves(xp, x, cos, sin, *, inverse=False):
    """x * cos + (-x2, x1) * sin, where x1 and x2 are the halves of the last dimension: rotary embedding by tables.

    x (*b, d); cos and sin broadcast to it, whole in d. `inverse` gives the transposed map, the gradient for x, which
    rotates back.
    """
    if inverse:
        return x * cos + _halves_exchanged(xp, x * sin, True)
    return x * cos + _halves_exchanged(xp, x, False) * sin


@rotate_halves.gradient
def _(grad, x, cos, sin, *, inverse):
    half = x.shape[-1] // 2

    def exchanged(y, negative):
        first, second = narrow(y, -1, 0, half), narrow(y, -1, half, half)
        return concat(second, neg(first), axis=-1) if negative else concat(neg(second), first, axis=-1)

    dsin = mul(exchanged(grad, False), x) if inverse else mul(grad, exchanged(x, False))
    return (
        of_type(rotate_halves(grad, cos, sin, inverse=not inverse), x),
        unbroadcast(mul(grad, x), cos),
        unbroadcast(dsin, sin),
    )


rotate_halves.flops = lambda elements_out: 3 * elements_out
rotate_halves.case("f32[2,3,4,6]", "f32[1,1,4,6]", "f32[1,1,4,6]")
rotate_halves.case("f32[3,2,2]", "f32[3,1,2]", "f32[3,1,2]", inverse=True)
rotate_halves.case("f32[5,4]", "f32[5,4]", "f32[4]")
