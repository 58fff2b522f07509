"""Verifying and running a `Plan`: which graph, which batches, how large."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.errors import PlanError
from sbp.graph import Graph
from sbp.initial import draw
from sbp.operator import REGISTRY
from sbp.planner.plan import Plan
from sbp.planner.search import gib
from sbp.planner.workload import scaled_workload
from sbp.runtime.checkpoint import Checkpoint, open_checkpoint
from sbp.runtime.train import Batch, Progress, Saving, Training, train
from sbp.runtime.verify import Verification, verify

LARGEST_BYTES = 1 << 30
LARGEST_FLOPS = 5e10
"""A step whose values (in float64) or whose FLOP exceed these is verified on scaled-down shapes."""


NUMPY_FLOPS_PER_SECOND = 2e10
LONGEST_STEP_SECONDS = 120.0
"""A training step that would take longer than this in one process, at a speed that NumPy reaches, is refused."""


def is_small(graph: Graph) -> bool:
    """Whether a whole step can be run here on NumPy in float64, twice, within about a minute."""
    values = sum(8 * value.type.elements for value in graph.values.values())
    if values > LARGEST_BYTES:
        return False
    flops = 0.0
    for node in graph.nodes:
        rule, types, made = graph.rule(node), graph.types(node.inputs), graph.types(node.outputs)
        flops += REGISTRY[node.op].work(rule, types, made, node.attributes, rule.signatures((1,))[0], (1,))[0]
    return flops <= LARGEST_FLOPS


def verify_plan(plan: Plan, seed: int = 0, *, scaled: bool | None = None, **options: Any) -> Verification:
    """Run a plan's step on random inputs, sharded and unsharded, in float64, and compare.

    Parameters
    ----------
    scaled
        Use the model's scaled-down shapes with the same decisions for every node; default where the plan's own are too
        large for this machine (`LARGEST_BYTES`, `LARGEST_FLOPS`).
    options
        As for `sbp.runtime.verify.verify`.

    Raises
    ------
    PlanError
        The plan is too large and its model cannot be scaled down.
    """
    if scaled is None:
        scaled = not is_small(plan.graph)
    if not scaled:
        return verify(plan.graph, plan.physical, seed, **options)
    if not plan.model:
        raise PlanError(
            f"the plan of {plan.graph.name} is too large to run here, and its graph was not made from a configuration "
            "that could be scaled down; plan a smaller graph of that structure and use Plan.on, or pass scaled=False."
        )
    small = plan.on(scaled_workload(plan.model))
    return verify(small.graph, small.physical, seed, **options)


def batches_for(plan: Plan, text: str | Path | None = None, seed: int = 0, first: int = 0) -> Iterable[Batch]:
    """Endless batches: bytes of a text for language models, random inputs for all others.

    Parameters
    ----------
    text
        A file; default a text that ships with Python.
    first
        How many batches an earlier run has taken: they are passed over.
    """
    graph = plan.graph
    if reads_text(graph):
        from sbp.data import batches

        batch, sequence = graph.values["tokens"].shape
        vocabulary = (graph.values["tokens"].initial.parameters if graph.values["tokens"].initial else (0, 256))[1]
        if vocabulary < 256:
            raise PlanError(f"the model's vocabulary of {vocabulary} is too small for bytes; plan one of at least 256.")
        return batches(text, batch, sequence, seed, first)
    if text is not None:
        raise PlanError(f"{graph.name} reads {', '.join(graph.inputs)}, not a text; leave the text out.")
    return _random_batches(graph, seed, first)


def reads_text(graph: Graph) -> bool:
    """Whether a graph is of a language model, which `batches_for` feeds with a text."""
    return set(graph.inputs) == {"tokens", "targets"}


def data_of(plan: Plan, text: str | Path | None = None) -> str:
    """What `batches_for` takes its batches from, as a checkpoint says it: text by its contents, not by its path."""
    if not reads_text(plan.graph):
        return "random inputs"
    from sbp.data import read_text

    return f"text {hashlib.blake2b(read_text(text), digest_size=16).hexdigest()}"


def _random_batches(graph: Graph, seed: int, first: int) -> Iterable[Batch]:
    step = first
    while True:
        yield {name: draw(graph.values[name], seed + step) for name in graph.inputs}
        step += 1


def _check_size(plan: Plan) -> None:
    """Refuse what ranks in this process cannot do in reasonable time, before it starts."""
    needed = plan.memory.peak_bytes * plan.mesh.size
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = plan.cost.flops * plan.mesh.size / NUMPY_FLOPS_PER_SECOND
    if needed > present or seconds > LONGEST_STEP_SECONDS:
        raise PlanError(
            f"one step of {plan.graph.name} on {plan.mesh.size} ranks in this process needs about {gib(needed)} of "
            f"memory and {seconds:,.0f} s; this machine has {gib(present)}. Plan a smaller model (--size), run it "
            "on GPUs or several processes (--backend, --comm), verify it scaled down, or insist (--force)."
        )


def run_plan(
    plan: Plan,
    steps: int = 1,
    *,
    text: str | Path | None = None,
    seed: int | None = None,
    floating: str | None = None,
    backend: Backend | None = None,
    communicator: Communicator | None = None,
    progress: Progress | None = None,
    force: bool = False,
    save: str | Path | None = None,
    save_every: int | None = None,
    resume: str | Path | Checkpoint | None = None,
    **options: Any,
) -> Training:
    """Train for some steps with a plan, on bytes of a text for language models and on random inputs for all others.

    Parameters and errors as for `sbp.runtime.train.train`; besides:

    Parameters
    ----------
    seed
        Default 0, or that of the run that is resumed.
    force
        Run on NumPy ranks in this process even what would not fit into memory or take minutes a step.
    save, save_every
        A folder for a checkpoint of the state, at the end and after every so many steps; see
        `sbp.runtime.checkpoint`. The plan that resumes from it may be for other ranks, layouts and meshes.
    resume
        A checkpoint to go on from: state (that of the optimizer and of random numbers included), seed, and the place in
        the data are those of the run that saved it. Its text must be the same one.
    """
    if not plan.graph.updates:
        raise PlanError(f"the plan of {plan.graph.name} is for inference and trains nothing; plan a training step.")
    if backend is None and communicator is None and not force:
        _check_size(plan)
    if save is None and save_every is not None:
        raise PlanError("save_every says how often to save, but not where; give save, the name of a folder, too.")
    begin = resumed(plan, resume, text, seed)
    if begin.checkpoint is not None:
        options["state"] = begin.checkpoint
    return train(
        plan.graph,
        plan.physical,
        batches_for(plan, text, begin.seed, begin.steps),
        steps,
        backend,
        communicator,
        seed=begin.seed,
        floating=floating,
        progress=progress,
        save=None if save is None else Saving(save, save_every, {"seed": begin.seed, "data": data_of(plan, text)}),
        **options,
    )


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a run begins: the checkpoint it goes on from, if any, the steps that were done, and the seed."""

    checkpoint: Checkpoint | None
    steps: int
    seed: int


def resumed(
    plan: Plan, resume: str | Path | Checkpoint | None, text: str | Path | None = None, seed: int | None = None
) -> Beginning:
    """Where a run with these options of `run_plan` begins.

    Raises
    ------
    PlanError
        The checkpoint's run read other data.
    CheckpointError
        There is no checkpoint, or it is damaged.
    """
    if resume is None:
        return Beginning(None, 0, 0 if seed is None else seed)
    checkpoint = resume if isinstance(resume, Checkpoint) else open_checkpoint(resume)
    data, now = checkpoint.facts.get("data"), data_of(plan, text)
    if data is not None and data != now:
        raise PlanError(
            f"the checkpoint {checkpoint.path} is of a run on {data}, this one reads {now}: its place in the data "
            "means nothing here. Give the text of then, or pass its arrays() as state to start from it on other data."
        )
    kept = checkpoint.facts.get("seed", 0)
    if isinstance(kept, bool) or not isinstance(kept, int) or kept < 0:
        raise PlanError(f"the checkpoint {checkpoint.path} has the seed {kept!r}, which is no whole number.")
    return Beginning(checkpoint, checkpoint.steps, kept if seed is None else seed)
