"""Layouts: spellings, and which box of a tensor every rank holds."""

import math
import subprocess
import sys
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.errors import LayoutError
from sbp.layout import Broadcast, Layout, Partial, Split, broadcast_layout, chunk, layouts_of, parse_sbp
from sbp.mesh import Mesh


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("S(0)", Split(0)),
        ("s(12)", Split(12)),
        (" S ( 1 ) ", Split(1)),
        ("Split(2)", Split(2)),
        ("Shard(1)", Split(1)),
        ("Shard(dim=1)", Split(1)),
        ("split(axis=3)", Split(3)),
        ("B", Broadcast()),
        ("Broadcast", Broadcast()),
        ("Broadcast()", Broadcast()),
        ("R", Broadcast()),
        ("Replicate()", Broadcast()),
        ("P", Partial("sum")),
        ("P(sum)", Partial("sum")),
        ("P(max)", Partial("max")),
        ("p(min)", Partial("min")),
        ("Partial()", Partial("sum")),
        ("Partial(sum)", Partial("sum")),
        ("Partial(reduce_op='max')", Partial("max")),
        ('Partial("min")', Partial("min")),
    ],
)
def test_spellings(text, expected):
    assert parse_sbp(text) == expected
    assert parse_sbp(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not an SBP"),
        ("S", "needs a dimension number"),
        ("S()", "needs a dimension number"),
        ("S(-1)", "needs a dimension number of at least 0"),
        ("S(x)", "needs a dimension number"),
        ("B(0)", "is not an SBP"),
        ("P(avg)", "one of sum, max, min"),
        ("Q(0)", "is not an SBP"),
        ("S(0) B", "is not an SBP"),
        ("S(0", "is not an SBP"),
    ],
)
def test_wrong_spellings_say_what_to_write(text, says):
    with pytest.raises(LayoutError, match=says.replace("(", r"\(")):
        parse_sbp(text)


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("S(0), B", "(S(0), B)"),
        ("(S(0), B)", "(S(0), B)"),
        ("[Shard(0), Replicate()]", "(S(0), B)"),
        ("(Shard(dim=1), Partial(max))", "(S(1), P(max))"),
        ("B", "(B)"),
        ("(B,)", "(B)"),
        ("S(0),S(0),P", "(S(0), S(0), P)"),
        (("S(1)", Partial()), "(S(1), P)"),
        ([Split(0), Broadcast()], "(S(0), B)"),
        (Partial("max"), "(P(max))"),
        (Layout((Split(3),)), "(S(3))"),
    ],
)
def test_layout_spellings(text, printed):
    layout = Layout.parse(text)
    assert str(layout) == printed
    assert Layout.parse(printed) == layout
    assert Layout.parse(printed) in {layout}  # hashable, equal hashes


@pytest.mark.parametrize("text", ["", "()", "S(0),,B", "S(0); B", "(S(0)), (B)", 3, None, ["S(0)", 3]])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(LayoutError):
        Layout.parse(text)


SBPS = st.one_of(
    st.integers(0, 9).map(Split), st.just(Broadcast()), st.sampled_from(["sum", "max", "min"]).map(Partial)
)


@given(st.lists(SBPS, min_size=1, max_size=4))
def test_printing_and_parsing_are_inverse(axes):
    layout = Layout(tuple(axes))
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(str(layout)[1:-1]) == layout
    assert Layout.parse([str(sbp) for sbp in layout]) == layout


def test_dtensor_placements_are_read():
    placements = pytest.importorskip("torch.distributed.tensor")
    given_by_torch = [placements.Shard(1), placements.Replicate(), placements.Partial("max"), placements.Partial()]
    assert str(Layout.parse(given_by_torch)) == "(S(1), B, P(max), P)"


def test_mesh_axes_of_one_rank_are_normalised():
    assert str(Layout.parse("S(0), S(1), P").normal((1, 2, 1))) == "(B, S(1), B)"
    assert Layout.parse("S(0), P").normal((2, 2)) == Layout.parse("S(0), P")


def test_small_parts():
    layout = Layout.parse("S(0), P, B")
    assert (len(layout), layout[1], list(layout)) == (3, Partial(), [Split(0), Partial(), Broadcast()])
    assert layout.has_partial and not layout.is_broadcast
    assert str(layout.replace(1, Broadcast())) == "(S(0), B, B)"
    assert broadcast_layout(2).is_broadcast and not broadcast_layout(2).has_partial
    assert layouts_of(["S(0)", "B"]) == (Layout((Split(0),)), Layout((Broadcast(),)))
    for wrong in (-1, 1.0, "0", None):
        with pytest.raises(LayoutError):
            Split(wrong)
    with pytest.raises(LayoutError, match="sum, max, min"):
        Partial("mean")


@pytest.mark.parametrize(
    ("size", "parts", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [2, 2, 1, 0]),
        (10, 6, [2, 2, 2, 2, 2, 0]),
        (1, 3, [1, 0, 0]),
        (0, 2, [0, 0]),
        (7, 1, [7]),
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
    ],
)
def test_chunks(size, parts, sizes):
    found = [chunk(size, parts, index) for index in range(parts)]
    assert [length for _, length in found] == sizes
    assert [start for start, _ in found] == [min(sum(sizes[:i]), size) for i in range(parts)]


