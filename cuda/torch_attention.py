"""Attention on torch tensors: PyTorch's flash kernels where they compute the same thing, the formulas everywhere else.

The operators keep the logarithm of the sum of exponentials between forward and backward, and so do the flash kernels.
They start causal masks at the first query and key, so shards in the middle of a split sequence use the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbp.cuda.torch_types import widen

aten = torch.ops.aten


def _scale(scale: float | None, d: int) -> float:
    return 1.0 / math.sqrt(d) if scale is None else scale


def flash_applies(q: Tensor, k: Tensor, v: Tensor, causal: bool, offset: int) -> bool:
    """Whether PyTorch has a flash kernel for these tensors that masks as `sbp.ops.attention` does."""
    d, e = q.shape[-1], v.shape[-1]
    if d != e or not (q.numel() and k.numel()) or (causal and (offset or q.shape[2] != k.shape[2])):
        return False
    if q.device.type == "cpu":
        return q.dtype in (torch.float32, torch.float64, torch.bfloat16)
    half = q.dtype in (torch.float16, torch.bfloat16)
    return q.device.type in ("cuda", "meta") and half and d % 8 == 0 and d <= 256


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values of fewer heads, one per query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: Tensor, kv: int) -> Tensor:
    """The gradient of `_repeated`."""
    b, heads, t, d = x.shape
    return x if heads == kv else x.reshape(b, kv, heads // kv, t, d).sum(dim=2)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output (b, h, s, d) and logarithm of the sum of exponentials (b, h, s), float32 at least."""
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    if q.device.type == "cpu":
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, logsumexp
    out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out, logsumexp


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `flash` for q, k and v."""
    kv, heads = k.shape[1], q.shape[1]
    k, v = _repeated(k, heads), _repeated(v, heads)
    if q.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, logsumexp, 0.0, causal, scale=scale
        )
    else:
        # Without dropout the random state is not looked at, and equal lengths need no cumulated ones.
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logsumexp.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused,
            scale=scale,
        )  # fmt: skip
    return dq, _summed(dk, kv), _summed(dv, kv)


# -- the formulas ------------------------------------------------------------------------------------------------------


def _grouped(x: Tensor, kv: int) -> Tensor:
    b, heads, s, d = x.shape
    return x.reshape(b, kv, (heads // kv if kv else 0) * s, d)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, offset: int) -> Tensor:
    """Scaled scores (b, kv, g, s, t), minus infinity where a query may not look."""
    b, heads, s, _ = q.shape
    kv, t = k.shape[1], k.shape[2]
    group = heads // kv if kv else 0
    scores = (torch.matmul(_grouped(q, kv), k.transpose(-1, -2)) * scale).reshape(b, kv, group, s, t)
    if mask is not None:
        shape = (kv, group) if mask.shape[1] != 1 else (1, 1)
        scores = scores.masked_fill(~mask.reshape(mask.shape[0], *shape, *mask.shape[2:]), -math.inf)
    if causal:
        keys, queries = torch.arange(t, device=q.device), torch.arange(s, device=q.device)
        scores = scores.masked_fill(keys[None, :] > queries[:, None] + offset, -math.inf)
    return scores


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, offset: int
) -> tuple[Tensor, Tensor]:
    factor, dtype = _scale(scale, q.shape[-1]), q.dtype
    if mask is None and flash_applies(q, k, v, causal, offset):
        return flash(q, k, v, causal, factor)
    q, k, v = widen(q), widen(k), widen(v)
    b, heads, s, _ = q.shape
    kv, t, e = k.shape[1], k.shape[2], v.shape[3]
    if t == 0 or not q.numel():
        return q.new_zeros((b, heads, s, e), dtype=dtype), q.new_full((b, heads, s), -math.inf)
    scores = _scores(q, k, mask, causal, factor, offset)
    logsumexp = torch.logsumexp(scores, dim=-1)
    # A query that may look nowhere: exp(-inf - 0) is 0.
    weights = torch.exp(scores - torch.where(torch.isfinite(logsumexp), logsumexp, 0)[..., None])
    out = torch.matmul(weights.reshape(b, kv, heads // kv * s, t), v)
    return out.reshape(b, heads, s, e).to(dtype), logsumexp.reshape(b, heads, s)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    causal: bool, scale: float | None, offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    factor, dtype = _scale(scale, q.shape[-1]), q.dtype
    if mask is None and flash_applies(q, k, v, causal, offset):
        return flash_backward(grad, q, k, v, out, logsumexp, causal, factor)
    grad, q, k, v, out = widen(grad), widen(q), widen(k), widen(v), widen(out)
    b, heads, s, _ = q.shape
    kv, t = k.shape[1], k.shape[2]
    group = heads // kv if kv else 0
    scores = _scores(q, k, mask, causal, factor, offset)
    shift = logsumexp.reshape(b, kv, group, s, 1)
    weights = torch.exp(scores - torch.where(torch.isfinite(shift), shift, 0)).reshape(b, kv, group * s, t)
    grad_grouped = _grouped(grad, kv)
    dv = torch.matmul(weights.transpose(-1, -2), grad_grouped)
    along = _grouped((grad * out).sum(dim=-1, keepdim=True), kv)
    dscores = weights * (torch.matmul(grad_grouped, v.transpose(-1, -2)) - along) * factor
    dq = torch.matmul(dscores, k).reshape(q.shape)
    dk = torch.matmul(dscores.transpose(-1, -2), _grouped(q, kv))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def attention(xp, q, k, v, *, causal=False, scale=None, offset=0):
    return _forward(q, k, v, None, causal, scale, offset)


def masked_attention(xp, q, k, v, mask, *, causal=False, scale=None, offset=0):
    return _forward(q, k, v, mask, causal, scale, offset)


def attention_backward(xp, grad, q, k, v, out, logsumexp, *, causal=False, scale=None, offset=0):
    return _backward(grad, q, k, v, out, logsumexp, None, causal, scale, offset)


def masked_attention_backward(xp, grad, q, k, v, out, logsumexp, mask, *, causal=False, scale=None, offset=0):
    return _backward(grad, q, k, v, out, logsumexp, mask, causal, scale, offset)


def attention_peak(xp, q, k, *mask, causal=False, scale=None, offset=0):
    q, k = widen(q), widen(k)
    if k.shape[2] == 0 or not q.numel():
        return q.new_full(q.shape[:3], -math.inf)
    scores = _scores(q, k, mask[0] if mask else None, causal, _scale(scale, q.shape[-1]), offset)
    return scores.amax(dim=-1).reshape(q.shape[:3])


def _weights(q: Tensor, k: Tensor, peak: Tensor, mask: tuple, causal: bool, scale: float | None, offset: int) -> Tensor:
    """exp(score - peak), (b, kv, g * s, t)."""
    b, heads, s, d = q.shape
    kv, t = k.shape[1], k.shape[2]
    group = heads // kv if kv else 0
    top = peak.reshape(b, kv, group, s, 1)
    scores = _scores(q, k, mask[0] if mask else None, causal, _scale(scale, d), offset)
    return torch.exp(scores - torch.where(torch.isfinite(top), top, 0)).reshape(b, kv, group * s, t)


def attention_sums(xp, q, k, v, peak, *mask, causal=False, scale=None, offset=0):
    q, k, v = widen(q), widen(k), widen(v)
    weights = _weights(q, k, peak, mask, causal, scale, offset)
    return torch.matmul(weights, v).reshape(*q.shape[:3], v.shape[3]), weights.sum(dim=-1).reshape(q.shape[:3])


def attention_sums_backward(xp, weighted, total, q, k, v, peak, *mask, causal=False, scale=None, offset=0):
    types = q.dtype, k.dtype, v.dtype
    weighted, q, k, v = widen(weighted), widen(q), widen(k), widen(v)
    kv = k.shape[1]
    weights = _weights(q, k, peak, mask, causal, scale, offset)
    grouped, sums = _grouped(weighted, kv), _grouped(widen(total)[..., None], kv)
    scores = weights * (torch.matmul(grouped, v.transpose(-1, -2)) + sums) * _scale(scale, q.shape[-1])
    dq = torch.matmul(scores, k).reshape(q.shape)
    dk = torch.matmul(scores.transpose(-1, -2), _grouped(q, kv))
    dv = torch.matmul(weights.transpose(-1, -2), grouped)
    return tuple(one.to(dtype) for one, dtype in zip((dq, dk, dv), types))


KERNELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        attention, masked_attention, attention_backward, masked_attention_backward,
        attention_peak, attention_sums, attention_sums_backward,
    )
}  # fmt: skip
"""Operator name -> kernel."""
