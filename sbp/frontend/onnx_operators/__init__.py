"""ONNX's operators in operators of `sbp`, a module per family; importing this package fills the table."""

from sbp.frontend.onnx_operators import (
    attention,
    convolution,
    indexing,
    matmul,
    normalization,
    pointwise,
    reduction,
    views,
)
from sbp.frontend.onnx_operators.node import Node, element_type, onnx_translation

__all__ = [
    "Node",
    "attention",
    "convolution",
    "element_type",
    "indexing",
    "matmul",
    "normalization",
    "onnx_translation",
    "pointwise",
    "reduction",
    "views",
]
