"""The primal search: cached costs against recomputed ones, trees and choices against enumeration."""

import itertools

import numpy as np
import pytest

from sbp.planner.problem import ProblemBuilder, evaluate
from sbp.planner.solver import Limits, Status, close, solve
from sbp.planner.solver.anneal import disjoint_pieces
from sbp.planner.solver.aside import AnnealProcess, explore
from sbp.planner.solver.core import reduced
from sbp.planner.solver.lns import neighbourhoods
from sbp.planner.solver.result import Clock
from sbp.planner.solver.scale import scaled
from sbp.planner.solver.search import Cycle, annealed, annealer_of, descended, repaired
from sbp.planner.solver.state import State

FOREVER = 1e9


def random_problem(seed, nodes=8, most=4, times=300, edges=1.3, quantile=0.4):
    """Every node uses memory in up to three (overlapping) intervals over more times than one block of rows holds."""
    random = np.random.default_rng(seed)
    builder = ProblemBuilder()
    sizes = random.integers(2, most + 1, nodes)
    for size in sizes:
        node = builder.add_node(random.integers(0, 60, size))
        for _ in range(int(random.integers(1, 4))):
            start = int(random.integers(0, times))
            builder.add_usage(node, start, start + int(random.integers(0, times)), random.integers(0, 9, size))
    for _ in range(int(edges * nodes)):
        first, second = random.choice(nodes, 2, replace=False).tolist()
        table = random.integers(0, 60, (sizes[first], sizes[second]))
        builder.add_edge(first, second, np.where(random.random(table.shape) < 0.1, 10**18, table))
    problem = builder.build()
    draws = [evaluate(problem, [random.integers(size) for size in sizes]).peak for _ in range(200)]
    return problem.with_limit(int(np.quantile(draws, quantile)))


def core_of(seed, **options):
    """The core without any reduction, so that it is as rich as the problem."""
    return reduced(scaled(random_problem(seed, **options)), 0).core


def optimum(core):
    """Least cost over all feasible choices, by enumeration; None when there is none."""
    best = None
    for choice in itertools.product(*map(range, core.sizes.tolist())):
        array = np.array(choice, np.int64)
        cost = core.cost(array)
        if (best is None or cost < best) and core.overflow(array) == 0:
            best = cost
    return best if best is not None and best < 10**18 else None


def expected_overflow(core, labels):
    return int(np.maximum(core.loads(labels.astype(np.int64)) - core.capacities, 0).sum())


def expected_local(core, annealer, labels, prices):
    """Local costs by definition: priced node cost and the tables at the neighbours' labels."""
    prefix = np.concatenate([[0.0], np.cumsum(prices)])
    local = core.costs.astype(float)
    for piece, node in enumerate(core.piece_nodes):
        low, high = core.piece_rows[piece]
        usage = core.piece_usages[core.piece_offsets[piece] : core.piece_offsets[piece + 1]]
        local[core.node_offsets[node] : core.node_offsets[node + 1]] += (prefix[high] - prefix[low]) * usage
    for edge, (first, second) in enumerate(core.edge_nodes):
        table = core.table_values[core.table_offsets[edge] : core.table_offsets[edge + 1]].astype(float)
        table = table.reshape(core.sizes[first], core.sizes[second])
        table[table >= 2**59] = 2 * (core.worst_cost() - core.constant) + 1
        local[core.node_offsets[first] : core.node_offsets[first + 1]] += table[:, labels[second]]
        local[core.node_offsets[second] : core.node_offsets[second + 1]] += table[labels[first]]
    return local


@pytest.mark.parametrize("seed", range(6))
def test_cached_costs_and_slacks_equal_recomputed_ones_after_many_moves(seed):
    core = core_of(seed, nodes=60, times=4000)
    random = np.random.default_rng(seed)
    prices = random.random(len(core.capacities)) * (random.random(len(core.capacities)) < 0.05)
    annealer = annealer_of(core, seed)
    annealer.set_state(random.integers(0, core.sizes), prices)
    for temperature, mu in ((30.0, 0.1), (5.0, 1.0), (0.5, 20.0)):
        annealer.run(2000, temperature, mu, 0.1, 0.1, 0.2, 20)
        labels = annealer.labels
        loads = core.loads(labels.astype(np.int64))
        assert np.array_equal(annealer.slacks, core.capacities - loads)
        assert annealer.overflow == expected_overflow(core, labels)
        np.testing.assert_allclose(
            annealer.local_costs, expected_local(core, annealer, labels, prices), rtol=1e-9, atol=1e-3
        )
        if core.cost(labels) < 10**18:
            assert annealer.cost == pytest.approx(core.cost(labels) - core.constant, rel=1e-9)
    assert annealer.accepted > 500


