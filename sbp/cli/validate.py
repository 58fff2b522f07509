"""`sbp validate`: published runs beside their predictions."""

from __future__ import annotations

from pathlib import Path

import click

from sbp.cli.output import print_json, progress, say, tables


@click.command("validate")
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="RUNS.CSV..."
)
@click.option("--json", "as_json", is_flag=True, help="`summary` and `rows` on stdout; the tables go to stderr.")
@click.option("--quiet", "-q", is_flag=True, help="No progress and, with --json, no tables.")
def validate(files: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Predict every row of tables of published runs, and show the errors by source beside a trivial baseline.

    A row that cannot be replayed has no error, and says why.
    """
    from sbp.planner.replay.rows import rows_of
    from sbp.planner.replay.validation import validation

    rows = rows_of(files)
    with progress(quiet) as show:
        found = validation(rows, show)
    if as_json:
        print_json(found.to_json())
    if not (as_json and quiet):
        console = tables(as_json)
        console.print(found.text(), highlight=False, markup=False, soft_wrap=True)
    if not rows:
        say("sbp validate: the files have no rows.")
