"""A module's parameters and buffers, and their way to DTensors and back, for one process of a device mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sbp.comm.torch_distributed import TorchCommunicator
from sbp.cuda.torch_types import torch_dtype
from sbp.graph import Value
from sbp.layout import Layout, Split
from sbp.layout import Partial as PartialSum
from sbp.mesh import Mesh
from sbp.runtime.torch_program import ExportError


def placements(layout: Layout) -> tuple[Any, ...]:
    """DTensor's placements of a layout: one per mesh axis, nested splits left to right as there."""
    return tuple(
        Shard(sbp.axis)
        if isinstance(sbp, Split)
        else Partial(sbp.reduce)
        if isinstance(sbp, PartialSum)
        else Replicate()
        for sbp in layout
    )


@dataclass(frozen=True)
class Places:
    """One parameter or buffer: the tensor, and every (part, label) under which it is registered (tied ones several)."""

    tensor: Any
    owners: tuple[tuple[Any, str], ...]

    def put(self, tensor: Any) -> None:
        """Register another tensor everywhere."""
        for owner, label in self.owners:
            (owner._parameters if label in owner._parameters else owner._buffers)[label] = tensor


def places_of(module: Any) -> dict[str, Places]:
    """Every name of every parameter and buffer of a module; tied ones have the same places."""
    owners: dict[Any, dict[tuple[int, str], tuple[Any, str]]] = {}
    names: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for label, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                owners.setdefault(identity(tensor), {})[id(part), label] = (part, label)
                names[f"{path}.{label}" if path else label] = tensor
    return {name: Places(tensor, tuple(owners[identity(tensor)].values())) for name, tensor in names.items()}


def identity(tensor: Any) -> Any:
    """Equal for tensors that are the same memory seen in the same way, as tied weights are."""
    if tensor.is_meta or not tensor.numel() or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_like(value: Value, tensor: Any) -> None:
    """Raise `ExportError` unless the tensor is of the value's shape and element type."""
    if tuple(tensor.shape) != value.shape:
        raise ExportError(f"{value.name}: the plan has {value.type}, the module's is of shape {list(tensor.shape)}.")
    if tensor.dtype != torch_dtype(value.dtype):
        raise ExportError(
            f"{value.name}: the plan has {value.type}, the module's is {tensor.dtype}; convert the module "
            f"(module.to({torch_dtype(value.dtype)})) or plan with another precision."
        )


class Distributor:
    """Cuts global tensors into this process' shards, and puts shards together as DTensors."""

    def __init__(self, mesh: Mesh, device_mesh: Any, device: Any, communicator: TorchCommunicator) -> None:
        self.mesh, self.device_mesh, self.device = mesh, device_mesh, device
        self._communicator = communicator
        self._rank = communicator.ranks[0]
        self._place = mesh.coordinate(self._rank)

    def local_shape(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """The shape of this process' shard."""
        return layout.shard(shape, self.mesh.shape, self._place).shape

    def cut(self, whole: Any, layout: Layout) -> Any:
        """This process' shard of a global tensor, in memory of its own."""
        shard = layout.shard(tuple(whole.shape), self.mesh.shape, self._place)
        return whole[shard.slices].clone(memory_format=torch.contiguous_format)

    def first_ranks(self, tensor: Any) -> Any:
        """The first rank's values, on the device."""
        groups = (tuple(range(self.mesh.size)),)
        return self._communicator.broadcast({self._rank: tensor.detach().to(self.device)}, groups, 0)[self._rank]

    def placed(self, tensor: Any, layout: Layout) -> Any:
        """This process' shard of what the first rank holds; of a tensor on the meta device an empty one."""
        if tensor.is_meta:
            shape = self.local_shape(tuple(tensor.shape), layout)
            return torch.empty(shape, dtype=tensor.dtype, device=self.device)
        return self.cut(self.first_ranks(tensor), layout)

    def dtensor(self, local: Any, shape: tuple[int, ...], layout: Layout) -> Any:
        """The DTensor of which this process holds `local`."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.device_mesh, placements(layout), run_check=False, shape=torch.Size(shape), stride=stride
        )

    def fed(self, value: Value, layout: Layout, tensor: Any) -> Any:
        """This process' part of an input: of a global tensor, of a DTensor, or of its shard itself.

        Raises
        ------
        ExportError
            Anything else, or a tensor that asks for its gradient.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ExportError(f"input {value.name!r} is a {type(tensor).__name__}; give a tensor of {value.type}.")
        if tensor.requires_grad:
            raise ExportError(f"input {value.name!r} asks for a gradient, which the plan does not compute; detach it.")
        kind = value.type
        if isinstance(tensor, DTensor):
            if tuple(tensor.shape) != kind.shape:
                raise ExportError(f"input {value.name!r} is planned as {kind}, got a DTensor of {list(tensor.shape)}.")
            tensor = tensor.redistribute(self.device_mesh, placements(layout)).to_local()
        else:
            shard = layout.shard(kind.shape, self.mesh.shape, self._place)
            if tuple(tensor.shape) == kind.shape:
                tensor = tensor[shard.slices]
            elif tuple(tensor.shape) != shard.shape:
                raise ExportError(
                    f"input {value.name!r} is planned as {kind} in {layout}, got a tensor of shape "
                    f"{list(tensor.shape)}; give the global tensor {list(kind.shape)}, or this process' shard "
                    f"{list(shard.shape)}."
                )
        return tensor.to(self.device, torch_dtype(kind.dtype))


def feeds_of(names: tuple[str, ...], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs by name, from positional and named arguments.

    Raises
    ------
    ExportError
        Some are missing, unknown, or given twice.
    """
    feeds = dict(zip(names, arguments))
    wrong = {
        "too many positional arguments": [str(len(arguments))] if len(arguments) > len(names) else [],
        "given twice": [name for name in named if name in feeds],
        "unknown": [name for name in named if name not in names],
        "missing": [name for name in names if name not in feeds and name not in named],
    }
    found = [f"{', '.join(which)} {what}" for what, which in wrong.items() if which]
    if found:
        raise ExportError(f"the plan's inputs are {', '.join(names)}; {'; '.join(found)}.")
    return {**feeds, **named}
