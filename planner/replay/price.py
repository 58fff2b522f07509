"""What a program costs: seconds of its kernels and collectives on a device, under a framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sbp.dtype import SIZES
from sbp.planner.frameworks import Framework
from sbp.planner.kernels import Kernels
from sbp.planner.replay.extraction import PARTS, Kernel, Program

Collective = Callable[[str, float], float]
"""(kind, bytes per rank) -> seconds along one axis."""

UNFUSED_SOFTMAX_KERNELS = 9
"""Scale, mask, two casts and a softmax of five passes, where the fused one does not take the sizes."""


LEAST_EXPOSED_RING = 0.1
"""Part of the exchange of keys and values that attention does not hide: the first chunk's."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of one part in one phase, for one micro-batch.

    Parameters
    ----------
    compute
        Kernels on the device.
    attention
        The part of them that selective recompute runs again.
    weights
        The part of them that makes gradients of weights, which zero-bubble schedules run apart.
    collectives
        Tensor-parallel communication.
    launches
        How many kernels and collectives the host starts.
    """

    compute: float = 0.0
    attention: float = 0.0
    collectives: float = 0.0
    launches: int = 0
    weights: float = 0.0

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            self.compute + other.compute,
            self.attention + other.attention,
            self.collectives + other.collectives,
            self.launches + other.launches,
            self.weights + other.weights,
        )


Prices = dict[tuple[str, str], Phase]
"""(part, phase) -> seconds."""


def priced(
    program: Program,
    kernels: Kernels,
    framework: Framework,
    collective: Collective,
    accumulates: bool,
    product_type: str | None = None,
    context: tuple[int, Collective] | None = None,
) -> Prices:
    """Seconds of every part of a program.

    Parameters
    ----------
    collective
        Along the tensor-parallel axis.
    accumulates
        Whether gradients of several micro-batches are added up.
    product_type
        Element type of the layers' products, where that is another than the values'.
    context
        Ranks that each hold a part of the sequence, and collectives along their axis: keys and values go round.
    """
    pricing = _Pricing(kernels, framework, collective, accumulates or framework.gradient_bytes > 2, context)
    found: Prices = {}
    for part in PARTS:
        for phase in ("forward", "backward"):
            total = Phase()
            for kernel in program.kernels[part, phase]:
                total = total + pricing.kernel(kernel, part, product_type if part == "layer" else None)
            gap = framework.blocking_us * 1e-6
            found[part, phase] = total + Phase(compute=gap * total.launches)
    return found


@dataclass(frozen=True, slots=True)
class _Pricing:
    kernels: Kernels
    framework: Framework
    collective: Collective
    accumulates: bool
    context: tuple[int, Collective] | None

    def kernel(self, kernel: Kernel, part: str, product_type: str | None) -> Phase:
        if kernel.kind == "memory":
            return self.memory(kernel, part) + self.accumulation(kernel)
        if kernel.kind == "product":
            batch, m, n, k = kernel.sizes
            seconds = self.kernels.matmul_seconds(batch, m, n, k, product_type or kernel.dtype)
            if product_type == "fp8" and not kernel.parameters:
                # The first operand is read in 16 bits and written in 8, once as it is and once transposed, for this
                # product and the weight gradient that reads it as well.
                seconds += self.kernels.memory_seconds(4.0 * batch * m * k)
            weights = seconds if kernel.parameters else 0.0
            return Phase(compute=seconds, launches=1, weights=weights) + self.accumulation(kernel)
        if kernel.kind in ("attention", "attention_backward"):
            return self.attention(kernel)
        return Phase(collectives=self.collective(kernel.kind, kernel.bytes), launches=1)

    def memory(self, kernel: Kernel, part: str) -> Phase:
        framework = self.framework
        moved = kernel.fused_bytes if framework.fused_pointwise else kernel.bytes
        moved *= framework.loss_traffic if kernel.op in _LOSS else framework.pointwise_traffic
        starts = kernel.starts or not framework.fused_pointwise
        seconds = self.kernels.memory_seconds(moved)
        return Phase(compute=seconds if starts else seconds - self.kernels.device.launch_seconds, launches=int(starts))

    def accumulation(self, kernel: Kernel) -> Phase:
        """Adding a weight's gradient to those of earlier micro-batches."""
        if not kernel.parameters or not self.accumulates:
            return Phase()
        made, kept = SIZES[kernel.dtype], self.framework.gradient_bytes
        if self.framework.fused_accumulation and kernel.kind == "product":
            moved = kernel.parameters * (2 * kept - made)
            seconds = self.kernels.memory_seconds(moved) - self.kernels.device.launch_seconds
            return Phase(compute=seconds, weights=seconds)
        seconds = self.kernels.memory_seconds(kernel.parameters * (made + 2 * kept))
        return Phase(compute=seconds, launches=1, weights=seconds)

    def attention(self, kernel: Kernel) -> Phase:
        batch, heads, queries, keys, size, key_heads, causal = kernel.sizes
        backward = kernel.kind == "attention_backward"
        count = batch * heads
        moved = 0.0
        if self.context is not None:
            ways, collective = self.context
            keys *= ways
            moved = 2.0 * batch * key_heads * keys * size * SIZES[kernel.dtype]
            moved = collective("all_gather", moved) + (collective("reduce_scatter", moved) if backward else 0.0)
        if self.framework.attention == "fused":
            # Ranks take two chunks of a causal sequence each, so that all have half of the pairs.
            pairs = queries * keys * (0.5 if causal else 1.0)
            flops = (10.0 if backward else 4.0) * count * pairs * size  # 5 products in backward, 2 in forward
            seconds = self.kernels.fused_attention_seconds(flops / self.framework.attention_efficiency, kernel.dtype)
            found = Phase(compute=seconds, attention=seconds, launches=2 if backward else 1)
        else:
            found = self.stored_attention(count, queries, keys, size, kernel.dtype, backward)
        return found + Phase(collectives=max(moved - found.compute, LEAST_EXPOSED_RING * moved))

    def stored_attention(self, count: int, queries: int, keys: int, size: int, dtype: str, backward: bool) -> Phase:
        width, passes = SIZES[dtype], self.kernels.scores_pass_seconds
        products = self.kernels.scores_matmul_seconds
        scores = count * queries * keys
        if backward:
            seconds = (
                products(count, keys, size, queries, dtype)
                + products(count, queries, keys, size, dtype)
                + products(count, queries, size, keys, dtype)
                + products(count, keys, size, queries, dtype)
                + passes(3 * width * scores)
            )
            launches = 5
        else:
            seconds = (
                products(count, queries, keys, size, dtype)
                + products(count, queries, size, keys, dtype)
                + passes(2 * width * scores)
            )
            launches = 3
        if self.framework.attention_dropout:
            seconds += passes((2 * width + 1) * scores)
            launches += 1
        if count % self.framework.softmax_batches:
            seconds += passes((4 if backward else 8) * width * scores)
            launches += UNFUSED_SOFTMAX_KERNELS
        return Phase(compute=seconds, attention=seconds, launches=launches)


_LOSS = frozenset({"max", "sum_exp", "log_probability", "log_probability_backward"})
