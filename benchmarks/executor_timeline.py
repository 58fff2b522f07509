"""Predicted against measured steps of this machine's NumPy ranks: `python benchmarks/executor_timeline.py`.

Each kind of operation is timed once, in a GPT of 3 layers under Megatron's layouts; with these seconds the simulator
predicts the steps of deeper models, which are then run and timed by the executor. Set OPENBLAS_NUM_THREADS=1 and leave
the machine alone: what is not repeatable cannot be predicted.
"""

from __future__ import annotations

import math
from statistics import median

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
from sbp.runtime.measured import measured_seconds, with_measured

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
        seconds = measured_seconds(*ready(megatron_plan(LAYERS[0], mesh)), steps=STEPS)
        for layers in LAYERS:
            plan = megatron_plan(layers, mesh)
            predicted = predict_timeline(with_measured(plan.physical, seconds), overlap=False)
            executor, state, feeds = ready(plan)
            runs = [executor.run(state, feeds, timed=True).timeline for _ in range(STEPS + 1)][1:]
            measured = median(run[-1][1] for run in runs)
            order = sorted(range(len(predicted.start)), key=lambda at: (predicted.start[at], predicted.stop[at]))
            same = all(order == sorted(range(len(run)), key=lambda at: run[at]) for run in runs)
            table.add_row(
                mesh,
                str(layers),
                str(len(plan.physical.operations)),
                f"{predicted.step_seconds:.4f}",
                f"{measured:.4f}",
                f"{predicted.step_seconds / measured - 1:+.1%}",
                "yes" if same else "no",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
