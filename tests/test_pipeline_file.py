"""Pipelines in files, `sbp simulate`, and what is wrong with pipelines."""

import copy
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_pipelines import name_for, pipelines

from sbp.cli.main import run
from sbp.errors import PipelineError
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.pipeline import COMPUTE, Pipeline, Segment, Task, uniform_pipeline
from sbp.planner.pipeline_file import load_pipeline, pipeline_from_json, pipeline_to_json, save_pipeline
from sbp.planner.simulator import simulate
from sbp.report.simulation import critical_stretches


@given(pipelines())
def test_what_is_written_is_read_again(pipeline):
    data = json.loads(json.dumps(pipeline_to_json(pipeline)))
    again = pipeline_from_json(data)
    assert again == pipeline
    assert pipeline_to_json(again) == data


def test_files(tmp_path):
    pipeline = uniform_pipeline(3, 4, 1.0, 2.0, sends_seconds=0.5)
    save_pipeline(pipeline, tmp_path / "pipeline.json")
    assert load_pipeline(tmp_path / "pipeline.json") == pipeline
    with pytest.raises(PipelineError, match="cannot write the pipeline file"):
        save_pipeline(pipeline, tmp_path / "no" / "pipeline.json")
    with pytest.raises(PipelineError, match="path of the pipeline file to write is empty"):
        save_pipeline(pipeline, "")
    with pytest.raises(PipelineError, match="cannot read the pipeline file"):
        load_pipeline(tmp_path / "none.json")


GOOD = pipeline_to_json(uniform_pipeline(2, 2, 1.0, 2.0))


def changed(*path, to):
    """The good file with one field changed, or taken away if `to` is None."""
    data = copy.deepcopy(GOOD)
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    if to is None:
        del inside[path[-1]]
    else:
        inside[path[-1]] = to
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": "sbp-plan"}, "this is not a pipeline"),
        ([], "this is not a pipeline"),
        (changed("schema", to=2), "pipeline of schema 2, this version reads schema 1"),
        (changed("stages", to=None), "'stages' is missing"),
        (changed("stages", to="two"), "stages must be a whole number of at least 1"),
        (changed("segments", 0, "kind", to=9), r"segments\[0\].kind must be the number of one of 2 kinds, got 9"),
        (changed("segments", 1, "phase", to="backward"), r"only one for chunk 0 and phase backward"),
        (changed("segments", 0, to=None), r"no segment is given for \(0, 'backward'\)"),
        (changed("kinds", 0, "tasks", 0, "seconds", to=-1.0), r"kind 0: .*tasks\[0\].seconds must be a number of at"),
        (changed("kinds", 0, "tasks", 0, "second", to=1.0), r"tasks\[0\].second must be absent: a task has name, "),
        (changed("kinds", 0, "tasks", 0, "inputs", to=[0]), "reads 0, which is no earlier task"),
        (changed("kinds", 0, "phase", to="sideways"), "no phase is called 'sideways'"),
        (changed("links", to={"tp": 3}), "links.tp must be a text"),
    ],
)
def test_damaged_files(data, message, tmp_path):
    with pytest.raises(PipelineError, match=message):
        pipeline_from_json(data)
    (tmp_path / "file.json").write_text(json.dumps(data))
    with pytest.raises(PipelineError, match="file.json: "):
        load_pipeline(tmp_path / "file.json")


# -- pipelines that contradict themselves ------------------------------------------------------------------------------

