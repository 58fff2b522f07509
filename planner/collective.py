"""Time of one collective on one group of ranks: latency + g * sqrt(bytes) + bytes / bandwidth, by link tier.

A group is described per tier by how many of its members (or inner blocks) meet there. Over several tiers every link is
used: with k members in each node, k rings run at once, each crossing between nodes on another member's NIC, so that a
NIC carries 1/k of what a link inside the node carries. Latencies add up over the tiers; of the bandwidths the slowest
decides, because the rings keep all links busy at the same time. Groups that communicate at the same time and share
links (fewer network cards than devices) divide them. Measured: 4 nodes of 8 B200 reach 380 GB/s, 95 % of
what eight NICs of 50 GB/s give in this form; NCCL's own model (src/graph/tuning.cc) has 96 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sbp.errors import ClusterError
from sbp.planner.cluster import Cluster, Tier

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
"""How often a payload goes round, less the share that each member holds already."""


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
    ring_links, member_links
        How many links each ring of the group, and each member of it, has to itself: below 1 where several share one.
    """

    tier: Tier
    most: int
    fewest: int
    reach: int
    ring_links: float = 1.0
    member_links: float = 1.0


@dataclass(frozen=True, slots=True)
class Placement:
    """How a group of `size` ranks lies over the tiers, innermost first, without those on which nobody meets.

    `nearest` is how so many neighbours lie, where they meet on fewer tiers, further inside.
    """

    size: int
    meetings: tuple[Meeting, ...]
    nearest: Placement | None = None


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
    """How a group of different ranks that has the cluster to itself lies over its tiers."""
    return placements(cluster, [group])[0]


def placements(cluster: Cluster, groups: Iterable[Sequence[int]]) -> tuple[Placement, ...]:
    """How groups that communicate at the same time lie over the tiers, and what part of shared links each has."""
    spreads = [(len(group), _spread(cluster, group)) for group in groups]
    rings, members = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for _, spread in spreads:
        for where in spread:
            for block, count in where.blocks.items() if where.tier.links is not None else ():
                rings[where.tier.name, block] += where.rings
                members[where.tier.name, block] += count
    nearest: dict[int, Placement] = {}
    found = []
    for size, spread in spreads:
        if size not in nearest:
            nearest[size] = Placement(size, tuple(where.meeting() for where in _spread(cluster, range(size))))
        meetings = tuple(where.meeting(rings, members) for where in spread)
        near = nearest[size]
        crosses = bool(meetings) and cluster.span(meetings[-1].tier) > cluster.span(near.meetings[-1].tier)
        found.append(Placement(size, meetings, near if crosses else None))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Where:
    """A group on one tier: its members by block of the tier inside (by its first rank), and its rings per block."""

    tier: Tier
    most: int
    fewest: int
    reach: int
    ranks_inside: int
    blocks: dict[int, int]
    rings: int

    def meeting(self, rings: Counter | None = None, members: Counter | None = None) -> Meeting:
        """What the group sees when so many rings and members use each block's links; nobody else, if not given."""
        most_rings = max(rings[self.tier.name, block] for block in self.blocks) if rings else self.rings
        most_members = (
            max(members[self.tier.name, block] for block in self.blocks) if members else max(self.blocks.values())
        )
        return Meeting(
            self.tier,
            self.most,
            self.fewest,
            self.reach,
            _links_each(self.tier, self.ranks_inside, most_rings),
            _links_each(self.tier, self.ranks_inside, most_members),
        )


