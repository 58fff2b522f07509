"""Time of one collective on one group of ranks: latency + g * sqrt(bytes) + bytes / bandwidth, by link tier.

A group is described per tier by how many of its members (or inner blocks) meet there. Over several tiers every link is
used: with k members in each node, k rings run at once, each crossing between nodes on another member's NIC, so that a
NIC carries 1/k of what a link inside the node carries. Latencies add up over the tiers; of the bandwidths the slowest
decides, because the rings keep all links busy at the same time. Measured: 4 nodes of 8 B200 reach 380 GB/s, 95 % of
what eight NICs of 50 GB/s give in this form; NCCL's own model (src/graph/tuning.cc) has 96 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.planner.cluster import Cluster, Tier

_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a group meets on one tier.

    Parameters
    ----------
    most, fewest
        The largest and smallest number of parts (members, or blocks of the tier inside) in one block of this tier.
        They differ only where a group lies unevenly over nodes.
    reach
        The largest number of other members that a member reaches over this tier and no tier inside it.
    """

    tier: Tier
    most: int
    fewest: int
    reach: int


@dataclass(frozen=True, slots=True)
class Placement:
    """How a group of `size` ranks lies over the tiers, innermost first, without those on which nobody meets."""

    size: int
    meetings: tuple[Meeting, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """seconds(bytes) = constant + root * sqrt(bytes) + linear * bytes."""

    constant: float
    root: float
    linear: float

    def seconds(self, payload_bytes: float) -> float:
        """Time for a payload in bytes per rank."""
        return self.constant + self.root * math.sqrt(payload_bytes) + self.linear * payload_bytes


def placement(cluster: Cluster, group: Sequence[int]) -> Placement:
    """How a group of different ranks lies over the tiers of a cluster."""
    # A block of the tier inside is represented by its first rank, and counts the members in it.
    parts = dict.fromkeys(group, 1)
    found = []
    for tier in cluster.tiers:
        span = cluster.span(tier)
        counts, members = Counter[int](), Counter[int]()
        for part, inside in parts.items():
            counts[part // span] += 1
            members[part // span] += inside
        if len(counts) < len(parts):
            reach = max(members[part // span] - inside for part, inside in parts.items())
            found.append(Meeting(tier, max(counts.values()), min(counts.values()), reach))
        parts = {block * span: inside for block, inside in members.items()}
    return Placement(len(group), tuple(found))


def collective_terms(kind: str, group: Placement) -> Terms:
    """The cost of a collective by its payload per rank, the larger of the local tensors before and after.

    An all-reduce is a reduce-scatter and an all-gather that share one start: it costs their sum less one latency
    (less still where the switch sums). An all-to-all sends an equal share to every other member, over the tier on
    which the two meet.
    """
    constant = root = linear = 0.0
    passes, all_reduce = _PASSES[kind], kind == "all_reduce"
    moved = passes * (group.size - 1) / group.size
    stripes = 1
    for meeting in group.meetings:
        tier, members = meeting.tier, meeting.most
        share = meeting.reach / group.size if kind == "all_to_all" else moved / stripes
        constant += tier.latency_seconds + passes * math.ceil(math.log2(members)) * tier.hop_seconds
        root += share * math.sqrt(stripes) * tier.ramp_seconds_per_sqrt_byte
        linear = max(linear, share / tier.bandwidth(members, all_reduce))
        stripes *= meeting.fewest
    return Terms(constant, root, linear)
