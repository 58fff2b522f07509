"""Attention over keys that are split among ranks: the online softmax, with its statistics as parts of a reduction.

Each rank looks at its own keys. The largest score of a query is the maximum over the ranks, P(max); relative to it, the
sum of exponentials and the weighted sum of values add up, P(sum) (Milakov and Gimelshein 2018, arXiv:1805.02867). So
one query over a long cache of keys is shared out without moving keys, which `attention`, keeping the keys of a query
together, does not allow. The price is that scores are computed twice.
"""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import dtype_named
from sbp.operator import operator
from sbp.ops.attention import _grouped, _mask_term, _pairs, _scale, _scores, attention
from sbp.ops.elementwise import add, cast, clamp, div, log, mul, neg
from sbp.ops.precision import wide_dtype, widen
from sbp.ops.reduction import sum_
from sbp.ops.views import detach, unsqueeze


def _masks(masks: tuple[tuple[int, ...], ...]) -> str:
    return "".join(f", {_mask_term(shape)}" for shape in masks)


def _peak_rule(q: tuple[int, ...], k: tuple[int, ...], *masks: tuple[int, ...], **_: Any) -> str:
    return f"b (kv g) s d^, b kv t> d^{_masks(masks)} -> b (kv g) s"


def _from_first_key(attributes: dict[str, Any], q: Any, k: Any) -> dict[str, Any]:
    return {**attributes, "offset": attributes["offset"] + q.offset[2] - k.offset[2]}


@operator(_peak_rule, dtype=lambda q, *_, **__: wide_dtype(q.dtype))
def attention_peak(xp, q, k, *mask, causal=False, scale=None, offset=0):
    """The largest score of each query: q (b, h, s, d), k (b, kv, t, d), a boolean mask or none -> (b, h, s).

    Attributes as in `attention`. A query that may look nowhere has minus infinity.
    """
    q, k = widen(q), widen(k)
    b, heads, s, _ = q.shape
    if k.shape[2] == 0:
        return xp.full((b, heads, s), -math.inf, q.dtype)
    scores = _scores(xp, q, k, mask[0] if mask else None, causal, scale, offset)
    return scores.max(axis=-1).reshape(b, heads, s)


attention_peak.flops = lambda b, kv, g, s, t, d, causal: 2 * b * kv * g * _pairs(s, t, causal) * d


@attention_peak.localize
def _(attributes, inputs, outputs):
    return _from_first_key(attributes, inputs[0], inputs[1])


def _weights(xp: Any, q: Any, k: Any, peak: Any, mask: Any, causal: bool, scale: float | None, offset: int) -> Any:
    """exp(score - peak), (b, kv, g * s, t)."""
    b, heads, s, _ = q.shape
    kv, t = k.shape[1], k.shape[2]
    group = heads // kv if kv else 0
    top = peak.reshape(b, kv, group, s, 1)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))  # where nothing is seen, all weights are exp(-inf)
    return xp.exp(_scores(xp, q, k, mask, causal, scale, offset) - top).reshape(b, kv, group * s, t)


def _sums_rule(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], peak: tuple[int, ...], *masks: tuple[int, ...], **_: Any
) -> str:
    return f"b (kv g) s d^, b kv t+ d^, b kv t e^, b (kv g) s{_masks(masks)} -> b (kv g) s e^, b (kv g) s"


def _wide_types(q: Any, *_: Any, **__: Any) -> tuple[str, str]:
    return wide_dtype(q.dtype), wide_dtype(q.dtype)


@operator(_sums_rule, linear="v -> weighted", outputs=("weighted", "total"), dtype=_wide_types)
def attention_sums(xp, q, k, v, peak, *mask, causal=False, scale=None, offset=0):
    """Sums over the keys of exp(score - peak) v, (b, h, s, e), and of exp(score - peak), (b, h, s).

    q (b, h, s, d), k (b, kv, t, d), v (b, kv, t, e), peak (b, h, s) as `attention_peak` gives it, a boolean mask or
    none.
    """
    q, k, v = widen(q), widen(k), widen(v)
    b, heads, s, _ = q.shape
    weights = _weights(xp, q, k, peak, mask[0] if mask else None, causal, scale, offset)
    return xp.matmul(weights, v).reshape(b, heads, s, v.shape[3]), weights.sum(axis=-1).reshape(b, heads, s)


attention_sums.flops = lambda b, kv, g, s, t, d, e, causal: 2 * b * kv * g * _pairs(s, t, causal) * (d + e)


@attention_sums.localize
def _(attributes, inputs, outputs):
    return _from_first_key(attributes, inputs[0], inputs[1])


@attention_sums.gradient
def _(grad, q, k, v, peak, *mask, causal, scale, offset, out):
    weighted, total = (given if given is not None else 0.0 * made for given, made in zip(grad, out))
    made = attention_sums_backward(weighted, total, q, k, v, peak, *mask, causal=causal, scale=scale, offset=offset)
    along = add(sum_(mul(weighted, out[0]), axis=3), mul(total, out[1]))
    along = cast(neg(along), dtype=dtype_named(peak.dtype))  # every weight scales with exp(-peak)
    return *made, along, *(None for _ in mask)


