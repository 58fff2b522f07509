"""Many more of the random problems and mutated files than `make test` runs.

    python benchmarks/iopddl/correctness.py [--problems 3200] [--marginals 3200] [--files 10000]

Problems: status, objective and bound against enumeration, with all stages and with every subset of them left out in
turn. Min-marginals: each strategy forced, against enumeration. Files: each is read or refused with a `ProblemError`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[2] / "tests"
SWITCHED = ("reduce", "free", "dual", "anneal", "lns", "probe")


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, TESTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=3200)
    parser.add_argument("--marginals", type=int, default=3200)
    parser.add_argument("--files", type=int, default=10000)
    arguments = parser.parse_args()
    random_tests, fuzz = load("test_solver_random"), load("test_problem_fuzz")
    subsets = [subset for size in range(len(SWITCHED) + 1) for subset in itertools.combinations(SWITCHED, size)]
    start = time.monotonic()
    infeasible = 0
    for seed in range(arguments.problems):
        problem, optimum = random_tests.random_problem(1_000_000 + seed)
        infeasible += optimum is None
        random_tests.check(problem, optimum)
        random_tests.check(problem, optimum, without=subsets[seed % len(subsets)])
    print(
        f"{arguments.problems} problems ({infeasible} infeasible), each with all stages and with some left out: "
        f"equal to enumeration, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    start = time.monotonic()
    for seed in range(arguments.marginals):
        random_tests.check_min_marginals(random_tests.random_problem(1_000_000 + seed)[0])
    print(
        f"{arguments.marginals} problems: min-marginals equal to enumeration, {time.monotonic() - start:.0f} s",
        flush=True,
    )
    start = time.monotonic()
    random = np.random.default_rng(2)
    outcomes = [fuzz.outcome(fuzz.mutated(random)) for _ in range(arguments.files)]
    print(
        f"{arguments.files} mutated files: {outcomes.count('refused')} refused, {outcomes.count('read')} read, "
        f"nothing else, {time.monotonic() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
