"""Each stage alone against enumeration: reductions, bounds, marginals, integer programs, what infeasible means."""

import itertools

import numpy as np
import pytest

from sbp.planner.problem import ProblemBuilder, evaluate
from sbp.planner.solver import Limits, Status, min_marginals, minimal_conflict, shortage, solve
from sbp.planner.solver.core import reduced
from sbp.planner.solver.dual import Dual
from sbp.planner.solver.fixing import reduced_costs
from sbp.planner.solver.ilp import FORMULATIONS, solve_ilp
from sbp.planner.solver.marginals import forest, forest_marginals
from sbp.planner.solver.plain import solvers, whole_core
from sbp.planner.solver.reducer import FORBIDDEN_COST, SWITCH_ALL
from sbp.planner.solver.scale import scaled
from sbp.planner.solver.worker import IlpProcess


def small_problem(seed, limited=True, forbidden=0.2, nodes=6, connected=False):
    """Integers, up to three strategies, edges at random; a limit that usually binds."""
    random = np.random.default_rng(seed)
    builder = ProblemBuilder()
    sizes = random.integers(1, 4, nodes)
    for size in sizes:
        node = builder.add_node(random.integers(0, 50, size))
        for _ in range(int(random.integers(0, 3))):
            start = int(random.integers(0, 6))
            builder.add_usage(node, start, start + int(random.integers(0, 5)), random.integers(0, 9, size))
    ends = [random.choice(nodes, 2, replace=False).tolist() for _ in range(int(random.integers(nodes - 1, 2 * nodes)))]
    if connected:
        ends += [[node, node + 1] for node in range(nodes - 1)]
    for first, second in ends:
        table = random.integers(0, 50, (sizes[first], sizes[second]))
        builder.add_edge(first, second, np.where(random.random(table.shape) < forbidden, 10**18, table))
    problem = builder.build()
    if limited:
        peaks = [evaluate(problem, choice).peak for choice in choices(problem)]
        problem = problem.with_limit(int(np.quantile(peaks, 0.3)))
    return problem


def choices(problem):
    return itertools.product(*(range(problem.strategies(node)) for node in range(problem.node_count)))


def core_choices(core):
    return (np.array(choice, np.int64) for choice in itertools.product(*map(range, core.sizes.tolist())))


def costs_of(core):
    """Cost of every feasible choice of a core."""
    return {
        tuple(choice.tolist()): core.cost(choice)
        for choice in core_choices(core)
        if core.cost(choice) < FORBIDDEN_COST and core.overflow(choice) == 0
    }


def optimum(problem):
    return min(
        (evaluate(problem, choice).cost for choice in choices(problem) if evaluate(problem, choice).feasible),
        default=None,
    )


@pytest.mark.parametrize("switches", [0, 1, 2, 4, 8, 3, 5, 10, 12, 7, 13, SWITCH_ALL])
def test_reductions_keep_an_optimum(switches):
    for seed in range(25):
        problem = small_problem(seed)
        best = optimum(problem)
        reduction = reduced(scaled(problem), switches)
        if not reduction.feasible:
            assert best is None
            continue
        found = costs_of(reduction.core)
        assert (min(found.values()) if found else None) == best
        for choice, cost in found.items():
            outcome = evaluate(problem, reduction.undo(np.array(choice, np.int64)))
            # what was eliminated is completed as well as possible, dominated strategies never come back
            assert outcome.feasible and outcome.cost == cost


def test_reductions_of_reductions():
    for seed in range(25):
        problem = small_problem(seed)
        outer = reduced(scaled(problem), 0)
        if not outer.feasible:
            continue
        inner = reduced(outer)
        best = optimum(problem)
        if not inner.feasible:
            assert best is None
            continue
        found = costs_of(inner.core)
        assert (min(found.values()) if found else None) == best
        for choice, cost in found.items():
            full = inner.undo(np.array(choice, np.int64))
            assert evaluate(problem, full).cost == cost
            assert inner.project(full) is None or outer.project(full) is not None


