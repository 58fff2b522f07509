"""BERT: a post-norm encoder trained on masked tokens (Devlin et al. 2018, arXiv:1810.04805)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.models.shared import NORMAL, FeedForward, Inputs, Sizes, scaled_head_size, token_inputs
from sbp.operator import TensorType
from sbp.ops import library as ops

IGNORED = -100
"""Target of a token that was not masked; it has no part in the loss."""


@dataclass(frozen=True)
class BertConfig(Sizes):
    """Sizes of a BERT; `next_sentence` adds the pooled next-sentence loss to the masked-token loss."""

    layers: int = 24
    heads: int = 16
    hidden: int = 1024
    intermediate: int = 4096
    vocabulary: int = 30522
    positions: int = 512
    token_types: int = 2
    next_sentence: bool = False
    dropout: float = 0.0
    eps: float = 1e-12

    @property
    def default_sequence(self) -> int:
        """Sequence length when none is asked for."""
        return self.positions

    def scaled(self) -> BertConfig:
        """The same layers and heads with tiny widths, for verification; its graph has the same node names."""
        hidden = self.heads * scaled_head_size(self.heads)
        return replace(self, hidden=hidden, intermediate=2 * hidden, vocabulary=67, positions=min(self.positions, 32))

    def build(self) -> Bert:
        """The module."""
        return Bert(self)


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings, normalized: (batch, sequence) -> (batch, sequence, hidden)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.positions = config.positions
        self.hidden = config.hidden
        self.word_embeddings = nn.Embedding(config.vocabulary, config.hidden, initial=NORMAL)
        self.position_embeddings = nn.Embedding(config.positions, config.hidden, initial=NORMAL)
        self.token_type_embeddings = nn.Embedding(config.token_types, config.hidden, initial=NORMAL)
        self.LayerNorm = nn.LayerNorm(config.hidden, config.eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Any, token_types: Any) -> Any:
        """tokens, token_types (batch, sequence)."""
        sequence = tokens.shape[1]
        if sequence > self.positions:
            raise GraphError(f"BERT: a sequence of {sequence} is longer than its {self.positions} positions.")
        # A slice even of all positions, so that every sequence length gives the same nodes.
        position = ops.slice(self.position_embeddings.weight, starts=(0, 0), stops=(sequence, self.hidden))
        x = self.word_embeddings(tokens) + self.token_type_embeddings(token_types) + position
        return self.dropout(self.LayerNorm(x))


class EncoderLayer(nn.Module):
    """One post-norm transformer layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attn = nn.SelfAttention(config.hidden, config.heads, initial=NORMAL)
        self.ln_1 = nn.LayerNorm(config.hidden, config.eps)
        self.mlp = FeedForward(config.hidden, config.intermediate)
        self.ln_2 = nn.LayerNorm(config.hidden, config.eps)
        self.drop_1 = nn.Dropout(config.dropout)
        self.drop_2 = nn.Dropout(config.dropout)

    def forward(self, x: Any) -> Any:
        """(batch, sequence, hidden), same shape out."""
        x = self.ln_1(x + self.drop_1(self.attn(x)))
        return self.ln_2(x + self.drop_2(self.mlp(x)))


class MaskedTokenHead(nn.Module):
    """Linear, GELU, norm, and the product with the token embedding: x (..., hidden) -> (..., vocabulary)."""

    def __init__(self, config: BertConfig, embedding: nn.Parameter) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden, initial=NORMAL)
        self.act = nn.GELU()
        self.LayerNorm = nn.LayerNorm(config.hidden, config.eps)
        self.decoder = nn.Linear(config.hidden, config.vocabulary, initial=NORMAL)
        self.decoder.weight = embedding

    def forward(self, x: Any) -> Any:
        """Logits."""
        return self.decoder(self.LayerNorm(self.act(self.dense(x))))


class Pooler(nn.Module):
    """The first token's vector through a linear layer and tanh: (batch, sequence, hidden) -> (batch, hidden)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden, initial=NORMAL)

    def forward(self, x: Any) -> Any:
        """(batch, hidden)."""
        batch, _, hidden = x.shape
        first = ops.reshape(ops.slice(x, starts=(0, 0, 0), stops=(batch, 1, hidden)), shape=(batch, hidden))
        return ops.tanh(self.dense(first))


class Bert(nn.Module):
    """tokens and token_types (batch, sequence) -> logits (batch, sequence, vocabulary), or the loss with targets."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layer = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.predictions = MaskedTokenHead(config, self.embeddings.word_embeddings.weight)
        if config.next_sentence:
            self.pooler = Pooler(config)
            self.seq_relationship = nn.Linear(config.hidden, 2, initial=NORMAL)
        self.loss = nn.CrossEntropyLoss(IGNORED)

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """tokens, token_types and targets (batch, sequence); with `next_sentence` sentence_targets (batch,)."""
        config = self.config
        inputs = token_inputs(batch, sequence or config.default_sequence, config.vocabulary)
        inputs["token_types"] = inputs["tokens"][0], Initial("integers", (0, config.token_types))
        if config.next_sentence:
            inputs["sentence_targets"] = TensorType((batch,), "i64"), Initial("integers", (0, 2))
        return inputs

    def forward(self, tokens: Any, token_types: Any, targets: Any = None, sentence_targets: Any = None) -> Any:
        """The mean loss over the masked tokens (targets not -100), plus that of the next-sentence head."""
        x = self.embeddings(tokens, token_types)
        for layer in self.layer:
            x = layer(x)
        logits = self.predictions(x)
        related = self.seq_relationship(self.pooler(x)) if self.config.next_sentence else None
        if targets is None:
            return logits if related is None else (logits, related)
        loss = self.loss(logits, targets)
        return loss if related is None else loss + self.loss(related, sentence_targets)
