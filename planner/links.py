"""Which links each axis of a mesh uses, and how fast its collectives get over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster
from sbp.planner.collective import placements
from sbp.planner.cost import CostModel

LARGE_BYTES = float(1 << 30)
"""Payload whose time is almost all bandwidth."""


@dataclass(frozen=True, slots=True)
class AxisLinks:
    """The links of one mesh axis.

    Attributes
    ----------
    ranks
        Ranks that meet along the axis, in each of its groups.
    tiers
        The tiers they meet on, innermost first.
    stated_bytes_per_second
        What the cluster file states for the outermost of them, per link and direction.
    reached_bytes_per_second
        Bus bandwidth that a large all-gather along the axis reaches, per device, by the cost model.
    start_seconds
        Time of an all-gather of one byte.
    """

    axis: str
    ranks: int
    tiers: tuple[str, ...]
    stated_bytes_per_second: float
    reached_bytes_per_second: float
    start_seconds: float

    @property
    def mixed(self) -> bool:
        """Whether the ranks meet on links of several kinds, of which the slowest decides."""
        return len(self.tiers) > 1

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "axis": self.axis,
            "ranks": self.ranks,
            "tiers": list(self.tiers),
            "stated_bytes_per_second": self.stated_bytes_per_second,
            "reached_bytes_per_second": self.reached_bytes_per_second,
            "start_seconds": self.start_seconds,
        }


def axis_links(mesh: Mesh, cluster: Cluster, costs: CostModel) -> tuple[AxisLinks, ...]:
    """The links of every mesh axis of more than one rank."""
    found = []
    for axis, (name, ranks) in enumerate(zip(mesh.names, mesh.shape)):
        if ranks == 1:
            continue
        tiers = {meeting.tier.name: meeting.tier for place in placements(cluster, mesh.groups(axis))
                 for meeting in place.meetings}  # fmt: skip
        inner_first = sorted(tiers.values(), key=cluster.span)
        start = costs.collective_seconds("all_gather", mesh, axis, 1.0)
        seconds = costs.collective_seconds("all_gather", mesh, axis, LARGE_BYTES)
        found.append(
            AxisLinks(
                name,
                ranks,
                tuple(tier.name for tier in inner_first),
                inner_first[-1].bandwidth_bytes_per_second,
                LARGE_BYTES * (ranks - 1) / ranks / seconds if seconds > 0 else 0.0,
                start,
            )
        )
    return tuple(found)
