"""Memory of every stage of a configuration: state, activations in flight, the live layer, logits, and the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp.planner.replay.configuration import Configuration
from sbp.planner.replay.extraction import Program
from sbp.planner.schedule import Schedule

WIDE_LOGIT_BYTES = 8
"""Per logit besides the logits themselves: their float32 copy, and the exponentials kept for the backward pass."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one rank of a stage at its peak.

    Parameters
    ----------
    weights, gradients, optimizer
        State, after what replicas share.
    activations
        What micro-batches in flight keep for their backward pass.
    working
        What lives while one layer, or the head, is at work: with recompute a whole layer's activations; logits; and
        with shared parameters those gathered at the time.
    context
        What the framework and its libraries hold.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    context: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.working + self.context


def stage_memories(
    run: Configuration, program: Program, elements: Sequence[int], schedule: Schedule
) -> tuple[StageMemory, ...]:
    """Memory per stage.

    Parameters
    ----------
    elements
        Per stage the elements of its parameters on one rank.
    schedule
        Says how many chunks are in flight at most.
    """
    in_flight = schedule.in_flight()
    return tuple(_stage(run, program, count, stage, in_flight[stage]) for stage, count in enumerate(elements))


def _stage(run: Configuration, program: Program, elements: int, stage: int, in_flight: int) -> StageMemory:
    share = [run.replicas if run.zero >= level else 1 for level in (3, 2, 1)]
    value = 4 if run.precision == "f32" else 2
    state = 8 if run.precision == "f32" else 12  # two moments, and the float32 master weight of 16-bit ones
    layers = run.layers_of_chunk[stage :: run.pp]
    per_chunk = max(layers)
    whole = program.activations["layer"] + (0 if run.recompute == "selective" else _scores_bytes(run))
    kept = program.stream_bytes if run.recompute == "full" else whole
    activations = in_flight * per_chunk * kept
    working = 0.0
    if run.recompute == "full":
        working = whole
    elif run.recompute == "selective":
        working = _scores_bytes(run)
    if stage == 0:
        activations += in_flight * program.activations["embedding"] / run.chunks
    if stage == run.pp - 1:
        logits = run.micro_batch * run.sequence / run.cp * run.padded_model.vocabulary / run.tp
        working = max(working, program.activations["head"] + WIDE_LOGIT_BYTES * logits)
    if run.zero == 3 and run.replicas > 1:
        working += 2 * value * program.parameters["layer"] + value * program.tied
    return StageMemory(
        value * elements / share[0],
        run.framework.gradient_bytes * elements / share[1],
        state * elements / share[2],
        float(activations),  # whole numbers may be wider than JSON's
        float(working),
        run.cluster.device.reserved_memory_bytes,
    )


def _scores_bytes(run: Configuration) -> float:
    """What a layer keeps of attention scores: probabilities, and after dropout its mask and result."""
    if run.framework.attention == "fused":
        return 0.0
    each = 5 if run.framework.attention_dropout else 2
    if run.precision == "f32":
        each = 9 if run.framework.attention_dropout else 4
    return each * run.micro_batch * run.model.heads / run.tp * run.sequence**2 / run.cp
