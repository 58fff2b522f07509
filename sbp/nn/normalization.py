"""Normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.nn.module import Module, Parameter
from sbp.ops import library as ops
from sbp.trace import current_builder

_ONES, _ZEROS = Initial("ones", ()), Initial("zeros", ())


def _last_dimension(owner: str, normalized_shape: int | Sequence[int]) -> int:
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if len(sizes) != 1:
        raise GraphError(f"{owner} normalizes over the last dimension; got normalized_shape {sizes}, flatten it first.")
    return sizes[0]


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, dtype: str = "f32") -> None:
        super().__init__()
        size = _last_dimension("LayerNorm", normalized_shape)
        self.eps = eps
        self.weight = Parameter((size,), dtype, _ONES)
        self.bias = Parameter((size,), dtype, _ZEROS)

    def forward(self, x: Any) -> Any:
        """x (..., size), same shape out."""
        return ops.layer_norm(x, self.weight, self.bias, eps=self.eps)


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6, dtype: str = "f32") -> None:
        super().__init__()
        self.eps = eps
        self.weight = Parameter((_last_dimension("RMSNorm", normalized_shape),), dtype, _ONES)

    def forward(self, x: Any) -> Any:
        """x (..., size), same shape out."""
        return ops.rms_norm(x, self.weight, eps=self.eps)


class GroupNorm(Module):
    """Normalization over groups of channels and all places: x (batch, channels, ...)."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5, dtype: str = "f32") -> None:
        super().__init__()
        if num_channels % num_groups:
            raise GraphError(f"GroupNorm: {num_channels} channels cannot be divided into {num_groups} equal groups.")
        self.num_groups = num_groups
        self.eps = eps
        self.weight = Parameter((num_channels,), dtype, _ONES)
        self.bias = Parameter((num_channels,), dtype, _ZEROS)

    def forward(self, x: Any) -> Any:
        """x (batch, channels, ...), same shape out."""
        return ops.group_norm(x, self.weight, self.bias, groups=self.num_groups, eps=self.eps)


class BatchNorm2d(Module):
    """Normalization per channel over batch and places: x (batch, channels, height, width).

    In training mode with the statistics of the whole (global) batch, and the running ones, buffers `running_mean` and
    `running_var`, follow them; in inference mode with the running ones.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, dtype: str = "f32") -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        self.weight = Parameter((num_features,), dtype, _ONES)
        self.bias = Parameter((num_features,), dtype, _ZEROS)
        self.register_buffer("running_mean", Parameter((num_features,), dtype, _ZEROS))
        self.register_buffer("running_var", Parameter((num_features,), dtype, _ONES))

    def forward(self, x: Any) -> Any:
        """x (batch, channels, height, width), same shape out."""
        mean, variance = self.running_mean, self.running_var
        out, next_mean, next_variance = ops.batch_norm(
            x,
            self.weight,
            self.bias,
            mean,
            variance,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )
        if self.training:
            builder = current_builder()
            builder.update(mean, next_mean)
            builder.update(variance, next_variance)
        return out