def test_trees_vanish_without_memory():
    random = np.random.default_rng(3)
    builder = ProblemBuilder()
    nodes = [builder.add_node(random.integers(0, 99, 4)) for _ in range(30)]
    for node in nodes[1:]:
        builder.add_edge(node, nodes[int(random.integers(node))], random.integers(0, 99, (4, 4)))
    problem = builder.build()
    assert reduced(scaled(problem)).core.node_count == 0


def test_functional_edges_merge_nodes():
    """A bijection and a many-to-one edge, with memory on both nodes: one node is left, with both usages."""
    builder = ProblemBuilder()
    first = builder.add_node(np.array([9, 0]))
    second = builder.add_node(np.array([0, 5, 3, 7]))
    builder.add_usage(first, 0, 4, np.array([0, 8]))
    builder.add_usage(second, 2, 6, np.array([4, 1, 2, 0]))
    only = np.full((2, 4), 10**18)
    only[0, :2] = only[1, 2:] = 0
    builder.add_edge(first, second, only)
    problem = builder.build(9)
    core = reduced(scaled(problem), 2).core
    assert core.node_count == 1 and core.sizes.tolist() == [4] and len(core.piece_nodes) == 2
    assert solve(problem).objective == optimum(problem) == 7


def priced_dual(core, seed, passes=3):
    random = np.random.default_rng(seed)
    dual = Dual(core, random.random(len(core.capacities)) * 5)
    dual.ascend(passes, np.inf, 0.0, 12)
    return dual


def test_bounds_and_marginals_never_exceed_the_optimum():
    for seed in range(40):
        problem = small_problem(seed)
        core = whole_core(scaled(problem))
        found = costs_of(core)
        if not found:
            continue
        dual = priced_dual(core, seed)
        costs = reduced_costs(core, dual, seed)
        best = min(found.values())
        assert costs.bound <= best and costs.bound == dual.exact_bound()
        assert costs.strategy.min() >= 0 and costs.entry.min() >= 0
        for choice, cost in found.items():
            chosen = core.node_offsets[:-1] + np.array(choice)
            assert (costs.bound + costs.strategy_marginal[chosen] <= cost).all()
            for edge, (first, second) in enumerate(core.edge_nodes.tolist()):
                entry = core.table_offsets[edge] + choice[first] * core.sizes[second] + choice[second]
                assert costs.bound + costs.entry_marginal[entry] <= cost


def test_bound_is_tight_on_trees():
    random = np.random.default_rng(5)
    for _ in range(10):
        builder = ProblemBuilder()
        nodes = [builder.add_node(random.integers(0, 99, 3)) for _ in range(7)]
        for node in nodes[1:]:
            builder.add_edge(nodes[int(random.integers(node))], node, random.integers(0, 99, (3, 3)))
        problem = builder.build()
        dual = Dual(whole_core(scaled(problem)))
        dual.ascend(50, np.inf)
        assert round(dual.best_bound) == optimum(problem)


def sweep_twin(core, priced, messages, forward):
    """One TRW-S pass in NumPy: the bound without constant; `messages[edge][side]` change in place."""
    total = 0.0
    order = range(core.node_count) if forward else range(core.node_count - 1, -1, -1)
    tables = [
        core.table_values[core.table_offsets[edge] : core.table_offsets[edge + 1]].reshape(
            core.sizes[first], core.sizes[second]
        )
        for edge, (first, second) in enumerate(core.edge_nodes.tolist())
    ]
    for node in order:
        theta = priced[core.node_offsets[node] : core.node_offsets[node + 1]].astype(float)
        ahead = []
        behind = 0
        for edge, ends in enumerate(core.edge_nodes.tolist()):
            if node not in ends:
                continue
            side = ends.index(node)
            other = ends[1 - side]
            if (other < node) == forward:
                behind += 1
                table = np.where(tables[edge] >= FORBIDDEN_COST, 1e28, tables[edge])
                table = table if side == 0 else table.T
                messages[edge][side] = (table - messages[edge][1 - side]).min(axis=1)
            else:
                ahead.append((edge, side))
            theta = theta + messages[edge][side]
        if not ahead:
            total += theta.min()
            continue
        share = 1.0 / max(len(ahead), behind)
        total += (1.0 - share * len(ahead)) * theta.min()
        for edge, side in ahead:
            messages[edge][side] = messages[edge][side] - share * theta
    return total


