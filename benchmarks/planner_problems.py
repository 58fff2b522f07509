"""Seconds to prove the planner's own problems, memory left out: `python benchmarks/planner_problems.py`.

The time is that of `solve` alone, after the problem is built.
"""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.table import Table

from sbp.mesh import Mesh
from sbp.models import build
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.formulation import formulate
from sbp.planner.solver import Limits, solve
from sbp.planner.strategies import Strategies
from sbp.training import training_step

CASES = (("gpt2", (2, 8), 64, 1024), ("gpt2", (4, 8), 64, 1024), ("llama-3-8b", (8, 8), 64, 8192))


def main() -> None:
    """Build and solve every case three times; the table shows the median."""
    table = Table("model", "mesh", "nodes", "strategies", "build s", "solve s", "CPU s", "status", "gap")
    for model, shape, batch, sequence in CASES:
        mesh = Mesh(shape)
        costs = AnalyticCostModel(Cluster.preset("a100-80g", nodes=math.prod(shape) // 8))
        graph = training_step(build(model), batch, sequence)
        started = time.monotonic()
        problem = formulate(Strategies(graph, mesh, costs, BoxingTable(mesh, costs))).problem
        built = time.monotonic() - started
        runs = []
        for _ in range(3):
            started, cpu = time.monotonic(), time.process_time()
            assignment = solve(problem, Limits(time_limit=60.0))
            runs.append((time.monotonic() - started, time.process_time() - cpu, assignment))
        seconds, cpu_seconds, assignment = sorted(runs, key=lambda run: run[0])[1]
        table.add_row(
            model,
            str(mesh),
            f"{problem.node_count:,}",
            f"{problem.strategy_count:,}",
            f"{built:.1f}",
            f"{seconds:.2f}",
            f"{cpu_seconds:.2f}",
            assignment.status.value,
            f"{assignment.gap:.1e}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
