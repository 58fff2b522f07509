"""Global tensors: every operator under random legal layouts against the unsharded kernel, ways in and out, messages."""

import logging
import subprocess
import sys
from operator import eq, ge, gt, le, lt, ne

import numpy
import pytest
from own_operators import OWN

import sbp
from sbp.dtype import is_floating
from sbp.errors import GraphError, LayoutError, MeshError, RuleError, SbpError
from sbp.interpreter import evaluate
from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import REGISTRY
from sbp.ops import library as ops
from sbp.planner.cluster import Cluster
from sbp.runtime.eager import BytesMoved, boxing_table
from sbp.runtime.executor import ExecutionError
from sbp.shards import scatter
from sbp.trace import GraphBuilder
from sbp.trial import draw_inputs
from tests.test_comm_mpi import run as run_on_mpi

RNG = numpy.random.default_rng
MESHES = [Mesh((2,)), Mesh((3,)), Mesh((2, 2), ("dp", "tp"))]


def random_layout(rng, shape, dtype, mesh):
    """Any layout that a tensor can be held in, every kind of SBP as likely as any other."""
    reduce = rng.choice(["max", "min"] if dtype == "bool" else ["sum", "sum", "max", "min"])
    choices = [Broadcast(), Partial(str(reduce)), *map(Split, range(len(shape))), *map(Split, range(len(shape)))]
    return Layout(tuple(choices[rng.integers(len(choices))] for _ in range(mesh.ndim)))


@pytest.fixture
def own_registry(monkeypatch):
    """Operators defined in a test are forgotten after it."""
    monkeypatch.setattr(REGISTRY, "_operators", dict(REGISTRY._operators))


def laid_out(array, layout, mesh, rng):
    """A global tensor whose Partial parts are random."""
    return sbp.from_local(scatter(array, layout, mesh, numpy, rng), layout, mesh, array.shape)


CASES = [(name, number) for name in REGISTRY for number in range(len(REGISTRY[name].cases))]


@pytest.mark.parametrize("draw", range(2))
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize(
    "family", sorted({REGISTRY[name].kernel.__module__ for name in REGISTRY if REGISTRY[name].cases})
)
def test_every_operator_under_random_layouts(family, mesh, draw):
    """In float64, so that only the order of sums differs."""
    for name, number in CASES:
        op = REGISTRY[name]
        if op.kernel.__module__ != family:
            continue
        case = op.cases[number]
        rng = RNG([draw, number, *map(ord, name)])
        arrays = draw_inputs(op, case, rng)
        attributes = {key: "f64" if value == "f32" else value for key, value in op.complete(case.attributes).items()}
        with numpy.errstate(all="ignore"):
            expected = op.kernel(numpy, *arrays, **attributes)
        expected = expected if isinstance(expected, (tuple, list)) else (expected,)
        layouts = [random_layout(rng, t.shape, t.dtype, mesh) for t in case.types]
        tensors = [laid_out(array, layout, mesh, rng) for array, layout in zip(arrays, layouts)]
        if not tensors:
            assert len(op.infer((), attributes)) == 1
            continue  # made of nothing but attributes: see test_creation
        with numpy.errstate(all="ignore"):
            made = op(*tensors, **attributes)
        made = made if op.several else (made,)
        assert len(made) == len(expected)
        for found, value in zip(made, expected):
            where = f"{name} case {number}, {', '.join(map(str, layouts))} -> {found}"
            value = numpy.asarray(value)
            array = found.numpy()
            assert found.shape == array.shape == value.shape and array.dtype == value.dtype, where
            scale = max(1.0, numpy.abs(value[numpy.isfinite(value)]).max(initial=0)) if value.dtype.kind == "f" else 0
            numpy.testing.assert_allclose(array, value, rtol=1e-9, atol=1e-9 * scale, err_msg=where)


def test_all_operators_are_covered():
    without = [name for name in OWN if not REGISTRY[name].cases]
    assert not without and len(CASES) > 300


def _integers(high):
    return lambda rng, *shape: rng.integers(0, high, shape)


def _normal(rng, *shape):
    return rng.standard_normal(shape)


