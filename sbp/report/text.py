"""Plans as tables for terminals (rich), and as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from sbp.report.summary import Summary, summarize
from sbp.report.tables import table
from sbp.report.units import bytes_text, count_text, seconds_text, share_text
from sbp.wording import counted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from sbp.planner.baselines import Comparison
    from sbp.planner.links import AxisLinks
    from sbp.planner.plan import Plan

WIDTH = 140
"""Columns of plain text, and of tables that do not go to a terminal."""

_BAR = 24

_SAME = 1e-9
"""Relative difference below which two predicted times are the same."""


def console_for(file: Any = None) -> Console:
    """A rich console that prints names as they are, and does not cut tables to 80 columns where no terminal is."""
    import sys

    from rich.console import Console

    file = sys.stdout if file is None else file
    width = None if hasattr(file, "isatty") and file.isatty() else WIDTH
    return Console(file=file, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)


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
    parts: list[Any] = [*headline(summary), time_table(summary)]
    if summary.links:
        parts.append(link_table(summary.links))
    parts += [memory_table(summary), layout_table(summary, None)]
    parts += [operator_table(summary, top), boxing_table(summary, top)]
    if len(summary.tried) > 1:
        parts.append(tried_table(summary.tried))
    return parts


def headline(summary: Summary) -> list[str]:
    """What was planned, and what is proven about it."""
    return [what(summary), f"on {summary.cluster}, {summary.mesh}", *findings(summary), ""]


def findings(summary: Summary) -> list[str]:
    """What is proven, what came of the other meshes, and whether anything is split, a sentence each."""
    sentences = (proven(summary), other_meshes(summary), whole(summary), mixed_axes(summary))
    return [sentence for sentence in sentences if sentence]


def mixed_axes(summary: Summary) -> str:
    """A mesh of several axes whose axis meets on fast and on slow links: another order may keep it on the fast ones."""
    mixed = [item for item in summary.links if item.mixed]
    if not mixed or "," not in summary.mesh:
        return ""
    named = "; ".join(f"{item.axis} meets over {' and '.join(item.tiers)}" for item in mixed)
    return f"mixed links: {named}: the slowest decides, whatever the others could do"


def whole(summary: Summary) -> str:
    """A plan in which nothing is split says so: it is legal, and mostly a sign that the model is tiny."""
    return "" if summary.split else f"nothing is split: {NOTHING_SPLIT}"


NOTHING_SPLIT = "every rank holds every tensor whole and does the same work; verification is trivial"
"""What is said of a plan whose layouts are all B."""


def what(summary: Summary) -> str:
    """`gpt2: training step, batch 64, sequence 1024, mixed precision, AdamW`."""
    model = summary.model
    if not model:
        return summary.title
    words = ["training step" if model.get("training") else "inference", f"batch {model.get('batch')}"]
    if summary.sequence is not None:
        words.append(f"sequence {summary.sequence}")
    words.append(f"{model.get('precision')} precision")
    if model.get("recompute"):
        words.append("recompute")
    optimizer = model.get("optimizer")
    if model.get("training"):
        words.append("AdamW" if not optimizer else str(optimizer.get("kind", "an optimizer of its own")))
    sizes = f" with {', '.join(summary.sizes)}" if summary.sizes else ""
    return f"{model.get('name', summary.title)}{sizes}: {', '.join(words)}"


def proven(summary: Summary) -> str:
    """Objective, bound and status in one sentence."""
    objective, bound = seconds_text(summary.objective_seconds), seconds_text(summary.lower_bound_seconds)
    if summary.status == "optimal":
        where = "optimal on this mesh" if unsettled(summary) else "optimal"
        return (
            f"{where}: no plan on this mesh takes less than {bound} of work "
            f"(this one {objective}, gap {summary.gap:.2%})"
        )
    return (
        f"{summary.status}: {objective} of work, no plan on this mesh takes less than {bound} (gap {summary.gap:.2%})"
    )


def other_meshes(summary: Summary) -> str:
    """What the search settled about the other meshes: whether one of them may have a better plan, and which."""
    if len(summary.tried) < 2:
        return ""
    open_ones = unsettled(summary)
    if open_ones:
        named = "; ".join(f"{reason}: {', '.join(meshes)}" for reason, meshes in open_ones.items())
        count = sum(map(len, open_ones.values()))
        return f"but {count} of {len(summary.tried)} meshes may have a better plan ({named}); more time settles it"
    return f"none of the {len(summary.tried)} meshes tried has a better plan"


def unsettled(summary: Summary) -> dict[str, list[str]]:
    """Why -> meshes of which it is not proven that they have no better plan than this one."""
    found: dict[str, list[str]] = {}
    for item in summary.tried:
        bound, outcome = item["lower_bound_seconds"], item["outcome"]
        if item["mesh"] == summary.mesh or outcome == "optimal":
            continue
        if outcome.startswith("not tried"):
            found.setdefault("not tried for lack of time", []).append(item["mesh"])
        elif bound is None and "time limit" in outcome:
            found.setdefault("no plan found in time", []).append(item["mesh"])
        elif bound is not None and bound < summary.objective_seconds:
            found.setdefault("stopped with a lower bound below this plan", []).append(item["mesh"])
    return found


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


def link_table(links: Sequence[AxisLinks]) -> RenderableType:
    """Mesh axis, its links, and what of their stated bandwidth collectives reach."""
    rows = [
        (
            item.axis,
            str(item.ranks),
            " and ".join(item.tiers),
            f"{item.stated_bytes_per_second / 1e9:.4g}",
            f"{item.reached_bytes_per_second / 1e9:.4g}",
            seconds_text(item.start_seconds),
        )
        for item in links
    ]
    note = "GB/s, one direction: as stated for one link of the outermost kind; as a large all-gather reaches per device"
    return table("Links", ("axis", ">ranks", "over", ">stated", ">reached", ">to start"), rows, note)


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
    note = f"the peak is at {summary.peak_operation}; {_arena_text(summary.arena)}"
    if reserved:
        note += f"; {bytes_text(reserved)} besides are the framework's"
    against = "limit" if limit else "peak"
    return table("Memory per device", ("kind", ">bytes", f">of the {against}", ""), rows, note)


def _arena_text(arena: Mapping[str, int]) -> str:
    size, bound = arena["size_bytes"], arena["lower_bound_bytes"]
    if size == bound:
        return f"all fits into an arena of {bytes_text(size)}, the least possible"
    return f"all fits into an arena of {bytes_text(size)}, {size / bound - 1:.2%} above the least possible"


def layout_table(summary: Summary, limit: int | None) -> RenderableType:
    """Stored layouts, and those they are used in, of equal layers together."""
    rows = summary.layouts if limit is None else summary.layouts[:limit]
    return table(
        f"Layouts on {summary.mesh}",
        ("name", "?!type", "!stored", "used forward", "used backward", "optimizer state", "?>per device"),
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
    return f"; {counted(whole - shown, 'row')} more in `sbp report`" if whole > shown else ""


def operator_table(summary: Summary, top: int) -> RenderableType:
    """The operators that take most of the time."""
    shown = summary.operators[:top]
    return table(
        f"Most expensive operators ({len(shown)} of {len(summary.operators)})",
        ("module", "!operator", ">time", ">of the step", "?!phase", "?>count", "?>FLOP per device"),
        [
            (item.module or "-", item.op, seconds_text(item.seconds), share_text(item.seconds, summary.step_seconds))
            + (item.phase, str(item.count), count_text(item.flops))
            for item in shown
        ],
    )


def boxing_table(summary: Summary, top: int) -> RenderableType:
    """The layout changes that take most of the time."""
    shown = summary.boxing[:top]
    return table(
        f"Most expensive boxing ({len(shown)} of {len(summary.boxing)})",
        ("value", "!what", "!axis", "!change", ">time", "?>of the step", "?>bytes", "?!phase", "?>count", "?!type"),
        [
            (item.value, item.kind, item.axis, f"{item.before} -> {item.after}", seconds_text(item.seconds))
            + (share_text(item.seconds, summary.step_seconds), bytes_text(item.bytes), item.phase, str(item.count))
            + (item.type,)
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
    base = comparison.found.objective_seconds
    rows = []
    for row in comparison.rows:
        if row.plan is None:
            rows.append((row.name, "-", "-", "-", "-", "-", "-", row.reason))
            continue
        plan = row.plan
        rows.append(
            (row.name, str(plan.mesh), seconds_text(plan.objective_seconds))
            + (f"{plan.objective_seconds / base:.3f} x" if base > 0 else "-",)
            + (f"{plan.gap:.2%}", seconds_text(plan.cost.step_seconds), bytes_text(plan.memory.peak_bytes))
            + ("" if row.fits else "exceeds the memory limit",)
        )
    columns = ("!plan", "!mesh", ">work", ">against found", ">gap", ">step", ">peak memory", "note")
    note = (
        "work is compute and collectives added up: it is minimised, and proven to within the gap; "
        "step is predicted with collectives overlapped"
    )
    summary = summarize(comparison.found)
    parts = [what(summary), f"on {summary.cluster}", ""]
    return [*parts, table("Plans under one cost model", columns, rows, note), *shorter_steps(comparison)]


def shorter_steps(comparison: Comparison) -> list[str]:
    """A paragraph that names the schemes whose predicted step is shorter than the found plan's, if there are any."""
    own = comparison.found.cost.step_seconds
    shorter = [
        f"{row.name} ({seconds_text(row.plan.cost.step_seconds)}{'' if row.fits else ', exceeds the memory limit'})"
        for row in comparison.rows[1:]
        if row.plan is not None and row.plan.cost.step_seconds < own * (1 - _SAME)
    ]
    if not shorter:
        return []
    return [
        f"A shorter step than the found plan's ({seconds_text(own)}) is predicted for {', '.join(shorter)}, where "
        "overlap hides more of the collectives. The search minimises the work and does not see overlap; to plan in "
        "that way, pin that scheme's layouts.",
        "",
    ]
