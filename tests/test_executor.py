"""The executor: a physical plan on ranks in process, against the unsharded program, and what it says when it cannot."""

import dataclasses
import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import KINDS, mlp, path, physical, random_plan, replicated_plan

from sbp.comm.inprocess import InProcessCommunicator
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.dtype import numpy_name
from sbp.errors import LayoutError, PlanError
from sbp.graph import Initial
from sbp.initial import draw_all
from sbp.interpreter import evaluate
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.physical import Box, Compute, PhysicalPlan, Register
from sbp.runtime.executor import ExecutionError, Executor, check_program
from sbp.trace import GraphBuilder

MESHES = ((1,), (2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2))


def run(graph, plan, seed=0, **options):
    """One float64 step: (executor, result, drawn arrays)."""
    arrays = draw_all(graph, seed, "f64")
    executor = Executor(plan, floating="f64", **options)
    state = executor.place({name: arrays[name] for name in graph.state})
    feeds = executor.place({name: arrays[name] for name in graph.inputs})
    return executor, executor.run(state, feeds), arrays


def assert_equals_unsharded(graph, plan, seed=0):
    executor, result, arrays = run(graph, plan, seed)
    expected = evaluate(graph, arrays)
    found = {**executor.collect_outputs(result.outputs), **executor.collect_state(result.state)}
    assert set(found) == {*graph.outputs, *graph.state}
    for name, array in found.items():
        reference = expected[name] if name in expected else arrays[name]
        numpy.testing.assert_allclose(array, reference, rtol=1e-9, atol=1e-11, err_msg=f"{name}")


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_training_step_under_random_plans(shape):
    graph = mlp()
    for seed in range(12):
        assert_equals_unsharded(graph, random_plan(graph, Mesh(shape), seed), seed)


@pytest.mark.parametrize("batch, features", [(1, (1, 1, 1)), (2, (3, 1, 5)), (8, (4, 8, 4)), (5, (9, 2, 7))])
def test_sizes_that_leave_empty_and_uneven_shards(batch, features):
    graph = mlp(batch, features)
    for shape in ((3,), (2, 3), (8,)):
        for seed in range(4):
            assert_equals_unsharded(graph, random_plan(graph, Mesh(shape), seed), seed)


def test_tensor_parallel_by_hand():
    """Columns, then rows: the first product needs no communication, the second one an all-reduce."""
    graph, mesh = mlp(optimizer=False), Mesh((2,), ("tp",))
    pins = {
        "matmul": "(B), (S(1)) -> (S(1))",
        "add": "(S(1)), (S(0)) -> (S(1))",
        "relu": "(S(1)) -> (S(1))",
        "matmul_1": "(S(1)), (S(0)) -> (P)",
    }
    stored = {"w0": "S(1)", "b0": "S(0)", "w1": "S(0)"}

    def choose(node, found):
        by_text = {str(signature): signature for signature in found}
        return by_text[pins[node]] if node in pins else found[0]

    plan = physical(graph, mesh, choose, lambda v, found: Layout.parse(stored.get(v, "B")))
    assert [op.kind for op in plan.operations if isinstance(op, Box)] == ["all_reduce"]
    assert_equals_unsharded(graph, plan)


@pytest.mark.parametrize("mesh", [Mesh((2,)), Mesh((3,)), Mesh((2, 2)), Mesh((2, 3))], ids=str)
@pytest.mark.parametrize("dtype", ["f64", "f32", "i64", "bool"])
def test_every_change_of_layout(mesh, dtype):
    """Each layout to each other one by single steps, from parts that are random where Partial."""
    from sbp.shards import gather, scatter

    options = [Layout(())]
    for _ in range(mesh.ndim):
        options = [Layout((*o.axes, s)) for o in options for s in Layout.parse("B, S(0), S(1), P(max)")]
    options = [o for o in options if mesh.ndim == 1 or str(o).count("P") < 2]
    generator = numpy.random.default_rng(1)
    for shape in ((5, 4), (1, 3)):
        kind = TensorType(shape, dtype)
        whole = generator.integers(0, 2 if dtype == "bool" else 9, shape).astype(numpy_name(dtype))
        for source in options:
            for target in options:
                steps = path(source, target, kind, mesh)
                layouts = [source, *(after for _, _, after in steps)]
                registers = tuple(Register(n, "v", kind, each, "input", 0) for n, each in enumerate(layouts))
                boxes = tuple(Box(k, a, (n,), (n + 1,), "forward", 0.0, 0) for n, (k, a, _) in enumerate(steps))
                plan = PhysicalPlan(mesh, registers, boxes, {"v": 0}, {"v": len(steps)}, {})
                executor = Executor(plan)
                parts = dict(enumerate(scatter(whole, source, mesh, numpy, generator)))
                outputs, _ = executor.step({}, {"v": parts})
                found = gather([outputs["v"][rank] for rank in range(mesh.size)], target, mesh, shape)
                assert numpy.array_equal(found, whole), f"{source} -> {target} by {steps}"
                assert all(outputs["v"][rank].dtype == whole.dtype for rank in range(mesh.size))


