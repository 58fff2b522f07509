"""Meshes: ranks in a named grid, row-major."""

import math
from itertools import product

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.errors import MeshError
from sbp.mesh import Mesh


def test_ranks_are_row_major():
    mesh = Mesh((16, 8), ("dp", "tp"))
    assert (mesh.size, mesh.ndim) == (128, 2)
    assert mesh.coordinate(8 * 3 + 5) == (3, 5)
    assert mesh.rank((3, 5)) == 8 * 3 + 5
    assert [mesh.stride(axis) for axis in (0, 1)] == [8, 1]
    assert str(mesh) == "mesh(dp=16, tp=8)"


@pytest.mark.parametrize(
    ("mesh", "axis", "groups"),
    [
        (Mesh((4,)), 0, ((0, 1, 2, 3),)),
        (Mesh((2, 3)), 0, ((0, 3), (1, 4), (2, 5))),
        (Mesh((2, 3)), 1, ((0, 1, 2), (3, 4, 5))),
        (Mesh((2, 2, 2)), 1, ((0, 2), (1, 3), (4, 6), (5, 7))),
        (Mesh((1, 2)), 0, ((0,), (1,))),
    ],
)
def test_groups(mesh, axis, groups):
    assert mesh.groups(axis) == groups


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
def test_groups_and_coordinates_agree_with_numpy(shape):
    mesh = Mesh(shape)
    grid = numpy.arange(math.prod(shape)).reshape(shape)
    assert [tuple(place) for place in numpy.argwhere(grid >= 0)] == list(mesh.coordinates())
    for place in product(*map(range, shape)):
        assert mesh.rank(place) == grid[place]
        assert mesh.coordinate(int(grid[place])) == place
    for axis in range(len(shape)):
        lines = numpy.moveaxis(grid, axis, -1).reshape(-1, shape[axis])
        assert mesh.groups(axis) == tuple(map(tuple, lines.tolist()))
        assert mesh.stride(axis) == grid.strides[axis] // grid.itemsize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", Mesh((4,))),
        ("2,8", Mesh((2, 8))),
        ("dp=2,tp=8", Mesh((2, 8), ("dp", "tp"))),
        (" dp = 2 , tp = 8 ", Mesh((2, 8), ("dp", "tp"))),
    ],
)
def test_parse(text, expected):
    assert Mesh.parse(text) == expected


def test_names():
    assert Mesh((2, 3)).names == ("x", "y")
    assert Mesh(4, "dp") == Mesh((4,), ("dp",))
    assert len(set(Mesh((1,) * 8).names)) == 8
    assert Mesh((2,), ("a",)) != Mesh((2,), ("b",))
    assert len({Mesh((2, 2)), Mesh((2, 2))}) == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Mesh(()), "at least one axis"),
        (lambda: Mesh((2, 0)), "whole size 1 or more, got [2, 0]"),
        (lambda: Mesh((2.5,)), "whole size 1 or more"),
        (lambda: Mesh((2, 2), ("dp",)), "needs 2 different axis names, got ['dp']"),
        (lambda: Mesh((2, 2), ("dp", "dp")), "needs 2 different axis names"),
        (lambda: Mesh.parse("2x8"), "'2x8' is not a mesh; write sizes such as 2,8"),
        (lambda: Mesh.parse("dp=2,8"), "different axis names"),
        (lambda: Mesh.parse("dp=two"), "is not a mesh"),
        (lambda: Mesh.parse(""), "is not a mesh"),
        (lambda: Mesh.parse("-2"), "is not a mesh"),
        (lambda: Mesh((2, 3)).coordinate(6), "ranks 0 to 5, got 6"),
        (lambda: Mesh((2, 3)).coordinate(-1), "ranks 0 to 5, got -1"),
        (lambda: Mesh((2, 3)).rank((0, 3)), "[0, 3] is no place of mesh(x=2, y=3)"),
        (lambda: Mesh((2, 3)).rank((0,)), "one index per axis"),
    ],
)
def test_wrong_meshes_say_why(make, says):
    with pytest.raises(MeshError) as error:
        make()
    assert says in str(error.value)


@pytest.mark.parametrize("text", ["=2", " =2", "dp=2,=4", "2,=4", "dp=", "="])
def test_an_empty_axis_name_is_no_mesh(text):
    with pytest.raises(MeshError, match="is not a mesh; write sizes such as 2,8"):
        Mesh.parse(text)


@pytest.mark.parametrize("names", [("",), (" ",), (5,), (None,)])
def test_axis_names_are_texts(names):
    with pytest.raises(MeshError, match="texts and not empty"):
        Mesh((2,), names)


def test_a_truth_value_is_no_size():
    with pytest.raises(MeshError, match="whole size 1 or more"):
        Mesh((True, 2))
