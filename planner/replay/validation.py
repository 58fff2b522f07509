"""Published runs against their predictions: errors by source beside a trivial baseline, ranking, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp.errors import SbpError
from sbp.planner.replay.configuration import Configuration
from sbp.planner.replay.prediction import model_flops, predict
from sbp.planner.replay.rows import Row

SETS = {
    "core": ("megatron_sc21_t1_", "megatron_sc21_t2_ptdp", "korthikanti_t5", "korthikanti_dp8"),
    "vTrain multi-node": ("vtrain_multi",),
    "vTrain single node": ("vtrain_single",),
    "BLOOM": ("bloom_prequel",),
    "llm-foundry": ("llmfoundry",),
}
"""Sets with a target -> how the ids of their rows begin: core is Megatron SC'21 and Korthikanti et al."""

PARALLEL = ("tp", "pp", "dp", "vpp", "zero_stage", "sequence_parallel", "micro_batch")
"""Columns of the parallel configuration: rows that differ in these only are ranked against each other."""

SAME = (
    "model_family",
    "layers",
    "hidden",
    "heads",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "precision",
    "gpu",
    "gpus",
    "global_batch",
)


@dataclass(frozen=True, slots=True)
class Result:
    """A row with its prediction.

    Attributes
    ----------
    seconds, peak_bytes
        Predicted, or None.
    reason
        Why there is no prediction, or nothing to hold it against.
    """

    row: Row
    seconds: float | None
    peak_bytes: float | None
    reason: str

    @property
    def error(self) -> float | None:
        """Signed, as a fraction of the measured step time."""
        if self.seconds is None or not self.row.seconds:
            return None
        return self.seconds / self.row.seconds - 1.0

    @property
    def memory_error(self) -> float | None:
        """Signed, as a fraction of the measured peak memory."""
        if self.peak_bytes is None or not self.row.peak_bytes:
            return None
        return self.peak_bytes / self.row.peak_bytes - 1.0


@dataclass(frozen=True)
class Summary:
    """Errors over some rows, as fractions.

    Attributes
    ----------
    rows, replayed
        How many there are, and how many were predicted and have a measured time.
    mean_absolute, median_absolute, bias
        Of the signed errors.
    baseline
        Mean absolute error if every row ran at one utilisation, the one that fits these rows best.
    memory
        Mean absolute error of the peak memory, over `memory_rows`.
    """

    name: str
    rows: int
    replayed: int
    mean_absolute: float | None
    median_absolute: float | None
    bias: float | None
    baseline: float | None
    memory: float | None
    memory_rows: int

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": self.rows,
            "replayed": self.replayed,
            "mean_absolute_error": self.mean_absolute,
            "median_absolute_error": self.median_absolute,
            "mean_error": self.bias,
            "baseline_mean_absolute_error": self.baseline,
            "memory_rows": self.memory_rows,
            "memory_mean_absolute_error": self.memory,
        }


@dataclass(frozen=True)
class Ranking:
    """How well configurations are told apart.

    Attributes
    ----------
    groups
        Groups of at least two rows that differ in the parallel configuration only.
    regret
        Mean over groups of how much slower the configuration predicted best was than the best measured one.
    agreement
        Fraction of pairs within groups whose order is predicted right.
    """

    groups: int
    regret: float
    agreement: float


@dataclass(frozen=True)
class Validation:
    """Rows with predictions, and what follows."""

    results: tuple[Result, ...]
    by_set: tuple[Summary, ...]
    by_source: tuple[Summary, ...]
    ranking: Ranking | None
    total: Summary

    def to_json(self) -> dict[str, Any]:
        """`summary` and `rows`."""
        ranking = self.ranking
        return {
            "summary": {
                "all": self.total.to_json(),
                "sets": {summary.name: summary.to_json() for summary in self.by_set},
                "sources": {summary.name: summary.to_json() for summary in self.by_source},
                "ranking": None
                if ranking is None
                else {"groups": ranking.groups, "mean_regret": ranking.regret, "pair_agreement": ranking.agreement},
            },
            "rows": [
                {
                    "id": result.row.id,
                    "source": result.row.source,
                    "measured_seconds": result.row.seconds,
                    "predicted_seconds": result.seconds,
                    "error": result.error,
                    "reason": result.reason or None,
                    "measured_peak_bytes": result.row.peak_bytes,
                    "predicted_peak_bytes": result.peak_bytes,
                }
                for result in self.results
            ],
        }

    def text(self) -> str:
        """Tables for people."""
        titles = (
            ("rows", 5),
            ("replayed", 8),
            ("mean |error|", 12),
            ("median", 7),
            ("bias", 7),
            ("baseline", 8),
            ("memory", 7),
        )
        lines = [" ".join((" " * 52, *(f"{title:>{width}s}" for title, width in titles)))]
        for title, summaries in (("by set", self.by_set), ("by source", self.by_source), ("", (self.total,))):
            if title and summaries:
                lines.append(title)
            lines += [_line(summary) for summary in summaries]
        if self.ranking is not None:
            lines.append(
                f"ranking: {self.ranking.groups} groups, mean regret {100 * self.ranking.regret:.1f} %, "
                f"{100 * self.ranking.agreement:.0f} % of pairs in the right order"
            )
        lines.append("baseline: mean |error| if every row of the set ran at one utilisation, the one that fits best")
        return "\n".join(lines)


