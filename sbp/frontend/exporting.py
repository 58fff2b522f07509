"""Tracing a PyTorch module with torch.export: state, element types, inputs and loss made ready; errors translated."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

from sbp.errors import FrontendError
from sbp.frontend.translation import translation

WRAPPED = "model"
"""Attribute of the traced step under which the module stands."""


@dataclass(frozen=True)
class Inputs:
    """Example inputs as the module takes them, and the targets of a loss.

    Parameters
    ----------
    names
        Of all tensors, arguments first, then targets, in the order in which the traced program takes them.
    places
        Name -> position (int) or keyword (str) of the argument of `forward`, or ("targets", position or key).
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    targets: Any
    names: tuple[str, ...]
    tensors: tuple[Any, ...]
    places: Mapping[str, Any]


def inputs_of(module: Any, example: Any, targets: Any) -> Inputs:
    """Example inputs by name: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or
    (positional, keyword).

    Raises
    ------
    FrontendError
        They do not fit the signature of `forward`.
    """
    import torch

    if isinstance(example, torch.Tensor):
        example = (example,)
    if isinstance(example, Mapping):
        arguments, keywords = (), dict(example)
    elif isinstance(example, (tuple, list)):
        pair = len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], Mapping)
        arguments, keywords = (tuple(example[0]), dict(example[1])) if pair else (tuple(example), {})
    else:
        raise FrontendError(
            f"example_inputs is a tensor, a tuple of positional arguments or a mapping of keyword arguments of "
            f"{type(module).__name__}.forward, got {type(example).__name__}."
        )
    signature = inspect.signature(module.forward)
    try:
        bound = signature.bind(*arguments, **keywords)
    except TypeError as error:
        raise FrontendError(
            f"example_inputs do not fit {type(module).__name__}.forward{signature}: {error}."
        ) from None
    if "use_cache" in signature.parameters and "use_cache" not in bound.arguments:
        keywords["use_cache"] = False  # a cache of keys and values is no output of a planned step
    # One tensor given twice would be traced as one input.
    arguments, keywords, targets = _apart((arguments, keywords, targets))
    positional = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    names: list[str] = []
    places: dict[str, Any] = {}
    tensors: list[Any] = []
    for index, argument in enumerate(arguments):
        label = positional[index] if index < len(positional) else f"input_{index}"
        _named(label, argument, index, names, places, tensors)
    for key, argument in keywords.items():
        _named(key, argument, key, names, places, tensors)
    alone = isinstance(targets, tuple) and len(targets) == 1 and isinstance(targets[0], torch.Tensor)
    for path, tensor in _leaves(targets):
        name = "targets" if alone else f"targets.{path}"
        names.append(name)
        places[name] = ("targets", path)
        tensors.append(tensor)
    if not tensors:
        raise FrontendError(f"example_inputs of {type(module).__name__} hold no tensor.")
    for name, tensor in zip(names, tensors):
        if tensor.is_complex():
            raise FrontendError(f"{name} holds complex numbers, which have no element type here; pass real and "
                                "imaginary parts (torch.view_as_real).")  # fmt: skip
    return Inputs(arguments, keywords, targets, tuple(names), tuple(tensors), places)


def _named(label: str, argument: Any, place: Any, names: list[str], places: dict[str, Any], tensors: list[Any]) -> None:
    for path, tensor in _leaves(argument):
        name = f"{label}.{path}" if path else label
        names.append(name)
        places[name] = place
        tensors.append(tensor)


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    """The tensors of nested containers with their dotted paths."""
    import torch
    from torch.utils import _pytree as pytree

    found = []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append((".".join(re.sub(r"[\[\]'.]", "", str(part)) for part in path), leaf))
    return found


def _apart(tree: Any) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            return leaf.detach().clone()
        seen.add(id(leaf))
        return leaf

    return pytree.tree_map(own, tree)


