"""Torch tensors as a backend: PyTorch's kernels where there are some, else the operators' own on `torch._numpy`.

`torch._numpy` is NumPy's interface over torch tensors, which torch.compile uses to run NumPy programs. What even that
lacks runs on NumPy on the host, in the same memory if the tensors are there; `TorchBackend.on_host` lists it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from sbp.cuda.interface import Array, BackendError, Kernel
from sbp.dtype import numpy_name


class _Arrays:
    """The few functions of an array module that boxing needs, on tensors of one device, and that device."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch, self.device = torch, device

    def full(self, shape: Sequence[int], value: Any, dtype: Any) -> Array:
        return self._torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def full_like(self, array: Array, value: Any) -> Array:
        return self._torch.full_like(array, value)

    def copy(self, array: Array, order: str = "C") -> Array:
        return array.clone(memory_format=self._torch.contiguous_format)


class TorchBackend:
    """Tensors on one device, default the CPU.

    Parameters
    ----------
    device
        As `torch.device` takes it.

    Raises
    ------
    BackendError
        PyTorch is not installed.
    """

    name = "torch"

    def __init__(self, device: Any = "cpu") -> None:
        try:
            import torch
            import torch._numpy
        except ImportError as error:
            raise BackendError(
                f"the torch backend needs PyTorch ({error}); install it with pip install 'sbp[torch]'."
            ) from None
        from sbp.cuda.torch_kernels import KERNELS

        self._torch, self._module, self._kernels = torch, torch._numpy, KERNELS
        self.device = torch.device(device)
        self.xp: Any = _Arrays(torch, self.device)
        self.on_host: set[str] = set()
        """Operators that ran on the host because `torch._numpy` lacks something that their kernel uses."""

    def dtype(self, name: str) -> Any:
        """The NumPy type that holds an element type on the host."""
        return numpy.dtype(numpy_name(name))

    def from_host(self, array: numpy.ndarray) -> Array:
        """A tensor on the device."""
        return self._torch.from_numpy(numpy.ascontiguousarray(array).reshape(array.shape)).to(self.device)

    def to_host(self, array: Array) -> numpy.ndarray:
        """A NumPy array; half precision becomes float32 where NumPy has no such type."""
        return self._wide(array.detach()).cpu().numpy()

    def kernel(self, name: str, default: Kernel) -> Kernel:
        """PyTorch's kernel if there is one, else the operator's own on tensors."""
        found = self._kernels.get(name)
        return self._generic(name, default) if found is None else found

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)

    def random(self, shape: Sequence[int], dtype: str, seed: int) -> Array:
        """Standard normal numbers."""
        from sbp.cuda.torch_types import torch_dtype

        generator = self._torch.Generator(self.device).manual_seed(seed)
        drawn = self._torch.randn(tuple(shape), generator=generator, device=self.device)
        return drawn.to(torch_dtype(dtype))

    def memory(self) -> tuple[int, int]:
        """Of a GPU, what PyTorch has allocated and reserved."""
        if self.device.type != "cuda":
            return 0, 0
        return self._torch.cuda.memory_allocated(self.device), self._torch.cuda.memory_reserved(self.device)

    # -- operators' own kernels --------------------------------------------------------------------------------------

    def _wide(self, tensor: Array) -> Array:
        return tensor.float() if tensor.dtype == self._torch.bfloat16 else tensor

    def _generic(self, name: str, default: Kernel) -> Kernel:
        """The kernel on tensors. Results may be wider than the inputs, as on NumPy; the caller casts them."""

        def run(xp: Any, *tensors: Array, **attributes: Any) -> Any:
            tensors = tuple(map(self._wide, tensors))
            if name not in self.on_host:
                try:
                    with self._torch.device(self.device):
                        arrays = [self._module.ndarray(tensor) for tensor in tensors]
                        return _each(default(self._module, *arrays, **attributes), self._unwrap)
                except Exception:  # what the module lacks shows in many ways; a wrong input fails on the host as well
                    pass
            made = default(numpy, *[tensor.cpu().numpy() for tensor in tensors], **attributes)
            self.on_host.add(name)
            return _each(made, lambda array: self.from_host(numpy.array(array)))

        return run

    def _unwrap(self, array: Any) -> Array:
        return array.tensor if hasattr(array, "tensor") else self._torch.as_tensor(array, device=self.device)


def _each(made: Any, function: Any) -> Any:
    return tuple(map(function, made)) if isinstance(made, (tuple, list)) else function(made)
