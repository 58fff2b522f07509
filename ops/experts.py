"""Mixture of experts: each token goes to k of the experts, of which every one takes a limited number (its capacity).

Tokens come in groups, each with places of its own (GShard, Lepikhin et al. 2020, arXiv:2006.16668): what is dispatched
is (group, expert, place, hidden). With the groups split, dispatching needs no communication, and with the experts
split, neither do the experts; boxing from the one to the other is the all-to-all.

The three operators below are the derivatives of one form, the sum over tokens and choices of
weight[token, choice] * <x[token], y[expert, place]>, by y, x and weight. So each is a gradient of the others.
"""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import is_floating
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.elementwise import cast, div, mul, scale
from sbp.ops.embedding import one_hot
from sbp.ops.normalization import softmax
from sbp.ops.order import topk
from sbp.ops.precision import one_type, widen
from sbp.ops.reduction import mean, sum_
from sbp.ops.slicing import select


def _routed(x: TensorType, weight: TensorType, expert: TensorType, slot: TensorType, **_: Any) -> str:
    if any(is_floating(t.dtype) or t.dtype == "bool" for t in (expert, slot)):
        raise RuleError(f"experts and places are whole numbers, got {expert} and {slot}")
    if not is_floating(x.dtype):
        raise RuleError(f"takes floating numbers, got {x}")
    return one_type(x, weight)


def _slots_type(expert: TensorType, **_: Any) -> str:
    if is_floating(expert.dtype) or expert.dtype == "bool":
        raise RuleError(f"experts are whole numbers, got {expert}")
    return "i64"


@operator("*g t^ k^ -> *g t^ k^", dtype=_slots_type)
def expert_slots(xp, expert, *, experts, capacity):
    """Where each choice (*g, t, k) waits at its expert: the number of earlier ones, -1 if that exceeds the capacity.

    First choices of all tokens come before all second choices, and so on.
    """
    order = xp.swapaxes(expert, -1, -2)
    flat = order.reshape(*order.shape[:-2], order.shape[-1] * order.shape[-2])
    chosen = flat[..., None] == xp.arange(experts)
    earlier = xp.cumsum(chosen, axis=-2) - 1
    slot = xp.where(chosen, earlier, 0).sum(axis=-1)
    slot = xp.where(chosen.any(axis=-1) & (slot < capacity), slot, -1)
    return xp.swapaxes(slot.reshape(order.shape), -1, -2).astype(xp.int64)


expert_slots.flops = lambda elements, experts: elements * experts
expert_slots.case("i64[2,5,2]", ranges={"expert": (0, 4)}, experts=4, capacity=2)
expert_slots.case("i64[6,1]", ranges={"expert": (-1, 3)}, experts=3, capacity=3)
expert_slots.case("i64[3,4,2]", ranges={"expert": (0, 5)}, experts=5, capacity=1)


def _places(xp: Any, expert: Any, slot: Any, experts: int, capacity: int, first: int, slots: int, begin: int):
    """Row of each choice among (group, expert, place) rows that are here, and whether it is here at all.

    Here are `experts` from `first` on, and `slots` places from `begin` on.
    """
    groups = expert.size // (expert.shape[-1] * expert.shape[-2])
    expert, place = expert.reshape(groups, -1) - first, slot.reshape(groups, -1)
    here = (expert >= 0) & (expert < experts) & (place >= max(begin, 0)) & (place < min(begin + slots, capacity))
    row = (xp.arange(groups)[:, None] * experts + expert) * slots + (place - begin)
    return xp.where(here, row, 0).reshape(-1), here.reshape(-1)


def _same_groups(*operands: tuple[tuple[int, ...], int]) -> None:
    """Raise `RuleError` unless operands with a number of dimensions of their own have the same ones before these."""
    groups = [shape[: len(shape) - own] for shape, own in operands]
    if any(group != groups[0] for group in groups) or any(len(shape) < own for shape, own in operands):
        raise RuleError(f"groups of tokens do not agree: {', '.join(str(list(shape)) for shape, _ in operands)}")