COMPOSITES = [
    (lambda x: ops.softmax(x, axis=-1), [(_normal, 4, 6)]),
    (lambda x: ops.log_softmax(x, axis=0), [(_normal, 5, 3)]),
    (lambda x, y: ops.cross_entropy(x, y), [(_normal, 4, 6), (_integers(6), 4)]),
    (lambda x, y: ops.mse_loss(x, y), [(_normal, 5, 3), (_normal, 5, 3)]),
    (lambda x, y: ops.smooth_l1_loss(x, y), [(_normal, 5, 3), (_normal, 5, 3)]),
    (lambda x: ops.var(x, axis=1), [(_normal, 4, 6)]),
    (lambda x: ops.logsumexp(x, axis=0), [(_normal, 4, 6)]),
    (lambda x: ops.norm(x, order=3), [(_normal, 4, 6)]),
    (lambda x, y: ops.stack(x, y, axis=1), [(_normal, 4, 3), (_normal, 4, 3)]),
    (lambda x: ops.chunk(x, 3)[1], [(_normal, 7, 3)]),
    (lambda x, i: ops.index_select(x, i, axis=1), [(_normal, 4, 6), (_integers(6), 3)]),
    (lambda x: ops.repeat_interleave(x, 2, axis=0), [(_normal, 3, 4)]),
    (lambda x: ops.argsort(x, axis=-1), [(_normal, 4, 6)]),
    (lambda x, i, s: ops.scatter_add(x, i, s, axis=0), [(_normal, 5, 3), (_integers(5), 4, 3), (_normal, 4, 3)]),
    (lambda x, w: ops.conv2d(x, w, padding=1), [(_normal, 2, 4, 5, 5), (_normal, 4, 4, 3, 3)]),
    (lambda x: ops.select(x, 0, -1), [(_normal, 4, 6)]),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("number", range(len(COMPOSITES)))
def test_functions_put_together_from_operators(number, mesh):
    """They take global tensors as they take arrays."""
    function, makers = COMPOSITES[number]
    for draw in range(3):
        rng = RNG([number, draw])
        arrays = [make(rng, *shape) for make, *shape in makers]
        layouts = [random_layout(rng, a.shape, "f64" if a.dtype.kind == "f" else "i64", mesh) for a in arrays]
        found = function(*(laid_out(array, layout, mesh, rng) for array, layout in zip(arrays, layouts)))
        where = f"{', '.join(map(str, layouts))} -> {found}"
        numpy.testing.assert_allclose(found.numpy(), function(*arrays), rtol=1e-9, atol=1e-9, err_msg=where)


# -- ways in and out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["S(0), S(0)", "S(1), B", "P, S(0)", "P(max), P(max)", "B, B", "S(1), S(0)"])
def test_in_out_and_between(layout):
    mesh = MESHES[2]
    array = RNG(0).standard_normal((5, 3))
    x = sbp.from_numpy(array, layout, mesh)
    assert str(x) == f"f64[5,3] ({layout}) on mesh(dp=2, tp=2)" and repr(x) == f"<GlobalTensor {x}>"
    numpy.testing.assert_array_equal(x.numpy(), array)
    numpy.testing.assert_array_equal(numpy.asarray(x), array)
    again = sbp.from_local([x.to_local(rank) for rank in range(4)], layout, mesh, (5, 3))
    numpy.testing.assert_array_equal(again.numpy(), array)
    for target in ("S(0), S(1)", "B, S(0)", "P, P", "B, P(min)"):
        y = x.to_layout(target)
        assert str(y.layout) == f"({target})"
        numpy.testing.assert_allclose(y.numpy(), array, rtol=1e-12)
    assert x.to_layout(layout) is x


def test_locals_are_copies():
    x = sbp.zeros((4,), None, 2)
    x.to_local(0)[:] = 7
    x.numpy()[:] = 7
    assert x.numpy().tolist() == [0, 0, 0, 0]
    array = numpy.zeros(4)
    y = sbp.from_numpy(array, "S(0)", 2)
    z = sbp.from_local([array[:2], array[2:]], "S(0)", 2)
    array[:] = 7
    assert y.numpy().sum() == z.numpy().sum() == 0


def test_shapes_of_shards():
    x = sbp.arange(10, layout="S(0)", mesh=6)
    assert [x.to_local(rank).shape for rank in range(6)] == [(2,)] * 5 + [(0,)]
    assert x.shard(5).offset == (10,) and x.shard(4).slices == (slice(8, 10),)


def test_from_local_names_rank_and_sizes():
    pieces = [numpy.zeros((2, width)) for width in (2, 3, 4, 5)]
    with pytest.raises(LayoutError, match=r"rank 0 at \(0,\) was given shape \[2, 2\], expected \[2, 4\]"):
        sbp.from_local(pieces, "S(1)", 4, (2, 14))
    with pytest.raises(LayoutError, match=r"rank 0 .*\[2, 2\].*\[2, 4\]"):
        sbp.from_local(pieces, "S(1)", 4)
    with pytest.raises(LayoutError, match=r"ranks \[0, 1, 2\], but this process holds \[0, 1, 2, 3\]"):
        sbp.from_local(pieces[:3], "S(1)", 4, (2, 14))
    with pytest.raises(LayoutError, match="ranks 0 and 1 .* hold different numbers"):
        sbp.from_local([numpy.zeros(2), numpy.ones(2)], "B", 2)
    with pytest.raises(LayoutError, match="one type"):
        sbp.from_local([numpy.zeros(2), numpy.zeros(2, "f4")], "S(0)", 2)
    assert sbp.from_local([numpy.zeros(2), numpy.ones(2)], "B", 2, check_replicas=False).shape == (2,)
    assert sbp.from_local([numpy.ones(2), numpy.ones(2)], "P", 2).numpy().tolist() == [2, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sbp.zeros((4, 4), "S(2)", 2), "splits dimension 2"),
        (lambda: sbp.zeros((4, 4), "S(0), B", 2), "2 entries"),
        (lambda: sbp.zeros((4, 4), "P, P(max)", (2, 2)), "can hold one kind"),
        (lambda: sbp.full((4,), True, "P", 2, "bool"), "booleans have no sum"),
        (lambda: sbp.from_numpy(numpy.ones(3) > 0, "P", 2), "booleans have no sum"),
        (lambda: sbp.ones((4,), "B", 2).to_layout("S(1)"), "splits dimension 1"),
    ],
)
def test_layouts_that_do_not_fit(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


# -- creation ----------------------------------------------------------------------------------------------------------

LAYOUTS = [
    ("B", 1),
    ("S(0)", 2),
    ("S(1)", 2),
    ("S(0)", 4),
    ("P", 2),
    ("P(max)", 3),
    ("S(0), S(0)", (2, 2)),
    ("S(1), P", (2, 2)),
]


@pytest.mark.parametrize(("layout", "mesh"), LAYOUTS)
def test_creation(layout, mesh):
    """Random numbers are the same bits on any number of ranks (report R046)."""
    for dtype in ("f32", "f64"):
        alone = sbp.randn((4, 6), dtype=dtype, seed=3)
        made = sbp.randn((4, 6), layout, mesh, dtype, seed=3)
        assert str(made.layout) == f"({layout})" and made.dtype == dtype
        numpy.testing.assert_array_equal(made.numpy(), alone.numpy())
        numpy.testing.assert_array_equal(
            sbp.rand((4, 6), layout, mesh, dtype).numpy(), sbp.rand((4, 6), dtype=dtype).numpy()
        )
    whole = sbp.randint(-3, 8, (4, 6), layout, mesh, seed=1)
    assert whole.dtype == "i64" and str(whole.layout) == f"({layout})"
    numpy.testing.assert_array_equal(whole.numpy(), sbp.randint(-3, 8, (4, 6), seed=1).numpy())
    assert whole.numpy().min() >= -3 and whole.numpy().max() < 8
    numpy.testing.assert_array_equal(sbp.full((4, 6), 2.5, layout, mesh).numpy(), numpy.full((4, 6), 2.5, "f4"))
    numpy.testing.assert_array_equal(sbp.ones((4, 6), layout, mesh, "i32").numpy(), numpy.ones((4, 6), "i4"))


def test_arange():
    for arguments in [(5,), (2, 9), (2, 9, 3), (9, 2, -2), (0,), (0.5, 3), (3, 3)]:
        x = sbp.arange(*arguments, layout="S(0)", mesh=3)
        numpy.testing.assert_array_equal(x.numpy(), numpy.arange(*arguments))
        assert x.dtype == ("f32" if any(isinstance(item, float) for item in arguments) else "i64")
    with pytest.raises(GraphError, match="step"):
        sbp.arange(0, 3, 0)


def test_randint_is_even():
    counts = numpy.bincount(sbp.randint(0, 5, (20000,)).numpy())
    assert len(counts) == 5 and abs(counts - 4000).max() < 300
    with pytest.raises(GraphError, match="below"):
        sbp.randint(3, 3, (2,))
    with pytest.raises(GraphError, match="whole numbers"):
        sbp.randint(0, 3, (2,), dtype="f32")


# -- choosing, boxing and saying so ------------------------------------------------------------------------------------


def _steps(tensor):
    return [(record.what, record.kind) for record in tensor.history]


@pytest.mark.parametrize(
    ("x", "w", "made", "steps"),
    [
        ("S(0)", "B", "S(0)", []),
        ("B", "S(1)", "S(1)", []),
        ("S(1)", "S(0)", "P", []),
        ("P", "B", "P", []),
        ("B", "B", "B", []),
        ("B", "S(0)", "P", [("matmul, input x", "slice")]),
        ("S(1)", "B", "P", [("matmul, input w", "slice")]),
    ],
)
def test_matmul_takes_what_is_there(x, w, made, steps):
    a, b = RNG(0).standard_normal((4, 6)), RNG(1).standard_normal((6, 8))
    found = sbp.from_numpy(a, x, 2) @ sbp.from_numpy(b, w, 2)
    assert str(found.layout) == f"({made})" and _steps(found) == steps
    numpy.testing.assert_allclose(found.numpy(), a @ b, rtol=1e-12)


def test_the_smaller_operand_moves():
    mesh = Mesh((2,))
    big, small = sbp.ones((64, 8), "S(0)", mesh), sbp.ones((8, 2), "S(0)", mesh)
    found = big @ small
    assert str(found.layout) == "(S(0))" and _steps(found) == [("matmul, input w", "all_gather")]
    wide, narrow = sbp.ones((16, 32), "S(0)", mesh), sbp.ones((16, 32), "S(1)", mesh)
    assert len((wide + narrow).history) == 1 and not (wide + narrow).layout.has_partial


def test_a_bias_is_added_to_a_sum_without_reducing_it():
    total = sbp.ones((4, 6), "S(1)", 2) @ sbp.ones((6, 8), "S(0)", 2)
    found = total + sbp.ones((8,), None, 2)
    assert str(found.layout) == "(P)" and _steps(found) == [("add, input y", "fill")]
    assert (found.numpy() == 7).all()


def test_a_tensor_that_goes_in_twice_is_boxed_once():
    x = sbp.from_numpy(numpy.arange(4.0), "P", 2)
    found = x * x
    assert len(found.history) == 1
    assert found.numpy().tolist() == [0, 1, 4, 9]


def test_the_cheapest_of_all_signatures_is_taken():
    """Against every signature priced on its own."""
    mesh, rng = MESHES[2], RNG(5)
    table = boxing_table(mesh, BytesMoved())
    for _ in range(30):
        types = [ops.matmul.cases[0].types[0], ops.matmul.cases[0].types[1]]
        layouts = [random_layout(rng, t.shape, t.dtype, mesh) for t in types]
        tensors = [sbp.ones(t.shape, layout, mesh) for t, layout in zip(types, layouts)]
        found = ops.matmul(*tensors)
        taken = sum(table.costs.collective_seconds(r.kind, mesh, r.mesh_axis, r.bytes) for r in found.history)
        prices = [
            sum(table.seconds(t, before, after) for t, before, after in zip(types, layouts, signature.inputs))
            for signature in ops.matmul.bind(types, {}).signatures(mesh.shape)
        ]
        assert taken == pytest.approx(min(prices), rel=1e-9)


def test_boxing_is_explained(caplog):
    caplog.set_level(logging.INFO, logger="sbp.boxing")
    x = sbp.ones((4, 6), "S(0)", Mesh((2,), ("dp",)))
    with sbp.explain_boxing() as outer:
        with sbp.explain_boxing() as inner:
            y = ops.cumsum(x, axis=0)
        z = y.to_layout("P")
    assert [record.kind for record in inner] in (["all_to_all"], ["all_gather"])
    assert outer.records[: len(inner)] == inner.records and len(outer) == len(inner) + len(z.history)
    assert str(inner).startswith("cumsum, input x: f32[4,6] (S(0)) -> ")
    assert "on mesh(dp=2): " in str(inner) and "along dp, " in str(inner) and "bytes per rank" in str(inner)
    assert inner.bytes == sum(record.bytes for record in inner) > 0
    assert "nothing sent" in str(z.history[-1])
    assert [record.getMessage() for record in caplog.records] == [str(record) for record in outer]
    with sbp.explain_boxing() as quiet:
        x + 1
    assert str(quiet) == "nothing was boxed" and len(quiet) == 0


def test_costs_of_a_cluster():
    """Links of the user's own cluster decide: gathering in the node is taken before sending between nodes."""
    with sbp.ranks(costs=Cluster.preset("a100-80g", nodes=2, devices_per_node=2)):
        x = sbp.ones((512, 512), "S(0), S(1)", (2, 2))
        y = ops.cumsum(x, axis=1)
    assert [record.mesh_axis for record in y.history] == [1]
    with pytest.raises(MeshError, match="one mesh"):
        x + sbp.ones((512, 512), "S(0), S(1)", (2, 2))


def test_attributes_of_different_types_are_different_calls():
    """1, 1.0 and True are equal as keys; so are 0.0 and -0.0 (report R032)."""
    x = sbp.ones((4,), "S(0)", 2, "f32")
    assert ops.full(shape=(1,), value=1, dtype="f32").dtype == numpy.float32
    found = [numpy.copysign(1, (ops.scale(x, factor=factor)).numpy())[0] for factor in (0.0, -0.0, 0.0)]
    assert found == [1, -1, 1]
    assert [(x.mean() * factor).item() for factor in (1, 2, 3)] == [1, 2, 3]


# -- operators and numbers beside tensors ------------------------------------------------------------------------------


def test_python_operators():
    a, b = RNG(0).standard_normal((4, 6)), RNG(1).standard_normal((4, 6)) + 5
    for layout in ("S(0)", "S(1)", "B", "P"):
        x, y = sbp.from_numpy(a, layout, 2), sbp.from_numpy(b, "S(1)", 2)
        pairs = [
            (x + y, a + b),
            (x - y, a - b),
            (x * y, a * b),
            (x / y, a / b),
            (x + 2, a + 2),
            (2 - x, 2 - a),
            (3 * x, 3 * a),
            (x / 4, a / 4),
            (1 / y, 1 / b),
            (-x, -a),
            (y**2, b**2),
            (x @ y.transpose(), a @ b.T),
            (x.sum(0), a.sum(0)),
            (x.mean(), a.mean()),
            (x.reshape(8, 3), a.reshape(8, 3)),
            (x.permute(1, 0), a.T),
            (x.astype("f32"), a.astype("f4")),
            (x + b, a + b),
            (b - x, b - a),
            (ops.maximum(x, 0.5), numpy.maximum(a, 0.5)),
            (x + b[0], a + b[0]),
            (abs(x), abs(a)),
            (x.T, a.T),
            (x.max(1), a.max(1)),
            (x.min(0, True), a.min(0, keepdims=True)),
            (x // 0.5, a // 0.5),
            (3 // y, 3 // b),
            (x % y, a % b),
            (7 % y, 7 % b),
            (2**x, 2**a),
        ]
        for number, (found, expected) in enumerate(pairs):
            numpy.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12, err_msg=f"{number} {layout}")


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "B", "P", "P(max)"])
def test_comparisons_go_element_by_element(layout):
    """As NumPy's, NaN and infinity included; with numbers, arrays and tensors, on either side."""
    a = RNG(0).integers(-2, 3, (5, 3)).astype(float)
    a[0, 0], a[1, 1], a[2, 2] = numpy.nan, numpy.inf, -numpy.inf
    b = RNG(1).integers(-2, 3, (5, 3)).astype(float)
    x, y = sbp.from_numpy(a, "B", 3) if layout == "P" else sbp.from_numpy(a, layout, 3), sbp.from_numpy(b, layout, 3)
    for compare in (eq, ne, lt, le, gt, ge):
        for other, right in ((y, b), (b, b), (1, 1), (0.5, 0.5), (numpy.float32(-1), -1)):
            found = compare(x, other)
            assert found.dtype == "bool", compare
            numpy.testing.assert_array_equal(found.numpy(), compare(a, right), str((compare, right)))
        numpy.testing.assert_array_equal(compare(1, x).numpy(), compare(1, a))
        numpy.testing.assert_array_equal(compare(sbp.from_numpy(numpy.arange(4), "S(0)", 3), 1.5).numpy(),
                                         compare(numpy.arange(4), 1.5))  # fmt: skip
    assert (x == None) is False and (x != "text") is True  # noqa: E711  what is no number is equal to no tensor
    assert len({x, y, x}) == 2, "tensors are told apart by what they are, not by their numbers"


