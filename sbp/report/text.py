"""Plans as tables for terminals (rich), and as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from sbp.report.summary import Summary, summarize
from sbp.report.units import bytes_text, count_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from sbp.planner.baselines import Comparison
    from sbp.planner.plan import Plan

WIDTH = 140
"""Columns of plain text, and of tables that do not go to a terminal."""

_BAR = 24


def console_for(file: Any = None) -> Console:
    """A rich console that prints names as they are, and does not cut tables to 80 columns where no terminal is."""
    import sys

    from rich.console import Console

    file = sys.stdout if file is None else file
    width = None if hasattr(file, "isatty") and file.isatty() else WIDTH
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> RenderableType:
    """A title, a table and a note; columns that start with `>` are right-aligned, these and those with `!` unbroken."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        mark = name[:1] if name[:1] in (">", "!") else ""
        made.add_column(
            Text(name[len(mark) :]), justify="right" if mark == ">" else "left", no_wrap=bool(mark), overflow="fold"
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return Group(Text(title, style="bold"), made, *([Text(note, style="dim")] if note else []), Text(""))


def plan_text(plan: Plan) -> str:
    """The summary that `print(plan)` shows."""
    return _plain(plan_parts(plan))


def plan_parts(plan: Plan) -> list[Any]:
    """What `sbp plan` prints, part by part."""
    summary = summarize(plan)
    return [*headline(summary), time_table(summary), memory_table(summary), layout_table(summary, 30)]


def report_text(plan: Plan, top: int = 12) -> str:
    """The whole report as plain text."""
    return _plain(report_parts(plan, top))


def _plain(parts: Iterable[Any]) -> str:
    buffer = StringIO()
    console = console_for(buffer)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip().splitlines())


def report_parts(plan: Plan, top: int = 12) -> list[Any]:
    """What `sbp report` prints, part by part; `top` limits the tables of costs."""
    summary = summarize(plan)
    parts: list[Any] = [*headline(summary), time_table(summary), memory_table(summary), layout_table(summary, None)]
    parts += [operator_table(summary, top), boxing_table(summary, top)]
    if len(summary.tried) > 1:
        parts.append(tried_table(summary.tried))
    return parts


def headline(summary: Summary) -> list[str]:
    """What was planned, and what is proven about it."""
    return [what(summary), f"on {summary.cluster}, {summary.mesh}", proven(summary), ""]


def what(summary: Summary) -> str:
    """`gpt2: training step, batch 64, sequence 1024, mixed precision, AdamW`."""
    model = summary.model
    if not model:
        return summary.title
    words = ["training step" if model.get("training") else "inference", f"batch {model.get('batch')}"]
    if model.get("sequence"):
        words.append(f"sequence {model['sequence']}")
    words.append(f"{model.get('precision')} precision")
    if model.get("recompute"):
        words.append("recompute")
    optimizer = model.get("optimizer")
    if model.get("training"):
        words.append("AdamW" if not optimizer else str(optimizer.get("kind", "an optimizer of its own")))
    return f"{model.get('name', summary.title)}: {', '.join(words)}"


def proven(summary: Summary) -> str:
    """Objective, bound and status in one sentence."""
    objective, bound = seconds_text(summary.objective_seconds), seconds_text(summary.lower_bound_seconds)
    if summary.status == "optimal":
        return (
            f"optimal: no plan on this mesh takes less than {bound} of work "
            f"(this one {objective}, gap {summary.gap:.2%})"
        )
    return (
        f"{summary.status}: {objective} of work, no plan on this mesh takes less than {bound} (gap {summary.gap:.2%})"
    )


def time_table(summary: Summary) -> RenderableType:
    """Where the step's time goes: compute by phase, collectives by mesh axis, and what of them does not overlap."""
    step = summary.step_seconds

    def row(name: str, seconds: float, count: str = "") -> tuple[str, ...]:
        bar = "#" * round(_BAR * seconds / step) if step > 0 else ""
        return name, seconds_text(seconds), share_text(seconds, step), count, bar[: 2 * _BAR]

    rows = []
    for item in summary.time:
        label = {"compute": f"compute, {item.name}", "local": f"local {item.name}", "collective": item.name}[item.kind]
        rows.append(row(label, item.seconds, str(item.count)))
    rows.append(row("all compute", summary.compute_seconds))
    for axis, seconds in summary.boxing_seconds.items():
        rows.append(row(f"all collectives along {axis}", seconds))
    rows.append(row("exposed collectives", summary.exposed_seconds))
    rows.append(row("step", step))
    note = (
        f"FLOP utilisation {summary.utilisation:.1%} of the peak; {summary.model_utilisation:.1%} counting the model's "
        f"own FLOP only ({count_text(summary.flops)}FLOP per device)"
    )
    return table("Step time, predicted", ("part", ">time", ">of the step", ">count", ""), rows, note)


