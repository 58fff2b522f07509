"""Reports of users of other systems: uneven and empty shards. Each test names its report."""

from itertools import product

import numpy
import pytest

from sbp.comm.inprocess import InProcessCommunicator
from sbp.errors import LayoutError
from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.runtime.executor import Executor
from sbp.shards import gather, global_shape, scatter
from sbp.trace import GraphBuilder
from tests.report_programs import run_sharded

RNG = numpy.random.default_rng


def test_r001_padding_never_comes_back():
    x = numpy.arange(50).reshape(5, 10)
    parts = scatter(x, Layout.parse("S(0)"), Mesh((4,)), numpy, RNG(0))
    assert [len(part) for part in parts] == [2, 2, 1, 0]
    whole = gather(parts, Layout.parse("S(0)"), Mesh((4,)), (5, 10))
    assert whole.shape == (5, 10) and (whole == x).all()
    run = run_sharded(lambda x: ops.neg(x), {"x": x}, (4,), {"x": "S(0)", "neg": "S(0)"})
    assert run.values[0].shape == (5, 10) and (run.values[0] == -x).all()
    assert [len(part) for part in run.parts[0]] == [2, 2, 1, 0]


def test_r002_pieces_that_the_split_does_not_imply_are_refused():
    shapes = [(2, 2), (2, 3), (2, 4), (2, 5)]
    with pytest.raises(LayoutError) as error:
        global_shape(shapes, Layout.parse("S(1)"), Mesh((4,)))
    message = str(error.value)
    assert "rank 0" in message and "[2, 2]" in message and "[2, 4]" in message and "[2, 14]" in message
    with pytest.raises(LayoutError, match=r"rank 0 .* holds shape \[2, 2\]"):
        gather([numpy.zeros(shape) for shape in shapes], Layout.parse("S(1)"), Mesh((4,)), (2, 14))
    assert global_shape([(2, 4), (2, 4), (2, 4), (2, 2)], Layout.parse("S(1)"), Mesh((4,))) == (2, 14)


def test_r005_offsets_of_a_dimension_split_twice_are_disjoint():
    mesh = Mesh((2, 4))
    boxes = [Layout.parse("S(0), S(0)").shard((2,), mesh.shape, place) for place in mesh.coordinates()]
    held = [(box.offset[0], box.shape[0]) for box in boxes if box.shape[0]]
    assert sorted(held) == [(0, 1), (1, 1)]
    assert sum(box.shape[0] == 0 for box in boxes) == 6


def test_r006_an_empty_shard_starts_at_the_end():
    boxes = [Layout.parse("S(0)").shard((10,), (6,), (rank,)) for rank in range(6)]
    assert [box.shape[0] for box in boxes] == [2, 2, 2, 2, 2, 0]
    assert [box.offset[0] for box in boxes] == [0, 2, 4, 6, 8, 10]


def test_r007_every_rank_takes_part_in_an_uneven_gather():
    """All ranks post the same collectives, though the first holds more than the others; over MPI see test_comm_mpi."""
    x = numpy.arange(5.0)
    run = run_sharded(lambda x: ops.neg(x), {"x": x}, (2, 2), {"x": "S(0), S(0)", "neg": "B, B"})
    assert (run.values[0] == -x).all() and all((part == -x).all() for part in run.parts[0])
    assert [kind for _, kind in run.boxing] == ["all_gather", "all_gather"]


def test_r008_the_global_shape_counts_every_piece():
    shapes = [(3, 2), (3, 2), (3, 2), (1, 2)]
    assert global_shape(shapes, Layout.parse("S(0)"), Mesh((4,))) == (10, 2)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_r008_in_general(mesh):
    """Every shape is found again from its pieces, and changing one piece is noticed."""
    grid = Mesh(mesh)
    for shape in ((5, 3), (2, 7), (1, 4), (6, 6)):
        for axes in product([Broadcast(), Split(0), Split(1), Partial()], repeat=len(mesh)):
            layout = Layout(axes)
            shapes = [layout.shard(shape, mesh, place).shape for place in grid.coordinates()]
            assert global_shape(shapes, layout, grid) == shape
            changed = [*shapes[:-1], tuple(size + 1 for size in shapes[-1])]
            if layout.shard(shape, mesh, tuple(size - 1 for size in mesh)).shape != (0, 0):
                try:
                    found = global_shape(changed, layout, grid)
                except LayoutError:
                    continue
                # A larger last piece may be what a larger tensor has there.
                boxes = [layout.shard(found, mesh, place).shape for place in grid.coordinates()]
                assert boxes == changed


def test_r010_operands_split_along_different_dimensions():
    a, b = RNG(0).standard_normal((16, 32)), RNG(1).standard_normal((16, 32))
    run = run_sharded(lambda a, b: a + b, {"a": a, "b": b}, (2,), {"a": "S(0)", "b": "S(1)"})
    numpy.testing.assert_array_equal(run.values[0], a + b)
    assert len(run.boxing) == 1 and run.boxing[0][0] in ("a", "b")
    assert run.layouts[0] in ("(S(0))", "(S(1))")


