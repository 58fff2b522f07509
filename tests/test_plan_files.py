"""Damaged plan and graph files: refused when they are read, with a message that names the place and the field."""

import json

import numpy as np
import pytest

from sbp.cli.main import run
from sbp.errors import GraphError, PlanError, SbpError
from sbp.graph import Graph
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.plan import Plan
from sbp.report.text import plan_text

DAMAGE = (None, "x", 1.5, -1, [], {}, True, {"a": 1}, [1], ["x"], "", 10**18)


@pytest.fixture(scope="module")
def made():
    """A plan of a GPT: embedding, attention, views, random state, an optimizer."""
    return auto_parallel("tiny-gpt2", "cpu", batch=8, mesh=(2, 2), time_limit=5)


@pytest.fixture(scope="module")
def text(made):
    return json.dumps(made.to_json())


def damaged(text, path, value):
    """The file with the field at `path` (`mesh.names.1`) replaced."""
    data = json.loads(text)
    *parents, last = (int(key) if key.isdecimal() else key for key in path.split("."))
    place = data
    for key in parents:
        place = place[key]
    place[last] = value
    return data


def refused(data, says):
    with pytest.raises(SbpError) as caught:
        Plan.from_json(data)
    message = str(caught.value)
    for words in says if isinstance(says, tuple) else (says,):
        assert words in message, message
    return message


def test_what_is_written_is_read(made, text, tmp_path):
    assert Plan.from_json(json.loads(text)).to_json() == made.to_json()
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").to_json() == made.to_json()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("mesh.names", ["x", 1.5], "mesh.names[1] must be a text, got 1.5"),
        ("mesh.names", 5, "mesh.names must be a list, got 5"),
        ("mesh.shape", [2, True], "mesh.shape[1] must be a whole number"),
        ("mesh", None, "mesh must be an object, got null"),
        ("cluster", "cpu", "cluster must be an object"),
        ("cluster.device.peak_flops_per_second", True, "peak_flops_per_second must be a mapping or a list of pairs"),
        ("cluster.device.launch_seconds", 10**400, "launch_seconds must be a finite number"),
        ("cluster.tiers.0.group_bandwidths", [[2, 1e9], ["x", 1e9]], "group_bandwidths must be a whole number"),
        ("lower_bound_seconds", 10**400, "lower_bound_seconds must be a number"),
        ("model", [], "model must be an object"),
        ("model.optimizer", "x", 'model.optimizer must be an object, got "x"'),
        ("model.optimizer", {}, "the field 'model.optimizer.kind' is missing"),
        ("model.batch", -1, "model.batch must be a whole number of at least 1, got -1"),
        ("memory_limit_bytes", "x", "memory_limit_bytes must be a whole number"),
        ("memory_limit_bytes", 1.5, "memory_limit_bytes must be a whole number"),
        ("lower_bound_seconds", -0.5, "lower_bound_seconds must be a number of at least 0, got -0.5"),
        ("lower_bound_seconds", "0", "lower_bound_seconds must be a number"),
        ("lower_bound_seconds", 1e19, "undercuts its own bound"),
        ("objective_seconds", "x", "objective_seconds must be a number"),
        ("objective_seconds", [], "objective_seconds must be a number"),
        ("tried", "", "tried must be a list"),
        ("tried", [{}], "the field 'tried[0].objective_seconds' is missing"),
        ("tried.0.outcome", 1, "tried[0].outcome must be a text"),
        ("pins", [], "pins must be an object"),
        ("pins", {"x": 1}, "pins.x must be a text"),
        ("status", "perfect", "status must be one of"),
        ("reason", None, "reason must be a text"),
        ("signatures", [], "signatures must be an object"),
        ("sources", {"tokens": "Q"}, "sources.tokens: "),
        ("graph.name", {}, "graph file: a field has the wrong type: name must be a text, got {}"),
        ("graph.outputs", [1], "outputs[0] must be a text"),
        ("graph.updates", {"tokens": 1}, "updates.tokens must be a text"),
        ("graph.values.0", 3, "graph file, value 0: a field has the wrong type: the whole must be an object"),
        ("graph.values.0.initial", ["normal"], "initial must be a list of 'normal' and 2 numbers"),
        ("graph.values.0.initial", ["normal", "a", "b"], 'initial[1] must be a number, got "a"'),
        ("graph.values.0.initial", [], "initial must be a list of a kind and its parameters"),
        ("graph.values.0.dtype", ["f32"], "dtype must be a text"),
        ("graph.values.0.shape", [1.5], "shape[0] must be a whole number"),
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_kind_is_named(text, path, value, says):
    message = refused(damaged(text, path, value), says)
    assert "object has no" not in message and "NoneType" not in message