def test_logic_and_bits():
    a, b = RNG(0).integers(0, 2, 7).astype(bool), RNG(1).integers(0, 2, 7).astype(bool)
    n, m = RNG(2).integers(-9, 9, 7), RNG(3).integers(-9, 9, 7)
    for left, right in ((a, b), (n, m)):
        x, y = sbp.from_numpy(left, "S(0)", 3), sbp.from_numpy(right, "B", 3)
        for found, expected in ((x & y, left & right), (x | y, left | right), (x ^ y, left ^ right), (~x, ~left)):
            assert found.dtype == x.dtype
            numpy.testing.assert_array_equal(found.numpy(), expected)
    x = sbp.from_numpy(n, "S(0)", 3)
    for found, expected in ((x & 3, n & 3), (1 | x, 1 | n), (x ^ -1, n ^ -1), (x // 2, n // 2), (x % 3, n % 3)):
        assert found.dtype == "i64"
        numpy.testing.assert_array_equal(found.numpy(), expected)
    numpy.testing.assert_array_equal(((x > -3) & (x <= 4)).numpy(), (n > -3) & (n <= 4))


@pytest.mark.parametrize("layout", ["S(0)", "B", "P"])
def test_division_by_zero_is_as_in_numpy(layout):
    a = numpy.array([1.0, -2.0, 0.0, 3.0])
    with numpy.errstate(all="ignore"):
        for zero in (0, 0.0, -0.0):
            numpy.testing.assert_array_equal((sbp.from_numpy(a, layout, 3) / zero).numpy(), a / float(zero))
    with pytest.raises(RuleError, match="not whole"):
        sbp.arange(4) / 0


def test_symbols_have_the_same_operators():
    """What is written for global tensors can be traced, and the other way round."""

    def program(x, y):
        return (abs(x) >= 1) & ~(y < x) | (x % 2 == 0.5), (x // 0.5) * 3 ** (x % 1), x.T.max(0) != y.T.min(0)

    arrays = RNG(0).standard_normal((4, 6)), RNG(1).standard_normal((4, 6))
    with GraphBuilder() as builder:
        type = sbp.from_numpy(arrays[0]).type
        made = program(builder.source("x", type), builder.source("y", type))
        graph = builder.finish(made)
    found = [evaluate(graph, dict(zip("xy", arrays)))[item.name] for item in made]
    eager = program(*(sbp.from_numpy(array, "S(0)", 3) for array in arrays))
    x, y = arrays
    expected = (
        (abs(x) >= 1) & ~(y < x) | (x % 2 == 0.5), (x // 0.5) * 3 ** (x % 1), x.T.max(0) != y.T.min(0)
    )  # fmt: skip
    for one, other, right in zip(found, eager, expected):
        numpy.testing.assert_allclose(one, right, rtol=1e-12)
        numpy.testing.assert_allclose(other.numpy(), right, rtol=1e-12)


def test_nothing_branches_on_a_symbol():
    with GraphBuilder() as builder:
        x = builder.source("x", sbp.ones((4,)).type)
        with pytest.raises(GraphError, match="has no value while a program is traced"):
            assert x > 0
        with pytest.raises(GraphError, match="no value"):
            assert x in [x + 1]
    assert x not in [None, "text", len]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sbp.from_numpy([[1], [2, 3]]), "from_numpy: list cannot be made an array"),
        (lambda: sbp.from_local([[[1], [2, 3]], [1]], "S(0)", 2), "rank 0: list cannot be made an array"),
        (lambda: sbp.from_local(3, "P", 2), "give a list of one array per rank"),
        (lambda: sbp.from_local([1, 2], "P", 2, "ab"), "whole numbers in a tuple"),
        (lambda: sbp.ones((2.5,)), r"whole numbers in a tuple, such as \(8, 16\), got \(2.5,\)"),
        (lambda: sbp.ones("ab"), "whole numbers in a tuple"),
        (lambda: sbp.ones((2,), mesh=2.5), r"whole size 1 or more, got \[2.5\]"),
        (lambda: sbp.arange(float("nan")), "never ends"),
        (lambda: sbp.arange(0, float("inf")), "never ends"),
        (lambda: sbp.randn((2,), dtype="float99"), "unknown element type 'float99'"),
        (lambda: sbp.randn((2,), seed="a"), "a seed is a whole number, got 'a'"),
        (lambda: sbp.randint(0, 3.5, (2,)), "takes whole numbers"),
        (lambda: sbp.randint(0, 2**40, (2,), dtype="i32"), "i32 holds -2147483648 to 2147483647"),
        (lambda: sbp.full((2,), 0.5, dtype="i64"), "0.5 is none of the whole numbers that i64 holds"),
        (lambda: sbp.full((2,), float("nan"), dtype="i32"), "nan is none of the whole numbers"),
        (lambda: sbp.full((2,), 300, dtype="u8"), "300 is none of the whole numbers"),
        (lambda: sbp.arange(4).updated(0, 0.5), r"cannot write 0.5 into the integers"),
        (lambda: sbp.arange(4).updated([0], float("inf")), "cannot write inf"),
        (lambda: ops.pad(sbp.arange(4), before=(1,), after=(0,), value=float("nan")), "nan is none"),
        (lambda: ops.clamp(sbp.arange(4), low=0.5), "holds integers; cast it"),
        (lambda: sbp.ones((4, 4)).updated(0, numpy.ones(3)), r"where \[4\] is the shape"),
        (lambda: sbp.ones((4, 4)).updated([0, 1], numpy.ones(3)), r"where \[2, 4\] is the shape"),
        (lambda: sbp.ones((4, 4)).updated(0, "a"), "cannot write"),
        (lambda: sbp.ones((4, 4)).updated(0, None), "cannot write"),
        (lambda: sbp.ones((4, 4))[::0], "slice step cannot be zero"),
        (lambda: sbp.ones((4, 4))["a":2.5], "cannot index dimension 0"),
        (lambda: sbp.ones((4, 4)).to_local("a"), "has the ranks 0 to 0, got a"),
        (lambda: sbp.show_layout((4,), "S(0)"), "needs a mesh"),
        (lambda: sbp.arange(4) % 0.5, "0.5 is none of the whole numbers"),
        (lambda: sbp.ones(4) ** sbp.ones(4), "exponent must be a number"),
        (lambda: (-2) ** sbp.ones(4), "base must be a number above 0"),
        (lambda: len(sbp.ones(())), "has no length"),
    ],
)
def test_what_cannot_be_made(make, message):
    with pytest.raises(SbpError, match=message):
        make()


def test_element_types_by_any_usual_name():
    for name in ("f16", "float16", numpy.float16, numpy.dtype("float16")):
        assert [maker((2,), dtype=name).dtype for maker in (sbp.zeros, sbp.randn, sbp.rand)] == ["f16"] * 3, name
        assert sbp.ones(3).astype(name).dtype == "f16" and sbp.ones(3).astype(name).numpy().dtype == "float16"
    assert sbp.arange(3, dtype="int32").numpy().dtype == "int32" and sbp.randint(0, 3, 4, dtype="uint8").dtype == "u8"


def test_numbers_take_the_tensors_type():
    x = sbp.ones((3,), "S(0)", 2, "f32")
    assert ops.maximum(x, 2).dtype == ops.maximum(x, 2.5).dtype == "f32"
    assert ops.maximum(sbp.ones((3,), "S(0)", 2, "i32"), 2).dtype == "i32"
    assert ops.where(numpy.array([True, False, True]), x, x * 2).numpy().tolist() == [1, 2, 1]


def test_scalars():
    x = sbp.arange(10, layout="S(0)", mesh=2).sum()
    assert str(x.layout) == "(P)" and x.item() == 45 and int(x) == 45 and float(x) == 45.0 and bool(x)
    assert (x + 10).item() == 55
    with pytest.raises(GraphError, match="10 elements"):
        sbp.arange(10).item()


def test_what_does_not_go_together():
    x = sbp.ones((4,), "S(0)", 2)
    with pytest.raises(MeshError, match=r"input 1 is f32\[4\] \(S\(0\)\) on mesh\(x=4\), another one f32\[4\]"):
        x + sbp.ones((4,), "S(0)", 4)
    with GraphBuilder() as builder, pytest.raises(GraphError, match="eager"):
        x + builder.source("a", x.type)
    with pytest.raises(GraphError, match="give a global tensor"):
        ops.add(x, "text")
    with pytest.raises(RuleError, match=r"operator matmul\(f32\[2,3\], f32\[4,5\]\)"):
        sbp.ones((2, 3), "S(0)", 2) @ sbp.ones((4, 5), "S(0)", 2)


def test_a_kernel_that_fails_names_operator_rank_and_shapes(own_registry):
    x = sbp.from_numpy(numpy.ones((4, 4)), "S(0)", 2)

    @sbp.operator("m n -> m n", name="fails_on_the_second")
    def fails(xp, x):
        raise ValueError("no")

    with pytest.raises(
        ExecutionError, match=r"fails_on_the_second.* rank 0, on local \(float64\[2, 4\]\): ValueError: no"
    ):
        fails(x)


def test_an_operator_of_the_users(own_registry):
    @sbp.operator("m n+ -> m", name="users_row_sum", linear="x")
    def row_sum(xp, x):
        return x.sum(axis=1)

    array = RNG(0).standard_normal((5, 7))
    for layout, made in [("S(0)", "S(0)"), ("S(1)", "P"), ("P", "P"), ("B", "B")]:
        found = row_sum(sbp.from_numpy(array, layout, 3))
        assert str(found.layout) == f"({made})"
        numpy.testing.assert_allclose(found.numpy(), array.sum(1), rtol=1e-12)


# -- slicing -----------------------------------------------------------------------------------------------------------

KEYS = [
    numpy.s_[2],
    numpy.s_[-1],
    numpy.s_[:],
    numpy.s_[...],
    numpy.s_[1:4],
    numpy.s_[:, 1:3],
    numpy.s_[::2],
    numpy.s_[::-1],
    numpy.s_[4:0:-2],
    numpy.s_[-3:, 0],
    numpy.s_[None],
    numpy.s_[:, None, 2],
    numpy.s_[..., 1],
    numpy.s_[1, ..., 0],
    numpy.s_[3:3],
    numpy.s_[5:2],
    numpy.s_[:, :, None, ::-1],
    numpy.s_[0, 1, 2],
    numpy.s_[..., None, 0:2, 1:],
    numpy.s_[[0, 3, 3]],
    numpy.s_[:, [2, 0]],
    numpy.s_[..., [1, -1]],
    numpy.s_[numpy.array([[0, 1], [4, 2]])],
    numpy.s_[10:],
    numpy.s_[numpy.int64(3)],
]


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "S(2)", "B", "P"])
def test_slicing(layout):
    array = RNG(0).standard_normal((5, 4, 3))
    x = sbp.from_numpy(array, layout, 2)
    for key in KEYS:
        found = x[key]
        numpy.testing.assert_allclose(found.numpy(), array[key], rtol=1e-12, err_msg=str(key))
        assert found.shape == array[key].shape
    assert [part.shape for part in x] == [(4, 3)] * 5
    places = sbp.from_numpy(numpy.array([4, 0]), None, 2)
    numpy.testing.assert_allclose(x[places].numpy(), array[[4, 0]], rtol=1e-12)


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "S(2)", "B", "P"])
def test_updated(layout):
    array = RNG(0).standard_normal((5, 4, 3))
    x = sbp.from_numpy(array, layout, 2)
    for key in KEYS:
        if numpy.any([item is None for item in (key if isinstance(key, tuple) else (key,))]):
            continue
        expected = array.copy()
        if isinstance(key, numpy.ndarray) or "[0, 3, 3]" in str(key):
            continue  # places that repeat, or lie in two dimensions, say no one thing
        expected[key] = 7.0
        numpy.testing.assert_allclose(x.updated(key, 7.0).numpy(), expected, rtol=1e-12, err_msg=str(key))
        value = RNG(1).standard_normal(array[key].shape)
        expected[key] = value
        given = sbp.from_numpy(value, None, 2)
        numpy.testing.assert_allclose(x.updated(key, given).numpy(), expected, rtol=1e-12, err_msg=str(key))
    numpy.testing.assert_array_equal(x.numpy(), array)


