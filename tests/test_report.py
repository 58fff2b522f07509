"""Reports: what they say adds up to the plan's own figures, and text, HTML and figures show all of it."""

import itertools
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from sbp.errors import PlanError
from sbp.graph import Graph, Node, Value
from sbp.layout import Layout, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.cluster import Cluster
from sbp.planner.decisions import Decisions, random_decisions
from sbp.planner.physical import Box, Compute
from sbp.planner.plan import Plan, Tried
from sbp.planner.solver import Status
from sbp.planner.workload import workload
from sbp.report import figures, html, text
from sbp.report.layouts import layout_rows
from sbp.report.naming import grouped_names
from sbp.report.summary import summarize, to_json
from sbp.report.tables import table
from sbp.report.units import bytes_text, count_text, seconds_text, share_text
from sbp.rule import Signature
from sbp.wording import counted


def random_plan(model="tiny-gpt2", mesh=(2, 2), seed=0):
    """A legal plan without a solver: what it costs does not matter here."""
    mesh = Mesh(mesh, ("dp", "tp")[: len(mesh)])
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=mesh.size)
    step = workload(model, mesh.size, batch=8)
    return Plan(
        step.graph,
        cluster,
        mesh,
        random_decisions(step.graph, mesh, seed),
        Status.FEASIBLE,
        0.0,
        memory_limit=cluster.device.usable_memory_bytes,
        model=step.model,
        tried=(Tried(mesh, 1.0, 0.5, "feasible"), Tried(Mesh(mesh.size), None, None, "nothing fits")),
    )


@pytest.fixture(scope="module")
def plan():
    return random_plan()


@pytest.fixture(scope="module")
def summary(plan):
    return summarize(plan)


# -- numbers and names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (lambda number: counted(number, "node"), 1, "1 node"),
        (lambda number: counted(number, "node"), 1234, "1,234 nodes"),
        (seconds_text, 1.2345, "1.23 s"),
        (seconds_text, 0.0123456, "12.3 ms"),
        (seconds_text, 0.99996, "1.00 s"),
        (seconds_text, 4.5e-6, "4.50 us"),
        (seconds_text, 3e-9, "3.00 ns"),
        (seconds_text, 0.0, "0"),
        (seconds_text, None, "-"),
        (seconds_text, math.inf, "inf"),
        (bytes_text, 0, "0 B"),
        (bytes_text, 1023, "1023 B"),
        (bytes_text, 1536, "1.50 KiB"),
        (bytes_text, 80 * 2**30, "80.0 GiB"),
        (bytes_text, 123 * 2**20, "123 MiB"),
        (bytes_text, None, "-"),
        (count_text, 124_439_808, "124 M"),
        (count_text, 999, "999"),
        (count_text, 1.75e11, "175 G"),
    ],
)
def test_numbers(function, value, expected):
    assert function(value) == expected


def test_shares():
    assert share_text(1, 4) == "25.0 %"
    assert share_text(1, 0) == "-"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], []),
        (["a"], ["a"]),
        ([""], [""]),
        (["h.0.w", "h.1.w", "h.2.w"], ["h.{0..2}.w"]),
        (["h.0.w", "h.1.w"], ["h.{0,1}.w"]),
        (["h.0.w", "b", "h.4.w", "h.2.w", "h.1.w"], ["h.{0..2,4}.w", "b"]),
        (["l.0.1", "l.0.2", "l.1.1", "l.1.2"], ["l.{0,1}.{1,2}"]),
        (["l.0.1", "l.0.2", "l.1.1"], ["l.0.{1,2}", "l.1.1"]),
        (["layer1.0.w", "layer2.0.w"], ["layer1.0.w", "layer2.0.w"]),
    ],
)
def test_names_of_equal_layers(names, expected):
    assert grouped_names(names) == expected


def expanded(pattern):
    """The names that a pattern stands for."""
    parts = []
    for piece in re.split(r"(\{[^}]*\})", pattern):
        if not piece.startswith("{"):
            parts.append([piece])
            continue
        numbers = []
        for run in piece[1:-1].split(","):
            first, _, last = run.partition("..")
            numbers += range(int(first), int(last or first) + 1)
        parts.append([str(number) for number in numbers])
    return {"".join(choice) for choice in itertools.product(*parts)}


