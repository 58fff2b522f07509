"""`sbp solve` and `sbp evaluate`: outputs, exit codes, every user error as one paragraph."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from sbp.cli.solve import evaluate, solve
from sbp.errors import SbpError
from sbp.planner.iopddl import write_problem
from sbp.planner.problem import ProblemBuilder


def build(limit):
    builder = ProblemBuilder("cli")
    first, second = builder.add_node(np.array([0, 6])), builder.add_node(np.array([0, 1]))
    builder.add_usage(first, 0, 3, np.array([8, 1]))
    builder.add_usage(second, 1, 4, np.array([8, 2]))
    builder.add_edge(first, second, np.array([[0, 4], [0, 10**18]]))
    return builder.build(limit)


@pytest.fixture
def files(tmp_path):
    for name, limit in (("free", None), ("tight", 10), ("impossible", 2)):
        write_problem(build(limit), tmp_path / f"{name}.json.gz")
    return tmp_path


def call(command, *arguments):
    return CliRunner().invoke(command, [str(argument) for argument in arguments], standalone_mode=False)


def test_json(files):
    out = files / "solution.json"
    result = call(solve, files / "tight.json.gz", "--json", "--out", out, "--threads", 1)
    data = json.loads(result.stdout)
    assert result.return_value == 0 and data["status"] == "optimal"
    assert data["objective"] == data["lower_bound"] == 5 and data["gap"] == 0 and data["choice"] == [0, 1]
    assert json.loads(out.read_text()) == [0, 1]
    again = call(evaluate, files / "tight.json.gz", out, "--json")
    assert again.return_value == 0
    assert json.loads(again.stdout) == {
        "cost": 5, "peak_bytes": 10, "peak_time": 1, "limit_bytes": 10, "feasible": True,
    }  # fmt: skip


def test_contest_output(files):
    result = call(solve, files / "free.json.gz", "--contest")
    assert result.stdout.splitlines()[-1] == "[0, 0]"
    result = call(solve, files / "impossible.json.gz", "--contest")
    assert result.stdout.splitlines()[-1] == "[]" and result.return_value == 3


def test_infeasible_says_how_much_is_missing(files):
    result = call(solve, files / "impossible.json.gz", "--json", "--quiet")
    data = json.loads(result.stdout)
    assert result.return_value == 3 and data["status"] == "infeasible" and data["objective"] is None
    assert "smallest reachable peak is 9 bytes, 7 too many" in data["reason"]


def test_solutions_that_do_not_fit(files):
    (files / "s.json").write_text("[0, 0]")
    assert call(evaluate, files / "tight.json.gz", files / "s.json").return_value == 3
    (files / "s.json").write_text("[1, 1]")
    result = call(evaluate, files / "free.json.gz", files / "s.json")
    assert result.return_value == 3 and "forbidden" in result.stdout


@pytest.mark.parametrize("without", ["reduce", "dual,probe", "lns,anneal,free"])
def test_stages_can_be_left_out(files, without):
    result = call(solve, files / "tight.json.gz", "--json", "--without", without, "--threads", 1)
    assert json.loads(result.stdout)["objective"] == 5


@pytest.mark.parametrize("solver", ["highs", "scip", "cp-sat"])
def test_other_solvers(files, solver):
    result = call(solve, files / "tight.json.gz", "--json", "--solver", solver)
    assert json.loads(result.stdout)["objective"] == 5


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["absent.json"], "no such file"),
        (["free.json.gz", "--without", "magic"], "magic"),
        (["free.json.gz", "--solver", "magic"], "magic"),
        (["free.json.gz", "--time-limit", "nan"], "nan"),
    ],
)
def test_bad_input(files, arguments, words):
    result = call(solve, files / arguments[0], *arguments[1:])
    assert result.exception is not None and words in str(result.exception)
    assert isinstance(result.exception, SbpError) or type(result.exception).__module__.startswith("click")
