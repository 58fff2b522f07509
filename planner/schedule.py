"""The order in which each stage of a pipeline runs its segments: GPipe, 1F1B, interleaved 1F1B and zero-bubble.

A schedule is stated twice. `Schedule.orders` is the closed form of the papers. `Credits` is the same as what actors
do: a stage fires the most urgent segment whose inputs are there and whose output register has a free buffer. 1F1B is
nothing but stage s of p having p - s buffers for what its forward leaves to its backward.

Sources: GPipe (Huang et al. 2019); 1F1B (PipeDream-Flush, Narayanan et al. 2021a); interleaved (Narayanan et al. 2021b,
"Efficient large-scale language model training on GPU clusters using Megatron-LM"); zero-bubble ZB-H1 (Qi et al. 2024,
"Zero bubble pipeline parallelism"); credits (Yuan et al. 2021, "OneFlow").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Action = tuple[str, int, int]
"""(phase, chunk, micro-batch): one segment run once."""


@dataclass(frozen=True)
class Schedule:
    """Per stage the order of its segments.

    Attributes
    ----------
    orders
        Per stage its actions; every (phase, chunk of the stage, micro-batch) once.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    orders: tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class Credits:
    """A schedule as register credits: what every stage may fire, and what it prefers.

    Attributes
    ----------
    priority
        Phases, the most urgent first.
    queues
        Per stage and phase the order of (chunk, micro-batch) within that phase.
    buffers
        Per stage and phase how many forward outputs may wait for that phase: the forward actor needs a free buffer in
        each, which the phase gives back at its end.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    priority: tuple[str, ...]
    queues: tuple[Mapping[str, tuple[tuple[int, int], ...]], ...]
    buffers: tuple[Mapping[str, int], ...]


def schedule_named(name: str, stages: int, chunks: int | None, micro_batches: int) -> Schedule:
    """The schedule "gpipe", "1f1b", "interleaved" (or "interleaved:CHUNKS") or "zero-bubble"."""
    raise NotImplementedError


def credits_named(name: str, stages: int, chunks: int | None, micro_batches: int) -> Credits:
    """The same schedules as register credits."""
    raise NotImplementedError