ONE = Segment("forward", (Task("a", COMPUTE, 1.0),))
TIED = Segment("after", (Task("a", "dp", 1.0, meets="x"), Task("b", "dp", 1.0, meets="x")))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task("a", COMPUTE, float("nan")), "seconds must be a finite number of at least 0, got nan"),
        (lambda: Task("a", "", 1.0), "stream must be a text that is not empty"),
        (lambda: Task("a", COMPUTE, 1.0, allocates=-1), "allocates must be a whole number of at least 0"),
        (lambda: Task("a", COMPUTE, 1.0, (0,), early=True), "only a task that reads nothing can start early"),
        (lambda: Segment("forward", (Task("a", COMPUTE, 1.0, (0,)),)), "task 0 \\('a'\\) reads 0"),
        (lambda: Segment("forward", (), sends_after=0), "sends_after is 0"),
        (lambda: Pipeline(0, 1, 1, {}), "stages must be a whole number of at least 1"),
        (lambda: Pipeline(1, 1, 1, {}), "have the phases none; expected forward"),
        (lambda: Pipeline(2, 1, 1, {(0, "forward"): ONE}), r"no segment is given for \(1, 'forward'\) \(1 missing\)"),
        (lambda: Pipeline(1, 1, 1, {(0, "forward"): ONE, (1, "forward"): ONE}), r"chunks are 0 to 0"),
        (lambda: Pipeline(1, 1, 1, {(0, "forward"): replace(ONE, phase="weight")}), "holds a weight segment"),
        (lambda: Pipeline(1, 1, 1, {(0, "forward"): ONE}, (ONE,)), r"before\[0\] holds a forward segment"),
        (lambda: Pipeline(1, 1, 1, {(0, "forward"): ONE}, after=(TIED,)), "two tasks of stage 0 meet 'x'"),
        (
            lambda: Pipeline(2, 1, 1, {(0, "forward"): ONE, (1, "forward"): ONE}, after=(TIED,)),
            "1 entries for 2 stages",
        ),
        (lambda: Pipeline(1, 1, 1, {(0, "forward"): ONE}, resident_bytes=(-1,)), "resident_bytes of stage 0"),
        (lambda: Pipeline(1, 1, 1, {(0, "forward"): ONE}, compute_slowdown=-0.1), "compute_slowdown must be a finite"),
        (
            lambda: Pipeline(1, 1, 1, {(0, "forward"): ONE}, first={(0, "forward"): ONE}, last={(0, "forward"): ONE}),
            "first and last both replace",
        ),
        (
            lambda: Pipeline(1, 1, 1, {(0, "forward"): Segment("forward", (Task("a", "dp", 1.0, meets="x"),))}),
            "only tasks of before and after segments can meet",
        ),
    ],
)
def test_contradictions_are_refused(make, message):
    with pytest.raises(PipelineError, match=message):
        make()


# -- sbp simulate ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pipeline.json"
    save_pipeline(uniform_pipeline(4, 8, 1.0, 1.0, weight_seconds=1.0, activation_bytes=1 << 20), path)
    return str(path)


