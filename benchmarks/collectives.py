"""The cost model's collectives against measured ones: `python benchmarks/collectives.py collectives.csv [--points]`.

With `--fit` the link constants are fitted anew to the table and printed as they stand in the presets; with
`--held-out` they are fitted to every second point and judged by the others, and once more the other way round.

The table has one row per measurement with the columns gpu, collective, n_ranks, n_nodes, bytes, time_us, busbw_GBps and
algo (NCCL tests' conventions: bytes is the larger of the tensors before and after; bus bandwidth where the time is not
given; "ring" is an all-reduce that the switch does not sum). nnScaler's rows were measured through calls on lists of
tensors (`sbp.planner.list_calls`), all others are nccl-tests or equal to them. Prints the mean absolute and the signed
mean error by device, collective and group.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster
from sbp.planner.cluster_file import dump_cluster
from sbp.planner.collective import placement
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.fitting import Sample, fit_relative, tier_columns, tier_with
from sbp.planner.list_calls import ListCalls

PRESETS = {
    "A100-80G-SXM": "a100-80g",
    "H200-141G-SXM": "h200",
    "B200-SXM": "b200",
    "MI300X": "mi300x",
    "V100-32G-SXM2": "v100-32g",
    "V100-SXM2": "v100-32g",
    "MI200(GCD)": "mi250x",
}
"""The table's device names -> cluster presets."""

_FACTORS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


TABLES = {
    "A100-80G-SXM": ("group",),
    "H200-141G-SXM": ("all_reduce",),
    "B200-SXM": ("all_reduce",),
    "V100-SXM2": ("group",),
    "MI200(GCD)": ("group", "exchange"),
}
"""Device -> the bandwidths of its links that are fitted by group size; devices with a row or two are not fitted."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One row of the table, in seconds and bytes per rank."""

    gpu: str
    kind: str
    ranks: int
    nodes: int
    bytes: float
    algorithm: str
    source: str
    seconds: float

    @property
    def lists(self) -> bool:
        """Whether the collective was called on lists of tensors."""
        return "nnscaler" in self.source

    @property
    def in_switch(self) -> bool:
        """Whether the switch could sum."""
        return self.algorithm != "ring"


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement beside its prediction, in seconds."""

    measured: Measurement
    predicted: float

    @property
    def error(self) -> float:
        """Signed error as a fraction of the measured time."""
        return self.predicted / self.measured.seconds - 1


@dataclass(frozen=True, slots=True)
class Links:
    """What predictions of one device need: its cluster, and constants of calls on lists."""

    cluster: Cluster
    lists: ListCalls

    def of_size(self, nodes: int, ranks: int) -> Cluster:
        """The cluster as large as the measured one."""
        cluster = self.cluster.with_nodes(nodes)
        return cluster.with_devices_per_node(ranks // nodes) if nodes > 1 or ranks > cluster.size else cluster

    def seconds(self, row: Measurement) -> float:
        """The prediction."""
        cluster = self.of_size(row.nodes, row.ranks)
        if not row.in_switch:
            tiers = tuple(replace(tier, all_reduce_bandwidths=()) for tier in cluster.tiers)
            cluster = replace(cluster, tiers=tiers)
        model = AnalyticCostModel(cluster, lists=self.lists if row.lists else None)
        return model.collective_seconds(row.kind, Mesh((row.ranks,)), 0, row.bytes)


def read(path: Path) -> list[Measurement]:
    """The rows of the table."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        ranks, kind, payload = int(row["n_ranks"]), row["collective"], float(row["bytes"])
        if row["time_us"]:
            seconds = float(row["time_us"]) * 1e-6
        else:
            seconds = _FACTORS[kind] * (ranks - 1) / ranks * payload / (float(row["busbw_GBps"]) * 1e9)
        if kind == "all_to_all" and "nnscaler" in row["source"]:
            payload /= ranks  # its profiler gives every rank 1/ranks of the stated size (profiler/benchmark_comm.py)
        found.append(
            Measurement(row["gpu"], kind, ranks, int(row["n_nodes"]), payload, row["algo"], row["source"], seconds)
        )
    return found


def compare(path: Path) -> list[Point]:
    """Every row of the table beside the prediction from the presets."""
    links = {gpu: Links(Cluster.preset(preset), ListCalls()) for gpu, preset in PRESETS.items()}
    return [Point(row, links[row.gpu].seconds(row)) for row in read(path)]


def held_out(path: Path) -> list[Point]:
    """Every row of a fitted device beside the prediction from constants that were fitted without it."""
    points = []
    for gpu in TABLES:
        rows = sorted((row for row in read(path) if row.gpu == gpu), key=_order)
        for half in (0, 1):
            links = fitted(gpu, rows[half::2])
            points += [Point(row, links.seconds(row)) for row in rows[1 - half :: 2]]
    return points


