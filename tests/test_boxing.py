"""Boxing: every pair of layouts is connected, every step keeps shards contiguous, paths and trees are the cheapest."""

from itertools import combinations, product

import numpy as np
import pytest
from enumerate_plans import making_seconds

from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.boxing import BoxingTable, is_contiguous_step, step_kind
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel

MESHES = [Mesh((2,)), Mesh((2, 4)), Mesh((3, 2)), Mesh((2, 2, 2))]


def table(mesh: Mesh) -> BoxingTable:
    return BoxingTable(mesh, AnalyticCostModel(Cluster.preset("a100-80g", nodes=2, devices_per_node=4)))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_pair_is_connected(mesh):
    space = table(mesh).space(TensorType((16, 24), "f32"))
    assert np.isfinite(space.seconds).all()
    assert (np.diag(space.seconds) == 0).all()
    for before, after in product(space.layouts, repeat=2):
        steps = space.path(before, after)
        at = before
        for step in steps:
            assert step.before == at
            assert step.kind == step_kind(step.before[step.mesh_axis], step.after[step.mesh_axis])
            assert step.after == step.before.replace(step.mesh_axis, step.after[step.mesh_axis])
            assert is_contiguous_step(step.before, step.mesh_axis, step.after[step.mesh_axis])
            at = step.after
        assert at == after
        total = sum(step.seconds for step in steps)
        assert total == pytest.approx(space.seconds[space.index[before], space.index[after]], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("mesh", MESHES[1:], ids=str)
def test_triangle_inequality(mesh):
    space = table(mesh).space(TensorType((16, 24), "f32"))
    for middle in range(len(space.layouts)):
        through = space.seconds[:, middle : middle + 1] + space.seconds[middle : middle + 1, :]
        assert (space.seconds <= through * (1 + 1e-12) + 1e-15).all()


@pytest.mark.parametrize(
    "before, after, kinds",
    [
        ("S(0)", "B", ["all_gather"]),
        ("P", "B", ["all_reduce"]),
        ("P", "S(1)", ["reduce_scatter"]),
        ("S(0)", "S(1)", ["all_to_all"]),
        ("B", "S(0)", ["slice"]),
        ("B", "P", ["fill"]),
        ("S(0)", "P", ["pad"]),
        ("P(max)", "B", ["all_reduce"]),
        ("B", "B", []),
    ],
)
def test_one_axis(before, after, kinds):
    steps = table(Mesh((8,))).path(TensorType((64, 64), "f32"), Layout.parse(before), Layout.parse(after))
    assert [step.kind for step in steps] == kinds


@pytest.mark.parametrize(
    "layout, axis, after, possible",
    [
        ("S(0), S(0)", 1, Broadcast(), True),
        ("S(0), S(0)", 0, Broadcast(), False),  # the outer split cannot be undone under the inner one
        ("B, S(0)", 0, Split(0), False),
        ("B, S(1)", 0, Split(0), True),
        ("S(0), B", 1, Split(0), True),
        ("P, S(0)", 0, Split(0), False),
        ("P, S(0)", 0, Broadcast(), True),
        ("S(1), S(0)", 0, Split(0), False),
    ],
)
def test_contiguity(layout, axis, after, possible):
    assert is_contiguous_step(Layout.parse(layout), axis, after) is possible


def test_hierarchical_all_reduce_is_found():
    """A large all-reduce over nodes and devices goes by reduce-scatter, all-reduce of a part, all-gather."""
    mesh = Mesh((2, 8))
    costs = AnalyticCostModel(Cluster.preset("a100-80g", nodes=2))
    space = BoxingTable(mesh, costs).space(TensorType((4096, 4096), "f32"))
    steps = space.path(Layout.parse("P, P"), Layout.parse("B, B"))
    assert [(step.kind, step.mesh_axis) for step in steps] == [
        ("reduce_scatter", 1),
        ("all_reduce", 0),
        ("all_gather", 1),
    ]


@pytest.mark.parametrize("mesh", [Mesh((4,)), Mesh((2, 2))], ids=str)
def test_trees_are_the_cheapest(mesh):
    space = table(mesh).space(TensorType((12,) if mesh.ndim == 2 else (12, 8), "f32"))
    for size in (2, 3):
        for targets in combinations(range(len(space.layouts)), size):
            costs = space.tree_seconds(targets)
            for root in range(len(space.layouts)):
                wanted = frozenset(space.layouts[number] for number in targets)
                least = making_seconds(space, space.layouts[root], wanted)
                assert costs[root] == pytest.approx(least, rel=1e-9, abs=1e-15)
                tree = space.tree(space.layouts[root], wanted)
                assert sum(step.seconds for step in tree.values()) == pytest.approx(least, rel=1e-9, abs=1e-15)
                for layout, step in tree.items():
                    assert step.after == layout
                    assert step.before == space.layouts[root] or step.before in tree


def test_trees_with_a_second_layout_at_hand():
    space = table(Mesh((4,))).space(TensorType((12, 8), "f32"))
    for root, other in product(range(len(space.layouts)), repeat=2):
        for targets in combinations(range(len(space.layouts)), 2):
            wanted = frozenset(space.layouts[number] for number in targets)
            least = making_seconds(space, space.layouts[root], wanted, space.layouts[other])
            assert space.forest_seconds(root, targets)[other] == pytest.approx(least, rel=1e-9, abs=1e-15)
            steps = space.tree(space.layouts[root], wanted, space.layouts[other])
            assert sum(step.seconds for step in steps.values()) == pytest.approx(least, rel=1e-9, abs=1e-15)


def test_trees_to_many_layouts():
    """Beyond a few targets trees are greedy: complete, connected, no dearer than separate paths, and found at once."""
    space = table(Mesh((2, 2, 2))).space(TensorType((16, 24, 8), "f32"))
    for root in (space.layouts[0], space.layouts[len(space.layouts) // 2]):
        tree = space.tree(root, space.layouts)
        assert set(tree) | {root} == set(space.layouts)
        separate = sum(space.seconds[space.index[root], space.index[layout]] for layout in space.layouts)
        assert sum(step.seconds for step in tree.values()) <= separate
        for layout in space.layouts:
            at = layout
            for _ in space.layouts:
                if at == root:
                    break
                at = tree[at].before
            assert at == root


def test_bytes_are_those_of_the_largest_shard():
    space = table(Mesh((3, 2))).space(TensorType((7, 5), "f32"))
    assert space.bytes[space.index[Layout.parse("S(0), B")]] == 3 * 5 * 4
    assert space.bytes[space.index[Layout.parse("S(0), S(0)")]] == 2 * 5 * 4
    assert space.bytes[space.index[Layout((Partial(), Split(1)))]] == 7 * 3 * 4


def test_one_kind_of_partial_only():
    space = table(Mesh((2, 2))).space(TensorType((4,), "f32"), ("sum", "max"))
    assert not any(len({sbp.reduce for sbp in layout if isinstance(sbp, Partial)}) > 1 for layout in space.layouts)
    assert Layout.parse("P(max), S(0)") in space.index


@pytest.mark.parametrize("reduce", ["max", "min", "sum"])
def test_whole_numbers_are_not_padded_with_their_type_s_limit(reduce):
    """What arithmetic on such a part gives wraps around: from chunks to P(max) and P(min) the way is through B."""
    space = table(Mesh((2, 4))).space(TensorType((16, 24), "i64"), {"sum", reduce})
    assert np.isfinite(space.seconds).all()
    kinds = {
        step.kind
        for before, after in product(space.layouts, repeat=2)
        for step in space.path(before, after)
        if isinstance(step.after[step.mesh_axis], Partial) and step.after[step.mesh_axis].reduce == reduce
    }
    assert kinds == ({"fill", "pad"} if reduce == "sum" else {"fill"})
