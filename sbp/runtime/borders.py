"""The borders of one operation, made ready to run: how each of its inputs becomes what the local ranks read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbp.borders import put_together, rounds_of, within
from sbp.comm.interface import Communicator
from sbp.layout import Shard
from sbp.mesh import Mesh
from sbp.operator import Operator
from sbp.planner.physical import Register
from sbp.runtime.boxing import Local

Boxes = tuple[Shard, ...]


def prepare_borders(
    op: Operator,
    attributes: Mapping[str, Any],
    inputs: Sequence[Register],
    outputs: Sequence[Register],
    mesh: Mesh,
    communicator: Communicator,
    xp: Any,
) -> tuple[list[Boxes], list[Callable[[Local], Local] | None]]:
    """Per rank of the mesh the boxes that its kernel reads, and per input the function from shards to these.

    Returns
    -------
    tuple
        The boxes, and None for inputs of which every rank reads its own shard. Every process must call the functions,
        in the order of the inputs.
    """
    places = list(mesh.coordinates())
    held, made = (
        [tuple(r.layout.shard(r.type.shape, mesh.shape, place) for r in registers) for place in places]
        for registers in (inputs, outputs)
    )
    if not op.borders:
        return held, [None] * len(inputs)
    read = [op.read_boxes(attributes, *boxes) for boxes in zip(held, made)]
    moves: list[Callable[[Local], Local] | None] = []
    for number, register in enumerate(inputs):
        mine, wanted = [boxes[number] for boxes in held], [boxes[number] for boxes in read]
        moves.append(None if mine == wanted else _move(register, mesh, mine, wanted, communicator, xp))
    return read, moves


def _move(
    register: Register, mesh: Mesh, held: list[Shard], read: list[Shard], communicator: Communicator, xp: Any
) -> Callable[[Local], Local]:
    rounds = rounds_of(register.layout, mesh, held, read)
    pairs = [[(one.source, one.target) for one in transfers] for transfers in rounds]
    shapes = [{one.target: one.box.shape for one in transfers} for transfers in rounds]
    cuts = [{one.source: within(one.box, held[one.source]) for one in transfers} for transfers in rounds]
    boxes = [{one.target: one.box for one in transfers} for transfers in rounds]

    def move(arrays: Local) -> Local:
        dtype = next(iter(arrays.values())).dtype
        received: dict[int, dict[Shard, Any]] = {rank: {} for rank in arrays}
        for pair, shape, cut, box in zip(pairs, shapes, cuts, boxes):
            # The copies have no name here, so that they go when they are sent (see `sbp.borders.fetched_bytes`).
            arrived = communicator.permute(
                {rank: xp.copy(arrays[rank][cut[rank]], order="C") for rank in arrays if rank in cut},
                pair,
                shape,
                dtype,
            )
            for rank in arrived:
                received[rank][box[rank]] = arrived[rank]
            del arrived
        return {rank: put_together(xp, arrays[rank], held[rank], read[rank], received.pop(rank)) for rank in arrays}

    return move
