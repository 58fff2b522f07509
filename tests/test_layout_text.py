"""Layouts drawn in text, as users of other systems asked for (reports R159, R161)."""

import doctest
from itertools import product

import numpy
import pytest

import sbp
from sbp import layout_text
from sbp.errors import LayoutError
from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh

GRID = Mesh((2, 2), ("dp", "tp"))


def lines(*arguments):
    return sbp.show_layout(*arguments).split("\n")


def test_r159_a_grid_of_rows_columns_and_ranks():
    assert lines((8, 8), "S(0), S(1)", GRID) == [
        "[8, 8] (S(0), S(1)) on mesh(dp=2, tp=2)",
        "[0:4, 0:4] rank 0   [0:4, 4:8] rank 1",
        "[4:8, 0:4] rank 2   [4:8, 4:8] rank 3",
    ]
    assert lines((8, 8), "S(1), S(0)", GRID)[1:] == [
        "[0:4, 0:4] rank 0   [0:4, 4:8] rank 2",
        "[4:8, 0:4] rank 1   [4:8, 4:8] rank 3",
    ]


def test_r159_ranks_that_hold_the_same_share_a_cell():
    assert lines((8, 8), "S(0), B", GRID)[1:] == ["[0:4, 0:8] ranks 0, 1", "[4:8, 0:8] ranks 2, 3"]
    assert lines((8, 8), "B, B", GRID)[1:] == ["[0:8, 0:8] ranks 0 to 3"]
    assert lines((8, 8), "P(max), S(0)", GRID)[1:] == [
        "[0:4, 0:8] ranks 0, 2",
        "[4:8, 0:8] ranks 1, 3",
        "along dp ranks hold parts, whose max is the tensor",
    ]


def test_r161_tensors_of_any_rank_and_empty_ones():
    assert lines((), "B, P", GRID)[1:] == ["[] ranks 0 to 3", "along tp ranks hold parts, whose sum is the tensor"]
    assert lines((4, 5, 6), "S(2), S(0)", GRID)[1:] == [
        "[0:2, 0:5, 0:3] rank 0   [0:2, 0:5, 3:6] rank 2",
        "[2:4, 0:5, 0:3] rank 1   [2:4, 0:5, 3:6] rank 3",
    ]
    assert len(lines((4, 4, 4), "S(0), S(1), S(2)", Mesh((2, 2, 2)))) == 9
    assert lines((0, 3), "S(0)", Mesh((2,)))[1:] == ["the tensor is empty, and so are all shards"]
    assert lines((3,), "S(0), S(0)", GRID)[1:] == ["[0:1] rank 0", "[1:2] rank 1", "[2:3] rank 2", "rank 3: nothing"]


def test_a_global_tensor_shows_itself():
    x = sbp.zeros((4, 2), "S(0)", 2)
    assert lines(x) == lines((4, 2), "S(0)", Mesh((2,)))


def test_the_example_of_the_docstring():
    assert doctest.testmod(layout_text).failed == 0


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 1)])
def test_every_rank_and_every_element_is_shown(shape):
    mesh = Mesh(shape)
    choices = [Split(0), Split(1), Broadcast(), Partial()]
    for size, axes in product([(5, 3), (1, 7), (6, 6)], product(choices, repeat=2)):
        text = lines(size, Layout(axes), mesh)
        seen = numpy.zeros(size, int)
        for line in text[1:]:
            for cell in line.split("   "):
                if cell.startswith("["):
                    box = cell[1 : cell.index("]")]
                    seen[tuple(slice(*map(int, part.split(":"))) for part in box.split(", "))] += 1
        assert (seen == 1).all(), text


def test_layouts_that_do_not_fit():
    with pytest.raises(LayoutError, match="splits dimension 2"):
        sbp.show_layout((4, 4), "S(2)", Mesh((2,)))
    with pytest.raises(LayoutError, match="2 entries"):
        sbp.show_layout((4, 4), "S(0), B", Mesh((2,)))
