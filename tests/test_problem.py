"""Problems: what the builder accepts and refuses, sharing of tables, evaluation in exact integers."""

import numpy as np
import pytest

from sbp.errors import ProblemError
from sbp.planner.problem import FORBIDDEN_INTEGER, ProblemBuilder, evaluate, usage_profile


def pair(table=None, limit=None):
    builder = ProblemBuilder("pair")
    first = builder.add_node(np.array([1, 2]), "first")
    second = builder.add_node(np.array([3, 4, 5]), "second")
    builder.add_usage(first, 0, 4, np.array([10, 20]))
    builder.add_usage(second, 2, 6, np.array([1, 2, 3]))
    if table is not None:
        builder.add_edge(first, second, table)
    return builder.build(limit)


def test_evaluation_adds_nodes_edges_and_loads():
    problem = pair(np.arange(6).reshape(2, 3), limit=22)
    outcome = evaluate(problem, [1, 2])
    assert (outcome.cost, outcome.peak, outcome.peak_time) == (2 + 5 + 5, 23, 2)
    assert not outcome.within_limit and not outcome.feasible
    assert evaluate(problem, [1, 1]).feasible
    times, loads = usage_profile(problem, [0, 0])
    assert times.tolist() == [0, 2, 4, 6] and loads.tolist() == [10, 11, 1, 0]


def test_integer_costs_do_not_wrap():
    builder = ProblemBuilder()
    for _ in range(20):
        builder.add_node(np.array([FORBIDDEN_INTEGER - 1]))
    problem = builder.build()
    assert evaluate(problem, [0] * 20).cost == 20 * (FORBIDDEN_INTEGER - 1) > 2**63


def test_empty_interval_uses_nothing():
    builder = ProblemBuilder()
    builder.add_usage(builder.add_node(np.array([1])), 5, 5, np.array([1000]))
    assert evaluate(builder.build(1), [0]).peak == 0


def test_equal_tables_are_stored_once():
    builder = ProblemBuilder()
    nodes = [builder.add_node(np.zeros(2)) for _ in range(5)]
    shared = np.ones((2, 2))
    shared.flags.writeable = False
    for first, second in zip(nodes, nodes[1:]):
        builder.add_edge(first, second, shared)
        builder.add_edge(first, second, np.ones((2, 2)))
    problem = builder.build()
    assert problem.edge_count == 8 and len(problem.table_shapes) == 1


def test_a_changed_array_is_another_table():
    builder = ProblemBuilder()
    first, second = builder.add_node(np.zeros(2)), builder.add_node(np.zeros(2))
    table = np.zeros((2, 2))
    builder.add_edge(first, second, table)
    table[0, 0] = 7.0
    builder.add_edge(first, second, table)
    problem = builder.build()
    assert problem.table(0)[0, 0] == 0.0 and problem.table(1)[0, 0] == 7.0


def test_integers_and_floats_mix_to_floats():
    builder = ProblemBuilder()
    first = builder.add_node(np.array([1, FORBIDDEN_INTEGER]))
    second = builder.add_node(np.array([0.5]))
    builder.add_edge(first, second, np.array([[1], [2]]))
    problem = builder.build()
    assert not problem.is_integer and np.isinf(problem.node_costs(0)[1])
    assert evaluate(problem, [0, 0]).cost == 2.5
    assert evaluate(problem, [1, 0]).cost == np.inf


def test_arrays_are_read_only():
    with pytest.raises(ValueError):
        pair().costs[0] = 3


BAD = [
    ("NaN", lambda b: b.add_node(np.array([1.0, np.nan]), "w"), ["costs of node 2 (w)", "NaN"]),
    ("minus infinity", lambda b: b.add_node(np.array([-np.inf])), ["costs of node 2", "-inf"]),
    ("no strategies", lambda b: b.add_node(np.array([])), ["costs of node 2", "at least one"]),
    ("text", lambda b: b.add_node(["a"]), ["costs of node 2", "numbers"]),
    ("two dimensions", lambda b: b.add_node(np.zeros((2, 2))), ["costs of node 2", "(2, 2)"]),
    ("label count", lambda b: b.add_node(np.zeros(2), labels=["a"]), ["labels", "1 labels for 2"]),
    ("missing node", lambda b: b.add_usage(9, 0, 1, np.array([1])), ["node 9 does not exist"]),
    ("negative interval", lambda b: b.add_usage(0, 3, 2, np.array([1, 1])), ["interval of node 0 (first)", "[3, 2)"]),
    ("negative time", lambda b: b.add_usage(0, -1, 2, np.array([1, 1])), ["interval of node 0 (first)"]),
    ("fractional time", lambda b: b.add_usage(0, 0.5, 2, np.array([1, 1])), ["interval of node 0"]),
    ("float usage", lambda b: b.add_usage(0, 0, 2, np.array([1.0, 1.0])), ["usages of node 0", "integers"]),
    ("usage count", lambda b: b.add_usage(0, 0, 2, np.array([1])), ["usages of node 0", "2 strategies"]),
    ("negative usage", lambda b: b.add_usage(0, 0, 2, np.array([-1, 1])), ["usages of node 0", "-1"]),
    ("table shape", lambda b: b.add_edge(0, 1, np.zeros((3, 2))), ["table of edge 0", "first", "(3, 2)", "(2, 3)"]),
    ("table NaN", lambda b: b.add_edge(0, 1, np.full((2, 3), np.nan)), ["table of edge 0", "NaN"]),
    ("loop", lambda b: b.add_edge(0, 0, np.zeros((2, 2))), ["edge 0", "both ends"]),
    ("edge to nowhere", lambda b: b.add_edge(0, 7, np.zeros((2, 3))), ["edge 0", "node 7"]),
    ("negative limit", lambda b: b.build(-1), ["usage_limit", "-1"]),
    ("float limit", lambda b: b.build(1.5), ["usage_limit", "1.5"]),
]


@pytest.mark.parametrize("act, words", [(act, words) for _, act, words in BAD], ids=[name for name, _, _ in BAD])
def test_bad_numbers_name_the_field(act, words):
    builder = ProblemBuilder()
    builder.add_node(np.array([1, 2]), "first")
    builder.add_node(np.array([3, 4, 5]), "second")
    with pytest.raises(ProblemError) as error:
        act(builder)
    for word in words:
        assert word in str(error.value)


def test_usages_that_overflow_together_are_refused():
    builder = ProblemBuilder()
    for _ in range(4):
        builder.add_usage(builder.add_node(np.array([0])), 0, 1, np.array([2**61]))
    with pytest.raises(ProblemError, match="usages"):
        builder.build(1)


@pytest.mark.parametrize(
    "choice, word", [([0], "expected 2"), ([0, 3], "second"), ([0, -1], "out of range"), ([0.0, 1.0], "integers")]
)
def test_bad_choices(choice, word):
    with pytest.raises(ProblemError, match=word):
        evaluate(pair(), choice)
