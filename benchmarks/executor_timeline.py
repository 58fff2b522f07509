"""Predicted against measured steps of this machine's NumPy ranks: `python benchmarks/executor_timeline.py`.

Each kind of operation is timed once, in a GPT of 3 layers under Megatron's layouts; with these seconds the simulator
predicts the steps of deeper models, which are then run and timed by the executor. `--pipelines` does so for stages that
actors run, a thread each: kinds are timed in steps of as many micro-batches as stages, and schedules of more are
predicted. Set OPENBLAS_NUM_THREADS=1 and leave the machine alone: what is not repeatable cannot be predicted, and
stages that share cores wait for each other. The load average stands below the table.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from statistics import fmean

from rich.console import Console
from rich.table import Table

from sbp.initial import draw_all
from sbp.models import build
from sbp.passes.recompute import block_of
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.physical import Compute
from sbp.planner.places import FORWARD
from sbp.planner.plan import Plan
from sbp.planner.schedule import schedule_named
from sbp.planner.simulator import simulate
from sbp.planner.stage_pipeline import pipeline_of
from sbp.planner.stages import StagedPlan, cut
from sbp.planner.styles import DataParallel, Styles, TensorParallel
from sbp.planner.timing import predict_timeline
from sbp.runtime.actors import PipelineExecutor, PipelineStep
from sbp.runtime.executor import Executor
from sbp.runtime.measured import mean_seconds, mean_seconds_of_actors, with_measured

MESHES, LAYERS, STEPS = ("tp=2", "dp=2", "dp=2,tp=2"), (3, 4, 8), 7
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1))
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


def stepper(plan: Plan, staged: StagedPlan, order: str, micro_batches: int) -> Callable[[], PipelineStep]:
    """Runs one timed step."""
    pipeline, arrays = PipelineExecutor(staged, micro_batches, order), draw_all(plan.graph, 0, "f32")
    state = pipeline.place({name: arrays[name] for name in plan.graph.state})
    feeds = [pipeline.place({name: arrays[name] for name in plan.graph.inputs})] * micro_batches
    return lambda: pipeline.run(state, feeds, timed=True)


def pipelines(stages: int, micro_batches: int) -> None:
    """Actors on threads against the simulator."""
    table = Table("schedule", "stages", "micro-batches", "predicted s", "measured s", "error", "same order")
    plan = megatron_plan(4, "tp=1", batch=2)
    for name, chunks in SCHEDULES:
        apart = name == "zero-bubble"
        staged = cut(plan.physical, stages, chunks, weights_apart=apart)
        # Kernels are timed while other stages work, in other steps than those that are predicted, in turn with them.
        short, long = (stepper(plan, staged, name, count) for count in (stages, micro_batches))
        turns = [(short(), long()) for _ in range(STEPS + 1)][1:]
        runs = [turn[1] for turn in turns]
        physical = with_measured(plan.physical, mean_seconds_of_actors(staged.physical, [turn[0] for turn in turns]))
        priced = cut(physical, stages, chunks, first_layers_of(staged), weights_apart=apart)
        schedule = schedule_named(name, stages, chunks, micro_batches, staged.phases)
        predicted = simulate(pipeline_of(priced, micro_batches, overlap=False), schedule)
        measured = fmean(max(ran[-1][2] for ran in run.timelines) for run in runs)
        table.add_row(
            name,
            str(stages),
            str(micro_batches),
            f"{predicted.step_seconds:.4f}",
            f"{measured:.4f}",
            f"{predicted.step_seconds / measured - 1:+.1%}",
            "yes" if all(run.orders == predicted.schedule.orders for run in runs) else "no",
        )
    Console(width=120).print(table)


def first_layers_of(staged: StagedPlan) -> list[int]:
    """Where the chunks begin, so that the plan with other seconds is cut at the same places."""
    layers: dict[str, int] = {}
    for operation, (chunk, phase) in zip(staged.physical.operations, staged.places):
        layer = block_of(operation.module) if isinstance(operation, Compute) and phase == FORWARD else None
        if layer is not None:
            layers.setdefault(layer, chunk)
    chunks = list(layers.values())
    return [chunks.index(chunk) for chunk in range(1, max(chunks) + 1)]


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pipelines", action="store_true", help="stages that actors run, instead of single programs")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    if options.pipelines:
        pipelines(options.stages, options.micro_batches)
    else:
        programs()
    print("load average {:.1f} {:.1f} {:.1f}".format(*os.getloadavg()), f"on {os.cpu_count()} cores")


def programs() -> None:
    """Single programs of all ranks."""
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
