"""The GPU backend: the operators' own kernels on CuPy arrays, and fused CUDA kernels where there are some."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy

from sbp.cuda.devices import VARIABLE, device_text, visible_devices
from sbp.cuda.fused import OVERRIDES
from sbp.cuda.interface import Array, BackendError, Kernel
from sbp.cuda.nvrtc import KERNELS
from sbp.dtype import numpy_name


class CupyBackend:
    """One GPU, for the ranks of this process: one rank under NCCL, all of them in process.

    Parameters
    ----------
    device
        Number of the GPU; default the environment variable LOCAL_RANK, else 0.
    memory_limit
        Bytes that the memory pool may take from the GPU; default all there is.
    cupy
        The CuPy module, for tests with a stand-in; default the installed one.

    Raises
    ------
    BackendError
        CuPy is missing, or there is no such GPU.
    """

    name = "cupy"

    def __init__(self, device: int | None = None, memory_limit: int | None = None, cupy: Any = None) -> None:
        self.xp: Any = _cupy() if cupy is None else cupy
        if device is None:
            text = os.environ.get("LOCAL_RANK", "0")
            if not text.strip().isdecimal():
                raise BackendError(f"the environment variable LOCAL_RANK is {text!r}; expected a whole number.")
            device = int(text)
        try:
            found = self.xp.cuda.runtime.getDeviceCount()
        except Exception as error:  # CuPy raises its own types, which exist only where CuPy does
            raise BackendError(f"no GPU can be used ({error}); run with the numpy backend.") from None
        if not 0 <= device < found:
            seen = visible_devices()
            shown = "this machine has" if seen is None else f"of this machine {VARIABLE}={','.join(seen)} shows"
            raise BackendError(
                f"there is no GPU {device}; {shown} {found}, numbered from 0. Start as many processes on a machine "
                "as it has GPUs."
            )
        self.device = device
        self.xp.cuda.Device(device).use()
        # Collectives take the current stream, so compute and communication follow one another on this one.
        self._stream = self.xp.cuda.Stream(non_blocking=True)
        self._stream.use()
        self._pool = self.xp.get_default_memory_pool()
        if memory_limit is not None:
            self._pool.set_limit(size=memory_limit)
        self._module: Any = None
        self._functions: dict[str, Any] = {}

    @property
    def place(self) -> str:
        """The GPU by the number that this process has for it, and by the machine's."""
        return device_text(self.device)

    def dtype(self, name: str) -> Any:
        """bf16 is held in float32, as NumPy's names have none."""
        return numpy.dtype(numpy_name(name))

    def from_host(self, array: numpy.ndarray) -> Array:
        """A copy on the GPU."""
        return self.xp.asarray(array)

    def to_host(self, array: Array) -> numpy.ndarray:
        """A copy on the host."""
        return numpy.asarray(self.xp.asnumpy(array))

    def kernel(self, name: str, default: Kernel) -> Kernel:
        """A fused kernel of `sbp.cuda.fused`, else the default."""
        fused = OVERRIDES.get(name)
        return default if fused is None else fused(self._load, default)

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def random(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        """Standard normal numbers, drawn on the GPU."""
        drawn = self.xp.random.RandomState(seed).standard_normal(tuple(shape))
        return self.xp.asarray(drawn, dtype=self.dtype(dtype))

    def memory(self) -> tuple[int, int]:
        """What the memory pool has given out, and what it holds."""
        return self._pool.used_bytes(), self._pool.total_bytes()

    def _load(self, name: str) -> Any:
        """A CUDA kernel by name; the source is compiled when the first one is asked for."""
        function = self._functions.get(name)
        if function is None:
            if self._module is None:
                source = KERNELS.read_text(encoding="utf-8")
                self._module = self.xp.RawModule(code=source, options=("--std=c++17",))
            function = self._functions[name] = self._module.get_function(name)
        return function


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise BackendError(
            f"the cupy backend needs CuPy ({error}); install it with pip install 'sbp[cuda]', "
            "or run with the numpy backend."
        ) from None
    return cupy