def test_patterns_stand_for_exactly_the_names():
    generator = np.random.default_rng(0)
    for _ in range(200):
        names = {
            ".".join(
                ["x", *map(str, generator.integers(0, 4, generator.integers(0, 4))), str(generator.choice(["w", "b"]))]
            )
            for _ in range(generator.integers(1, 25))
        }
        patterns = grouped_names(sorted(names))
        found = [name for pattern in patterns for name in expanded(pattern)]
        assert sorted(found) == sorted(names)


# -- the summary -----------------------------------------------------------------------------------------------------


def test_time_adds_up(plan, summary):
    total = sum(row.seconds for row in summary.time)
    assert total == pytest.approx(plan.objective_seconds, rel=1e-12)
    assert sum(row.count for row in summary.time) == len(plan.physical.operations)
    for axis in plan.mesh.names:
        along = sum(row.seconds for row in summary.time if row.name.startswith(f"{axis}: "))
        assert along == pytest.approx(plan.cost.boxing_seconds[axis], rel=1e-12)
    rest = sum(row.seconds for row in summary.time if row.kind != "collective")
    assert rest == pytest.approx(plan.cost.compute_seconds, rel=1e-12)
    assert summary.step_seconds == pytest.approx(summary.compute_seconds + summary.exposed_seconds, rel=1e-12)


def test_costs_add_up(plan, summary):
    operations = plan.physical.operations
    assert sum(item.count for item in summary.operators) == sum(isinstance(item, Compute) for item in operations)
    assert sum(item.flops for item in summary.operators) == pytest.approx(plan.cost.flops, rel=1e-12)
    assert sum(item.count for item in summary.boxing) == sum(isinstance(item, Box) for item in operations)
    assert sum(item.bytes for item in summary.boxing) == sum(item.bytes for item in plan.boxing)
    for rows in (summary.operators, summary.boxing):
        assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)


def test_memory_adds_up(plan, summary):
    memory = dict(summary.memory_bytes)
    peak, limit, reserved = (memory.pop(name) for name in ("peak", "limit", "reserved"))
    assert sum(memory.values()) == peak == plan.memory_profile.peak_bytes
    assert limit == plan.memory_limit and reserved == plan.cluster.device.reserved_memory_bytes


def test_every_source_has_one_row(plan):
    rows = layout_rows(plan)
    members = [name for row in rows for name in row.members]
    optimizer = [name for name in plan.graph.sources if plan.graph.values[name].kind == "optimizer"]
    owned = [name for name in optimizer if any(name.startswith(f"{p}.") for p in plan.graph.parameters)]
    assert sorted(members + owned) == sorted(plan.graph.sources)
    for row in rows:
        assert expanded(row.names) == set(row.members)
        assert {str(plan.layouts[name]) for name in row.members} == {row.stored}
        local = Layout.parse(row.stored).local_shape(plan.graph.values[row.members[0]].shape, plan.mesh.shape)
        size = plan.graph.values[row.members[0]].type.bytes // max(
            1, math.prod(plan.graph.values[row.members[0]].shape)
        )
        assert row.bytes == row.count * size * math.prod(local)


def hand_plan(weight, product):
    """One product x (8, 6) of w (4, 6) -> (8, 4) in bf16 on two ranks: everything about it is known."""
    kind = {"x": ((8, 6), "input"), "w": ((4, 6), "parameter"), "y": ((8, 4), "activation")}
    values = {name: Value(name, TensorType(shape, "bf16"), role) for name, (shape, role) in kind.items()}
    graph = Graph("hand", values, (Node("y", "linear", ("x", "w"), ("y",)),), ("y",)).validate()
    layouts = {"x": Layout.parse("B"), "w": Layout.parse(weight), "y": Layout.parse(product)}
    used = Layout.parse("S(0)") if product == "S(1)" else Layout.parse("B")
    decisions = Decisions(
        {"x": layouts["x"], "w": layouts["w"]},
        {"y": Signature((layouts["x"], used), (layouts["y"],))},
        {"y": layouts["y"]},
    )
    mesh = Mesh((2,), ("tp",))
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    return Plan(graph, cluster, mesh, decisions.check(graph, mesh), Status.FEASIBLE, 0.0)


