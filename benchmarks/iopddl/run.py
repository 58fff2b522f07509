"""Solve the contest's instances from scratch, as a user would, and print what was reached.

    python benchmarks/iopddl/run.py [--instances AGMS] [--seeds 0,1,2] [--solvers sbp] [--share 1.0] [--out
    results.json]

Every run is a process of its own (`sbp solve --json`), its limit is the contest's for the instance (times --share),
reading
included; objective and peak are recomputed by `sbp evaluate`. The instances are looked for in ../shared/iopddl.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTANCES = ROOT.parent / "shared" / "iopddl"
CONTEST_SECONDS = {"A": 60.0, "G": 120.0, "M": 180.0, "S": 240.0}
BEST_IN_CONTEST = {"A": 6_548_641_531, "G": 217_039, "M": 49_928_460_991, "S": 1_534_613_444}
BEST_PUBLISHED = {"A": 6_550_261_230, "G": 217_039, "M": 49_928_157_500, "S": 1_511_378_000}


@dataclass(frozen=True)
class Run:
    """One solve. `half_objective` is the incumbent at half of the limit, `peak_mib` the largest resident memory so
    far."""

    instance: str
    solver: str
    seed: int
    limit_seconds: float
    wall_seconds: float
    status: str
    objective: int | None
    lower_bound: int | None
    half_objective: int | None
    peak_mib: int


def solve(instance: str, solver: str, seed: int, limit: float) -> Run:
    problem = INSTANCES / f"{instance}.json.gz"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "solution.json"
        command = [sys.executable, "-m", "sbp.cli", "solve", str(problem), "--json", "--quiet", "--out", str(out)]
        command += ["--time-limit", str(limit), "--seed", str(seed), "--solver", solver]
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        wall = time.monotonic() - start
        if not done.stdout:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        data = json.loads(done.stdout)
        if data["choice"] is not None:
            checked = subprocess.run(
                [sys.executable, "-m", "sbp.cli", "evaluate", str(problem), str(out), "--json"],
                capture_output=True, text=True, cwd=ROOT, check=True,
            )  # fmt: skip
            outcome = json.loads(checked.stdout)
            assert outcome["feasible"] and outcome["cost"] == data["objective"], (instance, outcome, data["objective"])
    half = [
        value for seconds, value, _ in data["incumbents"] if seconds + data["seconds_by_stage"]["read"] <= limit / 2
    ]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    return Run(
        instance, solver, seed, limit, wall, data["status"], data["objective"], data["lower_bound"],
        half[-1] if half else None, peak,
    )  # fmt: skip


def shown(run: Run) -> str:
    if run.objective is None:
        return f"{run.instance} {run.solver:8} seed {run.seed}: {run.status} after {run.wall_seconds:.1f} s"
    bound = run.lower_bound or 0
    against = 100.0 * (run.objective / BEST_IN_CONTEST[run.instance] - 1.0)
    half = "-" if run.half_objective is None else f"{run.half_objective:,}"
    return (
        f"{run.instance} {run.solver:8} seed {run.seed}: {run.status:8} {run.objective:>15,}  bound {bound:>15,}  "
        f"gap {100.0 * (run.objective - bound) / run.objective:.4f} %  {against:+.4f} % to the contest's best  "
        f"half time {half}  {run.wall_seconds:.1f} s  {run.peak_mib} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", default="AGMS")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--solvers", default="sbp", help="comma-separated: sbp, highs, cp-sat, scip, toulbar2")
    parser.add_argument("--share", type=float, default=1.0, help="of the contest's time limits")
    parser.add_argument("--out", type=Path, help="write the runs as JSON")
    arguments = parser.parse_args()
    if not INSTANCES.is_dir():
        raise SystemExit(f"no instances: {INSTANCES} does not exist")
    runs = []
    for instance in arguments.instances:
        for solver in arguments.solvers.split(","):
            for seed in (int(text) for text in arguments.seeds.split(",")):
                runs.append(solve(instance, solver, seed, CONTEST_SECONDS[instance] * arguments.share))
                print(shown(runs[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(run) for run in runs], indent=1))


if __name__ == "__main__":
    main()
