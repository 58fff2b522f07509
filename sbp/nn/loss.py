"""Losses: scalars in float32 at least, whatever precision the rest computes in."""

from __future__ import annotations

from typing import Any

from sbp.nn.module import Module
from sbp.ops import library as ops


def in_full_precision(x: Any) -> Any:
    """x in float32 at least; the mixed-precision pass keeps this cast, and what follows it wide."""
    return x if x.dtype == "f64" else ops.cast(x, dtype="f32")


class CrossEntropyLoss(Module):
    """Mean of -log softmax(logits)[target] over the targets that are not `ignore_index` (None: all).

    logits (..., classes), targets (...) integers. (PyTorch's classes are in dimension 1; here, last.) Logits may be
    narrow: their exponentials are summed in float32 without a wide copy of them.
    """

    def __init__(self, ignore_index: int | None = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, logits: Any, targets: Any) -> Any:
        """Scalar."""
        return ops.cross_entropy(logits, targets, ignore_index=self.ignore_index)


class MSELoss(Module):
    """Mean squared difference."""

    def forward(self, prediction: Any, target: Any) -> Any:
        """Scalar."""
        return ops.mse_loss(in_full_precision(prediction), in_full_precision(target))


class BCEWithLogitsLoss(Module):
    """Mean binary cross-entropy of sigmoid(logits) against targets in [0, 1]."""

    def forward(self, logits: Any, targets: Any) -> Any:
        """Scalar."""
        return ops.binary_cross_entropy_with_logits(in_full_precision(logits), in_full_precision(targets))
