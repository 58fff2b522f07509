"""Self-attention blocks, laid out so that heads can be split over ranks without communication."""

from __future__ import annotations

from typing import Any

from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.nn.linear import Linear
from sbp.nn.module import Module
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
