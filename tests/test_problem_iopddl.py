"""The contest's files: the round trip, and every malformed file as an error that names the field."""

import gzip
import json

import numpy as np
import pytest

from sbp.errors import ProblemError
from sbp.planner.iopddl import (
    problem_from_json,
    problem_to_json,
    read_problem,
    read_solution,
    write_problem,
    write_solution,
)
from sbp.planner.problem import FORBIDDEN_INTEGER, ProblemBuilder, evaluate


def document():
    return {
        "problem": {
            "name": "small",
            "nodes": {
                "intervals": [[0, 3], [2, 2], [1, 4]],
                "costs": [[1, 2], [3], [FORBIDDEN_INTEGER, 0, 5]],
                "usages": [[5, 6], [7], [1, 2, 3]],
            },
            "edges": {"nodes": [[0, 1], [2, 0]], "costs": [[1, FORBIDDEN_INTEGER], [1, 2, 3, 4, 5, 6]]},
            "usage_limit": 9,
        }
    }


def load(data):
    return problem_from_json(json.dumps(data).encode())


def same(first, second):
    return (
        all(
            np.array_equal(getattr(first, name), getattr(second, name))
            for name in ("node_offsets", "costs", "edge_nodes", "piece_nodes", "piece_intervals", "piece_usages")
        )
        and all(np.array_equal(first.table(edge), second.table(edge)) for edge in range(first.edge_count))
        and first.usage_limit == second.usage_limit
    )


def test_values():
    problem = load(document())
    assert problem.node_count == 3 and problem.usage_limit == 9 and problem.is_integer
    assert problem.table(1).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert evaluate(problem, [0, 0, 1]).cost == 1 + 3 + 0 + 1 + 3


@pytest.mark.parametrize("name", ["p.json", "p.json.gz"])
def test_round_trip(tmp_path, name):
    problem = load(document())
    write_problem(problem, tmp_path / name)
    assert same(problem, read_problem(tmp_path / name))
    first = (tmp_path / name).read_bytes()
    write_problem(problem, tmp_path / name)
    assert first == (tmp_path / name).read_bytes()


def test_floats_and_several_pieces_round_trip():
    builder = ProblemBuilder("floats")
    first, second = builder.add_node(np.array([0.1, np.inf])), builder.add_node(np.array([1e-9]))
    for start in (0, 4, 8):
        builder.add_usage(first, start, start + 2, np.array([start, 3]))
    builder.add_usage(second, 1, 2, np.array([4]))
    builder.add_edge(first, second, np.array([[0.3], [np.inf]]))
    problem = builder.build(100)
    assert same(problem, problem_from_json(problem_to_json(problem)))


def test_gigantic_numbers_are_forbidden():
    data = document()
    data["problem"]["nodes"]["costs"][0][1] = 10**30
    assert load(data).node_costs(0).tolist() == [1, FORBIDDEN_INTEGER]


def test_limit_is_optional():
    data = document()
    del data["problem"]["usage_limit"]
    assert load(data).usage_limit is None


def put(path, value):
    def change(data):
        place = data
        for key in path[:-1]:
            place = place[key]
        if value is KeyError:
            del place[path[-1]]
        else:
            place[path[-1]] = value

    return change


