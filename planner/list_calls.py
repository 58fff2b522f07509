"""What a framework adds to collectives that take lists of tensors, out of place: parts are cut, copied and joined.

`torch.distributed.all_gather(list_of_parts, part)` and its like copy every part into or out of one buffer, a kernel
each, and their callers split and join the tensors, another kernel each; calls on whole tensors
(`all_gather_into_tensor`), which plans use, need none of it. Measured at nnScaler's adapters on MI200
(nnscaler/runtime/adapter/collectives.py): there it costs more than the transport of anything below 16 MiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp.planner.cluster import Device

_KERNELS_PER_PART = {"all_reduce": 0, "all_gather": 2, "reduce_scatter": 2, "all_to_all": 1}
"""Copies of each part: out of the buffer and into the whole; cut out and into the buffer; cut out, the rest grouped."""

_PASSES = {"all_reduce": 1, "all_gather": 2, "reduce_scatter": 2, "all_to_all": 2}
"""How often the payload is copied; an all-reduce out of place works on a clone."""


@dataclass(frozen=True, slots=True)
class ListCalls:
    """Constants of a framework: they belong to the host and its libraries, not to a device or link.

    Parameters
    ----------
    call_seconds
        What any such call costs beside its kernels.
    kernel_seconds
        What it costs to start one kernel, which small parts wait for.
    copy_efficiency
        Fraction of the memory bandwidth that copies of parts, strided, reach.
    """

    call_seconds: float = 62e-6
    kernel_seconds: float = 18.3e-6
    copy_efficiency: float = 0.5

    def seconds(self, kind: str, members: int, bytes: float, device: Device) -> float:
        """What a collective of `members` with `bytes` of payload per rank takes beside its transport."""
        need = self.columns(kind, members, bytes, device)
        return (
            need["call"] * self.call_seconds
            + need["kernel"] * self.kernel_seconds
            + need["copy"] / self.copy_efficiency
        )

    @staticmethod
    def columns(kind: str, members: int, bytes: float, device: Device) -> dict[str, float]:
        """What one unit of each constant adds (of the efficiency, its inverse), for fits."""
        kernels = _KERNELS_PER_PART[kind] * members
        return {
            "call": float(kernels > 0),
            "kernel": float(kernels),
            "copy": 2 * _PASSES[kind] * bytes / device.memory_bandwidth_bytes_per_second,
        }
