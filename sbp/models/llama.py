"""Llama 3: RMSNorm, rotary positions, SwiGLU, grouped-query attention (Llama team 2024, arXiv:2407.21783)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.models.shared import NORMAL, Inputs, Sizes, scaled_head_size, token_inputs
from sbp.ops import library as ops


@dataclass(frozen=True)
class LlamaConfig(Sizes):
    """Sizes of a Llama; the output head has a weight of its own."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    positions: int = 8192
    theta: float = 500000.0
    eps: float = 1e-5

    @property
    def default_sequence(self) -> int:
        """Sequence length when none is asked for."""
        return self.positions

    def scaled(self) -> LlamaConfig:
        """The same layers and heads with tiny widths, for verification; its graph has the same node names."""
        hidden = self.heads * scaled_head_size(self.heads)
        return replace(self, hidden=hidden, intermediate=hidden, vocabulary=67, positions=min(self.positions, 32))

    def build(self) -> Llama:
        """The module."""
        return Llama(self)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, initial=NORMAL)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, initial=NORMAL)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, initial=NORMAL)

    def forward(self, x: Any) -> Any:
        """x (..., hidden), same shape out."""
        return self.down_proj(ops.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.self_attn = nn.GroupedQueryAttention(
            config.hidden, config.heads, config.kv_heads, theta=config.theta, initial=NORMAL
        )
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, config.eps)
        self.mlp = SwiGLU(config.hidden, config.intermediate)

    def forward(self, x: Any) -> Any:
        """(batch, sequence, hidden), same shape out."""
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """tokens (batch, sequence) -> logits (batch, sequence, vocabulary), or the loss when targets are given."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden, initial=NORMAL)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False, initial=NORMAL)
        self.loss = nn.CrossEntropyLoss(ignore_index=None)

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """tokens and targets, (batch, sequence) each."""
        return token_inputs(batch, sequence or self.config.default_sequence, self.config.vocabulary)

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        """The mean loss over all tokens, or logits without targets."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        return logits if targets is None else self.loss(logits, targets)
