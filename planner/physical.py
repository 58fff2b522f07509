"""The physical plan: one program that every rank runs on its own shards, operations over registers in a fixed order.

A register holds one value in one layout. Operations are either `Compute` (a node of the logical graph on local shards)
or `Box` (one step of a layout change along one mesh axis). The simulator, the executor and the reports all read this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
LOCAL_STEPS = ("slice", "fill", "pad")
"""Layout changes without communication.

slice: B -> S, keep one's own chunk. fill: B -> P, the first rank of the axis keeps the tensor, the others hold the
reduction's identity (for max and min all keep it). pad: S -> P, one's chunk in place, the identity elsewhere.
"""


@dataclass(frozen=True, slots=True)
class Register:
    """Storage for one value in one layout; `bytes` is its size on the largest rank.

    `credits` is the number of buffers: with more than one, producer and consumer can work on different micro-batches.
    """

    number: int
    value: str
    type: TensorType
    layout: Layout
    kind: str
    bytes: int
    credits: int = 1


@dataclass(frozen=True, slots=True)
class Compute:
    """A node run on local shards; the layouts of its registers are its signature.

    `workspace` is the memory in bytes that it holds while it runs, besides its operands: its kernel's, and what is
    fetched from neighbours. `borders` is the part of `seconds` before the kernel in which ranks fetch that, as (mesh
    axis, seconds).
    """

    node: str
    op: str
    attributes: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: str
    module: str
    seconds: float
    flops: float
    workspace: int = 0
    borders: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Box:
    """One boxing step along one mesh axis: `kind` is one of `COLLECTIVES` or `LOCAL_STEPS`.

    The layouts of source and target differ on `mesh_axis` only. `bytes` is the payload per rank: the larger of the
    local tensors before and after; `workspace` what is held besides while it runs (see `workspace_bytes`).
    """

    kind: str
    mesh_axis: int
    inputs: tuple[int]
    outputs: tuple[int]
    phase: str
    seconds: float
    bytes: int
    workspace: int = 0


Operation = Compute | Box


@dataclass(frozen=True)
class PhysicalPlan:
    """Registers and operations in program order, the same on every rank.

    Parameters
    ----------
    sources
        Input or state value -> the register that holds it before the step, in its stored layout.
    outputs
        Output value -> the register that holds it after the step.
    updates
        State value -> the register with its next value, in the stored layout.
    """

    mesh: Mesh
    registers: tuple[Register, ...]
    operations: tuple[Operation, ...]
    sources: Mapping[str, int]
    outputs: Mapping[str, int]
    updates: Mapping[str, int]

    @cached_property
    def lifetimes(self) -> tuple[tuple[int, int], ...]:
        """Per register the half-open range of operations from its filling to its last reading.

        Sources are full from 0; state, its next values and outputs stay to the end. What is never read is there while
        it is made, and an input that is never read during the first operation.
        """
        end = len(self.operations)
        first = [end] * len(self.registers)
        last = [0] * len(self.registers)
        for at, operation in enumerate(self.operations):
            for number in (*operation.inputs, *operation.outputs):
                first[number] = min(first[number], at)
                last[number] = max(last[number], at + 1)
        for number in self.sources.values():
            first[number] = 0
        for number in self.kept:
            first[number] = min(first[number], end)
            last[number] = end
        return tuple((a, max(a, b)) for a, b in zip(first, last))

    @cached_property
    def kept(self) -> frozenset[int]:
        """Registers that are full after the step: state, its next values, outputs."""
        state = (number for number in self.sources.values() if self.registers[number].kind != "input")
        return frozenset((*state, *self.outputs.values(), *self.updates.values()))