def test_utilisation_of_a_product_done_twice():
    plan = hand_plan("B", "B")
    summary = summarize(plan)
    ideal = 2 * 8 * 6 * 4 / plan.cluster.device.peak("bf16")
    assert summary.flops == 2 * 8 * 6 * 4
    assert summary.utilisation == pytest.approx(ideal / plan.cost.step_seconds, rel=1e-12)
    assert summary.model_utilisation == pytest.approx(summary.utilisation / 2, rel=1e-12)


def test_utilisation_of_a_product_done_once():
    summary = summarize(hand_plan("S(0)", "S(1)"))
    assert summary.flops == 8 * 6 * 4
    assert summary.model_utilisation == pytest.approx(summary.utilisation, rel=1e-12)


def test_stored_and_used_layouts():
    (row, _) = layout_rows(hand_plan("S(0)", "B"))
    assert (row.names, row.stored, row.forward, row.backward, row.bytes) == ("w", "(S(0))", ("(B)",), (), 2 * 6 * 2)
    (row, _) = layout_rows(hand_plan("S(0)", "S(1)"))
    assert (row.stored, row.forward) == ("(S(0))", ("(S(0))",))


def test_json_is_complete_and_repeats(plan):
    import orjson

    data = to_json(plan)
    needed = {"status", "objective_seconds", "lower_bound_seconds", "gap", "step_seconds"}
    assert needed | {"memory_bytes", "mesh", "layouts"} <= set(data)
    assert data["layouts"] == {name: str(layout) for name, layout in plan.layouts.items()}
    assert set(data["layouts"]) == set(plan.graph.values)
    assert orjson.dumps(data) == orjson.dumps(to_json(random_plan()))


# -- text ------------------------------------------------------------------------------------------------------------


def test_text_says_the_figures(plan, summary):
    printed = str(plan)
    assert "tiny-gpt2: training step, batch 8" in printed
    assert "mesh(dp=2, tp=2)" in printed and "a100-80g" in printed
    assert seconds_text(summary.step_seconds) in printed
    assert bytes_text(summary.memory_bytes["peak"]) in printed
    assert "f32[24,16]" in printed, "brackets are no markup"
    assert max(map(len, printed.splitlines())) <= text.WIDTH


def test_report_lists_everything(plan, summary):
    printed = text.report_text(plan, top=10_000)
    joined = "".join(printed.split())
    for row in summary.layouts:
        assert "".join(row.names.split()) in joined
    assert f"({len(summary.operators)}of{len(summary.operators)})" in joined
    assert "nothing fits" in printed
    assert len(text.report_text(plan, top=1).splitlines()) < len(printed.splitlines())


@pytest.mark.parametrize(("status", "word"), [(Status.OPTIMAL, "optimal"), (Status.FEASIBLE, "gap 100.00%")])
def test_headline_says_what_is_proven(status, word):
    from dataclasses import replace

    plan = random_plan("tiny-mlp", (2,))
    bound = plan.objective_seconds if status is Status.OPTIMAL else 0.0
    assert word in text.proven(summarize(replace(plan, status=status, lower_bound_seconds=bound)))


def test_headline_says_when_nothing_is_split():
    whole, split = hand_plan("B", "B"), hand_plan("S(0)", "S(1)")
    for show in (str, lambda plan: " ".join(Checker(plan._repr_html_()).words)):
        assert "nothing is split: every rank holds every tensor whole and does the same work" in show(whole)
        assert "nothing is split" not in show(split)
    assert not summarize(whole).split and summarize(split).split


MESHES = {
    "optimal": ((9.0, 9.0, "optimal"), "none of the 2 meshes tried"),
    "outbid": ((None, 9.0, "stopped: its lower bound exceeds the best plan"), "none of the 2 meshes tried"),
    "infeasible": ((None, None, "the limit is 1 GiB per device"), "none of the 2 meshes tried"),
    "bounded": ((9.0, 8.0, "feasible"), "none of the 2 meshes tried"),
    "not tried": ((None, None, "not tried: the time limit passed"), "not tried for lack of time: mesh(x=3)"),
    "late": ((None, None, "no plan was found within the time limit."), "no plan found in time: mesh(x=3)"),
    "open": ((9.0, 0.0, "feasible"), "stopped with a lower bound below this plan: mesh(x=3)"),
}


