"""Linear maps and table look-ups."""

from __future__ import annotations

import math
from typing import Any

from sbp.graph import Initial
from sbp.nn.module import Module, Parameter
from sbp.ops import library as ops


class Linear(Module):
    """`y = x W^T + b`: x (..., in_features) -> (..., out_features); weight (out_features, in_features).

    `initial` replaces PyTorch's start, uniform in +-1/sqrt(in_features), of the weight; the bias is then zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: str = "f32",
        initial: Initial | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        uniform = Initial("uniform", (-bound, bound))
        self.weight = Parameter((out_features, in_features), dtype, initial or uniform)
        self.has_bias = bias
        if bias:
            self.bias = Parameter((out_features,), dtype, Initial("zeros", ()) if initial else uniform)

    def forward(self, x: Any) -> Any:
        """x (..., in_features) -> (..., out_features)."""
        y = ops.linear(x, self.weight)
        return ops.add(y, self.bias) if self.has_bias else y


class Embedding(Module):
    """Rows of a table: ids (...) integers below num_embeddings -> (..., embedding_dim)."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, dtype: str = "f32", initial: Initial | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.weight = Parameter((num_embeddings, embedding_dim), dtype, initial or Initial("normal", (0.0, 1.0)))

    def forward(self, ids: Any) -> Any:
        """ids (...) -> (..., embedding_dim)."""
        return ops.embedding(self.weight, ids)


class Flatten(Module):
    """Dimensions start_dim to end_dim made one."""

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim = start_dim
        self.end_dim = end_dim

    def forward(self, x: Any) -> Any:
        """x (a, b, c, ...) -> (a, b*c*...)."""
        start, end = self.start_dim % x.ndim, self.end_dim % x.ndim
        middle = math.prod(x.shape[start : end + 1])
        return ops.reshape(x, shape=(*x.shape[:start], middle, *x.shape[end + 1 :]))
