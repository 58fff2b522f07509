"""Predicted against published step times: tables by source, ranking, memory, and how the constants were fitted.

    python benchmarks/published_runs.py runs.csv runs_vtrain_single_node.csv
    python benchmarks/published_runs.py --fit all ...       the constants that fit best, beside those of the package
    python benchmarks/published_runs.py --fit korthikanti ...   fitted on Korthikanti et al. alone, the others held out
    python benchmarks/published_runs.py --fit sources ...       Megatron's constants with each of their sets held out
    python benchmarks/published_runs.py --fit halves ...        every second row held out

A constant is named by where it is: `kernels.last_wave` (sbp/planner/kernels.py), `step.straggling`
(sbp/planner/replay/step.py), `framework.NAME.TRAIT` (sbp/planner/frameworks.yaml), `device.NAME.FIELD` and
`tier.CLUSTER.TIER.FIELD` (sbp/planner/presets). Needs SciPy for --fit.

Fits and what they print take the first configuration of a row that can mean several, and times in closed form; the
tables without --fit simulate all of them and take the fastest that fits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.frameworks import Framework
from sbp.planner.kernels import CONSTANTS
from sbp.planner.replay.rows import Row, rows_of
from sbp.planner.replay.step import STEP_CONSTANTS, closed_form_seconds, step_pipeline
from sbp.planner.replay.validation import SETS, set_of, validation

FITTED = {
    "megatron": (
        ("kernels.last_wave", 0.2, 1.0),
        ("kernels.score_products", 0.1, 0.87),
        ("kernels.score_passes", 0.3, 1.0),
        ("step.straggling", 0.0, 0.03),
        ("framework.megatron-deepspeed.forward_host_us", 5.0, 150.0),
        ("framework.megatron-deepspeed.micro_batch_host_us", 0.0, 5000.0),
    ),
    "bloom": (
        ("framework.bigscience.blocking_us", 0.0, 200.0),
        ("tier.jean-zay.nvlink.group_bandwidths", 0.2, 1.5),
        ("tier.jean-zay.omni-path.efficiency", 0.2, 1.0),
        ("kernels.unaligned_scores", 0.1, 1.0),
    ),
    "llm-foundry": (
        ("device.H100-80G-SXM.sustained", 0.6, 1.0),
        ("framework.fsdp-llm-foundry.attention_efficiency", 0.1, 1.0),
        ("framework.fsdp-llm-foundry.pointwise_traffic", 0.5, 4.0),
        ("framework.fsdp-llm-foundry.loss_traffic", 0.5, 10.0),
        ("framework.fsdp-llm-foundry.exposed_sharding", 0.0, 1.0),
    ),
}
"""Group of constants -> (name, least, most); each group is fitted on sets of its own, in this order."""

FIT_SETS = {
    "megatron": ("core", "vTrain multi-node", "vTrain single node"),
    "bloom": ("BLOOM",),
    "llm-foundry": ("llm-foundry",),
}
TIED = {
    "framework.megatron-deepspeed.forward_host_us": (("framework.megatron-deepspeed.backward_host_us", 0.8),),
}
"""Constants that follow another, with their ratio to it."""


def current(name: str) -> float:
    """The package's value of a constant; of a table of bandwidths 1, the factor that it is multiplied by."""
    kind, *where = name.split(".")
    if kind == "kernels":
        return getattr(CONSTANTS, where[0])
    if kind == "step":
        return getattr(STEP_CONSTANTS, where[0])
    if kind == "framework":
        return float(getattr(Framework.named(where[0]), where[1]))
    if kind == "tier":
        tier = next(tier for tier in Cluster.preset(where[0]).tiers if tier.name == where[1])
        return 1.0 if where[2] == "group_bandwidths" else getattr(tier, where[2])
    presets = {"H100-80G-SXM": "h100", "A100-80G-SXM": "a100-80g", "A100-40G-SXM": "a100-40g"}
    return getattr(Cluster.preset(presets[where[0]]).device, where[1])


class Predictor:
    """Closed-form step times with some constants changed."""

    def __init__(self, values: Mapping[str, float] = {}) -> None:
        self.values = dict(values)
        for name, value in values.items():
            self.values |= {other: value * ratio for other, ratio in TIED.get(name, ())}
        self._models: dict[Cluster, AnalyticCostModel] = {}
        self._clusters: dict[Cluster, Cluster] = {}
        self.kernels = replace(CONSTANTS, **self._of("kernels"))
        self.step = replace(STEP_CONSTANTS, **self._of("step"))

    def _of(self, *prefix: str) -> dict[str, float]:
        text = ".".join(prefix) + "."
        return {name[len(text) :]: value for name, value in self.values.items() if name.startswith(text)}

    def _cluster(self, cluster: Cluster) -> Cluster:
        if cluster not in self._clusters:
            device = replace(cluster.device, **self._of("device", cluster.device.name))
            tiers = []
            for tier in cluster.tiers:
                changes: dict = self._of("tier", cluster.name, tier.name)
                if factor := changes.get("group_bandwidths"):
                    changes["group_bandwidths"] = tuple((k, rate * factor) for k, rate in tier.group_bandwidths)
                tiers.append(replace(tier, **changes))
            self._clusters[cluster] = replace(cluster, device=device, tiers=tuple(tiers))
        return self._clusters[cluster]

    def seconds(self, row: Row) -> float:
        """Predicted step time of a row that can be replayed."""
        run = row.configuration
        assert run is not None
        cluster = self._cluster(run.cluster)
        traits = self._of("framework", run.framework.name)
        run = replace(run, cluster=cluster, framework=replace(run.framework, **traits))
        model = self._models.setdefault(cluster, AnalyticCostModel(cluster))
        return closed_form_seconds(step_pipeline(run, model, self.kernels, self.step))