@pytest.mark.parametrize("name", MESHES)
def test_headline_says_what_is_open_about_other_meshes(name):
    from dataclasses import replace

    outcome, words = MESHES[name]
    tried = Tried(Mesh(3), *outcome)
    plan = random_plan("tiny-mlp", (2,))
    assert plan.objective_seconds < 1.0
    own = Tried(plan.mesh, plan.objective_seconds, 0.0, "feasible")
    plan = replace(plan, tried=(own, tried))
    assert words in str(plan) and words in plan._repr_html_()
    assert ("1 of 2 meshes may have a better plan" in str(plan)) == ("none" not in words)
    assert "meshes" not in text.other_meshes(summarize(replace(plan, tried=(own,))))
    proven = replace(plan, status=Status.OPTIMAL, lower_bound_seconds=plan.objective_seconds)
    assert ("optimal on this mesh: " in str(proven)) == ("none" not in words)


def test_headline_names_the_model_and_its_sequence():
    from dataclasses import replace

    from sbp.models import build

    plan = random_plan("tiny-gpt2", (2,))
    assert plan.model["sequence"] is None
    assert text.what(summarize(plan)) == "tiny-gpt2: training step, batch 8, sequence 12, mixed precision, AdamW"
    step = workload(build("tiny-gpt2", layers=1, hidden=8), 2, batch=8)
    other = replace(plan, graph=step.graph, decisions=random_decisions(step.graph, plan.mesh, 0), model=step.model)
    assert text.what(summarize(other)).startswith("tiny-gpt2 with layers=1, hidden=8: training step, batch 8, ")
    again = Plan.from_json(other.to_json())
    assert text.what(summarize(again)) == text.what(summarize(other))
    widths = workload(build("tiny-mlp", widths=(4, 4)), 2, batch=8)
    other = replace(
        plan, graph=widths.graph, decisions=random_decisions(widths.graph, plan.mesh, 0), model=widths.model
    )
    assert text.what(summarize(other)).startswith("tiny-mlp with widths=4x4: training step, batch 8, mixed")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_leave_columns_out_before_they_break_names(width):
    from io import StringIO

    from rich.console import Console

    name, kind = "h.{0..11}.mlp.fc.weight", "reduce_scatter"
    columns = ("value", "!what", "!change", ">time", *(f"?>more {number}" for number in range(8)))
    row = (name, kind, "(P, S(0)) -> (B, S(0))", "700 us", *("0123456789" for _ in range(8)))
    buffer = StringIO()
    Console(file=buffer, width=width).print(table("Title", columns, [row], "note"))
    printed = buffer.getvalue()
    assert any(name in line and kind in line and "700 us" in line for line in printed.splitlines())
    assert max(map(len, printed.splitlines())) <= width
    shown, named = printed.partition("left out")[::2]
    left_out = [number for number in range(8) if f"more {number}" in named]
    assert left_out and left_out == list(range(left_out[0], 8)), "the last ones first"
    assert shown.count("0123456789") == left_out[0]


def test_tables_with_room_keep_all_columns(plan):
    assert "left out in" not in text.plan_text(plan)
    printed = text.report_text(random_plan("tiny-mlp", (2,)))
    assert "left out in" not in printed and "type" in printed


def test_an_empty_graph_has_a_report():
    graph = Graph("empty", {"x": Value("x", TensorType((4,), "f32"), "input")}, (), ("x",)).validate()
    mesh = Mesh((2,))
    layouts = {"x": Layout.parse("B")}
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = Plan(graph, cluster, mesh, Decisions(layouts, {}, layouts).check(graph, mesh), Status.OPTIMAL, 0.0)
    assert "empty" in str(plan) and "empty" in text.report_text(plan)
    assert "empty" in plan._repr_html_() and "empty" in graph._repr_html_()


def test_comparison_in_words(plan):
    from sbp.planner.baselines import Comparison, Row

    rows = (
        Row("found", plan, True),
        Row("data parallel", plan, False),
        Row("tensor parallel", None, False, "no heads"),
    )
    printed = str(Comparison(rows))
    assert "A shorter step" not in printed
    assert "1.000 x" in printed and "exceeds the memory limit" in printed and "no heads" in printed


