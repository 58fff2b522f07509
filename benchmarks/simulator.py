"""Speed of the simulator: `python benchmarks/simulator.py [--stages 16] [--micro-batches 64]` prints a table.

A GPT of 96 layers and width 12288 on 1,024 A100s: 16 stages of 8 (data) x 8 (tensor parallel) ranks, micro-batches of
one sequence per replica. The tasks of a layer are the operations of a plan of the model with 2 layers, whose second is
taken 96 times; seconds are the cost model's. Gradients are reduced along dp beside the last backward pass. Build is the
making of the graph of events, simulate is all of `simulate` (graph, events, slack, critical path).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from sbp.models import build
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.collective import transfers_seconds
from sbp.planner.event_graph import EventGraph
from sbp.planner.physical import Compute, Operation, PhysicalPlan
from sbp.planner.pipeline import P2P, Pipeline, Segment, Task, chain
from sbp.planner.plan import Plan
from sbp.planner.schedule import schedule_named
from sbp.planner.simulator import simulate
from sbp.planner.styles import DataParallel, Styles, TensorParallel
from sbp.planner.timing import links_of, operation_name, stream_of

LAYERS, HIDDEN, HEADS, SEQUENCE, MODULE = 96, 12288, 96, 2048, "h.1"
SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "interleaved:3")


def layer_plan(mesh: str, cluster: Cluster) -> Plan:
    """Megatron's layout of two layers, one sequence per replica."""
    model = build("gpt2", layers=2, heads=HEADS, hidden=HIDDEN, vocabulary=51200, positions=SEQUENCE)
    replicas = int(mesh.split(",")[0].partition("=")[2])

    def restriction(graph, mesh):
        return Styles(graph, mesh, DataParallel(), TensorParallel(sequence=True))

    return auto_parallel(
        model, cluster, batch=replicas, sequence=SEQUENCE, mesh=mesh, restriction=restriction, memory_limit=1 << 60
    )


def layer_operations(physical: PhysicalPlan, phase: str) -> tuple[list[Operation], list[Operation], list[Operation]]:
    """The operations of one layer in a phase: of every micro-batch; reductions of gradients; what reads these."""
    modules: dict[int, str] = {}
    reduced: set[int] = set()
    often, reductions, readers = [], [], []
    for operation in physical.operations:
        source = operation.module if isinstance(operation, Compute) else modules.get(operation.inputs[0], "")
        modules.update(dict.fromkeys(operation.outputs, source))
        if operation.phase != phase or not source.startswith(MODULE):
            continue
        if reduced.intersection(operation.inputs):
            readers.append(operation)
        elif phase == "backward" and stream_of(operation, physical.mesh) == "dp":
            reductions.append(operation)
        else:
            often.append(operation)
            continue
        reduced.update(operation.outputs)
    return often, reductions, readers


def tasks_of(physical: PhysicalPlan, phase: str, layers: int, last: bool) -> tuple[Task, ...]:
    """So many layers one after another; in the last micro-batch gradients are reduced beside them."""
    often, reductions, _ = layer_operations(physical, phase)
    tasks: list[Task] = []
    chosen = [o for o in physical.operations if o in often or (last and o in reductions)]
    before: tuple[int, ...] = ()
    for _ in range(layers):
        made: dict[int, int] = {}
        for operation in chosen:
            late = operation in reductions
            inputs = tuple(sorted({made[number] for number in operation.inputs if number in made})) or before
            size = sum(physical.registers[number].bytes for number in operation.outputs) if phase == "forward" else 0
            name, stream = operation_name(operation, physical), stream_of(operation, physical.mesh)
            tasks.append(Task(name, stream, operation.seconds, inputs, size, late=late))
            made.update(dict.fromkeys(operation.outputs, len(tasks) - 1))
        before = (max(made[number] for operation in often for number in operation.outputs),)
    return tuple(tasks)


def pipeline_of_layers(plan: Plan, stages: int, chunks: int, micro_batches: int, cluster: Cluster) -> Pipeline:
    """The layers, cut evenly."""
    layers = LAYERS // (stages * chunks)
    ranks, sent = plan.mesh.size, SEQUENCE * HIDDEN * 2 // plan.mesh.shape[1]
    pairs = [(rank, rank + ranks) for rank in range(ranks)]
    seconds = transfers_seconds(cluster, pairs, sent) if stages > 1 else 0.0
    forward = Segment("forward", tasks_of(plan.physical, "forward", layers, False), sent, seconds)
    held = sum(task.allocates for task in forward.tasks)
    backward, last = (
        Segment("backward", (replace(first, frees=held), *tasks), sent, seconds)
        for first, *tasks in (tasks_of(plan.physical, "backward", layers, final) for final in (False, True))
    )
    updates = [o.seconds for o in layer_operations(plan.physical, "backward")[2] for _ in range(layers * chunks)]
    keys = range(stages * chunks)
    links = links_of(plan.mesh, cluster)
    return Pipeline(
        stages,
        chunks,
        micro_batches,
        {(chunk, segment.phase): segment for chunk in keys for segment in (forward, backward)},
        after=(Segment("after", chain(updates)),) * stages,
        last={(chunk, "backward"): last for chunk in keys},
        links={**links, P2P: cluster.tiers[-1].name},
    )


def main() -> None:
    """Simulate the step under every schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=64)
    arguments = parser.parse_args()
    stages, micro_batches = arguments.stages, arguments.micro_batches
    cluster = Cluster.preset("a100-80g", nodes=8 * stages)
    plan = layer_plan("dp=8,tp=8", cluster.with_nodes(8))
    columns = (
        "schedule",
        "tasks per layer",
        "events",
        "build s",
        "simulate s",
        "step s",
        "compute",
        "bubble",
        "tp",
        "dp",
        "p2p",
    )
    table = Table(*columns, title=f"{stages} stages x 8 dp x 8 tp, {LAYERS} layers, {micro_batches} micro-batches")
    for name in SCHEDULES:
        chunks = int(name.partition(":")[2] or 1)
        if LAYERS % (stages * chunks):
            continue
        pipeline = pipeline_of_layers(plan, stages, chunks, micro_batches, cluster)
        started = time.perf_counter()
        schedule = schedule_named(name, stages, chunks, micro_batches)
        _ = EventGraph(pipeline, schedule).arrays
        built = time.perf_counter()
        step = simulate(pipeline, schedule)
        stopped = time.perf_counter()
        parts = step.breakdown_seconds
        per_layer = sum(len(pipeline.segments[0, phase].tasks) for phase in pipeline.phases) * stages * chunks / LAYERS
        table.add_row(
            name,
            f"{per_layer:.0f}",
            f"{len(step.events):,}",
            f"{built - started:.2f}",
            f"{stopped - built:.2f}",
            f"{step.step_seconds:.3f}",
            *(f"{parts.get(key, 0.0):.3f}" for key in ("compute", "bubble", "tp", "dp", "p2p")),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
