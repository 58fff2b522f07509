"""Borders of spatial splits: what ranks fetch from neighbours, in programs of overlapping windows, planned and run."""

from dataclasses import replace
from functools import wraps
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spatial_programs import network, split_plan

from sbp.borders import fetched, rounds_of
from sbp.check_rules import check_operator
from sbp.errors import LayoutError, RuleError
from sbp.layout import Layout, Shard
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, Operator
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.physical import Box, Compute
from sbp.rule import bind, parse_rule
from sbp.runtime.verify import verify
from sbp.shards import scatter
from sbp.trial import Trial

REGISTRY_OPERATORS = [REGISTRY[name] for name in REGISTRY]


def boxes(layout, mesh, shape):
    return [layout.shard(shape, mesh.shape, place) for place in mesh.coordinates()]


@st.composite
def readings(draw):
    """A tensor in a layout, and a box for every rank that may lie anywhere in the split dimensions."""
    mesh = Mesh(draw(st.sampled_from([(2,), (3,), (5,), (2, 2), (3, 2)])))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 4)))
    layout = Layout.parse(", ".join(draw(st.sampled_from(["S(0)", "S(1)", "B"])) for _ in mesh.shape))
    held = boxes(layout, mesh, shape)
    split = {sbp.axis for sbp in layout if str(sbp) != "B"}
    read = []
    for shard in held:
        offset, size = list(shard.offset), list(shard.shape)
        for dimension in split:
            offset[dimension] = draw(st.integers(0, shape[dimension]))
            size[dimension] = draw(st.integers(0, shape[dimension] - offset[dimension]))
        read.append(Shard(shape, tuple(offset), tuple(size)))
    return mesh, layout, shape, held, read


@given(readings())
@settings(max_examples=150, deadline=None)
def test_every_rank_gets_the_box_that_it_reads(case):
    mesh, layout, shape, held, read = case
    whole = numpy.arange(numpy.prod(shape)).reshape(shape)
    parts = scatter(whole, layout, mesh, numpy, None)
    for array, box in zip(fetched(numpy, parts, layout, mesh, held, read), read):
        assert numpy.array_equal(array, whole[box.slices])
    for transfers in rounds_of(layout, mesh, held, read):
        for end in ("source", "target"):
            ranks = [getattr(one, end) for one in transfers]
            assert len(set(ranks)) == len(ranks), "in a round each rank sends to one and receives from one"


def test_only_what_is_split_can_be_read_beyond_a_shard():
    mesh, layout = Mesh((2,)), Layout.parse("S(0)")
    held = boxes(layout, mesh, (4, 2))
    narrow = [Shard((4, 2), shard.offset, (2, 1)) for shard in held]
    with pytest.raises(LayoutError, match="dimension 1, which no mesh axis splits"):
        rounds_of(layout, mesh, narrow, held)


@pytest.mark.parametrize(
    "rule, message",
    [
        ("h~q -> p", "after ~ stands a dimension of the rule"),
        ("(a h~p) -> p", "only a single dimension can follow"),
        ("h~p -> p~h", "does not follow another itself"),
    ],
)
def test_a_wrong_follower_is_reported(rule, message):
    with pytest.raises(RuleError, match=message):
        parse_rule(rule)


def test_a_follower_splits_with_its_leader_and_only_with_it():
    rule = bind(parse_rule("n h~p -> n p"), [(4, 9)], {"p": 7})
    assert {str(one) for one in rule.signatures((2,))} == {"(B) -> (B)", "(S(0)) -> (S(0))", "(S(1)) -> (S(1))", "(B) -> (S(1))"}
    both = next(one for one in rule.signatures((2, 2)) if str(one) == "(S(1), S(1)) -> (S(1), S(1))")
    assert rule.local_sizes(both, (2, 2)) == {"n": 4, "h": 9, "p": 2}


