"""The time of fetching borders from neighbours (see `sbp.borders`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbp.borders import Transfer, rounds_of
from sbp.dtype import SIZES
from sbp.mesh import Mesh
from sbp.operator import Operator, TensorType
from sbp.planner.boxing import CollectiveCosts
from sbp.rule import BoundRule, Signature


def border_times(
    op: Operator,
    rule: BoundRule,
    types: Sequence[TensorType],
    attributes: Mapping[str, Any],
    signature: Signature,
    mesh: Mesh,
    costs: CollectiveCosts,
) -> tuple[tuple[int, float], ...]:
    """(mesh axis, seconds) of the rounds in which the ranks fetch what an operator reads beyond their shards.

    A round costs what one of the rounds of a ring does: an all-gather of n parts is n - 1 of these. So no cost model
    needs to know more than the collectives. Where parts move along several axes at once the slowest counts. Most
    operators fetch nothing.
    """
    if not op.borders:
        return ()
    near = Mesh(rule.border_shape(signature, mesh.shape))
    if near.size == 1:
        return ()
    boxes = [rule.shards(signature, mesh.shape, place) for place in near.coordinates()]
    read = [op.read_boxes(attributes, held, made) for held, made in boxes]
    found: dict[int, float] = {}
    for number, type in enumerate(types):
        mine, wanted = [held[number] for held, _ in boxes], [found[number] for found in read]
        if mine != wanted:
            for transfers in rounds_of(signature.inputs[number], near, mine, wanted):
                seconds, axis = _round_seconds(transfers, near, mesh, SIZES[type.dtype], costs)
                found[axis] = found.get(axis, 0.0) + seconds
    return tuple(sorted(found.items()))


def border_seconds(borders: Sequence[tuple[int, float]]) -> float:
    """The time of all rounds, which follow each other."""
    return math.fsum(seconds for _, seconds in borders)


def _round_seconds(
    transfers: tuple[Transfer, ...], near: Mesh, mesh: Mesh, item_bytes: int, costs: CollectiveCosts
) -> tuple[float, int]:
    """Seconds, and the mesh axis that takes them."""
    size = item_bytes * max(math.prod(one.box.shape) for one in transfers)
    places = list(near.coordinates())
    one = transfers[0]
    return max(
        (costs.collective_seconds("all_gather", mesh, axis, size * mesh.shape[axis]) / (mesh.shape[axis] - 1), axis)
        for axis, (here, there) in enumerate(zip(places[one.source], places[one.target]))
        if here != there
    )
