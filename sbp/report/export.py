"""How a module that was exported to PyTorch follows its plan, as text."""

from __future__ import annotations

from sbp.report.units import bytes_text, seconds_text
from sbp.runtime.torch_report import Difference, ExportReport


def export_text(report: ExportReport) -> str:
    """The collectives of a step, planned and called, and every difference once with how often it occurs."""
    lines = [f"{report.model} on {report.mesh} in PyTorch"]
    for kind, counts in report.counts().items():
        lines.append(
            f"  {kind}: {counts.planned} planned ({bytes_text(counts.planned_bytes)}), "
            f"{counts.called} called ({bytes_text(counts.called_bytes)})"
        )
    if not report.differences:
        lines.append("  everything is as planned")
    groups: dict[tuple[str, str, str], list[Difference]] = {}
    for difference in report.differences:
        groups.setdefault((difference.planned, difference.exported, difference.why), []).append(difference)
    for (planned, exported, why), same in groups.items():
        more = f" and {len(same) - 1:,} more" if len(same) > 1 else ""
        lines.append(f"  {same[0].place}{more}: planned {planned}, exported {exported}: {why} ({_costs(same)})")
    if report.on_host:
        lines.append(f"  on NumPy for lack of a kernel: {', '.join(report.on_host)}")
    return "\n".join(lines)


def _costs(same: list[Difference]) -> str:
    seconds, memory = sum(d.seconds for d in same), sum(d.memory_bytes for d in same)
    time = f"{seconds_text(abs(seconds))} {'more' if seconds > 0 else 'less'} a step" if seconds else "no time"
    space = f"{bytes_text(abs(memory))} {'more' if memory > 0 else 'less'} between steps" if memory else "no memory"
    return f"{time}, {space}"
