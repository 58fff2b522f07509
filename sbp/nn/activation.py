"""Elementwise activations, softmax, dropout."""

from __future__ import annotations

from typing import Any

from sbp.errors import GraphError
from sbp.nn.module import Module
from sbp.ops import library as ops


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Any) -> Any:
        """Elementwise."""
        return ops.relu(x)


class GELU(Module):
    """x times the normal distribution function of x; `approximate="tanh"` is the form GPT-2 was trained with."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise GraphError(f"GELU: approximate is 'none' or 'tanh', got {approximate!r}.")
        self.approximate = approximate

    def forward(self, x: Any) -> Any:
        """Elementwise."""
        return ops.gelu(x, approximate=self.approximate)


class SiLU(Module):
    """x * sigmoid(x)."""

    def forward(self, x: Any) -> Any:
        """Elementwise."""
        return ops.silu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Any) -> Any:
        """Elementwise."""
        return ops.sigmoid(x)


class Tanh(Module):
    """Hyperbolic tangent."""

    def forward(self, x: Any) -> Any:
        """Elementwise."""
        return ops.tanh(x)


class Softmax(Module):
    """Softmax over `dim`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Any) -> Any:
        """Same shape."""
        return ops.softmax(x, axis=self.dim)


class Dropout(Module):
    """Zeroes elements with probability p and scales the others by 1/(1-p); nothing in inference mode or for p = 0.

    The mask is a function of (seed, place in the global tensor), so it does not depend on the layout. The seed is that
    of the module; give every module its own.
    """

    def __init__(self, p: float = 0.5, seed: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise GraphError(f"Dropout: p must be at least 0 and below 1, got {p}.")
        self.p = p
        self.seed = seed

    def forward(self, x: Any) -> Any:
        """Same shape."""
        return ops.dropout(x, rate=self.p, seed=self.seed) if self.training and self.p else x
