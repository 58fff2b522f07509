"""The paper says what the code does: its tables and numbers are read from the LaTeX source and recomputed."""

import math
import re
import shutil
import subprocess
from collections import defaultdict
from fractions import Fraction
from functools import cache
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest

import sbp.ops  # noqa: F401  fills the registry
from sbp.graph import Graph, Node, Value
from sbp.layout import REDUCTIONS, Broadcast, Layout, Partial, Split, chunk
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, parse_type
from sbp.planner import formulation, search
from sbp.planner.boxing import BoxingTable, is_contiguous_step, step_kind
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.decisions import random_decisions
from sbp.planner.lowering import lower
from sbp.planner.physical import COLLECTIVES, LOCAL_STEPS
from sbp.planner.solver import Status, scale, state
from sbp.planner.strategies import LEAST_FILL
from sbp.planner.timing import COMPUTE, predict_timeline
from sbp.rule import bind, parse_rule
from sbp.runtime import verify

PAPER = Path(__file__).parent.parent / "paper"
SOURCE = (PAPER / "sbp.tex").read_text(encoding="utf-8")


class UnitCosts:
    """Every step costs one second."""

    def collective_seconds(self, kind, mesh, axis, bytes):
        return 1.0


def space_of(rank: int, axes: int, reductions=("sum",)):
    return BoxingTable(Mesh((2,) * axes), UnitCosts()).space(parse_type(f"f32{[8] * rank}"), reductions)