def own_copy(module: Any, dtype: Any, training: bool) -> tuple[Any, Callable[[Any], Any]]:
    """A copy of a module that shares its state, in training or inference mode, and what makes inputs fit it.

    With an element type its floating parameters are replaced by fake ones of that type: nothing is allocated.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    state = [*module.parameters(), *module.buffers()]
    meta = any(tensor.is_meta for tensor in state)
    mode = next((tensor.fake_mode for tensor in state if isinstance(tensor, FakeTensor)), None)
    retyped = dtype is not None and any(
        tensor.is_floating_point() and tensor.dtype != dtype for tensor in module.parameters()
    )
    if retyped and not meta and mode is None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    for tensor in state:
        kept = tensor
        if mode is not None and not isinstance(tensor, FakeTensor):
            kept = mode.from_tensor(tensor)
        if retyped and isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            with mode if mode is not None else torch.no_grad():
                kept = torch.nn.Parameter(kept.detach().to(dtype), requires_grad=tensor.requires_grad)
        memo[id(tensor)] = kept
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise FrontendError(
            f"{type(module).__name__} cannot be copied ({type(error).__name__}: {error}); modules hold their tensors "
            "as parameters or buffers (register_buffer), and nothing that copy.deepcopy refuses."
        ) from None
    if not training:
        twin.eval()
    elif not module.training:
        twin.train()

    def fitting(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if meta:
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        elif mode is not None and not isinstance(tensor, FakeTensor):
            tensor = mode.from_tensor(tensor)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            with mode if mode is not None else torch.no_grad():
                tensor = tensor.to(dtype)
        return tensor

    return twin, fitting


def traced_step(module: Any, loss: Any, training: bool, widen: bool) -> Any:
    """A module of torch that runs `module` and gives its loss, or the tensors of its output by name."""
    import torch
    from torch.utils import _pytree as pytree

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, WRAPPED, module)
            self.loss = loss

        def forward(self, arguments: Any, keywords: Any, targets: Any) -> Any:
            output = getattr(self, WRAPPED)(*arguments, **keywords)
            if not training:
                return _tensors_of(output)
            if self.loss is None:
                return _own_loss(module, output)
            if widen:
                output = pytree.tree_map(_wide, output)
            if isinstance(targets, Mapping):
                return self.loss(output, **targets)
            return self.loss(output, *targets)

    return Step()


def _wide(leaf: Any) -> Any:
    import torch

    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bfloat16, torch.float16) else leaf


def _own_loss(module: Any, output: Any) -> Any:
    """The loss that a module returns: a scalar, or the entry `loss` of its output."""
    import torch

    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", output[0] if isinstance(output, (tuple, list)) and output else None)
    if isinstance(found, torch.Tensor) and found.ndim == 0:
        return found
    what = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else type(output).__name__
    raise FrontendError(
        f"a training step needs one scalar loss, {type(module).__name__} returns {what}; give loss=callable (of the "
        "output, and of targets=...), inputs for which the model returns its own loss (labels=...), or training=False."
    )


def _tensors_of(output: Any) -> dict[str, Any]:
    """The tensors of an output by name; one alone is "output"."""
    import torch

    if isinstance(output, torch.Tensor):
        return {"output": output}
    items = output.items() if isinstance(output, Mapping) else enumerate(output if output is not None else ())
    found = {}
    for key, value in items:
        if isinstance(value, torch.Tensor):
            found[str(key) if isinstance(key, str) else f"output.{key}"] = value
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor):
                    found[f"{key if isinstance(key, str) else f'output.{key}'}.{index}"] = item
    return found


def export(step: Any, inputs: Inputs, fitting: Callable[[Any], Any], name: str, dynamic: Mapping[str, int]) -> Any:
    """The traced program, functional: no operator changes its inputs in place.

    Operators that have no translation are decomposed into core ATen where PyTorch knows how.

    Parameters
    ----------
    dynamic
        Name of an input -> its dimension that may take any size.
    """
    import torch
    from torch.utils import _pytree as pytree

    arguments = pytree.tree_map(fitting, (inputs.arguments, inputs.keywords))
    targets = pytree.tree_map(lambda leaf: _like_model(leaf, fitting), inputs.targets)
    given = (*arguments, targets)
    shapes = _dynamic_shapes(given, inputs, dynamic) if dynamic else None
    try:
        with _quiet():
            program = torch.export.export(step, given, dynamic_shapes=shapes, strict=False)
            if any(_changes_state(node) or _unknown(node) for node in program.graph.nodes):
                table = torch.export.default_decompositions()
                for operator in list(table):
                    if translation.find(str(operator)) is not None:
                        table.pop(operator)
                program = program.run_decompositions(table)
    except FrontendError:
        raise
    except Exception as error:
        raise FrontendError(explained(name, error)) from error
    return program


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch.export logs and prints: its errors are translated, its warnings are about itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _like_model(leaf: Any, fitting: Callable[[Any], Any]) -> Any:
    """Targets keep their element type, unlike inputs."""
    made = fitting(leaf)
    return made if made is leaf or getattr(made, "dtype", None) == leaf.dtype else made.to(leaf.dtype)


def _dynamic_shapes(given: Any, inputs: Inputs, dynamic: Mapping[str, int]) -> Any:
    import torch
    from torch.utils import _pytree as pytree

    batch = torch.export.Dim("batch", min=2)
    named = iter(inputs.names)

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        axis = dynamic.get(next(named))
        return {axis: batch} if axis is not None else None

    return pytree.tree_map(shape, given)


def _unknown(node: Any) -> bool:
    """An operator without translation that something uses."""
    return (
        node.op == "call_function"
        and hasattr(node.target, "_schema")
        and bool(node.users)
        and translation.find(str(node.target)) is None
    )


def _changes_state(node: Any) -> bool:
    if node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    running = str(node.target) in ("aten.batch_norm.default", "aten.instance_norm.default") and node.args[5] is True
    return schema.is_mutable or (running and node.args[3] is not None)


# -- errors ------------------------------------------------------------------------------------------------------------

_ADVICE = (
    (
        r"data-dependent|GuardOnDataDependent|DataDependent|_local_scalar_dense|\.item\(\)|unbacked|Eq\(u\d+",
        "its Python code depends on the values of a tensor, which a plan cannot: an `if`, a loop, `.item()`, "
        "`.tolist()` or a shape made of them. Write it with torch.where or torch.cond, take the number as a Python "
        "argument of the constructor, or leave the branch out in training.",
    ),
    (
        r"nonzero|masked_select|boolean mask|unique",
        "the shape of a tensor depends on the data (indexing by a mask, nonzero, unique). Write it with torch.where, "
        "or multiply by the mask.",
    ),
    (
        r"Constraints violated|specialized|dynamic.*dim|Dim\(",
        "it cannot take every batch size: its code fixes the size. Leave dynamic_batch out and give example_inputs "
        "of the batch size that is planned.",
    ),
    (
        r"expected .*dtype|same dtype|must have the same dtype|to have the same dtype",
        "its operations meet tensors of different element types. With precision=... parameters and inputs are of the "
        "computing type; leave precision out to import the model as it is.",
    ),
    (
        r"device",
        "its tensors are on different devices. Put the model and what it creates in forward on one device "
        "(torch.zeros(..., device=x.device)).",
    ),
)


def explained(name: str, error: BaseException) -> str:
    """What torch.export says, in one line, where in the model, and what to change."""
    text = str(error)
    whole = f"{type(error).__name__}: {text}"
    place = _place(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    message = f"{name} cannot be traced by torch.export{f' at {place}' if place else ''}: {first.rstrip('.')}."
    for pattern, advice in _ADVICE:
        if re.search(pattern, whole):
            return f"{message} This is because {advice}"
    return f"{message} Run the model on the example inputs first; torch.export(model, ...) gives the whole message."


def _place(error: BaseException) -> str:
    """The last line of the model's own code on the way to the error."""
    frames: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not re.search(r"/torch/|sbp/frontend/|<.*>|/contextlib\.py|/functools\.py", file):
            frames.append(f"{file}:{trace.tb_lineno}")
        trace = trace.tb_next
    found = re.findall(r'File "([^"]+)", line (\d+)', str(error))
    own = [f"{file}:{line}" for file, line in found if not re.search(r"/torch/|sbp/frontend/", file)]
    return own[-1] if own else frames[-1] if frames else ""


def only_tensors(names: Sequence[str], nodes: Sequence[Any]) -> dict[str, Any]:
    """Outputs of the traced program that are tensors, by name."""
    import torch

    return {name: node for name, node in zip(names, nodes) if isinstance(node, torch.fx.Node)}
