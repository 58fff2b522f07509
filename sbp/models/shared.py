"""What several model families share: the feed-forward part, example inputs, sizes of scaled-down configurations."""

from __future__ import annotations

from typing import Any

from sbp import nn
from sbp.graph import Initial
from sbp.operator import TensorType

Inputs = dict[str, tuple[TensorType, Initial]]

NORMAL = Initial("normal", (0.0, 0.02))
"""The start of most transformer weights."""


class FeedForward(nn.Module):
    """Two linear layers with GELU between: x (..., hidden), same shape out."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        approximate: str = "none",
        initial: Initial = NORMAL,
        initial_out: Initial | None = None,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(hidden, intermediate, initial=initial)
        self.act = nn.GELU(approximate)
        self.proj = nn.Linear(intermediate, hidden, initial=initial_out or initial)

    def forward(self, x: Any) -> Any:
        """Same shape."""
        return self.proj(self.act(self.fc(x)))


def token_inputs(batch: int, sequence: int, vocabulary: int) -> Inputs:
    """Tokens and their targets: integers below the vocabulary, (batch, sequence) each."""
    kind = TensorType((batch, sequence), "i64"), Initial("integers", (0, vocabulary))
    return {"tokens": kind, "targets": kind}


def image_inputs(batch: int, channels: int, size: int, classes: int) -> Inputs:
    """Images (batch, channels, size, size) and one class number each."""
    return {
        "images": (TensorType((batch, channels, size, size), "f32"), Initial("normal", (0.0, 1.0))),
        "targets": (TensorType((batch,), "i64"), Initial("integers", (0, classes))),
    }


def scaled_head_size(heads: int) -> int:
    """Channels per head of a scaled-down model: even, as rotary embedding wants, and smaller where heads are many."""
    return 4 if heads <= 32 else 2
