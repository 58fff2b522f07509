"""The cost model's collectives against measured ones: `python benchmarks/collectives.py collectives.csv [--points]`.

The table has one row per measurement with the columns gpu, collective, n_ranks, n_nodes, bytes, time_us, busbw_GBps and
algo (NCCL tests' conventions: bytes is the larger of the tensors before and after; bus bandwidth where the time is not
given). Prints the mean absolute and the signed mean error by device, collective and group.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel

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


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement beside its prediction, in seconds."""

    gpu: str
    kind: str
    ranks: int
    nodes: int
    bytes: float
    algorithm: str
    source: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Signed error as a fraction of the measured time."""
        return self.predicted / self.measured - 1


def compare(path: Path) -> list[Point]:
    """Every row of the table beside the model's prediction."""
    models: dict[tuple[str, int, int, bool], AnalyticCostModel] = {}
    points = []
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        ranks, nodes, kind = int(row["n_ranks"]), int(row["n_nodes"]), row["collective"]
        payload, ring = float(row["bytes"]), row["algo"] == "ring"
        if row["time_us"]:
            measured = float(row["time_us"]) * 1e-6
        else:
            measured = _FACTORS[kind] * (ranks - 1) / ranks * payload / (float(row["busbw_GBps"]) * 1e9)
        if kind == "all_to_all" and "nnscaler" in row["source"]:
            payload /= ranks  # its profiler gives every rank 1/ranks of the stated size (profiler/benchmark_comm.py)
        key = (row["gpu"], nodes, ranks, ring)
        if key not in models:
            models[key] = AnalyticCostModel(_cluster(*key))
        predicted = models[key].collective_seconds(kind, Mesh((ranks,)), 0, payload)
        points.append(Point(row["gpu"], kind, ranks, nodes, payload, row["algo"], row["source"], measured, predicted))
    return points


def _cluster(gpu: str, nodes: int, ranks: int, ring: bool) -> Cluster:
    cluster = Cluster.preset(PRESETS[gpu], nodes=nodes)
    if nodes > 1 or ranks > cluster.size:
        cluster = cluster.with_devices_per_node(ranks // nodes)
    if ring:
        cluster = replace(cluster, tiers=tuple(replace(tier, all_reduce_bandwidths=()) for tier in cluster.tiers))
    return cluster


def main(arguments: list[str] | None = None) -> int:
    """Print the table of errors."""
    parser = argparse.ArgumentParser(description="The cost model's collectives against measured ones.")
    parser.add_argument("table", type=Path, help="a collectives.csv")
    parser.add_argument("--points", action="store_true", help="print every point")
    parser.add_argument("--json", action="store_true", help="print the points as JSON")
    options = parser.parse_args(arguments)
    if not options.table.is_file():
        print(f"{options.table} is not a file; give the path of a table of measured collectives.", file=sys.stderr)
        return 2
    points = compare(options.table)
    if options.json:
        fields = ("gpu", "kind", "ranks", "nodes", "bytes", "measured", "predicted", "error")
        print(json.dumps([{field: getattr(point, field) for field in fields} for point in points]))
        return 0
    groups: dict[tuple, list[Point]] = defaultdict(list)
    for point in points:
        groups[point.gpu, point.kind, point.nodes, point.ranks].append(point)
    print(f"{'device':<15}{'collective':<16}{'nodes':>5}{'ranks':>6}{'points':>8}{'error':>9}{'signed':>9}{'worst':>9}")
    for (gpu, kind, nodes, ranks), members in sorted(groups.items()):
        print(f"{gpu:<15}{kind:<16}{nodes:>5}{ranks:>6}{_figures(members)}")
        for point in members if options.points else ():
            print(
                f"{'':>15}{int(point.bytes):>16} bytes  measured {point.measured * 1e6:>12.1f} us  "
                f"predicted {point.predicted * 1e6:>12.1f} us  {point.error:>+7.1%}  {point.algorithm}"
            )
    for gpu in sorted({point.gpu for point in points}):
        print(f"{gpu:<15}{'all':<16}{'':>5}{'':>6}{_figures([point for point in points if point.gpu == gpu])}")
    print(f"{'all':<15}{'':<16}{'':>5}{'':>6}{_figures(points)}")
    return 0


def _figures(points: list[Point]) -> str:
    errors = [point.error for point in points]
    mean, signed = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
    return f"{len(points):>8}{mean:>9.1%}{signed:>+9.1%}{max(errors, key=abs):>+9.1%}"


if __name__ == "__main__":
    sys.exit(main())