def _line(summary: Summary) -> str:
    def percent(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{100 * value:{sign}.1f} %"

    name = " ".join(summary.name.split())
    # Sources of one publication begin alike: their ends tell them apart.
    name = name if len(name) <= 50 else f"{name[:22]}...{name[-25:]}"
    return (
        f"  {name:50s} {summary.rows:5d} {summary.replayed:8d} {percent(summary.mean_absolute):>12s} "
        f"{percent(summary.median_absolute):>7s} {percent(summary.bias, '+'):>7s} {percent(summary.baseline):>8s} "
        f"{percent(summary.memory):>7s}"
    )


def validation(rows: Iterable[Row], progress: Callable[[str], None] | None = None) -> Validation:
    """Predict every row and compare."""
    results: list[Result] = []
    known: dict[Configuration, _Outcome] = {}
    for count, row in enumerate(rows, start=1):
        if progress and count % 100 == 0:
            progress(f"{count} rows")
        found = [_outcome(run, known) for run in row.alternatives] or [_Outcome(reason=row.reason)]
        best = min(found, key=_Outcome.rank)
        unmeasured = "its step time was not measured" if row.seconds is None else ""
        results.append(Result(row, best.seconds, best.peak_bytes, best.reason or unmeasured))
    named: dict[str, list[Result]] = {}
    by_source: dict[str, list[Result]] = {}
    for result in results:
        named.setdefault(set_of(result.row), []).append(result)
        by_source.setdefault(result.row.source, []).append(result)
    return Validation(
        tuple(results),
        tuple(_summary(name, named[name]) for name in SETS if name in named),
        tuple(_summary(name, members) for name, members in by_source.items()),
        _ranking(results),
        _summary("all", results),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is kept of a prediction, whose events are many; or why there is none."""

    seconds: float | None = None
    peak_bytes: float | None = None
    feasible: bool = False
    reason: str = ""

    def rank(self) -> tuple[bool, bool, float]:
        """What fits first, the fastest of it; of what does not fit, the smallest."""
        best = self.seconds if self.feasible else self.peak_bytes
        return self.seconds is None, not self.feasible, best or 0.0


def _outcome(run: Configuration, known: dict[Configuration, _Outcome]) -> _Outcome:
    if run not in known:
        try:
            found = predict(run)
            known[run] = _Outcome(found.step_seconds, found.peak_bytes, found.feasible)
        except SbpError as error:
            known[run] = _Outcome(reason=str(error))
    return known[run]


def set_of(row: Row) -> str:
    """The set that a row belongs to: one of `SETS`, or its source."""
    return next((name for name, starts in SETS.items() if row.id.startswith(starts)), row.source)


def _summary(name: str, results: Sequence[Result]) -> Summary:
    errors = sorted(result.error for result in results if result.error is not None)
    memory = [abs(result.memory_error) for result in results if result.memory_error is not None]
    absolute = sorted(map(abs, errors))
    return Summary(
        name,
        len(results),
        len(errors),
        _mean(absolute),
        absolute[len(absolute) // 2] if absolute else None,
        _mean(errors),
        _baseline(results),
        _mean(memory),
        len(memory),
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _baseline(results: Sequence[Result]) -> float | None:
    """Mean absolute error of FLOP / (peak * one utilisation): the weighted median of the ratios is the best one."""
    times = []
    for result in results:
        run = result.row.configuration
        if run is not None and result.row.seconds:
            peak = run.cluster.device.peak("bf16") * run.ranks
            times.append(result.row.seconds * peak / model_flops(run))
    if not times:
        return None
    # sum |x / t - 1| over the rows is least at a weighted median of t with weights 1 / t.
    times.sort()
    half, seen = sum(1.0 / t for t in times) / 2, 0.0
    best = times[-1]
    for t in times:
        seen += 1.0 / t
        if seen >= half:
            best = t
            break
    return sum(abs(best / t - 1.0) for t in times) / len(times)


def _ranking(results: Iterable[Result]) -> Ranking | None:
    groups: dict[tuple[str, ...], dict[tuple[str, ...], list[Result]]] = {}
    for result in results:
        if result.error is not None:
            values = result.row.values
            key = (
                set_of(result.row),
                result.row.source,
                *_columns(values, SAME),
                *_columns(values, ("framework", "recompute")),
            )
            groups.setdefault(key, {}).setdefault(_columns(values, PARALLEL), []).append(result)
    regrets, right, pairs = [], 0, 0
    for choices in groups.values():
        if len(choices) < 2:
            continue
        # Repeated measurements of one configuration are one choice with their mean time.
        points = [
            (sum(r.seconds or 0.0 for r in same) / len(same), sum(r.row.seconds or 0.0 for r in same) / len(same))
            for same in choices.values()
        ]
        chosen = min(points)[1]
        regrets.append(chosen / min(measured for _, measured in points) - 1.0)
        for at, (a, b) in enumerate(points):
            for c, d in points[at + 1 :]:
                pairs += 1
                right += (a - c) * (b - d) > 0
    return Ranking(len(regrets), sum(regrets) / len(regrets), right / pairs) if regrets else None


def _columns(values: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(values.get(name, "") for name in names)