def test_a_shorter_step_than_the_found_plans_is_said(plan):
    from dataclasses import replace

    from sbp.planner.baselines import Comparison, Row

    shorter = random_plan()
    step = plan.cost.step_seconds
    shorter.__dict__["cost"] = replace(shorter.cost, step_seconds=step / 2)
    printed = " ".join(str(Comparison((Row("found", plan, True), Row("data parallel", shorter, True)))).split())
    assert f"A shorter step than the found plan's ({seconds_text(step)}) is predicted for data parallel " in printed
    assert seconds_text(step / 2) in printed
    printed = " ".join(str(Comparison((Row("found", plan, True), Row("FSDP", shorter, False)))).split())
    assert f"FSDP ({seconds_text(step / 2)}, exceeds the memory limit)" in printed


# -- HTML ------------------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Every tag closed in order; no scripts; the words between them."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words = [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag != "script" and not any(name.startswith("on") for name, _ in attributes)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_pages_are_well_formed(plan, summary):
    words = " ".join(Checker(plan._repr_html_()).words)
    assert summary.layouts[0].names in words and seconds_text(summary.step_seconds) in words
    words = " ".join(Checker(plan.graph._repr_html_()).words)
    assert f"{len(plan.graph.nodes)} nodes" in words and "wte.weight" in words


def test_names_cannot_inject_markup():
    evil = "<script>alert(1)</script>&"
    values = {evil: Value(evil, TensorType((4,), "f32"), "input"), "y": Value("y", TensorType((4,), "f32"))}
    graph = Graph(evil, values, (Node("y", "relu", (evil,), ("y",), module=evil),), ("y",)).validate()
    mesh = Mesh((2,))
    plan = Plan(graph, Cluster.preset("cpu"), mesh, random_decisions(graph, mesh, 0), Status.FEASIBLE, 0.0)
    for page in (graph._repr_html_(), plan._repr_html_()):
        assert evil in "".join(Checker(page).words)


def test_a_large_model_makes_a_small_page():
    plan = random_plan("mlp", (2,))
    graph = workload("gpt2", 2, batch=2, sequence=16).graph
    assert len(graph._repr_html_()) < 40_000
    assert len(plan._repr_html_()) < 60_000


def test_layouts_are_chips():
    page = Layout.parse("S(0), B, P(max)")._repr_html_()
    assert [word for word in Checker(page).words if word.strip()] == ["S(0)", "B", "P(max)"]
    colours = re.findall(r"background:(#\w+)", page)
    assert len(set(colours)) == 3


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(plan):
    pytest.importorskip("plotly", reason="needs the extra viz")
    return plan.show()


def test_module_tree_adds_up(plan, drawn):
    trees = [trace for trace in drawn.layouts.data if trace.type == "treemap"]
    assert len(trees) == plan.mesh.ndim
    whole = sum(plan.graph.values[name].type.bytes for name in plan.graph.parameters)
    for tree in trees:
        sizes = dict(zip(tree.ids, tree["values"]))
        assert len(sizes) == len(tree.ids), "identities are unique, or plotly draws nothing"
        inside = dict.fromkeys(tree.ids, 0)
        for parent, size in zip(tree.parents, tree["values"]):
            if parent:
                inside[parent] += size
        assert all(total in (0, sizes[name]) for name, total in inside.items())
        assert [sizes[name] for name, parent in zip(tree.ids, tree.parents) if not parent] == [whole]