def _order(row: Measurement) -> tuple:
    return (row.nodes, row.kind, row.in_switch, row.source, row.ranks, row.bytes)


def fitted(gpu: str, rows: list[Measurement]) -> Links:
    """Constants of a device's links fitted to rows: first inside a node, then between nodes."""
    links = Links(Cluster.preset(PRESETS[gpu]), ListCalls())
    for at, across in ((0, False), (1, True)):
        used = [row for row in rows if (row.nodes > 1) == across and gpu in TABLES]
        if len(used) < 5:
            continue  # a single row between nodes says nothing of latencies
        samples = [_sample(links, row) for row in used]
        tier = links.cluster.tiers[at]
        tables = TABLES[gpu] if not across else ()
        seconds = np.array([sample.seconds for sample in samples])
        known = np.array([sample.seconds_inside for sample in samples])
        columns = tier_columns(tier, samples, tables)
        extra = [
            ListCalls.columns(row.kind, row.ranks, row.bytes, links.cluster.device) if row.lists else {} for row in used
        ]
        names = sorted({name for found in extra for name in found})
        columns |= {name: np.array([found.get(name, 0.0) for found in extra]) for name in names}
        found = fit_relative(columns, seconds, known)
        lists = ListCalls(found["call"], found["kernel"], 1 / found["copy"]) if names else links.lists
        tiers = (*links.cluster.tiers[:at], tier_with(tier, found), *links.cluster.tiers[at + 1 :])
        links = Links(replace(links.cluster, tiers=tiers), lists)
    return links


def _sample(links: Links, row: Measurement) -> Sample:
    group = placement(links.of_size(row.nodes, row.ranks), range(row.ranks))
    return Sample(row.kind, group, row.bytes, row.seconds, row.in_switch)


def main(arguments: list[str] | None = None) -> int:
    """Print the table of errors."""
    parser = argparse.ArgumentParser(description="The cost model's collectives against measured ones.")
    parser.add_argument("table", type=Path, help="a collectives.csv")
    parser.add_argument("--points", action="store_true", help="print every point")
    parser.add_argument("--json", action="store_true", help="print the points as JSON")
    parser.add_argument("--fit", action="store_true", help="fit the link constants to the table and print them")
    parser.add_argument("--held-out", action="store_true", help="judge each point by constants fitted without it")
    options = parser.parse_args(arguments)
    if not options.table.is_file():
        print(f"{options.table} is not a file; give the path of a table of measured collectives.", file=sys.stderr)
        return 2
    if options.fit:
        rows = read(options.table)
        for gpu in TABLES:
            links = fitted(gpu, [row for row in rows if row.gpu == gpu])
            print(f"# {gpu}: {links.lists}\n{dump_cluster(links.cluster).partition('tiers:')[2].strip()}")
        return 0
    points = held_out(options.table) if options.held_out else compare(options.table)
    if options.json:
        print(
            json.dumps(
                [asdict(point.measured) | {"predicted": point.predicted, "error": point.error} for point in points]
            )
        )
        return 0
    groups: dict[tuple, list[Point]] = defaultdict(list)
    for point in points:
        row = point.measured
        groups[row.gpu, row.kind, row.nodes, row.ranks].append(point)
    print(f"{'device':<15}{'collective':<16}{'nodes':>5}{'ranks':>6}{'points':>8}{'error':>9}{'signed':>9}{'worst':>9}")
    for (gpu, kind, nodes, ranks), members in sorted(groups.items()):
        print(f"{gpu:<15}{kind:<16}{nodes:>5}{ranks:>6}{_figures(members)}")
        for point in members if options.points else ():
            row = point.measured
            print(
                f"{'':>15}{int(row.bytes):>16} bytes  measured {row.seconds * 1e6:>12.1f} us  "
                f"predicted {point.predicted * 1e6:>12.1f} us  {point.error:>+7.1%}  {row.algorithm}"
            )
    for gpu in sorted({point.measured.gpu for point in points}):
        print(f"{gpu:<15}{'all':<16}{'':>5}{'':>6}{_figures([point for point in points if point.measured.gpu == gpu])}")
    print(f"{'all':<15}{'':<16}{'':>5}{'':>6}{_figures(points)}")
    return 0


def _figures(points: list[Point]) -> str:
    errors = [point.error for point in points]
    mean, signed = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
    return f"{len(points):>8}{mean:>9.1%}{signed:>+9.1%}{max(errors, key=abs):>+9.1%}"


if __name__ == "__main__":
    sys.exit(main())
