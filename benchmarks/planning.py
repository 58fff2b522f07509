"""Planning time and proof for published models: `python benchmarks/planning.py [MODEL:NODES ...]` prints a table.

Seconds are wall time of `auto_parallel` over all meshes it tries; the gap is that of the plan's own mesh.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.baselines import compare

CASES = (
    ("gpt2", 1, 64, 1024),
    ("gpt2-xl", 2, 64, 1024),
    ("llama-3-8b", 4, 64, None),
    ("resnet-50", 1, None, None),
    ("dlrm", 1, None, None),
    ("vit-l", 1, None, None),
    ("bert-large", 1, None, None),
)


def main(arguments: list[str]) -> None:
    """Plan every case, and its baselines."""
    wanted = {name.partition(":")[0] for name in arguments}
    columns = ("model", "nodes x 8 A100-80G", "mesh", "seconds", "status", "gap", "objective s", "best baseline", "s")
    table = Table(*columns)
    for model, nodes, batch, sequence in CASES:
        if wanted and model not in wanted:
            continue
        started = time.monotonic()
        plan = auto_parallel(model, "a100-80g", nodes=nodes, batch=batch, sequence=sequence)
        seconds = time.monotonic() - started
        rows = compare(model, "a100-80g", nodes=nodes, batch=batch, sequence=sequence, found=plan).rows[1:]
        fitting = [row for row in rows if row.plan and row.fits]
        best = min(fitting, key=lambda row: row.plan.objective_seconds, default=None)
        table.add_row(
            model,
            str(nodes),
            str(plan.mesh),
            f"{seconds:.1f}",
            plan.status.value,
            f"{plan.gap:.1e}",
            f"{plan.objective_seconds:.6f}",
            best.name if best else "none fits",
            f"{best.plan.objective_seconds:.6f}" if best and best.plan else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
