"""Convolution, pooling and pairwise interactions against PyTorch, forward and gradients."""

import numpy
import pytest
from operator_programs import check_against_torch, close

from sbp.errors import GraphError, RuleError
from sbp.mesh import Mesh
from sbp.operator import Case, TensorType, parse_type
from sbp.ops import library as ops
from sbp.trial import Trial

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def draw(*shapes):
    rng = numpy.random.default_rng(4)
    return [rng.standard_normal(shape) for shape in shapes]


CONVOLUTIONS = [
    ((2, 3, 6, 5), (4, 3, 3, 3), {"padding": 1}),
    ((2, 3, 7, 7), (4, 3, 3, 2), {"stride": 2}),
    ((1, 4, 8, 6), (6, 2, 3, 3), {"stride": (2, 1), "padding": (1, 2), "groups": 2}),
    ((2, 4, 7, 7), (4, 1, 3, 3), {"dilation": 2, "groups": 4}),
    ((3, 2, 5, 5), (5, 2, 1, 1), {}),
    ((2, 3, 8, 8), (6, 3, 4, 4), {"stride": 4}),
    ((64, 2, 3, 3), (3, 2, 3, 3), {}),
]


@pytest.mark.parametrize("x, weight, where", CONVOLUTIONS)
def test_conv2d(x, weight, where):
    check_against_torch(
        lambda x, w: ops.conv2d(x, w, **where), lambda x, w: functional.conv2d(x, w, **where), *draw(x, weight)
    )


@pytest.mark.parametrize(
    "name, x, weight",
    [("conv1d", (2, 4, 9), (6, 2, 3)), ("conv3d", (1, 4, 5, 6, 4), (2, 2, 3, 2, 2))],
)
def test_other_numbers_of_dimensions(name, x, weight):
    where = {"stride": 2, "padding": 1, "groups": 2}
    check_against_torch(
        lambda x, w: getattr(ops, name)(x, w, **where),
        lambda x, w: getattr(functional, name)(x, w, **where),
        *draw(x, weight),
    )


@pytest.mark.parametrize(
    "x, weight, where",
    [
        ((2, 4, 3, 5), (4, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((1, 4, 4, 4), (4, 1, 2, 2), {"groups": 2, "dilation": 2}),
        ((2, 3, 4, 4), (3, 2, 2, 2), {"stride": 2}),
    ],
)
def test_transposed_convolution(x, weight, where):
    check_against_torch(
        lambda x, w: ops.conv_transpose(x, w, **where),
        lambda x, w: functional.conv_transpose2d(x, w, **where),
        *draw(x, weight),
    )


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 3)])
@pytest.mark.parametrize("x, weight, where", CONVOLUTIONS[1:6])
def test_every_admitted_signature_is_right(x, weight, where, mesh):
    kinds = [TensorType(x, "f64"), TensorType(weight, "f64")]
    (out,) = ops.convolution.infer(kinds, where)
    for op, given, attributes in (
        (ops.convolution, kinds, where),
        (ops.convolution_input_gradient, [out, kinds[1]], {**where, "shape": x}),
        (ops.convolution_weight_gradient, [out, kinds[0]], {**where, "shape": weight}),
    ):
        trial = Trial(op, Case(tuple(given), attributes, {}), op.infer(given, attributes), Mesh(mesh), 0)
        for signature in op.bind(given, attributes).signatures(mesh):
            assert trial.difference(signature.inputs, signature.outputs) == "", str(signature)


def signatures(op, *texts, **attributes):
    return {str(s) for s in op.bind([parse_type(text) for text in texts], attributes).signatures((2,))}


def test_channels_groups_and_patches_split():
    ordinary = signatures(ops.convolution, "f32[4,6,8,8]", "f32[4,6,3,3]", padding=1)
    assert {"(S(0)), (B) -> (S(0))", "(B), (S(0)) -> (S(1))", "(S(1)), (S(1)) -> (P)"} <= ordinary
    assert "(S(2)), (B) -> (S(2))" in ordinary, "rows of overlapping windows: borders are fetched"
    assert "(B), (B) -> (S(2))" in ordinary, "from a whole input every rank cuts what its windows cover"
    grouped = signatures(ops.convolution, "f32[4,6,8,8]", "f32[4,3,3,3]", groups=2)
    assert "(S(1)), (S(0)) -> (S(1))" in grouped
    assert "(S(1)), (S(1)) -> (P)" not in grouped
    patches = signatures(ops.convolution, "f32[4,3,8,8]", "f32[16,3,2,2]", stride=2)
    assert {"(S(2)), (B) -> (S(2))", "(S(3)), (B) -> (S(3))"} <= patches


