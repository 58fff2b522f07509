"""Turning, scans, sorting and scattering against PyTorch; the global norm under layouts."""

import numpy
import pytest
from operator_programs import Program, check_against_torch, close

from sbp.errors import RuleError
from sbp.operator import REGISTRY, parse_type
from sbp.ops import library as ops

RNG = numpy.random.default_rng(13)
X = RNG.standard_normal((3, 4, 5))
WITH_TIES = RNG.integers(0, 4, (4, 9)).astype(float)
WITH_ZEROS = numpy.where(RNG.random((4, 5)) < 0.3, 0.0, RNG.standard_normal((4, 5)))

torch = pytest.importorskip("torch")

PROGRAMS = {
    "flip": (lambda x: ops.flip(x, axis=(0, -1)), lambda x: x.flip(0, -1)),
    "roll": (lambda x: ops.roll(x, shift=3, axis=1), lambda x: x.roll(3, 1)),
    "roll back": (lambda x: ops.roll(x, shift=-1, axis=-1), lambda x: x.roll(-1, -1)),
    "repeat_interleave": (lambda x: ops.repeat_interleave(x, 3, 1), lambda x: x.repeat_interleave(3, 1)),
    "tile": (lambda x: ops.tile(x, 2, -1), lambda x: x.repeat(1, 1, 2)),
    "cumsum": (lambda x: ops.cumsum(x, axis=1), lambda x: x.cumsum(1)),
    "cumsum reverse": (lambda x: ops.cumsum(x, axis=0, reverse=True), lambda x: x.flip(0).cumsum(0).flip(0)),
    "cumprod": (lambda x: ops.cumprod(x, axis=-1), lambda x: x.cumprod(-1)),
}


@pytest.mark.parametrize("label", PROGRAMS)
def test_equals_pytorch(label):
    check_against_torch(*PROGRAMS[label], X)


def test_products_with_zeros():
    check_against_torch(lambda x: ops.cumprod(x, axis=1), lambda x: x.cumprod(1), WITH_ZEROS)


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_sorting_is_stable(axis, descending):
    check_against_torch(
        lambda x: ops.sort(x, axis=axis, descending=descending),
        lambda x: tuple(torch.sort(x, dim=axis, descending=descending, stable=True)),
        WITH_TIES,
    )
    check_against_torch(
        lambda x: ops.argsort(x, axis=axis, descending=descending),
        lambda x: torch.sort(x, dim=axis, descending=descending, stable=True)[1],
        WITH_TIES,
    )


@pytest.mark.parametrize("largest", [False, True])
def test_topk(largest):
    check_against_torch(
        lambda x: ops.topk(x, k=2, axis=1, largest=largest), lambda x: tuple(torch.topk(x, 2, 1, largest)), X
    )


def test_scatter_to_different_places():
    index = numpy.argsort(RNG.random((3, 4, 5)), axis=-1)[..., :2]
    source = RNG.standard_normal(index.shape)
    check_against_torch(
        lambda x, i, s: ops.scatter(x, i, s, axis=-1), lambda x, i, s: x.scatter(-1, i, s), X, index, source
    )


def test_scatter_add_and_index_add_to_equal_places():
    index = RNG.integers(0, 4, (3, 7, 5))
    source = RNG.standard_normal(index.shape)
    check_against_torch(
        lambda x, i, s: ops.scatter_add(x, i, s, axis=1), lambda x, i, s: x.scatter_add(1, i, s), X, index, source
    )
    rows = RNG.integers(0, 4, 6)
    check_against_torch(
        ops.index_add, lambda x, i, s: x.index_add(0, i, s), WITH_ZEROS, rows, RNG.standard_normal((6, 5))
    )


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_by_the_global_norm(limit):
    gradients = [RNG.standard_normal(shape) for shape in ((4, 5), (7,), ())]
    program = Program(lambda *xs: (lambda made: (*made[0], made[1]))(ops.clip_by_global_norm(xs, limit)), *gradients)
    parameters = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = torch.from_numpy(numpy.array(gradient))
    total = torch.nn.utils.clip_grad_norm_(parameters, limit)
    for found, expected in zip(program.forward(), [*(p.grad for p in parameters), total]):
        close(found, expected.numpy(), 1e-12)


def test_truth_values():
    mask = RNG.random((4, 5)) < 0.3
    check_against_torch(lambda x: ops.any(x, axis=1), lambda x: x.any(1), mask)
    check_against_torch(lambda x: ops.all(x, axis=0), lambda x: x.all(0), mask)


def test_counting():
    numpy.testing.assert_array_equal(REGISTRY["arange"].kernel(numpy, size=4, start=2, step=-3), [2, -1, -4, -7])


REFUSED = [
    ("topk", ("f32[4]",), {"k": 5}, "between 0 and 4"),
    ("cumsum", ("f32[4]",), {"axis": 1}, "no dimension 1"),
    ("scatter", ("f32[4]", "f32[2]", "f32[2]"), {}, "integers"),
    ("scatter", ("f32[4,2]", "i64[2]", "f32[2]"), {}, "as many dimensions"),
]


@pytest.mark.parametrize("name, types, attributes, message", REFUSED)
def test_refuses(name, types, attributes, message):
    with pytest.raises(RuleError, match=message):
        REGISTRY[name].infer([parse_type(text) for text in types], attributes)
