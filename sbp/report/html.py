"""Plans, graphs and layouts as HTML for notebooks: nothing to load, no scripts, readable on dark and on light."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from sbp.layout import Layout
from sbp.report import text
from sbp.report.colours import COLLECTIVES, KINDS, PHASES, sbp_colour
from sbp.report.naming import grouped_names, template_of
from sbp.report.summary import Summary, summarize
from sbp.report.units import bytes_text, count_text, seconds_text, share_text
from sbp.wording import counted

if TYPE_CHECKING:
    from sbp.graph import Graph
    from sbp.planner.plan import Plan

_ROWS = 40
"""Rows that a folded table shows; what is left out is said."""

_STYLE = (
    "<style>.sbp-report{font-size:90%;line-height:1.4;max-width:1100px}.sbp-report>div{margin:4px 0}"
    ".sbp-report table{border-collapse:collapse;font-size:100%}"
    ".sbp-report td,.sbp-report th{padding:2px 10px 2px 0;text-align:left;vertical-align:top}"
    ".sbp-report .n{text-align:right;white-space:nowrap}</style>"
)
"""Names of its own, so that a notebook's other outputs keep their looks."""


def layout_html(layout: Layout) -> str:
    """One coloured chip per mesh axis."""
    chips = "".join(
        f'<span style="background:{sbp_colour(sbp)};color:#fff;border-radius:4px;padding:0 5px;margin-right:3px;'
        f'font-family:monospace;white-space:nowrap">{escape(str(sbp))}</span>'
        for sbp in layout
    )
    return f'<span title="layout {escape(str(layout))}, one SBP per mesh axis">{chips}</span>'


def plan_html(plan: Plan) -> str:
    """A plan's headline, step time and memory as bars, and its tables, folded."""
    summary = summarize(plan)
    parts = [
        f"<strong>{escape(text.what(summary))}</strong><br>on {escape(summary.cluster)}, {escape(summary.mesh)}<br>"
        f"{'<br>'.join(map(escape, text.findings(summary)))}",
        _step_bar(summary),
        _memory_bar(summary),
        _fold(f"Layouts of {len(plan.graph.sources)} inputs and state values", _layout_rows(summary), opened=True),
        _fold(f"Most expensive operators of {len(plan.graph.nodes)}", _operator_rows(summary)),
        _fold(f"Most expensive boxing of {counted(len(plan.boxing), 'step')}", _boxing_rows(summary)),
    ]
    if len(summary.tried) > 1:
        rows = [
            (escape(item["mesh"]), seconds_text(item["objective_seconds"]), seconds_text(item["lower_bound_seconds"]))
            + (escape(item["outcome"]),)
            for item in summary.tried
        ]
        parts.append(_fold("Meshes tried", _table(("mesh", ">objective", ">lower bound", "outcome"), rows)))
    return _page(parts)


def graph_html(graph: Graph) -> str:
    """A graph's size, its nodes by operator and phase, and its sources by equal layers."""
    phases = Counter(node.phase for node in graph.nodes)
    counts = ", ".join(f"{count} {phase}" for phase, count in phases.items()) or "none"
    elements = sum(graph.values[name].type.elements for name in graph.parameters)
    heads = [
        f"<strong>graph {escape(graph.name)}</strong><br>{counted(len(graph.nodes), 'node')} ({escape(counts)}), "
        f"{counted(len(graph.parameters), 'parameter')} of {count_text(elements)} elements together"
    ]
    operators: dict[str, Counter[str]] = {}
    for node in graph.nodes:
        operators.setdefault(node.op, Counter())[node.phase] += 1
    rows = [
        (escape(op), str(sum(found.values())), *(str(found[phase] or "") for phase in phases))
        for op, found in sorted(operators.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    ]
    columns = ("operator", ">nodes", *(f">{phase}" for phase in phases))
    heads.append(_fold(counted(len(operators), "operator"), _table(columns, rows[:_ROWS], len(rows)), opened=True))
    groups: dict[tuple, list[str]] = {}
    for name in graph.sources:
        value = graph.values[name]
        groups.setdefault((template_of(name)[0], value.type, value.kind), []).append(name)
    sources = [
        (_code(", ".join(grouped_names(names))), _code(str(kind_type)), escape(kind), str(len(names)))
        + (bytes_text(kind_type.bytes * len(names)),)
        for (_, kind_type, kind), names in groups.items()
    ]
    columns = ("name", "type", "kind", ">count", ">bytes")
    heads.append(_fold(counted(len(graph.sources), "source"), _table(columns, sources[:_ROWS], len(sources))))
    outputs = ", ".join(_code(str(graph.values[name])) for name in graph.outputs)
    heads.append(f"outputs: {outputs}; {counted(len(graph.updates), 'state value')} updated")
    return _page(heads)


def _page(parts: Iterable[str]) -> str:
    inner = "".join(f"<div>{part}</div>" for part in parts)
    return f'{_STYLE}<div class="sbp-report">{inner}</div>'


def _code(name: str) -> str:
    return f"<code>{escape(name)}</code>"


def _fold(title: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], whole: int | None = None) -> str:
    """Cells are HTML; columns that start with `>` hold numbers."""
    marks = [' class="n"' if name.startswith(">") else "" for name in columns]
    head = "".join(f"<th{mark}>{escape(name.lstrip('>'))}</th>" for name, mark in zip(columns, marks))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{cell}</td>" for cell, mark in zip(row, marks)) + "</tr>" for row in rows
    )
    left_out = "" if whole is None or whole <= len(rows) else f"<em>and {counted(whole - len(rows), 'row')} more</em>"
    return f"<table><tr>{head}</tr>{body}</table>{left_out}"


