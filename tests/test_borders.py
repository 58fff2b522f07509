"""Borders of spatial splits: what ranks fetch from neighbours, in programs of overlapping windows, planned and run."""

import weakref
from dataclasses import replace
from functools import wraps
from itertools import cycle, product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_operators import OWN
from spatial_programs import network, split_plan

from sbp.borders import fetched, fetched_bytes, put_together, rounds_of
from sbp.check_rules import check_operator
from sbp.errors import LayoutError, RuleError
from sbp.graph import Initial
from sbp.initial import draw_all
from sbp.layout import Layout, Shard
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, Operator, TensorType
from sbp.ops import library as ops
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.borders import border_times
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.physical import Box, Compute
from sbp.planner.pipeline import COMPUTE
from sbp.planner.plan_pipeline import plan_pipeline
from sbp.planner.search import objective_seconds
from sbp.planner.timing import predict_timeline
from sbp.rule import BoundRule, Signature, bind, parse_rule
from sbp.runtime import borders
from sbp.runtime.executor import Executor
from sbp.runtime.verify import verify
from sbp.shards import scatter
from sbp.trace import GraphBuilder
from sbp.trial import Trial

REGISTRY_OPERATORS = [REGISTRY[name] for name in OWN]


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
    expected = {"(B) -> (B)", "(S(0)) -> (S(0))", "(S(1)) -> (S(1))", "(B) -> (S(1))"}
    assert {str(one) for one in rule.signatures((2,))} == expected
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
    pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")
    from sbp.cuda.torch_backend import TorchBackend

    backend, right = TorchBackend(), REGISTRY[name]
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


# -- memory and time ---------------------------------------------------------------------------------------------------


class Held:
    """The arrays of each rank that are alive, by weak references, and the most bytes of them at once."""

    def __init__(self, ranks):
        self.alive = [[] for _ in range(ranks)]
        self.most = [0] * ranks

    def add(self, rank, array):
        self.alive[rank].append(weakref.ref(array))
        self.alive[rank] = [one for one in self.alive[rank] if one() is not None]
        self.most[rank] = max(self.most[rank], sum(one().nbytes for one in self.alive[rank]))


def bytes_held(physical, graph, monkeypatch):
    """Per operation with borders the most that a rank holds of copies, received parts and arrays put together."""
    executor = Executor(physical, share=False)
    held = Held(physical.mesh.size)
    communicator = executor.communicator

    def permute(arrays, pairs, shapes, dtype):
        """Between processes: what is sent is received in other memory."""
        for rank, array in arrays.items():
            held.add(rank, array)
        made = {target: arrays[source].copy() for source, target in pairs}
        for rank, array in made.items():
            held.add(rank, array)
        return made

    monkeypatch.setattr(communicator, "permute", permute)
    ranks = cycle(range(physical.mesh.size))

    def counted(xp, mine, *others):
        rank = next(ranks)
        made = put_together(xp, mine, *others)
        if made.base is None and made is not mine:
            held.add(rank, made)
        return made

    monkeypatch.setattr(borders, "put_together", counted)
    found = {}

    def watched(at, run):
        def inner(table):
            nonlocal held
            held = Held(physical.mesh.size)
            run(table)
            found[at] = max(held.most)

        return inner

    executor._steps = [(watched(at, run), released) for at, (run, released) in enumerate(executor._steps)]
    arrays = draw_all(graph, 0, None)
    state, feeds = ({name: arrays[name] for name in names} for names in (graph.state, graph.inputs))
    executor.run(executor.place(state), executor.place(feeds))
    return found


@pytest.mark.parametrize("mesh, rows", [((2,), 2), ((3,), 3), ((2, 2), 2), ((4, 2), 2)])
def test_workspace_is_what_the_executor_holds(mesh, rows, monkeypatch):
    """To the byte: copies on their way, what has arrived, and what it is put together in."""
    graph = network(2, 2, 9, 8)
    plan = split_plan(graph, Mesh(mesh), SPLITS[mesh].format(rows))
    for name in REGISTRY:
        monkeypatch.setattr(REGISTRY[name], "workspace", None)
    executor_held = bytes_held(plan, graph, monkeypatch)
    fetching = 0
    for at, operation in enumerate(plan.operations):
        if not isinstance(operation, Compute):
            continue
        op = REGISTRY[operation.op]
        inputs, outputs = ([plan.registers[n] for n in numbers] for numbers in (operation.inputs, operation.outputs))
        signature = Signature(tuple(r.layout for r in inputs), tuple(r.layout for r in outputs))
        types, made = [r.type for r in inputs], [r.type for r in outputs]
        rule = op.bind(types, operation.attributes)
        expected = op.workspace_bytes(rule, types, made, operation.attributes, signature, mesh)
        assert executor_held[at] == expected, operation.node
        fetching += expected > 0
    assert fetching >= 3


