"""Interpolation, unequal adaptive pooling and padding by reflection or repetition against PyTorch."""

import numpy
import pytest
from operator_programs import Program, check_against_torch

import sbp
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


@pytest.mark.parametrize("rank, mode", sorted({(rank, mode) for rank, mode, _, _ in CASES if mode != "area"}))
def test_interpolation_by_any_factors(rank, mode):
    """Also those that leave a size as it is, or double it, while pixels would still move."""
    rng = numpy.random.default_rng(rank)
    for _ in range(25):
        shape = tuple(int(size) for size in rng.integers(1, 7, rank))
        factors = tuple(float(max(round(rng.uniform(0.7, 3.3), 1), 1 / size)) for size in shape)
        x = rng.standard_normal((1, 2, *shape))
        expected = functional.interpolate(torch.from_numpy(x), scale_factor=factors, mode=mode).numpy()
        found = ops.interpolate(x, scale_factor=factors, mode=mode)
        numpy.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{shape} by {factors}")


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


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_reading_at_places(mode, padding, aligned):
    """Inside and far outside of the image; values and gradients, those of the places too."""
    grid = RNG.uniform(-3, 3, (2, 4, 3, 2))
    check_against_torch(
        lambda x, grid: ops.grid_sample(x, grid, mode, padding, aligned),
        lambda x, grid: functional.grid_sample(x, grid, mode, padding, aligned),
        IMAGE,
        grid,
        tolerance=1e-10,
    )


def test_reading_at_places_that_are_pixels():
    """The corners and the edges, where a pixel beyond has weight zero; and an image of a single pixel."""
    for aligned in (False, True):
        for image in (IMAGE, IMAGE[:, :, :1, :1]):
            grid = numpy.stack(numpy.meshgrid([-1.0, -0.5, 0, 0.5, 1], [-1.0, 0, 1]), -1)[None].repeat(2, 0)
            for padding in ("zeros", "border", "reflection"):
                found = ops.grid_sample(image, grid, "bilinear", padding, aligned)
                expected = functional.grid_sample(
                    torch.from_numpy(image), torch.from_numpy(grid), "bilinear", padding, aligned
                )
                numpy.testing.assert_allclose(found, expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "S(2)", "S(3)", "P"])
def test_images_that_lie_on_ranks_are_read_alike(layout):
    grid = RNG.uniform(-1.5, 1.5, (2, 4, 3, 2))
    x, places = sbp.from_numpy(IMAGE, layout, 3), sbp.from_numpy(grid, "S(1)", 3)
    numpy.testing.assert_allclose(ops.grid_sample(x, places).numpy(), ops.grid_sample(IMAGE, grid), atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.grid_sample(IMAGE, IMAGE), r"places \(n, ho, wo, 2\), got"),
        (lambda: ops.grid_sample(LINE, numpy.zeros((2, 1, 1, 2))), r"an image \(n, c, h, w\)"),
        (lambda: ops.grid_sample(IMAGE, numpy.zeros((2, 1, 1, 2)), "bicubic"), "mode 'bicubic' is one of"),
        (lambda: ops.grid_sample(IMAGE, numpy.zeros((2, 1, 1, 2)), "nearest", "wrap"), "padding_mode 'wrap' one of"),
    ],
)
def test_what_cannot_be_read_is_refused(call, message):
    with pytest.raises(RuleError, match=message):
        call()
