"""Layout problems and solutions as JSON files of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism
(IOPDDL).

A problem file holds ``problem.nodes.intervals`` (half-open, one per node), ``.costs`` and ``.usages`` (one list per
node), ``problem.edges.nodes`` (pairs) and ``.costs`` (row-major over the two nodes' strategies), and optionally
``problem.usage_limit`` and ``problem.name``. A solution file is a list of strategy indices. Source:
github.com/google/iopddl.

Two extensions, written only where needed: a node with several pieces carries ``problem.nodes.extra_intervals`` and
``extra_usages`` (lists per node), and a float64 problem stores its costs as numbers with the string
``"inf"`` where forbidden.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from sbp.errors import ProblemError
from sbp.planner.problem import FORBIDDEN_INTEGER, Problem, ProblemBuilder, checked_choice
from sbp.wording import counted


def read_problem(path: str | Path) -> Problem:
    """Read a ``.json`` or ``.json.gz`` problem.

    Raises
    ------
    ProblemError
        Naming the file and the field, for anything malformed.
    """
    path = Path(path)
    try:
        return problem_from_json(_content(path))
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def write_problem(problem: Problem, path: str | Path) -> None:
    """Write a problem; ``.gz`` in the name compresses it. Reading it back gives the same arrays up to the order of
    tables."""
    _write(Path(path), problem_to_json(problem))


def read_solution(path: str | Path, problem: Problem) -> np.ndarray:
    """Read a list of strategy indices (or an object with a ``choice`` list) and check it against the problem."""
    path = Path(path)
    try:
        data = _parsed(_content(path))
        if isinstance(data, dict):
            data = _member(data, "choice", "solution", list)
        if not isinstance(data, list):
            raise ProblemError(f"solution: expected a list of strategy indices, found {_kind(data)}")
        for position, value in enumerate(data):
            if type(value) is not int or abs(value) >= 2**62:
                raise ProblemError(f"solution[{position}]: expected a strategy index, found {_shown(value)}")
        return checked_choice(problem, np.array(data, np.int64))
    except ProblemError as error:
        raise ProblemError(f"{path}: {error}") from None


def write_solution(choice, path: str | Path) -> None:
    """Write a list of strategy indices."""
    import orjson

    _write(Path(path), orjson.dumps(np.asarray(choice, np.int64).tolist()))


def problem_from_json(content: bytes) -> Problem:
    """The problem in a JSON document."""
    data = _parsed(content)
    if not isinstance(data, dict):
        raise ProblemError(f"expected an object with the key 'problem', found {_kind(data)}")
    root = _member(data, "problem", "the document", dict)
    nodes = _member(root, "nodes", "problem", dict)
    edges = root.get("edges", {"nodes": [], "costs": []})
    if not isinstance(edges, dict):
        raise ProblemError(f"problem.edges: expected an object, found {_kind(edges)}")
    name = root.get("name", "")
    builder = ProblemBuilder(name if isinstance(name, str) else "")
    costs = _member(nodes, "costs", "problem.nodes", list)
    intervals = _aligned(nodes, "intervals", len(costs), "problem.nodes")
    usages = _aligned(nodes, "usages", len(costs), "problem.nodes")
    extra_intervals = (
        _aligned(nodes, "extra_intervals", len(costs), "problem.nodes") if "extra_intervals" in nodes else None
    )
    extra_usages = _aligned(nodes, "extra_usages", len(costs), "problem.nodes") if extra_intervals is not None else None
    if not costs:
        raise ProblemError("problem.nodes.costs: the problem has no nodes")
    sizes = []
    for node, values in enumerate(costs):
        array = _costs(values, f"problem.nodes.costs[{node}]")
        if not array.size:
            raise ProblemError(f"problem.nodes.costs[{node}]: a node needs at least one strategy")
        sizes.append(array.size)
        builder.add_node(array)
        _add_usage(builder, node, array.size, intervals[node], usages[node], f"[{node}]", "")
        if extra_intervals is not None and extra_usages is not None:
            if not isinstance(extra_intervals[node], list) or not isinstance(extra_usages[node], list):
                raise ProblemError(f"problem.nodes.extra_intervals[{node}]: expected lists of pieces")
            if len(extra_intervals[node]) != len(extra_usages[node]):
                raise ProblemError(
                    f"problem.nodes.extra_usages[{node}]: {len(extra_usages[node])} pieces, "
                    f"expected {len(extra_intervals[node])}"
                )
            for piece, (interval, usage) in enumerate(zip(extra_intervals[node], extra_usages[node])):
                _add_usage(builder, node, array.size, interval, usage, f"[{node}][{piece}]", "extra_")
    ends = _member(edges, "nodes", "problem.edges", list)
    tables = _aligned(edges, "costs", len(ends), "problem.edges")
    for edge, (pair, table) in enumerate(zip(ends, tables)):
        where = f"problem.edges.nodes[{edge}]"
        if not isinstance(pair, list) or len(pair) != 2 or any(type(end) is not int for end in pair):
            raise ProblemError(f"{where}: expected two node indices, found {_shown(pair)}")
        first, second = pair
        for end in pair:
            if not 0 <= end < len(sizes):
                raise ProblemError(f"{where}: node {_shown(end)} is out of range; there are {len(sizes)} nodes")
        if first == second:
            raise ProblemError(f"{where}: an edge from node {first} to itself; put its diagonal on the node")
        array = _costs(table, f"problem.edges.costs[{edge}]")
        if array.size != sizes[first] * sizes[second]:
            raise ProblemError(
                f"problem.edges.costs[{edge}]: {counted(array.size, 'entry', 'entries')}, expected "
                f"{sizes[first]} x {sizes[second]} = {sizes[first] * sizes[second]} for nodes {first} and {second}"
            )
        builder.add_edge(first, second, array.reshape(sizes[first], sizes[second]))
    limit = root.get("usage_limit")
    if limit is not None and (type(limit) is not int or not 0 <= limit < 2**63):
        raise ProblemError(
            f"problem.usage_limit: expected an integer from 0 to 2**63 - 1 or null, found {_shown(limit)}"
        )
    return builder.build(limit)


def problem_to_json(problem: Problem) -> bytes:
    """The problem as a JSON document."""
    import orjson

    def values(array: np.ndarray) -> list:
        if problem.is_integer:
            return array.tolist()
        return [value if np.isfinite(value) else "inf" for value in array.tolist()]

    count = problem.node_count
    first: list[tuple[list[int], list[int]] | None] = [None] * count
    extra: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(count)]
    for piece, node in enumerate(problem.piece_nodes.tolist()):
        entry = (
            problem.piece_intervals[piece].tolist(),
            problem.piece_usages[problem.piece_offsets[piece] : problem.piece_offsets[piece + 1]].tolist(),
        )
        if first[node] is None:
            first[node] = entry
        else:
            extra[node].append(entry)
    nodes: dict[str, Any] = {
        "intervals": [entry[0] if entry else [0, 0] for entry in first],
        "costs": [values(problem.node_costs(node)) for node in range(count)],
        "usages": [entry[1] if entry else [0] * problem.strategies(node) for node, entry in enumerate(first)],
    }
    if any(extra):
        nodes["extra_intervals"] = [[entry[0] for entry in entries] for entries in extra]
        nodes["extra_usages"] = [[entry[1] for entry in entries] for entries in extra]
    root: dict[str, Any] = {
        "name": problem.name,
        "nodes": nodes,
        "edges": {
            "nodes": problem.edge_nodes.tolist(),
            "costs": [values(problem.table(edge).ravel()) for edge in range(problem.edge_count)],
        },
    }
    if problem.usage_limit is not None:
        root["usage_limit"] = problem.usage_limit
    return orjson.dumps({"problem": root})


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ProblemError("no such file") from None
    except OSError as error:
        raise ProblemError(f"cannot be read ({error.strerror or error})") from None
    if content[:2] == b"\x1f\x8b":
        try:
            return gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ProblemError(f"the gzip data is damaged or truncated ({error})") from None
    return content


def _write(path: Path, content: bytes) -> None:
    # Without a time stamp, so that equal problems give equal files.
    path.write_bytes(gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)


def _parsed(content: bytes) -> Any:
    import orjson

    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ProblemError(f"not valid JSON: {error}") from None


def _member(data: dict, key: str, where: str, kind: type) -> Any:
    if key not in data:
        raise ProblemError(f"{where}: the key '{key}' is missing")
    if not isinstance(data[key], kind):
        expected = "a list" if kind is list else "an object"
        raise ProblemError(f"{where}.{key}: expected {expected}, found {_kind(data[key])}")
    return data[key]


def _aligned(data: dict, key: str, count: int, where: str) -> list:
    values = _member(data, key, where, list)
    if len(values) != count:
        raise ProblemError(f"{where}.{key}: {counted(len(values), 'entry', 'entries')}, expected {count}")
    return values


def _costs(values: Any, where: str) -> np.ndarray:
    """A list of costs; integers beyond 10**18 (as many as Python can hold) and the string "inf" mean forbidden."""
    if not isinstance(values, list):
        raise ProblemError(f"{where}: expected a list of numbers, found {_kind(values)}")
    array = _fast_array(values)
    if array is not None:
        if array.dtype.kind == "f":
            bad = np.flatnonzero(np.isnan(array) | np.isneginf(array))
            if bad.size:
                raise ProblemError(f"{where}[{int(bad[0])}]: {_shown(values[int(bad[0])])} is not a cost")
        elif array.size and int(array.min()) <= -FORBIDDEN_INTEGER:
            raise ProblemError(f"{where}[{int(array.argmin())}]: {int(array.min())} is below -10**18")
        return array
    numbers: list[int | float] = []
    for position, value in enumerate(values):
        if value == "inf" and isinstance(value, str):
            numbers.append(float("inf"))
        elif type(value) is int:
            if value <= -FORBIDDEN_INTEGER:
                raise ProblemError(f"{where}[{position}]: {_shown(value)} is below -10**18")
            numbers.append(min(value, FORBIDDEN_INTEGER))
        elif type(value) is float and value > -FORBIDDEN_INTEGER:
            # orjson reads integers beyond 64 bits as floats
            numbers.append(value)
        else:
            raise ProblemError(f"{where}[{position}]: expected a number, found {_shown(value)}")
    if any(type(number) is float for number in numbers):
        if all(
            type(number) is int or number >= FORBIDDEN_INTEGER or number == float("inf") for number in numbers
        ) and all(value != "inf" for value in values):
            return np.array([FORBIDDEN_INTEGER if type(number) is float else number for number in numbers], np.int64)
        return np.array([float("inf") if number >= FORBIDDEN_INTEGER else float(number) for number in numbers])
    return np.array(numbers, np.int64)


def _fast_array(values: list) -> np.ndarray | None:
    """The list as int64 or float64 if NumPy sees nothing but plain numbers of one kind in it, else None."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            return np.array(values, np.int64)
        except OverflowError:
            return None
    if kinds == {float}:
        array = np.array(values, np.float64)
        return None if (array >= FORBIDDEN_INTEGER).any() else array
    return None


