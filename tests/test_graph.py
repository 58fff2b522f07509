"""Graphs: what the builder makes, JSON both ways, and messages that name node, value and shapes."""

import json
from dataclasses import replace

import numpy
import pytest

from sbp.errors import GraphError
from sbp.graph import Graph, Initial, Node, Value
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder, current_builder


def small_graph():
    """A layer with a state that is counted: x (4, 6) @ w (6, 2), tanh; steps + 1."""
    builder = GraphBuilder("small")
    with builder:
        x = builder.source("x", TensorType((4, 6), "f32"))
        w = builder.source("w", TensorType((6, 2), "f32"), "parameter", Initial("normal", (0.0, 0.02)))
        steps = builder.source("steps", TensorType((), "f32"), "buffer", Initial("zeros", ()))
        with builder.scope("layer"):
            y = ops.tanh(x @ w)
        builder.update(steps, steps + 1)
    return builder.finish([y])


def test_structure():
    graph = small_graph()
    assert graph.sources == ("x", "w", "steps")
    assert (graph.inputs, graph.state, graph.parameters) == (("x",), ("w", "steps"), ("w",))
    assert [node.name for node in graph.nodes] == ["layer.matmul", "layer.tanh", "shift"]
    assert [node.module for node in graph.nodes] == ["layer", "layer", ""]
    assert graph.producers["layer.tanh"] == (1, 0) and "x" not in graph.producers
    assert graph.consumers["x"] == ((0, 0),) and graph.consumers["layer.tanh"] == ()
    assert graph.outputs == ("layer.tanh",) and graph.updates == {"steps": "shift"}
    assert graph.types(["x", "layer.tanh"]) == (TensorType((4, 6), "f32"), TensorType((4, 2), "f32"))
    assert graph.rule(graph.nodes[0]).output_shapes() == ((4, 2),)
    assert str(graph) == "graph small: 3 sources, 3 nodes, 1 parameter"


def test_a_value_read_twice_by_one_node_is_consumed_twice():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((3,), "f32"))
    graph = builder.finish([x * x])
    assert graph.consumers["x"] == ((0, 0), (0, 1))


def test_networkx():
    found = small_graph().to_networkx()
    assert set(found.nodes) == {"x", "w", "steps", "layer.matmul", "layer.tanh", "shift"}
    assert found.edges["layer.matmul", "layer.tanh", 0] == {"value": "layer.matmul"}
    assert found.nodes["w"]["kind"] == "parameter" and found.nodes["layer.tanh"]["op"] == "tanh"


def test_json_both_ways():
    graph = small_graph()
    text = json.dumps(graph.to_json())
    again = Graph.from_json(json.loads(text))
    assert again == graph
    assert json.dumps(again.to_json()) == text, "the same graph is the same text"


def test_json_keeps_tuples_and_infinities():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((4, 6), "f32"), initial=Initial("constant", (float("-inf"),)))
    with builder:
        y = ops.shift(x.reshape(2, 2, 6), amount=float("-inf"))
    graph = builder.finish([y])
    again = Graph.from_json(json.loads(json.dumps(graph.to_json(), allow_nan=False)))
    assert again == graph
    assert again.nodes[0].attributes["shape"] == (2, 2, 6)
    assert again.nodes[1].attributes["amount"] == float("-inf")


