"""Training steps of NumPy ranks in this process against what `sbp profile` makes of this machine.

`python benchmarks/profiled_steps.py [--ranks 2 --ranks 4] [--full]` profiles the machine and then trains models of
other sizes than the profile's own. Ranks of one process take turns, and so do communication and compute, so the
prediction is the sum of a plan's operations. Measured are whole steps, by the processor's clock and the wall's, and the
operations one by one; on a machine with nothing else to do all three agree.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from sbp.initial import draw
from sbp.models import build
from sbp.models.gpt import GPTConfig
from sbp.models.mlp import MLPConfig
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.runtime.executor import Executor
from sbp.runtime.operator_times import timed_operations
from sbp.runtime.profiling import profile
from sbp.runtime.stopwatch import undisturbed
from sbp.runtime.threads import matrix_threads

CASES: dict[str, tuple[Any, int, int | None]] = {
    "gpt 2 x 96": (GPTConfig(layers=2, heads=4, hidden=96, vocabulary=300, positions=48), 8, 48),
    "gpt 2 x 192": (GPTConfig(layers=2, heads=6, hidden=192, vocabulary=700, positions=96), 8, 96),
    "mlp 300-500-200": (MLPConfig((300, 500, 200)), 64, None),
    "mlp 700-900-900-100": (MLPConfig((700, 900, 900, 100)), 128, None),
}
"""Name -> configuration, batch and sequence."""

REPEATS = 21


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one step."""

    ranks: int
    model: str
    predicted: float
    operations: float
    processor: float
    wall: float

    @property
    def error(self) -> float:
        """Signed, against the processor's clock."""
        return self.predicted / self.processor - 1


def measure(cluster: Cluster, name: str) -> Row:
    """One model on the cluster's ranks."""
    config, batch, sequence = CASES[name]
    plan = auto_parallel(
        build(config), cluster, mesh=(cluster.size,), batch=batch, sequence=sequence, precision="f32",
        recompute="none", time_limit=30.0, threads=1,
    )  # fmt: skip
    executor = Executor(plan.physical, share=False)
    graph, sources = plan.graph, plan.physical.sources
    with matrix_threads(1):
        operations = sum(timed_operations(plan, executor, REPEATS))
        state = executor.place({value: draw(graph.values[value]) for value in graph.state if value in sources})
        feeds = executor.place({value: draw(graph.values[value]) for value in graph.inputs if value in sources})
        walls, processors = [], []
        for _ in range(REPEATS):
            wall, processor = time.perf_counter(), time.process_time()
            _, state = executor.step(state, feeds)
            processors.append(time.process_time() - processor)
            walls.append(time.perf_counter() - wall)
    predicted = sum(operation.seconds for operation in plan.physical.operations)
    return Row(cluster.size, name, predicted, operations, undisturbed(processors), undisturbed(walls))


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Predicted and measured training steps of this machine.")
    parser.add_argument("--ranks", type=int, action="append", help="ranks in this process (default 2 and 4)")
    parser.add_argument(
        "--full", action="store_true", help="the full profile, a minute or two for each number of ranks"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    rows = []
    for ranks in options.ranks or [2, 4]:
        found = profile(ranks, quick=not options.full)
        rows += [measure(found.cluster, name) for name in CASES]
    if options.json:
        print(json.dumps([asdict(row) | {"error": row.error} for row in rows]))
        return 0
    print(f"{'ranks':>5}  {'model':<22}{'predicted':>12}{'operations':>12}{'processor':>12}{'wall':>12}{'error':>9}")
    for row in rows:
        times = (row.predicted, row.operations, row.processor, row.wall)
        print(f"{row.ranks:>5}  {row.model:<22}{''.join(f'{t * 1e3:>9.2f} ms' for t in times)}{row.error:>+9.1%}")
    print(f"mean absolute error {sum(abs(row.error) for row in rows) / len(rows):.1%} against the processor's clock")
    return 0


if __name__ == "__main__":
    sys.exit(main())
