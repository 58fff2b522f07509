"""A simulated step as a trace that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show.

The format is the JSON of "Trace Event Format" (Google, 2016): a process per stage, a thread per stream, an arrow from
every transfer to the segment that it lets begin, and a counter of the bytes that the stage's ranks hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sbp.errors import PipelineError
from sbp.planner.pipeline import PHASES
from sbp.planner.simulator import SimulatedStep

NANOSECONDS = 1e9
"""Viewers keep whole nanoseconds, so times are rounded to these; the format itself counts in microseconds."""


def trace_events(step: SimulatedStep) -> list[dict[str, Any]]:
    """The events of the trace, as plain data: names of processes and threads, then everything by time.

    Tasks of less than half a nanosecond are left out, as nothing of them could be seen.
    """
    names = _names(step)
    found = _tasks(step)
    found += _arrows(step)
    found += _memory(step)
    found.sort(key=lambda event: (event["ts"], event["pid"], _ORDER[event["ph"]], event.get("tid", 0)))
    return names + found


def save_trace(step: SimulatedStep, path: str | Path) -> None:
    """Write the trace's file; the same step gives the same bytes.

    Raises
    ------
    PipelineError
        The file cannot be written.
    """
    import orjson

    if not isinstance(path, (str, Path)):
        raise PipelineError(f"the path of the trace file must be a text or a Path, got {path!r}.")
    if not str(path):
        raise PipelineError("the path of the trace file to write is empty; give it a name.")
    data = {"displayTimeUnit": "ms", "traceEvents": trace_events(step)}
    try:
        Path(path).write_bytes(orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE))
    except OSError as error:
        raise PipelineError(f"cannot write the trace file {path}: {error.strerror or error}.") from None


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


_ORDER = {"C": 0, "X": 1, "s": 2, "f": 3}
"""At one time an event stands before the arrow that starts or ends in it."""


def _names(step: SimulatedStep) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for stage in range(step.pipeline.stages):
        label = f"stage {stage}" if step.pipeline.stages > 1 else "every rank"
        found.append({"ph": "M", "name": "process_name", "pid": stage, "tid": 0, "args": {"name": label}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": stage, "tid": 0, "args": {"sort_index": stage}})
        for at, stream in enumerate(step.streams):
            found.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": at, "args": {"name": stream}})
    return found


def _tasks(step: SimulatedStep) -> list[dict[str, Any]]:
    events = step.events
    critical = set(step.critical_path.tolist())
    found = []
    for at, (start, stop, stage, stream, run, slack) in enumerate(
        zip(
            events.start.tolist(),
            events.stop.tolist(),
            events.stage.tolist(),
            events.stream.tolist(),
            events.run.tolist(),
            events.slack.tolist(),
        )
    ):
        begin, end = _nanoseconds(start), _nanoseconds(stop)
        if begin == end:
            continue
        phase, chunk, micro_batch = step.runs[run][1]
        args: dict[str, Any] = {"slack_us": _nanoseconds(slack) / 1e3, "critical": at in critical}
        if phase in PHASES:
            args |= {"phase": phase, "chunk": chunk, "micro_batch": micro_batch}
        found.append(
            {
                "ph": "X",
                "name": step.event_name(at),
                "cat": phase,
                "pid": stage,
                "tid": stream,
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
                "args": args,
            }
        )
    return found


def _arrows(step: SimulatedStep) -> list[dict[str, Any]]:
    """From the end of every transfer to the first task of the segment that receives it."""
    events = step.events
    seen = np.rint(events.start * NANOSECONDS) < np.rint(events.stop * NANOSECONDS)
    number = {action: run for run, (_, action) in enumerate(step.runs)}
    first: dict[int, int] = {}
    for at, (run, task) in enumerate(zip(events.run.tolist(), events.task.tolist())):
        if task >= 0 and seen[at] and not step.segment(run).tasks[task].early:
            best = first.get(run)
            if best is None or events.start[at] < events.start[best]:
                first[run] = at
    found = []
    for at in range(len(events)):
        if events.task[at] >= 0 or not seen[at]:
            continue
        phase, chunk, micro_batch = step.runs[int(events.run[at])][1]
        receiver = first.get(number[phase, chunk + (1 if phase == "forward" else -1), micro_batch])
        if receiver is None:
            continue
        common = {"name": phase, "cat": "transfer", "id": at}
        source = {"pid": int(events.stage[at]), "tid": int(events.stream[at])}
        target = {"pid": int(events.stage[receiver]), "tid": int(events.stream[receiver])}
        found.append({"ph": "s", **common, **source, "ts": _nanoseconds(events.start[at]) / 1e3})
        found.append({"ph": "f", "bp": "e", **common, **target, "ts": _nanoseconds(events.start[receiver]) / 1e3})
    return found


def _memory(step: SimulatedStep) -> list[dict[str, Any]]:
    """One counter per stage; of several values at one time the last."""
    found = []
    for stage, (times, held) in enumerate(step.memory):
        by_time = dict(zip(map(_nanoseconds, times.tolist()), held.tolist()))
        for time, size in by_time.items():
            found.append(
                {
                    "ph": "C",
                    "name": "memory",
                    "pid": stage,
                    "tid": 0,
                    "ts": time / 1e3,
                    "args": {"bytes": size},
                }
            )
    return found