def _add_usage(
    builder: ProblemBuilder, node: int, size: int, interval: Any, usage: Any, place: str, prefix: str
) -> None:
    where = f"problem.nodes.{prefix}intervals{place}"
    if not isinstance(interval, list) or len(interval) != 2 or any(type(time) is not int for time in interval):
        raise ProblemError(f"{where}: expected two integers [start, stop), found {_shown(interval)}")
    start, stop = interval
    if start < 0 or stop < 0 or max(start, stop) >= 2**62:
        raise ProblemError(f"{where}: [{_shown(start)}, {_shown(stop)}) is outside 0 to 2**62")
    if stop < start:
        raise ProblemError(f"{where}: [{start}, {stop}) ends before it starts")
    field_name = f"problem.nodes.{prefix}usages{place}"
    if not isinstance(usage, list) or len(usage) != size:
        found = counted(len(usage), "entry", "entries") if isinstance(usage, list) else _kind(usage)
        raise ProblemError(f"{field_name}: expected {size} integers (bytes), one per strategy, found {found}")
    if set(map(type, usage)) != {int}:
        wrong = next(position for position, value in enumerate(usage) if type(value) is not int)
        raise ProblemError(f"{field_name}[{wrong}]: expected an integer (bytes), found {_shown(usage[wrong])}")
    if min(usage) < 0 or max(usage) >= 2**62:
        wrong = next(position for position, value in enumerate(usage) if not 0 <= value < 2**62)
        raise ProblemError(f"{field_name}[{wrong}]: {_shown(usage[wrong])} is outside 0 to 2**62")
    builder.add_usage(node, start, stop, np.array(usage, np.int64))


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
