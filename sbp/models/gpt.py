"""GPT-2 and GPT-3: decoder-only transformers (Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.models.shared import NORMAL, FeedForward, Inputs, Sizes, scaled_head_size, token_inputs
from sbp.ops import library as ops


@dataclass(frozen=True)
class GPTConfig(Sizes):
    """Sizes of a GPT. `activation` is GELU's `approximate`; the output head shares the token embedding's weight."""

    layers: int = 12
    heads: int = 12
    hidden: int = 768
    vocabulary: int = 50257
    positions: int = 1024
    intermediate: int | None = None
    activation: str = "tanh"
    dropout: float = 0.0
    eps: float = 1e-5

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward layer, 4 times hidden unless given."""
        return 4 * self.hidden if self.intermediate is None else self.intermediate

    @property
    def default_sequence(self) -> int:
        """Sequence length when none is asked for."""
        return self.positions

    def scaled(self) -> GPTConfig:
        """The same layers and heads with tiny widths, for verification; its graph has the same node names."""
        hidden = self.heads * scaled_head_size(self.heads)
        return replace(self, hidden=hidden, intermediate=2 * hidden, vocabulary=67, positions=min(self.positions, 32))

    def build(self) -> GPT:
        """The module."""
        return GPT(self)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # Layers that end on the residual stream start smaller, by the number of them that add up there.
        residual = Initial("normal", (0.0, 0.02 / math.sqrt(2 * config.layers)))
        self.ln_1 = nn.LayerNorm(config.hidden, config.eps)
        self.attn = nn.SelfAttention(config.hidden, config.heads, causal=True, initial=NORMAL, initial_out=residual)
        self.ln_2 = nn.LayerNorm(config.hidden, config.eps)
        self.mlp = FeedForward(config.hidden, config.feed_forward, config.activation, initial_out=residual)
        self.drop_1 = nn.Dropout(config.dropout)
        self.drop_2 = nn.Dropout(config.dropout)

    def forward(self, x: Any) -> Any:
        """(batch, sequence, hidden), same shape out."""
        x = x + self.drop_1(self.attn(self.ln_1(x)))
        return x + self.drop_2(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """tokens (batch, sequence) -> logits (batch, sequence, vocabulary), or the loss when targets are given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocabulary, config.hidden, initial=NORMAL)
        self.wpe = nn.Embedding(config.positions, config.hidden, initial=Initial("normal", (0.0, 0.01)))
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden, config.eps)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight
        self.loss = nn.CrossEntropyLoss(ignore_index=None)

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """tokens and targets, (batch, sequence) each."""
        return token_inputs(batch, sequence or self.config.default_sequence, self.config.vocabulary)

    def forward(self, tokens: Any, targets: Any = None) -> Any:
        """The mean loss over all tokens, or logits without targets."""
        sequence = tokens.shape[1]
        if sequence > self.config.positions:
            raise GraphError(f"GPT: a sequence of {sequence} is longer than its {self.config.positions} positions.")
        # A slice even of all positions, so that every sequence length gives the same nodes.
        position = ops.slice(self.wpe.weight, starts=(0, 0), stops=(sequence, self.config.hidden))
        x = self.drop(self.wte(tokens) + position)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else self.loss(logits, targets)
