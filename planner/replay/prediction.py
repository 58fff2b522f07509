"""`predict`: step time, utilisation and memory of a configuration, by simulating the pipeline that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.replay.configuration import Configuration
from sbp.planner.replay.memory import StageMemory, stage_memories
from sbp.planner.replay.step import StepBuilder
from sbp.planner.schedule import schedule_named
from sbp.planner.simulator import SimulatedStep, simulate


@dataclass(frozen=True)
class Prediction:
    """What a configuration is predicted to do.

    Attributes
    ----------
    step_seconds
        Length of one training step.
    model_flops, hardware_flops
        FLOP of one step on all ranks: what the model needs (no recompute, causal attention counted whole, as
        published), and what is run.
    memory
        Per stage.
    step
        The simulated step: bubble, exposed communication, critical path, events for a trace.
    """

    configuration: Configuration
    step_seconds: float
    model_flops: float
    hardware_flops: float
    memory: tuple[StageMemory, ...]
    step: SimulatedStep

    @property
    def mfu(self) -> float:
        """Model FLOP per second, as a fraction of the peak of all ranks."""
        return self.model_flops / (self.step_seconds * self._peak)

    @property
    def hfu(self) -> float:
        """The same with recompute."""
        return self.hardware_flops / (self.step_seconds * self._peak)

    @property
    def _peak(self) -> float:
        run = self.configuration
        dtype = {"mixed": "bf16", "f32": "f32", "fp8": "fp8"}[run.precision]
        return run.cluster.device.peak(dtype) * run.ranks

    @property
    def peak_bytes(self) -> float:
        """Of the fullest stage."""
        return max(stage.total for stage in self.memory)

    @property
    def feasible(self) -> bool:
        """Whether every stage fits on its device."""
        return self.peak_bytes <= self.configuration.cluster.device.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        run = self.configuration
        return run.global_batch * run.sequence / self.step_seconds

    def to_json(self) -> dict[str, Any]:
        """Plain data in SI units."""
        run, step = self.configuration, self.step
        return {
            "step_seconds": self.step_seconds,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "tokens_per_second": self.tokens_per_second,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "bubble_fraction": step.bubble_fraction,
            "breakdown_seconds": step.breakdown_seconds,
            "peak_bytes": self.peak_bytes,
            "device_bytes": run.cluster.device.memory_bytes,
            "feasible": self.feasible,
            "micro_batches": run.micro_batches,
            "layers_per_chunk": list(run.layers_of_chunk),
            "memory_per_stage": [
                {name: getattr(stage, name) for name in StageMemory.__slots__} | {"total": stage.total}
                for stage in self.memory
            ],
            "cluster": str(run.cluster),
            "framework": run.framework.name,
        }


def predict(run: Configuration) -> Prediction:
    """Step time, utilisation and memory of a configuration.

    Raises
    ------
    SbpError
        Sizes that the model's operators or the schedule cannot take.
    """
    builder = StepBuilder.of(run, _costs(run.cluster))
    pipeline = builder.pipeline()
    schedule = schedule_named(run.schedule, run.pp, run.chunks, run.micro_batches, pipeline.phases)
    step = simulate(pipeline, schedule)
    model = model_flops(run)
    elements = [builder.stage_parameters(stage) for stage in range(run.pp)]
    memory = stage_memories(run, builder.program, elements, schedule)
    return Prediction(run, step.step_seconds, model, model * _recomputed(run), memory, step)


def model_flops(run: Configuration) -> float:
    """FLOP of one step without recompute: 6 per weight and token, and attention over all pairs of tokens.

    Source: Narayanan et al. 2021 (appendix); a causal model's unseen half of the scores is counted, as they do.
    """
    tokens = run.global_batch * run.sequence
    return 3.0 * tokens * (run.model.layers * (_layer_flops(run) + _attention_flops(run)) + _head_flops(run))


def _layer_flops(run: Configuration) -> float:
    model = run.model
    groups = getattr(model, "kv_heads", model.heads)
    projections = 2 * model.hidden**2 + 2 * model.hidden**2 * groups / model.heads
    gates = 3 if hasattr(model, "kv_heads") else 2
    return 2.0 * (projections + gates * model.hidden * run.feed_forward)


def _attention_flops(run: Configuration) -> float:
    return 4.0 * run.sequence * run.model.hidden


def _head_flops(run: Configuration) -> float:
    return 2.0 * run.model.hidden * run.model.vocabulary


def _recomputed(run: Configuration) -> float:
    layer, attention = _layer_flops(run), _attention_flops(run)
    again = {"none": 0.0, "selective": attention, "full": layer + attention}[run.recompute]
    layers = run.model.layers
    return 1.0 + layers * again / (3.0 * (layers * (layer + attention) + _head_flops(run)))


@lru_cache(maxsize=256)
def _costs(cluster: Cluster) -> AnalyticCostModel:
    return AnalyticCostModel(cluster)
