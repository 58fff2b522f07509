"""Operators without translation, run through PyTorch on whole tensors: every rank computes all of it.

Importing this module registers the operators `torch_call` and `torch_call_backward`; a plan that holds them is read
where it has been imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from sbp.dtype import is_floating
from sbp.errors import FrontendError
from sbp.operator import TensorType, operator
from sbp.ops.views import operand
from sbp.trace import Symbol

Types = tuple[tuple[Any, ...], ...]
"""(element type, *sizes) of tensors, as plain values."""


def _whole_rule(inputs: Sequence[tuple[int, ...]], types: Types) -> tuple[str, dict[str, int]]:
    """No dimension is split, so that only the layout that is B throughout is legal."""
    left = [operand([f"i{number}d{at}^" for at in range(len(shape))]) for number, shape in enumerate(inputs)]
    left = [text if shape else f"*n{number}^" for number, (text, shape) in enumerate(zip(left, inputs))]
    right, sizes = [], {}
    for number, (_, *shape) in enumerate(types):
        right.append(" ".join(f"o{number}d{at}^" for at in range(len(shape))))
        sizes.update({f"o{number}d{at}": size for at, size in enumerate(shape)})
    return f"{', '.join(left)} -> {', '.join(right)}", sizes


def _call_rule(*shapes: tuple[int, ...], target: str, arguments: str, types: Types) -> tuple[str, dict[str, int]]:
    return _whole_rule(shapes, types)


def _call_types(*types_in: TensorType, target: str, arguments: str, types: Types) -> tuple[str, ...]:
    return tuple(kind[0] for kind in types)


@operator(_call_rule, outputs=("*out",), dtype=_call_types)
def torch_call(xp, *tensors, target, arguments, types):
    """The operator `target` of torch.ops on whole tensors.

    `arguments` is JSON of [positional, keyword] arguments in which {"tensor": i} is input i and {"dtype": name} an
    element type; `types` are those of the results.
    """
    found = _run(target, arguments, [_to_torch(item) for item in tensors])
    return tuple(_from_torch(item, like=tensors[0] if tensors else None) for item in found)


torch_call.flops = lambda elements: elements


@torch_call.gradient
def _(grad, *tensors, target, arguments, types):
    given = tuple(number for number, item in enumerate(grad) if item is not None)
    wanted = tuple(number for number, item in enumerate(tensors) if is_floating(item.dtype))
    if not given or not wanted:
        return (None,) * len(tensors)
    made = torch_call_backward(
        *(grad[number] for number in given), *tensors, target=target, arguments=arguments, given=given, wanted=wanted,
        types=tuple((tensors[number].dtype, *tensors[number].shape) for number in wanted),
    )  # fmt: skip
    found = dict(zip(wanted, made))
    return tuple(found.get(number) for number in range(len(tensors)))


@operator(lambda *shapes, types, **_: _whole_rule(shapes, types), outputs=("*out",),
          dtype=lambda *_, types, **__: tuple(kind[0] for kind in types))  # fmt: skip
def torch_call_backward(xp, *tensors, target, arguments, given, wanted, types):
    """Gradients of the inputs `wanted` of `torch_call` by torch.autograd, from those of its outputs `given`."""
    import torch

    grads = [_to_torch(item) for item in tensors[: len(given)]]
    inputs = [_to_torch(item) for item in tensors[len(given) :]]
    with torch.enable_grad():
        for number in wanted:
            inputs[number] = inputs[number].detach().requires_grad_()
        results = _run(target, arguments, inputs)
        found = torch.autograd.grad(
            [results[number] for number in given],
            [inputs[number] for number in wanted],
            [grad.to(results[number].dtype) for number, grad in zip(given, grads)],
            allow_unused=True,
        )
    made = [torch.zeros_like(inputs[n]) if item is None else item for n, item in zip(wanted, found)]
    return tuple(_from_torch(item.detach(), like=tensors[0]) for item in made)


torch_call_backward.flops = lambda elements: 2 * elements


def _run(target: str, arguments: str, tensors: list[Any]) -> list[Any]:
    import torch

    def real(item: Any) -> Any:
        if isinstance(item, dict):
            if "tensor" in item:
                return tensors[item["tensor"]]
            if "dtype" in item:
                return getattr(torch, item["dtype"])
            return float(item["float"])
        return [real(part) for part in item] if isinstance(item, list) else item

    positional, keyword = json.loads(arguments)
    function: Any = torch.ops
    for part in target.split("."):
        function = getattr(function, part)
    found = function(*map(real, positional), **{key: real(item) for key, item in keyword.items()})
    results = found if isinstance(found, (tuple, list)) else (found,)
    return [item for item in results if isinstance(item, torch.Tensor)]


def _to_torch(array: Any) -> Any:
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if type(array).__module__.startswith("cupy"):
        return torch.from_dlpack(array)
    import numpy

    return torch.from_numpy(numpy.array(array))


def _from_torch(tensor: Any, like: Any) -> Any:
    import torch

    if isinstance(like, torch.Tensor):
        return tensor
    if like is not None and type(like).__module__.startswith("cupy"):
        import cupy

        return cupy.from_dlpack(tensor.contiguous())
    kind = str(tensor.dtype).rpartition(".")[2]
    return tensor.detach().float().numpy() if kind == "bfloat16" else tensor.detach().numpy()


def run_whole(node: Any, types: Sequence[TensorType], operand: Any, number: Any) -> Any:
    """The results of a traced node as those of `torch_call`.

    Raises
    ------
    FrontendError
        An argument that is no plain value.
    """
    import torch

    inputs: list[Symbol] = []

    def plain(item: Any) -> Any:
        item = number(item)
        if isinstance(item, torch.fx.Node):
            found = operand(item)
            if not isinstance(found, Symbol):
                return plain(found)
            inputs.append(found)
            return {"tensor": len(inputs) - 1}
        if isinstance(item, torch.dtype):
            return {"dtype": str(item).rpartition(".")[2]}
        if isinstance(item, float) and not math.isfinite(item):
            return {"float": repr(item)}
        if isinstance(item, (list, tuple)):
            return [plain(part) for part in item]
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        raise FrontendError(f"{node.target}: its argument {item!r} cannot be kept in a plan; write a translation.")

    keyword = {key: item for key, item in node.kwargs.items() if key not in ("device", "layout", "pin_memory")}
    arguments = json.dumps([[plain(item) for item in node.args], {key: plain(item) for key, item in keyword.items()}])
    made = torch_call(
        *inputs,
        target=str(node.target),
        arguments=arguments,
        types=tuple((kind.dtype, *kind.shape) for kind in types),
    )
    if not isinstance(node.meta["val"], (tuple, list)):
        return made[0]
    found = iter(made)
    return tuple(next(found) if isinstance(item, torch.Tensor) else None for item in node.meta["val"])


