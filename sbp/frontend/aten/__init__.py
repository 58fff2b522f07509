"""PyTorch's operators in operators of `sbp`, a module per family; importing this package fills the table."""

from sbp.frontend.aten import (
    attention,
    convolution,
    creation,
    indexing,
    loss,
    matmul,
    normalization,
    pointwise,
    random,
    reduction,
    resampling,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "creation",
    "indexing",
    "loss",
    "matmul",
    "normalization",
    "pointwise",
    "random",
    "reduction",
    "resampling",
    "views",
]
