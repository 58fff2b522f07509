"""PyTorch modules as logical graphs: traced by torch.export, translated operator by operator.

::

    imported = import_module(model, (tokens,), loss=cross_entropy, targets=(targets,))
    plan = auto_parallel(imported.graph, "a100-80g")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbp.dtype import dtype_named, is_floating
from sbp.errors import FrontendError
from sbp.frontend.translation import Context, translation
from sbp.graph import Graph, Initial
from sbp.optim import Optimizer, optimizer_named
from sbp.passes.precision import Precision, precision_named
from sbp.training import add_training

if TYPE_CHECKING:
    import numpy

    from sbp.frontend.program import Source, Unknown

__all__ = ["Context", "Imported", "import_module", "translation"]

ON_UNKNOWN = ("error", "replicate")


@dataclass(frozen=True)
class Imported:
    """A PyTorch module as a graph, and which of the module's tensors its values are.

    Parameters
    ----------
    graph
        The step: with gradients and optimizer, or the forward pass for inference.
    forward
        The forward graph, whose outputs are the loss or the module's outputs.
    module
        The module that was imported, as it was given.
    parameters
        Name of a state value -> its names in the module's `state_dict`, several for tied weights. Holds parameters and
        buffers; optimizer state and constants of the program are not of the module.
    inputs
        Name of an input value -> its place: position (int) or keyword (str) of an argument of `forward`, or
        ("targets", position or key) for what the loss takes.
    outputs
        Names of what the forward graph gives: "loss", or those of the module's outputs -> value.
    modules
        Node of `graph` -> path of the module it belongs to ("" is the module itself, "loss" the loss).
    lines
        Node of the forward graph -> "file:line" in the model's source.
    replicated
        Operators without translation that run through PyTorch on whole tensors (`on_unknown="replicate"`).
    constants
        Buffer of `forward` that holds a constant of the program -> its value, a tensor.
    """

    graph: Graph
    forward: Graph
    module: Any
    parameters: Mapping[str, tuple[str, ...]]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, str]
    lines: Mapping[str, str]
    replicated: tuple[Unknown, ...]
    constants: Mapping[str, Any]

    @property
    def modules(self) -> Mapping[str, str]:
        """Node -> module path."""
        return {node.name: node.module for node in self.graph.nodes}

    def state_arrays(self) -> dict[str, numpy.ndarray]:
        """The module's present state by value name, sharing memory where the array type allows (CPU, not bf16).

        Raises
        ------
        FrontendError
            The module holds no values (meta or fake tensors).
        """
        tensors = dict(_named_state(self.module))
        found = {name: _array(name, tensors[aliases[0]]) for name, aliases in self.parameters.items()}
        found.update((name, _array(name, value)) for name, value in self.constants.items())
        return {name: array for name, array in found.items() if name in self.graph.values}

    def __repr__(self) -> str:
        return f"<Imported {self.graph}>"


def import_module(
    module: Any,
    example_inputs: Any,
    *,
    loss: Any = None,
    targets: Any = (),
    training: bool = True,
    optimizer: Optimizer | str | None = None,
    precision: str | Precision | None = None,
    on_unknown: str = "error",
    dynamic_batch: bool | Mapping[str, int] = False,
    batch: int | None = None,
    name: str | None = None,
) -> Imported:
    """Import a PyTorch module; nothing is copied, and modules on the meta device or of fake tensors allocate nothing.

    Parameters
    ----------
    module
        Any `torch.nn.Module` that torch.export can trace.
    example_inputs
        What `forward` takes, in the shapes to plan for: a tensor, a tuple of positional arguments, a mapping of keyword
        arguments, or a pair of both. Their values matter only in that integers bound what is drawn in verification.
    loss
        Makes a scalar of the output: `loss(output, *targets)`. Default, in training: the scalar that the module
        returns, or the entry `loss` of its output.
    targets
        Further arguments of `loss`, example tensors: one, several, or a mapping of keyword arguments.
    training
        A training step (in training mode, unless parts of a module in training mode are in evaluation mode), or the
        forward pass in evaluation mode.
    optimizer
        Of `sbp.optim`, or its name; default AdamW.
    precision
        None: element types as the module has them. Or a name of `sbp.passes.precision.PRECISIONS`, such as "mixed":
        parameters are stored in one type and computed with in another, floating inputs as well (FSDP's mixed
        precision); the loss callable is given f32.
    on_unknown
        What to do with operators without translation: "error", or "replicate": run them through PyTorch on whole
        tensors on every rank (listed in `Imported.replicated`).
    dynamic_batch
        True: dimension 0 of every input may have any size; or the dimension by input name. Then `batch` may differ
        from that of the example inputs.
    batch
        Global batch size of the graph; default that of the example inputs.
    name
        Of the graph; default the module's class.

    Returns
    -------
    Imported
        Its `graph` is what `auto_parallel` plans. State has the names of `state_dict`; a tied weight is one value under
        its first name.

    Raises
    ------
    FrontendError
        torch is not installed; the inputs do not fit; torch.export cannot trace the module (says where and what to
        change); operators without translation (lists them all); weights that overlap in memory without being the same.
    """
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise FrontendError(f"import_module takes a torch.nn.Module, got {type(module).__name__}.")
    if on_unknown not in ON_UNKNOWN:
        raise FrontendError(f"on_unknown is one of {', '.join(ON_UNKNOWN)}, got {on_unknown!r}.")
    if not training and (loss is not None or optimizer is not None):
        raise FrontendError("inference has no loss and no optimizer; leave them out, or training=False.")
    from sbp.frontend import aten, exporting, program

    assert aten.__all__  # its import fills the table of translations
    name = name or type(module).__name__
    chosen = None if precision is None else precision_named(precision)
    if not isinstance(targets, (tuple, list, Mapping)):
        targets = (targets,)
    exporting.check_loss(loss, targets)
    inputs = exporting.inputs_of(module, example_inputs, targets)
    dynamic = _dynamic(inputs, dynamic_batch, batch)
    compute = None if chosen is None else getattr(torch, _TORCH_NAMES[chosen.compute])
    twin, fitting = exporting.own_copy(module, compute, training)
    widen = chosen is not None and chosen.compute != chosen.full
    traced = exporting.export(exporting.traced_step(twin, loss, training, widen), inputs, fitting, name, dynamic)
    aliases = _aliases(module)
    sources, known = _sources(traced, inputs, aliases, module, chosen)
    outputs, updates = _outputs(traced, training, sources)
    done = program.translate(
        name,
        traced.graph.nodes,
        outputs,
        updates,
        sources,
        known,
        program.Sizes(_symbols(traced, inputs, dynamic, batch)),
        exporting.WRAPPED,
        on_unknown,
    )
    graph = done.graph
    chosen_optimizer = None if optimizer is None else optimizer_named(optimizer)
    step = add_training(graph, chosen_optimizer) if training else graph
    if training and not {*step.updates} & {*step.parameters} and next(twin.parameters(), None) is not None:
        raise FrontendError(
            f"{name}: the loss depends on no parameter that requires a gradient, so there is nothing to train; give "
            "training=False, or take requires_grad_(False), detach() or no_grad away."
        )
    return Imported(
        step,
        graph,
        module,
        {key: names for key, names in aliases.items() if key in graph.values},
        {key: place for key, place in inputs.places.items() if key in graph.values},
        dict(zip(outputs, graph.outputs)),
        done.lines,
        done.replicated,
        done.folded,
    )


_TORCH_NAMES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise FrontendError("PyTorch is not installed; install torch (or sbp[torch]) to import its models.") from None
    return torch


def _named_state(module: Any) -> list[tuple[str, Any]]:
    """Every name of every parameter and buffer, several for what is shared."""
    return [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]


def _aliases(module: Any) -> dict[str, tuple[str, ...]]:
    """First name of every state tensor -> all its names; the same memory seen in the same way is one tensor."""
    first: dict[Any, str] = {}
    found: dict[str, list[str]] = {}
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in _named_state(module):
        key = _identity(tensor)
        if key in first:
            found[first[key]].append(name)
            continue
        first[key] = name
        found[name] = [name]
        if key[0] == "memory" and tensor.numel():
            begin = tensor.storage_offset()
            end = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
            for other_begin, other_end, other in spans.setdefault(key[1], []):
                if begin <= other_end and other_begin <= end and (tensor.requires_grad):
                    raise FrontendError(
                        f"{name} and {other} overlap in memory but are not the same tensor; a step would update one "
                        "behind the other's back. Make them separate parameters, or one with views taken in forward."
                    )
            spans[key[1]].append((begin, end, name))
    return {name: tuple(names) for name, names in found.items()}


def _identity(tensor: Any) -> tuple[Any, ...]:
    from torch._subclasses.fake_tensor import FakeTensor

    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel():
        return ("object", id(tensor))
    storage = tensor.untyped_storage().data_ptr()
    return ("memory", storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _sources(
    traced: Any, inputs: Any, aliases: Mapping[str, tuple[str, ...]], module: Any, precision: Precision | None
) -> tuple[dict[str, Source], dict[str, Any]]:
    """What every placeholder of the traced program is, and values of those that are constants."""
    from torch.export.graph_signature import InputKind

    from sbp.frontend.exporting import WRAPPED
    from sbp.frontend.program import Source

    tensors = dict(_named_state(module))
    first = {name: key for key, names in aliases.items() for name in names}
    names = iter(inputs.names)
    examples = dict(zip(inputs.names, inputs.tensors))
    sources: dict[str, Source] = {}
    known: dict[str, Any] = {}
    for spec in traced.graph_signature.input_specs:
        label = spec.arg.name
        if spec.kind is InputKind.USER_INPUT:
            if type(spec.arg).__name__ != "TensorArgument":
                continue
            key = next(names)
            example = examples[key]
            sources[label] = Source(key, "input", _initial(example), _kept(example, precision, key))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            path = spec.target.removeprefix(f"{WRAPPED}.")
            if path not in tensors:  # the loss's own
                own = traced.state_dict[spec.target]
                trained = spec.kind is InputKind.PARAMETER and own.requires_grad
                sources[label] = Source(path, "parameter" if trained else "buffer")
                continue
            tensor = tensors[path]
            trained = spec.kind is InputKind.PARAMETER and tensor.requires_grad
            sources[label] = Source(
                first[path],
                "parameter" if trained else "buffer",
                Initial("normal", (0.0, 0.02)) if trained else _initial(tensor),
                _stored(tensor, precision) if spec.kind is InputKind.PARAMETER else None,
            )
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            value = traced.constants[spec.target]
            known[label] = value
        elif spec.kind is InputKind.TOKEN:  # the order of effects, of which translated operators have none
            continue
        else:
            raise FrontendError(f"{spec.target or label}: inputs of kind {spec.kind.name} cannot be imported.")
    return sources, known


def _stored(tensor: Any, precision: Precision | None) -> str | None:
    return precision.storage if precision is not None and tensor.is_floating_point() else None


def _kept(example: Any, precision: Precision | None, name: str) -> str | None:
    """Inputs are fed in the type of their examples."""
    return dtype_named(example.dtype) if precision is not None and example.is_floating_point() else None


def _initial(tensor: Any) -> Initial | None:
    """How example values like these are drawn: a constant, integers in their range, or normal numbers."""
    from torch._subclasses.fake_tensor import FakeTensor

    from sbp.frontend.program import Sizes

    kind = Sizes({}).type(tensor).dtype
    if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel() or tensor.numel() > 1 << 24:
        return None if is_floating(kind) else Initial("integers", (0, 2))
    flat = tensor.detach().reshape(-1)
    low, high = flat.min().item(), flat.max().item()
    if low == high and (is_floating(kind) or low == 1 or kind == "bool"):
        return Initial("constant", (low,))
    if is_floating(kind):
        return Initial("normal", (float(flat.float().mean()), float(flat.float().std())))
    return Initial("integers", (max(int(low), 0), max(int(high), 0) + 1))


def _outputs(traced: Any, training: bool, sources: Mapping[str, Source]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Name -> node of the outputs, and placeholder -> node of the buffers' next values."""
    import torch
    from torch.export.graph_signature import OutputKind
    from torch.utils import _pytree as pytree

    from sbp.frontend.exporting import WRAPPED

    signature = traced.graph_signature
    (last,) = (node for node in traced.graph.nodes if node.op == "output")
    made = list(last.args[0])
    placeholder = {target: label for label, target in signature.inputs_to_buffers.items()}
    updates: dict[str, Any] = {}
    given: list[Any] = []
    for spec, node in zip(signature.output_specs, made):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            updates[placeholder[spec.target]] = node
        elif spec.kind is OutputKind.USER_OUTPUT:
            given.append(node)
        elif spec.kind is OutputKind.TOKEN:
            continue
        else:
            name = sources[spec.target].name if spec.target in sources else spec.target
            what = "input" if spec.kind is OutputKind.USER_INPUT_MUTATION else "parameter"
            name = name.removeprefix(f"{WRAPPED}.")
            raise FrontendError(f"the module changes its {what} {name} in place; let it change a copy (x.clone()).")
    if training:
        return {"loss": given[0]}, updates
    tree = pytree.tree_unflatten(given, traced.call_spec.out_spec)
    outputs = {key: node for key, node in tree.items() if isinstance(node, torch.fx.Node)}
    if not outputs:
        raise FrontendError("the module returns no tensor.")
    return outputs, updates


