"""Matrix products against PyTorch, forward and gradients, and what they cost."""

import numpy
import pytest
from operator_programs import check_against_torch, close

from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.operator import TensorType, parse_type
from sbp.ops import library as ops
from sbp.rule import Signature

torch = pytest.importorskip("torch")


def draw(*shapes):
    rng = numpy.random.default_rng(3)
    return [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize(
    "x, w",
    [
        ((4, 6), (6, 5)),
        ((2, 3, 4, 6), (6, 5)),
        ((4, 6), (3, 6, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((1, 3, 4), (2, 4, 1)),
        ((7, 1, 2, 2), (1, 3, 2, 2)),
    ],
)
def test_matmul_broadcasts_and_gradients_sum_back(x, w):
    check_against_torch(ops.matmul, torch.matmul, *draw(x, w))


@pytest.mark.parametrize("x, w", [((4, 6), (5, 6)), ((2, 3, 6), (5, 6)), ((6,), (5, 6)), ((0, 6), (5, 6))])
def test_linear_takes_pytorchs_weight_layout(x, w):
    check_against_torch(ops.linear, torch.nn.functional.linear, *draw(x, w))


def test_linear_gradients_use_no_transposed_copy():
    """dx and dw of a linear layer are one product each: a plan has nothing to lay out besides."""
    from operator_programs import Program

    program = Program(ops.linear, *draw((2, 3, 4), (5, 4)))
    kinds = [node.op for node in program.graph.nodes if node.phase == "backward" and "linear" in node.op + node.name]
    assert "transpose" not in {node.op for node in program.graph.nodes}
    assert "linear_weight_gradient" in kinds


def test_outer():
    check_against_torch(ops.outer, torch.outer, *draw((4,), (3,)))


@pytest.mark.parametrize(
    "text, shapes",
    [
        ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]),
        ("bhsd, bhtd -> bhst", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("ij,k,j->ki", [(3, 4), (5,), (4,)]),
        ("ij,jk", [(3, 4), (4, 5)]),
        ("ijk->k", [(3, 4, 5)]),
        ("ij->", [(3, 4)]),
        ("...ij,...jk->...ik", [(1, 4, 3), (2, 3, 5)]),
        ("...ij,jk->...ik", [(2, 6, 4, 3), (3, 5)]),
        ("...i,...i->...", [(4, 3), (2, 1, 3)]),
        ("...i->i", [(2, 4, 3)]),
    ],
)
def test_einsum(text, shapes):
    check_against_torch(
        lambda *xs: ops.einsum(*xs, subscripts=text), lambda *xs: torch.einsum(text, *xs), *draw(*shapes)
    )


def test_einsum_of_a_diagonal_has_a_value():
    (x,) = draw((4, 4, 3))
    close(ops.einsum(x, subscripts="iij->ij"), numpy.einsum("iij->ij", x), 1e-15)


@pytest.mark.parametrize(
    "text, message",
    [
        ("ij,jk->il", "every output letter"),
        ("ij->ik", "names 1 operands, got 2"),
        ("i.j,jk->ik", "is not letters"),
        ("ij,jk->iik", "stand once"),
    ],
)
def test_a_wrong_einsum_text_is_reported(text, message):
    with pytest.raises(RuleError, match=message):
        ops.einsum.infer([TensorType((2, 3), "f32"), TensorType((3, 4), "f32")], {"subscripts": text})


def work(op, types, signature, mesh=(2,), **attributes):
    types = [parse_type(text) for text in types]
    left, right = signature.split("->")
    chosen = Signature(
        tuple(Layout.parse(part) for part in left.split(";")), tuple(Layout.parse(part) for part in right.split(";"))
    )
    rule = op.bind(types, attributes)
    assert rule.admits(chosen, mesh)
    return op.work(rule, types, op.infer(types, attributes), attributes, chosen, mesh)


@pytest.mark.parametrize(
    "op, types, signature, flops",
    [
        (ops.matmul, ["f32[3,8,4]", "f32[4,6]"], "B; B -> B", 2 * 3 * 8 * 4 * 6),
        (ops.matmul, ["f32[3,8,4]", "f32[4,6]"], "S(0); B -> S(0)", 2 * 2 * 8 * 4 * 6),
        (ops.matmul, ["f32[3,8,4]", "f32[4,6]"], "S(2); S(0) -> P", 2 * 3 * 8 * 2 * 6),
        (ops.linear, ["f32[3,8,4]", "f32[6,4]"], "B; S(0) -> S(2)", 2 * 3 * 8 * 4 * 3),
        (ops.linear_weight_gradient, ["f32[3,8,4]", "f32[3,8,6]"], "S(1); S(1) -> P", 2 * 3 * 4 * 4 * 6),
    ],
)
def test_flop_of_the_largest_shard(op, types, signature, flops):
    assert work(op, types, signature)[0] == flops


def test_einsum_flop_and_half_precision_bytes():
    flops, moved = work(ops.einsum, ["bf16[5,3,4]", "bf16[4,6]"], "B; B -> B", subscripts="...ij,jk->...ik")
    assert flops == 2 * 5 * 3 * 4 * 6
    assert moved == 2 * (5 * 3 * 4 + 4 * 6 + 5 * 3 * 6)


@pytest.mark.parametrize(
    "op, types, attributes",
    [
        (ops.matmul, ["f32[2,3]", "bf16[3,4]"], {}),
        (ops.linear, ["bf16[2,3]", "f32[4,3]"], {}),
        (ops.outer, ["f32[2]", "f64[3]"], {}),
        (ops.einsum, ["f32[2,3]", "f16[3,4]"], {"subscripts": "ij,jk->ik"}),
        (ops.convolution, ["f32[1,2,5]", "bf16[3,2,2]"], {}),
        (ops.layer_norm, ["bf16[2,3]", "f32[3]", "bf16[3]"], {}),
        (ops.group_norm, ["bf16[2,4]", "f32[4]", "bf16[4]"], {"groups": 2}),
    ],
)
def test_mixed_types_are_refused_before_their_gradients_would_differ(op, types, attributes):
    with pytest.raises(RuleError, match="different element types.*cast them first"):
        op.infer([parse_type(text) for text in types], attributes)


def test_norms_take_wide_weights():
    types = [parse_type(text) for text in ("bf16[2,4]", "f32[4]", "f32[4]")]
    assert [str(t) for t in ops.layer_norm.infer(types, {})] == ["bf16[2,4]"]