@pytest.mark.parametrize("seed", range(4))
def test_overflow_of_one_flip_is_foretold(seed):
    core = core_of(seed, nodes=30, times=3000)
    random = np.random.default_rng(seed)
    annealer = annealer_of(core, seed)
    annealer.set_state(random.integers(0, core.sizes))
    for _ in range(300):
        node = int(random.integers(core.node_count))
        strategy = int(random.integers(core.sizes[node]))
        foretold = annealer.overflow_if(node, strategy)
        annealer.move_to(node, strategy)
        assert foretold == annealer.overflow == expected_overflow(core, annealer.labels)


def test_disjoint_pieces_use_what_overlapping_ones_use():
    for seed in range(5):
        core = core_of(seed, nodes=10, times=40)
        offsets, rows, starts, usages = disjoint_pieces(core)
        random = np.random.default_rng(seed)
        labels = random.integers(0, core.sizes)
        loads = np.zeros(len(core.capacities))
        for node in range(core.node_count):
            last = -1
            for segment in range(offsets[node], offsets[node + 1]):
                assert rows[segment, 0] >= last
                last = rows[segment, 1]
                loads[rows[segment, 0] : rows[segment, 1]] += usages[starts[segment] + labels[node]]
        assert np.array_equal(loads, core.loads(labels))


@pytest.mark.parametrize("forced", [False, True])
def test_trees_are_solved_exactly(forced):
    met = set()
    for seed in range(30):
        core = core_of(seed, nodes=9)
        random = np.random.default_rng(seed)
        annealer = annealer_of(core, seed)
        labels = random.integers(0, core.sizes)
        annealer.set_state(labels)
        root = int(random.integers(core.node_count))
        nodes, answer = annealer.try_tree(root, 6, 2 if forced else 0, 0.0)
        inside = set(nodes.tolist())
        edges = [edge for edge in core.edge_nodes.tolist() if inside.issuperset(edge)]
        assert nodes[0] == root and len(inside) == len(nodes) == len(edges) + 1
        met.add(len(nodes))

        def cost(strategies, nodes=nodes, labels=labels, core=core):
            choice = labels.copy()
            choice[nodes] = strategies
            return core.cost(choice)

        if forced:
            assert answer[0] != labels[root]
        ranges = [range(core.sizes[node]) for node in nodes.tolist()]
        if forced:
            ranges[0] = range(answer[0], answer[0] + 1)
        best = min(cost(list(strategies)) for strategies in itertools.product(*ranges))
        assert cost(answer) == best or best >= 10**18
    assert max(met) == 6


def test_repaired_and_descended_choices_are_feasible_and_no_flip_improves_them():
    feasible = 0
    for seed in range(25):
        core = core_of(seed, nodes=30)
        annealer = annealer_of(core, seed)
        labels = np.random.default_rng(seed).integers(0, core.sizes)
        prices = np.zeros(len(core.capacities))
        found = repaired(annealer, labels, prices, Clock(FOREVER))
        if found is None:
            continue
        feasible += 1
        better = descended(annealer, found.choice, prices, Clock(FOREVER))
        for step in (found, better):
            assert core.overflow(step.choice.astype(np.int64)) == 0
            assert core.cost(step.choice) == round(step.cost) + core.constant
        assert better.cost <= found.cost
    assert feasible >= 20


def test_annealing_and_exploring_meet_the_optimum_of_small_problems():
    solved = 0
    for seed in range(12):
        core = core_of(seed, nodes=7, most=3)
        best = optimum(core)
        prices = np.zeros(len(core.capacities))
        annealer = annealer_of(core, seed)
        labels = np.zeros(core.node_count, np.int32)
        # A gap of a few typical costs; what it is exactly only sets the temperature.
        found = annealed(annealer, labels, prices, 30.0, Cycle(FOREVER, 20000), Clock(FOREVER))
        assert (found and round(found.cost) + core.constant) == best
        solved += best is not None
    assert solved >= 6