# -- the batch dimension -----------------------------------------------------------------------------------------------


def _dynamic(inputs: Any, dynamic_batch: bool | Mapping[str, int], batch: int | None) -> dict[str, int]:
    """Input name -> its batch dimension."""
    if not dynamic_batch:
        if batch is not None and batch not in {tensor.shape[0] for tensor in inputs.tensors if tensor.ndim}:
            raise FrontendError(
                f"batch is {batch}, the example inputs have other sizes; give example inputs of that batch (on the "
                "meta device they take no memory), or dynamic_batch=True."
            )
        return {}
    if isinstance(dynamic_batch, Mapping):
        unknown = set(dynamic_batch) - set(inputs.names)
        if unknown:
            raise FrontendError(
                f"dynamic_batch names {', '.join(sorted(unknown))}; the inputs are {', '.join(inputs.names)}."
            )
        chosen = dict(dynamic_batch)
    else:
        chosen = {name: 0 for name, tensor in zip(inputs.names, inputs.tensors) if tensor.ndim}
    tensors = dict(zip(inputs.names, inputs.tensors))
    for name, axis in chosen.items():
        rank = tensors[name].ndim
        if not isinstance(axis, int) or not 0 <= axis < rank:
            raise FrontendError(f"dynamic_batch: dimension {axis!r} of {name}; it has the dimensions 0 to {rank - 1}.")
    if batch is not None and batch < 1:
        raise FrontendError(f"batch is a positive number of samples, got {batch}.")
    sizes = {name: tensors[name].shape[axis] for name, axis in chosen.items()}
    if len(set(sizes.values())) != 1:
        raise FrontendError(f"the inputs' batch dimensions differ ({sizes}); name them: dynamic_batch={{input: axis}}.")
    if set(sizes.values()) == {1}:
        raise FrontendError("a batch of 1 is fixed by torch.export; give example inputs of at least 2 samples.")
    return chosen


def _symbols(traced: Any, inputs: Any, dynamic: Mapping[str, int], batch: int | None) -> dict[Any, int]:
    """The symbols of the traced program's sizes -> numbers."""
    import torch

    if not dynamic:
        return {}
    tensors = dict(zip(inputs.names, inputs.tensors))
    size = batch or next(tensors[name].shape[axis] for name, axis in dynamic.items())
    found: dict[Any, int] = {}
    names = iter(inputs.names)
    for node in traced.graph.nodes:
        if node.op != "placeholder" or node.name not in traced.graph_signature.user_inputs:
            continue
        made = node.meta.get("val")
        if not isinstance(made, torch.Tensor):
            continue
        axis = dynamic.get(next(names))
        extent: Any = made.shape[axis] if axis is not None else None
        if isinstance(extent, torch.SymInt):
            found.update((symbol, size) for symbol in extent.node.expr.free_symbols)
    return found


def _array(name: str, tensor: Any) -> numpy.ndarray:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    if tensor.is_meta or isinstance(tensor, FakeTensor):
        raise FrontendError(f"{name} holds no values (it is on the meta device); draw them with sbp.initial.draw_all.")
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