def _bar(title: str, pieces: Sequence[tuple[str, float, str, str]], whole: float, after: str) -> str:
    """A stacked bar: pieces are (name, size, size as text, colour); `whole` is the full width."""
    shown = [piece for piece in pieces if piece[1] > 0]
    strips = "".join(
        f'<span title="{escape(name)}: {escape(label)}" style="display:inline-block;height:14px;'
        f'width:{100 * size / whole:.3f}%;background:{colour}"></span>'
        for name, size, label, colour in shown
    )
    legend = " ".join(
        f'<span style="white-space:nowrap;margin-right:10px"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{colour}"></span> {escape(name)} {escape(label)}</span>'
        for name, size, label, colour in shown
    )
    return (
        f'{escape(title)}<div style="font-size:0;white-space:nowrap;overflow:hidden;background:rgba(128,128,128,.25);'
        f'max-width:900px">{strips}</div><div style="font-size:90%">{legend}{escape(after)}</div>'
    )


def _step_bar(summary: Summary) -> str:
    step = summary.step_seconds
    pieces = [
        (f"{row.name} compute" if row.kind == "compute" else f"local {row.name}", row.seconds, row.kind, row.name)
        for row in summary.time
        if row.kind != "collective"
    ]
    bars = [
        (name, seconds, f"{seconds_text(seconds)} ({share_text(seconds, step)})", PHASES.get(phase, PHASES["local"]))
        for name, seconds, _, phase in pieces
    ]
    exposed = summary.exposed_seconds
    bars.append(
        (
            "exposed collectives",
            exposed,
            f"{seconds_text(exposed)} ({share_text(exposed, step)})",
            COLLECTIVES["all_reduce"],
        )
    )
    along = ", ".join(f"{axis} {seconds_text(seconds)}" for axis, seconds in summary.boxing_seconds.items())
    after = f"all collectives, overlapped or not: {along}; FLOP utilisation {summary.utilisation:.1%}"
    return _bar(f"Step {seconds_text(step)}", bars, max(step, sum(bar[1] for bar in bars)) or 1.0, after)


def _memory_bar(summary: Summary) -> str:
    memory = summary.memory_bytes
    pieces = [
        (kind, float(size), bytes_text(size), KINDS[kind]) for kind, size in memory.items() if kind in KINDS and size
    ]
    peak, limit = memory["peak"] or 0, memory["limit"]
    title = f"Memory per device {bytes_text(peak)}" + (f" of {bytes_text(limit)}" if limit else "")
    return _bar(title, pieces, float(max(limit or 0, peak) or 1), f"the peak is at {summary.peak_operation}")


def _chips(layouts: Sequence[str], stored: str = "") -> str:
    return " ".join("=" if layout == stored else layout_html(Layout.parse(layout)) for layout in layouts)


def _layout_rows(summary: Summary) -> str:
    rows = [
        (_code(row.names), _code(row.type), _chips([row.stored]), _chips(row.forward, row.stored))
        + (_chips(row.backward, row.stored), _chips(row.optimizer, row.stored), bytes_text(row.bytes))
        for row in summary.layouts[:_ROWS]
    ]
    columns = ("name", "type", "stored", "used forward", "used backward", "optimizer state", ">per device")
    return _table(columns, rows, len(summary.layouts))


def _operator_rows(summary: Summary) -> str:
    rows = [
        (_code(item.module or "-"), escape(item.op), item.phase, str(item.count), seconds_text(item.seconds))
        + (share_text(item.seconds, summary.step_seconds),)
        for item in summary.operators[:_ROWS]
    ]
    columns = ("module", "operator", "phase", ">count", ">time", ">of the step")
    return _table(columns, rows, len(summary.operators))


def _boxing_rows(summary: Summary) -> str:
    rows = [
        (_code(f"{item.value}: {item.type}"), escape(item.kind), escape(item.axis))
        + (f"{_chips([item.before])} → {_chips([item.after])}", item.phase, str(item.count), bytes_text(item.bytes))
        + (seconds_text(item.seconds), share_text(item.seconds, summary.step_seconds))
        for item in summary.boxing[:_ROWS]
    ]
    columns = ("value", "what", "axis", "change", "phase", ">count", ">bytes", ">time", ">of the step")
    return _table(columns, rows, len(summary.boxing))
