"""Mixture of experts against a loop over tokens; the all-to-all between split groups and split experts."""

import numpy
import pytest
from operator_programs import Program, check_against_torch, close

from sbp.errors import RuleError
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.planner.boxing import BoxingTable
from sbp.rule import Signature

torch = pytest.importorskip("torch")

RNG = numpy.random.default_rng(29)
GROUPS, TOKENS, HIDDEN, EXPERTS, CHOICES, CAPACITY = 2, 7, 3, 4, 2, 3
LOGITS = RNG.standard_normal((GROUPS, TOKENS, EXPERTS))
X = RNG.standard_normal((GROUPS, TOKENS, HIDDEN))
W = RNG.standard_normal((EXPERTS, HIDDEN, HIDDEN))


def slots_by_loop(chosen, capacity):
    """Places in the experts' queues: first choices of all tokens first."""
    slots = numpy.full(chosen.shape, -1)
    for group in range(len(chosen)):
        taken = {}
        for choice in range(chosen.shape[-1]):
            for token in range(chosen.shape[1]):
                expert = chosen[group, token, choice]
                place = taken[expert] = taken.get(expert, -1) + 1
                slots[group, token, choice] = place if place < capacity else -1
    return slots


@pytest.mark.parametrize("capacity", [1, 3, 20])
def test_slots(capacity):
    chosen = RNG.integers(0, EXPERTS, (3, 9, 2))
    found = ops.expert_slots(chosen, experts=EXPERTS, capacity=capacity)
    numpy.testing.assert_array_equal(found, slots_by_loop(chosen, capacity))


def moe(x, logits, w):
    """A layer of experts that are one matrix each, written with the operators."""
    weights, chosen, slots, balance = ops.top_k_gating(logits, CHOICES, CAPACITY)
    ones = ops.detach(ops.div(weights, weights))
    waiting = ops.dispatch(x, ones, chosen, slots, experts=EXPERTS, capacity=CAPACITY)
    done = ops.einsum(waiting, w, subscripts="gecd,edh->gech")
    return ops.combine(done, weights, chosen, slots), balance


def moe_by_loop(x, logits, w):
    """The same in PyTorch, token by token."""
    probabilities = torch.softmax(logits, -1)
    weights, chosen = torch.topk(probabilities, CHOICES, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    slots = slots_by_loop(chosen.numpy(), CAPACITY)
    rows = []
    for group in range(GROUPS):
        for token in range(TOKENS):
            row = torch.zeros(HIDDEN, dtype=x.dtype)
            for choice in range(CHOICES):
                if slots[group, token, choice] >= 0:
                    expert = chosen[group, token, choice]
                    row = row + weights[group, token, choice] * (x[group, token] @ w[expert])
            rows.append(row)
    first = torch.nn.functional.one_hot(chosen[..., 0], EXPERTS).to(x.dtype)
    balance = (first.mean(-2) * probabilities.mean(-2)).sum(-1).mean() * EXPERTS
    return torch.stack(rows).reshape(GROUPS, TOKENS, HIDDEN), balance


def test_a_layer_of_experts_with_its_gradients():
    check_against_torch(moe, moe_by_loop, X, LOGITS, W)


def test_balance_of_equal_loads_is_one():
    logits = numpy.log(numpy.tile(numpy.eye(EXPERTS) * 3 + 1, (GROUPS, 1, 1)))
    found = Program(lambda l: ops.top_k_gating(l, 1, 2)[3], logits).forward()[0]
    close(found, numpy.array(1.0), 1e-12)


def test_gradients_with_places_that_are_used_once():
    chosen = RNG.integers(0, EXPERTS, (5, 2))
    slots = slots_by_loop(chosen[None], CAPACITY)[0]
    y, x, weight = RNG.standard_normal((EXPERTS, CAPACITY, 3)), RNG.standard_normal((5, 3)), RNG.standard_normal((5, 2))
    for function, arrays in (
        (lambda y, x, c, s: ops.routing_weights(y, x, c, s), (y, x)),
        (lambda y, w, c, s: ops.combine(y, w, c, s), (y, weight)),
        (lambda x, w, c, s: ops.dispatch(x, w, c, s, experts=EXPERTS, capacity=CAPACITY), (x, weight)),
    ):
        program = Program(function, *arrays, chosen, slots)
        for found, expected in zip(program.gradient(), program.differences()):
            close(found, expected, 1e-8)


class PerByte:
    """Collectives that cost their bytes."""

    def collective_seconds(self, kind, mesh, axis, bytes):
        return bytes * (0.5 if kind == "all_to_all" else 1.0)


def test_from_split_groups_to_split_experts_is_one_all_to_all():
    types = [
        TensorType((8, 16, 4), "f32"),
        TensorType((8, 16, 2), "f32"),
        TensorType((8, 16, 2), "i64"),
        TensorType((8, 16, 2), "i64"),
    ]
    attributes = {"experts": 4, "capacity": 5}
    rule = ops.dispatch.bind(types, attributes)
    split = Layout.parse("S(0)")
    assert rule.admits(Signature((split,) * 4, (split,)), (2,))  # nothing is communicated to dispatch
    (waiting,) = ops.dispatch.infer(types, attributes)
    assert waiting.shape == (8, 4, 5, 4)
    experts = ops.einsum.bind([waiting, TensorType((4, 4, 4), "f32")], {"subscripts": "gecd,edh->gech"})
    by_expert = Layout.parse("S(1)")
    assert experts.admits(Signature((by_expert, split), (by_expert,)), (2,))
    path = BoxingTable(Mesh((2,)), PerByte()).path(waiting, split, by_expert)
    assert [step.kind for step in path] == ["all_to_all"]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda l: ops.top_k_gating(l, 5, 2), "between 1 and the number of experts, 4"),
        (lambda l: ops.top_k_gating(l, 1, 0), "capacity=0"),
        (lambda l: ops.expert_slots(l, experts=4, capacity=2), "experts are whole numbers"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(RuleError, match=message):
        Program(call, LOGITS)


def test_groups_must_agree():
    chosen = numpy.zeros((1, TOKENS, 1), int)
    with pytest.raises(RuleError, match="groups of tokens do not agree"):
        Program(lambda x, w, c, s: ops.dispatch(x, w, c, s, experts=2, capacity=2), X, X[..., :1], chosen, chosen)
