"""Time of one collective on one group of ranks: latency + g * sqrt(bytes) + bytes / bandwidth, by link tier.

A group is described per tier by how many of its members (or inner blocks) meet there. A collective over several tiers
is hierarchical and uses every link: with k members in each of n nodes a reduce-scatter inside the node over k leaves
each rank bytes / k, which it reduces across nodes over its own NIC; the all-gathers undo both. The levels work on
different chunks at the same time, so latencies add and of the bandwidths the slowest level decides. The forms follow
measured curves (NCCL tests on A100, H200 and B200 nodes; see `benchmarks/collectives.py`).
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
    """

    tier: Tier
    most: int
    fewest: int


@dataclass(frozen=True, slots=True)
class Terms:
    """seconds(bytes) = constant + root * sqrt(bytes) + linear * bytes."""

    constant: float
    root: float
    linear: float

    def seconds(self, payload_bytes: float) -> float:
        """Time for a payload in bytes per rank."""
        return self.constant + self.root * math.sqrt(payload_bytes) + self.linear * payload_bytes


def meetings(cluster: Cluster, group: Sequence[int]) -> tuple[Meeting, ...]:
    """How a group of ranks lies over the tiers, innermost first; tiers on which nobody meets are left out."""
    # A block of the tier inside is represented by its first rank.
    parts = sorted(set(group))
    found = []
    for tier in cluster.tiers:
        span = cluster.span(tier)
        counts = Counter(part // span for part in parts)
        if len(counts) < len(parts):
            found.append(Meeting(tier, max(counts.values()), min(counts.values())))
        parts = [block * span for block in counts]
    return tuple(found)


def collective_terms(kind: str, meeting: Sequence[Meeting]) -> Terms:
    """The cost of a collective by its payload per rank, the larger of the local tensors before and after.

    An all-reduce is a reduce-scatter and an all-gather that share one start: it costs their sum less one latency
    (less still where the switch sums).
    """
    if kind == "all_to_all":
        return _all_to_all(meeting)
    passes, all_reduce = _PASSES[kind], kind == "all_reduce"
    constant = root = linear = 0.0
    share = 1.0
    for level in meeting:
        tier, members = level.tier, level.most
        constant += tier.latency_seconds + passes * math.ceil(math.log2(members)) * tier.hop_seconds
        moved = passes * share * (members - 1) / members
        root += passes * math.sqrt(share) * (members - 1) / members * tier.ramp_seconds_per_sqrt_byte
        linear = max(linear, moved / tier.bandwidth(members, all_reduce))
        share /= level.fewest
    return Terms(constant, root, linear)


def _all_to_all(meeting: Sequence[Meeting]) -> Terms:
    """Every rank sends an equal share of its payload to every other; what goes to another node goes over the NIC."""
    constant = root = linear = 0.0
    total = math.prod(level.most for level in meeting)
    reached = 1
    for level in meeting:
        tier, members = level.tier, level.most
        share = (reached * members - reached) / total
        reached *= members
        constant += tier.latency_seconds + math.ceil(math.log2(members)) * tier.hop_seconds
        root += math.sqrt(share) * tier.ramp_seconds_per_sqrt_byte
        linear = max(linear, share / tier.bandwidth(members))
    return Terms(constant, root, linear)
