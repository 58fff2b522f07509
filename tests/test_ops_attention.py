"""Fused attention and rotary embedding against PyTorch; every admitted signature of richer shapes than the cases."""

import numpy
import pytest
from hand_plans import physical
from operator_programs import Program, check_against_torch, close

from sbp.autodiff import backward
from sbp.errors import GraphError, RuleError
from sbp.graph import Initial
from sbp.layout import Partial
from sbp.mesh import Mesh
from sbp.operator import Case, TensorType, parse_type
from sbp.ops import library as ops
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.runtime.verify import verify
from sbp.trace import GraphBuilder
from sbp.trial import Trial

torch = pytest.importorskip("torch")
functional = torch.nn.functional


def draw(*shapes):
    rng = numpy.random.default_rng(9)
    return [rng.standard_normal(shape) for shape in shapes]


def reference(mask=None, causal=False, scale=None):
    def run(q, k, v):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    return run


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "q, kv, e", [((2, 4, 5, 6), (2, 4, 5), 6), ((2, 6, 5, 4), (2, 2, 5), 3), ((1, 3, 4, 2), (1, 1, 4), 2)]
)
def test_attention(q, kv, e, causal, scale):
    arrays = draw(q, (*kv, q[-1]), (*kv, e))
    check_against_torch(
        lambda *xs: ops.attention(*xs, causal=causal, scale=scale)[0], reference(causal=causal, scale=scale), *arrays
    )


def test_cross_attention_with_another_length():
    check_against_torch(lambda *xs: ops.attention(*xs)[0], reference(), *draw((2, 2, 3, 4), (2, 2, 7, 4), (2, 2, 7, 4)))


def test_offset_aligns_the_last_query_with_the_last_key():
    """The queries of a decoding step: three new ones after four cached keys."""
    mask = torch.ones(3, 7, dtype=torch.bool).tril(4)
    check_against_torch(
        lambda *xs: ops.attention(*xs, causal=True, offset=4)[0],
        reference(mask),
        *draw((2, 2, 3, 4), (2, 2, 7, 4), (2, 2, 7, 4)),
    )


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (2, 4, 5, 5), (1, 1, 5, 5), (1, 4, 1, 5)])
def test_masked_attention(shape):
    mask = numpy.random.default_rng(2).random(shape) < 0.6
    mask[..., 0] = True  # PyTorch gives NaN where a query may look nowhere
    q, k, v = draw((2, 4, 5, 3), (2, 4, 5, 3), (2, 4, 5, 3))
    check_against_torch(
        lambda q, k, v, m: ops.masked_attention(q, k, v, m)[0],
        lambda q, k, v, m: reference(m)(q, k, v),
        q, k, v, mask,
    )  # fmt: skip


def test_a_query_that_may_look_nowhere_gives_zero_and_no_gradient():
    mask = numpy.ones((1, 1, 3, 3), bool)
    mask[:, :, 1] = False
    q, k, v = draw((1, 2, 3, 2), (1, 2, 3, 2), (1, 2, 3, 2))
    program = Program(lambda q, k, v, m: ops.masked_attention(q, k, v, m)[0], q, k, v, mask)
    (out,) = program.forward()
    assert not out[:, :, 1].any()
    gradients = program.gradient()
    assert not gradients[0][:, :, 1].any()
    assert all(numpy.isfinite(gradient).all() for gradient in gradients)


def test_huge_scores_are_finite():
    q, k, v = draw((1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2))
    check_against_torch(lambda *xs: ops.attention(*xs, causal=True)[0], reference(causal=True), 1e3 * q, 1e3 * k, v)


def test_logsumexp_has_no_gradient():
    with pytest.raises(GraphError, match="logsumexp"):
        Program(lambda *xs: ops.attention(*xs), *draw((1, 1, 2, 2), (1, 1, 2, 2), (1, 1, 2, 2)))


