"""Traces: files that viewers can read, which show what the simulated step holds and nothing else."""

import json
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_pipelines import name_for, pipelines

from sbp.errors import PipelineError
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.pipeline import uniform_pipeline
from sbp.planner.simulator import simulate
from sbp.planner.trace import save_trace, trace_events


def nanoseconds(microseconds):
    """As viewers read a time; the files hold no finer ones."""
    assert microseconds * 1e3 == pytest.approx(round(microseconds * 1e3), abs=1e-3)
    return round(microseconds * 1e3)


def assert_readable(step, events):
    """What a viewer needs: named threads, times in order, one task at a time on a thread, arrows from task to task."""
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(threads) == [(p, t) for p in range(step.pipeline.stages) for t in range(len(step.streams))]
    assert set(threads.values()) == set(step.streams)
    rest = [event for event in events if event["ph"] != "M"]
    assert events[: len(events) - len(rest)] == [event for event in events if event["ph"] == "M"]
    times = [event["ts"] for event in rest]
    assert times == sorted(times) and min(times, default=0) >= 0
    tasks, arrows = defaultdict(list), defaultdict(dict)
    for event in rest:
        if event["ph"] == "X":
            start = nanoseconds(event["ts"])
            tasks[event["pid"], event["tid"]].append((start, start + nanoseconds(event["dur"])))
        elif event["ph"] in "sf":
            assert event["ph"] not in arrows[event["id"]]
            arrows[event["id"]][event["ph"]] = event
        else:
            assert event["ph"] == "C" and event["args"]["bytes"] in step.memory[event["pid"]][1]
    assert set(tasks) <= set(threads)
    for mine in tasks.values():
        assert all(start < stop for start, stop in mine)
        assert all(stop <= following for (_, stop), (following, _) in zip(mine, mine[1:]))
        assert mine[-1][1] <= round(step.step_seconds * 1e9)
    for ends in arrows.values():
        assert set(ends) == {"s", "f"} and ends["s"]["ts"] < ends["f"]["ts"] and ends["f"]["bp"] == "e"
        for event in ends.values():  # an arrow hangs on the task that runs where and when it starts or ends
            at = nanoseconds(event["ts"])
            assert any(start <= at < stop for start, stop in tasks[event["pid"], event["tid"]])
    return tasks, arrows


@settings(max_examples=60)
@given(pipelines(), st.sampled_from(["gpipe", "1f1b", "interleaved"]))
def test_traces_of_all_pipelines_are_readable(pipeline, name):
    step = simulate(pipeline, name_for(name, pipeline))
    tasks, _ = assert_readable(step, trace_events(step))
    lasting = (step.events.stop - step.events.start) >= 1e-9
    assert sum(map(len, tasks.values())) == lasting.sum()


def test_every_transfer_has_an_arrow_to_what_it_lets_begin(tmp_path):
    step = simulate(uniform_pipeline(4, 8, 1e-3, 2e-3, sends_seconds=1e-4, activation_bytes=7), "1f1b")
    save_trace(step, tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_bytes())
    tasks, arrows = assert_readable(step, data["traceEvents"])
    assert len(arrows) == 2 * 3 * 8
    for ends in arrows.values():
        down = 1 if ends["s"]["name"] == "forward" else -1
        assert ends["f"]["pid"] == ends["s"]["pid"] + down
    peaks = defaultdict(int)
    for event in data["traceEvents"]:
        if event["ph"] == "C":
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["bytes"])
    assert dict(peaks) == {0: 28, 1: 21, 2: 14, 3: 7}
    first = next(event for event in data["traceEvents"] if event["ph"] == "X")
    assert first["name"] == "forward" and first["args"]["critical"] and first["args"]["micro_batch"] == 0


def test_the_trace_of_a_plan(tmp_path):
    plan = auto_parallel("mlp", "a100-80g", mesh=(2, 4), batch=256)
    plan.trace(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_bytes())
    tasks, arrows = assert_readable(plan.timeline.step, data["traceEvents"])
    assert not arrows and sum(map(len, tasks.values())) == sum(o.seconds > 0 for o in plan.physical.operations)
    plan.trace(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_file_that_cannot_be_written(tmp_path):
    step = simulate(uniform_pipeline(1, 1, 1.0, 1.0), "gpipe")
    with pytest.raises(PipelineError, match="cannot write the trace file"):
        save_trace(step, tmp_path / "no" / "folder.json")
    with pytest.raises(PipelineError, match="path of the trace file to write is empty"):
        save_trace(step, "")
