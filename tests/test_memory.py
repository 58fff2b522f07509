"""Memory of a plan, to the byte: what the executor's ranks hold at every operation against the plan's profile."""

import dataclasses
import sys
import tracemalloc
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import mlp, random_plan

from sbp import nn
from sbp.dtype import SIZES, numpy_name
from sbp.graph import Initial
from sbp.initial import draw_all
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.models import build
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.optim import SGD
from sbp.passes.recompute import with_recompute
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.buffers import buffers_of, packing_bytes
from sbp.planner.cluster import Cluster
from sbp.planner.memory import KINDS, memory_profile
from sbp.planner.physical import Box, Compute, PhysicalPlan, Register
from sbp.planner.styles import DataParallel, FullyShardedDataParallel, Styles
from sbp.runtime.executor import Executor
from sbp.trace import GraphBuilder
from sbp.training import training_step

HELD = {dtype: numpy.dtype(numpy_name(dtype)).itemsize for dtype in SIZES}
"""Bytes of an element as NumPy holds it: bf16 lies in 32 bits."""


def held_by_ranks(physical, graph):
    """Per operation and rank the bytes of all distinct memory that the registers of the executor refer to.

    A state's next value stands for the old one whose place it takes: NumPy's kernels make it first and drop the old one
    then (out of an arena they overwrite it, see test_arena).
    """
    executor = Executor(physical, share=False)
    arrays = draw_all(graph, 0, None)
    found = []
    in_place = buffers_of(physical).in_place

    def watched(run, outputs):
        def inner(table):
            run(table)
            replaced = {in_place[number] for number in outputs if number in in_place}
            owners = [{} for _ in executor.communicator.ranks]
            for number, local in enumerate(table):
                for rank, array in ({} if number in replaced else local or {}).items():
                    owner = array if array.base is None else array.base
                    owners[rank][id(owner)] = owner.nbytes
            found.append([sum(owner.values()) for owner in owners])

        return inner

    executor._steps = [
        (watched(run, operation.outputs), released)
        for (run, released), operation in zip(executor._steps, physical.operations)
    ]
    state = executor.place({name: arrays[name] for name in graph.state})
    executor.run(state, executor.place({name: arrays[name] for name in graph.inputs}))
    return numpy.array(found)


def assert_equals_execution(physical, graph):
    held = held_by_ranks(physical, graph)
    workspace = KINDS.index("workspace")
    for rank in range(physical.mesh.size):
        profile = memory_profile(physical, rank, HELD)
        numpy.testing.assert_array_equal(held[:, rank], profile.by_kind[:workspace].sum(axis=0))
    assert held.shape[0] == len(physical.operations)


class Mixture(nn.Module):
    """A mixture of experts between linear layers, with a loss."""

    def __init__(self, hidden=6, experts=5):
        super().__init__()
        self.experts = experts
        self.inner = nn.Linear(hidden, hidden)
        self.router = nn.Linear(hidden, experts, bias=False)
        self.outer = nn.Linear(hidden, 3)
        self.expert = nn.Parameter((experts, hidden, hidden))
        self.loss = nn.MSELoss()

    def example_inputs(self, batch, sequence=None):
        normal = Initial("normal", (0.0, 1.0))
        shapes = {"x": (batch, 7, 6), "targets": (batch, 7, 3)}
        return {name: (TensorType(shape, "f32"), normal) for name, shape in shapes.items()}

    def forward(self, x, targets):
        x = self.inner(x)
        sizes = {"experts": self.experts, "capacity": 3}
        weights, chosen, slots, balance = ops.top_k_gating(self.router(x), 2, 3)
        waiting = ops.dispatch(x, ops.detach(ops.div(weights, weights)), chosen, slots, **sizes)
        done = ops.einsum(waiting, self.expert, subscripts="gecd,edh->gech")
        return self.loss(self.outer(ops.combine(done, weights, chosen, slots) + x), targets) + balance