def _backward_rule(*shapes: tuple[int, ...], **_: Any) -> str:
    return (
        f"b (kv g+) s+ e^, b (kv g) s, b (kv g) s d^, b kv t+ d^, b kv t e^, b (kv g) s{_masks(shapes[6:])}"
        " -> b (kv g) s d^, b kv t d^, b kv t e^"
    )


@operator(
    _backward_rule,
    linear="weighted total | v total -> dq dk",
    outputs=("dq", "dk", "dv"),
    dtype=lambda weighted, total, q, k, v, *_, **__: (q.dtype, k.dtype, v.dtype),
)
def attention_sums_backward(xp, weighted, total, q, k, v, peak, *mask, causal=False, scale=None, offset=0):
    """Gradients of `attention_sums` for q, k, v from those of its sums, weighted (b, h, s, e) and total (b, h, s)."""
    types = q.dtype, k.dtype, v.dtype
    weighted, q, k, v = widen(weighted), widen(q), widen(k), widen(v)
    kv, d = k.shape[1], q.shape[3]
    weights = _weights(xp, q, k, peak, mask[0] if mask else None, causal, scale, offset)
    grouped = _grouped(weighted, kv)
    scores = weights * (xp.matmul(grouped, v.swapaxes(-1, -2)) + _grouped(total[..., None], kv)) * _scale(scale, d)
    dq = xp.matmul(scores, k).reshape(q.shape)
    dk = xp.matmul(scores.swapaxes(-1, -2), _grouped(q, kv))
    dv = xp.matmul(weights.swapaxes(-1, -2), grouped)
    return tuple(one.astype(dtype, copy=False) for one, dtype in zip((dq, dk, dv), types))


attention_sums_backward.flops = lambda b, kv, g, s, t, d, e, causal: (
    2 * b * kv * g * _pairs(s, t, causal) * (3 * d + 2 * e)
)


@attention_sums_backward.localize
def _(attributes, inputs, outputs):
    return _from_first_key(attributes, inputs[2], inputs[3])


def key_split_attention(
    q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None, offset: int = 0
) -> tuple[Any, Any]:
    """`attention` whose keys and values may be split along their sequence: (b, h, s, e) and logsumexp (b, h, s).

    Same arguments and results as `attention` (with a `mask`, `masked_attention`); scores are computed twice.
    """
    masks = () if mask is None else (mask,)
    where = {"causal": causal, "scale": scale, "offset": offset}
    peak = detach(attention_peak(q, k, *masks, **where))
    weighted, total = attention_sums(q, k, v, peak, *masks, **where)
    # The largest score adds 1 to the total; it is less only where a query may look nowhere, and then all is 0.
    out = div(weighted, unsqueeze(clamp(total, low=0.5), axis=3))
    return cast(out, dtype=dtype_named(q.dtype)), log(total) + peak


attention_peak.reasons.update(
    {
        "B, B, P(max) -> P(max)": "masks are made whole, or split along with the keys",
        "B, P -> P": "of a single key the largest score is the score itself",
        "P, B -> P": "of a single key the largest score is the score itself",
    }
)
attention_sums.reasons.update(
    {
        "B, B, S(3), B* -> S(3), B": attention.reasons["*S(3)* -> *S(3)*"],
        "B, S(2), S(2), B* -> P, P(max)": "only where all keys that are looked at lie on one rank",
        "B, B, P(m??), B -> P(m??), B": "the sum over a single key is its value",
    }
)


for _mask in ((), ("bool[1,1,3,5]",)):
    attention_peak.case("f32[2,4,3,2]", "f32[2,2,5,2]", *(m.replace("1,1", "2,4") for m in _mask))
    attention_peak.case("f32[1,2,3,1]", "f32[1,1,5,1]", *_mask, causal=True, offset=2)
    attention_sums.case("f32[1,4,3,1]", "f32[1,2,5,1]", "f32[1,2,5,2]", "f32[1,4,3]", *_mask)
    attention_sums.case("f32[2,1,3,1]", "f32[2,1,5,1]", "f32[2,1,5,1]", "f32[2,1,3]", *_mask, causal=True, scale=0.5)
attention_peak.case("f32[1,1,1,1]", "f32[1,1,1,1]")
attention_sums.case("f32[1,1,1,2]", "f32[1,1,1,2]", "f32[1,1,1,1]", "f32[1,1,1]")
for _q, _k, _where in (
    ("1,4,1", "1,2,1", {}),
    ("3,1,1", "3,1,1", {"scale": 0.5}),
    ("1,1,3", "1,1,4", {"causal": True, "offset": 1}),
):
    for _mask in ((), (f"bool[{_q},{_k[-1]}]",)):
        attention_sums_backward.case(
            f"f32[{_q},1]", f"f32[{_q}]", f"f32[{_q},1]", f"f32[{_k},1]", f"f32[{_k},1]", f"f32[{_q}]", *_mask, **_where
        )