def fit(groups: Mapping[str, Sequence[tuple[str, float, float]]], sets: Mapping[str, Sequence[Row]], most: int = 200):
    """Constants that make the robust (soft L1) error of log times least, a group after the other; sets weigh alike."""
    try:
        from scipy.optimize import least_squares
    except ModuleNotFoundError:
        raise SystemExit("--fit needs SciPy; install it with `pip install scipy`.") from None

    found: dict[str, float] = {}
    for group, constants in groups.items():
        chosen = {name: sets[name] for name in FIT_SETS[group] if sets.get(name)}
        if not chosen:
            continue
        rows, weights = [], []
        for members in chosen.values():
            kept = members[:: max(1, len(members) // most)]
            rows += kept
            weights += [1.0 / math.sqrt(len(kept))] * len(kept)
        measured = np.log([row.seconds for row in rows])
        names = [name for name, _, _ in constants]
        low, high = (np.array([c[k] for c in constants]) for k in (1, 2))
        scale = np.array([current(name) for name in names])
        residual = _Residual(names, rows, scale, measured, np.array(weights), dict(found))
        start = np.clip(1.0, low / scale + 1e-6, high / scale - 1e-6)
        scaled = 0.05 * math.sqrt(1.0 / max(len(rows), 1))
        result = least_squares(
            residual,
            start,
            bounds=(low / scale, high / scale),
            loss="soft_l1",
            f_scale=scaled,
            diff_step=3e-3,
            max_nfev=25,
        )
        found |= {name: float(value) for name, value in zip(names, result.x * scale)}
    return found


@dataclass(frozen=True)
class _Residual:
    """Weighted log errors of rows at constants, which are given relative to a scale."""

    names: Sequence[str]
    rows: Sequence[Row]
    scale: np.ndarray
    measured: np.ndarray
    weights: np.ndarray
    known: Mapping[str, float]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        predictor = Predictor({**self.known, **dict(zip(self.names, x * self.scale))})
        return (np.log([predictor.seconds(row) for row in self.rows]) - self.measured) * self.weights


def errors(predictor: Predictor, rows: Sequence[Row]) -> np.ndarray:
    """Signed relative errors."""
    return np.array([predictor.seconds(row) / row.seconds - 1.0 for row in rows if row.seconds])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--fit", nargs="?", const="all", choices=("all", "korthikanti", "sources", "halves"))
    arguments = parser.parse_args()
    began = time.perf_counter()
    rows = rows_of(arguments.files)
    if not arguments.fit:
        print(validation(rows).text())
        print(f"\n{len(rows)} rows in {time.perf_counter() - began:.1f} s")
        return
    sets: dict[str, list[Row]] = {}
    for row in rows:
        if row.configuration is not None and row.seconds:
            sets.setdefault(set_of(row), []).append(row)
    package = Predictor()
    if arguments.fit == "sources":
        held_out_sources(sets, package)
        return
    if arguments.fit == "halves":
        held_out_halves(sets, package)
        return
    groups = FITTED
    if arguments.fit == "korthikanti":
        groups = {"megatron": FITTED["megatron"][:4]}
        sets_fitted = {"core": [row for row in sets["core"] if row.id.startswith("korthikanti")]}
    else:
        sets_fitted = sets
    found = fit(groups, sets_fitted)
    print(f"{'constant':58s} {'fitted':>10s} {'package':>10s}")
    for name, value in found.items():
        print(f"{name:58s} {value:10.4g} {current(name):10.4g}")
    fitted = Predictor(found)
    print(f"\n{'set':24s} {'rows':>5s} {'fitted':>8s} {'package':>8s}   mean absolute error, %")
    for name, members in sets.items():
        a, b = (100 * np.abs(errors(p, members)).mean() for p in (fitted, package))
        print(f"{name:24s} {len(members):5d} {a:8.2f} {b:8.2f}")


def held_out_sources(sets: Mapping[str, Sequence[Row]], package: Predictor) -> None:
    """Each set that Megatron's constants are fitted on, predicted with constants fitted on the others."""
    print(f"{'held out':24s} {'rows':>5s} {'held out':>9s} {'package':>8s}   mean absolute error, %")
    groups = {"megatron": FITTED["megatron"]}
    for name in FIT_SETS["megatron"]:
        members = sets[name]
        found = fit(groups, {other: rows for other, rows in sets.items() if other != name}, most=60)
        a, b = (100 * np.abs(errors(p, members)).mean() for p in (Predictor(found), package))
        print(f"{name:24s} {len(members):5d} {a:9.2f} {b:8.2f}", flush=True)


def held_out_halves(sets: Mapping[str, Sequence[Row]], package: Predictor) -> None:
    """Every second row of each set, predicted with constants fitted on the others."""
    fitted = {name: members[::2] for name, members in sets.items() if name in SETS}
    predictor = Predictor(fit(FITTED, fitted, most=60))
    print(f"{'set':24s} {'rows':>5s} {'fitted':>8s} {'held out':>9s} {'package':>8s}   mean absolute error, %")
    for name, members in fitted.items():
        other = sets[name][1::2]
        seen, unseen = (100 * np.abs(errors(predictor, rows)).mean() for rows in (members, other))
        print(
            f"{name:24s} {len(other):5d} {seen:8.2f} {unseen:9.2f} {100 * np.abs(errors(package, other)).mean():8.2f}"
        )


if __name__ == "__main__":
    main()
