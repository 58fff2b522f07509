"""The primal search: cached costs against recomputed ones, trees and choices against enumeration."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from sbp.planner.iopddl import write_problem
from sbp.planner.problem import ProblemBuilder, evaluate
from sbp.planner.solver import Limits, Status, close, solve
from sbp.planner.solver import result as result_module
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


def test_repaired_and_descended_choices_are_feasible_and_hardly_a_flip_improves_them():
    """Descent draws its moves at random, so that now and then it stops beside a better flip; before it many do."""
    feasible, open_before, open_after = 0, 0, 0
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
        open_before += improving_flips(core, found.choice)
        open_after += improving_flips(core, better.choice)
    assert feasible >= 20
    assert open_before > 20 * max(open_after, 1)


def improving_flips(core, choice):
    """How many changes of one strategy are cheaper and respect the memory."""
    choice, count = choice.astype(np.int64), 0
    cost = core.cost(choice)
    for node in range(core.node_count):
        for strategy in range(core.sizes[node]):
            other = choice.copy()
            other[node] = strategy
            count += core.cost(other) < cost and core.overflow(other) == 0
    return count


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
@pytest.mark.parametrize("without", [("reduce",), ("reduce", "lns"), ("reduce", "anneal"), ()])
def test_large_cores_go_through_every_stage_of_the_search(threads, without, monkeypatch):
    # As if everything were large and the first program of every problem too hard.
    monkeypatch.setattr(close, "SMALL", 5)
    monkeypatch.setattr(close, "IN_PROCESS", 0)
    monkeypatch.setattr(close, "HOPELESS", 10)
    program = close._integer_program
    calls = []

    def impatient(state, reduction, cutoff, costs, seconds, without=()):
        calls.append(cutoff)
        return False if len(calls) == 1 else program(state, reduction, cutoff, costs, seconds, without)

    monkeypatch.setattr(close, "_integer_program", impatient)
    for seed in (11, 12, 13):
        calls.clear()
        problem = random_problem(seed, nodes=9, most=3, edges=2.0)
        result = solve(problem, Limits(30.0, threads, 0), without=without)
        assert (result.objective if result.choice is not None else None) == least_cost(problem)
        assert result.status is (Status.OPTIMAL if result.choice is not None else Status.INFEASIBLE)


def least_cost(problem):
    """By enumeration; None when nothing is feasible."""
    choices = itertools.product(*map(range, np.diff(problem.node_offsets)))
    outcomes = (evaluate(problem, choice) for choice in choices)
    return min((outcome.cost for outcome in outcomes if outcome.feasible), default=None)


@pytest.mark.parametrize("pace", [0.01, 30.0])
def test_a_reproducible_result_does_not_depend_on_the_pace_of_the_machine(pace, monkeypatch):
    """The clock of another machine: 100 times as fast, and 30 times as slow."""
    problems = [random_problem(seed, nodes=60, quantile=0.5) for seed in range(3)]
    here = [solve(problem, Limits(2000.0, 2, 0)) for problem in problems]
    origin = time.monotonic()
    real = time.monotonic
    monkeypatch.setattr(result_module.time, "monotonic", lambda: origin + pace * (real() - origin))
    for problem, first in zip(problems, here):
        second = solve(problem, Limits(2000.0, 2, 0))
        assert first.status is second.status is Status.OPTIMAL
        assert first.statistics["reproducible"]
        assert second.statistics["reproducible"] or pace > 1.0
        if second.statistics["reproducible"]:
            assert np.array_equal(first.choice, second.choice)


def test_what_a_limit_or_a_second_search_shaped_is_not_called_reproducible():
    hard = random_problem(2, nodes=1500, most=8, edges=1.5, quantile=0.9)
    assert not solve(hard, Limits(0.5, 2, 0)).statistics["reproducible"]
    clock = Clock(FOREVER)
    assert not clock.expired() and not clock.felt
    assert clock.part(0.5).at_most(0.0).expired() and clock.felt


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc to see the processes")
def test_interrupting_the_search_aside_keeps_its_best_choice_and_leaves_no_process(tmp_path):
    write_problem(random_problem(2, nodes=3000, most=8, edges=1.5, quantile=0.9), tmp_path / "hard.json.gz")
    command = [sys.executable, "-m", "sbp.cli", "solve", str(tmp_path / "hard.json.gz"), "--json", "--quiet"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(part for part in sys.path if part))
    # In the background a shell has its children ignore Ctrl-C, and theirs as well.
    process = subprocess.Popen(
        [*command, "--time-limit", "300"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not children(process.pid, "aside") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        aside = children(process.pid, "aside")
        assert aside, "the search aside did not start"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    data = json.loads(out)
    assert process.returncode == 0 and "Traceback" not in err
    assert data["status"] == "feasible" and data["lower_bound"] < data["objective"]
    assert not any(os.path.exists(f"/proc/{number}") for number in aside)


def children(parent, word):
    """Process numbers of a process's children whose command names `word`."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(status[1]) == parent and word.encode() in command:
            found.append(int(entry.name))
    return found
