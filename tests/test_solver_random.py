"""The solver against enumeration on random small problems, with every stage and with each left out."""

import itertools

import numpy as np
import pytest

from sbp.planner.problem import FORBIDDEN_INTEGER, Problem, ProblemBuilder, evaluate
from sbp.planner.solver import Limits, Status, min_marginals, solve


def random_problem(seed: int) -> tuple[Problem, float | None]:
    """A small problem and its optimum by enumeration (None when infeasible).

    Parallel edges, empty intervals, forbidden pairs and strategies, no limit, loose, tight and impossible limits,
    zero and
    equal costs, single strategies, disconnected parts, several pieces per node, integers and floats all occur.
    """
    random = np.random.default_rng(seed)
    node_count = int(random.integers(1, 8))
    most = int(random.integers(1, 5))
    sizes = random.integers(1, most + 1, node_count)
    highest = int(random.choice([0, 1, 3, 10, 1000, 10**9]))
    forbidden_share = float(random.choice([0, 0.1, 0.4, 0.7]))
    floats = bool(random.random() < 0.3)

    def costs(shape, share):
        drawn = random.integers(0, highest + 1, shape)
        forbidden = random.random(shape) < share
        return np.where(forbidden, np.inf, drawn / 7.0) if floats else np.where(forbidden, FORBIDDEN_INTEGER, drawn)

    builder = ProblemBuilder(f"random {seed}")
    for size in sizes:
        node = builder.add_node(costs(size, forbidden_share if random.random() < 0.1 else 0.0))
        for _ in range(int(random.choice([0, 1, 1, 2, 3]))):
            start = int(random.integers(0, 8))
            builder.add_usage(node, start, start + int(random.integers(0, 6)), random.integers(0, 6, size))
    if node_count > 1:
        for _ in range(int(random.integers(0, 2 * node_count + 2))):
            first, second = (int(node) for node in random.choice(node_count, 2, replace=False))
            builder.add_edge(first, second, costs((sizes[first], sizes[second]), forbidden_share))
    problem = builder.build()
    outcomes = [evaluate(problem, choice) for choice in itertools.product(*map(range, sizes))]
    peaks = np.array([outcome.peak for outcome in outcomes])
    totals = np.array([outcome.cost for outcome in outcomes], dtype=float)
    if random.random() < 0.75:
        limit = int(random.integers(max(0, peaks.min() - 1), peaks.max() + 1))
        problem = problem.with_limit(limit)
        totals[peaks > limit] = np.inf
    return problem, (float(totals.min()) if np.isfinite(totals.min()) else None)


def check(problem: Problem, optimum: float | None, **options) -> None:
    """Status, objective and bound equal what enumeration says."""
    result = solve(problem, Limits(time_limit=60.0, threads=1), **options)
    if optimum is None:
        assert result.status is Status.INFEASIBLE and result.choice is None and result.reason
        return
    tolerance = 0 if problem.is_integer else 1e-9 * max(1.0, optimum)
    assert result.choice is not None, result
    outcome = evaluate(problem, result.choice)
    assert outcome.feasible and outcome.cost == result.objective
    assert result.lower_bound <= optimum + tolerance, (result.lower_bound, optimum)
    assert result.objective >= optimum - tolerance
    if result.status is Status.OPTIMAL:
        assert abs(result.objective - optimum) <= tolerance, (result.objective, optimum)
    else:
        assert options.get("without")
    if not options.get("without"):
        assert result.status is Status.OPTIMAL


@pytest.mark.parametrize("block", range(8))
def test_equals_enumeration(block):
    for seed in range(40 * block, 40 * block + 40):
        check(*random_problem(seed))


@pytest.mark.parametrize(
    "without",
    [
        ("reduce",),
        ("free",),
        ("dual",),
        ("probe",),
        ("reduce", "free"),
        ("reduce", "probe"),
        ("free", "dual"),
        ("reduce", "free", "dual", "probe"),
    ],
    ids="+".join,
)
def test_equals_enumeration_without(without):
    for seed in range(5000, 5030):
        check(*random_problem(seed), without=without)


def check_min_marginals(problem: Problem) -> None:
    """The best objective with each strategy forced equals what enumeration says."""
    sizes = np.diff(problem.node_offsets)
    best = np.full(problem.strategy_count, np.inf)
    for choice in itertools.product(*map(range, sizes)):
        outcome = evaluate(problem, choice)
        if outcome.feasible:
            chosen = problem.node_offsets[:-1] + np.array(choice)
            best[chosen] = np.minimum(best[chosen], outcome.cost)
    found = min_marginals(problem, Limits(time_limit=60.0, threads=1))
    assert found.exact.all()
    np.testing.assert_allclose(found.values, best, rtol=0 if problem.is_integer else 1e-9)


@pytest.mark.parametrize("block", range(4))
def test_min_marginals(block):
    for seed in range(block, 60, 4):
        check_min_marginals(random_problem(seed)[0])
