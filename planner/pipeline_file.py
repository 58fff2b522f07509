"""Pipelines as JSON files: what somebody else's profiler or planner made can be simulated too.

A segment is written once, however many chunks run it; `segments`, `first` and `last` say by number which chunk runs
which. Fields of a task that have their default are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from sbp.errors import PipelineError, SbpError
from sbp.fields import Field
from sbp.json_file import read_json_file
from sbp.planner.pipeline import Key, Pipeline, Segment, Task

FORMAT, SCHEMA = "sbp-pipeline", 1


def pipeline_to_json(pipeline: Pipeline) -> dict[str, Any]:
    """Plain data; the same pipeline gives the same data."""
    kinds: dict[Segment, int] = {}
    for segment in pipeline.all_segments():
        kinds.setdefault(segment, len(kinds))

    def keyed(given: Mapping[Key, Segment]) -> list[dict[str, Any]]:
        return [{"chunk": key[0], "phase": key[1], "kind": kinds[given[key]]} for key in sorted(given)]

    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "stages": pipeline.stages,
        "chunks": pipeline.chunks,
        "micro_batches": pipeline.micro_batches,
        "kinds": [_segment_json(segment) for segment in kinds],
        "segments": keyed(pipeline.segments),
        "first": keyed(pipeline.first),
        "last": keyed(pipeline.last),
        "before": [kinds[segment] for segment in pipeline.before],
        "after": [kinds[segment] for segment in pipeline.after],
        "links": dict(sorted(pipeline.links.items())),
        "blocking_sends": pipeline.blocking_sends,
        "compute_slowdown": pipeline.compute_slowdown,
        "resident_bytes": list(pipeline.resident_bytes),
    }


def pipeline_from_json(data: Any) -> Pipeline:
    """Read what `pipeline_to_json` wrote; what stands for nothing (`first`, `before`, `links`, ...) may be absent.

    Raises
    ------
    PipelineError
        Another format, a field that is missing or of the wrong type, or a contradiction; the message names it.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise PipelineError(f'this is not a pipeline; its file has "format": "{FORMAT}".')
    if data.get("schema") != SCHEMA:
        raise PipelineError(f"pipeline of schema {data.get('schema')!r}, this version reads schema {SCHEMA}.")
    file = Field(data, "pipeline file", PipelineError)
    kinds = [_segment_from(item.at(f"pipeline file, kind {at}")) for at, item in enumerate(file["kinds"].list())]

    def kind(item: Field) -> Segment:
        number = item.whole(least=0)
        if number >= len(kinds):
            raise item.wrong(f"the number of one of {len(kinds)} kinds")
        return kinds[number]

    def keyed(items: Field) -> dict[Key, Segment]:
        found: dict[Key, Segment] = {}
        for item in items.list():
            key = item["chunk"].whole(least=0), item["phase"].text()
            if key in found:
                raise item.wrong(f"the only one for chunk {key[0]} and phase {key[1]}")
            found[key] = kind(item["kind"])
        return found

    return Pipeline(
        file["stages"].whole(least=1),
        file["chunks"].whole(least=1),
        file["micro_batches"].whole(least=1),
        keyed(file["segments"]),
        tuple(map(kind, file.get("before", []).list())),
        tuple(map(kind, file.get("after", []).list())),
        keyed(file.get("first", [])),
        keyed(file.get("last", [])),
        {stream: link.text() for stream, link in file.get("links", {}).mapping().items()},
        file.get("blocking_sends", False).truth(),
        file.get("compute_slowdown", 0.0).number(least=0.0),
        tuple(item.whole(least=0) for item in file.get("resident_bytes", []).list()),
    )


def save_pipeline(pipeline: Pipeline, path: str | Path) -> None:
    """Write a pipeline's file; the same pipeline gives the same bytes."""
    import orjson

    if not str(path):
        raise PipelineError("the path of the pipeline file to write is empty; give it a name.")
    data = orjson.dumps(pipeline_to_json(pipeline), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise PipelineError(f"cannot write the pipeline file {path}: {error.strerror or error}.") from None


def load_pipeline(path: str | Path) -> Pipeline:
    """Read a pipeline's file.

    Raises
    ------
    PipelineError
        Missing, cut off, or not what `save_pipeline` writes; the message names the file and the field.
    """
    data = read_json_file(path, "pipeline", "save_pipeline", PipelineError)
    try:
        return pipeline_from_json(data)
    except SbpError as error:
        raise PipelineError(f"{path}: {error}") from None


_DEFAULTS = {item.name: item.default for item in fields(Task)}


def _segment_json(segment: Segment) -> dict[str, Any]:
    tasks = []
    for task in segment.tasks:
        found = {name: getattr(task, name) for name, default in _DEFAULTS.items() if getattr(task, name) != default}
        tasks.append(found | ({"inputs": list(task.inputs)} if task.inputs else {}))
    return {
        "phase": segment.phase,
        "tasks": tasks,
        "sends_bytes": segment.sends_bytes,
        "sends_seconds": segment.sends_seconds,
        "sends_after": segment.sends_after,
    }


def _segment_from(item: Field) -> Segment:
    after = item.get("sends_after", None)
    return Segment(
        item["phase"].text(),
        tuple(map(_task_from, item["tasks"].list())),
        item.get("sends_bytes", 0).whole(least=0),
        item.get("sends_seconds", 0.0).number(least=0.0),
        None if after.value is None else after.whole(least=0),
    )


def _task_from(item: Field) -> Task:
    for key, value in item.mapping().items():
        if key not in _DEFAULTS:
            raise value.wrong(f"absent: a task has {', '.join(_DEFAULTS)}")
    return Task(
        item["name"].text(),
        item["stream"].text(),
        item["seconds"].number(least=0.0),
        tuple(number.whole(least=0) for number in item.get("inputs", []).list()),
        item.get("allocates", 0).whole(least=0),
        item.get("frees", 0).whole(least=0),
        item.get("early", False).truth(),
        item.get("late", False).truth(),
        item.get("meets", "").text(),
    )