@pytest.mark.parametrize("mesh", [(4,), (2, 3), (8,)])
@pytest.mark.parametrize("kind", ["split", "any"])
def test_tensor_on_the_device_grid(mesh, kind):
    pytest.importorskip("plotly", reason="needs the extra viz")
    plan = random_plan("tiny-gpt2", mesh, seed=1)
    names = [n for n in plan.graph.sources if kind == "any" or any(isinstance(s, Split) for s in plan.layouts[n])]
    for name in names[:: max(1, len(names) // 6)]:
        figure = figures.tensor_figure(plan, name)
        cells = np.array(figure.data[0].z).reshape(-1)
        assert len(cells) == plan.mesh.size
        shape, layout = plan.graph.values[name].shape, plan.layouts[name]
        shards = [layout.shard(shape, plan.mesh.shape, place) for place in plan.mesh.coordinates()]
        for a, b in itertools.combinations(range(plan.mesh.size), 2):
            assert (cells[a] == cells[b]) == (shards[a] == shards[b])


def test_tensor_cut_into_its_boxes():
    pytest.importorskip("plotly", reason="needs the extra viz")
    plan = hand_plan("S(0)", "B")
    right = figures.tensor_figure(plan, "w").data[1]
    assert list(right.y) == [0, 2, 4] and list(right.x) == [0, 6]
    assert [list(row) for row in right.text] == [["rank 0"], ["rank 1"]]
    assert figures.tensor_figure(plan, "x").data[1].text[0][0] == "ranks 0, 1"
    with pytest.raises(PlanError, match="no value 'z'"):
        figures.tensor_figure(plan, "z")


def test_time_bars_add_up(plan, drawn):
    bars = {}
    for trace in drawn.time.data:
        bars[trace.y[0]] = bars.get(trace.y[0], 0.0) + trace.x[0]
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[drawn.time.layout.xaxis.title.text]
    assert bars["step"] * scale == pytest.approx(plan.cost.step_seconds, rel=1e-9)
    for axis, seconds in plan.cost.boxing_seconds.items():
        assert bars.get(f"collectives along {axis}", 0.0) * scale == pytest.approx(seconds, rel=1e-9)


def test_memory_curve_reaches_the_peak(plan, drawn):
    scale = {"KiB": 2**10, "MiB": 2**20}[drawn.memory.layout.yaxis.title.text]
    total = np.sum([trace.y for trace in drawn.memory.data], axis=0)
    assert total.max() * scale == pytest.approx(plan.memory.peak_bytes, rel=1e-9)


def test_long_steps_are_thinned_but_keep_their_peaks():
    generator = np.random.default_rng(3)
    total = generator.integers(0, 10**9, 50_000)
    chosen = figures._sampled(total)
    assert len(chosen) <= figures.MOST_POINTS + 2 and total[chosen].max() == total.max()
    assert chosen[0] == 0 and chosen[-1] == len(total) - 1 and (np.diff(chosen) > 0).all()
    assert list(figures._sampled(total[:10])) == list(range(10))


def test_the_page_needs_no_network(drawn, tmp_path):
    drawn.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.count("Plotly.newPlot") >= 4 and not re.search(r"<script[^>]*\ssrc=", page)
    with pytest.raises(figures.FigureError, match="cannot write"):
        drawn.save(tmp_path / "missing" / "plan.html")


def test_the_script_is_shared_or_fetched(drawn, tmp_path):
    """Several pages need plotly's script once, or not at all; the figures are the same."""
    pages = {}
    for where in figures.SCRIPTS:
        folder = tmp_path / where
        folder.mkdir()
        for name in ("one.html", "two.html"):
            drawn.save(folder / name, where)
        pages[where] = (folder / "one.html").read_text()
        assert {path.name for path in folder.iterdir()} == {"one.html", "two.html"} | (
            {"plotly.min.js"} if where == "beside" else set()
        )
        assert pages[where].count("Plotly.newPlot") >= 4 or where == "inline"
    script = (tmp_path / "beside" / "plotly.min.js").read_text(encoding="utf-8")
    assert script in pages["inline"]
    assert re.search(r'<script[^>]*\ssrc="plotly\.min\.js"', pages["beside"])
    assert re.search(r'<script[^>]*\ssrc="https://cdn\.plot\.ly/', pages["cdn"])
    assert max(len(pages["beside"]), len(pages["cdn"])) < len(pages["inline"]) - len(script) + 1000
    with pytest.raises(figures.FigureError, match="plotlyjs is one of inline, beside, cdn, got 'local'"):
        drawn.to_html("local")


def test_without_plotly_the_message_says_what_to_install(plan, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(figures.FigureError, match=r"pip install 'sbp\[viz\]'"):
        plan.show()


def test_reports_are_not_imported_with_the_package():
    program = (
        "import sbp, sys; print([m for m in ('rich', 'plotly', 'ortools', 'networkx', 'yaml') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_html_module_is_what_layouts_use():
    assert html.layout_html(Layout.parse("B")) == Layout.parse("B")._repr_html_()
