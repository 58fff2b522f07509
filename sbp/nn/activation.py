"""Elementwise activations, softmax, dropout."""

from __future__ import annotations

import zlib
from typing import Any

from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.nn.module import Module
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder, Symbol, current_builder

RANDOM_STEP = "random.step"
"""Name of the state value that makes the dropout masks of every step different."""


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

    The mask is a function of the seed, of the step and of the place in the global tensor, so it does not depend on the
    layout. The step is a buffer, `random.step`, that all dropouts of a graph share. The seed is made from the module's
    path unless given.
    """

    def __init__(self, p: float = 0.5, seed: int | None = None) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise GraphError(f"Dropout: p must be at least 0 and below 1, got {p}.")
        self.p = p
        self.seed = seed

    def forward(self, x: Any) -> Any:
        """Same shape."""
        if not (self.training and self.p):
            return x
        builder = current_builder()
        seed = zlib.crc32(builder.module.encode()) if self.seed is None else self.seed
        return ops.dropout(x, random_step(builder), rate=self.p, seed=seed)


def random_step(builder: GraphBuilder) -> Symbol:
    """The count of steps that random numbers depend on; declared at its first use, it grows by one every step."""
    known = builder.symbols.get(RANDOM_STEP)
    if known is not None:
        return known
    step = builder.source(RANDOM_STEP, TensorType((), "i64"), "buffer", Initial("zeros", ()))
    with builder.at(builder.phase):
        builder.update(step, ops.shift(step, amount=1))
    return step
