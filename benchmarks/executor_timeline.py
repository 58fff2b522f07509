"""Predicted against measured steps of this machine's NumPy ranks: `python benchmarks/executor_timeline.py`.

Each kind of operation is timed once, in a GPT of 3 layers under Megatron's layouts; with these seconds the simulator
predicts the steps of deeper models, which are then run and timed by the executor. Set OPENBLAS_NUM_THREADS=1 and leave
the machine alone: what is not repeatable cannot be predicted.
"""

from __future__ import annotations

import math
from statistics import fmean

from rich.console import Console
from rich.table import Table

from sbp.initial import draw_all
from sbp.models import build
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.plan import Plan
from sbp.planner.styles import DataParallel, Styles, TensorParallel
from sbp.planner.timing import predict_timeline
from sbp.runtime.executor import Executor
from sbp.runtime.measured import mean_seconds, with_measured

MESHES, LAYERS, STEPS = ("tp=2", "dp=2", "dp=2,tp=2"), (3, 4, 8), 7
STYLES = {"dp": DataParallel(), "tp": TensorParallel()}


def megatron_plan(layers: int, mesh: str, hidden: int = 256, batch: int = 8, sequence: int = 128) -> Plan:
    """A small GPT with the same layouts in every layer."""
    sizes = {name: int(size) for name, _, size in (axis.partition("=") for axis in mesh.split(","))}
    model = build("gpt2", layers=layers, heads=4, hidden=hidden, vocabulary=1024, positions=sequence)
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=math.prod(sizes.values()))
    return auto_parallel(
        model,
        cluster,
        batch=batch,
        sequence=sequence,
        precision="f32",
        mesh=mesh,
        restriction=lambda graph, made: Styles(graph, made, *(STYLES[name] for name in sizes)),
    )


def ready(plan: Plan) -> tuple[Executor, dict, dict]:
    """An executor with state and feeds."""
    executor, arrays = Executor(plan.physical, share=False), draw_all(plan.graph, 0, "f32")
    state, feeds = (
        executor.place({name: arrays[name] for name in names}) for names in (plan.graph.state, plan.graph.inputs)
    )
    return executor, state, feeds


def main() -> None:
    """Measure, predict, compare."""
    table = Table("mesh", "layers", "operations", "predicted s", "measured s", "error", "same order")
    for mesh in MESHES:
        plans = {layers: megatron_plan(layers, mesh) for layers in LAYERS}
        prepared = {layers: ready(plan) for layers, plan in plans.items()}
        runs: dict[int, list[tuple[tuple[float, float], ...]]] = {layers: [] for layers in LAYERS}
        for _ in range(STEPS + 1):  # in turn, so that other work on the machine meets all of them
            for layers, (executor, state, feeds) in prepared.items():
                runs[layers].append(executor.run(state, feeds, timed=True).timeline)
        seconds = mean_seconds(plans[LAYERS[0]].physical, runs[LAYERS[0]][1:])
        for layers, plan in plans.items():
            predicted = predict_timeline(with_measured(plan.physical, seconds), overlap=False)
            measured = fmean(run[-1][1] for run in runs[layers][1:])
            count = len(plan.physical.operations)
            order = sorted(range(count), key=lambda at: (predicted.start[at], predicted.stop[at]))
            same = all(order == sorted(range(count), key=lambda at: run[at]) for run in runs[layers])
            table.add_row(
                mesh,
                str(layers),
                str(count),
                f"{predicted.step_seconds:.4f}",
                f"{measured:.4f}",
                f"{predicted.step_seconds / measured - 1:+.1%}",
                "yes" if same else "no",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
