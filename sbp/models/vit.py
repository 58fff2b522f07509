"""Vision Transformer: an image as a sequence of patches (Dosovitskiy et al. 2020, arXiv:2010.11929)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.models.shared import NORMAL, FeedForward, Inputs, Sizes, image_inputs, scaled_head_size
from sbp.nn.module import Parameter
from sbp.ops import library as ops


@dataclass(frozen=True)
class ViTConfig(Sizes):
    """Sizes of a ViT; `image` and `patch` are edge lengths in pixels."""

    layers: int = 24
    heads: int = 16
    hidden: int = 1024
    intermediate: int = 4096
    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    dropout: float = 0.0
    eps: float = 1e-6

    @property
    def patches(self) -> int:
        """Patches per image."""
        return (self.image // self.patch) ** 2

    def scaled(self) -> ViTConfig:
        """The same layers and heads with tiny widths and images, for verification; the same node names."""
        hidden = self.heads * scaled_head_size(self.heads)
        return replace(self, hidden=hidden, intermediate=2 * hidden, image=8, patch=4, classes=11)

    def build(self) -> ViT:
        """The module."""
        return ViT(self)


class EncoderBlock(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden, config.eps)
        self.attn = nn.SelfAttention(config.hidden, config.heads, initial=NORMAL)
        self.ln_2 = nn.LayerNorm(config.hidden, config.eps)
        self.mlp = FeedForward(config.hidden, config.intermediate)
        self.drop_1 = nn.Dropout(config.dropout)
        self.drop_2 = nn.Dropout(config.dropout)

    def forward(self, x: Any) -> Any:
        """(batch, 1 + patches, hidden), same shape out."""
        x = x + self.drop_1(self.attn(self.ln_1(x)))
        return x + self.drop_2(self.mlp(self.ln_2(x)))


class ViT(nn.Module):
    """images (batch, channels, image, image) -> logits (batch, classes), or the loss when targets are given."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if config.image % config.patch:
            raise GraphError(
                f"ViT: an image of {config.image} pixels has no whole number of patches of {config.patch}."
            )
        self.config = config
        fan_in = config.channels * config.patch**2
        self.conv_proj = nn.Conv2d(
            config.channels,
            config.hidden,
            kernel_size=config.patch,
            stride=config.patch,
            initial=Initial("normal", (0.0, math.sqrt(1 / fan_in))),
        )
        self.class_token = Parameter((1, 1, config.hidden), initial=Initial("zeros", ()))
        self.pos_embedding = Parameter((1, 1 + config.patches, config.hidden), initial=NORMAL)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(EncoderBlock(config) for _ in range(config.layers))
        self.ln = nn.LayerNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.classes, initial=NORMAL)
        self.loss = nn.CrossEntropyLoss(ignore_index=None)

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """images (batch, channels, image, image) and targets (batch,); `sequence` has no meaning here."""
        return image_inputs(batch, self.config.channels, self.config.image, self.config.classes)

    def forward(self, images: Any, targets: Any = None) -> Any:
        """The mean loss over the batch, or logits without targets."""
        batch, hidden = images.shape[0], self.config.hidden
        patches = ops.reshape(self.conv_proj(images), shape=(batch, hidden, self.config.patches))
        first = ops.expand(self.class_token, shape=(batch, 1, hidden))
        x = ops.concat(first, ops.transpose(patches, first=1, second=2), axis=1)
        x = self.dropout(x + self.pos_embedding)
        for layer in self.layers:
            x = layer(x)
        x = ops.slice(self.ln(x), starts=(0, 0, 0), stops=(batch, 1, hidden))
        logits = self.head(ops.reshape(x, shape=(batch, hidden)))
        return logits if targets is None else self.loss(logits, targets)
