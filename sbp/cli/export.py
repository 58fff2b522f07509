"""`sbp export`: a plan for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sbp.cli import options
from sbp.cli.output import check_writable, print_json, progress

FORMATS = ("torch-json", "megatron", "torchtitan")


@click.command("export")
@click.argument("plan_file", metavar="PLAN.JSON")
@click.option("--format", "form", type=click.Choice(FORMATS), required=True,
              help="DTensor placements as JSON; Megatron-LM's arguments; TorchTitan's configuration.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False), help="A file instead of stdout.")
@click.option("--time-limit", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
              help="Seconds for planning the settings that may be nearest.")  # fmt: skip
@options.json_option
@options.quiet_option
def export(plan_file: str, form: str, out: str | None, time_limit: float, as_json: bool, quiet: bool) -> None:
    """Write a plan for PyTorch, Megatron-LM or TorchTitan.

    torch-json: the placements of every parameter and of what enters and leaves every module, in DTensor's words (to
    train under the plan in PyTorch see Plan.to_torch). megatron, torchtitan: the degrees of parallelism that the plan
    is; if it is none exactly, the nearest setting with what it costs more, as comments. --json gives that as data.

    \b
    sbp export plan.json --format torch-json --out placements.json
    sbp export plan.json --format megatron
    sbp export plan.json --format torchtitan --out parallelism.toml
    """
    from sbp.planner.plan import Plan

    if out is not None:
        check_writable(out, f"the {form} setting" if form != "torch-json" else "the placements")
    plan = Plan.load(plan_file)
    if form == "torch-json":
        _write(plan.placements(), out)
        return
    from sbp.planner import emitters, settings

    with progress(quiet) as say:
        if say is not None:
            say(f"looking for the setting that {plan.graph.name} on {plan.mesh} is")
        recognised = settings.recognise(plan, time_limit)
    if as_json:
        _write(settings.setting_json(recognised), out)
        return
    text = (emitters.megatron if form == "megatron" else emitters.torchtitan)(plan, recognised)
    if out is None:
        click.echo(text, nl=False)
    else:
        Path(out).write_text(text, encoding="utf-8")
        click.echo(f"The {form} setting is in {out}.")


def _write(data: Any, out: str | None) -> None:
    if out is None:
        print_json(data)
        return
    import orjson

    Path(out).write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    click.echo(f"The data are in {out}.")
