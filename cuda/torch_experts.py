"""Mixture of experts on torch tensors: where choices wait, and the three derivatives of dispatching (see `sbp.ops`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbp.cuda.torch_types import widen


def expert_slots(xp, expert, *, experts, capacity):
    order = expert.transpose(-1, -2)
    flat = order.reshape(*order.shape[:-2], order.shape[-1] * order.shape[-2])
    chosen = flat[..., None] == torch.arange(experts, device=expert.device)
    earlier = chosen.long().cumsum(dim=-2) - 1
    slot = torch.where(chosen, earlier, 0).sum(dim=-1)
    slot = torch.where(chosen.any(dim=-1) & (slot < capacity), slot, -1)
    return slot.reshape(order.shape).transpose(-1, -2)


def _places(
    expert: Tensor, slot: Tensor, experts: int, capacity: int, first: int, slots: int, begin: int
) -> tuple[Tensor, Tensor]:
    groups = expert.numel() // (expert.shape[-1] * expert.shape[-2])
    expert, place = expert.reshape(groups, -1) - first, slot.reshape(groups, -1)
    here = (expert >= 0) & (expert < experts) & (place >= max(begin, 0)) & (place < min(begin + slots, capacity))
    row = (torch.arange(groups, device=expert.device)[:, None] * experts + expert) * slots + (place - begin)
    return torch.where(here, row, 0).reshape(-1), here.reshape(-1)


def dispatch(xp, x, weight, expert, slot, *, experts, capacity, first=0, slots=None, begin=0):
    slots = capacity if slots is None else slots
    lead, width, choices = x.shape[:-2], x.shape[-1], expert.shape[-1]
    wide = widen(x)
    out = wide.new_zeros((math.prod(lead) * experts * slots, width))
    if out.numel() and expert.numel():
        row, here = _places(expert, slot, experts, capacity, first, slots, begin)
        tokens = wide.reshape(-1, width).repeat_interleave(choices, dim=0)
        out.index_add_(0, row, tokens * (widen(weight).reshape(-1) * here)[:, None])
    return out.reshape(*lead, experts, slots, width).to(x.dtype)


def _found(
    y: Tensor, expert: Tensor, slot: Tensor, capacity: int | None, first: int, begin: int
) -> tuple[Tensor, Tensor]:
    experts, slots, width = y.shape[-3:]
    row, here = _places(expert, slot, experts, slots if capacity is None else capacity, first, slots, begin)
    return here, widen(y).reshape(-1, width)[row]


def combine(xp, y, weight, expert, slot, *, experts=None, capacity=None, first=0, slots=None, begin=0):
    if not y.numel() or not expert.numel():
        return y.new_zeros((*expert.shape[:-1], y.shape[-1]))
    here, found = _found(y, expert, slot, capacity, first, begin)
    share = widen(weight).reshape(-1) * here
    return (found * share[:, None]).reshape(*expert.shape, y.shape[-1]).sum(dim=-2).to(y.dtype)


def routing_weights(xp, y, x, expert, slot, *, experts=None, capacity=None, first=0, slots=None, begin=0):
    if not y.numel() or not expert.numel():
        return y.new_zeros(expert.shape)
    here, found = _found(y, expert, slot, capacity, first, begin)
    choices, width = expert.shape[-1], y.shape[-1]
    tokens = widen(x).reshape(expert.numel() // choices, width).repeat_interleave(choices, dim=0)
    return ((tokens * found).sum(dim=-1) * here).reshape(expert.shape).to(y.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "expert_slots": expert_slots, "dispatch": dispatch, "combine": combine, "routing_weights": routing_weights
}  # fmt: skip
"""Operator name -> kernel."""
