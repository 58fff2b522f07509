"""Groups of operators that have one operator here, recognized where their last one is translated.

The results are the same in exact arithmetic; what the group made in between goes unless something else reads it.
"""

from __future__ import annotations

from typing import Any

from sbp.frontend.translation import Context, as_type
from sbp.ops import library as ops
from sbp.trace import Symbol

_CASTS = ("aten.to.dtype", "aten._to_copy.default", "aten.float.default", "aten.type_as.default",
          "aten.to.dtype_layout", "aten.alias.default")  # fmt: skip


def _is(node: Any, *names: str) -> bool:
    return str(getattr(node, "target", "")) in names


def _before_casts(node: Any) -> Any:
    while _is(node, *_CASTS):
        node = node.args[0]
    return node


def rms_norm(context: Context) -> Symbol | None:
    """weight * x * rsqrt(mean(x^2) + eps), the product of two factors being translated; casts may stand between."""
    for scaled, weight in (context.node.args, context.node.args[::-1]):
        found = _normalized(scaled)
        if found is None or not hasattr(weight, "meta"):
            continue
        source, eps = found
        factor, x = context.operand(weight), context.operand(source)
        if len(x.shape) > 1 and factor.shape == x.shape[-1:]:
            narrow = context.operand(_before_casts(source))
            x = narrow if narrow.dtype in ("bf16", "f16") else x
            return as_type(ops.rms_norm(x, factor, eps=eps), context.dtype)
    return None


def _normalized(node: Any) -> tuple[Any, float] | None:
    """(x, eps) of x * rsqrt(mean(x^2, last dimension) + eps)."""
    product = _before_casts(node)
    if not _is(product, "aten.mul.Tensor"):
        return None
    for x, root in (product.args, product.args[::-1]):
        if not _is(root, "aten.rsqrt.default") or not _is(root.args[0], "aten.add.Tensor"):
            continue
        mean, eps = root.args[0].args
        if not isinstance(eps, float) or not _is(mean, "aten.mean.dim"):
            continue
        power, axes = mean.args[:2]
        if list(axes) not in ([-1], [len(x.meta["val"].shape) - 1]) or not _squared(power, x):
            continue
        return x, eps
    return None


def _squared(power: Any, x: Any) -> bool:
    if _is(power, "aten.pow.Tensor_Scalar"):
        return power.args[1] == 2 and _before_casts(power.args[0]) is _before_casts(x)
    return _is(power, "aten.square.default") and _before_casts(power.args[0]) is _before_casts(x)


def rotary(context: Context) -> Symbol | None:
    """x * cos + cat(-second half of x, first half) * sin, the sum being translated."""
    if len(context.node.args) != 2:
        return None
    for straight, turned in (context.node.args, context.node.args[::-1]):
        if not (_is(straight, "aten.mul.Tensor") and _is(turned, "aten.mul.Tensor")):
            continue
        for x, cos in (straight.args, straight.args[::-1]):
            for halves, sin in (turned.args, turned.args[::-1]):
                if not (hasattr(cos, "meta") and hasattr(sin, "meta") and _halves_of(halves, x)):
                    continue
                found = context.operand(x), context.operand(cos), context.operand(sin)
                if all(_fits(item, found[0]) for item in found[1:]):
                    # One dtype inside, as the products that this stands for have.
                    return ops.rotate_halves(*(as_type(item, context.dtype) for item in found))
    return None


def _fits(table: Symbol, x: Symbol) -> bool:
    rank = len(table.shape)
    return (
        0 < rank <= len(x.shape)
        and table.shape[-1] == x.shape[-1]
        and all(size in (1, whole) for size, whole in zip(table.shape, x.shape[-rank:]))
    )


def _halves_of(node: Any, x: Any) -> bool:
    """cat((-x[..., d / 2 :], x[..., : d / 2]), dim=-1)."""
    if not _is(node, "aten.cat.default"):
        return False
    parts = node.args[0]
    rank = len(node.meta["val"].shape)
    axis = node.args[1] if len(node.args) > 1 else 0
    if len(parts) != 2 or axis % rank != rank - 1 or not _is(parts[0], "aten.neg.default"):
        return False
    second, first = parts[0].args[0], parts[1]
    width = x.meta["val"].shape[-1] if hasattr(x, "meta") else 0
    return _cut(first, x, 0, width // 2) and _cut(second, x, width // 2, width)


def _cut(node: Any, x: Any, start: int, stop: int) -> bool:
    if not _is(node, "aten.slice.Tensor") or node.args[0] is not x:
        return False
    rank = len(x.meta["val"].shape)
    dim, begin, end = (*node.args[1:4], None, None)[:3]
    if (dim or 0) % rank != rank - 1 or (len(node.args) > 4 and node.args[4] != 1):
        return False
    size = x.meta["val"].shape[-1]
    return slice(begin, end).indices(int(size))[:2] == (start, stop)


