"""Interpolation, unequal adaptive pooling and padding by reflection or repetition against PyTorch."""

import numpy
import pytest
from operator_programs import Program, check_against_torch

from sbp.errors import RuleError
from sbp.ops import library as ops

torch = pytest.importorskip("torch")
functional = torch.nn.functional

RNG = numpy.random.default_rng(19)
LINE = RNG.standard_normal((2, 3, 7))
IMAGE = RNG.standard_normal((2, 3, 5, 6))
VOLUME = RNG.standard_normal((1, 2, 3, 4, 5))
OF_RANK = {1: LINE, 2: IMAGE, 3: VOLUME}
SIZES = {1: [(4,), (7,), (13,), (1,)], 2: [(3, 9), (10, 12), (1, 7)], 3: [(5, 2, 7), (6, 8, 10)]}
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}

CASES = [
    (rank, mode, size, align)
    for rank in OF_RANK
    for mode in ("nearest", "nearest-exact", "area", LINEAR[rank], *(("bicubic",) if rank == 2 else ()))
    for size in SIZES[rank]
    for align in ((False, True) if mode.endswith(("linear", "cubic")) else (False,))
]


@pytest.mark.parametrize("rank, mode, size, align", CASES)
def test_interpolation_to_a_size(rank, mode, size, align):
    def theirs(x):
        return functional.interpolate(x, size=size, mode=mode, **({"align_corners": True} if align else {}))

    check_against_torch(
        lambda x: ops.interpolate(x, size=size, mode=mode, align_corners=align), theirs, OF_RANK[rank], tolerance=1e-11
    )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("factor", [2, 3.0, 0.5, 1.7, (2, 0.75)])
def test_interpolation_by_a_factor(mode, factor):
    theirs = float(factor) if not isinstance(factor, tuple) else tuple(map(float, factor))
    check_against_torch(
        lambda x: ops.interpolate(x, scale_factor=factor, mode=mode),
        lambda x: functional.interpolate(x, scale_factor=theirs, mode=mode),
        IMAGE,
        tolerance=1e-11,
    )


def test_nearest_by_whole_factors_keeps_a_split_dimension_split():
    ops_used = {node.op for node in Program(lambda x: ops.interpolate(x, scale_factor=2), IMAGE).graph.nodes}
    assert "resample" not in ops_used


@pytest.mark.parametrize("size", [1, 2, 3, 4, (5, 1), (2, 4), (4, 6)])
def test_adaptive_pooling(size):
    check_against_torch(
        lambda x: ops.adaptive_avg_pool2d(x, size), lambda x: functional.adaptive_avg_pool2d(x, size), IMAGE
    )
    check_against_torch(
        lambda x: ops.adaptive_max_pool2d(x, size), lambda x: functional.adaptive_max_pool2d(x, size), IMAGE
    )


def test_pooling_of_lines_and_volumes():
    check_against_torch(lambda x: ops.adaptive_avg_pool1d(x, 3), lambda x: functional.adaptive_avg_pool1d(x, 3), LINE)
    check_against_torch(
        lambda x: ops.adaptive_avg_pool3d(x, (2, 4, 3)), lambda x: functional.adaptive_avg_pool3d(x, (2, 4, 3)), VOLUME
    )
    for mine, theirs, x in (
        (ops.max_pool1d, functional.max_pool1d, LINE),
        (ops.avg_pool1d, functional.avg_pool1d, LINE),
        (ops.max_pool3d, functional.max_pool3d, VOLUME),
        (ops.avg_pool3d, functional.avg_pool3d, VOLUME),
    ):
        check_against_torch(lambda x, f=mine: f(x, 2), lambda x, f=theirs: f(x, 2), x)
        check_against_torch(lambda x, f=mine: f(x, 3, 2, 1), lambda x, f=theirs: f(x, 3, 2, 1), x)


@pytest.mark.parametrize("padding", [(1, 2), (2, 0, 1, 3), (0, 0, 4, 4)])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padding(mode, padding):
    mine = {"reflect": ops.reflection_pad, "replicate": ops.replication_pad, "circular": ops.circular_pad}[mode]
    check_against_torch(
        lambda x: mine(x, padding),
        lambda x: functional.pad(x, padding if len(padding) == 4 else (*padding, 0, 0), mode=mode),
        IMAGE,
    )


def test_whole_numbers_are_selected_but_not_weighed():
    x = RNG.integers(0, 9, (1, 2, 5))
    found = Program(lambda x: ops.interpolate(x, size=3), x).forward()[0]
    numpy.testing.assert_array_equal(found, x[..., [0, 1, 3]])
    with pytest.raises(RuleError, match="weighs floating numbers"):
        Program(lambda x: ops.interpolate(x, size=3, mode="linear"), x)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: ops.interpolate(x, size=3, mode="bilinear"), "does not fit shape"),
        (lambda x: ops.interpolate(x, size=3, scale_factor=2), "either size or scale_factor"),
        (lambda x: ops.interpolate(x), "either size or scale_factor"),
        (lambda x: ops.interpolate(x, size=3, align_corners=True), "align_corners has no meaning"),
        (lambda x: ops.interpolate(x, size=0), "cannot make spatial size"),
        (lambda x: ops.reflection_pad(x, (7, 0)), "reflects fewer than 7"),
        (lambda x: ops.reflection_pad(x, (1, 0, 0)), "two numbers per dimension"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(RuleError, match=message):
        Program(call, LINE)