def test_a_kernels_workspace_counts_beside_what_it_reads_and_not_beside_what_is_sent():
    """Rows (4,) on 2 ranks, each reads one row more: sent 1, received 1, put together 3."""
    mesh, layout, shape = Mesh((2,)), Layout.parse("S(0)"), (4,)
    held = [[shard] for shard in boxes(layout, mesh, shape)]
    read = [[Shard(shape, (0,), (3,))], [Shard(shape, (1,), (3,))]]
    for workspace, expected in ((0, 4), (1, 4), (5, 8)):
        assert fetched_bytes([layout], mesh, held, read, [1], workspace) == expected
    assert fetched_bytes([layout], mesh, held, held, [8], 5) == 5


@pytest.fixture(scope="module")
def spatial():
    graph = network(1, 16, 4096, 4096)
    return auto_parallel(graph, Cluster.preset("a100-80g", 1, 4), mesh=(4,), time_limit=20)


def test_fetching_takes_the_link_and_not_the_kernels(spatial):
    """The axis's stream is busy with it, kernels without; all in all a plan costs the same."""
    physical = spatial.physical
    bordered = [o for o in physical.operations if isinstance(o, Compute) and o.borders]
    fetching = sum(seconds for operation in bordered for _, seconds in operation.borders)
    assert len(bordered) >= 3 and fetching > 0
    timeline = predict_timeline(physical)
    (axis,) = physical.mesh.names
    boxing = sum(o.seconds for o in physical.operations if isinstance(o, Box))
    assert timeline.busy_seconds(axis) == pytest.approx(boxing + fetching)
    kernels = sum(o.seconds for o in physical.operations if isinstance(o, Compute)) - fetching
    assert timeline.busy_seconds(COMPUTE) == pytest.approx(kernels)
    assert spatial.cost.boxing_seconds[axis] == pytest.approx(boxing + fetching)
    assert spatial.cost.compute_seconds + boxing + fetching == pytest.approx(objective_seconds(physical))
    assert len(timeline.start) == len(timeline.streams) == len(physical.operations)
    whole = predict_timeline(physical, overlap=False)
    assert whole.step_seconds == pytest.approx(objective_seconds(physical))
    for operation, start, stop in zip(physical.operations, timeline.start, timeline.stop):
        assert stop - start >= operation.seconds * (1 - 1e-9)


def test_stages_fetch_on_the_link_too(spatial):
    pipeline = plan_pipeline(spatial.physical, spatial.cluster, 1, 1, 2)
    tasks = [task for segment in pipeline.segments.values() for task in segment.tasks]
    (axis,) = spatial.mesh.names
    fetched_tasks = [task for task in tasks if task.name.startswith("borders of")]
    assert fetched_tasks and {task.stream for task in fetched_tasks} == {axis}
    held = sum(task.allocates - task.frees for task in tasks)
    assert held == 0, "what is fetched is given back"


def test_a_memory_limit_counts_what_is_fetched():
    """A pooling whose windows reach into the neighbour's rows does not fit in its operands' memory alone.

    With less than that another plan is chosen: what is fetched counts in the layout problem, too.
    """
    builder = GraphBuilder("pool")
    x = builder.source("x", TensorType((1, 1, 2048, 2048), "f32"), "input", Initial("normal", (0.0, 1.0)))
    with builder:
        graph = builder.finish([ops.max_pool2d(x, kernel_size=3, stride=1, padding=1)])
    cluster = Cluster.preset("a100-80g", 1, 2)
    pins = {"x": "S(2)", "max_pool2d": "S(2)"}
    plan = auto_parallel(graph, cluster, mesh=(2,), pins=pins)
    operands = sum(register.bytes for register in plan.physical.registers)
    peak = plan.memory.peak_bytes
    assert peak >= operands + 4 * 1025 * 2048
    assert auto_parallel(graph, cluster, mesh=(2,), pins=pins, memory_limit=peak).memory.peak_bytes <= peak
    other = auto_parallel(graph, cluster, mesh=(2,), pins=pins, memory_limit=peak - 4)
    assert other.memory.peak_bytes <= peak - 4 and other.objective_seconds > plan.objective_seconds
    assert not any(o.borders for o in other.physical.operations if isinstance(o, Compute))


@pytest.mark.parametrize("name", [op.name for op in REGISTRY_OPERATORS if op.borders])
def test_axes_without_borders_need_not_be_walked(name, monkeypatch):
    """Bytes and seconds of every signature, by all ranks and by those that differ along axes with borders."""
    op, mesh = REGISTRY[name], Mesh((2, 3))
    costs = AnalyticCostModel(Cluster.preset("a100-80g"))
    known = set()

    def measured(case, rule, signature):
        outputs = op.infer(case.types, case.attributes)
        size = op.workspace_bytes(rule, case.types, outputs, case.attributes, signature, mesh.shape)
        return size, border_times(op, rule, case.types, case.attributes, signature, mesh, costs)

    for case in op.cases:
        rule = op.bind(case.types, case.attributes)
        for signature in rule.signatures(mesh.shape):
            few = measured(case, rule, signature)
            with monkeypatch.context() as patch:
                patch.setattr(BoundRule, "border_shape", lambda self, signature, shape: tuple(shape))
                assert measured(case, rule, signature) == few
            known.add(few[1] != ())
    assert True in known
