"""A simulated step as tables and as data: where its time goes, stage by stage, and what decides its length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbp.planner.pipeline import COMPUTE, PHASES
from sbp.report.tables import table
from sbp.report.units import bytes_text, seconds_text, share_text
from sbp.wording import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from sbp.planner.simulator import SimulatedStep


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive events of the critical path in one segment on one stream of one stage."""

    stage: int
    stream: str
    phase: str
    chunk: int | None
    micro_batch: int | None
    start: float
    stop: float
    names: tuple[str, ...]


def critical_stretches(step: SimulatedStep) -> list[Stretch]:
    """The critical path, its consecutive events of one segment and stream taken together if there are many segments."""
    found: list[Stretch] = []
    before, joins = None, len(step.runs) > 1
    for event in step.critical_path.tolist():
        run, stream = int(step.events.run[event]), int(step.events.stream[event])
        stage, (phase, chunk, micro_batch) = step.runs[run]
        start, stop, name = float(step.events.start[event]), float(step.events.stop[event]), step.event_name(event)
        if joins and before == (run, stream):
            last = found.pop()
            start, names = last.start, (*last.names, name)
        else:
            names = (name,)
        often = phase in PHASES
        found.append(
            Stretch(
                stage,
                step.streams[stream],
                phase,
                chunk if often else None,
                micro_batch if often else None,
                start,
                stop,
                names,
            )
        )
        before = run, stream
    return found


def simulation_json(step: SimulatedStep) -> dict[str, Any]:
    """The step as plain data, in seconds and bytes."""
    links = step.streams[1:]
    return {
        "schedule": step.schedule.name,
        "stages": step.pipeline.stages,
        "chunks": step.pipeline.chunks,
        "micro_batches": step.pipeline.micro_batches,
        "step_seconds": step.step_seconds,
        "compute_only_seconds": step.compute_only_seconds,
        "exposed_communication_seconds": step.exposed_communication_seconds,
        "bubble_fraction": step.bubble_fraction,
        "breakdown_seconds": step.breakdown_seconds,
        "critical_path_seconds": step.path_seconds(),
        "peak_bytes": list(step.peak_bytes),
        "by_stage": [
            {
                "compute_seconds": float(step.busy_seconds[stage, 0]),
                "bubble_seconds": float(step.bubble_seconds[stage]),
                "busy_seconds": {name: float(step.busy_seconds[stage, at + 1]) for at, name in enumerate(links)},
                "exposed_seconds": {name: float(step.exposed_seconds[stage, at + 1]) for at, name in enumerate(links)},
                "peak_bytes": step.peak_bytes[stage],
            }
            for stage in range(step.pipeline.stages)
        ],
        "critical_path": [
            {
                "stage": item.stage,
                "stream": item.stream,
                "phase": item.phase,
                "chunk": item.chunk,
                "micro_batch": item.micro_batch,
                "start_seconds": item.start,
                "stop_seconds": item.stop,
                "tasks": len(item.names),
            }
            for item in critical_stretches(step)
        ],
    }


def simulation_parts(steps: Mapping[str, SimulatedStep], top: int) -> list[RenderableType]:
    """Tables: the schedules beside each other, then stages and critical path of the shortest step."""
    best = min(steps, key=lambda name: steps[name].step_seconds)
    parts = [_schedules(steps)]
    if steps[best].pipeline.stages > 1:
        parts.append(_stages(best, steps[best], top))
    parts.append(_path(best, steps[best], top))
    return parts


def _schedules(steps: Mapping[str, SimulatedStep]) -> RenderableType:
    one = next(iter(steps.values()))
    links = one.streams[1:]
    stages, micro_batches = one.pipeline.stages, one.pipeline.micro_batches
    return table(
        f"Simulated step: {counted(stages, 'stage')}, {counted(micro_batches, 'micro-batch', 'micro-batches')}",
        ("!schedule", ">step", ">compute", *(f">{name} exposed" for name in links), ">bubble", ">of compute", ">peak"),
        [
            (
                name,
                seconds_text(step.step_seconds),
                *(seconds_text(step.breakdown_seconds[key]) for key in (COMPUTE, *links, "bubble")),
                f"{step.bubble_fraction:.1%}",
                bytes_text(max(step.peak_bytes)),
            )
            for name, step in steps.items()
        ],
        "means over stages, which add up to the step; a stream is exposed where compute waits while it works",
    )


def _stages(name: str, step: SimulatedStep, top: int) -> RenderableType:
    links = step.streams[1:]
    shown = range(min(step.pipeline.stages, top))
    return table(
        f"Stages under {name} ({len(shown)} of {step.pipeline.stages})",
        (">stage", ">compute", *(f">{name} exposed" for name in links), ">bubble", ">in flight", ">peak"),
        [
            (
                str(stage),
                seconds_text(step.busy_seconds[stage, 0]),
                *(seconds_text(step.exposed_seconds[stage, at + 1]) for at in range(len(links))),
                seconds_text(step.bubble_seconds[stage]),
                str(step.schedule.in_flight(step.pipeline.phases[-1])[stage]),
                bytes_text(step.peak_bytes[stage]),
            )
            for stage in shown
        ],
        "in flight: forward segments whose activations are held at once",
    )


def _path(name: str, step: SimulatedStep, top: int) -> RenderableType:
    stretches = critical_stretches(step)
    shown = sorted(stretches, key=lambda item: (item.start - item.stop, item.start))[:top]
    whole = ", ".join(f"{stream} {seconds_text(spent)}" for stream, spent in step.path_seconds().items() if spent)
    return table(
        f"Longest parts of the critical path under {name} ({len(shown)} of {len(stretches)})",
        ("task", ">stage", "!stream", "!phase", "?>chunk", "?>micro-batch", ">time", ">of the step", "?>start"),
        [
            (
                item.names[0] if len(item.names) == 1 else f"{item.names[0]} ... {item.names[-1]}",
                str(item.stage),
                item.stream,
                item.phase,
                "" if item.chunk is None else str(item.chunk),
                "" if item.micro_batch is None else str(item.micro_batch),
                seconds_text(item.stop - item.start),
                share_text(item.stop - item.start, step.step_seconds),
                seconds_text(item.start),
            )
            for item in shown
        ],
        f"the whole path: {whole or 'nothing takes time'}",
    )