@pytest.mark.parametrize(("shift", "expected"), [(1, [3, 0, 1, 2]), (-1, [1, 2, 3, 0])])
def test_r011_rolling_one_element_per_rank(shift, expected):
    run = run_sharded(lambda x: ops.roll(x, shift, 0), {"x": numpy.arange(4)}, (4,), {"x": "S(0)"})
    assert run.values[0].tolist() == expected


def test_r035_every_pair_of_layouts_is_reachable_and_keeps_the_value():
    """[S(0), P] -> [S(0), S(0)] and all others, on 1-D and 2-D meshes, sizes that leave uneven and empty shards."""
    from sbp.cuda.numpy_backend import NumpyBackend
    from sbp.planner.physical import Box, PhysicalPlan, Register
    from sbp.runtime.executor import Executor

    kind = TensorType((6, 6), "f64")
    x = RNG(0).standard_normal(kind.shape)
    for shape in ((2,), (3,), (2, 1), (2, 2)):
        mesh = Mesh(shape)
        costs = AnalyticCostModel(Cluster.preset("a100-80g", nodes=1, devices_per_node=mesh.size))
        table = BoxingTable(mesh, costs)
        layouts = [Layout(axes) for axes in product([Split(0), Split(1), Broadcast(), Partial()], repeat=mesh.ndim)]
        for before, after in product(layouts, layouts):
            if before.has_partial:
                continue  # sources hold no parts; they are made below on the way
            for middle in layouts if mesh.ndim == 2 and before.is_broadcast else [before]:
                steps = (*table.path(kind, before, middle), *table.path(kind, middle, after))
                registers = [Register(0, "x", kind, before, "input", kind.bytes)]
                operations = []
                for step in steps:
                    number = len(registers)
                    registers.append(Register(number, "x", kind, step.after, "input", kind.bytes))
                    operations.append(Box(step.kind, step.mesh_axis, (number - 1,), (number,), "forward", 0.0, 0))
                plan = PhysicalPlan(mesh, tuple(registers), tuple(operations), {"x": 0}, {"x": len(registers) - 1}, {})
                executor = Executor(plan, NumpyBackend(), InProcessCommunicator(mesh.size))
                result = executor.run({}, executor.place({"x": x}))
                found = executor.collect_outputs(result.outputs)["x"]
                numpy.testing.assert_allclose(found, x, rtol=1e-12, atol=1e-12, err_msg=f"{before} {middle} {after}")


def test_r169_size_one_mesh_axes_cost_nothing():
    mesh = Mesh((2, 1))
    costs = AnalyticCostModel(Cluster.preset("a100-80g", nodes=1, devices_per_node=2))
    steps = BoxingTable(mesh, costs).path(
        TensorType((4, 4), "f32"), Layout.parse("S(0), B"), Layout.parse("S(0), S(1)")
    )
    assert sum(step.seconds for step in steps) == 0.0
    run = run_sharded(lambda x: ops.neg(x), {"x": numpy.ones((4, 4))}, (2, 1), {"x": "S(0), B", "neg": "S(0), S(1)"})
    assert run.boxing == []


def perceptron(batch):
    builder = GraphBuilder("perceptron")
    with builder:
        x = builder.source("x", TensorType((batch, 3), "f64"))
        w = builder.source("w", TensorType((3, 5), "f64"))
        y = ops.tanh(x @ w)
    return builder.finish([y, y.sum(0)])


def test_r144_a_plan_serves_other_batches_without_another_solve(monkeypatch):
    """Planned for 8 rows, run with 4, 6, 5 and 1 of them: the same layouts, uneven shards where they do not divide."""
    from sbp.planner import search

    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = auto_parallel(perceptron(8), cluster, mesh=(2,), pins={"x": "S(0)", "tanh": "S(0)", "sum": "P"})

    def solved_again(*arguments, **options):
        raise AssertionError("the plan was solved again")

    monkeypatch.setattr(search, "solve", solved_again)
    w = RNG(0).standard_normal((3, 5))
    for batch in (8, 4, 6, 5, 1):
        x = RNG(batch).standard_normal((batch, 3))
        other = plan.on(perceptron(batch))
        assert other.layouts == plan.layouts
        executor = Executor(other.physical)
        result = executor.run({}, executor.place({"x": x, "w": w}))
        found = executor.collect_outputs(result.outputs)
        numpy.testing.assert_allclose(found["tanh"], numpy.tanh(x @ w), rtol=1e-14)
        numpy.testing.assert_allclose(found["sum"], numpy.tanh(x @ w).sum(0), rtol=1e-12)
        assert [len(part) for part in result.outputs["tanh"].values()] == [-(-batch // 2), batch // 2]


def test_r144_a_batch_that_does_not_divide_runs_uneven():
    for batch in (8, 6, 5):
        x = RNG(batch).standard_normal((batch, 3))
        run = run_sharded(lambda x: ops.tanh(x), {"x": x}, (2,), {"x": "S(0)", "tanh": "S(0)"})
        numpy.testing.assert_allclose(run.values[0], numpy.tanh(x), rtol=1e-15)
        assert [len(part) for part in run.parts[0]] == [-(-batch // 2), batch // 2]
