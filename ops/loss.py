"""Losses. They are put together from operators, so that the collectives of a split class dimension stay visible."""

from __future__ import annotations

from typing import Any

from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.activation import softplus
from sbp.ops.broadcasting import of_type
from sbp.ops.comparison import equal_number, logical_not
from sbp.ops.elementwise import abs_, add, cast, clamp, div, exp, log, mul, neg, scale, square, sub
from sbp.ops.embedding import pick
from sbp.ops.precision import widen
from sbp.ops.reduction import max_, mean, sum_
from sbp.ops.views import unsqueeze


def _wide_type(logits: TensorType, *others: TensorType, **attributes: Any) -> str:
    return "f32" if logits.dtype in ("f16", "bf16") else logits.dtype


@operator("*b v+, *b -> *b", antitone="maximum", dtype=_wide_type)
def sum_exp(xp, x, maximum):
    """Sum of exp(x - maximum) over the last dimension: x (*b, v), maximum (*b) -> (*b)."""
    return xp.sum(xp.exp(widen(x) - widen(maximum)[..., None]), axis=-1)


sum_exp.flops = lambda elements: 3 * elements


@sum_exp.gradient
def _(grad, x, maximum, *, out):
    slope = mul(exp(sub(x, unsqueeze(maximum, axis=-1))), unsqueeze(grad, axis=-1))
    return of_type(slope, x), of_type(neg(mul(grad, out)), maximum)


sum_exp.case("f32[4,6]", "f32[4]")
sum_exp.case("f32[2,3,5]", "f32[2,3]")
sum_exp.case("f32[7]", "f32[]")


def _kept(targets, offset, size, classes, ignore_index):
    """Which targets count at all, and which of them are among the `size` classes from `offset` on."""
    counts = (targets >= 0) & (targets < classes)
    if ignore_index is not None:
        counts = counts & (targets != ignore_index)
    return counts, counts & (targets >= offset) & (targets < offset + size)


@operator("*b v+, *b, *b, *b -> *b", dtype=_wide_type)
def log_probability(xp, logits, targets, maximum, sum_exp, *, ignore_index=None, classes=None, offset=0):
    """Logarithm of the probability of the target class: logits (*b, v), integer targets (*b) -> (*b).

    `maximum` and `sum_exp` (*b) must be those of the logits over all classes. The gradient given to the logits is the
    whole one, softmax included, in one pass, and so these two have none of their own. Where the target is
    `ignore_index` or no class, result and gradient are zero. Over split classes the result is P(sum), as one rank only
    has the target. `classes` and `offset` are set for shards.
    """
    size = logits.shape[-1]
    _, here = _kept(targets, offset, size, size if classes is None else classes, ignore_index)
    zero = xp.zeros((), widen(logits).dtype)
    if size == 0:
        return xp.zeros(targets.shape, zero.dtype)
    place = xp.clip(targets - offset, 0, size - 1)
    found = widen(xp.take_along_axis(logits, place[..., None], axis=-1)[..., 0])
    return xp.where(here, found - widen(maximum) - xp.log(sum_exp), zero)


log_probability.flops = lambda b: 4 * b
log_probability.traffic = lambda b, itemsize: 5 * b * itemsize


@log_probability.localize
def _(attributes, inputs, outputs):
    box = inputs[0]
    return {**attributes, "classes": box.global_shape[-1], "offset": box.offset[-1]}


@log_probability.gradient
def _(grad, logits, targets, maximum, sum_exp, *, ignore_index):
    slope = log_probability_backward(grad, logits, targets, maximum, sum_exp, ignore_index=ignore_index)
    return slope, None, None, None


_POSITIVE = {"sum_exp": (0.5, 2.0)}
log_probability.case("f32[4,6]", "i64[4]", "f32[4]", "f32[4]", ranges={"targets": (0, 6), **_POSITIVE})
log_probability.case("f32[2,5]", "i64[2]", "f32[2]", "f32[2]", ranges={"targets": (-2, 6), **_POSITIVE}, ignore_index=1)
log_probability.case("f32[1,3,7]", "i64[1,3]", "f32[1,3]", "f32[1,3]", ranges={"targets": (0, 7), **_POSITIVE})
log_probability.reasons = {
    "*P(*)* -> *": "maximum and sum_exp belong to the logits; Partial ones would need each other's other parts",
}


