"""From prices to a pipeline: what every stage does per micro-batch and once per step, for the simulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from sbp.mesh import Mesh
from sbp.planner.collective import stage_transfer_seconds
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.frameworks import Framework
from sbp.planner.kernels import CONSTANTS, KernelConstants, Kernels
from sbp.planner.pipeline import COMPUTE, PHASES, Pipeline, Segment, Task
from sbp.planner.replay.configuration import Configuration, ModelConfig
from sbp.planner.replay.extraction import Program
from sbp.planner.replay.price import Phase, Prices, priced
from sbp.planner.replay.program import program

OPTIMIZER_BYTES = 26
"""Read and written per element by Adam, besides its gradient: master weight, two moments, and the 16-bit weight."""

GRADIENT_PASSES = 3
"""How often the gradient is read or written for unscaling, its norm, and the update."""


@dataclass(frozen=True, slots=True)
class StepConstants:
    """What is alike for all runs.

    Parameters
    ----------
    straggling
        Every doubling of the nodes makes compute this much slower: the slowest of more devices decides.
    least_exposed
        Part of an overlapped reduction that nothing hides: the last bucket.
    """

    straggling: float = 0.0064
    least_exposed: float = 0.1


STEP_CONSTANTS = StepConstants()


def priced_program(
    run: Configuration, costs: AnalyticCostModel, constants: KernelConstants = CONSTANTS
) -> tuple[Program, Prices]:
    """The program of a configuration and what its parts cost."""
    # Runs that differ in layers and batches only have one program, which is found and priced once.
    return _priced(
        replace(run.padded_model, layers=1),
        run.sequence // run.cp,
        run.micro_batch,
        run.sequence_parallel,
        run.precision,
        (run.pp, run.dp, run.cp, run.tp),
        run.framework,
        run.micro_batches > 1,
        costs,
        constants,
    )


@lru_cache(maxsize=2048)
def _priced(
    model: ModelConfig,
    sequence: int,
    micro_batch: int,
    sequence_parallel: bool,
    precision: str,
    ranks: tuple[int, int, int, int],
    framework: Framework,
    accumulates: bool,
    costs: AnalyticCostModel,
    constants: KernelConstants,
) -> tuple[Program, Prices]:
    wide = "f32" if precision == "f32" else "mixed"
    found = program(model, ranks[3], sequence_parallel, micro_batch, sequence, wide)
    mesh = Mesh(ranks, ("pp", "dp", "cp", "tp"))

    def along_tp(kind: str, bytes: float) -> float:
        return costs.collective_seconds(kind, mesh, 3, bytes) * (1.0 - framework.tensor_overlap)

    def along_cp(kind: str, bytes: float) -> float:
        return costs.collective_seconds(kind, mesh, 2, bytes)

    kernels = Kernels(costs.cluster.device, constants)
    product_type = "fp8" if precision == "fp8" else None
    context = (ranks[2], along_cp) if ranks[2] > 1 else None
    return found, priced(found, kernels, framework, along_tp, accumulates, product_type, context)


def step_pipeline(
    run: Configuration,
    costs: AnalyticCostModel,
    kernel_constants: KernelConstants = CONSTANTS,
    constants: StepConstants = STEP_CONSTANTS,
) -> Pipeline:
    """The pipeline of one training step."""
    return StepBuilder.of(run, costs, kernel_constants, constants).pipeline()


@dataclass(frozen=True, slots=True)
class StepBuilder:
    """A configuration with its program and prices, from which the pipeline is made."""

    run: Configuration
    costs: AnalyticCostModel
    program: Program
    prices: Mapping[tuple[str, str], Phase]
    constants: StepConstants

    @classmethod
    def of(
        cls,
        run: Configuration,
        costs: AnalyticCostModel,
        kernel_constants: KernelConstants = CONSTANTS,
        constants: StepConstants = STEP_CONSTANTS,
    ) -> StepBuilder:
        """Plan, lower and price the configuration's layers."""
        return cls(run, costs, *priced_program(run, costs, kernel_constants), constants)

    def pipeline(self) -> Pipeline:
        """What every stage does per micro-batch, and after the last."""
        run = self.run
        chunks = run.pp * run.chunks
        sends = self.transfer_seconds()
        segments = {}
        for chunk in range(chunks):
            for phase in PHASES if run.schedule == "zero-bubble" else PHASES[:2]:
                if phase == "weight":
                    segments[chunk, phase] = Segment(phase, self.weight_tasks(chunk))
                    continue
                leaves = chunk + 1 < chunks if phase == "forward" else chunk > 0
                tasks = self.tasks(chunk, phase)
                segments[chunk, phase] = Segment(phase, tasks, self.program.stream_bytes, sends if leaves else 0.0)
        after = tuple(self.after(stage) for stage in range(run.pp))
        blocking = run.pp > 1 and not run.framework.overlapped_transfers
        return Pipeline(run.pp, run.chunks, run.micro_batches, segments, after=after, blocking_sends=blocking)

    @property
    def reduces_often(self) -> bool:
        """Whether gradients go to their owners in every micro-batch, so that nobody holds all of them."""
        return self.run.zero >= 2 and self.run.framework.reduces_every_micro_batch

    # -- one micro-batch ---------------------------------------------------------------------------------------------

    def tasks(self, chunk: int, phase: str) -> tuple[Task, ...]:
        """Kernels, tensor-parallel communication and exposed gathers of a chunk, one after another."""
        run = self.run
        layers = run.layers_of_chunk[chunk]
        compute, moves = self.layer_seconds(phase)
        compute, moves = compute * layers, moves * layers
        for part, where in (("embedding", 0), ("head", run.pp * run.chunks - 1)):
            if chunk == where:
                price = self.prices[part, phase]
                compute, moves = compute + price.compute, moves + price.collectives
        if phase == "backward" and run.schedule == "zero-bubble":
            compute = max(compute - self.weight_seconds(chunk), 0.0)
        host = run.framework.micro_batch_host_us * 1e-6 / run.chunks
        compute += host / 2
        tasks = [Task("layers", COMPUTE, compute * self.slower)]
        if moves > 0.0:
            tasks.append(Task("tensor parallel", "tp", moves * self.slower, (0,)))
        sharded = self.sharding_seconds(phase, compute + moves) * layers
        if sharded > 0.0:
            tasks.append(Task("sharded parameters", "dp", sharded, (len(tasks) - 1,)))
        return tuple(tasks)

    def weight_tasks(self, chunk: int) -> tuple[Task, ...]:
        """Gradients of weights, where the schedule runs them apart."""
        return (Task("weights", COMPUTE, self.weight_seconds(chunk) * self.slower),)

    def weight_seconds(self, chunk: int) -> float:
        run = self.run
        seconds = self.prices["layer", "backward"].weights * run.layers_of_chunk[chunk]
        if chunk == 0:
            seconds += self.prices["embedding", "backward"].weights
        if chunk == run.pp * run.chunks - 1:
            seconds += self.prices["head", "backward"].weights
        return seconds

    @property
    def slower(self) -> float:
        """What the slowest of all nodes makes of times."""
        return 1.0 + self.constants.straggling * math.log2(self.run.cluster.nodes)

    def layer_seconds(self, phase: str) -> tuple[float, float]:
        """Kernels and communication of a layer; kernels take longer where the host does not keep up."""
        framework, recompute = self.run.framework, self.run.recompute
        forward, own = self.prices["layer", "forward"], self.prices["layer", phase]
        host = own.launches * (framework.forward_host_us if phase == "forward" else framework.backward_host_us)
        compute, moves = own.compute, own.collectives
        if phase == "backward" and recompute == "full":
            compute, moves = compute + forward.compute, moves + forward.collectives
            host += forward.launches * framework.forward_host_us
        elif phase == "backward" and recompute == "selective":
            compute += forward.attention
        return max(compute, host * 1e-6 - moves), moves

    def sharding_seconds(self, phase: str, hidden: float) -> float:
        """What a layer waits for gathered parameters (ZeRO-3) and for gradients reduced in every micro-batch."""
        run = self.run
        if run.replicas == 1 or not (run.zero == 3 or self.reduces_often):
            return 0.0
        moved = self.gather_seconds()
        if phase == "backward" and self.reduces_often:
            bytes = self.program.parameters["layer"] * float(run.framework.reduction_bytes)
            moved += self.over_replicas("reduce_scatter", bytes)
        return max(moved * run.framework.exposed_sharding, moved - hidden / max(run.layers_of_chunk[0], 1))

    def gather_seconds(self) -> float:
        """What gathering a layer's parameters takes where replicas share them (ZeRO-3), hidden or not."""
        return self.over_replicas("all_gather", 2.0 * self.program.parameters["layer"]) if self.run.zero == 3 else 0.0

    def transfer_seconds(self) -> float:
        """What a stage sends to the next: each tensor-parallel rank its share, gathered there unless it stays split."""
        run = self.run
        if run.pp == 1:
            return 0.0
        sources = range(run.tp)
        stage = run.replicas * run.tp
        targets = range(stage, stage + run.tp)
        if run.sequence_parallel:
            pair = (sources[:1], targets[:1])
            return stage_transfer_seconds(run.cluster, *pair, self.program.stream_bytes, scatter=False)
        return stage_transfer_seconds(run.cluster, sources, targets, self.program.stream_bytes, scatter=run.tp > 1)

    # -- once per step -----------------------------------------------------------------------------------------------

    def after(self, stage: int) -> Segment:
        """Gradient reduction, embedding gradients between the first and the last stage, optimizer, new parameters."""
        run, framework = self.run, self.run.framework
        elements = self.stage_parameters(stage)
        tasks: list[Task] = []

        def then(name: str, stream: str, seconds: float) -> None:
            if seconds > 0.0:
                tasks.append(Task(name, stream, seconds, (len(tasks) - 1,) if tasks else ()))

        if not self.reduces_often:
            kind = "reduce_scatter" if run.zero else "all_reduce"
            reduction = self.over_replicas(kind, elements * float(framework.reduction_bytes))
            then("gradient reduction", "dp", self.exposed_reduction(reduction, stage))
        if run.pp > 1 and self.program.tied and stage in (0, run.pp - 1):
            then("embedding gradients", "pp", self.embedding_seconds())
        then("optimizer", COMPUTE, self.optimizer_seconds(elements))
        if run.zero in (1, 2):
            # Overlapped, it hides behind the next forward pass.
            gather = self.over_replicas("all_gather", elements * 2.0)
            then(
                "new parameters",
                "dp",
                gather * (self.constants.least_exposed if framework.reduction == "overlapped" else 1.0),
            )
        return Segment("after", tuple(tasks))

    def stage_parameters(self, stage: int) -> int:
        """Elements of a stage's parameters on one rank."""
        run, held = self.run, self.program.parameters
        elements = held["layer"] * sum(run.layers_of_chunk[stage :: run.pp])
        if stage == 0:
            elements += held["embedding"]
        if stage == run.pp - 1:
            elements += held["head"] + (self.program.tied if run.pp > 1 else 0)
        return elements

    def exposed_reduction(self, seconds: float, stage: int) -> float:
        """What the backward pass of the last micro-batch does not hide."""
        run, overlap = self.run, self.run.framework.reduction
        if overlap == "after" or (overlap == "without-pipeline" and run.pp > 1):
            return seconds
        # Kernels that gathered parameters hide behind hide nothing else: both take the same links.
        free = max(sum(self.layer_seconds("backward")) - self.gather_seconds(), 0.0)
        hidden = free * sum(run.layers_of_chunk[stage :: run.pp])
        return max(seconds * self.constants.least_exposed, seconds - hidden)

    def embedding_seconds(self) -> float:
        """All-reduce of the tied embedding's gradient between the first and the last stage."""
        run = self.run
        half = run.ranks // 2
        bytes = self.program.tied * float(run.framework.gradient_bytes)
        return self.costs.collective_seconds("all_reduce", Mesh((2, half), ("ends", "rest")), 0, bytes)

    def optimizer_seconds(self, elements: int) -> float:
        """Adam on a rank's share of the state, after passes over its gradients."""
        run = self.run
        share = run.replicas if run.zero >= 1 else 1
        gradient = run.framework.gradient_bytes
        moved = elements * (OPTIMIZER_BYTES + gradient) / share
        moved += elements * GRADIENT_PASSES * gradient / (share if run.zero >= 2 else 1)
        kernels = Kernels(run.cluster.device)
        return kernels.memory_seconds(moved)

    def over_replicas(self, kind: str, bytes: float) -> float:
        run = self.run
        mesh = Mesh((run.pp, run.replicas, run.tp), ("pp", "dp", "tp"))
        return self.costs.collective_seconds(kind, mesh, 1, bytes)


def closed_form_seconds(pipeline: Pipeline) -> float:
    """Length of a step whose stages wait for their sends, without simulation.

    The slowest stage works on every micro-batch, and once the pipeline fills and drains (Narayanan et al. 2021,
    section 2.2); used to fit constants, where thousands of steps are needed.
    """
    stages, chunks = pipeline.stages, pipeline.chunks
    work, sends = [0.0] * stages, [0.0] * stages
    for (chunk, _), segment in pipeline.segments.items():
        work[chunk % stages] += math.fsum(task.seconds for task in segment.tasks)
        sends[chunk % stages] += segment.sends_seconds
    busy = max(w + (s if pipeline.blocking_sends else 0.0) for w, s in zip(work, sends))
    fill = (math.fsum(work) + math.fsum(sends)) / stages * (stages - 1) / chunks
    once = max((math.fsum(task.seconds for task in segment.tasks) for segment in pipeline.after), default=0.0)
    return pipeline.micro_batches * busy + fill + once
