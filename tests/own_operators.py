"""The library's own operators: tests, and modules such as the import from PyTorch, register more."""

from sbp.operator import REGISTRY
from sbp.ops import library  # noqa: F401  registers all operators

OWN = tuple(name for name in REGISTRY if REGISTRY[name].kernel.__module__.startswith("sbp.ops."))
