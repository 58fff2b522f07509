"""Mutated problem files: a problem or a ProblemError, never anything else."""

import gzip
import json

import numpy as np
import pytest

from sbp.errors import ProblemError
from sbp.planner.iopddl import problem_from_json, read_problem
from sbp.planner.problem import ProblemBuilder, evaluate

VALUES = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    10**18,
    10**40,
    1e308,
    -1e308,
    0.5,
    "",
    "inf",
    "NaN",
    [],
    {},
    [1],
]


def seed_document(random):
    builder = {"intervals": [], "costs": [], "usages": []}
    sizes = random.integers(1, 4, int(random.integers(1, 5))).tolist()
    for size in sizes:
        start = int(random.integers(0, 5))
        builder["intervals"].append([start, start + int(random.integers(0, 4))])
        builder["costs"].append(random.integers(0, 9, size).tolist())
        builder["usages"].append(random.integers(0, 9, size).tolist())
    edges = {"nodes": [], "costs": []}
    for node in range(len(sizes) - 1):
        edges["nodes"].append([node, node + 1])
        edges["costs"].append(random.integers(0, 9, sizes[node] * sizes[node + 1]).tolist())
    return {"problem": {"name": "f", "nodes": builder, "edges": edges, "usage_limit": int(random.integers(0, 40))}}


def places(data, path=()):
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def mutated(random):
    """A document with one to three changed, removed or repeated members, or its bytes damaged."""
    data = seed_document(random)
    for _ in range(int(random.integers(1, 4))):
        known = [path for path in places(data) if path]
        if not known:
            break
        path = known[int(random.integers(len(known)))]
        place = data
        for key in path[:-1]:
            place = place[key]
        action = int(random.integers(4))
        if action == 0:
            del place[path[-1]]
        elif action == 1 and isinstance(place, list):
            place.insert(path[-1], place[path[-1]])
        else:
            place[path[-1]] = VALUES[int(random.integers(len(VALUES)))]
    content = json.dumps(data).encode()
    if random.random() < 0.2:
        damaged = bytearray(content)
        for _ in range(int(random.integers(1, 4))):
            damaged[int(random.integers(len(damaged)))] = int(random.integers(256))
        content = bytes(damaged)
    return content


def outcome(content) -> str:
    try:
        problem = problem_from_json(content)
    except ProblemError as error:
        assert str(error)
        return "refused"
    evaluate(problem, np.zeros(problem.node_count, np.int64))
    return "read"


def test_mutated_files():
    random = np.random.default_rng(0)
    seen = {outcome(mutated(random)) for _ in range(3000)}
    assert seen == {"refused", "read"}


def test_damaged_gzip(tmp_path):
    random = np.random.default_rng(1)
    content = gzip.compress(json.dumps(seed_document(random)).encode(), mtime=0)
    refused = 0
    for number in range(200):
        damaged = bytearray(content[: int(random.integers(1, len(content) + 1))])
        damaged[int(random.integers(len(damaged)))] ^= 1 << int(random.integers(8))
        path = tmp_path / f"{number}.json.gz"
        path.write_bytes(bytes(damaged))
        try:
            read_problem(path)
        except ProblemError:
            refused += 1
    assert refused > 150


def test_the_builder_takes_any_float_but_nan():
    builder = ProblemBuilder()
    builder.add_node(np.array([1e308]))
    builder.add_node(np.array([1e308]))
    with pytest.raises(ProblemError, match="overflows"):
        builder.build()
