"""`sbp simulate`: one step of a plan or of a pipeline, event by event."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from sbp.cli import options
from sbp.cli.output import print_json, tables

if TYPE_CHECKING:
    from sbp.planner.pipeline import Pipeline


@click.command("simulate")
@click.argument("file", metavar="PLAN.JSON|PIPELINE.JSON")
@click.option("--schedule", "schedules", multiple=True, metavar="NAME",
              help="gpipe, 1f1b, interleaved or zero-bubble; repeatable. Default: by the chunks.")  # fmt: skip
@click.option("--stages", type=click.IntRange(min=1), help="Cut a plan into so many pipeline stages; default 1.")
@click.option("--micro-batches", type=click.IntRange(min=1), help="Default the pipeline's own; a plan is one.")
@click.option("--slowdown", type=click.FloatRange(min=0.0), metavar="FRACTION",
              help="Kernels take so much longer while data moves (GPUs: about 0.19); default the file's.")  # fmt: skip
@click.option("--trace", type=click.Path(dir_okay=False), help="Also write the shortest step's timeline for Perfetto.")
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Rows of the tables.")
@options.json_option
def simulate(
    file: str,
    schedules: tuple[str, ...],
    stages: int | None,
    micro_batches: int | None,
    slowdown: float | None,
    trace: str | None,
    top: int,
    as_json: bool,
) -> None:
    """Simulate a step: its length, what communication exposes, bubbles, memory by stage, what is critical.

    PLAN.JSON is what `sbp plan --out` wrote: a step on one stage, or of several, then for one micro-batch on the ranks
    of one stage. PIPELINE.JSON holds the tasks of every stage, see sbp.planner.pipeline_file.

    \b
    sbp simulate plan.json
    sbp simulate plan.json --stages 4 --micro-batches 16 --schedule 1f1b --schedule interleaved:2
    sbp simulate plan.json --stages 4 --micro-batches 8 --schedule zero-bubble
    sbp simulate pipeline.json --schedule 1f1b --schedule zero-bubble --micro-batches 32
    sbp simulate pipeline.json --json --trace trace.json
    """
    from sbp.planner.simulator import simulate as play
    from sbp.planner.trace import save_trace
    from sbp.report.simulation import simulation_json, simulation_parts

    made = _maker(file, stages)
    steps = {}
    for name in schedules or (None,):
        pipeline = made(name, micro_batches)
        if slowdown is not None:
            pipeline = replace(pipeline, compute_slowdown=slowdown)
        usual = "gpipe" if pipeline.phases == ("forward",) else "1f1b" if pipeline.chunks == 1 else "interleaved"
        steps[name or usual] = play(pipeline, name or usual)
    if trace is not None:
        save_trace(min(steps.values(), key=lambda step: step.step_seconds), trace)
    if as_json:
        print_json([simulation_json(step) for step in steps.values()])
        return
    console = tables(as_json)
    for part in simulation_parts(steps, top):
        console.print(part)
    if trace is not None:
        console.print(f"The timeline is in {trace}; ui.perfetto.dev and chrome://tracing show it.")


def _maker(file: str, stages: int | None) -> Callable[[str | None, int | None], Pipeline]:
    """Schedule's name, micro-batches -> the pipeline that a file holds, or that its plan is cut into."""
    from sbp.errors import PipelineError
    from sbp.json_file import read_json_file
    from sbp.planner.pipeline_file import FORMAT, load_pipeline
    from sbp.planner.plan import Plan
    from sbp.planner.plan_pipeline import plan_pipeline
    from sbp.planner.schedule import chunks_named

    data = read_json_file(file, "plan or pipeline", "`sbp plan --out` or save_pipeline", PipelineError)
    if isinstance(data, dict) and data.get("format") == FORMAT:
        if stages is not None:
            raise click.UsageError("--stages cuts a plan; the file of a pipeline has its own stages.")
        pipeline = load_pipeline(file)
        return lambda name, count: pipeline if count is None else replace(pipeline, micro_batches=count)
    plan = Plan.load(file)
    return lambda name, count: plan_pipeline(
        plan.physical,
        plan.cluster,
        stages or 1,
        1 if name is None else chunks_named(name) or 1,
        count or 1,
        weights_apart=name == "zero-bubble",
    )
