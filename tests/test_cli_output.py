"""Where stdout or stderr is closed, full, or left by its reader: a paragraph and a documented exit code, never 70."""

import subprocess
import sys

import pytest

from sbp.cli.main import READER_GONE, run


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    wanted = ["plan", "tiny-mlp", "--cluster", "cpu", "--mesh", "2,2", "--batch", "16", "--quiet", "--out", str(path)]
    assert run(wanted) == 0
    return str(path)


def shell(script, *arguments):
    """A bash script in which `sbp` is the command."""
    define = f'sbp() {{ "{sys.executable}" -m sbp.cli "$@"; }}\n'
    command = ["bash", "-c", define + script, "bash", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


COMMANDS = ("report", "models", "help")


def spelled(name):
    return {"report": 'report "$1"', "models": "models", "help": "--help"}[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_leaves_gives_141(name, plan_file):
    done = shell(f"sbp {spelled(name)} | true; echo ${{PIPESTATUS[0]}}", plan_file)
    assert done.stdout.split() == [str(READER_GONE)] and done.stderr == ""


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("where", "says"),
    [(">&-", "stdout is closed."), (">/dev/full", "the output cannot be written: No space left on device.")],
)
def test_stdout_that_takes_nothing(name, where, says, plan_file):
    done = shell(f"sbp {spelled(name)} {where}", plan_file)
    assert done.returncode == 2
    assert done.stderr.strip().endswith(says) and "\n" not in done.stderr.strip()


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_stderr_that_takes_nothing_stops_no_command(where, plan_file):
    done = shell(f'sbp verify "$1" {where}', plan_file)
    assert done.returncode == 0 and "values equal the unsharded run" in done.stdout.lower()
    assert shell(f"sbp report missing.json {where}").returncode == 2


def test_no_stream_at_all(plan_file):
    assert shell('sbp report "$1" <&- >&- 2>&-', plan_file).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "plan.json", "--seed", "-1"],
        ["plan", "tiny-mlp", "--cluster", "cpu", "--seed", "-1"],
        ["verify", "tiny-mlp", "--cluster", "cpu", "--mesh", "2", "--seed", "-1"],
        ["solve", "problem.json", "--seed", "-1"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_negative_seeds_are_refused(arguments, capsys):
    assert run(arguments) == 2
    assert "--seed" in capsys.readouterr().err