MODELS = {
    "gpt": lambda: training_step(build("tiny-gpt2", dropout=0.1), 5, precision="f32"),
    "mixed": lambda: training_step(build("tiny-gpt2"), 4),
    "mlp": lambda: training_step(build("tiny-mlp", widths=(13, 17, 5)), 7, precision="f32"),
    "resnet": lambda: training_step(build("tiny-resnet"), 3, precision="f32"),
    "dlrm": lambda: training_step(build("tiny-dlrm"), 5, precision="f32"),
    "experts": lambda: training_step(Mixture(), 3, precision="f32"),
    "bert": lambda: training_step(build("tiny-bert"), 3, precision="f32", optimizer=SGD(momentum=0.9)),
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
@pytest.mark.parametrize("name", MODELS)
def test_profile_is_what_ranks_hold(name, recompute):
    graph = MODELS[name]()
    if recompute:
        graph = with_recompute(graph)
    for shape, seed in (((1,), 0), ((3,), 1), ((2, 2), 2)):
        assert_equals_execution(random_plan(graph, Mesh(shape), seed), graph)


ZERO = {
    "zero-1": {"*.weight": "B", "*.bias": "B", "*.exp_avg*": "S(0)"},
    "zero-3": {"*.weight": "S(0)", "*.bias": "S(0)", "*.exp_avg*": "S(0)"},
    "columns": {"layers.0.weight": "S(1)", "layers.1.weight": "S(0)"},
}


@pytest.mark.parametrize("name", ZERO)
def test_planned_states_and_odd_sizes(name):
    """Uneven shards: every rank is checked for itself, and the first one is never below another."""
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
    model = build("mlp", widths=(13, 11, 7))
    plan = auto_parallel(model, cluster, batch=9, mesh=(4,), pins=ZERO[name], precision="f32", time_limit=20)
    assert_equals_execution(plan.physical, plan.graph)
    totals = [memory_profile(plan.physical, rank).total for rank in range(4)]
    assert any((totals[0] > other).any() for other in totals[1:])
    assert all((totals[0] >= other).all() for other in totals[1:])
    numpy.testing.assert_array_equal(totals[0], plan.memory_profile.total)


@pytest.mark.parametrize("styles", [(DataParallel(),), (FullyShardedDataParallel(),)], ids=["data", "sharded"])
def test_planned_styles(styles):
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = auto_parallel(
        build("tiny-gpt2"), cluster, batch=4, mesh=(2,), precision="f32", recompute="full", time_limit=20,
        restriction=lambda graph, mesh: Styles(graph, mesh, *styles),
    )  # fmt: skip
    assert_equals_execution(plan.physical, plan.graph)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([(1,), (2,), (3,), (5,), (2, 2), (2, 3)]),
    st.integers(1, 9), st.tuples(*[st.integers(1, 9)] * 3),
)  # fmt: skip
def test_any_plan_of_any_sizes(seed, shape, batch, features):
    graph = mlp(batch, features)
    physical = random_plan(graph, Mesh(shape), seed)
    assert_equals_execution(physical, graph)
    totals = [memory_profile(physical, rank).total for rank in range(physical.mesh.size)]
    assert all((totals[0] >= other).all() for other in totals)


def test_allocator_holds_nothing_else():
    """Not the registers but the allocator is asked: arrays that something else kept alive would be found here."""
    graph = training_step(build("mlp", widths=(40, 50, 30)), 32, precision="f32", optimizer=SGD())
    physical = random_plan(graph, Mesh((1,)), 0)
    executor = Executor(physical)
    found = []
    domain = tracemalloc.DomainFilter(inclusive=True, domain=numpy.lib.tracemalloc_domain)

    def allocated():
        snapshot = tracemalloc.take_snapshot().filter_traces([domain])
        # NumPy keeps freed blocks of less than 1 KiB for itself, so only larger ones can be counted.
        return sum(trace.size for trace in snapshot.traces if trace.size >= 1024)

    def watched(run):
        def inner(table):
            found.append(allocated())
            run(table)

        return inner

    executor._steps = [(watched(run), released) for run, released in executor._steps]
    arrays = draw_all(graph, 0, None)
    tracemalloc.start()
    try:
        sources = executor.place({name: arrays[name] for name in graph.sources})
        state = {name: sources[name] for name in graph.state}
        feeds = {name: sources.pop(name) for name in graph.inputs}
        del sources
        # The caller's own references are given up, so that what a plan frees is free.
        given_state, given_feeds = _Passing(state), _Passing(feeds)
        del state, feeds
        executor.run(given_state, given_feeds)
    finally:
        tracemalloc.stop()
    sources = set(physical.sources.values())
    expected = [0] * len(physical.operations)
    for buffer in buffers_of(physical).buffers:
        size = physical.registers[buffer.registers[0]].bytes
        for at in range(buffer.start if buffer.registers[0] in sources else buffer.start + 1, buffer.stop):
            expected[at] += size if size >= 1024 else 0
    assert found == expected and max(found) > 3 * min(found) > 0


