"""Optimizer updates with PyTorch's formulas: a parameter and its state to their next values, element by element."""

from __future__ import annotations

from typing import Any

from sbp.errors import RuleError
from sbp.operator import operator


def same_shapes(count: int, scalars: int = 0):
    """A rule function: `count` tensors of one shape (parameter, gradient, state), then at most so many scalars."""

    def rule(*shapes: tuple[int, ...], **attributes: Any) -> str:
        tensors, rest = shapes[:count], shapes[count:]
        if len(set(tensors)) != 1 or len(rest) > scalars or any(shape != () for shape in rest):
            found = ", ".join(str(list(shape)) for shape in shapes)
            raise RuleError(f"parameter, gradient and state must have one shape, the step none: got {found}")
        left = ["*d"] * count + ["*none^"] * len(rest)
        return f"{', '.join(left)} -> {', '.join(['*d'] * max(1, count - 1))}"

    return rule


@operator(same_shapes(2), linear="all")
def sgd_update(xp, parameter, grad, *, lr, weight_decay=0.0):
    """Stochastic gradient descent: parameter - lr * (grad + weight_decay * parameter)."""
    grad = grad.astype(parameter.dtype)
    if weight_decay:
        grad = grad + weight_decay * parameter
    return parameter - lr * grad


sgd_update.flops = lambda d, weight_decay: (4 if weight_decay else 2) * d
sgd_update.case("f32[4,6]", "f32[4,6]", lr=0.1)
sgd_update.case("f32[5]", "f32[5]", lr=0.1, weight_decay=0.3)
sgd_update.case("f32[2,1,3]", "f32[2,1,3]", lr=0.5)


@operator(
    same_shapes(3, 1),
    linear="parameter grad buffer",
    outputs=("parameter", "buffer"),
    dtype=lambda parameter, grad, buffer, *step, **attributes: (parameter.dtype, buffer.dtype),
)
def momentum_update(
    xp, parameter, grad, buffer, *step, lr, momentum=0.9, dampening=0.0, nesterov=False, weight_decay=0.0
):
    """SGD with momentum (torch.optim.SGD).

    `buffer` starts as zeros. `step`, an optional scalar that counts from 1, is needed with dampening only, which
    PyTorch leaves out in the first step.
    """
    if dampening and not step:
        raise RuleError("momentum_update: dampening needs the step number as a fourth input")
    grad = grad.astype(parameter.dtype)
    if weight_decay:
        grad = grad + weight_decay * parameter
    share = xp.where(xp.asarray(step[0]) > 1, 1 - dampening, 1.0).astype(grad.dtype) if dampening else 1
    buffer = (momentum * buffer + share * grad).astype(buffer.dtype)
    direction = grad + momentum * buffer if nesterov else buffer
    return (parameter - lr * direction).astype(parameter.dtype), buffer


momentum_update.flops = lambda d, weight_decay, nesterov: (4 + 2 * bool(weight_decay) + 2 * nesterov) * d
momentum_update.case("f32[4,6]", "f32[4,6]", "f32[4,6]", lr=0.1)
momentum_update.case("f32[5]", "f32[5]", "f32[5]", "i64[]", lr=0.1, dampening=0.5, weight_decay=0.3)
momentum_update.case("f32[2,3]", "f32[2,3]", "f32[2,3]", lr=0.1, nesterov=True)

_NO_EXTREMA = {"*P(m*": "neither gradients nor parameters are maxima or minima of parts"}
sgd_update.reasons = momentum_update.reasons = _NO_EXTREMA


def _adam_types(parameter, grad, first, second, step, **attributes: Any) -> tuple[str, ...]:
    return parameter.dtype, first.dtype, second.dtype


def _adam(xp, parameter, grad, first, second, step, lr, beta1, beta2, eps):
    """The step of Adam without weight decay; corrections of the bias in float64, as PyTorch's are."""
    grad = grad.astype(first.dtype)
    first = first + (1 - beta1) * (grad - first)
    second = beta2 * second + (1 - beta2) * (grad * grad)
    count = xp.asarray(step).astype(xp.float64)
    rate = (lr / (1 - beta1**count)).astype(parameter.dtype)
    root = xp.sqrt(1 - beta2**count).astype(parameter.dtype)
    denominator = xp.sqrt(second) / root + eps
    return (parameter - rate * (first / denominator)).astype(parameter.dtype), first, second


@operator(same_shapes(4, 1), outputs=("parameter", "first", "second"), dtype=_adam_types)
def adam_update(
    xp, parameter, grad, first, second, step, *, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0
):
    """Adam (torch.optim.Adam): moments `first` and `second` start as zeros; `step` is a scalar that counts from 1."""
    if weight_decay:
        grad = grad.astype(parameter.dtype) + weight_decay * parameter
    return _adam(xp, parameter, grad, first, second, step, lr, beta1, beta2, eps)


@operator(same_shapes(4, 1), outputs=("parameter", "first", "second"), dtype=_adam_types)
def adamw_update(
    xp, parameter, grad, first, second, step, *, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=1e-2
):
    """AdamW (torch.optim.AdamW): Adam with the weight decay applied to the parameter itself."""
    return _adam(xp, parameter * (1 - lr * weight_decay), grad, first, second, step, lr, beta1, beta2, eps)


adam_update.flops = adamw_update.flops = lambda d, weight_decay: (12 + 2 * bool(weight_decay)) * d

for _op in (adam_update, adamw_update):
    _op.reasons = _NO_EXTREMA
    for _shape in ("4,6", "5", "2,1,3"):
        _op.case(
            *(f"f32[{_shape}]",) * 4, "i64[]", ranges={"second": (0.5, 2.0), "step": (1, 5)}, lr=0.1, weight_decay=0.1
        )
