"""Memory of plans: `python benchmarks/memory.py [MODEL ...]` prints the arena of each beside its lower bound.

`peak` is what the plan holds at once; `bound` the same with every size rounded up to the alignment, below which no
arena can be; `arena` what was packed, within `seconds`. The second table shows what stages of a cut plan need.
"""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from sbp.planner.arena import arena_of
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.buffers import buffers_of
from sbp.planner.plan import Plan
from sbp.planner.schedule import schedule_named
from sbp.planner.stage_pipeline import pipeline_of, stage_peaks
from sbp.planner.stages import cut
from sbp.planner.styles import FullyShardedDataParallel, Styles

CASES = (
    ("gpt2", {"batch": 64, "sequence": 1024, "mesh": (2, 4)}),
    ("gpt2", {"batch": 64, "sequence": 1024, "mesh": (2, 4), "recompute": "full"}),
    ("gpt2", {"batch": 64, "sequence": 1024, "mesh": (8,), "style": FullyShardedDataParallel()}),
    ("gpt2-xl", {"batch": 16, "sequence": 1024, "mesh": (8,)}),
    ("llama-2-7b", {"batch": 8, "sequence": 2048, "mesh": (8,)}),
    ("bert-large", {"batch": 64, "mesh": (8,)}),
    ("vit-l", {"batch": 256, "mesh": (8,)}),
    ("resnet-50", {"batch": 512, "mesh": (8,)}),
    ("dlrm", {"batch": 4096, "mesh": (8,)}),
)

SCHEDULES = (("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved", 4, 2))
MICRO_BATCHES = 16


def gib(size: int) -> str:
    """Bytes for the table."""
    return f"{size / 2**30:.3f}"


def planned(model: str, options: dict) -> Plan:
    """The plan of a case."""
    given = dict(options)
    style = given.pop("style", None)
    if style is not None:
        given["restriction"] = lambda graph, mesh: Styles(graph, mesh, *(style for _ in mesh.shape))
    return auto_parallel(model, "a100-80g", nodes=1, time_limit=30, memory_limit=10**15, **given)


def arenas(wanted: list[str]) -> Table:
    """One row per case."""
    sizes = ("peak GiB", "bound GiB", "arena GiB")
    table = Table("model", "mesh", "recompute", "buffers", *sizes, "gap", "seconds", "how")
    for model, options in CASES:
        if wanted and model not in wanted:
            continue
        plan = planned(model, options)
        started = time.monotonic()
        arena = arena_of(plan.physical)
        seconds = time.monotonic() - started
        kind = "sharded" if "style" in options else ""
        table.add_row(
            f"{model} {kind}".strip(),
            "x".join(map(str, plan.mesh.shape)),
            options.get("recompute", "none"),
            str(len(buffers_of(plan.physical).buffers)),
            gib(plan.memory.peak_bytes),
            gib(arena.lower_bound_bytes),
            gib(arena.size_bytes),
            f"{arena.gap:.3%}",
            f"{seconds:.2f}",
            arena.method,
        )
    return table


def schedules() -> Table:
    """What every stage of GPT-2 medium needs under each schedule, with activations kept and recomputed."""
    table = Table("schedule", "recompute", "peak GiB by stage", "in flight by stage")
    for recompute in ("none", "full"):
        plan = planned("gpt2-medium", {"batch": 32, "sequence": 1024, "mesh": (8,), "recompute": recompute})
        for name, stages, chunks in SCHEDULES:
            pipeline = pipeline_of(cut(plan.physical, stages, chunks), MICRO_BATCHES)
            peaks = stage_peaks(pipeline, schedule_named(name, stages, chunks, MICRO_BATCHES))
            table.add_row(
                f"{name}, {stages} stages, {chunks} chunks, {MICRO_BATCHES} micro-batches",
                recompute,
                ", ".join(gib(peak.peak_bytes) for peak in peaks),
                ", ".join(str(peak.in_flight) for peak in peaks),
            )
    return table


def main(arguments: list[str]) -> None:
    """Both tables."""
    console = Console(width=160)
    console.print(arenas(arguments))
    if not arguments:
        console.print(schedules())


if __name__ == "__main__":
    main(sys.argv[1:])