def test_convolution_flop():
    kinds = [parse_type("f32[4,6,8,8]"), parse_type("f32[10,3,3,3]")]
    attributes = {"groups": 2, "padding": 1}
    rule, outputs = ops.convolution.bind(kinds, attributes), ops.convolution.infer(kinds, attributes)
    flops = ops.convolution.work(rule, kinds, outputs, attributes, rule.signatures((2,))[0], (2,))[0]
    assert flops == 2 * (4 * 10 * 8 * 8) * (3 * 3 * 3)


@pytest.mark.parametrize(
    "x, weight, where, message",
    [
        ((2, 3, 4, 4), (4, 2, 3, 3), {}, "does not fit 3 input channels"),
        ((2, 3, 4, 4), (4, 3, 5, 5), {}, "do not fit into"),
        ((2, 3, 4, 4), (4, 3, 3, 3), {"stride": 0}, "at least 1"),
        ((2, 3, 4, 4), (4, 3, 3, 3), {"padding": (1,)}, "or 2 of them"),
        ((2, 4, 4, 4), (5, 2, 3, 3), {"groups": 2}, "divisible by groups"),
    ],
)
def test_wrong_arguments_are_reported(x, weight, where, message):
    with pytest.raises(RuleError, match=message):
        ops.convolution.infer([TensorType(x, "f32"), TensorType(weight, "f32")], where)


def test_wrong_number_of_dimensions_is_reported():
    with pytest.raises(GraphError, match="conv2d takes"):
        ops.conv2d(*draw((2, 3, 4), (4, 3, 2)))


# -- pooling -----------------------------------------------------------------------------------------------------------

POOLS = [
    ((2, 3, 6, 4), {"kernel_size": 2}),
    ((2, 3, 7, 7), {"kernel_size": 3, "stride": 2, "padding": 1}),
    ((3, 5, 6), {"kernel_size": (3, 2), "stride": (1, 2)}),
]


@pytest.mark.parametrize("x, where", POOLS)
def test_max_pool2d(x, where):
    check_against_torch(
        lambda x: ops.max_pool2d(x, **where), lambda x: functional.max_pool2d(x, **where), *draw(x)
    )


def test_of_equal_elements_the_first_takes_the_gradient():
    x = numpy.zeros((1, 1, 4, 4))
    x[0, 0, 1, 1:3] = 1.0
    where = {"kernel_size": 3, "stride": 1}
    check_against_torch(lambda x: ops.max_pool2d(x, **where), lambda x: functional.max_pool2d(x, **where), x)


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("x, where", POOLS)
def test_avg_pool2d(x, where, count_include_pad):
    where = {**where, "count_include_pad": count_include_pad}
    check_against_torch(
        lambda x: ops.avg_pool2d(x, **where), lambda x: functional.avg_pool2d(x, **where), *draw(x)
    )


@pytest.mark.parametrize("size", [1, (1, 1), (3, 2), (6, 4)])
def test_adaptive_avg_pool2d(size):
    check_against_torch(
        lambda x: ops.adaptive_avg_pool2d(x, size),
        lambda x: functional.adaptive_avg_pool2d(x, size),
        *draw((2, 3, 6, 4)),
    )


def test_pools_split_along_with_their_windows():
    for where in ({"kernel_size": 2}, {"kernel_size": 3, "stride": 1}, {"kernel_size": 3, "stride": 2, "padding": 1}):
        assert "(S(1)) -> (S(1))" in signatures(ops.max_pool2d, "f32[3,4,4]", **where)


PADDED = [((1, 2, 5), (3, 2, 3), ((2, 1),)), ((2, 1, 4, 5), (2, 1, 2, 3), ((0, 1), 2)), ((1, 1, 3), (1, 1, 2), (0,))]


@pytest.mark.parametrize("x, weight, padding", PADDED)
def test_padding_may_differ_before_and_after(x, weight, padding):
    sides = [n for each in reversed(padding) for n in ((each, each) if isinstance(each, int) else each)]
    apply = {1: functional.conv1d, 2: functional.conv2d}[len(x) - 2]
    check_against_torch(
        lambda x, w: ops.convolution(x, w, padding=padding), lambda x, w: apply(functional.pad(x, sides), w),
        *draw(x, weight),
    )  # fmt: skip


# -- interaction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_lower_triangle(size):
    rows, columns = torch.tril_indices(size, size, -1)
    check_against_torch(ops.lower_triangle, lambda x: x[..., rows, columns], *draw((2, 3, size, size)))


def test_lower_triangle_backward_is_its_adjoint():
    x, entries = draw((4, 5, 5), (4, 10))
    close((ops.lower_triangle(x) * entries).sum(), (x * ops.lower_triangle_backward(entries, size=5)).sum(), 1e-12)


def test_a_matrix_that_is_not_square_is_reported():
    with pytest.raises(RuleError, match="square"):
        ops.lower_triangle.infer([TensorType((2, 3, 4), "f32")], {})