def test_equal_seeds_anneal_alike():
    core = core_of(3, nodes=40)
    prices = np.full(len(core.capacities), 0.01)

    def run(seed):
        annealer = annealer_of(core, seed)
        labels = np.zeros(core.node_count, np.int32)
        annealed(annealer, labels, prices, 200.0, Cycle(FOREVER, 20000), Clock(FOREVER))
        return annealer.labels, annealer.tried, annealer.accepted

    first, second, other = run(1), run(1), run(2)
    assert np.array_equal(first[0], second[0]) and first[1:] == second[1:]
    assert first[2] != other[2]


def state_of(problem, threads=2):
    return State(problem, scaled(problem), Clock(60.0), Limits(60.0, threads, 0), None)


def test_a_search_aside_sends_feasible_choices_and_can_be_ended():
    problem = random_problem(5, nodes=60, quantile=0.5)
    state = state_of(problem)
    base = reduced(state.integer, 0)
    process = AnnealProcess()
    prices = np.zeros(len(base.core.capacities))
    labels = np.zeros(base.core.node_count, np.int32)
    process.start(base, prices, labels, base.core.constant, base.core.worst_cost(), 0)
    try:
        assert process.running
        while state.upper is None and process.running:
            process.poll(state, 20.0)
        assert evaluate(problem, state.choice).feasible
    finally:
        process.kill()
    assert not process.running
    assert not process.poll(state)


def test_exploring_stops_with_its_clock_and_sends_only_better_choices():
    core = core_of(7, nodes=40)
    sent = []
    explore(
        core,
        np.zeros(len(core.capacities)),
        np.zeros(core.node_count, np.int32),
        core.constant,
        core.worst_cost(),
        0,
        Clock(1.0),
        lambda choice: sent.append(core.cost(choice)),
    )
    assert sent and sent == sorted(sent, reverse=True) and len(set(sent)) == len(sent)


def test_neighbourhoods_only_improve():
    improved = 0
    for seed in range(6):
        problem = random_problem(seed, nodes=40, quantile=0.5)
        state = state_of(problem, threads=1)
        base = reduced(state.integer, 0)
        annealer = annealer_of(base.core, seed)
        prices = np.zeros(len(base.core.capacities))
        found = repaired(annealer, np.zeros(base.core.node_count, np.int32), prices, state.clock)
        if found is None:
            continue
        state.offer_core(base, found.choice, "anneal")
        before = state.upper
        dual = close.ascended(base.core, state.clock, state.upper)
        search = neighbourhoods(state, base, close.reduced_costs(base.core, dual))
        for _ in range(5):
            if search is not None:
                search.step(5.0)
        assert evaluate(problem, state.choice).feasible and state.upper <= before
        assert state.integer.cost(state.choice) == state.upper
        improved += state.upper < before
    assert improved >= 2


@pytest.mark.parametrize("threads", [1, 2])
def test_large_cores_go_through_every_stage_of_the_search(threads, monkeypatch):
    # As if everything were large and every program too hard at first.
    monkeypatch.setattr(close, "SMALL", 5)
    monkeypatch.setattr(close, "IN_PROCESS", 0)
    seen = []
    program = close._integer_program

    def impatient(state, reduction, cutoff, costs, seconds, without=()):
        seen.append(cutoff)
        return False if len(seen) == 1 else program(state, reduction, cutoff, costs, seconds, without)

    monkeypatch.setattr(close, "_integer_program", impatient)
    problem = random_problem(11, nodes=11, most=3, edges=2.0)
    result = solve(problem, Limits(30.0, threads, 0), without=("reduce",))
    expected = min(
        (
            outcome.cost
            for outcome in (
                evaluate(problem, choice) for choice in itertools.product(*map(range, np.diff(problem.node_offsets)))
            )
            if outcome.feasible
        ),
        default=None,
    )
    assert result.status is Status.OPTIMAL and result.objective == expected
