"""`sbp compare`: the found plan beside the usual schemes, under one cost model."""

from __future__ import annotations

from typing import Any

import click

from sbp.cli import options
from sbp.cli.output import print_json, progress, tables


@click.command("compare")
@click.argument("model", required=False)
@options.torch_option
@options.cluster_options(required=True)
@options.model_options
@options.search_options
@options.json_option
@options.quiet_option
def compare(
    model: str | None, torch: str | None, sizes: tuple[str, ...], as_json: bool, quiet: bool, **given: Any
) -> None:
    """Plan MODEL freely, and as data parallel, ZeRO-3/FSDP, Megatron tensor parallel and their products.

    Every scheme is priced by the same cost model, each in its best variant. One that exceeds the memory limit is
    priced without it and marked.

    \b
    sbp compare gpt2 --cluster a100-80g --nodes 1 --batch 64 --seq 1024
    """
    from sbp.planner.baselines import compare as compare_plans

    arguments = options.planning_arguments(**given)
    with progress(quiet) as say:
        chosen = options.resolve_model(model, sizes, torch)
        found = compare_plans(chosen, arguments.pop("cluster"), progress=say, **arguments)
    if not quiet:
        from sbp.report.text import comparison_parts

        console = tables(as_json)
        for part in comparison_parts(found):
            console.print(part)
    if as_json:
        print_json(found.to_json())
