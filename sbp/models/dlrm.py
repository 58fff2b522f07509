"""DLRM: a recommender with large embedding tables (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sbp import nn
from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.models.shared import Inputs, Sizes
from sbp.operator import TensorType
from sbp.ops import library as ops

CRITEO_TERABYTE = (
    39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10,
    2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36,
)  # fmt: skip
"""Rows per table of the Criteo Terabyte data with at most 40 million indices: MLPerf Training's DLRM, v0.7 to v2.1."""

CRITEO_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Rows per table of the Criteo Kaggle data, as in the paper's published code."""


@dataclass(frozen=True)
class DLRMConfig(Sizes):
    """Rows per table, width of their rows, and the widths of the two multilayer perceptrons.

    `bottom` starts with the number of dense features and ends with the tables' width; `top` names the widths after the
    interaction and ends with one logit. Every example reads `lookups` rows of every table, which are summed.
    """

    tables: tuple[int, ...] = CRITEO_TERABYTE
    width: int = 128
    bottom: tuple[int, ...] = (13, 512, 256, 128)
    top: tuple[int, ...] = (1024, 1024, 512, 256, 1)
    lookups: int = 1

    def scaled(self) -> DLRMConfig:
        """The same tables and layers with tiny sizes, for verification; the same node names."""
        tables = tuple(min(rows, 3 + index % 5) for index, rows in enumerate(self.tables))
        bottom = (5, *(8 + index for index in range(len(self.bottom) - 2)), 8)
        return replace(self, tables=tables, width=8, bottom=bottom, top=(*(9,) * (len(self.top) - 1), self.top[-1]))

    def build(self) -> DLRM:
        """The module."""
        return DLRM(self)


def _perceptron(widths: tuple[int, ...], last_is_linear: bool) -> nn.Sequential:
    parts: list[nn.Module] = []
    for index, (before, after) in enumerate(zip(widths, widths[1:])):
        parts.append(nn.Linear(before, after))
        if not (last_is_linear and index == len(widths) - 2):
            parts.append(nn.ReLU())
    return nn.Sequential(*parts)


class DLRM(nn.Module):
    """Dense features and one index (or several) per table -> a click's logit (batch,), or the loss with targets."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        if config.bottom[-1] != config.width:
            raise GraphError(
                f"DLRM: the bottom widths must end with the tables' width {config.width}, got {config.bottom}."
            )
        self.config = config
        features = 1 + len(config.tables)
        self.tables = nn.ModuleList(
            nn.Embedding(rows, config.width, initial=Initial("uniform", (-(rows**-0.5), rows**-0.5)))
            for rows in config.tables
        )
        self.bottom = _perceptron(config.bottom, last_is_linear=False)
        interactions = config.width + features * (features - 1) // 2
        self.top = _perceptron((interactions, *config.top), last_is_linear=True)
        self.loss = nn.BCEWithLogitsLoss()

    def example_inputs(self, batch: int, sequence: int | None = None) -> Inputs:
        """dense (batch, features), ids_0, ids_1, ... (batch,) or (batch, lookups), targets (batch,) in [0, 1]."""
        config = self.config
        inputs = {"dense": (TensorType((batch, config.bottom[0]), "f32"), Initial("normal", (0.0, 1.0)))}
        shape = (batch,) if config.lookups == 1 else (batch, config.lookups)
        for index, rows in enumerate(config.tables):
            inputs[f"ids_{index}"] = TensorType(shape, "i64"), Initial("integers", (0, rows))
        inputs["targets"] = TensorType((batch,), "f32"), Initial("uniform", (0.0, 1.0))
        return inputs

    def forward(self, dense: Any, targets: Any = None, **ids: Any) -> Any:
        """The mean loss over the batch, or logits without targets."""
        batch, width = dense.shape[0], self.config.width
        x = self.bottom(dense)
        rows = [ops.reshape(x, shape=(batch, 1, width))]
        for index, table in enumerate(self.tables):
            found = table(ids[f"ids_{index}"])
            if self.config.lookups > 1:
                found = ops.sum(found, axis=1)
            rows.append(ops.reshape(found, shape=(batch, 1, width)))
        stacked = ops.concat(*rows, axis=1)
        products = ops.matmul(stacked, ops.transpose(stacked, first=1, second=2))
        logits = self.top(ops.concat(x, ops.lower_triangle(products), axis=1))
        logits = ops.reshape(logits, shape=(batch,))
        return logits if targets is None else self.loss(logits, targets)