SHAPES = [
    # q, k, v with heads, groups and both sequences long at once; batch left out, which is the simplest
    (["f64[1,4,5,2]", "f64[1,2,5,2]", "f64[1,2,5,3]"], {"causal": True}),
    (["f64[2,6,3,2]", "f64[2,3,4,2]", "f64[2,3,4,2]"], {}),
    (["f64[1,4,3,2]", "f64[1,1,5,2]", "f64[1,1,5,2]"], {"causal": True, "offset": 2}),
]


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2), (3, 2)])
@pytest.mark.parametrize("types, attributes", SHAPES)
def test_every_admitted_signature_is_right(types, attributes, mesh):
    kinds = [parse_type(text) for text in types]
    q, _, v = kinds
    out = TensorType((*q.shape[:3], v.shape[3]), "f64")
    for op, given in (
        (ops.attention, kinds),
        (ops.attention_backward, [out, *kinds, out, TensorType(q.shape[:3], "f64")]),
    ):
        outputs = op.infer(given, attributes)
        trial = Trial(op, Case(tuple(given), attributes, {}), outputs, Mesh(mesh), 0)
        assert not trial.problem
        signatures = op.bind(given, attributes).signatures(mesh)
        assert len(signatures) > 3
        for signature in signatures:
            assert trial.difference(signature.inputs, signature.outputs) == "", str(signature)


def test_sequence_and_heads_and_parts_are_offered():
    """The signatures that sequence parallelism, tensor parallelism and key-split backward need."""
    kinds = [parse_type("f32[2,4,6,2]")] * 3
    forward = {str(s) for s in ops.attention.bind(kinds, {}).signatures((2,))}
    assert "(S(2)), (B), (B) -> (S(2)), (S(2))" in forward
    assert "(S(2)), (S(2)), (S(2)) -> (S(2)), (S(2))" in forward, "a ring"
    assert "(S(1)), (S(1)), (S(1)) -> (S(1)), (S(1))" in forward
    given = [kinds[0], *kinds, kinds[0], parse_type("f32[2,4,6]")]
    backward = {str(s) for s in ops.attention_backward.bind(given, {}).signatures((2,))}
    assert "(S(2)), (S(2)), (B), (B), (S(2)), (S(2)) -> (S(2)), (P), (P)" in backward
    assert "(B), (B), (S(2)), (S(2)), (B), (B) -> (P), (S(2)), (S(2))" in backward


