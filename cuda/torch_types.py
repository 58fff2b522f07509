"""Element types of torch tensors."""

from __future__ import annotations

import torch

from sbp.dtype import dtype_named

_TYPES = {
    "f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "i64": torch.int64,
    "i32": torch.int32, "u32": torch.uint32, "i8": torch.int8, "u8": torch.uint8, "bool": torch.bool,
}  # fmt: skip


def torch_dtype(name: object) -> torch.dtype:
    """The torch type of an element type given by any usual name."""
    return _TYPES[dtype_named(name)]


def widen(x: torch.Tensor) -> torch.Tensor:
    """The tensor in at least 32-bit floating point: sums, exponentials and means lose too much in 16 bits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