def memory_table(summary: Summary) -> RenderableType:
    """Memory per device at the peak by kind, against the limit."""
    memory = summary.memory_bytes
    peak, limit, reserved = (memory[name] for name in ("peak", "limit", "reserved"))
    whole = limit or peak or 1
    rows = []
    for kind, size in memory.items():
        if kind in ("peak", "limit", "reserved") or not size:
            continue
        rows.append((kind, bytes_text(size), share_text(size, whole), "#" * round(_BAR * size / whole)))
    rows.append(("peak", bytes_text(peak), share_text(peak or 0, whole), "#" * round(_BAR * (peak or 0) / whole)))
    rows.append(("limit", bytes_text(limit) if limit else "none", "", ""))
    note = f"the peak is at {summary.peak_operation}"
    if reserved:
        note += f"; {bytes_text(reserved)} besides are the framework's"
    against = "limit" if limit else "peak"
    return table("Memory per device", ("kind", ">bytes", f">of the {against}", ""), rows, note)


def layout_table(summary: Summary, limit: int | None) -> RenderableType:
    """Stored layouts, and those they are used in, of equal layers together."""
    rows = summary.layouts if limit is None else summary.layouts[:limit]
    return table(
        f"Layouts on {summary.mesh}",
        ("!name", "!type", "!stored", "used forward", "used backward", "optimizer state", ">per device"),
        [
            (row.names, row.type, row.stored, _layouts(row.forward, row.stored), _layouts(row.backward, row.stored))
            + (_layouts(row.optimizer, row.stored), bytes_text(row.bytes))
            for row in rows
        ],
        f"= is the stored layout{_more(len(summary.layouts), len(rows))}",
    )


def _layouts(layouts: Sequence[str], stored: str) -> str:
    return "; ".join("=" if layout == stored else layout for layout in layouts)


def _more(whole: int, shown: int) -> str:
    return f"; {whole - shown} rows more in `sbp report`" if whole > shown else ""


def operator_table(summary: Summary, top: int) -> RenderableType:
    """The operators that take most of the time."""
    shown = summary.operators[:top]
    return table(
        f"Most expensive operators ({len(shown)} of {len(summary.operators)})",
        ("!module", "!operator", "phase", ">count", ">time", ">of the step", ">FLOP per device"),
        [
            (item.module or "-", item.op, item.phase, str(item.count), seconds_text(item.seconds))
            + (share_text(item.seconds, summary.step_seconds), count_text(item.flops))
            for item in shown
        ],
    )


def boxing_table(summary: Summary, top: int) -> RenderableType:
    """The layout changes that take most of the time."""
    shown = summary.boxing[:top]
    return table(
        f"Most expensive boxing ({len(shown)} of {len(summary.boxing)})",
        ("value", "!what", "axis", "!change", "phase", ">count", ">bytes", ">time", ">of the step"),
        [
            (f"{item.value}: {item.type}", item.kind, item.axis, f"{item.before} -> {item.after}", item.phase)
            + (str(item.count), bytes_text(item.bytes), seconds_text(item.seconds))
            + (share_text(item.seconds, summary.step_seconds),)
            for item in shown
        ],
    )


def tried_table(tried: Sequence[Any]) -> RenderableType:
    """The meshes that were tried."""
    return table(
        "Meshes tried",
        ("!mesh", ">objective", ">lower bound", "outcome"),
        [
            (item["mesh"], seconds_text(item["objective_seconds"]), seconds_text(item["lower_bound_seconds"]))
            + (item["outcome"],)
            for item in tried
        ],
    )


def comparison_text(comparison: Comparison) -> str:
    """What `print(comparison)` shows."""
    return _plain(comparison_parts(comparison))


def comparison_parts(comparison: Comparison) -> list[Any]:
    """What `sbp compare` prints: the found plan first, then every scheme beside it."""
    found = comparison.found
    base = found.objective_seconds
    rows = []
    for row in comparison.rows:
        if row.plan is None:
            rows.append((row.name, "-", "-", "-", "-", "-", "-", row.reason))
            continue
        plan = row.plan
        objective = plan.objective_seconds
        note = "" if row.fits else "exceeds the memory limit"
        rows.append(
            (row.name, str(plan.mesh), seconds_text(plan.cost.step_seconds), seconds_text(objective))
            + (
                f"{objective / base:.3f} x" if base > 0 else "-",
                bytes_text(plan.memory.peak_bytes),
                f"{plan.gap:.2%}",
                note,
            )
        )
    columns = ("!plan", "!mesh", ">step", ">work", ">against found", ">peak memory", ">gap", "note")
    note = "work is compute and collectives added up, what plans are compared by; step is with collectives overlapped"
    summary = summarize(found)
    return [what(summary), f"on {summary.cluster}", "", table("Plans under one cost model", columns, rows, note)]
