"""Attention blocks; all but `MultiheadAttention` are laid out so that heads split over ranks without communication."""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.nn.linear import Linear
from sbp.nn.module import Module, Parameter
from sbp.ops import library as ops


def split_heads(x: Any, heads: int) -> Any:
    """(batch, sequence, heads * size) -> (batch, heads, sequence, size)."""
    batch, sequence, width = x.shape
    return ops.permute(ops.reshape(x, shape=(batch, sequence, heads, width // heads)), order=(0, 2, 1, 3))


def merge_heads(x: Any) -> Any:
    """(batch, heads, sequence, size) -> (batch, sequence, heads * size)."""
    batch, heads, sequence, size = x.shape
    return ops.reshape(ops.permute(x, order=(0, 2, 1, 3)), shape=(batch, sequence, heads * size))


class SelfAttention(Module):
    """Multi-head self-attention with one fused projection: x (batch, sequence, embed_dim), same shape out.

    The rows of `qkv.weight` are ordered (heads, 3, head size), not (3, heads, head size) as in the published GPT-2
    checkpoints: a contiguous chunk of them is whole heads with their queries, keys and values, so splitting the rows
    splits the heads (as Megatron-LM orders them; Shoeybi et al. 2019, arXiv:1909.08053).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        causal: bool = False,
        initial: Initial | None = None,
        initial_out: Initial | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise GraphError(f"SelfAttention: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}.")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = Linear(embed_dim, 3 * embed_dim, bias=bias, initial=initial)
        self.proj = Linear(embed_dim, embed_dim, bias=bias, initial=initial_out or initial)

    def forward(self, x: Any, mask: Any = None) -> Any:
        """`mask`, broadcastable to (batch, heads, sequence, sequence), is true where a query may look."""
        size = self.embed_dim // self.num_heads
        q, k, v = ops.split(split_heads(self.qkv(x), self.num_heads), sizes=(size, size, size), axis=3)
        if mask is None:
            out, _ = ops.attention(q, k, v, causal=self.causal)
        else:
            out, _ = ops.masked_attention(q, k, v, mask, causal=self.causal)
        return self.proj(merge_heads(out))


class GroupedQueryAttention(Module):
    """Causal self-attention with rotary positions and fewer key/value heads than query heads, as in Llama.

    x (batch, sequence, hidden_size), same shape out. Query head i reads key head i // (num_heads / num_kv_heads).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        theta: float = 10000.0,
        initial: Initial | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % num_kv_heads:
            raise GraphError(
                f"GroupedQueryAttention: hidden_size {hidden_size} must be a multiple of num_heads {num_heads}, "
                f"and that one of num_kv_heads {num_kv_heads}."
            )
        size = hidden_size // num_heads
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.theta = theta
        self.q_proj = Linear(hidden_size, num_heads * size, bias=False, initial=initial)
        self.k_proj = Linear(hidden_size, num_kv_heads * size, bias=False, initial=initial)
        self.v_proj = Linear(hidden_size, num_kv_heads * size, bias=False, initial=initial)
        self.o_proj = Linear(num_heads * size, hidden_size, bias=False, initial=initial)

    def forward(self, x: Any) -> Any:
        """x (batch, sequence, hidden_size)."""
        q = ops.rotary(split_heads(self.q_proj(x), self.num_heads), theta=self.theta)
        k = ops.rotary(split_heads(self.k_proj(x), self.num_kv_heads), theta=self.theta)
        v = split_heads(self.v_proj(x), self.num_kv_heads)
        out, _ = ops.attention(q, k, v, causal=True)
        return self.o_proj(merge_heads(out))


class MultiheadAttention(Module):
    """Attention of queries to keys and values, with PyTorch's parameters: `in_proj_weight` has rows (3, heads, size).

    That order is what checkpoints hold, but a chunk of its rows is not whole heads; to split heads without
    communication, use `SelfAttention`. Dropout of the attention weights is not supported.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, batch_first: bool = False
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise GraphError(f"MultiheadAttention: embed_dim {embed_dim} is not a multiple of num_heads {num_heads}.")
        if dropout:
            raise GraphError(
                "MultiheadAttention: the fused attention drops nothing; use dropout=0 and nn.Dropout after it."
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.batch_first = batch_first
        bound = math.sqrt(6 / (4 * embed_dim))
        self.in_proj_weight = Parameter((3 * embed_dim, embed_dim), initial=Initial("uniform", (-bound, bound)))
        self.has_bias = bias
        if bias:
            self.in_proj_bias = Parameter((3 * embed_dim,), initial=Initial("zeros", ()))
        self.out_proj = Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = False,
        attn_mask: Any = None,
        is_causal: bool = False,
    ) -> tuple[Any, None]:
        """query (batch, s, embed_dim), key and value (batch, t, embed_dim), or with s and t first.

        Masks are boolean and true where a query may *not* look, as PyTorch's: `key_padding_mask` (batch, t),
        `attn_mask` (s, t). Returns the output and None, as attention weights are never stored.
        """
        if need_weights:
            raise GraphError(
                "MultiheadAttention: the fused attention does not store its weights; use need_weights=False."
            )
        inputs = (query, key, value)
        if not self.batch_first:
            inputs = tuple(ops.transpose(x, first=0, second=1) for x in inputs)
        sizes = (self.embed_dim,) * 3
        weights = ops.split(self.in_proj_weight, sizes=sizes, axis=0)
        projected = [ops.linear(x, weight) for x, weight in zip(inputs, weights)]
        if self.has_bias:
            biases = ops.split(self.in_proj_bias, sizes=sizes, axis=0)
            projected = [ops.add(x, bias) for x, bias in zip(projected, biases)]
        q, k, v = (split_heads(x, self.num_heads) for x in projected)
        mask = _allowed(key_padding_mask, attn_mask)
        if mask is None:
            out, _ = ops.attention(q, k, v, causal=is_causal)
        else:
            out, _ = ops.masked_attention(q, k, v, mask, causal=is_causal)
        out = self.out_proj(merge_heads(out))
        return (out if self.batch_first else ops.transpose(out, first=0, second=1)), None


def _allowed(padding: Any, forbidden: Any) -> Any:
    """Where queries may look, broadcastable to (batch, heads, s, t), from PyTorch's two masks; None for everywhere."""
    parts = []
    if padding is not None:
        parts.append(ops.reshape(padding, shape=(padding.shape[0], 1, 1, padding.shape[1])))
    if forbidden is not None:
        parts.append(ops.reshape(forbidden, shape=(1, 1, *forbidden.shape)))
    if not parts:
        return None
    return ops.logical_not(parts[0] if len(parts) == 1 else ops.logical_or(*parts))
