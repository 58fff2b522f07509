"""Time of one kernel on one device: matrix products by tiles and waves, everything else by bytes, and a launch.

A matrix product is cut into tiles of the output, one per multiprocessor at a time; the last wave of tiles leaves
multiprocessors idle (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization). Libraries
soften this by splitting the long dimension or balancing the last wave (stream-K, Osama et al. 2023), hence
`KernelConstants.last_wave`. Sizes whose rows do not start at multiples of 16 bytes load badly. Attention whose scores
are stored is products and passes over the scores; fused attention (Dao et al. 2022, arXiv:2205.14135) is FLOP at a
ceiling of its own.

The constants of this file are the same for all devices and models; `benchmarks/published_runs.py --fit` says where
they come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sbp.dtype import SIZES
from sbp.planner.cluster import Device

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 128, 0.75), (64, 64, 0.55))
"""Rows and columns of the output that one multiprocessor computes at a time, and the part of the ceiling reached then:
a small tile reads more per FLOP (Kerr et al., "CUTLASS", 2017)."""

ALIGNMENT = 16
"""Bytes; rows of 16-bit and smaller elements must start at multiples of them for the matrix units."""


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """What is alike on all devices.

    Parameters
    ----------
    last_wave
        A wave that fills a part f of the multiprocessors takes f**last_wave of a full one.
    score_products
        Part of the peak that the products of stored attention scores reach, whose matrices are small and strided.
    score_passes
        Part of the memory bandwidth that softmax and dropout over stored scores reach.
    unaligned
        Part of the ceiling that products of unaligned sizes reach: narrower loads (padding GPT-2's vocabulary of 50257
        to 50304 makes its head about twice as fast).
    unaligned_scores
        Part of the peak without matrix units that products with stored scores reach where they are unaligned.
    """

    last_wave: float = 0.2
    score_products: float = 0.49
    score_passes: float = 0.52
    unaligned: float = 0.45
    unaligned_scores: float = 0.68


CONSTANTS = KernelConstants()


class Kernels:
    """Seconds of kernels on a device.

    A device that does not state its multiprocessors is taken to have no waves: products take FLOP / (peak * ceiling).
    """

    def __init__(self, device: Device, constants: KernelConstants = CONSTANTS) -> None:
        self.device = device
        self.constants = constants
        self._seconds_per_byte = 1.0 / (device.memory_bandwidth_bytes_per_second * device.memory_ceiling)
        self._products: dict[tuple[int, int, int, int, str], float] = {}

    def memory_seconds(self, bytes: float) -> float:
        """A kernel that only reads and writes."""
        return bytes * self._seconds_per_byte + self.device.launch_seconds

    def matmul_seconds(self, batch: int, m: int, n: int, k: int, dtype: str) -> float:
        """`batch` products (m, k) x (k, n) of an element type; nothing to compute is free."""
        key = (batch, m, n, k, dtype)
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = self._matmul(batch, m, n, k, dtype)
        return found

    def _matmul(self, batch: int, m: int, n: int, k: int, dtype: str) -> float:
        if min(batch, m, n, k) <= 0:
            return 0.0
        moved = SIZES.get(dtype, 2) * batch * (m * k + k * n + m * n) * self._seconds_per_byte
        return max(self.waves_seconds(batch, m, n, k, dtype), moved) + self.device.launch_seconds

    def waves_seconds(self, batch: int, m: int, n: int, k: int, dtype: str) -> float:
        """The FLOP of `batch` products alone: without the launch, and memory as fast as they need."""
        device = self.device
        rate = device.peak(dtype) * device.matmul_ceiling * device.sustained
        size = SIZES.get(dtype, 2)
        if size <= 2 and not is_aligned(size, n, k):
            rate *= self.constants.unaligned
        return self._tiles_seconds(batch, m, n, k, rate)

    def _tiles_seconds(self, batch: int, m: int, n: int, k: int, rate: float) -> float:
        units = self.device.multiprocessors
        if units is None:
            return 2.0 * batch * m * n * k / rate
        best = math.inf
        for rows, columns, efficiency in TILES:
            full, rest = divmod(batch * -(-m // rows) * -(-n // columns), units)
            waves = full + (rest / units) ** self.constants.last_wave
            best = min(best, waves * units * rows * columns / efficiency)
        return 2.0 * best * k / rate

    def scores_matmul_seconds(self, batch: int, m: int, n: int, k: int, dtype: str) -> float:
        """A product with stored attention scores: small, strided, and as often bound by memory."""
        device = self.device
        size = SIZES.get(dtype, 2)
        moved = size * batch * (m * k + k * n + m * n) * self._seconds_per_byte
        rate = device.peak(dtype) * self.constants.score_products
        if size <= 2 and not is_aligned(size, n, k):
            rate = min(rate, device.peak("f32") * self.constants.unaligned_scores)
        return max(self._tiles_seconds(batch, m, n, k, rate), moved) + device.launch_seconds

    def scores_pass_seconds(self, bytes: float) -> float:
        """A pass over stored attention scores: softmax or dropout."""
        return self.memory_seconds(bytes / self.constants.score_passes)

    def fused_attention_seconds(self, flops: float, dtype: str) -> float:
        """Attention that stores no scores, by the FLOP that it must do (half of the square where it is causal)."""
        return flops / (self.device.peak(dtype) * self.device.fused_attention_ceiling) + self.device.launch_seconds


def is_aligned(size: int, *lengths: int) -> bool:
    """Whether rows of these lengths, of elements of `size` bytes, start at multiples of `ALIGNMENT`."""
    return all(length * size % ALIGNMENT == 0 for length in lengths)
