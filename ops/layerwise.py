"""Optimizers that look at a whole parameter at once, put together from operators.

Norms and means over a split parameter come out P(sum), so the collectives that they need are placed by the planner.
"""

from __future__ import annotations

import math
from typing import Any

from sbp.dtype import dtype_named
from sbp.errors import RuleError
from sbp.operator import operator
from sbp.ops.comparison import greater_number, logical_and, where
from sbp.ops.constant import full
from sbp.ops.elementwise import add, cast, clamp, div, mul, pow_, rsqrt, scale, square, sub
from sbp.ops.matmul import matmul
from sbp.ops.optimizer import same_shapes
from sbp.ops.reduction import mean
from sbp.ops.statistics import norm
from sbp.ops.views import transpose


@operator(
    same_shapes(4, 1),
    outputs=("direction", "first", "second"),
    dtype=lambda parameter, grad, first, second, step, **attributes: (parameter.dtype, first.dtype, second.dtype),
)
def adam_direction(xp, parameter, grad, first, second, step, *, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.0):
    """What Adam subtracts at a learning rate of one, weight decay included, and the next moments.

    `step` is a scalar that counts from 1.
    """
    grad = grad.astype(first.dtype)
    first = first + (1 - beta1) * (grad - first)
    second = beta2 * second + (1 - beta2) * (grad * grad)
    count = xp.asarray(step).astype(xp.float64)
    unbiased = first / (1 - beta1**count).astype(first.dtype)
    root = xp.sqrt(second / (1 - beta2**count).astype(second.dtype))
    return (unbiased / (root + eps) + weight_decay * parameter).astype(parameter.dtype), first, second


adam_direction.flops = lambda d: 14 * d
for _shape in ("4,6", "5", "2,1,3"):
    adam_direction.case(
        *(f"f32[{_shape}]",) * 4, "i64[]", ranges={"second": (0.5, 2.0), "step": (1, 5)}, weight_decay=0.1
    )
adam_direction.reasons = {"*P(m*": "neither gradients nor parameters are maxima or minima of parts"}


def lamb_update(
    parameter: Any, grad: Any, first: Any, second: Any, step: Any, *, lr: float = 1e-3, beta1: float = 0.9,
    beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """LAMB (You et al., 2020): Adam's direction, as long as lr times the parameter's norm.

    A parameter or a direction of norm zero leaves the direction as it is. Returns parameter, first and second moment.
    """
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    direction, first, second = adam_direction(parameter, grad, first, second, step, **options)
    ratio = _ratio_or_one(norm(parameter), norm(direction))
    return sub(parameter, scale(mul(direction, ratio), factor=lr)), first, second


def _ratio_or_one(above: Any, below: Any) -> Any:
    positive = logical_and(greater_number(above, number=0), greater_number(below, number=0))
    one = full(shape=(), value=1.0, dtype=dtype_named(above.dtype))
    return where(positive, div(above, where(positive, below, one)), one)


def adafactor_update(
    parameter: Any, grad: Any, variances: tuple[Any, ...], step: Any, *, lr: float = 0.01, beta2_decay: float = -0.8,
    eps1: float = 2**-23, eps2: float = 1e-3, clip: float = 1.0, weight_decay: float = 0.0,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Adafactor (Shazeer and Stern, 2018) as torch.optim.Adafactor.

    `variances` starts as zeros: of a matrix (*b, m, n) two, of shapes (*b, m, 1) and (*b, 1, n), of a vector its own.
    `step` is a scalar that counts from 1. Returns parameter and variances.
    """
    if len(variances) != (2 if len(parameter.shape) > 1 else 1):
        raise RuleError(f"adafactor keeps two variances of a matrix and one of a vector, got {len(variances)}")
    kind = dtype_named(parameter.dtype)
    grad, count = cast(grad, dtype=kind), cast(step, dtype=kind)
    fresh = pow_(count, exponent=beta2_decay)
    size = math.prod(parameter.shape)
    length = clamp(scale(norm(parameter), factor=size**-0.5), low=eps2)
    rate = mul(length, clamp(pow_(count, exponent=-0.5), high=lr))
    squares = square(grad)
    if len(variances) == 2:
        rows = _towards(variances[0], mean(squares, axis=-1, keepdims=True), fresh)
        columns = _towards(variances[1], mean(squares, axis=-2, keepdims=True), fresh)
        variances = (rows, columns)
        estimate = div(mul(rows, columns), clamp(mean(rows, axis=-2, keepdims=True), low=eps1))
    else:
        variances = (_towards(variances[0], squares, fresh),)
        estimate = variances[0]
    update = mul(rsqrt(clamp(estimate, low=eps1 * eps1)), grad)
    excess = clamp(scale(norm(update), factor=size**-0.5 / clip), low=1.0)
    kept = scale(parameter, factor=1 - lr * weight_decay) if weight_decay else parameter
    return sub(kept, mul(update, div(rate, excess))), variances


def _towards(old: Any, new: Any, share: Any) -> Any:
    return add(old, mul(sub(new, old), share))


_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalized(x: Any, steps: int = 5, eps: float = 1e-7) -> Any:
    """A matrix (m, n) with nearly the same singular vectors and singular values near one, by Newton-Schulz iterations.

    The polynomial is that of Jordan et al., "Muon" (2024): values end between about 0.7 and 1.2.
    """
    if len(x.shape) != 2:
        raise RuleError(f"orthogonalizes a matrix, got shape {list(x.shape)}")
    a, b, c = _NEWTON_SCHULZ
    tall = x.shape[0] > x.shape[1]
    x = transpose(x) if tall else x
    x = div(x, clamp(norm(x), low=eps))
    for _ in range(steps):
        gram = matmul(x, transpose(x))
        change = add(scale(gram, factor=b), scale(matmul(gram, gram), factor=c))
        x = add(scale(x, factor=a), matmul(change, x))
    return transpose(x) if tall else x


def muon_update(
    parameter: Any, grad: Any, buffer: Any, *, lr: float = 1e-3, momentum: float = 0.95, nesterov: bool = True,
    weight_decay: float = 0.1, steps: int = 5, eps: float = 1e-7, match_adamw: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Muon (Jordan et al., 2024) as torch.optim.Muon, for matrices (m, n); `buffer` starts as zeros.

    `match_adamw` scales updates to AdamW's usual size (Liu et al., 2025). Returns parameter and buffer.
    """
    grad = cast(grad, dtype=dtype_named(parameter.dtype))
    buffer = add(scale(buffer, factor=momentum), scale(grad, factor=1 - momentum))
    direction = add(scale(grad, factor=1 - momentum), scale(buffer, factor=momentum)) if nesterov else buffer
    m, n = parameter.shape
    size = 0.2 * math.sqrt(max(m, n)) if match_adamw else math.sqrt(max(1.0, m / n))
    kept = scale(parameter, factor=1 - lr * weight_decay)
    return sub(kept, scale(orthogonalized(direction, steps, eps), factor=lr * size)), buffer
