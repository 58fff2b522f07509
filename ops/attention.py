"""Fused scaled dot-product attention with grouped queries, without storing the scores.

Backward recomputes the probabilities from the logarithm of the sum of exponentials that forward gives besides the
output, as FlashAttention does (Dao et al. 2022, arXiv:2205.14135). So queries may be split in both directions, and
keys and values in backward, where every rank then holds a part of the queries' gradient. Where keys and values are
split like the queries, ranks pass them on (a ring), under a causal mask only to the later ones; where only they are
split, it takes the composite `key_split_attention` (see `sbp.ops.key_split`).
"""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import GraphError
from sbp.layout import Shard
from sbp.operator import operator
from sbp.ops.precision import wide_dtype, widen


def _grouped(x: Any, kv: int) -> Any:
    """(b, kv * g, s, d) -> (b, kv, g * s, d): the queries of one key head stacked, for one product instead of g."""
    b, heads, s, d = x.shape
    return x.reshape(b, kv, (heads // kv if kv else 0) * s, d)


def _allowed(xp: Any, mask: Any, causal: bool, offset: int, kv: int, s: int, t: int) -> Any:
    """Where a query may look, broadcastable to (b, kv, g, s, t); None for everywhere."""
    allowed = None
    if mask is not None:
        b, heads = mask.shape[:2]
        allowed = mask.reshape(b, 1, 1, *mask.shape[2:]) if heads == 1 else mask.reshape(
            b, kv, heads // kv if kv else 0, *mask.shape[2:]
        )
    if causal:
        below = xp.arange(t)[None, :] <= xp.arange(s)[:, None] + offset
        allowed = below if allowed is None else allowed & below
    return allowed


def _scores(xp: Any, q: Any, k: Any, mask: Any, causal: bool, scale: float | None, offset: int) -> Any:
    """Scaled scores (b, kv, g, s, t), minus infinity where a query may not look."""
    b, heads, s, d = q.shape
    kv, t = k.shape[1], k.shape[2]
    scores = xp.matmul(_grouped(q, kv), k.swapaxes(-1, -2)) * (_scale(scale, d))
    scores = scores.reshape(b, kv, heads // kv if kv else 0, s, t)
    allowed = _allowed(xp, mask, causal, offset, kv, s, t)
    return scores if allowed is None else xp.where(allowed, scores, xp.asarray(-math.inf, dtype=scores.dtype))


def _scale(scale: float | None, d: int) -> float:
    return 1.0 / math.sqrt(d) if scale is None else scale


def _forward(xp: Any, q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: float | None, offset: int) -> tuple:
    dtype = q.dtype
    q, k, v = widen(q), widen(k), widen(v)
    b, heads, s, _ = q.shape
    kv, t, e = k.shape[1], k.shape[2], v.shape[3]
    if t == 0:
        return xp.zeros((b, heads, s, e), dtype), xp.full((b, heads, s), -math.inf, q.dtype)
    scores = _scores(xp, q, k, mask, causal, scale, offset)
    top = scores.max(axis=-1, keepdims=True)
    top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))  # a query that may look nowhere: exp(-inf - 0) is 0
    weights = xp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    seen = total > 0
    total = xp.where(seen, total, xp.ones_like(total))
    logsumexp = xp.where(seen, xp.log(total) + top, xp.asarray(-math.inf, dtype=q.dtype))
    weights /= total
    out = xp.matmul(weights.reshape(b, kv, (heads // kv if kv else 0) * s, t), v)
    return out.reshape(b, heads, s, e).astype(dtype, copy=False), logsumexp.reshape(b, heads, s)


def _backward(
    xp: Any, grad: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, mask: Any,
    causal: bool, scale: float | None, offset: int,
) -> tuple:  # fmt: skip
    dtype = q.dtype
    grad, q, k, v, out = widen(grad), widen(q), widen(k), widen(v), widen(out)
    b, heads, s, d = q.shape
    kv, t = k.shape[1], k.shape[2]
    group = heads // kv if kv else 0
    scores = _scores(xp, q, k, mask, causal, scale, offset)
    shift = logsumexp.reshape(b, kv, group, s, 1)
    weights = xp.exp(scores - xp.where(xp.isfinite(shift), shift, xp.zeros_like(shift)))
    weights = weights.reshape(b, kv, group * s, t)
    grad_grouped = _grouped(grad, kv)
    dv = xp.matmul(weights.swapaxes(-1, -2), grad_grouped)
    along = _grouped((grad * out).sum(axis=-1, keepdims=True), kv)
    dscores = weights * (xp.matmul(grad_grouped, v.swapaxes(-1, -2)) - along) * _scale(scale, d)
    dq = xp.matmul(dscores, k).reshape(q.shape)
    dk = xp.matmul(dscores.swapaxes(-1, -2), _grouped(q, kv))
    return tuple(item.astype(dtype, copy=False) for item in (dq, dk, dv))


def _pairs(s: int, t: int, causal: bool) -> float:
    """Query-key pairs that are computed. Causal halves them; of a split causal sequence this is the busiest rank's
    share (the last queries look at all keys, the first keys are looked at by all queries)."""
    return s * t - (min(s, t) ** 2 / 2 if causal else 0.0)


def _query_types(q: Any, *_: Any, **__: Any) -> tuple[str, str]:
    return q.dtype, wide_dtype(q.dtype)


@operator(
    "b (kv g) s d^, b kv t~s d^, b kv t~s e^ -> b (kv g) s e^, b (kv g) s",
    linear="v -> out",
    outputs=("out", "logsumexp"),
    dtype=_query_types,
)
def attention(xp, q, k, v, *, causal=False, scale=None, offset=0):
    """Softmax(q k^T * scale) v: q (b, h, s, d), k (b, kv, t, d), v (b, kv, t, e) -> (b, h, s, e), (b, h, s).

    Query head i reads key head i // (h / kv). With `causal`, query i looks at keys up to i + offset (PyTorch's
    `is_causal` at offset 0). `scale` is 1 / sqrt(d) unless given. The second output is the logarithm of the sum of
    exponentials of each query's scores, for the backward pass; a query that may look nowhere gives 0 and -inf.
    """
    return _forward(xp, q, k, v, None, causal, scale, offset)


def _read_keys(attributes: Any, inputs: tuple[Shard, ...], outputs: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """The keys and values from the first to the last that the queries of a rank may look at."""
    q, k, v, *masks = inputs
    stop = k.global_shape[2]
    if k.shape[2] == stop:
        return inputs
    if attributes["causal"]:
        stop = min(stop, max(0, q.offset[2] + q.shape[2] + attributes["offset"]))
    if 0 in outputs[0].shape:
        stop = 0
    k, v = (_along(shard, 2, stop) for shard in (k, v))
    return q, k, v, *(_along(mask, 3, stop) if mask.global_shape[3] > 1 else mask for mask in masks)


def _along(shard: Shard, dimension: int, stop: int) -> Shard:
    """The box from the start of a dimension to `stop`."""
    offset, shape = list(shard.offset), list(shard.shape)
    offset[dimension], shape[dimension] = 0, stop
    return Shard(shard.global_shape, tuple(offset), tuple(shape))


attention.reads(_read_keys)


@attention.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[0].offset[2]}


@attention.gradient
def _(grad, q, k, v, *, causal, scale, offset, out):
    if grad[1] is not None:
        raise GraphError("attention: its logsumexp output has no gradient; it only serves the backward pass.")
    return attention_backward(grad[0], q, k, v, *out, causal=causal, scale=scale, offset=offset)


attention.flops = lambda b, kv, g, s, t, d, e, causal: 2 * b * kv * g * _pairs(s, t, causal) * (d + e)


_BACKWARD = (
    "b (kv g+) s+ e+, b (kv g) s d^, b kv t+ d^, b kv t e, b (kv g) s e, b (kv g) s"
    " -> b (kv g) s d^, b kv t d^, b kv t e"
)


@operator(
    _BACKWARD,
    linear="grad | v out -> dq dk",
    outputs=("dq", "dk", "dv"),
    dtype=lambda grad, q, k, v, *_, **__: (q.dtype, k.dtype, v.dtype),
)
def attention_backward(xp, grad, q, k, v, out, logsumexp, *, causal=False, scale=None, offset=0):
    """Gradients of `attention` for q, k and v, from its outputs; shapes as there, grad (b, h, s, e)."""
    return _backward(xp, grad, q, k, v, out, logsumexp, None, causal, scale, offset)


@attention_backward.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[1].offset[2] - inputs[2].offset[2]}


# FlashAttention-2 adds the queries' gradient up in f32, beside the rows' sums of grad * out (Dao 2023,
# arXiv:2307.08691).
attention_backward.workspace = lambda b, kv, g, s, d: 4 * b * kv * g * s * (d + 1)
attention_backward.flops = lambda b, kv, g, s, t, d, e, causal: 2 * b * kv * g * _pairs(s, t, causal) * (3 * d + 2 * e)


def _mask_term(shape: tuple[int, ...]) -> str:
    """The mask's pattern; its dimensions of size one are repeated."""
    return " ".join("1" if size == 1 else term for size, term in zip(shape, ("b", "(kv g)", "s", "t"), strict=True))


def _masked_rule(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], mask: tuple[int, ...], **_: Any) -> str:
    return f"b (kv g) s d^, b kv t~s d^, b kv t~s e^, {_mask_term(mask)} -> b (kv g) s e^, b (kv g) s"


@operator(_masked_rule, linear="v -> out", outputs=("out", "logsumexp"), dtype=_query_types)
def masked_attention(xp, q, k, v, mask, *, causal=False, scale=None, offset=0):
    """`attention` where a query looks only where the boolean mask (b or 1, h or 1, s or 1, t or 1) is true."""
    return _forward(xp, q, k, v, mask, causal, scale, offset)


masked_attention.reads(_read_keys)


@masked_attention.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[0].offset[2]}


@masked_attention.gradient
def _(grad, q, k, v, mask, *, causal, scale, offset, out):
    return *masked_attention_backward(grad[0], q, k, v, *out, mask, causal=causal, scale=scale, offset=offset), None


masked_attention.flops = attention.flops


def _masked_backward_rule(*shapes: tuple[int, ...], **_: Any) -> str:
    return _BACKWARD.replace(" ->", f", {_mask_term(shapes[-1])} ->")


@operator(
    _masked_backward_rule,
    linear="grad | v out -> dq dk",
    outputs=("dq", "dk", "dv"),
    dtype=lambda grad, q, k, v, *_, **__: (q.dtype, k.dtype, v.dtype),
)
def masked_attention_backward(xp, grad, q, k, v, out, logsumexp, mask, *, causal=False, scale=None, offset=0):
    """Gradients of `masked_attention` for q, k and v."""
    return _backward(xp, grad, q, k, v, out, logsumexp, mask, causal, scale, offset)


@masked_attention_backward.localize
def _(attributes, inputs, outputs):
    return {**attributes, "offset": attributes["offset"] + inputs[1].offset[2] - inputs[2].offset[2]}


masked_attention_backward.flops = attention_backward.flops
masked_attention_backward.workspace = attention_backward.workspace

attention.case("f32[1,4,1,2]", "f32[1,2,5,2]", "f32[1,2,5,3]")
attention.case("f32[1,2,4,2]", "f32[1,2,4,2]", "f32[1,2,4,2]", causal=True)
attention.case("f32[1,1,5,1]", "f32[1,1,8,1]", "f32[1,1,8,1]", causal=True, offset=3)
attention.case("f32[2,3,5,2]", "f32[2,1,5,2]", "f32[2,1,5,1]", causal=True, scale=0.5)
attention.case("f32[1,2,3,2]", "f32[1,2,5,2]", "f32[1,2,5,2]", causal=True, offset=2)
# Backward has so many inputs that each case is long in a few dimensions only.
for _s, _t, _where in (
    ("f32[1,4,1,1]", "f32[1,2,1,1]", {}),
    ("f32[3,1,1,1]", "f32[3,1,1,1]", {"scale": 0.5}),
    ("f32[1,1,3,1]", "f32[1,1,4,1]", {"causal": True, "offset": 1}),
    ("f32[1,3,1,1]", "f32[1,1,1,1]", {}),
):
    attention_backward.case(_s, _s, _t, _t, _s, _s.rpartition(",")[0] + "]", **_where)
attention_backward.case("f32[1,1,1,3]", "f32[1,1,1,2]", "f32[1,1,2,2]", "f32[1,1,2,3]", "f32[1,1,1,3]", "f32[1,1,1]")
masked_attention.case("f32[1,4,1,1]", "f32[1,2,5,1]", "f32[1,2,5,2]", "bool[1,1,1,5]")
masked_attention.case("f32[2,1,3,1]", "f32[2,1,3,1]", "f32[2,1,3,1]", "bool[2,1,3,3]", causal=True)
masked_attention.case("f32[1,4,2,1]", "f32[1,2,2,1]", "f32[1,2,2,1]", "bool[1,4,1,2]")
masked_attention_backward.case(
    "f32[1,4,1,1]", "f32[1,4,1,1]", "f32[1,2,1,1]", "f32[1,2,1,1]", "f32[1,4,1,1]", "f32[1,4,1]", "bool[1,4,1,1]"
)
masked_attention_backward.case(
    "f32[1,1,3,1]", "f32[1,1,3,1]", "f32[1,1,4,1]", "f32[1,1,4,1]", "f32[1,1,3,1]", "f32[1,1,3]", "bool[1,1,3,4]"
)
masked_attention_backward.case(
    "f32[2,2,2,2]", "f32[2,2,2,1]", "f32[2,1,3,1]", "f32[2,1,3,2]", "f32[2,2,2,2]", "f32[2,2,2]", "bool[2,1,2,3]"
)
attention.reasons["*S(3)* -> *S(3)*"] = (
    "splitting the values' channels repeats the scores on every rank; heads and queries split without that"
)
masked_attention.reasons.update(attention.reasons)
