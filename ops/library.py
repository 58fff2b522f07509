"""Every operator family; importing this module registers all operators and gives them as its attributes."""

from sbp.ops.matmul import matmul

__all__ = ["matmul"]
