"""Constants of a link tier from measured collectives: non-negative, robust, relative least squares.

The time of a collective (`sbp.planner.collective`) is linear in a tier's latency, hop time, ramp and inverse
bandwidths, so they are fitted together. Errors count relative to the measured time, since times span five decades, and
are reweighted until their absolute values are minimised rather than their squares: a few disturbed measurements then
change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbp.errors import ClusterError
from sbp.planner.cluster import Tier
from sbp.planner.collective import PASSES, Meeting, Placement, collective_terms

TABLES = ("group", "gather", "all_reduce", "exchange")
"""The bandwidths by group size that a tier can have: of rings, all-gathers, all-reduces in the switch, all-to-all."""

_ROUNDS = 40
_SMALLEST_RESIDUAL = 1e-3


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured collective: what, where, its payload in bytes per rank, and its time."""

    kind: str
    group: Placement
    bytes: float
    seconds: float
    in_switch: bool = True
    """Whether an all-reduce could be summed by the switch, where that can."""

    @property
    def seconds_inside(self) -> float:
        """Start and ramp of the tiers inside the outermost one, whose bandwidths act at the same time as its own."""
        meetings = self.group.meetings[:-1]
        if not meetings:
            return 0.0
        terms = collective_terms(self.kind, Placement(self.group.size, meetings))
        return terms.constant + terms.root * math.sqrt(self.bytes)


def nonnegative_least_squares(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimises |matrix x - target|: the active-set method of Lawson and Hanson (1974, chapter 23).

    Parameters
    ----------
    matrix, target
        float64 (samples, unknowns) and (samples,).
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    count = scaled.shape[1]
    solution, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(target).max(initial=0.0))) * max(scaled.shape)
    for _ in range(10 * count):
        gradient = scaled.T @ (target - scaled @ solution)
        gradient[free] = -math.inf
        entering = int(np.argmax(gradient)) if count else 0
        if not count or gradient[entering] <= tolerance:
            break
        free[entering] = True
        while True:
            trial = np.zeros(count)
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if (trial[free] > 0).all():
                solution = trial
                break
            # Go towards the trial until the first unknown reaches zero, and hold that one there.
            low = free & (trial <= 0)
            step = float(np.min(solution[low] / (solution[low] - trial[low])))
            solution = solution + step * (trial - solution)
            free &= solution > tolerance
            solution[~free] = 0.0
    return solution / scale


def fit_relative(
    columns: Mapping[str, np.ndarray], seconds: np.ndarray, known: np.ndarray | float = 0.0
) -> dict[str, float]:
    """Non-negative coefficients that minimise the mean absolute relative error of known + sum(coefficient * column).

    Iteratively reweighted least squares: absolute errors, as squares divided by their last size.
    """
    matrix = np.stack(list(columns.values()), axis=1) / seconds[:, None]
    target = 1.0 - known / seconds
    best, least = np.zeros(matrix.shape[1]), math.inf
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        found = nonnegative_least_squares(matrix * weights[:, None], target * weights)
        errors = np.abs(matrix @ found - target)
        mean = float(errors.mean())
        if mean < least * (1 - 1e-6):
            best, least = found, mean
        weights = 1.0 / np.sqrt(np.maximum(errors, _SMALLEST_RESIDUAL))
    return dict(zip(columns, map(float, best)))


def tier_columns(tier: Tier, samples: Sequence[Sample], tables: Collection[str]) -> dict[str, np.ndarray]:
    """Per unknown constant of a tier what one unit of it adds to each sample, in seconds.

    Unknowns are "latency", "hop", "ramp", and one inverse bandwidth per name such as "group 8", or "group" where
    `tables` does not ask for rings by group size.
    """
    found: dict[str, np.ndarray] = {}

    def add(name: str, at: int, amount: float) -> None:
        found.setdefault(name, np.zeros(len(samples)))[at] += amount

    for name in ("latency", "hop", "ramp"):
        found[name] = np.zeros(len(samples))
    for at, sample in enumerate(samples):
        meeting, share, rings = _outermost(tier, sample)
        passes, exchange = PASSES[sample.kind], sample.kind == "all_to_all"
        add("latency", at, 1.0)
        add("hop", at, passes * math.ceil(math.log2(meeting.most)))
        add("ramp", at, share * math.sqrt(rings * sample.bytes))
        links = meeting.member_links if exchange else meeting.ring_links
        for table, part in _parts(sample, tables):
            sized = table != "group" or "group" in tables
            add(f"{table} {meeting.most}" if sized else table, at, part * share * sample.bytes / links)
    return found


