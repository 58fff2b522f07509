"""The default backend: NumPy on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from sbp.cuda.interface import Array, Kernel
from sbp.dtype import numpy_name


class NumpyBackend:
    """NumPy arrays and the operators' own kernels."""

    name = "numpy"
    xp: Any = numpy

    def dtype(self, name: str) -> Any:
        """bf16 is held in float32, as NumPy has none."""
        return numpy.dtype(numpy_name(name))

    def from_host(self, array: numpy.ndarray) -> Array:
        """The array itself."""
        return array

    def to_host(self, array: Array) -> numpy.ndarray:
        """The array itself; NumPy's scalars become arrays of no dimensions."""
        return numpy.asarray(array)

    def kernel(self, name: str, default: Kernel) -> Kernel:
        """The default."""
        return default

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def random(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        """Standard normal numbers."""
        return numpy.random.default_rng(seed).standard_normal(tuple(shape)).astype(self.dtype(dtype))

    def memory(self) -> tuple[int, int]:
        """Not known."""
        return 0, 0
