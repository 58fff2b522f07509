"""Losses, whose sums over classes and samples the layouts may split."""

from __future__ import annotations

from typing import Any

from sbp.frontend.translation import Context, reshaped, translation
from sbp.ops import library as ops

_REDUCTIONS = ("none", "mean", "sum")


@translation("aten.cross_entropy_loss")
def _(context, logits, targets, weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0):
    """Of classes in dimension 1; they become the last one."""
    if weight is not None or label_smoothing:
        raise NotImplementedError("cross_entropy with class weights or label smoothing")
    narrow = _before_widening(context, context.node.args[0])
    logits = logits if narrow is None else narrow
    if len(logits.shape) > 2:
        logits = ops.permute(logits, order=(0, *range(2, len(logits.shape)), 1))
    if targets.shape == logits.shape:
        return _soft_targets(logits, targets, reduction)
    return ops.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=_REDUCTIONS[reduction])


def _soft_targets(logits: Any, targets: Any, reduction: int) -> Any:
    each = ops.neg(ops.sum(ops.mul(targets, ops.log_softmax(logits, axis=-1)), axis=-1))
    return each if reduction == 0 else (ops.mean if reduction == 1 else ops.sum)(each)


def _before_widening(context: Context, node: Any) -> Any:
    """The half-precision logits that were widened for the loss, which is computed wide inside anyway."""
    reshapes = []
    while str(node.target) in ("aten.view.default", "aten.reshape.default", "aten.contiguous.default"):
        reshapes.append(node)
        node = node.args[0]
    if str(node.target) not in ("aten.to.dtype", "aten._to_copy.default", "aten.float.default"):
        return None
    source = context.operand(node.args[0])
    if source.dtype not in ("bf16", "f16"):
        return None
    shape = context.operand(reshapes[0]).shape if reshapes else source.shape
    return reshaped(source, shape)


@translation("aten.nll_loss_nd", "aten.nll_loss", "aten.nll_loss2d")
def _(context, x, targets, weight=None, reduction=1, ignore_index=-100, **options):
    if weight is not None:
        raise NotImplementedError("nll_loss with class weights")
    if len(x.shape) > 2:
        x = ops.permute(x, order=(0, *range(2, len(x.shape)), 1))
    valid = ops.logical_not(ops.equal_number(targets, number=ignore_index))
    picked = ops.pick(x, ops.masked_fill(targets, ops.logical_not(valid), value=0))
    each = ops.neg(ops.masked_fill(picked, ops.logical_not(valid), value=0))
    if reduction == 0:
        return each
    total = ops.sum(each)
    return total if reduction == 2 else ops.div(total, ops.sum(ops.cast(valid, dtype=total.dtype)))


def _two(function: Any) -> Any:
    def translate(context: Context, x: Any, target: Any, reduction: int = 1, **options: Any) -> Any:
        return function(x, target, _REDUCTIONS[reduction], **options)

    return translate


translation("aten.mse_loss")(_two(ops.mse_loss))
translation("aten.l1_loss")(_two(ops.l1_loss))


@translation("aten.smooth_l1_loss", "aten.huber_loss")
def _(context, x, target, reduction=1, beta=1.0):
    out = ops.smooth_l1_loss(x, target, _REDUCTIONS[reduction], beta)
    return ops.scale(out, factor=beta) if str(context.node.target).startswith("aten.huber") and beta != 1 else out


@translation("aten.binary_cross_entropy_with_logits")
def _(context, x, target, weight=None, pos_weight=None, reduction=1):
    if weight is not None or pos_weight is not None:
        raise NotImplementedError("binary_cross_entropy_with_logits with weights")
    return ops.binary_cross_entropy_with_logits(x, target, _REDUCTIONS[reduction])


@translation("aten.binary_cross_entropy")
def _(context, x, target, weight=None, reduction=1):
    if weight is not None:
        raise NotImplementedError("binary_cross_entropy with weights")
    # PyTorch bounds logarithms from below by -100.
    yes = ops.clamp(ops.log(x), low=-100.0)
    no = ops.clamp(ops.log(ops.shift(ops.neg(x), amount=1.0)), low=-100.0)
    each = ops.neg(ops.add(ops.mul(target, yes), ops.mul(ops.shift(ops.neg(target), amount=1.0), no)))
    return each if reduction == 0 else (ops.mean if reduction == 1 else ops.sum)(each)


@translation("aten.kl_div")
def _(context, x, target, reduction=1, *, log_target=False):
    if log_target:
        raise NotImplementedError("kl_div with log_target")
    return ops.kl_div(x, target, _REDUCTIONS[reduction])