def test_sweeps_equal_numpy():
    for seed in range(15):
        core = reduced(scaled(small_problem(seed, limited=False, forbidden=0.1)), 0).core
        if core.node_count < 3:
            continue
        messages = [[np.zeros(core.sizes[end]) for end in ends] for ends in core.edge_nodes.tolist()]
        bounds = []
        for _ in range(3):
            sweep_twin(core, core.costs, messages, True)
            bounds.append(sweep_twin(core, core.costs, messages, False) + core.constant)
        dual = Dual(core)
        dual.ascend(3, np.inf)
        assert dual.best_bound == pytest.approx(max(bounds), rel=1e-12)


def test_forest_marginals_equal_enumeration_of_the_forest():
    random = np.random.default_rng(8)
    for seed in range(20):
        core = whole_core(scaled(small_problem(seed, limited=False, nodes=5, connected=True)))
        order, parent = forest(core.node_count, core.edge_nodes, random.permutation(len(core.edge_nodes)))
        inside = sorted(edge for edge in parent.tolist() if edge >= 0)
        assert len(set(inside)) == len(inside) <= core.node_count - 1
        strategies, entries = forest_marginals(core, core.costs, core.table_values, order, parent)
        best = np.full(len(core.costs), FORBIDDEN_COST)
        best_entry = {}
        for choice in core_choices(core):
            where = [
                int(core.table_offsets[edge] + choice[first] * core.sizes[second] + choice[second])
                for edge in inside
                for first, second in [core.edge_nodes[edge]]
            ]
            values = [int(core.table_values[entry]) for entry in where]
            chosen = core.node_offsets[:-1] + choice
            total = (
                int(core.costs[chosen].sum()) + sum(values)
                if not values or max(values) < FORBIDDEN_COST
                else FORBIDDEN_COST
            )
            best[chosen] = np.minimum(best[chosen], total)
            for entry in where:
                best_entry[entry] = min(best_entry.get(entry, FORBIDDEN_COST), total)
        for index in range(len(best)):
            assert strategies[index] == best[index] or (
                strategies[index] >= FORBIDDEN_COST // 2 and best[index] == FORBIDDEN_COST
            )
        for entry, total in best_entry.items():
            assert entries[entry] == total or (entries[entry] >= FORBIDDEN_COST // 2 and total == FORBIDDEN_COST)


@pytest.mark.parametrize("solver", FORMULATIONS)
def test_integer_programs(solver):
    for seed in range(8):
        problem = small_problem(seed)
        core = whole_core(scaled(problem))
        best = optimum(problem)
        result = solve_ilp(core, 30.0, solver=solver)
        assert result.finished
        if best is None:
            assert result.choice is None
            continue
        assert core.cost(result.choice) == best == result.lower_bound
        below = solve_ilp(core, 30.0, solver=solver, cutoff=best - 1)
        assert below.finished and below.choice is None and below.lower_bound == best
        costs = reduced_costs(core, priced_dual(core, seed))
        priced = solve_ilp(core, 30.0, solver=solver, cutoff=best + 5, reduced=costs)
        assert priced.finished and core.cost(priced.choice) == best and priced.lower_bound <= best


@pytest.mark.parametrize("name", [name for name in solvers() if name != "sbp"])
def test_plain_solvers_agree(name):
    if name == "toulbar2":
        pytest.importorskip("pytoulbar2", reason="pytoulbar2 is not installed")
    for seed in range(2, 8):
        problem = small_problem(seed)
        best = optimum(problem)
        result = solvers()[name].solve(problem, Limits(30.0, 1))
        assert result.status is (Status.INFEASIBLE if best is None else Status.OPTIMAL)
        assert (None if result.choice is None else result.objective) == best


def hard_problem():
    random = np.random.default_rng(0)
    builder = ProblemBuilder()
    for _ in range(70):
        builder.add_node(random.integers(0, 10**6, 12))
    for first, second in itertools.combinations(range(70), 2):
        if random.random() < 0.2:
            builder.add_edge(first, second, random.integers(0, 10**6, (12, 12)))
    return builder.build()


@pytest.mark.parametrize("name", [name for name in solvers() if name != "sbp"])
def test_plain_solvers_that_run_out_of_time_prove_nothing(name):
    if name == "toulbar2":
        pytest.importorskip("pytoulbar2", reason="pytoulbar2 is not installed")
    problem = hard_problem()
    result = solvers()[name].solve(problem, Limits(3.5, 1))
    assert result.status in (Status.FEASIBLE, Status.TIME_LIMIT)
    assert result.lower_bound < result.objective


def test_a_process_is_ended_at_its_limit():
    """A program far too large for the limit comes back without a result, and the next one is solved."""
    problem = hard_problem()
    process = IlpProcess()
    try:
        hard = process.solve(whole_core(scaled(problem)), 0.5)
        assert not hard.finished
        easy = small_problem(1, forbidden=0.0)
        assert whole_core(scaled(easy)).cost(process.solve(whole_core(scaled(easy)), 30.0).choice) == optimum(easy)
        calls = []
        stopped = process.solve(
            whole_core(scaled(problem)), 30.0, lambda seconds: calls.append(seconds) or False
        )
        assert not stopped.finished and len(calls) == 1
    finally:
        process.kill()


def test_min_marginals_equal_enumeration():
    for seed in range(12):
        problem = small_problem(seed, nodes=4)
        best = np.full(problem.strategy_count, np.inf)
        for choice in choices(problem):
            outcome = evaluate(problem, choice)
            if outcome.feasible:
                chosen = problem.node_offsets[:-1] + np.array(choice)
                best[chosen] = np.minimum(best[chosen], outcome.cost)
        found = min_marginals(problem, Limits(60.0, 1))
        assert found.exact.all() and found.values.tolist() == best.tolist()


def test_some_min_marginals_only():
    problem = small_problem(4)
    found = min_marginals(problem, Limits(60.0, 1), nodes=[2])
    assert np.isfinite(found.of(problem, 2)).any() and np.isnan(found.of(problem, 0)).all()


def test_smallest_peak_equals_enumeration():
    for seed in range(15):
        problem = small_problem(seed)
        peaks = [
            evaluate(problem, choice).peak for choice in choices(problem) if evaluate(problem, choice).cost < np.inf
        ]
        if not peaks or not min(peaks):
            continue
        result = solve(problem.with_limit(min(peaks) - 1), Limits(60.0, 1))
        assert result.status is Status.INFEASIBLE and result.shortage.exact
        assert result.shortage.smallest_peak == min(peaks)
        assert f"{min(peaks):,} bytes" in result.reason and "1 too many" in result.reason
        assert shortage(problem.with_limit(0), Limits(60.0, 1)).smallest_peak == min(peaks)


def test_contradicting_pairs_are_infeasible_without_memory():
    builder = ProblemBuilder()
    first, second = builder.add_node(np.zeros(1), "stem"), builder.add_node(np.zeros(2), "head")
    builder.add_edge(first, second, np.full((1, 2), np.inf))
    result = solve(builder.build())
    assert result.status is Status.INFEASIBLE and ("stem" in result.reason or "head" in result.reason)


@pytest.mark.parametrize("conflict", [(3,), (1, 6), (0, 4, 7), tuple(range(8))])
def test_minimal_conflict(conflict):
    asked = []

    def feasible(items):
        asked.append(items)
        return not set(conflict) <= set(items)

    assert minimal_conflict(range(8), feasible) == conflict


def test_no_conflict():
    assert minimal_conflict([1, 2], lambda items: True) == ()


def test_same_input_same_output():
    problem = small_problem(11, forbidden=0.0, nodes=7)
    results = [solve(problem, Limits(60.0, 1, seed=5)) for _ in range(2)]
    assert results[0].choice.tolist() == results[1].choice.tolist()
    assert results[0].lower_bound == results[1].lower_bound
