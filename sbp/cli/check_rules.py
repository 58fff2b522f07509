"""`sbp check-rules`: every combination of layouts of every operator, tried on real shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sbp.cli import options
from sbp.cli.output import print_json, progress, tables

if TYPE_CHECKING:
    from sbp.check_rules import Report

UNSOUND = 1


@click.command("check-rules")
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option(
    "--mesh", "meshes", multiple=True, metavar="2", help="Mesh sizes, such as 3 or 2,2; repeatable [2; 3; 2,2]."
)
@click.option(
    "--import", "sources", multiple=True, metavar="FILE", help="Python file or module with operators of yours."
)
@click.option("--seeds", type=click.IntRange(min=1), default=2, show_default=True, help="Sets of random inputs.")
@click.option("--reasons", is_flag=True, help="List what is left out on purpose too.")
@options.json_option
@options.quiet_option
def check_rules(
    names: tuple[str, ...],
    meshes: tuple[str, ...],
    sources: tuple[str, ...],
    seeds: int,
    reasons: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prove the layout rules of operators (default: of all) by brute force.

    Every combination of input and output layouts over S(i), B, P(sum), P(max) and P(min) runs on real shards of
    the operator's example calls and is compared with the unsharded result. UNSOUND is what a rule admits and gives
    other numbers; MISSING is what always gives the right ones and no rule admits. Exit code 1 if anything is unsound.

    \b
    sbp check-rules
    sbp check-rules matmul reshape --mesh 3 --mesh 2,2
    sbp check-rules my_operator --import my_operators.py
    """
    from sbp.check_rules import DEFAULT_MESHES
    from sbp.check_rules import check_rules as prove
    from sbp.mesh import Mesh

    known = _import_all(sources)
    shapes = tuple(Mesh.parse(text).shape for text in meshes) or DEFAULT_MESHES
    with progress(quiet) as say:
        report = prove(names or (known if sources else None), shapes, seeds, say)
    if as_json:
        print_json(report.to_json())
    if not quiet:
        _show(report, reasons, as_json)
    return 0 if report.sound else UNSOUND


def _import_all(sources: tuple[str, ...]) -> list[str]:
    """Import files and modules; the names of the operators that they define."""
    import importlib
    import runpy

    from sbp.errors import SbpError
    from sbp.operator import REGISTRY

    before = set(REGISTRY)
    for source in sources:
        try:
            if source.endswith(".py"):
                runpy.run_path(source, run_name=source.rpartition("/")[2].removesuffix(".py"))
            else:
                importlib.import_module(source)
        except SbpError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise click.UsageError(f"cannot import {source}: {type(error).__name__}: {error}.") from None
    added = sorted(set(REGISTRY) - before)
    if sources and not added:
        raise click.UsageError(f"{', '.join(sources)} defines no operators; decorate a kernel with @sbp.operator(...).")
    return added


def _show(report: Report, reasons: bool, as_json: bool) -> None:
    from sbp.report.tables import table
    from sbp.wording import counted

    rows: list[tuple[str, ...]] = []
    kinds: list[tuple[str, str]] = [("UNSOUND", "unsound"), ("MISSING", "missing")]
    if reasons:
        kinds.append(("left out", "missing_with_reason"))
    for label, attribute in kinds:
        for item in report.operators:
            for finding in getattr(item, attribute):
                mesh = "x".join(map(str, finding.mesh))
                rows.append((label, f"{finding.operator}{finding.case}", mesh, finding.signature, finding.detail))
    console: Any = tables(as_json)
    if rows:
        console.print(table("Findings", ("!kind", "operator and case", "mesh", "signature", "why"), rows))
    total = report.summary
    console.print(
        f"{counted(total['operators'], 'operator')}, {counted(total['cases'], 'case')}, "
        f"{counted(total['combinations'], 'combination')} of layouts: "
        f"{total['admitted']} admitted, {total['unsound']} unsound, {total['missing']} missing, "
        f"{total['missing_with_reason']} left out with a reason"
    )
