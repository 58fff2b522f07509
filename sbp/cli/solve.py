"""`sbp solve` and `sbp evaluate`: layout problems in the contest's JSON."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import click

from sbp.cli import options
from sbp.cli.output import print_json, tables

END_SECONDS = 0.3
"""For what comes after the search: its processes end, the choice is evaluated and written."""
EXIT_BY_STATUS = {"infeasible": 3, "time limit": 4}


@click.command("solve")
@click.argument("problem", type=click.Path(), metavar="PROBLEM")
@click.option(
    "--time-limit",
    type=options.Seconds(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds for everything, starting and reading included.",
)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Processes and threads.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="What random choices derive from.")
@click.option("--solver", default="sbp", show_default=True, help="sbp, highs, cp-sat, scip or toulbar2.")
@click.option("--without", default="", metavar="STAGES", help="Stages to leave out, such as reduce,probe.")
@click.option("--out", type=click.Path(), metavar="FILE", help="Write the strategy indices to a JSON file.")
@click.option("--contest", is_flag=True, help="The contest's output: the last line is the list of indices, [] if none.")
@options.json_option
@options.quiet_option
def solve(
    problem: str,
    time_limit: float,
    threads: int,
    seed: int,
    solver: str,
    without: str,
    out: str | None,
    contest: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Solve the layout problem in PROBLEM (.json or .json.gz): one strategy per node, least cost, within the memory.

    The limit and Ctrl-C both end the search with the best choice so far and its proven bound.

    \b
    sbp solve problem.json.gz --time-limit 60 --out solution.json
    """
    from dataclasses import replace

    from sbp.errors import ProblemError
    from sbp.planner.iopddl import read_problem, write_solution
    from sbp.planner.solver import Limits
    from sbp.planner.solver import solve as solve_problem
    from sbp.planner.solver.plain import solvers
    from sbp.planner.solver.result import Clock

    # The limit is on the whole process: what its start took is gone, what its end takes must be left.
    clock = Clock(time_limit - min(time.process_time() + END_SECONDS, 0.05 * time_limit))
    known = solvers()
    if solver not in known:
        raise click.BadParameter(f"{solver!r} is not one of {', '.join(known)}", param_hint="--solver")
    left_out = _stages(without)
    loaded = read_problem(problem)
    if max(clock.left, 0.0) == 0.0:
        raise ProblemError(f"{problem}: reading took the {time_limit} s of the limit; give more time.")
    reading = clock.elapsed
    limits = replace(Limits(), time_limit=clock.left, threads=threads, seed=seed)
    if solver == "sbp":
        line = _ProgressLine(clock, quiet)
        result = solve_problem(loaded, limits, without=left_out, progress=line)
        line.end()
    else:
        result = known[solver].solve(loaded, limits)
    choice = None if result.choice is None else result.choice.tolist()
    if out is not None and choice is not None:
        write_solution(choice, out)
    data = {
        "status": result.status.value,
        "objective": _finite(result.objective),
        "lower_bound": _finite(result.lower_bound),
        "gap": _finite(result.gap),
        "reason": result.reason,
        "seconds": clock.elapsed,
        "seconds_by_stage": {"read": reading, **dict(result.statistics.get("stage_seconds", {}))},
        "incumbents": result.statistics.get("incumbents", []),
        "reproducible": result.statistics.get("reproducible"),
        "choice": choice,
    }
    if not quiet:
        _show(loaded, data, tables(as_json or contest))
    if as_json:
        print_json(data)
    elif contest:
        sys.stdout.write("[" + ", ".join(map(str, choice or [])) + "]\n")
    return EXIT_BY_STATUS.get(result.status.value, 0)


@click.command("evaluate")
@click.argument("problem", type=click.Path(), metavar="PROBLEM")
@click.argument("solution", type=click.Path(), metavar="SOLUTION")
@options.json_option
def evaluate(problem: str, solution: str, as_json: bool) -> int:
    """Recompute cost and peak memory of SOLUTION (a JSON list of strategy indices), independently of any solver.

    Exit code 3 when the solution uses a forbidden strategy or pair, or exceeds the memory limit.
    """
    from sbp.planner.iopddl import read_problem, read_solution
    from sbp.planner.problem import evaluate as evaluate_choice

    loaded = read_problem(problem)
    outcome = evaluate_choice(loaded, read_solution(solution, loaded))
    data = {
        "cost": _finite(outcome.cost),
        "peak_bytes": outcome.peak,
        "peak_time": outcome.peak_time,
        "limit_bytes": loaded.usage_limit,
        "feasible": outcome.feasible,
    }
    if as_json:
        print_json(data)
    else:
        limit = "no limit" if loaded.usage_limit is None else f"limit {loaded.usage_limit:,}"
        cost = f"{outcome.cost:,}" if outcome.feasible or outcome.cost != math.inf else "forbidden"
        verdict = "feasible" if outcome.feasible else "not feasible"
        click.echo(f"cost {cost}, peak {outcome.peak:,} bytes at time {outcome.peak_time} ({limit}): {verdict}")
    return 0 if outcome.feasible else 3


class _ProgressLine:
    """Incumbent, bound and gap on stderr: in place on a terminal, one line each elsewhere (rarely)."""

    def __init__(self, clock: Any, quiet: bool) -> None:
        self.clock, self.quiet = clock, quiet
        self.terminal = sys.stderr.isatty()
        self.shown = -1.0
        self.last = ""

    def __call__(self, incumbent: float, bound: float, stage: str) -> None:
        if self.quiet:
            return
        gap = (incumbent - bound) / abs(incumbent) if math.isfinite(incumbent) and incumbent else math.inf
        shown = "none" if math.isinf(incumbent) else _number(incumbent)
        self.last = f"{self.clock.elapsed:7.1f} s  best {shown}  bound {_number(bound)}  gap {gap:.4%}  {stage}"
        if self.clock.elapsed - self.shown >= (0.1 if self.terminal else 2.0):
            self._write()

    def _write(self) -> None:
        self.shown = self.clock.elapsed
        sys.stderr.write(f"\r\033[K{self.last}" if self.terminal else f"{self.last}\n")
        sys.stderr.flush()
        self.last = ""

    def end(self) -> None:
        if self.last:
            self._write()
        if self.terminal and not self.quiet:
            sys.stderr.write("\n")


def _stages(text: str) -> tuple[str, ...]:
    from sbp.planner.solver import STAGES

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in STAGES:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(STAGES)}", param_hint="--without")
    return names


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.9g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _show(problem: Any, data: dict[str, Any], console: Any) -> None:
    from rich.table import Table

    console.print(repr(problem), soft_wrap=True)
    table = Table(show_header=False)
    for key in ("status", "objective", "lower_bound"):
        value = data[key]
        table.add_row(key.replace("_", " "), "-" if value is None else value if key == "status" else _number(value))
    table.add_row("gap", "-" if data["gap"] is None else f"{data['gap']:.4%}")
    table.add_row("reason", data["reason"])
    table.add_row("seconds", f"{data['seconds']:.2f}")
    for stage, seconds in data["seconds_by_stage"].items():
        table.add_row(f"  {stage}", f"{seconds:.2f}")
    console.print(table)