@operator("*b, *b v, *b, *b, *b -> *b v", linear="grad", dtype=lambda grad, logits, *others, **attributes: logits.dtype)
def log_probability_backward(xp, grad, logits, targets, maximum, sum_exp, *, ignore_index=None, classes=None, offset=0):
    """Gradient of `log_probability`: grad (*b) times (one at the target - softmax(logits)) -> (*b, v)."""
    size = logits.shape[-1]
    counts, here = _kept(targets, offset, size, size if classes is None else classes, ignore_index)
    factor = xp.where(counts, grad, xp.zeros((), grad.dtype))
    out = xp.exp(widen(logits) - widen(maximum)[..., None])
    out *= -(factor / sum_exp)[..., None]
    if size:
        rows = out.reshape(-1, size)
        place = xp.clip(targets - offset, 0, size - 1).reshape(-1)
        rows[xp.arange(len(rows)), place] += xp.where(here, factor, xp.zeros((), grad.dtype)).reshape(-1)
        out = rows.reshape(logits.shape)
    return out.astype(logits.dtype)


log_probability_backward.flops = lambda elements: 4 * elements


@log_probability_backward.localize
def _(attributes, inputs, outputs):
    box = inputs[1]
    return {**attributes, "classes": box.global_shape[-1], "offset": box.offset[-1]}


log_probability_backward.case(
    "f32[4]", "f32[4,6]", "i64[4]", "f32[4]", "f32[4]", ranges={"targets": (0, 6), **_POSITIVE}
)
log_probability_backward.case(
    "f32[2]", "f32[2,5]", "i64[2]", "f32[2]", "f32[2]", ranges={"targets": (-2, 6), **_POSITIVE}, ignore_index=1
)
log_probability_backward.case(
    "f32[1,3]", "f32[1,3,7]", "i64[1,3]", "f32[1,3]", "f32[1,3]", ranges={"targets": (0, 7), **_POSITIVE}
)


def _reduced(x: Any, reduction: str) -> Any:
    if reduction not in ("mean", "sum", "none"):
        raise RuleError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return mean(x) if reduction == "mean" else sum_(x) if reduction == "sum" else x


def cross_entropy(logits: Any, targets: Any, ignore_index: int | None = None, reduction: str = "mean") -> Any:
    """Cross-entropy of class logits (*b, v) and integer targets (*b), classes last: mean over the targets.

    Targets equal to `ignore_index` have no part in the mean. The maximum and the sum over classes are nodes of their
    own: with split classes they become P(max) and P(sum), and only (*b) numbers are communicated.
    """
    maximum = max_(logits, axis=-1)
    rows = log_probability(logits, targets, maximum, sum_exp(logits, maximum), ignore_index=ignore_index)
    if ignore_index is None or reduction != "mean":
        return neg(_reduced(rows, reduction))
    counted = sum_(logical_not(equal_number(targets, number=ignore_index)))
    return div(neg(sum_(rows)), cast(counted, dtype=rows.dtype))


def nll_loss(log_probabilities: Any, targets: Any, reduction: str = "mean") -> Any:
    """Negative log-likelihood: log-probabilities (*b, v), integer targets (*b)."""
    return neg(_reduced(pick(log_probabilities, targets), reduction))


def l1_loss(x: Any, target: Any, reduction: str = "mean") -> Any:
    """Mean of the absolute differences."""
    return _reduced(abs_(sub(x, target)), reduction)


def smooth_l1_loss(x: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Any:
    """Mean of d^2 / (2 beta) where the difference d is below beta, of d - beta / 2 elsewhere (Girshick, 2015)."""
    if beta <= 0:
        raise RuleError(f"beta must be above 0, got {beta}; use l1_loss for none")
    distance = abs_(sub(x, target))
    near = clamp(distance, high=beta)
    # with n = min(d, beta): n^2 / (2 beta) + (d - n)
    return _reduced(add(scale(square(near), factor=0.5 / beta), sub(distance, near)), reduction)


def kl_div(x: Any, target: Any, reduction: str = "mean") -> Any:
    """Kullback-Leibler divergence of probabilities `target` from log-probabilities x: mean over all elements.

    As `torch.nn.functional.kl_div`; `reduction` "batchmean" divides by the first dimension only.
    """
    positive = clamp(target, low=_TINY)  # so that 0 * log 0 is 0
    terms = mul(target, sub(log(positive), x))
    if reduction == "batchmean":
        return scale(sum_(terms), factor=1 / x.shape[0])
    return _reduced(terms, reduction)


_TINY = 1e-37
"""Above the smallest normal number of single precision; its logarithm is finite."""


def mse_loss(x: Any, target: Any, reduction: str = "mean") -> Any:
    """Mean of the squared differences."""
    return _reduced(square(sub(x, target)), reduction)


def binary_cross_entropy_with_logits(logits: Any, targets: Any, reduction: str = "mean") -> Any:
    """Cross-entropy of logits and probabilities of one event: mean of softplus(x) - x * t, which cannot overflow."""
    return _reduced(sub(softplus(logits), mul(logits, targets)), reduction)
