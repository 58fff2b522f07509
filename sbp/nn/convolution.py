"""Convolution and pooling over images (batch, channels, height, width)."""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.nn.module import Module, Parameter
from sbp.ops import library as ops

Pair = int | tuple[int, int]


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


class Conv2d(Module):
    """Convolution: x (batch, in_channels, height, width); weight (out_channels, in_channels / groups, kh, kw)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair = 0,
        dilation: Pair = 1,
        groups: int = 1,
        bias: bool = True,
        dtype: str = "f32",
        initial: Initial | None = None,
    ) -> None:
        super().__init__()
        if in_channels % groups or out_channels % groups:
            raise GraphError(
                f"Conv2d: in_channels {in_channels} and out_channels {out_channels} must be multiples of "
                f"groups {groups}."
            )
        self.stride, self.padding, self.dilation = _pair(stride), _pair(padding), _pair(dilation)
        self.groups = groups
        kernel = _pair(kernel_size)
        bound = 1 / math.sqrt(in_channels // groups * math.prod(kernel))
        uniform = Initial("uniform", (-bound, bound))
        self.weight = Parameter((out_channels, in_channels // groups, *kernel), dtype, initial or uniform)
        self.has_bias = bias
        if bias:
            self.bias = Parameter((out_channels,), dtype, Initial("zeros", ()) if initial else uniform)

    def forward(self, x: Any) -> Any:
        """x (batch, in_channels, h, w) -> (batch, out_channels, h', w')."""
        y = ops.conv2d(
            x, self.weight, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups
        )
        if self.has_bias:
            y = ops.add(y, ops.reshape(self.bias, shape=(self.bias.shape[0], 1, 1)))
        return y


class MaxPool2d(Module):
    """Largest element of each window; the stride is kernel_size unless given."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        self.stride = _pair(kernel_size if stride is None else stride)
        self.padding = _pair(padding)

    def forward(self, x: Any) -> Any:
        """x (batch, channels, h, w) -> (batch, channels, h', w')."""
        return ops.max_pool2d(x, kernel_size=self.kernel_size, stride=self.stride, padding=self.padding)


class AvgPool2d(Module):
    """Mean of each window, padding counted; the stride is kernel_size unless given."""

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        self.stride = _pair(kernel_size if stride is None else stride)
        self.padding = _pair(padding)

    def forward(self, x: Any) -> Any:
        """x (batch, channels, h, w) -> (batch, channels, h', w')."""
        return ops.avg_pool2d(x, kernel_size=self.kernel_size, stride=self.stride, padding=self.padding)


class AdaptiveAvgPool2d(Module):
    """Mean of windows that give an output of a fixed size; the input's sizes must be multiples of it."""

    def __init__(self, output_size: Pair) -> None:
        super().__init__()
        self.output_size = _pair(output_size)

    def forward(self, x: Any) -> Any:
        """x (batch, channels, h, w) -> (batch, channels, *output_size)."""
        return ops.adaptive_avg_pool2d(x, self.output_size)
