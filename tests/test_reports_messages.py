"""Reports of users of other systems: messages, and meshes of one rank or of the wrong size. Each names its report."""

import numpy
import pytest

from sbp.errors import LayoutError, MeshError, SbpError
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.trace import GraphBuilder
from tests.report_programs import run_sharded, signatures

RNG = numpy.random.default_rng


def program(shapes=((16, 8), (8, 4))):
    builder = GraphBuilder("net")
    x = builder.source("x", TensorType(shapes[0], "f32"))
    w = builder.source("w", TensorType(shapes[1], "f32"))
    return builder.finish([x @ w])


def test_r147_a_layout_failure_names_operator_types_and_mesh():
    """One line: `f32[16,8]`-style types and `mesh(dp=2, tp=4)`, and the layout that does not fit."""
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=8)
    mesh = Mesh((2, 4), ("dp", "tp"))
    with pytest.raises(SbpError) as error:
        auto_parallel(program(), cluster, mesh=mesh, pins={"w": "S(2), B"})
    message = str(error.value)
    assert "w" in message and "S(2)" in message and "8" in message
    with pytest.raises(SbpError) as error:
        auto_parallel(program(), cluster, mesh=mesh, pins={"x": "S(0)"})
    assert "(S(0))" in str(error.value) and "mesh(dp=2, tp=4)" in str(error.value)
    with pytest.raises(LayoutError) as layout_error:
        Layout.parse("S(0), S(2)").check((2048, 256), (2, 4), "wte.weight")
    assert str(layout_error.value) == (
        "wte.weight: layout (S(0), S(2)) splits dimension 2, but the shape [2048, 256] has 2 dimensions, "
        "numbered from 0."
    )


def test_r147_shapes_that_do_not_fit_are_said_with_their_types():
    with pytest.raises(SbpError) as error:
        program(((16, 8), (9, 4)))
    assert "operator matmul(f32[16,8], f32[9,4])" in str(error.value)
    assert "has 9 where dimension k" in str(error.value)


def test_r129_one_rank_needs_no_boxing():
    run = run_sharded(
        lambda x, w: ops.relu(x @ w), {"x": RNG(0).standard_normal((4, 3)), "w": RNG(1).standard_normal((3, 2))}, (1,)
    )
    assert run.boxing == []
    assert all(layout.is_broadcast for layout in run.plan.layouts.values())
    assert run.plan.status.name == "OPTIMAL"


def test_r130_a_mesh_that_the_cluster_cannot_fill():
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    with pytest.raises(SbpError) as error:
        auto_parallel(program(), cluster, mesh=(2, 2))
    assert "4" in str(error.value) and "2" in str(error.value) and "mesh" in str(error.value)


def test_r131_an_axis_of_one_rank_changes_nothing():
    x, w = RNG(0).standard_normal((4, 6)), RNG(1).standard_normal((6, 2))
    plain = run_sharded(lambda x, w: x @ w, {"x": x, "w": w}, (2,))
    wide = run_sharded(lambda x, w: x @ w, {"x": x, "w": w}, (2, 1))
    assert wide.plan.objective_seconds == pytest.approx(plain.plan.objective_seconds, rel=1e-12)
    numpy.testing.assert_array_equal(wide.values[0], plain.values[0])
    assert {name: layout[0] for name, layout in wide.plan.layouts.items()} == {
        name: layout[0] for name, layout in plain.plan.layouts.items()
    }
    assert all(str(layout[1]) == "B" for layout in wide.plan.layouts.values())


def test_r152_the_product_of_sizes_is_said_with_its_factors():
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=6)
    with pytest.raises(SbpError) as error:
        auto_parallel(program(), cluster, mesh=Mesh((1, 2, 2, 1), ("tp", "pp", "ep", "etp")))
    message = str(error.value)
    assert "mesh(tp=1, pp=2, ep=2, etp=1) has 4 ranks" in message and "1 node x 6 devices = 6" in message


def test_r168_the_number_of_signatures_follows_the_axes_not_the_devices():
    counts = [len(signatures(ops.matmul, "f32[16,16]", "f32[16,16]", mesh=mesh)) for mesh in ((1, 4), (1, 8), (2, 4))]
    assert counts[0] == counts[1] < counts[2]


def test_r127_some_axes_of_a_mesh_in_its_order():
    mesh = Mesh((2, 2, 2), ("dp", "cp", "tp"))
    assert mesh["dp", "tp"] == Mesh((2, 2), ("dp", "tp")) and mesh["cp"] == Mesh((2,), ("cp",))
    assert mesh.ranks(("dp", "tp")) == (0, 1, 4, 5)
    assert mesh.ranks(("dp", "tp"), cp=1) == (2, 3, 6, 7)
    assert mesh.ranks("cp", dp=1, tp=1) == mesh.groups(1)[3] == (5, 7)
    assert mesh.ranks(mesh.names) == tuple(range(8))
    for wrong in (("tp", "dp"), ("dp", "dp"), "pp", (), 0):
        with pytest.raises(MeshError, match="'dp', 'cp', 'tp', each once and in this order"):
            mesh[wrong]
    with pytest.raises(MeshError, match="dp is no axis beside dp, tp"):
        mesh.ranks(("dp", "tp"), dp=1)
    with pytest.raises(MeshError, match="no place"):
        mesh.ranks("dp", tp=2)


def test_r002_a_mesh_and_its_names_are_checked_before_anything_runs():
    with pytest.raises(MeshError, match="2 different axis names"):
        Mesh((2, 2), ("dp", "dp"))
    with pytest.raises(LayoutError, match="write one SBP per mesh axis"):
        Layout.parse("S(0)").check((4, 4), (2, 2))
