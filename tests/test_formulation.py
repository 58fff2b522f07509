"""The layout problem of a graph: its optimum is the best plan there is, found by enumeration."""

import random

import pytest
from enumerate_plans import best_by_enumeration
from random_graphs import random_graph

from sbp.graph import Graph, Node, Value
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import parse_type
from sbp.ops import library as ops
from sbp.planner.arena import arena_of
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.decisions import Decisions
from sbp.planner.formulation import formulate
from sbp.planner.lowering import lower
from sbp.planner.memory import memory_profile
from sbp.planner.pins import Pins
from sbp.planner.problem import evaluate
from sbp.planner.search import objective_seconds, search
from sbp.planner.solver import Limits, Status, solve
from sbp.planner.strategies import Strategies
from sbp.rule import Signature
from sbp.trace import GraphBuilder


class RandomCosts:
    """A cost model with arbitrary but fixed prices, so that no structure of a real one hides a mistake."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def compute_seconds(self, op, flops, bytes, dtype):
        return random.Random(f"{self.seed} {op} {flops} {bytes}").randrange(20) / 64 + flops / 1024

    def collective_seconds(self, kind, mesh, axis, bytes):
        return random.Random(f"{self.seed} {kind} {axis} {bytes}").randrange(1, 40) / 64


def prepared(seed: int, mesh: Mesh, nodes: int):
    graph, costs = random_graph(seed, nodes), RandomCosts(seed)
    boxing = BoxingTable(mesh, costs)
    return graph, costs, boxing, Strategies(graph, mesh, costs, boxing)


# Two hundred and twelve graphs; the 2-D mesh has many more plans per graph, so those graphs are smaller.
CASES = (
    [(seed, (2,), 5) for seed in range(120)]
    + [(seed, (4,), 4) for seed in range(120, 200)]
    + [(seed, (2, 2), 2) for seed in range(200, 212)]
)


@pytest.mark.parametrize("block", range(8))
def test_optimum_equals_enumeration(block):
    for seed, shape, nodes in CASES[block::8]:
        mesh = Mesh(shape)
        graph, costs, boxing, strategies = prepared(seed, mesh, nodes)
        best, decisions = best_by_enumeration(strategies)
        found = search(graph, mesh, costs, None, Limits(60.0, 1))
        assert found.status is Status.OPTIMAL, seed
        assert found.objective_seconds == pytest.approx(best, rel=1e-9), seed
        assert found.lower_bound_seconds <= best * (1 + 1e-9), seed
        # The plan that the enumeration found costs the same when it is built.
        assert objective_seconds(lower(graph, mesh, decisions, costs, boxing)) == pytest.approx(best, rel=1e-9), seed


@pytest.mark.parametrize("block", range(4))
def test_binding_memory_limit(block):
    """Under a limit between the least and the preferred peak: the bound holds, the plan fits, enumeration agrees."""
    bound_cases = 0
    for seed in range(block, 60, 4):
        mesh = Mesh((2,))
        graph, costs, boxing, strategies = prepared(seed, mesh, 4)
        free = search(graph, mesh, costs, None, Limits(60.0, 1))
        peak = memory_profile(free.physical).peak_bytes
        limit = int(peak * 0.8)
        formulation = formulate(strategies, limit)
        best = best_of_problem(formulation.problem)
        try:
            found = search(graph, mesh, costs, limit, Limits(60.0, 1))
        except Exception as error:
            assert "bytes" in str(error) or "memory" in str(error), (seed, error)
            continue
        bound_cases += 1
        assert memory_profile(found.physical).peak_bytes <= limit, seed
        assert arena_of(found.physical, within=limit).size_bytes <= limit, seed
        assert found.lower_bound_seconds == pytest.approx(best, rel=1e-9), seed
        assert found.lower_bound_seconds <= found.objective_seconds * (1 + 1e-9), seed
        if found.status is Status.OPTIMAL:
            assert found.objective_seconds == pytest.approx(best, rel=1e-9), seed
    assert bound_cases >= 3


def best_of_problem(problem) -> float:
    """The optimum of a layout problem by depth-first enumeration, memory included."""
    count = problem.node_count
    edges = [[] for _ in range(count)]
    for edge in range(problem.edge_count):
        first, second = map(int, problem.edge_nodes[edge])
        later, table = max(first, second), problem.table(edge)
        edges[later].append((min(first, second), table if first < second else table.T))
    best = [float("inf")]
    choice = [0] * count
    end = int(problem.piece_intervals.max(initial=0)) + 1
    pieces = [[] for _ in range(count)]
    for number, node in enumerate(problem.piece_nodes):
        usages = problem.piece_usages[problem.piece_offsets[number] : problem.piece_offsets[number + 1]]
        pieces[node].append((*map(int, problem.piece_intervals[number]), usages))
    load = [0] * end

    def descend(node: int, cost: float) -> None:
        if cost >= best[0]:
            return
        if node == count:
            assert evaluate(problem, choice).feasible
            best[0] = cost
            return
        costs = problem.node_costs(node)
        for strategy in range(problem.strategies(node)):
            total = cost + costs[strategy] + sum(table[choice[other], strategy] for other, table in edges[node])
            if total >= best[0]:
                continue
            for start, stop, usages in pieces[node]:
                for time in range(start, stop):
                    load[time] += int(usages[strategy])
            if problem.usage_limit is None or max(load) <= problem.usage_limit:
                choice[node] = strategy
                descend(node + 1, total)
            for start, stop, usages in pieces[node]:
                for time in range(start, stop):
                    load[time] -= int(usages[strategy])

    descend(0, 0.0)
    return best[0]


def test_encoding_inverts_decoding():
    """Decisions of the optimum are encoded to a choice of the same cost; the best plan by enumeration, too."""
    for seed in range(40):
        graph, costs, boxing, strategies = prepared(seed, Mesh((2,)), 5)
        formulation = formulate(strategies)
        assignment = solve(formulation.problem, Limits(60.0, 1))
        for decisions in (formulation.decode(assignment.choice), best_by_enumeration(strategies)[1]):
            choice = formulation.encode(decisions)
            assert choice is not None, seed
            assert evaluate(formulation.problem, choice).cost == pytest.approx(assignment.objective, rel=1e-9), seed


@pytest.mark.parametrize("views", [False, True])
def test_problem_memory_never_exceeds_the_plan(views):
    """The bound needs this: what the problem counts at any node is there in the finished plan too."""
    for seed in range(30):
        mesh = Mesh((2,))
        graph, costs = random_graph(seed, 5, views), RandomCosts(seed)
        boxing = BoxingTable(mesh, costs)
        strategies = Strategies(graph, mesh, costs, boxing)
        formulation = formulate(strategies)
        generator = random.Random(seed)
        for _ in range(3):
            limits = Limits(20.0, 1, generator.randrange(1000))
            choice = solve(formulation.problem, limits).choice
            counted = evaluate(formulation.problem, choice).peak
            physical = lower(graph, mesh, formulation.decode(choice), costs, boxing)
            assert counted <= memory_profile(physical).peak_bytes, seed


SQUARE = parse_type("f32[8,8]")
PAIR = Mesh((2,))
REAL = AnalyticCostModel(Cluster.preset("a100-80g", nodes=1))


def small_graph(kinds: dict[str, str], nodes: tuple[Node, ...], outputs: tuple[str, ...], updates=None) -> Graph:
    return Graph(
        "small", {name: Value(name, SQUARE, kind) for name, kind in kinds.items()}, nodes, outputs, updates or {}
    ).validate()


class Fixed:
    """A restriction to one signature per node, and S(0) for all that is stored."""

    def __init__(self, signatures: dict[str, str]) -> None:
        self.signatures = signatures

    def key(self, graph, node):
        return node.name

    def allows(self, graph, node, signature):
        return str(signature) == self.signatures[node.name]

    def allows_source(self, graph, value, layout):
        return str(layout) == "(S(0))"

    def describe(self, graph, place):
        return "fixed signatures"


def test_a_state_value_is_at_hand_beside_the_copy_kept_of_it():
    kinds = {"w": "parameter", "x": "input", "y": "activation", "a": "gradient", "b": "gradient", "n": "gradient"}
    nodes = (
        Node("f", "matmul", ("x", "w"), ("y",)),
        Node("b1", "matmul", ("y", "w"), ("a",), phase="backward"),
        Node("b2", "add", ("a", "w"), ("b",), phase="backward"),
        Node("o", "sub", ("w", "b"), ("n",), phase="optimizer"),
    )
    graph = small_graph(kinds, nodes, ("y",), {"w": "n"})
    split, whole = "(S(0)), (S(0)) -> (S(0))", "(S(0)), (B) -> (S(0))"
    found = search(graph, PAIR, REAL, None, Limits(20.0), Fixed({"f": whole, "b1": whole, "b2": split, "o": split}))
    assert found.status is Status.OPTIMAL
    assert [step.kind for step in found.physical.operations if hasattr(step, "kind")] == ["all_gather"]


def test_an_input_is_counted_while_the_plan_holds_it():
    kinds = {"x": "input", "y": "activation", "z": "activation", "u": "activation"}
    nodes = (
        Node("f", "relu", ("x",), ("y",)),
        Node("f2", "relu", ("y",), ("z",)),
        Node("f3", "add", ("z", "x"), ("u",)),
    )
    graph = small_graph(kinds, nodes, ("u",))
    pins = Pins(graph, PAIR, {"x": "B", "y": "S(0)", "z": "S(1)", "u": "S(0)"})
    peak = memory_profile(search(graph, PAIR, REAL, None, Limits(20.0), pins).physical).peak_bytes
    assert memory_profile(search(graph, PAIR, REAL, peak, Limits(20.0), pins).physical).peak_bytes == peak


def test_what_is_kept_is_made_before_the_forward_phase_lets_go():
    kinds = {"x": "input", "y": "activation", "z": "activation", "g": "gradient", "h": "gradient"}
    nodes = (
        Node("f", "relu", ("x",), ("y",)),
        Node("f2", "relu", ("y",), ("z",)),
        Node("b0", "relu", ("z",), ("h",), phase="backward"),
        Node("b", "relu", ("y",), ("g",), phase="backward"),
    )
    graph = small_graph(kinds, nodes, ("g", "h"))
    whole, split = Layout.parse("B"), Layout.parse("S(0)")
    same = Signature((whole,), (whole,))
    signatures = {"f": same, "f2": same, "b0": same, "b": Signature((split,), (split,))}
    decisions = Decisions({"x": whole}, signatures, {"g": split, "h": whole}, {"y": split}).check(graph, PAIR)
    operations = lower(graph, PAIR, decisions, REAL, BoxingTable(PAIR, REAL)).operations
    assert [getattr(item, "node", "slice") for item in operations] == ["f", "f2", "slice", "b0", "b"]


def test_workspace_is_counted():
    """Of a sort, whose kernel needs more memory than what it reads and makes: the problem's peak is the plan's."""
    builder = GraphBuilder("sorted")
    x = builder.source("x", SQUARE)
    with builder:
        values, _ = ops.sort(ops.exp(x))
        graph = builder.finish([values])
    boxing = BoxingTable(PAIR, REAL)
    strategies = Strategies(graph, PAIR, REAL, boxing)
    formulation = formulate(strategies)
    choice = solve(formulation.problem, Limits(20.0, 1)).choice
    physical = lower(graph, PAIR, formulation.decode(choice), REAL, boxing)
    at = next(at for at, op in enumerate(physical.operations) if getattr(op, "op", "") == "sort")
    assert memory_profile(physical).by_kind[-1, at] > 0
    assert evaluate(formulation.problem, choice).peak == memory_profile(physical).peak_bytes