def formula(mask, causal, offset):
    """Output and logarithm of the sum of exponentials; 0 and -inf where a query may look nowhere."""

    def run(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
        allowed = allowed.tril(offset) if causal else allowed
        allowed = allowed if mask is None else allowed & torch.from_numpy(mask)
        seen = allowed.any(-1, keepdim=True)
        weights = torch.where(seen, torch.softmax(scores.masked_fill(~allowed & seen, -torch.inf), -1), 0.0)
        sums = torch.logsumexp(scores.masked_fill(~allowed & seen, -torch.inf), -1)
        return weights @ v, torch.where(seen[..., 0], sums, torch.zeros(()))

    return run


KEY_SPLIT = [
    ((2, 4, 5, 6), (2, 2, 5), 3, True, 0),
    ((1, 3, 1, 2), (1, 1, 9), 2, False, 0),
    ((1, 2, 3, 4), (1, 2, 7), 4, True, 4),
    ((1, 2, 3, 4), (1, 2, 5), 2, True, -1),
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("q, kv, e, causal, offset", KEY_SPLIT)
def test_key_split_attention(q, kv, e, causal, offset, masked):
    """Outputs, statistics and all gradients, queries that may look nowhere (offset -1) included."""
    arrays = draw(q, (*kv, q[-1]), (*kv, e))
    mask = numpy.random.default_rng(4).random((1, 1, q[2], kv[2])) < 0.7 if masked else None

    def run(q, k, v, *mask):
        return ops.key_split_attention(q, k, v, *mask, causal=causal, offset=offset)

    reference = formula(mask, causal, offset)
    given = arrays if mask is None else [*arrays, mask]
    check_against_torch(lambda *xs: run(*xs)[0], lambda q, k, v, *_: reference(q, k, v)[0], *given)
    if offset >= 0 and mask is None:  # every query looks somewhere, so that no statistic is infinite
        check_against_torch(run, reference, *arrays)


def key_split_program(s, t, heads=4, kv=2, width=4):
    builder = GraphBuilder("cache")
    normal = Initial("normal", (0.0, 1.0))
    shapes = (1, heads, s, width), (1, kv, t, width), (1, kv, t, width)
    sources = [builder.source(n, TensorType(shape, "f32"), "input", normal) for n, shape in zip("qkv", shapes)]
    with builder:
        out, _ = ops.key_split_attention(*sources, causal=True, offset=t - s)
        loss = ops.mean(ops.square(out))
    return builder, sources, loss


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_split_keys_forward_and_backward(mesh):
    """Seven keys over the ranks, maxima and sums reduced by boxing: outputs and gradients of the unsharded program."""
    builder, sources, loss = key_split_program(3, 7)
    graph = builder.finish([loss, *backward(builder, loss, sources).values()])

    def choose(name, found):
        keys = [s for s in found if name.startswith("attention") and len(s.inputs) > 1 and by_keys(s)]
        return keys[0] if keys else found[0]

    def by_keys(signature):
        position = 3 if len(signature.inputs) == 6 else 1
        return all(str(sbp) == "S(2)" for sbp in signature.inputs[position])

    plan = physical(graph, Mesh(mesh), choose, lambda _, found: found[0])
    reduced = {sbp.reduce for r in plan.registers for sbp in r.layout if isinstance(sbp, Partial)}
    assert reduced == {"sum", "max"}
    verify(graph, plan).raise_if_wrong()


def test_the_planner_splits_a_long_cache_along_its_keys():
    """One query, one head, a million keys that are stored whole nowhere: only their split spares the work."""
    builder, _, loss = key_split_program(1, 1 << 20, heads=1, kv=1, width=128)
    plan = auto_parallel(builder.finish([loss]), Cluster.preset("a100-80g", 1, 4), mesh=(4,), time_limit=20)
    layouts = {r.value: str(r.layout) for r in plan.physical.registers if r.value in ("k", "v")}
    assert layouts == {"k": "(S(2))", "v": "(S(2))"}


def test_causal_flop_of_the_busiest_rank():
    kinds = [parse_type("f32[1,2,8,4]")] * 3
    flops = {}
    for causal in (False, True):
        rule = ops.attention.bind(kinds, {"causal": causal})
        outputs = ops.attention.infer(kinds, {"causal": causal})
        for signature in rule.signatures((2,)):
            work = ops.attention.work(rule, kinds, outputs, {"causal": causal}, signature, (2,))
            flops[causal, str(signature.inputs[0])] = work[0]
    whole = 2 * 2 * 8 * 8 * (4 + 4)
    assert flops[False, "(B)"] == whole
    assert flops[True, "(B)"] == whole / 2
    assert flops[False, "(S(2))"] == whole / 2
    assert flops[True, "(S(2))"] == whole * (4 * 8 - 8) / 64  # queries 4..7: all keys but half of a 4 x 4 corner
    assert flops[True, "(S(1))"] == whole / 4


# -- rotary ------------------------------------------------------------------------------------------------------------


def rotated(x, theta, start, interleaved):
    """The definition: pairs as complex numbers times exp(i * position * frequency)."""
    s, d = x.shape[-2:]
    frequency = theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    turn = torch.polar(
        torch.ones(s, d // 2, dtype=torch.float64),
        torch.outer(torch.arange(start, start + s, dtype=torch.float64), frequency),
    )
    if interleaved:
        return torch.view_as_real(torch.complex(x[..., ::2], x[..., 1::2]) * turn).flatten(-2)
    pair = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
    return torch.cat([pair.real, pair.imag], dim=-1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape, theta, start", [((2, 3, 5, 8), 10000.0, 0), ((4, 6), 500000.0, 7)])
def test_rotary(shape, theta, start, interleaved):
    check_against_torch(
        lambda x: ops.rotary(x, theta=theta, offset=start, interleaved=interleaved),
        lambda x: rotated(x, theta, start, interleaved),
        *draw(shape),
    )


def test_rotary_turned_back_is_the_input():
    (x,) = draw((2, 5, 6))
    close(ops.rotary(ops.rotary(x, offset=4), offset=4, inverse=True), x, 1e-14)


def test_scores_depend_on_distance_only():
    q, k = draw((1, 6), (1, 6))
    scores = [ops.rotary(q, offset=at + 3) @ ops.rotary(k, offset=at).T for at in (0, 11, 500)]
    close(scores[1], scores[0], 1e-12)
    close(scores[2], scores[0], 1e-12)


def test_an_odd_number_of_channels_is_reported():
    with pytest.raises(RuleError, match="must be even, got 5"):
        ops.rotary.infer([TensorType((4, 5), "f32")], {})
