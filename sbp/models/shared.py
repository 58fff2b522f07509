"""What several model families share: the feed-forward part, example inputs, sizes of scaled-down configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

from sbp import nn
from sbp.errors import GraphError
from sbp.fields import is_finite_number
from sbp.graph import Initial
from sbp.operator import TensorType

Inputs = dict[str, tuple[TensorType, Initial]]

NORMAL = Initial("normal", (0.0, 0.02))
"""The start of most transformer weights."""


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_KINDS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    int: (_counts, "a whole number of at least 1"),
    int | None: (lambda value: value is None or _counts(value), "a whole number of at least 1"),
    tuple[int, ...]: (
        lambda value: isinstance(value, (tuple, list)) and bool(value) and all(map(_counts, value)),
        "whole numbers of at least 1, such as 8x16x4 (8x is one of them)",
    ),
    float: (lambda value: is_finite_number(value) and value >= 0, "a finite number of at least 0"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (lambda value: isinstance(value, str), "a text"),
}
"""Annotation of a configuration's field -> what its values must be, and how that is said."""


class Sizes:
    """Base of the configurations: every field is what its annotation says, and numbers of things are at least 1.

    Raises
    ------
    GraphError
        Names the configuration and the field.
    """

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            fits, expected = _KINDS[hint]
            if not fits(getattr(self, name)):
                raise GraphError(f"{type(self).__name__}: {name} must be {expected}, got {getattr(self, name)!r}.")


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
