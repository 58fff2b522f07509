"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from sbp.errors import RuleError
from sbp.operator import operator


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