def test_what_is_written_may_be_a_list():
    x = sbp.from_numpy(numpy.zeros((3, 2)), "S(0)", 2)
    assert x.updated(1, [1, 2]).numpy().tolist() == [[0, 0], [1, 2], [0, 0]]
    assert x.updated([2, 0], [[1.5, 2]]).numpy().tolist() == [[1.5, 2], [0, 0], [1.5, 2]]


def test_indices_that_do_not_fit():
    x = sbp.ones((4, 3), "S(0)", 2)
    for key, message in [
        (numpy.s_[4], "index 4 is outside dimension 0"),
        (numpy.s_[0, -4], "index -4 is outside dimension 1"),
        (numpy.s_[0, 0, 0], "3 indices for the 2 dimensions"),
        (numpy.s_[..., ...], "once"),
        (numpy.s_[1.5], "cannot index"),
        (numpy.s_[[0, 4]], "reach outside dimension 0"),
        (numpy.s_[[0], [1]], "stands alone"),
        (numpy.s_[True], "cannot index"),
        (numpy.ones(4, bool), "depends on the data"),
    ]:
        with pytest.raises(RuleError, match=message):
            x[key]
    with pytest.raises(GraphError, match="updated"):
        x[:2] = 0


def test_symbols_are_indexed_alike():
    from sbp.interpreter import evaluate

    array = RNG(0).standard_normal((5, 4, 3))
    with GraphBuilder() as builder:
        x = builder.source("x", sbp.from_numpy(array).type)
        made = [x[1:, ::-2, 0], x.updated((slice(None), 1), 0.0)]
        with pytest.raises(GraphError, match="updated"):
            x[0] = 1
    graph = builder.finish(made)
    found = evaluate(graph, {"x": array})
    numpy.testing.assert_array_equal(found[graph.outputs[0]], array[1:, ::-2, 0])
    array[:, 1] = 0
    numpy.testing.assert_array_equal(found[graph.outputs[1]], array)


# -- the public face ---------------------------------------------------------------------------------------------------


def test_public_names():
    assert sorted(sbp.__all__) == sbp.__all__
    for name in sbp.__all__:
        assert getattr(sbp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'rando'"):
        sbp.rando  # noqa: B018
    assert is_floating(sbp.randn((2,)).dtype)


def test_import_loads_no_solver():
    heavy = ("ortools", "networkx", "rich", "yaml", "torch", "plotly")
    code = f"import sbp, sys; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    code = "import sbp, sys; sbp.ones((2,), 'S(0)', 2); print('ortools' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )


@pytest.mark.parametrize("size", [2, 4])
def test_one_process_per_rank(size):
    finished = run_on_mpi("mpi_global_tensor.py", size)
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.split("\n"))[1:] == [f"rank {rank} of {size} agrees" for rank in range(size)]
