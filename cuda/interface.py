"""What a backend must offer: arrays, element types, the way to the host and back, and kernels of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy

from sbp.errors import SbpError

Array = Any
"""An array of the backend's module."""

Kernel = Callable[..., Any]
"""`kernel(xp, *tensors, **attributes)`, as operators define it; returns one array or a tuple of them."""


class BackendError(SbpError):
    """A backend whose library or device is missing, or that cannot hold an element type."""


class Backend(Protocol):
    """Where arrays live and kernels run, for the ranks of this process."""

    @property
    def name(self) -> str:
        """As the command line spells it."""

    @property
    def xp(self) -> Any:
        """The array module, with NumPy's functions."""

    def dtype(self, name: str) -> Any:
        """The module's element type that holds one of `sbp.dtype.SIZES`."""

    def from_host(self, array: numpy.ndarray) -> Array:
        """A NumPy array, on the device."""

    def to_host(self, array: Array) -> numpy.ndarray:
        """An array of the device, as a NumPy array; waits until it is computed."""

    def kernel(self, name: str, default: Kernel) -> Kernel:
        """The kernel to run for an operator: the backend's own where it has one, else `default`."""

    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""

    def random(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        """Standard normal numbers, for measurements; not the same ones on different backends."""

    def memory(self) -> tuple[int, int]:
        """Bytes in use by arrays, and bytes held from the device; (0, 0) where that is not known."""
