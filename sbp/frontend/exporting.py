"""Tracing a PyTorch module with torch.export: state, element types, inputs and loss made ready; errors translated."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from io import StringIO
from typing import Any

from sbp.errors import FrontendError
from sbp.frontend.stops import is_region, mark_stops, no_grad_outside_autocast, without_own_backward
from sbp.frontend.trace_errors import explained
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


def check_loss(loss: Any, targets: Any) -> None:
    """Whether a loss can be called with an output and the targets.

    Raises
    ------
    FrontendError
        It cannot, or there are targets without a loss.
    """
    if loss is None:
        if len(targets):
            raise FrontendError("targets are what a loss takes, but no loss is given; give loss=callable too.")
        return
    name = getattr(loss, "__qualname__", type(loss).__name__)
    if isinstance(loss, type):
        raise FrontendError(f"loss is the class {name}, not one of it; give loss={loss.__name__}().")
    if not callable(loss):
        raise FrontendError(f"loss is a callable of the output and the targets, got a {name}.")
    try:
        signature = inspect.signature(loss.forward if hasattr(loss, "forward") else loss)
    except (TypeError, ValueError):  # built-in functions do not say
        return
    keywords = targets if isinstance(targets, Mapping) else {}
    try:
        signature.bind(None, *(() if keywords else targets), **keywords)
    except TypeError as error:
        given = f"targets {', '.join(map(str, keywords))}" if keywords else f"{len(targets)} targets"
        raise FrontendError(
            f"loss {name}{signature} is called with the module's output and the {given}: {error}; give what it takes "
            "besides the output as targets=."
        ) from None


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
        raise FrontendError(f"example_inputs do not fit {type(module).__name__}.forward{signature}: {error}.") from None
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
            if not training:
                with _assigned_in_place(module):
                    return tensors_of(getattr(self, WRAPPED)(*arguments, **keywords))
            with without_own_backward(), no_grad_outside_autocast(), _assigned_in_place(module):
                output = getattr(self, WRAPPED)(*arguments, **keywords)
                if self.loss is None:
                    return _own_loss(module, output)
                if widen:
                    output = pytree.tree_map(_wide, output)
                if isinstance(targets, Mapping):
                    return _scalar(self.loss(output, **targets))
                return _scalar(self.loss(output, *targets))

    return Step()


@contextmanager
def _assigned_in_place(module: Any) -> Iterator[None]:
    """Buffers that `forward` assigns (`self.mean = ...`) are written instead; torch.export does not see it in parts."""
    before = [(part, name, held) for part in module.modules() for name, held in part._buffers.items()]
    yield
    for part, name, held in before:
        given = part._buffers.get(name)
        if given is held or held is None:
            continue
        if given is None or given.shape != held.shape:
            shape = None if given is None else list(given.shape)
            raise FrontendError(
                f"{type(part).__name__}.forward assigns the buffer {name} of shape {list(held.shape)} another shape, "
                f"{shape}; a plan's state keeps its shapes."
            )
        held.copy_(given)
        part._buffers[name] = held


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


def _scalar(found: Any) -> Any:
    """What a loss callable gave, if it is a loss."""
    import torch

    if isinstance(found, torch.Tensor) and found.ndim == 0 and found.is_floating_point():
        return found
    kind = type(found).__name__
    if isinstance(found, torch.Tensor):
        kind = f"a {str(found.dtype).removeprefix('torch.')} tensor of shape {list(found.shape)}"
    raise FrontendError(f"loss returns {kind}; it returns one floating scalar, a mean or sum (loss.mean()).")


def tensors_of(output: Any) -> dict[str, Any]:
    """The tensors of nested containers and dataclasses by name; one alone is "output".

    Raises
    ------
    FrontendError
        Two have one name.
    """
    import torch

    if isinstance(output, torch.Tensor):
        return {"output": output}
    found: dict[str, Any] = {}

    def collect(path: str, item: Any) -> None:
        if isinstance(item, torch.Tensor):
            if path in found:
                raise FrontendError(f"two outputs of the module are named {path}; name one of them otherwise.")
            found[path] = item
            return
        for key, part in _parts(item):
            collect(f"{path}.{key}" if path else key if isinstance(key, str) else f"output.{key}", part)

    collect("", output)
    return found


def _parts(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, Mapping):
        return list(item.items())
    if isinstance(item, (tuple, list)):
        return list(zip(getattr(item, "_fields", range(len(item))), item))
    if is_dataclass(item) and not isinstance(item, type):
        return [(field.name, getattr(item, field.name)) for field in fields(item)]
    return []


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
            if any(_changes_state(node) or _unknown(node) or is_region(node) for node in program.graph.nodes):
                mark_stops(program)
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
    logging.disable(logging.CRITICAL)
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