NODES, EDGES = ("problem", "nodes"), ("problem", "edges")
BAD = {
    "no problem": (put(("problem",), KeyError), "'problem' is missing"),
    "problem is a list": (put(("problem",), []), "the document.problem"),
    "no costs": (put((*NODES, "costs"), KeyError), "problem.nodes: the key 'costs'"),
    "no usages": (put((*NODES, "usages"), KeyError), "problem.nodes: the key 'usages'"),
    "no intervals": (put((*NODES, "intervals"), KeyError), "problem.nodes: the key 'intervals'"),
    "no nodes": (put(NODES, {"costs": [], "usages": [], "intervals": []}), "problem.nodes.costs"),
    "too few intervals": (put((*NODES, "intervals"), [[0, 1]]), "problem.nodes.intervals: 1 entry, expected 3"),
    "short usages": (put((*NODES, "usages", 0), [1]), "problem.nodes.usages[0]: expected 2"),
    "float usage": (put((*NODES, "usages", 0, 1), 1.5), "problem.nodes.usages[0][1]"),
    "boolean usage": (put((*NODES, "usages", 0, 1), True), "problem.nodes.usages[0][1]"),
    "negative usage": (put((*NODES, "usages", 2, 0), -4), "problem.nodes.usages[2][0]"),
    "gigantic usage": (put((*NODES, "usages", 2, 0), 2**62), "problem.nodes.usages[2][0]"),
    "interval of one": (put((*NODES, "intervals", 1), [3]), "problem.nodes.intervals[1]"),
    "negative interval": (put((*NODES, "intervals", 1), [3, 2]), "problem.nodes.intervals[1]"),
    "negative time": (put((*NODES, "intervals", 1), [-3, 2]), "problem.nodes.intervals[1]"),
    "gigantic time": (put((*NODES, "intervals", 1), [3, 10**30]), "problem.nodes.intervals[1]"),
    "text cost": (put((*NODES, "costs", 0, 1), "much"), "problem.nodes.costs[0][1]"),
    "null cost": (put((*NODES, "costs", 0, 1), None), "problem.nodes.costs[0][1]"),
    "very negative cost": (put((*NODES, "costs", 0, 1), -(10**19)), "problem.nodes.costs[0]"),
    "empty node": (put((*NODES, "costs", 1), []), "problem.nodes.costs[1]"),
    "cost not a list": (put((*NODES, "costs", 1), 7), "problem.nodes.costs[1]"),
    "table size": (put((*EDGES, "costs", 1), [1, 2, 3]), "problem.edges.costs[1]: 3 entries, expected 3 x 2"),
    "table NaN": (put((*EDGES, "costs", 1, 3), "nan"), "problem.edges.costs[1][3]"),
    "too few tables": (put((*EDGES, "costs"), [[1, 2]]), "problem.edges.costs: 1 entry, expected 2"),
    "index out of range": (put((*EDGES, "nodes", 0, 1), 3), "problem.edges.nodes[0]: node 3 is out of range"),
    "negative index": (put((*EDGES, "nodes", 0, 1), -1), "problem.edges.nodes[0]: node -1 is out of range"),
    "loop": (put((*EDGES, "nodes", 0, 1), 0), "problem.edges.nodes[0]"),
    "three ends": (put((*EDGES, "nodes", 0), [0, 1, 2]), "problem.edges.nodes[0]"),
    "negative limit": (put(("problem", "usage_limit"), -1), "problem.usage_limit"),
    "float limit": (put(("problem", "usage_limit"), 1.5), "problem.usage_limit"),
    "gigantic limit": (put(("problem", "usage_limit"), 2**64), "problem.usage_limit"),
}


@pytest.mark.parametrize("change, words", BAD.values(), ids=BAD)
def test_bad_files_name_the_field(change, words):
    data = document()
    change(data)
    with pytest.raises(ProblemError) as error:
        load(data)
    assert words in str(error.value)


def test_damaged_files(tmp_path):
    whole = gzip.compress(json.dumps(document()).encode())
    cases = {
        "truncated.json.gz": (whole[:-20], "truncated"),
        "half.json": (json.dumps(document()).encode()[:50], "not valid JSON"),
        "nan.json": (b'{"problem": NaN}', "not valid JSON"),
        "empty.json": (b"", "not valid JSON"),
        "list.json": (b"[]", "expected an object"),
        "bytes.json": (b"\xff\xfe\x00", "not valid JSON"),
    }
    for name, (content, words) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ProblemError) as error:
            read_problem(tmp_path / name)
        assert words in str(error.value) and name in str(error.value)
    with pytest.raises(ProblemError, match="no such file"):
        read_problem(tmp_path / "absent.json")
    with pytest.raises(ProblemError, match="cannot be read"):
        read_problem(tmp_path)


def test_solutions(tmp_path):
    problem = load(document())
    write_solution([0, 0, 1], tmp_path / "s.json")
    assert read_solution(tmp_path / "s.json", problem).tolist() == [0, 0, 1]
    for text, words in [("[0, 0]", "expected 3"), ("[0, 0, 9]", "out of range"), ("{}", "choice"), ('["a"]', "[0]")]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ProblemError) as error:
            read_solution(tmp_path / "bad.json", problem)
        assert words in str(error.value)