def test_simulate_prints_schedules_beside_each_other(file, capsys):
    assert run(["simulate", file, "--schedule", "1f1b", "--schedule", "zero-bubble"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for text in ("4 stages, 8 micro-batches", "zero-bubble", "27.0 s", "12.5%", "4.00 MiB", "Stages under zero-bubble"):
        assert text in printed.out


def test_simulate_gives_data(file, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    arguments = [
        "simulate",
        file,
        "--schedule",
        "zero-bubble",
        "--micro-batches",
        "16",
        "--json",
        "--trace",
        str(trace),
    ]
    assert run(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == 3 * 16 + 3 and found["micro_batches"] == 16
    assert found["bubble_fraction"] == 3 / 48
    assert found["peak_bytes"] == [4 << 20] * 4
    assert [item["compute_seconds"] for item in found["by_stage"]] == [48.0] * 4
    path = found["critical_path"]
    assert path[0]["start_seconds"] == 0.0 and path[-1]["stop_seconds"] == found["step_seconds"]
    assert json.loads(trace.read_bytes())["traceEvents"]


def test_simulate_slows_kernels_down(tmp_path, capsys):
    segment = Segment("forward", (Task("a", COMPUTE, 2.0), Task("b", "dp", 9.0)))
    save_pipeline(Pipeline(1, 1, 1, {(0, "forward"): segment}), tmp_path / "pipeline.json")
    assert run(["simulate", str(tmp_path / "pipeline.json"), "--slowdown", "0.5", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["by_stage"][0]["compute_seconds"] == 3.0


def test_simulate_takes_plans(tmp_path, capsys):
    plan = auto_parallel("mlp", "a100-80g", mesh=(2, 4), batch=256)
    plan.save(tmp_path / "plan.json")
    assert run(["simulate", str(tmp_path / "plan.json"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["step_seconds"] == plan.cost.step_seconds
    assert found["exposed_communication_seconds"] == plan.cost.exposed_seconds
    assert run(["simulate", str(tmp_path / "plan.json"), "--top", "3"]) == 0
    assert "1 stage, 1 micro-batch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "1f1bb"], "did you mean 1f1b"),
        (["--schedule", "interleaved:2"], "for 2 chunks per stage, but there are 1"),
        (["--micro-batches", "0"], "--micro-batches"),
        (["--slowdown", "nan"], "compute_slowdown must be a finite number"),
        (["--trace", "/no/such/folder/trace.json"], "cannot write the trace file"),
    ],
)
def test_simulate_refuses(file, arguments, message, capsys):
    assert run(["simulate", file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_simulate_refuses_other_files(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"format": "something"}')
    assert run(["simulate", str(tmp_path / "other.json")]) == 2
    assert "other.json" in capsys.readouterr().err
    assert run(["simulate", str(tmp_path / "none.json")]) == 2
    assert "cannot read the plan or pipeline file" in capsys.readouterr().err


@given(pipelines(), st.sampled_from(["gpipe", "1f1b"]))
def test_stretches_are_the_critical_path(pipeline, name):
    step = simulate(pipeline, name_for(name, pipeline))
    stretches = critical_stretches(step)
    assert sum(len(item.names) for item in stretches) == len(step.critical_path)
    assert all(one.stop == two.start for one, two in zip(stretches, stretches[1:]))
    if stretches:
        assert stretches[0].start == 0.0 and stretches[-1].stop == step.step_seconds


def places(data, path=()):
    """The path of every value in nested lists and objects."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


THREE = pipeline_to_json(uniform_pipeline(2, 3, 1.0, 1.0, weight_seconds=1.0, sends_seconds=0.1, activation_bytes=5))
WRONG = (None, -1, 0, 1.5, "x", [], {}, True, 1e308, math.inf, math.nan, 10**30, 2**63, 2**40, [1], {"a": 1})


@pytest.mark.parametrize("path", [path for path in places(THREE) if "kinds" not in path or path[1:2] in ((), (0,))])
def test_any_damage_is_one_error_or_another_pipeline(path):
    """Each value replaced or taken away: never another exception, and no number makes it work forever."""
    for value in (*WRONG, None):
        data = copy.deepcopy(THREE)
        inside = data
        for key in path[:-1]:
            inside = inside[key]
        if value is None:
            del inside[path[-1]]
        else:
            inside[path[-1]] = value
        try:
            pipeline = pipeline_from_json(data)
            for name in ("1f1b", "zero-bubble"):
                simulate(pipeline, name)
        except PipelineError as error:
            assert str(error)


def test_steps_that_no_memory_holds_are_refused():
    task = Task("kernel", COMPUTE, 1.0)
    many = Segment("forward", (task,) * 1000)
    for pipeline, message in (
        (uniform_pipeline(2, 10**30, 1.0, 1.0), "more than 1,000,000; use fewer micro-batches"),
        (Pipeline(1, 1, 100_000, {(0, "forward"): many}), "100,000,000 tasks in 100,000 micro-batches"),
    ):
        with pytest.raises(PipelineError, match=message):
            simulate(pipeline, "gpipe")
    with pytest.raises(PipelineError, match="no segment is given"):
        Pipeline(2**62, 1, 1, {(0, "forward"): many})
