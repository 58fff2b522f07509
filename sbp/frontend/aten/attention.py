"""Scaled dot-product attention: masks that are known at import become the operator's own causal mask."""

from __future__ import annotations

import math
from typing import Any

from sbp.frontend.aten.random import dropout
from sbp.frontend.translation import Context, as_type, broadcast, filled, reshaped, translation
from sbp.ops import library as ops


@translation("aten.scaled_dot_product_attention", by_node=(3, "attn_mask"))
def scaled_dot_product_attention(
    context: Context, q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """q (*b, h, s, d), k (*b, kv, t, d), v (*b, kv, t, e); the mask boolean (where to look) or added to the scores."""
    node = context.node
    k, v = (_before_repetition(context, node.args[at], x, q) for at, x in ((1, k), (2, v)))
    lead = q.shape[:-3]
    q, k, v = (_four_dimensional(x) for x in (q, k, v))
    causal: bool | None = bool(is_causal)
    offset, mask = 0, None
    if attn_mask is not None:
        key = ("band", attn_mask, q.shape[2], k.shape[2])
        if key not in context.notes:
            context.notes[key] = _band(context.constant(attn_mask), q.shape[2], k.shape[2])
        band = context.notes[key]
        if band is not None:
            offset, low = band
            causal = offset < k.shape[2] - 1
            mask = None if low is None else _lower_bound(context, q.shape[2], k.shape[2], low)
        else:
            mask = _four_dimensional(context.operand(_before_expansion(attn_mask)), filled_with=1)
    if dropout_p or (mask is not None and mask.dtype != "bool"):
        out = _in_steps(context, q, k, v, mask, dropout_p, causal, offset, scale)
    elif mask is None:
        out, _ = ops.attention(q, k, v, causal=causal, scale=scale, offset=offset if causal else 0)
    else:
        out, _ = ops.masked_attention(q, k, v, mask, causal=causal, scale=scale, offset=offset if causal else 0)
    return reshaped(out, (*lead, *out.shape[1:]) if len(lead) != 1 else out.shape)


def _four_dimensional(x: Any, filled_with: int = 1) -> Any:
    """Leading dimensions as one batch; a missing one of size one."""
    if len(x.shape) == 4:
        return x
    if len(x.shape) < 4:
        return reshaped(x, (*(filled_with,) * (4 - len(x.shape)), *x.shape))
    return reshaped(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))


_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_COPIES = ("aten.clone.default", "aten.contiguous.default", "aten.alias.default")


def _before_repetition(context: Context, node: Any, x: Any, q: Any) -> Any:
    """Keys or values before every head was repeated for its group of queries: attention reads each head in place."""
    while str(node.target) in _COPIES:
        node = node.args[0]
    if str(node.target) not in _VIEWS or len(x.shape) != 4:
        return x
    expanded = node.args[0]
    while str(expanded.target) in _COPIES:
        expanded = expanded.args[0]
    if str(expanded.target) != "aten.expand.default" or str(expanded.args[0].target) != "aten.unsqueeze.default":
        return x
    inner = expanded.args[0]
    source = context.operand(inner.args[0])
    wide = context.operand(inner).shape
    repeats = x.shape[1] // max(source.shape[1], 1)
    fits = (
        len(source.shape) == 4
        and wide == (*source.shape[:2], 1, *source.shape[2:])
        and x.shape == (source.shape[0], source.shape[1] * repeats, *source.shape[2:])
        and q.shape[1] == x.shape[1]
    )
    return source if fits else x


def _before_expansion(node: Any) -> Any:
    """A mask before it was repeated over batch or heads."""
    while str(node.target) in ("aten.expand.default", *_COPIES):
        node = node.args[0]
    return node


def _band(value: Any, s: int, t: int) -> tuple[int, int | None] | None:
    """What a mask known at import says, if it says that query i looks at keys i + low to i + high.

    Returns
    -------
    (high, low) or None
        `low` is None where there is no lower bound; None where the mask is not known or says something else.
    """
    import torch

    if value is None or value.ndim < 2 or tuple(value.shape[-2:]) != (s, t):
        return None
    for size, stride in zip(value.shape[:-2], value.stride()[:-2]):
        if size != 1 and stride != 0:
            return None
    matrix = value[(0,) * (value.ndim - 2)]
    if matrix.dtype != torch.bool:
        kept, hidden = matrix == 0, matrix <= -1e4
        if not bool((kept | hidden).all()):
            return None
        matrix = kept
    if not bool(matrix.any(dim=-1).all()):
        return None
    high = int(matrix[0].nonzero()[-1])
    last = matrix[-1].nonzero()
    low = int(last[0]) - (s - 1)
    full = torch.ones((), dtype=torch.bool, device="cpu").expand(s, t)
    if bool(matrix.all()):
        return t, None
    bounded = low > 1 - s
    expected = full.tril(high) if not bounded else full.tril(high).triu(low)
    return ((high, low if bounded else None)) if torch.equal(matrix, expected) else None


def _lower_bound(context: Context, s: int, t: int, low: int) -> Any:
    """Where query i may look: from key i + low on."""
    return reshaped(ops.triu(filled(context, True, (s, t), "bool"), diagonal=low), (1, 1, s, t))


def _in_steps(
    context: Context, q: Any, k: Any, v: Any, mask: Any, dropout_p: float, causal: bool | None, offset: int,
    scale: float | None,
) -> Any:  # fmt: skip
    """Scores, softmax and products one by one, for what the fused operator lacks: numbers added, dropout."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (ops.repeat_interleave(x, groups, 1) for x in (k, v))
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = ops.matmul(ops.scale(q, factor=factor), ops.transpose(k))
    if mask is not None and mask.dtype != "bool":
        scores = ops.add(scores, as_type(mask, scores.dtype))
    elif mask is not None:
        scores = ops.masked_fill(scores, ops.logical_not(mask), value=-math.inf)
    if causal:
        seen = ops.tril(filled(context, True, scores.shape[-2:], "bool"), diagonal=offset)
        scores = ops.masked_fill(scores, ops.logical_not(seen), value=-math.inf)
    weights = ops.softmax(scores, axis=-1)
    weights = dropout(context, weights, dropout_p, True) if dropout_p else weights
    return ops.matmul(weights, broadcast(v, v.shape))