class _Passing(dict):
    """A mapping whose entries can be read once."""

    def get(self, key, default=None):
        return self.pop(key, default)


def _plan(registers, operations, sources, outputs, updates=None, mesh=None):
    mesh = mesh or Mesh((2,))
    filled = tuple(
        Register(n, f"v{n}", TensorType(shape, "f32"), Layout.parse(layout), kind, 0)
        for n, (shape, layout, kind) in enumerate(registers)
    )
    sized = tuple(
        dataclasses.replace(r, bytes=4 * int(numpy.prod(r.layout.local_shape(r.type.shape, mesh.shape))))
        for r in filled
    )
    return PhysicalPlan(mesh, sized, tuple(operations), sources, outputs, updates or {})


def _node(op, inputs, outputs, **attributes):
    return Compute(op, op, attributes, inputs, outputs, "forward", "", 0.0, 0.0)


def test_views_share_memory_and_keep_it_alive():
    square = ((4, 4), "B", "activation")
    operations = [
        _node("exp", (0,), (1,)),
        _node("reshape", (1,), (2,), shape=(16,)),
        _node("exp", (2,), (3,)),
        _node("exp", (3,), (4,)),
        _node("mul", (2, 4), (5,)),
    ]
    flat = ((16,), "B", "activation")
    plan = _plan([((4, 4), "B", "input"), square, flat, flat, flat, flat], operations, {"x": 0}, {"y": 5})
    # x and exp(x); exp(x) alone, seen twice; with its exponential; with both; with the product.
    assert memory_profile(plan).total.tolist() == [128, 64, 128, 192, 192]
    assert len(buffers_of(plan).buffers) == 5


@pytest.mark.parametrize("late", [False, True])
def test_next_values_take_the_place_of_old_ones_unless_those_are_read_later(late):
    state = ((4, 4), "B", "parameter")
    made = ((4, 4), "B", "activation")
    operations = [_node("exp", (0,), (1,)), _node("exp", (0 if late else 1,), (2,))]
    plan = _plan([state, made, made], operations, {"w": 0}, {"y": 2}, {"w": 1})
    assert buffers_of(plan).in_place == ({} if late else {1: 0})
    assert memory_profile(plan).total.tolist() == ([128, 192] if late else [64, 128])


def test_a_view_of_the_old_value_that_is_read_later_keeps_it():
    state = ((4, 4), "B", "parameter")
    operations = [
        _node("reshape", (0,), (1,), shape=(16,)),
        _node("exp", (0,), (2,)),
        _node("exp", (1,), (3,)),
    ]
    flat = ((16,), "B", "activation")
    plan = _plan([state, flat, state, flat], operations, {"w": 0}, {"y": 3}, {"w": 2})
    assert buffers_of(plan).in_place == {}
    assert memory_profile(plan).total.tolist() == [64, 128, 192]


@pytest.mark.parametrize(
    "kind, before, after, expected",
    [
        ("all_gather", "S(0)", "B", 0),
        ("all_gather", "S(1)", "B", 4 * 48),
        ("reduce_scatter", "P", "S(0)", 0),
        ("reduce_scatter", "P", "S(1)", 4 * 48),
        ("all_to_all", "S(0)", "S(1)", 4 * 24),
        ("all_to_all", "S(1)", "S(0)", 4 * 24),
        ("all_reduce", "P", "B", 0),
        ("slice", "B", "S(1)", 0),
    ],
)
def test_collectives_pack_what_is_not_contiguous(kind, before, after, expected):
    plan = _plan([((8, 6), before, "activation"), ((8, 6), after, "boxing")], [], {}, {})
    assert packing_bytes(kind, 0, *plan.registers, plan.mesh) == expected


def test_workspace_counts_while_an_operation_runs():
    builder = GraphBuilder("sorted")
    x = builder.source("x", TensorType((6, 50), "f32"))
    with builder:
        values, _ = ops.sort(ops.exp(x))
        graph = builder.finish([values])
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = auto_parallel(graph, cluster, mesh=(2,), pins={"x": "S(0)", "sort:values": "S(0)"})
    at = next(i for i, op in enumerate(plan.physical.operations) if isinstance(op, Compute) and op.op == "sort")
    elements = 3 * 50
    operands = elements * (4 + 4 + 8)
    assert plan.memory_profile.by_kind[-1].tolist()[at] == elements * (4 + 8)
    assert int(plan.memory_profile.total[at]) == operands + elements * 12
    assert not any(isinstance(op, Box) for op in plan.physical.operations)