def test_chunks_are_those_of_torch():
    torch = pytest.importorskip("torch")
    for size, parts in product(range(1, 24), range(1, 11)):
        whole = torch.arange(size)
        theirs = [piece.tolist() for piece in whole.chunk(parts)]
        theirs += [[]] * (parts - len(theirs))  # torch leaves the empty ones out
        boxes = (chunk(size, parts, index) for index in range(parts))
        assert [list(range(start, start + length)) for start, length in boxes] == theirs


def test_nested_chunks_are_those_of_torch():
    torch = pytest.importorskip("torch")
    layout = Layout.parse("S(0), S(0)")
    for size, outer, inner in product((1, 2, 5, 7, 12, 13), (1, 2, 3), (1, 2, 4)):
        whole = torch.arange(size)
        for i, j in product(range(outer), range(inner)):
            piece = whole
            for parts, index in ((outer, i), (inner, j)):
                pieces = piece.chunk(parts)
                piece = pieces[index] if index < len(pieces) else piece[:0]
            (box,) = layout.shard((size,), (outer, inner), (i, j)).slices
            assert list(range(size))[box] == piece.tolist()


@pytest.mark.parametrize(
    ("layout", "shape", "mesh_shape", "boxes"),
    [
        ("S(0)", (5, 2), (4,), [((0, 0), (2, 2)), ((2, 0), (2, 2)), ((4, 0), (1, 2)), ((5, 0), (0, 2))]),
        ("S(0), S(1)", (4, 6), (2, 2), [((0, 0), (2, 3)), ((0, 3), (2, 3)), ((2, 0), (2, 3)), ((2, 3), (2, 3))]),
        ("S(0), S(0)", (5,), (2, 2), [((0,), (2,)), ((2,), (1,)), ((3,), (1,)), ((4,), (1,))]),
        ("B, S(0)", (3,), (2, 2), [((0,), (2,)), ((2,), (1,)), ((0,), (2,)), ((2,), (1,))]),
        ("P, S(0)", (3,), (2, 2), [((0,), (2,)), ((2,), (1,)), ((0,), (2,)), ((2,), (1,))]),
        ("B, P(max)", (), (2, 2), [((), ())] * 4),
    ],
)
def test_shards(layout, shape, mesh_shape, boxes):
    layout, mesh = Layout.parse(layout), Mesh(mesh_shape)
    found = [layout.shard(shape, mesh_shape, place) for place in mesh.coordinates()]
    assert [(box.offset, box.shape) for box in found] == boxes
    assert all(box.global_shape == shape for box in found)


@st.composite
def _laid_out(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    options = [Broadcast(), Partial(), *(Split(axis) for axis in range(len(shape)))]
    return shape, mesh_shape, Layout(tuple(draw(st.sampled_from(options)) for _ in mesh_shape))


@given(_laid_out())
@settings(max_examples=200)
def test_shards_tile_the_tensor(example):
    """Along the mesh axes that split, the ranks' boxes cover every element once; along the others they are the same."""
    shape, mesh_shape, layout = example
    covered = numpy.zeros(shape, dtype=int)
    for place in product(*map(range, mesh_shape)):
        box = layout.shard(shape, mesh_shape, place)
        covered[box.slices] += 1
        assert covered[box.slices].shape == box.shape
        assert math.prod(box.shape) <= math.prod(layout.local_shape(shape, mesh_shape))
    copies = math.prod(size for size, sbp in zip(mesh_shape, layout) if not isinstance(sbp, Split))
    assert (covered == copies).all()


@pytest.mark.parametrize(
    ("layout", "shape", "mesh_shape", "says"),
    [
        ("S(2)", (4, 4), (2,), "splits dimension 2, but the shape [4, 4] has 2 dimensions"),
        ("S(0)", (), (2,), "splits dimension 0, but the shape [] has 0 dimensions"),
        ("S(0), B", (4,), (2,), "has 2 entries, but the mesh (2,) has 1 axis"),
        ("B", (4,), (2, 2), "has 1 entry, but the mesh (2, 2) has 2 axes"),
    ],
)
def test_layouts_that_do_not_fit_are_named(layout, shape, mesh_shape, says):
    with pytest.raises(LayoutError) as error:
        Layout.parse(layout).check(shape, mesh_shape, "h.0.weight")
    assert says in str(error.value) and str(error.value).startswith("h.0.weight: layout (")
    with pytest.raises(LayoutError):
        Layout.parse(layout).shard(shape, mesh_shape, (0,) * len(mesh_shape))


def test_html():
    page = Layout.parse("S(0), P(max)")._repr_html_()
    assert "(S(0), P(max))" in page and page.count(">S(0)<") == 1 and page.count(">P(max)<") == 1


def test_layouts_need_nothing_but_the_standard_library():
    """The language itself is light: reading and writing layouts loads no solver, no graph library, no terminal."""
    heavy = ("ortools", "networkx", "rich", "torch", "plotly", "yaml")
    code = f"import sys, sbp.layout, sbp.mesh, sbp.rule; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