def changed(**fields):
    """The JSON of the small graph with fields changed, by path: `nodes__0__op="tan"`; `...` removes one."""
    data = small_graph().to_json()
    for path, value in fields.items():
        *parents, last = (int(key) if key.isdecimal() else key for key in path.split("__"))
        place = data
        for key in parents:
            place = place[key]
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "not a graph of schema 1"),
        ([], "not a graph of schema 1"),
        (changed(schema=7), "not a graph of schema 1"),
        (changed(values=...), "the field 'values' is missing"),
        (changed(nodes=...), "the field 'nodes' is missing"),
        (changed(values__1__dtype=...), "value 'w': the field 'dtype' is missing"),
        (changed(values__1__dtype="f33"), "value 'w': unknown element type 'f33'"),
        (changed(values__1__shape=5), "value 'w': a field has the wrong type"),
        (changed(values__1__shape=[6, -2]), "value 'w': a shape has sizes of at least 0, got [6, -2]"),
        (changed(values__1__name="x"), "value 'x': is listed twice"),
        (changed(values__1__kind="weight"), "value 'w': kind 'weight' is none of input, parameter"),
        (changed(values__1__initial=["gauss", 0, 1]), "value 'w': its initial kind 'gauss' is none of zeros, ones"),
        (changed(nodes__0__name=...), "node 0: the field 'name' is missing"),
        (changed(nodes__0__inputs=...), "node 'layer.matmul': the field 'inputs' is missing"),
        (changed(nodes__0__attributes=[1]), "node 'layer.matmul': a field has the wrong type"),
        (changed(nodes__0__op="matmull"), "(matmull), which reads x: f32[4,6], w: f32[6,2]: unknown operator"),
        (changed(nodes__0__phase="sideways"), "node layer.matmul (matmul): its phase 'sideways' is none of"),
        (changed(nodes__2__attributes={"amont": 1}), "reads steps: f32[]: operator shift has no attribute amont"),
        (changed(nodes__0__inputs=["x", "v"]), "node layer.matmul (matmul): reads the unknown value 'v'"),
        (changed(nodes__0__inputs=["x", "layer.tanh"]), "reads 'layer.tanh' before it is made"),
        (changed(nodes__0__inputs=["x", "x"]), "x: f32[4,6]: operator matmul(f32[4,6], f32[4,6]): input 1"),
        (changed(nodes__0__inputs=["x"]), "takes 2 inputs by its rule"),
        (changed(nodes__0__outputs=["layer.matmul", "more"]), "lists 2 outputs, the operator has 1"),
        (changed(nodes__1__name="layer.matmul"), "node layer.matmul (tanh): its name is used twice"),
        (changed(nodes__1__outputs=["layer.matmul"]), "makes 'layer.matmul', which already has a value"),
        (changed(nodes__1__outputs=["new"]), "makes 'new', which is not declared"),
        (changed(values__3__shape=[2, 4]), "'layer.matmul' is declared f32[2,4], the operator makes f32[4,2]"),
        (changed(values__3__dtype="f16"), "'layer.matmul' is declared f16[4,2], the operator makes f32[4,2]"),
        (changed(outputs=["nothing"]), "graph small: output 'nothing' is never made"),
        (changed(updates={"x": "shift"}), "update 'x' -> 'shift': the first must be state"),
        (changed(updates={"steps": "nothing"}), "update 'steps' -> 'nothing'"),
        (changed(updates={"steps": "layer.tanh"}), "update 'steps': is f32[], its next value 'layer.tanh' is f32[4,2]"),
        (changed(outputs=5), "a field has the wrong type"),
    ],
)  # fmt: skip
def test_wrong_files_name_the_place(data, says):
    with pytest.raises(GraphError) as error:
        Graph.from_json(data)
    assert says in str(error.value)


def test_an_activation_that_nobody_makes():
    graph = small_graph()
    values = {**graph.values, "lost": Value("lost", TensorType((2,), "f32"))}
    with pytest.raises(GraphError, match="value 'lost' is an activation, but no node makes it"):
        replace(graph, values=values).validate()


def test_a_value_under_another_name():
    graph = small_graph()
    values = {**graph.values, "alias": Value("other", TensorType((2,), "f32"), "input")}
    with pytest.raises(GraphError, match="value 'other' is listed under the name 'alias'"):
        replace(graph, values=values).validate()


def test_the_builder_refuses_what_is_not_its_own():
    one, other = GraphBuilder("one"), GraphBuilder("other")
    x = one.source("x", TensorType((2,), "f32"))
    with pytest.raises(GraphError, match="value 'x' is declared twice"):
        one.source("x", TensorType((3,), "f32"))
    y = other.source("y", TensorType((2,), "f32"))
    with one.scope("block"), pytest.raises(GraphError) as error:
        x + y
    assert "operator add in module 'block'" in str(error.value) and "the graph being built" in str(error.value)
    with pytest.raises(GraphError, match="got ndarray"):
        ops.add(x, numpy.ones(2))
    with pytest.raises(GraphError, match="no graph is being built here"):
        current_builder()


def test_names_are_unique_and_follow_the_modules():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((4,), "f32"))
    with builder.scope("a"), builder.scope("b"):
        names = [ops.tanh(x).name, ops.tanh(x).name]
    with builder.at("backward", "a.b"):
        grad = ops.tanh(x)
    assert names == ["a.b.tanh", "a.b.tanh_1"] and grad.name == "a.b.tanh_2"
    graph = builder.finish([grad])
    assert [node.phase for node in graph.nodes] == ["forward", "forward", "backward"]
    assert graph.values["a.b.tanh_2"].kind == "gradient"


def test_several_outputs_are_named():
    builder = GraphBuilder()
    x = builder.source("x", TensorType((5, 3), "f32"))
    parts = ops.split(x, sizes=(2, 3))
    graph = builder.finish(parts)
    assert graph.outputs == ("split:0", "split:1")
    assert [graph.values[name].shape for name in graph.outputs] == [(2, 3), (3, 3)]


def test_nested_builders_are_current_in_turn():
    with GraphBuilder("outer") as outer:
        with GraphBuilder("inner") as inner:
            assert current_builder() is inner
        assert current_builder() is outer


def test_nodes_are_hashable_and_values_print():
    graph = small_graph()
    assert len(set(graph.nodes)) == 3
    assert str(graph.values["w"]) == "w: f32[6,2]"
    assert isinstance(hash(Node("n", "tanh", ("x",), ("y",), {"a": [1]})), int)