def _dispatch_rule(x: Any, weight: Any, expert: Any, slot: Any, *, experts: int, capacity: int, **_: Any):
    _same_groups((x, 2), (weight, 2), (expert, 2), (slot, 2))
    return "*g t+ d, *g t+ k+, *g t+ k+, *g t+ k+ -> *g e c d", {"e": experts, "c": capacity}


@operator(_dispatch_rule, linear="x | weight", dtype=_routed)
def dispatch(xp, x, weight, expert, slot, *, experts, capacity, first=0, slots=None, begin=0):
    """Tokens times their weights, put where they wait: x (*g, t, d), weight, expert, slot (*g, t, k) ->
    (*g, experts, capacity, d), zeros where nothing waits. Choices without a place (slot -1) are left out.

    For shards: `experts` from `first` on, and `slots` places from `begin` on.
    """
    slots = capacity if slots is None else slots
    lead, width, choices = x.shape[:-2], x.shape[-1], expert.shape[-1]
    wide = widen(x)
    out = xp.zeros((math.prod(lead) * experts * slots, width), wide.dtype)
    if out.size and expert.size:
        row, here = _places(xp, expert, slot, experts, capacity, first, slots, begin)
        kept = xp.nonzero(here)[0]
        token = kept // choices
        xp.add.at(out, row[kept], wide.reshape(-1, width)[token] * widen(weight).reshape(-1)[kept, None])
    return out.reshape(*lead, experts, slots, width).astype(x.dtype, copy=False)


@dispatch.localize
def _(attributes, inputs, outputs):
    return {**attributes, **_local_experts(outputs[0])}


def _local_experts(box: Any) -> dict[str, int]:
    return {
        "experts": box.shape[-3],
        "first": box.offset[-3],
        "capacity": box.global_shape[-2],
        "slots": box.shape[-2],
        "begin": box.offset[-2],
    }


@dispatch.gradient
def _(grad, x, weight, expert, slot):
    return combine(grad, weight, expert, slot), routing_weights(grad, x, expert, slot), None, None


def _combine_rule(y: Any, weight: Any, expert: Any, slot: Any, **_: Any) -> str:
    _same_groups((y, 3), (weight, 2), (expert, 2), (slot, 2))
    return "*g e+ c+ d, *g t k+, *g t k+, *g t k+ -> *g t d"


@operator(_combine_rule, linear="y | weight", dtype=_routed)
def combine(xp, y, weight, expert, slot, *, experts=None, capacity=None, first=0, slots=None, begin=0):
    """The experts' results back at their tokens, times the weights and added up over the choices: y (*g, e, c, d),
    weight, expert, slot (*g, t, k) -> (*g, t, d). The attributes are set for shards, as those of `dispatch`.
    """
    if not y.size or not expert.size:
        return xp.zeros((*expert.shape[:-1], y.shape[-1]), y.dtype)
    here, found = _found(xp, y, expert, slot, capacity, first, begin)
    share = xp.where(here, widen(weight).reshape(-1), 0)
    tokens = (*expert.shape[:-1], expert.shape[-1], y.shape[-1])
    return (found * share[:, None]).reshape(tokens).sum(axis=-2).astype(y.dtype, copy=False)


def _found(xp: Any, y: Any, expert: Any, slot: Any, capacity: int | None, first: int, begin: int):
    """Which choices are here, and the rows (choices of all tokens, d) of y at their places."""
    experts, slots, width = y.shape[-3:]
    row, here = _places(xp, expert, slot, experts, slots if capacity is None else capacity, first, slots, begin)
    return here, widen(y).reshape(-1, width)[row]


@combine.localize
def _(attributes, inputs, outputs):
    return {**attributes, **_local_experts(inputs[0])}


@combine.gradient
def _(grad, y, weight, expert, slot):
    dy = dispatch(grad, weight, expert, slot, experts=y.shape[-3], capacity=y.shape[-2])
    return dy, routing_weights(y, grad, expert, slot), None, None