def test_steps_of_every_kind_were_run():
    mesh, kind = Mesh((2, 2)), TensorType((4, 4), "f32")
    texts = ("B, B", "S(0), B", "P, B", "S(1), S(0)", "B, P")
    seen = {k for a in texts for b in texts for k, _, _ in path(Layout.parse(a), Layout.parse(b), kind, mesh)}
    assert {"all_reduce", "all_gather", "all_to_all", "slice"} <= seen <= set(KINDS.values())


def box_plan(kind, source, target, shape=(4, 6), mesh=None, axis=0):
    layouts, kind_of_value = [Layout.parse(source), Layout.parse(target)], TensorType(shape, "f32")
    registers = tuple(Register(n, "v", kind_of_value, layout, "input", 0) for n, layout in enumerate(layouts))
    boxes = (Box(kind, axis, (0,), (1,), "forward", 0.0, 0),)
    return PhysicalPlan(mesh or Mesh((2, 2), ("dp", "tp")), registers, boxes, {"v": 0}, {"v": 1}, {})


@pytest.mark.parametrize(
    "plan, message",
    [
        (box_plan("all_gather", "S(0), S(0)", "B, S(0)"), "all_gather of v .* ranks 0, 2 do not hold"),
        (box_plan("slice", "B, S(0)", "S(0), S(0)"), "another mesh axis splits the same dimension"),
        (box_plan("all_reduce", "S(0), B", "B, B"), r"axis dp it changes S\(0\) to B, but this step changes Partial"),
        (box_plan("all_gather", "S(0), B", "B, S(1)"), "must differ on mesh axis dp, and only there"),
        (box_plan("teleport", "S(0), B", "B, B"), "there is no such step"),
        (box_plan("all_gather", "S(0), B", "B, B", axis=2), "no such step along mesh axis 2"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_impossible_steps(plan, message):
    with pytest.raises(PlanError, match=message):
        Executor(plan)


def test_nested_split_changes_from_the_inside():
    steps = path(Layout.parse("S(0), S(0)"), Layout.parse("B, S(0)"), TensorType((5, 2), "f32"), Mesh((2, 2)))
    assert [step[0] for step in steps] == ["all_gather", "all_gather", "slice"]


def test_registers_are_emptied_after_their_last_use():
    graph = mlp()
    plan = random_plan(graph, Mesh((2,)), 3)
    live, most = [], 0
    executor = Executor(plan, floating="f64")
    steps = executor._steps

    def watched(run):
        def inner(table):
            nonlocal most
            run(table)
            live.append(sum(local is not None for local in table))

        return inner

    executor._steps = [(watched(run), released) for run, released in steps]
    arrays = draw_all(graph, 0, "f64")
    state = executor.place({n: arrays[n] for n in graph.state})
    executor.step(state, executor.place({n: arrays[n] for n in graph.inputs}))
    spans = plan.lifetimes
    alive = [sum(a <= at < b for a, b in spans) for at in range(len(plan.operations))]
    # The state's and outputs' registers are held beside those that the plan counts; no other may be.
    kept = {*plan.sources.values(), *plan.outputs.values(), *plan.updates.values()}
    for at, count in enumerate(live):
        expected = {n for n, (a, b) in enumerate(spans) if a <= at < b}
        assert count <= len(expected | kept), (at, count)
    assert max(alive) < len(plan.registers)


def test_keep_returns_registers_that_are_otherwise_freed():
    graph = mlp()
    plan = random_plan(graph, Mesh((2, 2)), 5)
    wanted = [register.number for register in plan.registers if register.value == "relu"]
    executor, result, arrays = run(graph, plan, keep=wanted)
    reference = evaluate(graph, arrays, keep=["relu"])["relu"]
    assert sorted(result.kept) == sorted(wanted) and wanted
    for number in wanted:
        numpy.testing.assert_allclose(executor.collect(result.kept[number], number), reference, rtol=1e-12, atol=1e-12)


def test_state_without_update_is_carried_over():
    builder = GraphBuilder("buffered")
    x = builder.source("x", TensorType((4,), "f32"), "input", Initial("ones", ()))
    table = builder.source("table", TensorType((4,), "f32"), "buffer", Initial("arange", ()))
    with builder:
        graph = builder.finish([x * table])
    executor, result, arrays = run(graph, random_plan(graph, Mesh((3,)), 1))
    assert numpy.array_equal(executor.collect_state(result.state)["table"], arrays["table"])


def test_two_steps_continue_from_the_first():
    graph = mlp()
    plan = random_plan(graph, Mesh((2, 2)), 11)
    executor, result, arrays = run(graph, plan)
    feeds = executor.place({name: arrays[name] for name in graph.inputs})
    outputs, state = executor.step(result.state, feeds)
    once = evaluate(graph, arrays)
    twice = evaluate(graph, {**arrays, **{name: once[name] for name in graph.updates}})
    assert executor.collect_state(state)["step"] == 2
    for name, array in executor.collect_state(state).items():
        numpy.testing.assert_allclose(array, twice[name], rtol=1e-9, atol=1e-11)
    numpy.testing.assert_allclose(executor.collect_outputs(outputs)["mean"], twice["mean"], rtol=1e-10)


@pytest.mark.parametrize("floating, expected", [(None, "float32"), ("f64", "float64"), ("f32", "float32")])
def test_floating_override(floating, expected):
    graph = mlp()
    executor = Executor(random_plan(graph, Mesh((2,)), 2), floating=floating)
    arrays = draw_all(graph)
    outputs, state = executor.step(
        executor.place({n: arrays[n] for n in graph.state}), executor.place({n: arrays[n] for n in graph.inputs})
    )
    found = {str(array.dtype) for local in (*outputs.values(), *state.values()) for array in local.values()}
    assert found == {expected, "int64"}


class Counting(NumpyBackend):
    """Counts the calls of matmul kernels."""

    calls = 0

    def kernel(self, name, default):
        def counted(xp, *inputs, **attributes):
            self.calls += 1
            return default(xp, *inputs, **attributes)

        return counted if name == "matmul" else default


def test_replicated_work_is_done_once_and_split_work_by_every_rank():
    graph = mlp(optimizer=False)
    replicated = replicated_plan(graph, Mesh((4,)))

    def by_batch(_, found):
        return next(signature for signature in found if str(signature).startswith("(S(0)"))

    split = physical(graph, Mesh((4,)), by_batch, lambda _, found: found[0])
    for plan, share, expected in ((replicated, True, 2), (replicated, False, 8), (split, True, 8), (split, False, 8)):
        backend = Counting()
        executor, result, arrays = run(graph, plan, backend=backend, share=share)
        assert backend.calls == expected
        found = executor.collect_outputs(result.outputs)
        numpy.testing.assert_allclose(found["mean"], evaluate(graph, arrays)["mean"], rtol=1e-12)


def test_sharing_changes_no_bit():
    graph = mlp()
    for shape, seed in (((2, 3), 1), ((2, 2, 2), 2), ((4,), 3)):
        plan = random_plan(graph, Mesh(shape), seed)
        (one, first, _), (_, second, _) = (run(graph, plan, share=share) for share in (True, False))
        for name, local in first.state.items():
            for rank, array in local.items():
                assert array.tobytes() == second.state[name][rank].tobytes(), (name, rank)


def test_timeline():
    graph = mlp()
    plan = random_plan(graph, Mesh((2,)), 2)
    executor = Executor(plan)
    arrays = draw_all(graph)
    given = (executor.place({n: arrays[n] for n in graph.state}), executor.place({n: arrays[n] for n in graph.inputs}))
    assert executor.run(*given).timeline == ()
    timeline = executor.run(*given, timed=True).timeline
    assert len(timeline) == len(plan.operations)
    assert all(0 <= a <= b for a, b in timeline) and all(a[1] <= b[0] for a, b in zip(timeline, timeline[1:]))


class Breaking(NumpyBackend):
    """Its relu fails, or makes a wrong shape, on shards of one row."""

    def __init__(self, how):
        self.how = how

    def kernel(self, name, default):
        def relu(xp, x):
            if x.shape[0] != 1:
                return default(xp, x)
            if self.how == "raise":
                raise ZeroDivisionError("no such number")
            return x[:0] if self.how == "shape" else (x, x)

        return relu if name == "relu" else default


@pytest.mark.parametrize(
    "how, message",
    [
        ("raise", r"node relu \(relu\) on rank 2, on local \(float32\[1, 5\]\): ZeroDivisionError: no such number"),
        ("shape", r"on rank 2, on local .*made \[0, 5\], the plan says \[1, 5\]"),
        ("pair", r"on rank 2, on local .*made 2 arrays, the plan has 1"),
    ],
)
def test_kernel_errors_name_node_rank_and_shapes(how, message):
    builder = GraphBuilder("breaks")
    x = builder.source("x", TensorType((5, 5), "f32"), "input")
    with builder:
        graph = builder.finish([ops.relu(x)])

    def by_rows(_, found):
        return next(signature for signature in found if str(signature).startswith("(S(0)"))

    plan = physical(graph, Mesh((3,)), by_rows, lambda _, found: Layout.parse("S(0)"))
    executor = Executor(plan, Breaking(how))
    with pytest.raises(ExecutionError, match=message):
        executor.step({}, executor.place({"x": numpy.ones((5, 5))}))


def test_wrong_feeds():
    graph = mlp()
    executor = Executor(replicated_plan(graph, Mesh((2,))))
    arrays = draw_all(graph)
    state = executor.place({n: arrays[n] for n in graph.state})
    feeds = executor.place({n: arrays[n] for n in graph.inputs})
    with pytest.raises(PlanError, match=r"x is f32\[6,5\], but was given an array of shape \[6, 4\]"):
        executor.place({"x": numpy.ones((6, 4))})
    with pytest.raises(PlanError, match="no input or state 'z'; it has x, y"):
        executor.place({"z": numpy.ones(1)})
    with pytest.raises(PlanError, match=r"input 'y' \(f32\[6,3\]\) is not given"):
        executor.step(state, {"x": feeds["x"]})
    with pytest.raises(PlanError, match=r"input 'x' in \(B\) is \[6, 5\] on rank 1, but was given nothing"):
        executor.step(state, {**feeds, "x": {0: feeds["x"][0]}})
    with pytest.raises(PlanError, match="2 ranks, the communicator has 3"):
        Executor(executor.physical, communicator=InProcessCommunicator(3))


@pytest.mark.parametrize("text", ["P, B", "S(1), P", "P, P", "P(max), S(0)", "P(min), P(min)", "S(0), S(0)"])
@pytest.mark.parametrize("dtype", ["f64", "i32"])
def test_placed_arrays_are_collected_again(text, dtype):
    mesh, kind = Mesh((2, 3)), TensorType((5, 4), dtype)
    register = Register(0, "v", kind, Layout.parse(text), "input", 0)
    executor = Executor(PhysicalPlan(mesh, (register,), (), {"v": 0}, {"v": 0}, {}))
    whole = numpy.random.default_rng(0).integers(-9, 9, (5, 4)).astype(numpy_name(dtype))
    outputs, _ = executor.step({}, executor.place({"v": whole}))
    assert numpy.array_equal(executor.collect(outputs["v"], 0), whole)
    assert all(array.dtype == whole.dtype for array in outputs["v"].values())


def test_collect_finds_replicas_that_differ():
    graph = mlp()
    executor = Executor(replicated_plan(graph, Mesh((2,))))
    placed = executor.place({"w0": numpy.ones((5, 7))})["w0"]
    placed[1] = placed[1] + 1
    with pytest.raises(LayoutError, match="w0: ranks 0 and 1"):
        executor.collect(placed, executor.physical.sources["w0"])


def without_the_last(plan):
    return {"outputs": {"mean": len(plan.registers) - 1}, "operations": plan.operations[:-1]}


def with_unknown_register(plan):
    return {"operations": (dataclasses.replace(plan.operations[0], inputs=(0, 10**6)), *plan.operations[1:])}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: {"operations": p.operations[1:]}, "which nothing has filled"),
        (lambda p: {"operations": (*p.operations, p.operations[0])}, "which is full already"),
        (without_the_last, "is never filled"),
        (lambda p: {"registers": p.registers[::-1]}, "is numbered"),
        (with_unknown_register, "uses register 1000000"),
        (lambda p: {"updates": {"nothing": 0}}, "stored in no register"),
    ],
)
def test_malformed_programs(change, message):
    plan = replicated_plan(mlp(), Mesh((2,)))
    assert isinstance(plan.operations[0], Compute)
    with pytest.raises(PlanError, match=message):
        check_program(dataclasses.replace(plan, **change(plan)))


def test_ops_with_positions_get_local_attributes():
    """Embedding over a split vocabulary: every rank looks up its own rows by global numbers."""
    builder = GraphBuilder("lookup")
    ids = builder.source("ids", TensorType((4, 3), "i64"), "input", Initial("integers", (0, 7)))
    table = builder.source("table", TensorType((7, 2), "f32"), "parameter")
    with builder:
        graph = builder.finish([ops.embedding(table, ids)])
    seen = set()
    for seed in range(10):
        plan = random_plan(graph, Mesh((3,)), seed)
        seen.add(str(plan.registers[plan.sources['table']].layout))
        assert_equals_unsharded(graph, plan, seed)
    assert len(seen) > 1
