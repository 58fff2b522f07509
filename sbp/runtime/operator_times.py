"""What every operator's kernel takes, measured where it runs: in training steps of small models, by the executor.

Alone in a loop a kernel finds its operands in the cache and its code warm; in a step it does not, and the executor's
own work counts too. From the times an operator's start and rate are fitted, which a cluster file then holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.initial import draw
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.models import build
from sbp.models.bert import BertConfig
from sbp.models.dlrm import DLRMConfig
from sbp.models.gpt import GPTConfig
from sbp.models.llama import LlamaConfig
from sbp.models.mlp import MLPConfig
from sbp.models.resnet import ResNetConfig
from sbp.models.vit import ViTConfig
from sbp.operator import REGISTRY
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster, Device
from sbp.planner.fitting import fit_relative
from sbp.planner.physical import Compute
from sbp.planner.plan import Plan
from sbp.planner.styles import DataParallel, Styles
from sbp.rule import Signature
from sbp.runtime.executor import Executor
from sbp.runtime.stopwatch import Stopwatch, undisturbed

PRECISION = "f32"


@dataclass(frozen=True, slots=True)
class Model:
    """A model to train for some steps: its configuration, and batch and sequence per rank."""

    config: Any
    batch: int
    sequence: int | None = None


WORKLOADS = (
    Model(GPTConfig(layers=1, heads=4, hidden=64, vocabulary=512, positions=32), 2, 32),
    Model(GPTConfig(layers=1, heads=4, hidden=160, vocabulary=384, positions=64), 4, 64),
    Model(MLPConfig((128, 256, 64)), 16),
    Model(MLPConfig((384, 640, 320)), 64),
    Model(GPTConfig(layers=1, heads=8, hidden=256, vocabulary=1024, positions=128), 2, 128),
    Model(MLPConfig((1024, 2048, 512)), 128),
    Model(
        LlamaConfig(layers=1, heads=4, kv_heads=2, hidden=128, intermediate=256, vocabulary=512, positions=64), 4, 64
    ),
    Model(BertConfig(layers=1, heads=4, hidden=128, intermediate=256, vocabulary=512, positions=64), 4, 64),
    Model(ViTConfig(layers=1, heads=4, hidden=128, intermediate=256, image=32, patch=8, classes=32), 4),
    Model(ResNetConfig(blocks=(1, 1), width=16, image=32, classes=16), 2),
    Model(DLRMConfig(tables=(512, 1024, 256), width=32, bottom=(32, 128, 32), top=(64, 1), lookups=4), 32),
)
"""Two sizes of the commonest families first: a quick profile takes those."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One kernel in a step, on every rank: the work of one rank, and the time of all that take turns."""

    op: str
    dtype: str
    flops: float
    bytes: float
    seconds: float


def operator_times(
    backend: Backend, communicator: Communicator, models: Sequence[Model], repeats: int
) -> tuple[OperatorTime, ...]:
    """Typical times of all kernels in data-parallel training steps of models."""
    found: list[OperatorTime] = []
    for model in models:
        plan = small_plan(model, communicator.size)
        executor = Executor(plan.physical, backend, communicator, share=False)
        work = work_of(plan)
        seconds = timed_operations(plan, executor, repeats)
        for at, operation in enumerate(plan.physical.operations):
            if isinstance(operation, Compute):
                dtype = plan.physical.registers[operation.outputs[0]].type.dtype
                found.append(OperatorTime(operation.op, dtype, *work[at], seconds[at]))
    return tuple(found)


def small_plan(model: Model, ranks: int) -> Plan:
    """The data-parallel training step of a model; the same on every process, whatever the machine."""

    def restriction(graph: Any, mesh: Mesh) -> Styles:
        return Styles(graph, mesh, DataParallel())

    # Any cluster will do: the layouts are given.
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=ranks)
    return auto_parallel(
        build(model.config),
        cluster,
        mesh=(ranks,),
        batch=model.batch * ranks,
        sequence=model.sequence,
        precision=PRECISION,
        recompute="none",
        restriction=restriction,
        time_limit=20.0,
        threads=1,
    )


def work_of(plan: Plan) -> list[tuple[float, float]]:
    """Per operation FLOP and bytes of the rank with the largest shards; (0, 0) of boxing steps."""
    nodes = {node.name: node for node in plan.graph.nodes}
    registers = plan.physical.registers
    found = []
    for operation in plan.physical.operations:
        if not isinstance(operation, Compute):
            found.append((0.0, 0.0))
            continue
        node = nodes[operation.node]

        def layouts(numbers: Sequence[int]) -> tuple[Layout, ...]:
            return tuple(registers[number].layout for number in numbers)

        signature = Signature(layouts(operation.inputs), layouts(operation.outputs))
        types, made = plan.graph.types(node.inputs), plan.graph.types(node.outputs)
        rule = plan.graph.rule(node)
        work = REGISTRY[node.op].work(rule, types, made, node.attributes, signature, plan.mesh.shape)
        found.append((float(work[0]), float(work[1])))
    return found


def timed_operations(plan: Plan, executor: Executor, repeats: int) -> list[float]:
    """Typical seconds of every operation of the plan's step on the slowest rank, in order."""
    physical, graph = plan.physical, plan.graph
    state = executor.place({value: draw(graph.values[value]) for value in graph.state if value in physical.sources})
    feeds = executor.place({value: draw(graph.values[value]) for value in graph.inputs if value in physical.sources})
    runs = []
    for _ in range(repeats + 1):
        result = executor.run(state, feeds, timed=True)
        state = dict(result.state)
        runs.append([stop - start for start, stop in result.timeline])
    typical = [undisturbed(times) for times in zip(*runs[1:])]
    return Stopwatch(executor.backend, executor.communicator, 0.0).agreed(typical)


def fit_operators(device: Device, times: Sequence[OperatorTime]) -> tuple[tuple[str, float, float], ...]:
    """Per operator the seconds to start it and its bytes/s: time = start + FLOP / rate of products + bytes / rate."""
    grouped: dict[str, list[OperatorTime]] = defaultdict(list)
    for time in times:
        grouped[time.op].append(time)
    return tuple((op, *_fit(device, grouped[op])) for op in sorted(grouped))


def _fit(device: Device, times: Sequence[OperatorTime]) -> tuple[float, float]:
    seconds = numpy.array([max(time.seconds, 1e-9) for time in times])
    moved = numpy.array([time.bytes for time in times])
    products = numpy.array([time.flops / (device.peak(time.dtype) * device.matmul_ceiling) for time in times])
    found = fit_relative({"start": numpy.ones(len(times)), "byte": moved}, seconds, products)
    # An operator that is all start (or FLOP) moves its bytes in no time; a file needs a finite rate.
    slope = max(found["byte"], 1e-3 / device.memory_bandwidth_bytes_per_second)
    return found["start"], 1.0 / slope
