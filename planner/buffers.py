"""What holds memory: the plan's registers, those that share memory as one, from when to when and of how many bytes.

Three registers need no memory of their own: a view (a reshape of another register), a state's next value that is made
where the old one lay, and nothing else. The executor follows the same rules: it makes views, frees and overwrites where
this file says so, and gives every other register contiguous memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sbp.dtype import SIZES
from sbp.layout import Split
from sbp.mesh import Mesh
from sbp.operator import REGISTRY
from sbp.planner.physical import Compute, Operation, PhysicalPlan, Register


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that one or more registers share, held during the operations [start, stop).

    Attributes
    ----------
    registers
        Numbers, the one that the memory is made for first; all have the same local bytes on every rank.
    """

    registers: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Buffers:
    """All buffers of a plan.

    Attributes
    ----------
    buffers
        In the order in which they are made.
    in_place
        State value's next register -> the register of the old value, whose memory it takes over.
    releases
        Per operation the registers that are given up after it. Memory is free once all of a buffer's registers are.
    """

    buffers: tuple[Buffer, ...]
    in_place: Mapping[int, int]
    releases: tuple[tuple[int, ...], ...]


def is_view(operation: Operation) -> bool:
    """Whether the operation's output shares its input's memory."""
    return isinstance(operation, Compute) and operation.op in REGISTRY and REGISTRY[operation.op].view


def buffers_of(physical: PhysicalPlan) -> Buffers:
    """The buffers of a physical plan.

    A state's next value takes the old one's place if the old one, views of it included, is not read after the next is
    made. Everything else that is state stays where it lies for the whole step, its next value beside it.
    """
    operations, lifetimes = physical.operations, physical.lifetimes
    home = list(range(len(physical.registers)))
    made: dict[int, int] = {}
    for at, operation in enumerate(operations):
        if is_view(operation):
            home[operation.outputs[0]] = home[operation.inputs[0]]
        made.update(dict.fromkeys(operation.outputs, at))
    sharing: dict[int, list[int]] = {}
    for number, first in enumerate(home):
        sharing.setdefault(first, []).append(number)
    in_place = _in_place(physical, sharing, made)
    members = dict(sharing)
    for new, old in in_place.items():
        members[old] = [*members[old], *members.pop(new)]
    end = max(len(operations), 1)
    buffers = []
    for numbers in members.values():
        start = min(lifetimes[number][0] for number in numbers)
        stop = max(lifetimes[number][1] for number in numbers)
        start = min(start, end - 1)
        buffers.append(Buffer(tuple(numbers), start, max(stop, start + 1)))
    buffers.sort(key=lambda buffer: (buffer.start, buffer.registers[0]))
    return Buffers(tuple(buffers), in_place, _releases(physical, in_place, made))


def _in_place(physical: PhysicalPlan, sharing: Mapping[int, list[int]], made: Mapping[int, int]) -> dict[int, int]:
    last_read: dict[int, int] = {}
    for at, operation in enumerate(physical.operations):
        last_read.update(dict.fromkeys(operation.inputs, at))
    read_at_the_end = {*physical.outputs.values(), *physical.updates.values()}
    found: dict[int, int] = {}
    for state, new in physical.updates.items():
        old = physical.sources[state]
        if new in found or new not in made or new not in sharing or old not in sharing:
            continue
        if physical.registers[new].layout != physical.registers[old].layout:
            continue
        if any(number in read_at_the_end or last_read.get(number, -1) > made[new] for number in sharing[old]):
            continue
        found[new] = old
    return found


def _releases(
    physical: PhysicalPlan, in_place: Mapping[int, int], made: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in physical.operations]
    replaced = {old: made[new] for new, old in in_place.items()}
    for number, (_, stop) in enumerate(physical.lifetimes):
        if number in replaced:
            found[replaced[number]].append(number)
        elif number not in physical.kept and physical.operations:
            found[min(max(stop, 1), len(found)) - 1].append(number)
    return tuple(map(tuple, found))


# -- bytes -------------------------------------------------------------------------------------------------------------


def register_bytes(register: Register, mesh: Mesh, rank: int, item_bytes: Mapping[str, int] = SIZES) -> int:
    """Bytes of a register on one rank, all its `credits` together."""
    shape = register.layout.shard(register.type.shape, mesh.shape, mesh.coordinate(rank)).shape
    return item_bytes[register.type.dtype] * math.prod(shape) * register.credits


def packing_bytes(kind: str, mesh_axis: int, source: Register, target: Register, mesh: Mesh) -> int:
    """What a collective holds besides its operands, on the rank with the largest shards.

    Communication libraries move contiguous memory, one block per rank. Blocks of the first dimension lie so already;
    blocks of any other are packed together before they are sent, or are apart when they arrive.
    """

    def packed(register: Register) -> int:
        sbp = register.layout[mesh_axis]
        if not isinstance(sbp, Split):
            return 0
        shape = register.layout.local_shape(register.type.shape, mesh.shape)
        return math.prod(shape[: sbp.axis]) > 1

    sent, arrived = packed(target), packed(source)
    if kind == "all_gather":
        return target.bytes * arrived
    if kind == "reduce_scatter":
        return source.bytes * sent
    if kind == "all_to_all":
        return source.bytes * sent + target.bytes * arrived
    return 0