def table(name: str) -> list[list[str]]:
    """The cells of a marked table."""
    body = re.search(rf"% table: {name}\n(.*?)% end table: {name}\n", SOURCE, re.DOTALL)
    assert body is not None, f"the paper has no table {name}"
    return [[cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\\n", body[1]) if row.strip()]


def plain(text: str) -> str:
    r"""The text of `\t{...}`."""
    match = re.fullmatch(r"\\t\{(.*)\}", text)
    assert match is not None, text
    return match[1].replace(r"\string", "").replace(r"\_", "_")


# -- single values -----------------------------------------------------------------------------------------------------


def sizes(n: int, layout: str, mesh: tuple[int, ...]) -> str:
    parts = [Layout.parse(layout).shard((n,), mesh, place).shape[0] for place in Mesh(mesh).coordinates()]
    return ", ".join(map(str, parts))


def compound(major: int, minor: int, parts: int) -> str:
    rule = bind(parse_rule("(h d) -> (h d)"), [(major * minor,)], {"d": minor})
    split = any(isinstance(signature.inputs[0][0], Split) for signature in rule.signatures((parts,)))
    return "splits" if split else "does not"


def power(number: float) -> str:
    exponent = round(math.log10(number))
    assert number == float(f"1e{exponent}")
    return f"$10^{{{exponent}}}$"


PARTS = np.array([[1, 0], [0, 1]])

VALUES = {
    "chunk 10 4": lambda: sizes(10, "S(0)", (4,)),
    "chunk 5 4": lambda: sizes(5, "S(0)", (4,)),
    "chunk 10 6": lambda: sizes(10, "S(0)", (6,)),
    "nested 10 2x3": lambda: sizes(10, "S(0), S(0)", (2, 3)),
    "sum of maxima": lambda: str(PARTS.max(axis=1).sum()),
    "maximum of sums": lambda: str(PARTS.sum(axis=0).max()),
    "layouts 2 2 1": lambda: str(len(space_of(2, 2).layouts)),
    "steps 2 2 1": lambda: str(len(space_of(2, 2)._steps)),
    "diameter 2 2 1": lambda: f"{space_of(2, 2).seconds.max():.0f}",
    "fewest (S(0), S(0)) to (B, S(0))": lambda: str(
        len(space_of(2, 2).path(Layout.parse("S(0), S(0)"), Layout.parse("B, S(0)")))
    ),
    "compound 5 2 3": lambda: compound(5, 2, 3),
    "compound 3 2 2": lambda: compound(3, 2, 2),
    "least fill": lambda: f"{LEAST_FILL:g}",
    "largest set": lambda: str(formulation.LARGEST_SET),
    "most sets": lambda: str(formulation.MOST_SETS),
    "most kept": lambda: str(formulation.MOST_KEPT),
    "agreement": lambda: power(search._AGREEMENT),
    "rounds": lambda: str(search._MEMORY_ROUNDS),
    "gap tolerance": lambda: power(state.GAP_TOLERANCE),
    "sum exponent": lambda: f"{math.log2(scale._LARGEST_SUM):g}",
    "tolerance": lambda: power(verify.verify.__kwdefaults__["rtol"]),
    "floor": lambda: f"{verify.FLOOR:g}",
}


def stated() -> dict[str, set[str]]:
    r"""Key -> what the paper states under it, from `\checked{key}{value}`; the value may hold braces one level deep."""
    found = defaultdict(set)
    for key, value in re.findall(
        r"\\checked\{([^{}]*)\}\{((?:[^{}]|\{[^{}]*\})*)\}", SOURCE.partition(r"\begin{document}")[2]
    ):
        found[key].add(value)
    return dict(found)


@pytest.mark.parametrize("key", sorted(VALUES))
def test_value(key):
    assert stated().get(key) == {VALUES[key]()}


def test_no_value_is_unchecked():
    assert stated().keys() == VALUES.keys()


# -- tables ------------------------------------------------------------------------------------------------------------

CALLS = {
    "matmul": ("f32[4,6]", "f32[6,4]"),
    "add": ("f32[4,6]", "f32[4,6]"),
    "mul": ("f32[4,6]", "f32[4,6]"),
    "relu": ("f32[4,6]",),
    "neg": ("f32[4,6]",),
    "max": ("f32[4,6]",),
    "layer_norm": ("f32[4,6]", "f32[6]", "f32[6]"),
    "embedding": ("f32[6,4]", "i64[4]"),
}
ATTRIBUTES = {"max": {"axis": 1}}


def test_rules_and_signatures():
    rows = table("rules")
    assert [plain(row[0]) for row in rows] == list(CALLS)
    for name, rule, signatures in ((plain(row[0]), plain(row[1]), row[2]) for row in rows):
        bound = REGISTRY[name].bind([parse_type(text) for text in CALLS[name]], ATTRIBUTES.get(name, {}))
        assert bound.text == rule, name
        derived = [
            f"{', '.join(str(layout[0]) for layout in signature.inputs)} -> {signature.outputs[0][0]}"
            for signature in bound.signatures((2,))
        ]
        assert re.fullmatch(r"B(, B)* -> B", derived[0])
        assert [plain(text.strip()) for text in signatures.split(";")] == derived[1:], name


def test_steps():
    kinds = {"S": Split, "B": Broadcast, "P": Partial}
    rows = [[*map(plain, row[:3]), *row[3:]] for row in table("steps")]
    listed = {(kinds[before], kinds[after]): kind for before, after, kind, _, _ in rows}
    every = [Split(0), Split(1), Broadcast(), *map(Partial, REDUCTIONS)]
    for before, after in product(every, every):
        expected = None if before == after else listed.get((type(before), type(after)))
        assert step_kind(before, after) == expected, (before, after)
    assert {row[2] for row in rows if row[3] == "collective"} == set(COLLECTIVES)
    assert {row[2] for row in rows if row[3] == "local"} == set(LOCAL_STEPS)


def traffic(text: str, members: int) -> Fraction:
    r"""The value of a cell such as `$2(m-1)/m$`."""
    formula = re.sub(r"(?<=\d)\(", "*(", text.strip("$"))
    assert re.fullmatch(r"[m\d()+*/-]+", formula), text
    return Fraction(eval(formula, {"m": Fraction(members)}))


@pytest.mark.parametrize("shape", [(8,), (2, 4), (4, 4), (2, 2, 4)])
def test_cost_of_steps(shape):
    """The paper's formulas, evaluated from the cluster's numbers and the ranks of every group."""
    nodes = math.prod(shape) // 8
    cluster = Cluster.preset("a100-80g", nodes=nodes)
    model, mesh, device = AnalyticCostModel(cluster), Mesh(shape), cluster.device
    for (kind, form, cell), axis, payload in product(
        [(plain(row[2]), row[3], row[4]) for row in table("steps")], range(mesh.ndim), (1, 1 << 12, 1 << 28)
    ):
        share = float(traffic(cell, shape[axis]))
        if form == "local":
            attained = device.memory_bandwidth_bytes_per_second * device.memory_ceiling
            expected = device.launch_seconds + share * payload / attained
        else:
            expected = max(collective(kind, cluster, group, payload, share) for group in mesh.groups(axis))
        assert model.collective_seconds(kind, mesh, axis, payload) == pytest.approx(expected, rel=1e-12), (kind, axis)
    assert model.collective_seconds("all_reduce", mesh, 0, 0) == 0.0


def collective(kind: str, cluster: Cluster, group: tuple[int, ...], payload: float, share: float) -> float:
    latency, ramp, slope = collective_terms_of(kind, cluster, group, share)
    return latency + ramp * math.sqrt(payload) + slope * payload


def collective_terms_of(kind: str, cluster: Cluster, group: tuple[int, ...], share: float) -> tuple[float, ...]:
    passes = 2 if kind == "all_reduce" else 1
    latency = ramp = slope = 0.0
    rings = inner = 1
    for tier in cluster.tiers:
        span = cluster.span(tier)
        parts = defaultdict(set)
        for rank in group:
            parts[rank // span].add(rank // inner)
        most, fewest = max(map(len, parts.values())), min(map(len, parts.values()))
        reached = max(sum(a // span == b // span and a // inner != b // inner for b in group) for a in group)
        inner = span
        if most == 1:
            continue
        crossing = reached / len(group) if kind == "all_to_all" else share / rings
        latency += tier.latency_seconds + passes * math.ceil(math.log2(most)) * tier.hop_seconds
        ramp += crossing * math.sqrt(rings) * tier.ramp_seconds_per_sqrt_byte
        slope = max(slope, crossing / tier.bandwidth(most, kind == "all_reduce"))
        rings *= fewest
    terms = latency, ramp, slope
    if len(group) <= cluster.devices_per_node < group[-1] - group[0] + 1:
        terms = tuple(map(max, terms, collective_terms_of(kind, cluster, tuple(range(len(group))), share)))
    return terms


def test_statuses():
    items = re.findall(r"\\item\[\\t\{(.*?)\}\]", "\n".join(row[0] for row in table("statuses")))
    assert items == [status.value for status in Status]


# -- statements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank, axes", [(0, 2), (1, 1), (1, 3), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("reductions", [("sum",), ("max", "sum"), REDUCTIONS])
def test_number_of_layouts(rank, axes, reductions):
    whole, more = (rank + 1) ** axes, (rank + 2) ** axes
    assert len(space_of(rank, axes, reductions).layouts) == whole + len(reductions) * (more - whole)


@pytest.mark.parametrize("rank, axes", [(1, 1), (1, 3), (2, 2), (3, 2), (2, 3)])
def test_connectivity(rank, axes):
    assert space_of(rank, axes, REDUCTIONS).seconds.max() <= 2 * axes


def cells(shard) -> set:
    return set(product(*(range(start, start + size) for start, size in zip(shard.offset, shard.shape))))


@cache
def held(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> list[set]:
    return [cells(layout.shard(shape, mesh.shape, place)) for place in mesh.coordinates()]


def within_groups(layout: Layout, axis: int, after, shape: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether the ranks of every group hold between them, box by box, what the step must give each of them."""
    before = layout[axis]
    have, want = held(layout, shape, mesh), held(layout.replace(axis, after), shape, mesh)
    for group in mesh.groups(axis):
        union = set().union(*(have[rank] for rank in group))
        for rank in group:
            if isinstance(before, Split):  # a Partial must hold what the group holds, and nothing more
                right = want[rank] == union if isinstance(after, Partial) else want[rank] <= union
            elif isinstance(before, Broadcast):
                right = want[rank] == have[rank] if isinstance(after, Partial) else want[rank] <= have[rank]
            else:  # every part is needed
                right = all(want[rank] <= have[other] for other in group)
            if not right:
                return False
    return True


@pytest.mark.parametrize("shape, mesh", [((8, 4), (2, 2)), ((8,), (2, 2, 2)), ((9, 9), (3, 3)), ((8, 8), (2, 4))])
def test_contiguity_is_necessary_and_sufficient(shape, mesh):
    mesh = Mesh(mesh)
    entries = [*map(Split, range(len(shape))), Broadcast(), Partial()]
    for axes, axis, after in product(product(entries, repeat=mesh.ndim), range(mesh.ndim), entries):
        layout = Layout(axes)
        if step_kind(layout[axis], after) is not None:
            possible = within_groups(layout, axis, after, shape, mesh)
            assert is_contiguous_step(layout, axis, after) == possible, (str(layout), axis, str(after))


def test_contiguity_is_sufficient_for_uneven_shards():
    mesh = Mesh((2, 3))
    entries = [Split(0), Split(1), Broadcast(), Partial()]
    for shape, axes, axis, after in product([(7, 5), (1, 4)], product(entries, repeat=2), range(2), entries):
        layout = Layout(axes)
        if step_kind(layout[axis], after) is not None and is_contiguous_step(layout, axis, after):
            assert within_groups(layout, axis, after, shape, mesh), (shape, str(layout), axis, str(after))


def test_compound_condition():
    for major, minor, parts in product(range(1, 9), range(1, 6), range(2, 7)):
        exact = -(-major * minor // parts) == -(-major // parts) * minor
        scaled = [(minor * start, minor * size) for start, size in (chunk(major, parts, i) for i in range(parts))]
        assert exact == (scaled == [chunk(major * minor, parts, i) for i in range(parts)])
        if major > 1:  # else the minor factor is the first that is not of size one
            assert compound(major, minor, parts) == ("splits" if exact else "does not"), (major, minor, parts)


class ArbitraryCosts:
    """Prices without structure, so that ways through a third layout and shared steps pay."""

    def collective_seconds(self, kind, mesh, axis, bytes):
        return float({"all_gather": 7, "reduce_scatter": 5, "all_reduce": 13, "all_to_all": 6}.get(kind, 2) + 3 * axis)


@pytest.mark.parametrize("costs", [UnitCosts(), ArbitraryCosts()])
def test_trees_are_cheapest(costs):
    """No set of steps that makes all targets costs less than the tree: dynamic programming over all sets of layouts."""
    space = BoxingTable(Mesh((2, 2)), costs).space(parse_type("f32[8]"))
    count = len(space.layouts)
    steps = {pair: step.seconds for pair, step in space._steps.items()}
    for root in range(count):
        best = {1 << root: 0.0}
        for have in sorted(range(1 << count), key=int.bit_count):
            for (before, after), seconds in steps.items():
                if have in best and have >> before & 1 and not have >> after & 1:
                    more = have | 1 << after
                    best[more] = min(best.get(more, math.inf), best[have] + seconds)
        for size in (1, 2, 3):
            for targets in combinations(range(count), size):
                wanted = sum(1 << target for target in targets)
                expected = min(cost for have, cost in best.items() if have & wanted == wanted)
                assert space.tree_seconds(targets)[root] == expected
                tree = space.tree(space.layouts[root], [space.layouts[target] for target in targets])
                made = {space.layouts[root], *tree}
                assert made >= {space.layouts[target] for target in targets}
                assert all(step.before in made for step in tree.values())
                assert sum(step.seconds for step in tree.values()) == expected


def test_step_time_lies_between_compute_and_objective():
    square = parse_type("f32[64,64]")
    kinds = {"x": "input", "w": "parameter", "y": "activation", "z": "activation", "g": "gradient", "n": "gradient"}
    nodes = (
        Node("matmul", "matmul", ("x", "w"), ("y",)),
        Node("relu", "relu", ("y",), ("z",)),
        Node("gradient", "linear_weight_gradient", ("z", "x"), ("g",), phase="backward"),
        Node("update", "sub", ("w", "g"), ("n",), phase="optimizer"),
    )
    values = {name: Value(name, square, kind) for name, kind in kinds.items()}
    graph = Graph("small", values, nodes, ("z",), {"w": "n"}).validate()
    mesh, model = Mesh((2, 4)), AnalyticCostModel(Cluster.preset("a100-80g", nodes=1))
    boxing = BoxingTable(mesh, model)
    overlapped = 0
    for seed in range(40):
        physical = lower(graph, mesh, random_decisions(graph, mesh, seed), model, boxing)
        timeline, objective = predict_timeline(physical), search.objective_seconds(physical)
        assert timeline.busy_seconds(COMPUTE) <= timeline.step_seconds * (1 + 1e-12)
        assert timeline.step_seconds <= objective * (1 + 1e-12)
        overlapped += timeline.step_seconds < objective * (1 - 1e-9)
    assert overlapped  # else the order of the two would say nothing


# -- the document ------------------------------------------------------------------------------------------------------


def test_every_citation_is_listed_and_every_entry_cited():
    entries = re.findall(r"^@\w+\{(\w+),", (PAPER / "references.bib").read_text(encoding="utf-8"), re.MULTILINE)
    cited = {key.strip() for group in re.findall(r"\\cite\{([^}]*)\}", SOURCE) for key in group.split(",")}
    assert len(entries) == len(set(entries))
    assert cited == set(entries)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_compiles(tmp_path):
    for name in ("sbp.tex", "references.bib", "Makefile"):
        shutil.copy(PAPER / name, tmp_path)
    run = subprocess.run(["make", "-C", str(tmp_path)], capture_output=True, text=True, errors="replace", timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    log = (tmp_path / "sbp.log").read_text(encoding="utf-8", errors="replace")
    assert not re.findall(r"(?:Reference|Citation) `.*?undefined|multiply defined", log)
    pages = re.search(r"Output written on sbp\.pdf \((\d+) pages", log)
    assert pages is not None and 3 <= int(pages[1]) <= 5