def test_an_operator_that_reads_too_little_is_caught():
    """The proof has teeth: a convolution whose ranks fetch one row less than their windows cover."""
    right = REGISTRY["convolution"]

    def less(attributes, inputs, outputs):
        x, weight = right.read_boxes(attributes, inputs, outputs)
        if x.shape[2] > inputs[0].shape[2]:
            x = replace(x, shape=(*x.shape[:2], x.shape[2] - 1, *x.shape[3:]))
        return x, weight

    wrong = Operator(right.kernel, right.rule, linear="each", dtype=lambda x, *_, **__: x.dtype)
    wrong.reads(less)
    wrong.localize(right._localize)
    wrong.case("f32[1,1,6,3]", "f32[1,1,3,1]", padding=1)
    found = check_operator(wrong, (2,))
    assert {finding.signature for finding in found.unsound} == {"S(2), B -> S(2)"}


SPLITS = {(2,): "(S({0}))", (3,): "(S({0}))", (2, 2): "(S(2), S(3))", (4, 2): "(S({0}), S({0}))"}


@pytest.mark.parametrize("mesh, rows", [*product(SPLITS, (2, 3))])
def test_a_network_split_in_space_equals_the_unsharded_one(mesh, rows):
    """Forward and backward; rows of some layers are fewer than the ranks, so that shards are tiny or empty."""
    graph, wanted = network(2, 2, 9, 8), SPLITS[mesh].format(rows)
    plan = split_plan(graph, Mesh(mesh), wanted)
    registers = plan.registers
    computed = (o for o in plan.operations if isinstance(o, Compute) and o.inputs)
    split = {o.op for o in computed if str(registers[o.inputs[0]].layout) == wanted}
    assert {"convolution", "convolution_input_gradient", "max_pool2d", "avg_pool2d_backward"} <= split
    verify(graph, plan).raise_if_wrong()


@pytest.mark.parametrize("name", [op.name for op in REGISTRY_OPERATORS if op.borders])
def test_kernels_of_torch_take_the_same_borders(name):
    """The rule's signatures with torch's kernel in place of NumPy's, on the operator's own cases."""
    backend_of = pytest.importorskip("sbp.cuda.torch_backend", reason="needs torch", exc_type=ImportError)
    backend, right = backend_of.TorchBackend(), REGISTRY[name]
    kernel = backend.kernel(name, right.kernel)

    @wraps(right.kernel)
    def in_torch(xp, *arrays, **attributes):
        tensors = [backend.from_host(numpy.array(array)) for array in arrays]
        made = kernel(backend.xp, *tensors, **attributes)
        return tuple(backend.to_host(one) for one in (made if isinstance(made, (tuple, list)) else (made,)))

    other = Operator(in_torch, right.rule, outputs=right.output_names, dtype=lambda x, *_, **__: x.dtype)
    other.reads(right._reads)
    other.localize(right._localize)
    for case in right.cases:
        trial = Trial(other, case, right.infer(case.types, case.attributes), Mesh((3,)), 0)
        for signature in other.bind(case.types, case.attributes).signatures((3,)):
            assert trial.difference(signature.inputs, signature.outputs) == "", f"{case} {signature}"


def test_the_planner_splits_space_where_nothing_else_is_large():
    """One picture, few channels: only rows and columns are worth splitting, and the plan runs right."""
    graph = network(1, 16, 4096, 4096)
    plan = auto_parallel(graph, Cluster.preset("a100-80g", 1, 4), mesh=(4,), time_limit=20)
    registers, spatial = plan.physical.registers, 0
    for operation in plan.physical.operations:
        if isinstance(operation, Compute) and REGISTRY[operation.op].borders:
            layout = str(registers[operation.outputs[0]].layout)
            spatial += "S(2)" in layout or "S(3)" in layout
    assert spatial >= 3
    assert not any(isinstance(o, Box) and o.kind == "all_gather" and o.bytes > 1e6 for o in plan.physical.operations)