def _parts(sample: Sample, tables: Collection[str]) -> tuple[tuple[str, float], ...]:
    """The tables whose bandwidths a sample depends on, and the part of its bytes that each carries."""
    gather = "gather" if "gather" in tables else "group"
    if sample.kind == "all_to_all":
        return (("exchange" if "exchange" in tables else "group", 1.0),)
    if sample.kind == "all_reduce":
        return (
            (("all_reduce", 1.0),) if sample.in_switch and "all_reduce" in tables else (("group", 0.5), (gather, 0.5))
        )
    return ((gather if sample.kind == "all_gather" else "group", 1.0),)


def _outermost(tier: Tier, sample: Sample) -> tuple[Meeting, float, int]:
    """The meeting on the tier, the share of the payload that each ring carries over it, and the number of rings."""
    if not sample.group.meetings or sample.group.meetings[-1].tier.name != tier.name:
        raise ClusterError(f"a collective that does not meet on tier {tier.name} says nothing of it; leave it out.")
    rings = math.prod(meeting.fewest for meeting in sample.group.meetings[:-1])
    meeting, size = sample.group.meetings[-1], sample.group.size
    if sample.kind == "all_to_all":
        return meeting, meeting.reach / size, rings
    return meeting, PASSES[sample.kind] * (size - 1) / size / rings, rings


def fit_tier(tier: Tier, samples: Sequence[Sample], tables: Collection[str] = ()) -> Tier:
    """The tier with constants from samples of groups whose outermost tier it is; tiers inside keep theirs.

    Parameters
    ----------
    tables
        Which of `TABLES` to fit by group size; else one bandwidth stands for all sizes and kinds.

    Raises
    ------
    ClusterError
        No samples, or one of a group that does not meet on the tier.
    """
    if not samples:
        raise ClusterError(f"tier {tier.name} cannot be fitted to nothing; measure some collectives over it.")
    inside = np.array([sample.seconds_inside for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    return tier_with(tier, fit_relative(tier_columns(tier, samples, tables), seconds, inside))


def tier_with(tier: Tier, found: Mapping[str, float]) -> Tier:
    """A tier with fitted constants, by the names of `tier_columns`; an inverse bandwidth of 0 keeps the tier's own."""
    rates: dict[str, dict[int, float]] = {table: {} for table in TABLES}
    for name, inverse in found.items():
        table, _, size = name.partition(" ")
        if table in rates and size and inverse > 0:
            rates[table][int(size)] = 1.0 / inverse
    fields: dict[str, object] = {
        "latency_seconds": found["latency"],
        "hop_seconds": found["hop"],
        "ramp_seconds_per_sqrt_byte": found["ramp"],
        "group_bandwidths": tuple(sorted(rates["group"].items())),
        "gather_bandwidths": tuple(sorted(rates["gather"].items())),
        "exchange_bandwidths": tuple(sorted(rates["exchange"].items())),
        "all_reduce_bandwidths": (),
    }
    if found.get("group", 0.0) > 0:
        rate = 1.0 / found["group"]
        fields["bandwidth_bytes_per_second"] = max(tier.bandwidth_bytes_per_second, rate)
        fields["efficiency"] = min(1.0, rate / max(tier.bandwidth_bytes_per_second, rate))
    made = replace(tier, **fields)  # type: ignore[arg-type]
    summed = tuple((size, min(rate, 2 * made.bandwidth(size))) for size, rate in sorted(rates["all_reduce"].items()))
    return replace(made, all_reduce_bandwidths=summed)
