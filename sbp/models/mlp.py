"""A multilayer perceptron."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.models.shared import Inputs, Sizes
from sbp.operator import TensorType


@dataclass(frozen=True)
class MLPConfig(Sizes):
    """Widths from input to output; `classification` makes the last ones logits, else they are regressed."""

    widths: tuple[int, ...] = (1024, 4096, 4096, 1000)
    classification: bool = True

    def scaled(self) -> MLPConfig:
        """The same layers with tiny widths, for verification; its graph has the same node names."""
        return replace(self, widths=tuple(8 + index for index in range(len(self.widths))))

    def build(self) -> MLP:
        """The module."""
        return MLP(self)


class MLP(nn.Module):
    """x (batch, widths[0]) -> (batch, widths[-1]) through linear layers with ReLU between, or the loss with targets."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        if len(config.widths) < 2:
            raise GraphError(f"MLP: widths need an input and an output width at least, got {config.widths}.")
        self.config = config
        pairs = list(zip(config.widths, config.widths[1:]))
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairs)
        self.act = nn.ReLU()
        self.loss = nn.CrossEntropyLoss(ignore_index=None) if config.classification else nn.MSELoss()

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """x (batch, widths[0]) and targets: class numbers (batch,), or numbers (batch, widths[-1])."""
        widths = self.config.widths
        normal = Initial("normal", (0.0, 1.0))
        inputs = {"x": (TensorType((batch, widths[0]), "f32"), normal)}
        if self.config.classification:
            inputs["targets"] = TensorType((batch,), "i64"), Initial("integers", (0, widths[-1]))
        else:
            inputs["targets"] = TensorType((batch, widths[-1]), "f32"), normal
        return inputs

    def forward(self, x: Any, targets: Any = None) -> Any:
        """The mean loss over the batch, or the last layer's output without targets."""
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else self.act(x))
        return x if targets is None else self.loss(x, targets)
