"""`sbp report`: a plan file, explained."""

from __future__ import annotations

import click

from sbp.cli import options
from sbp.cli.output import print_json, tables


@click.command("report")
@click.argument("plan_file", metavar="PLAN.JSON")
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Rows of the tables of costs.")
@click.option("--html", type=click.Path(dir_okay=False), help="Also write a page with the interactive figures.")
@click.option("--value", help="The tensor that the page shows over the device grid; default the largest split one.")
@click.option("--plotlyjs", type=click.Choice(["inline", "beside", "cdn"]),
              help="The page's script of 4.8 MB: in it (default), in a file beside it, or from a CDN.")  # fmt: skip
@click.option("--svg", type=click.Path(dir_okay=False), help="Also draw the forward operators and their layouts.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Also write the predicted timeline for Perfetto.")
@click.option("--explain", "explained", multiple=True, metavar="NAME",
              help="Say why this value lies as it does, and nothing else; repeatable.")  # fmt: skip
@options.json_option
def report(
    plan_file: str,
    top: int,
    html: str | None,
    value: str | None,
    plotlyjs: str | None,
    svg: str | None,
    trace: str | None,
    explained: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show a plan: step time by compute and collectives, memory by kind, layouts of all state, the largest costs.

    \b
    sbp report plan.json
    sbp report plan.json --json > figures.json
    sbp report plan.json --html plan.html
    sbp report plan.json --svg plan.svg
    sbp report plan.json --explain h.0.mlp.fc.weight
    sbp report plan.json --trace trace.json      (open it at ui.perfetto.dev or chrome://tracing)
    """
    from sbp.planner.plan import Plan

    if value is not None and html is None:
        raise click.UsageError("--value chooses a figure of the page; give --html FILE too.")
    if plotlyjs is not None and html is None:
        raise click.UsageError("--plotlyjs says where the page has its script from; give --html FILE too.")
    plan = Plan.load(plan_file)
    if explained:
        explanations = [plan.explain(name) for name in explained]
        if as_json:
            print_json([explanation.to_json() for explanation in explanations])
        else:
            click.echo("\n\n".join(map(str, explanations)))
        return
    if html is not None:
        from sbp.report.figures import plan_figures

        plan_figures(plan, value).save(html, plotlyjs or "inline")
    if svg is not None:
        from sbp.report.picture import save_picture

        save_picture(plan, svg)
    if trace is not None:
        plan.trace(trace)
    if as_json:
        from sbp.report.summary import to_json

        print_json(to_json(plan))
        return
    from sbp.report.text import report_parts

    console = tables(as_json)
    for part in report_parts(plan, top):
        console.print(part)
    if html is not None:
        console.print(f"The figures are in {html}.")
    if svg is not None:
        console.print(f"The picture is in {svg}.")
    if trace is not None:
        console.print(f"The timeline is in {trace}; ui.perfetto.dev and chrome://tracing show it.")
