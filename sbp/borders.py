"""Borders: what ranks fetch from their neighbours where an operator reads more of an input than its shard.

A split dimension is cut into consecutive chunks, so the ranks that differ only along the mesh axes that cut it hold it
among them. Whatever boxes they read, shards smaller than a border and empty ones included, every rank gets each part
from the one that holds it. Ranks that are equally far apart move their parts at once: a round, in which every rank
sends to one and receives from one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sbp.errors import LayoutError
from sbp.layout import Layout, Shard, Split
from sbp.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Transfer:
    """The part `box` of a tensor goes from rank `source`, which holds it, to rank `target`, which reads it."""

    source: int
    target: int
    box: Shard


def rounds_of(
    layout: Layout, mesh: Mesh, held: Sequence[Shard], read: Sequence[Shard]
) -> tuple[tuple[Transfer, ...], ...]:
    """What moves between ranks so that each gets the box it reads, as rounds, nearest neighbours first.

    Parameters
    ----------
    layout, mesh
        How the tensor lies.
    held, read
        Per rank of the mesh its shard, and the box that it reads.

    Raises
    ------
    LayoutError
        A box reaches beyond the shard in a dimension that is not split: nobody else holds that part.
    """
    beyond = {
        dimension
        for mine, box in zip(held, read)
        if 0 not in box.shape
        for dimension in range(len(mine.shape))
        if not _covers(mine, box, dimension)
    }
    axes = [axis for axis, sbp in enumerate(layout) if isinstance(sbp, Split) and sbp.axis in beyond]
    if beyond - {sbp.axis for sbp in layout if isinstance(sbp, Split)}:
        raise LayoutError(
            f"a tensor of shape {list(held[0].global_shape)} in {layout} on {mesh} is read beyond its shards in "
            f"dimension {min(beyond)}, which no mesh axis splits; an operator's `reads` may do so in split ones only."
        )
    found = []
    steps = product(*(range(-mesh.shape[axis] + 1, mesh.shape[axis]) for axis in axes))
    for step in sorted(steps, key=lambda one: (sum(map(abs, one)), one)):
        if not any(step):
            continue
        transfers = []
        for target, place in enumerate(mesh.coordinates()):
            other = list(place)
            for axis, by in zip(axes, step):
                other[axis] += by
            if all(0 <= at < size for at, size in zip(other, mesh.shape)):
                source = _rank(other, mesh.shape)
                part = overlap(held[source], read[target])
                if 0 not in part.shape:
                    transfers.append(Transfer(source, target, part))
        if transfers:
            found.append(tuple(transfers))
    return tuple(found)


def fetched_bytes(
    layouts: Sequence[Layout],
    mesh: Mesh,
    held: Sequence[Sequence[Shard]],
    read: Sequence[Sequence[Shard]],
    item_bytes: Sequence[int],
    workspace: int = 0,
) -> int:
    """The most bytes that a rank holds while an operator's inputs are fetched one after another and its kernel runs.

    In a round a rank holds the copy that it sends besides all that it has received; then the array in which this is put
    together with its own shard, which stays until the kernel has run.

    Parameters
    ----------
    layouts, item_bytes
        Per input.
    held, read
        Per rank of the mesh and input its shard, and the box that it reads.
    workspace
        What the kernel holds itself.
    """
    most, kept = [0] * mesh.size, [0] * mesh.size

    def note(extra: Sequence[int]) -> None:
        most[:] = map(max, most, map(int.__add__, kept, extra))

    for number, (layout, size) in enumerate(zip(layouts, item_bytes)):
        mine, wanted = [boxes[number] for boxes in held], [boxes[number] for boxes in read]
        if mine == wanted:
            continue
        received = [0] * mesh.size
        for transfers in rounds_of(layout, mesh, mine, wanted):
            sent = [0] * mesh.size
            for one in transfers:
                part = size * math.prod(one.box.shape)
                sent[one.source] += part
                received[one.target] += part
            note([a + b for a, b in zip(sent, received)])
        whole = [
            0 if not parts and _reads_own(a, b) else size * math.prod(b.shape)
            for a, b, parts in zip(mine, wanted, received)
        ]
        note([a + b for a, b in zip(received, whole)])
        kept = [a + b for a, b in zip(kept, whole)]
    return max((a if workspace == 0 else max(a, b + workspace) for a, b in zip(most, kept)), default=0)


def overlap(one: Shard, other: Shard) -> Shard:
    """The part that two boxes of a tensor share; its shape has a zero if there is none."""
    starts = tuple(map(max, one.offset, other.offset))
    ends = (min(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape))
    return Shard(one.global_shape, starts, tuple(max(0, end - start) for start, end in zip(starts, ends)))


def hull(one: Shard, other: Shard) -> Shard:
    """The smallest box that contains both; of an empty one and another the other."""
    if 0 in one.shape or 0 in other.shape:
        return other if 0 in one.shape else one
    starts = tuple(map(min, one.offset, other.offset))
    ends = (max(a + n, b + m) for a, n, b, m in zip(one.offset, one.shape, other.offset, other.shape))
    return Shard(one.global_shape, starts, tuple(end - start for start, end in zip(starts, ends)))


def within(part: Shard, box: Shard) -> tuple[slice, ...]:
    """The indices of a part inside a box that contains it."""
    return tuple(slice(a - b, a - b + size) for a, b, size in zip(part.offset, box.offset, part.shape))


def put_together(xp: Any, mine: Any, held: Shard, read: Shard, received: Mapping[Shard, Any]) -> Any:
    """The array that a rank reads, out of its own shard and of the parts that it received."""
    own = overlap(held, read)
    if not received and _reads_own(held, read):
        return mine if held == read else mine[within(own, held)]
    whole = xp.full(read.shape, 0, mine.dtype)
    if 0 not in own.shape:
        whole[within(own, read)] = mine[within(own, held)]
    for part, array in received.items():
        whole[within(part, read)] = array
    return whole


def fetched(xp: Any, arrays: Sequence[Any], layout: Layout, mesh: Mesh, held: Sequence[Shard], read: Sequence[Shard]):
    """Per rank the array that it reads, where all ranks' shards are at hand: what the prover of rules does."""
    received: list[dict[Shard, Any]] = [{} for _ in arrays]
    for transfers in rounds_of(layout, mesh, held, read):
        for one in transfers:
            received[one.target][one.box] = arrays[one.source][within(one.box, held[one.source])]
    return [put_together(xp, *case) for case in zip(arrays, held, read, received)]


def _reads_own(held: Shard, read: Shard) -> bool:
    """Whether a box lies in one's own shard, so that no array need be made."""
    own = overlap(held, read)
    return own.shape == read.shape and 0 not in own.shape


def _covers(mine: Shard, box: Shard, dimension: int) -> bool:
    start, size = mine.offset[dimension], mine.shape[dimension]
    return start <= box.offset[dimension] and box.offset[dimension] + box.shape[dimension] <= start + size


def _rank(place: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for at, size in zip(place, shape):
        number = number * size + at
    return number