def _weights_rule(y: Any, x: Any, expert: Any, slot: Any, **_: Any) -> str:
    _same_groups((y, 3), (x, 2), (expert, 2), (slot, 2))
    return "*g e+ c+ d+, *g t d+, *g t k, *g t k -> *g t k"


@operator(_weights_rule, linear="y | x", dtype=_routed)
def routing_weights(xp, y, x, expert, slot, *, experts=None, capacity=None, first=0, slots=None, begin=0):
    """Products of tokens with what is at their places: y (*g, e, c, d), x (*g, t, d), expert, slot (*g, t, k) ->
    (*g, t, k), the gradient of `dispatch` and `combine` for the weights.
    """
    if not y.size or not expert.size:
        return xp.zeros(expert.shape, y.dtype)
    here, found = _found(xp, y, expert, slot, capacity, first, begin)
    choices, width = expert.shape[-1], y.shape[-1]
    tokens = xp.repeat(widen(x).reshape(expert.size // choices, width), choices, axis=0)
    products = xp.where(here, (tokens * found).sum(axis=-1), 0)
    return products.reshape(expert.shape).astype(y.dtype, copy=False)


@routing_weights.localize
def _(attributes, inputs, outputs):
    return {**attributes, **_local_experts(inputs[0])}


@routing_weights.gradient
def _(grad, y, x, expert, slot):
    dy = dispatch(x, grad, expert, slot, experts=y.shape[-3], capacity=y.shape[-2])
    return dy, combine(y, grad, expert, slot), None, None


dispatch.flops = combine.flops = routing_weights.flops = lambda g, t, k, d: 2 * g * t * k * d

for _g, _t, _k, _d, _e, _c in (("2,", 3, 2, 2, 4, 2), ("", 5, 1, 3, 3, 2), ("1,", 4, 2, 1, 2, 3)):
    _x, _y, _w = f"f32[{_g}{_t},{_d}]", f"f32[{_g}{_e},{_c},{_d}]", f"[{_g}{_t},{_k}]"
    _ranges = {"expert": (0, _e), "slot": (-1, _c)}
    dispatch.case(_x, f"f32{_w}", f"i64{_w}", f"i64{_w}", ranges=_ranges, experts=_e, capacity=_c)
    combine.case(_y, f"f32{_w}", f"i64{_w}", f"i64{_w}", ranges=_ranges)
    routing_weights.case(_y, _x, f"i64{_w}", f"i64{_w}", ranges=_ranges)


def top_k_gating(logits: Any, k: int, capacity: int, normalize: bool = True) -> tuple[Any, Any, Any, Any]:
    """Choices of k experts for every token from their logits (*g, t, e).

    Returns
    -------
    tuple
        Weights (*g, t, k), with `normalize` adding up to one over the choices; experts and places (*g, t, k) for
        `dispatch` and `combine`; and the scalar that balances the load (Shazeer et al. 2017, as in GShard): the number
        of experts times the mean over groups of the sum over experts of the share of first choices and the mean
        probability, 1 where all are equal.
    """
    experts = logits.shape[-1]
    if not 1 <= k <= experts:
        raise RuleError(f"top_k_gating: k={k} must be between 1 and the number of experts, {experts}")
    if capacity < 1:
        raise RuleError(f"top_k_gating: capacity={capacity} must be at least 1")
    probabilities = softmax(logits, axis=-1)
    weights, chosen = topk(probabilities, k=k, axis=-1)
    if normalize:
        weights = div(weights, sum_(weights, axis=-1, keepdims=True))
    slots = expert_slots(chosen, experts=experts, capacity=capacity)
    first = cast(one_hot(select(chosen, -1, 0), classes=experts), dtype=probabilities.dtype)
    balance = mean(mul(mean(first, axis=-2), mean(probabilities, axis=-2)))
    return weights, chosen, slots, scale(balance, factor=float(experts) ** 2)
