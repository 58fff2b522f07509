"""ResNet with bottleneck blocks (He et al. 2015, arXiv:1512.03385), in torchvision's form (v1.5) and names."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.graph import Initial
from sbp.models.shared import Inputs, Sizes, image_inputs

EXPANSION = 4
"""Output channels of a bottleneck block per channel of its 3 x 3 convolution."""


@dataclass(frozen=True)
class ResNetConfig(Sizes):
    """Blocks per stage; `width` channels in the first stage's 3 x 3 convolutions, twice as many in each next one."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    image: int = 224
    channels: int = 3
    classes: int = 1000

    def scaled(self) -> ResNetConfig:
        """The same blocks with few channels and small images, for verification; the same node names."""
        return replace(self, width=4, image=64, classes=11)

    def build(self) -> ResNet:
        """The module."""
        return ResNet(self)


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    normal = Initial("normal", (0.0, math.sqrt(2 / (outputs * kernel**2))))  # He et al. 2015, fan out
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False, initial=normal)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution with batch norm, added to the input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.has_downsample = stride != 1 or inputs != outputs
        if self.has_downsample:
            self.downsample = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Any) -> Any:
        """x (batch, inputs, h, w) -> (batch, 4 width, h / stride, w / stride)."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return self.relu(y + (self.downsample(x) if self.has_downsample else x))


class ResNet(nn.Module):
    """images (batch, channels, image, image) -> logits (batch, classes), or the loss when targets are given."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.conv1 = _convolution(config.channels, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        inputs = width
        for stage, count in enumerate(config.blocks):
            blocks = []
            for index in range(count):
                blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not index else 1))
                inputs = (width << stage) * EXPANSION
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(inputs, config.classes)
        self.loss = nn.CrossEntropyLoss(ignore_index=None)

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """images (batch, channels, image, image) and targets (batch,); `sequence` has no meaning here."""
        return image_inputs(batch, self.config.channels, self.config.image, self.config.classes)

    def forward(self, images: Any, targets: Any = None) -> Any:
        """The mean loss over the batch, or logits without targets."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in range(len(self.config.blocks)):
            x = getattr(self, f"layer{stage + 1}")(x)
        logits = self.fc(self.flatten(self.avgpool(x)))
        return logits if targets is None else self.loss(logits, targets)