def _spread(cluster: Cluster, group: Sequence[int]) -> list[_Where]:
    # A block of the tier inside is represented by its first rank, and counts the members in it.
    parts = dict.fromkeys(group, 1)
    found = []
    ranks_inside = rings = 1
    for tier in cluster.tiers:
        span = cluster.span(tier)
        counts, members = Counter[int](), Counter[int]()
        for part, inside in parts.items():
            counts[part // span] += 1
            members[part // span] += inside
        if len(counts) < len(parts):
            reach = max(members[part // span] - inside for part, inside in parts.items())
            most, fewest = max(counts.values()), min(counts.values())
            found.append(_Where(tier, most, fewest, reach, ranks_inside, parts, rings))
            rings *= fewest
        parts = {block * span: inside for block, inside in members.items()}
        ranks_inside = span
    return found


def _links_each(tier: Tier, ranks: int, users: int) -> float:
    """How many links each of `users` has when they share those of a block of `ranks`; none uses other ranks' links."""
    if tier.links is None:
        return 1.0
    return min(max(1.0, tier.links / ranks), tier.links / users)


def collective_terms(kind: str, group: Placement) -> Terms:
    """The cost of a collective by its payload per rank, the larger of the local tensors before and after.

    An all-reduce is a reduce-scatter and an all-gather that share one start: it costs their sum less one latency
    (less still where the switch sums). An all-to-all sends an equal share to every other member, over the tier on
    which the two meet. A group that crosses a border which its size does not force it to cross is not cheaper for it.
    """
    constant, root = _start(kind, group)
    slopes = _slopes(group)
    if group.nearest is not None:
        constant, root = map(max, (constant, root), _start(kind, group.nearest))
        slopes = {
            name: max(slope, other) for (name, slope), other in zip(slopes.items(), _slopes(group.nearest).values())
        }
    linear = slopes.get(kind, 0.0)
    if kind == "all_reduce":
        linear = slopes["reduce_scatter"] + slopes["all_gather"]
        if any(meeting.tier.all_reduce_bandwidths for meeting in group.meetings):
            linear = max(slopes["reduce_scatter"], min(linear, slopes["all_reduce"]))
    return Terms(constant, root, linear)


def _start(kind: str, group: Placement) -> tuple[float, float]:
    """The constant and the square-root term: each tier adds its own."""
    constant = root = 0.0
    passes, stripes = PASSES[kind], 1
    moved = passes * (group.size - 1) / group.size
    for meeting in group.meetings:
        tier = meeting.tier
        share = meeting.reach / group.size if kind == "all_to_all" else moved / stripes
        constant += tier.latency_seconds + passes * math.ceil(math.log2(meeting.most)) * tier.hop_seconds
        root += share * math.sqrt(stripes) * tier.ramp_seconds_per_sqrt_byte
        stripes *= meeting.fewest
    return constant, root


def _slopes(group: Placement) -> dict[str, float]:
    """Seconds per byte by kind: what the slowest tier needs, of an all-reduce if every switch sums that can."""
    slopes, stripes = dict.fromkeys(PASSES, 0.0), 1
    for meeting in group.meetings:
        tier, members = meeting.tier, meeting.most
        share = (group.size - 1) / group.size / stripes / meeting.ring_links
        needed = {
            "reduce_scatter": share / tier.bandwidth(members),
            "all_gather": share / tier.gather_bandwidth(members),
            "all_to_all": meeting.reach / group.size / meeting.member_links / tier.exchange_bandwidth(members),
            "all_reduce": 2 * share / tier.bandwidth(members, all_reduce=True),
        }
        slopes = {kind: max(slope, needed[kind]) for kind, slope in slopes.items()}
        stripes *= meeting.fewest
    return slopes


def transfer_seconds(cluster: Cluster, source_rank: int, target_rank: int, bytes: float, sharing: int = 1) -> float:
    """Time of sending bytes from one rank to another: what two ranks need to exchange as much.

    Parameters
    ----------
    bytes
        What is sent. Nothing to send, or a rank that sends to itself, is free.
    sharing
        How many such transfers, this one included, use the source's (or the target's) link at the same time. Where a
        node has fewer links to others than ranks, all transfers out of the node count.
    """
    for rank in (source_rank, target_rank):
        if not 0 <= rank < cluster.size:
            raise ClusterError(f"{cluster} has no rank {rank}; give one from 0 to {cluster.size - 1}.")
    if sharing < 1:
        raise ClusterError(
            f"a transfer shares its link with itself at least: sharing must be 1 or more, got {sharing}."
        )
    if bytes <= 0 or source_rank == target_rank:
        return 0.0
    pair = placement(cluster, (source_rank, target_rank))
    terms = collective_terms("all_to_all", pair)
    tier = pair.meetings[-1].tier
    ranks = _ranks_inside(cluster, tier)
    slower = sharing if tier.links is None else _links_each(tier, ranks, 1) / _links_each(tier, ranks, sharing)
    return terms.constant + terms.root * math.sqrt(2 * bytes) + terms.linear * 2 * bytes * slower


def transfers_seconds(cluster: Cluster, pairs: Iterable[tuple[int, int]], bytes: float) -> float:
    """Time until every (source, target) of the pairs has sent `bytes`, all at the same time.

    Links work in both directions at once. Transfers that leave the same rank (or node, where its ranks share links),
    or enter it, divide its bandwidth.
    """
    pairs = [(source, target) for source, target in pairs if source != target]
    crowds = Counter[tuple[str, str, int]]()
    places = []
    for source, target in pairs:
        tier = next(tier for tier in cluster.tiers if source // cluster.span(tier) == target // cluster.span(tier))
        block = 1 if tier.links is None else _ranks_inside(cluster, tier)
        places.append(((tier.name, "out", source // block), (tier.name, "in", target // block)))
        crowds.update(places[-1])
    return max(
        (
            transfer_seconds(cluster, source, target, bytes, max(crowds[out], crowds[into]))
            for (source, target), (out, into) in zip(pairs, places)
        ),
        default=0.0,
    )


def stage_transfer_seconds(
    cluster: Cluster, sources: Sequence[int], targets: Sequence[int], bytes: float, scatter: bool = True
) -> float:
    """Time of sending a tensor of `bytes`, which every source holds, so that every target holds it.

    The i-th source sends to the i-th target (repeating the shorter list). With `scatter` each sends its share only,
    and the targets gather the shares (Narayanan et al., SC'21, section 4.1); else each sends the whole.
    """
    ways = max(len(sources), len(targets))
    pairs = [(sources[at % len(sources)], targets[at % len(targets)]) for at in range(ways)]
    if not scatter or len(targets) == 1:
        return transfers_seconds(cluster, dict.fromkeys(pairs), bytes)
    gather = collective_terms("all_gather", placement(cluster, targets)).seconds(bytes) if bytes > 0 else 0.0
    return transfers_seconds(cluster, pairs, bytes / ways) + gather


def _ranks_inside(cluster: Cluster, tier: Tier) -> int:
    """How many ranks a block of the tier inside this one holds."""
    at = cluster.tiers.index(tier)
    return cluster.span(cluster.tiers[at - 1]) if at else 1
