"""`sbp plan`: from a model and a cluster to a plan."""

from __future__ import annotations

from typing import Any

import click

from sbp.cli import options
from sbp.cli.output import check_writable, print_json, progress, tables


@click.command("plan")
@click.argument("model", required=False)
@options.torch_option
@options.cluster_options(required=True)
@options.model_options
@options.search_options
@click.option("--out", type=click.Path(dir_okay=False), help="Write the plan (JSON) for `sbp report`, `verify`, `run`.")
@click.option("--hint", type=click.Path(), metavar="PLAN.JSON",
              help="Start from this plan's layouts; what is found costs no more than they do.")  # fmt: skip
@click.option("--offsets", is_flag=True, help="Write into the plan, too, where each tensor lies in a device's memory.")
@options.json_option
@options.quiet_option
def plan(
    model: str | None, torch: str | None, sizes: tuple[str, ...], out: str | None, hint: str | None, offsets: bool,
    as_json: bool, quiet: bool, **given: Any,
) -> None:  # fmt: skip
    """Choose the layout of every tensor of MODEL (see `sbp models`, or a graph's JSON file) on a cluster.

    Prints the plan's summary, with how far from optimal it can be. Exit code 3 if nothing fits, 4 if nothing was
    found in time.

    \b
    sbp plan gpt2 --cluster a100-80g --nodes 1 --batch 64 --seq 1024 --out plan.json
    sbp plan llama-3-8b --cluster h100 --nodes 2 --mesh dp=2,tp=8 --pin 'layers.*.weight=S(0), S(0)'
    sbp plan --torch mymodel.py:build_model --cluster a100-80g --nodes 1
    """
    from sbp.planner.auto_parallel import auto_parallel
    from sbp.planner.plan import Plan

    if offsets and out is None:
        raise click.UsageError("--offsets goes into the plan's file; give --out FILE too.")
    arguments = options.planning_arguments(**given)
    if out is not None:
        check_writable(out, "the plan file")
    start = None if hint is None else Plan.load(hint)
    with progress(quiet) as say:
        found = auto_parallel(
            options.resolve_model(model, sizes, torch), arguments.pop("cluster"), progress=say, hint=start, **arguments
        )
    if out is not None:
        found.save(out, offsets)
    if not quiet:
        from sbp.report.text import plan_parts

        console = tables(as_json)
        for part in plan_parts(found):
            console.print(part)
        if out is not None:
            console.print(f"The plan is in {out}; `sbp report {out}` shows all of it.")
    if as_json:
        from sbp.report.summary import to_json

        print_json(to_json(found))