@pytest.mark.parametrize(
    ("op", "attribute", "value", "expected"),
    [
        ("embedding", "offset", None, "must be a number, got null"),
        ("embedding", "offset", "x", "must be a number"),
        ("attention", "offset", None, "must be a number, got null"),
        ("attention", "causal", [], "must be a number"),
        ("slice", "starts", None, "must be a list, got null"),
        ("reshape", "shape", "x", 'must be a list, got "x"'),
        ("reshape", "shape", {"a": 1}, 'must be a number, a text, true, false, null or a list of these'),
        ("adamw_update", "lr", [1], "must be a number, got [1]"),
        ("permute", "order", ["x", "y", "z", "u"], "must be a list"),
    ],
)  # fmt: skip
def test_attributes_are_what_their_operator_takes(text, op, attribute, value, expected):
    nodes = json.loads(text)["graph"]["nodes"]
    at = next((index for index, node in enumerate(nodes) if node["op"] == op), None)
    assert at is not None, f"the model of this test has no {op}"
    message = refused(damaged(text, f"graph.nodes.{at}.attributes.{attribute}", value), expected)
    assert f"node {nodes[at]['name']!r}" in message and f"attributes.{attribute} " in message


def test_a_rule_that_trips_over_an_attribute_names_node_operator_and_attributes(text):
    nodes = json.loads(text)["graph"]["nodes"]
    at = next(index for index, node in enumerate(nodes) if node["op"] == "reshape")
    shape = [1.5, *nodes[at]["attributes"]["shape"][1:]]
    message = refused(damaged(text, f"graph.nodes.{at}.attributes.shape", shape), "reshape")
    assert nodes[at]["name"] in message


def test_random_damage_is_refused_or_harmless(text):
    """Any field replaced by anything: either a message, or a plan that prints."""
    generator = np.random.default_rng(0)

    def paths(value, path=()):
        yield path
        if isinstance(value, (dict, list)):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from paths(value[key], (*path, key))

    every = [path for path in paths(json.loads(text)) if path]
    refusals = 0
    for index in generator.permutation(len(every))[:60]:
        data = json.loads(text)
        *parents, last = every[index]
        place = data
        for key in parents:
            place = place[key]
        place[last] = DAMAGE[generator.integers(len(DAMAGE))]
        try:
            plan_text(Plan.from_json(data))
        except SbpError:
            refusals += 1
    assert refusals > 30


# -- what the file claims ----------------------------------------------------------------------------------------------


def test_a_bound_above_the_plan_is_refused(made, text):
    refused(damaged(text, "lower_bound_seconds", made.objective_seconds * 1.001), ("undercuts", "lower_bound_seconds"))
    kept = Plan.from_json(damaged(text, "lower_bound_seconds", made.objective_seconds * 0.5))
    assert kept.gap == pytest.approx(0.5)


def test_the_stated_objective_is_the_one_of_the_plan(made, text):
    for factor in (0.5, 1 + 1e-6):
        changed = damaged(text, "objective_seconds", made.objective_seconds * factor)
        refused(changed, ("objective_seconds", repr(made.objective_seconds)))
    assert Plan.from_json(damaged(text, "objective_seconds", made.objective_seconds * (1 + 1e-12)))


def test_a_cost_model_of_the_users_prices_anew(made, text):
    """The file's figures hold under the model it was made with; another one may cost less than the file's bound."""
    faster = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
    loaded = Plan.from_json(json.loads(text), AnalyticCostModel(faster))
    assert loaded.objective_seconds < made.objective_seconds


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"format": "sbp-plan", "sch', "is not a complete JSON file"),
        (b"", "is not a complete JSON file"),
        (b"\x7fELF\x02\x01\x80\xff", "is not JSON"),
        (b'{"lower_bound_seconds": Infinity}', "is not JSON"),
        (b"{} {}", "is not JSON"),
        (b"[1, 2]", "this is not a plan"),
    ],
)
def test_files_that_are_no_plan(content, says, tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=says):
        Plan.load(path)
    assert run(["report", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_an_empty_path_is_called_empty(made):
    with pytest.raises(PlanError, match="the path of the plan file is empty"):
        Plan.load("")
    with pytest.raises(PlanError, match="the path of the plan file to write is empty"):
        made.save("")


def test_graph_files_are_read_by_the_same_rules(text):
    graph = json.loads(text)["graph"]
    assert Graph.from_json(graph).to_json() == graph
    with pytest.raises(GraphError, match=r"graph file: the field 'values' is missing"):
        Graph.from_json({key: item for key, item in graph.items() if key != "values"})
