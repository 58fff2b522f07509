"""Global tensors: arrays in global shapes that lie on the ranks of a mesh, and operators applied to them at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy

from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.interface import Communicator
from sbp.cuda.interface import Array, Backend
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.dtype import dtype_named, is_floating
from sbp.errors import GraphError, LayoutError, MeshError
from sbp.layout import Layout, Shard, broadcast_layout
from sbp.mesh import Mesh
from sbp.operator import Operator, TensorType
from sbp.ops.methods import TensorMethods
from sbp.planner.physical import Register
from sbp.runtime import placement
from sbp.runtime.boxing import Local
from sbp.runtime.eager import (
    Attributes,
    BoxingRecord,
    Operand,
    Ranks,
    check_layout,
    current_ranks,
    layout_program,
    operator_program,
)
from sbp.shards import gather, global_shape

MeshLike = Mesh | int | str | tuple[int, ...]
LayoutLike = Any


class GlobalTensor(TensorMethods):
    """A tensor of the whole mesh: global shape, element type, layout, and the shards of the ranks in this process.

    Every operator takes global tensors: it picks the cheapest of its signatures for the layouts at hand, boxes inputs
    where that signature wants them otherwise, and runs on every rank's shards. Which steps that took is in `history`,
    in the log of `sbp.explain_boxing()`, and in Python's logger "sbp.boxing". Numbers and NumPy arrays beside global
    tensors are held by all ranks. A tensor is a value and is never written into; `updated` gives a changed one.

    Made by `sbp.from_numpy`, `sbp.randn` and their like, and `sbp.from_local`.

    Attributes
    ----------
    type, layout, mesh
        What it is and where it lies.
    history
        The boxing steps of the operation that made it.
    """

    __slots__ = ("_local", "_ranks", "history", "layout", "mesh", "type")

    def __init__(
        self,
        type: TensorType,
        layout: Layout,
        mesh: Mesh,
        local: Local,
        ranks: Ranks,
        history: tuple[BoxingRecord, ...] = (),
    ) -> None:
        self.type = type
        self.layout = layout
        self.mesh = mesh
        self.history = history
        self._local = local
        self._ranks = ranks

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.type.shape

    @property
    def dtype(self) -> str:
        """Element type."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return self.type.elements

    def __str__(self) -> str:
        return f"{self.type} {self.layout} on {self.mesh}"

    def __repr__(self) -> str:
        return f"<GlobalTensor {self}>"

    # -- in and out --------------------------------------------------------------------------------------------------

    def shard(self, rank: int) -> Shard:
        """The box of the global tensor that a rank holds."""
        return self.layout.shard(self.shape, self.mesh.shape, self.mesh.coordinate(rank))

    def to_local(self, rank: int) -> numpy.ndarray:
        """A copy of what a rank holds, on the host: its shard, or its part of a Partial tensor.

        Raises
        ------
        MeshError
            The mesh has no such rank, or it lives in another process.
        """
        self.mesh.coordinate(rank)
        if rank not in self._local:
            here = ", ".join(map(str, sorted(self._local)))
            raise MeshError(f"{self}: rank {rank} lives in another process; this one holds the shards of {here}.")
        backend, _ = places(self._ranks, self.mesh)
        return numpy.array(backend.to_host(self._local[rank]))

    def to_layout(self, layout: LayoutLike) -> GlobalTensor:
        """The same tensor in another layout, by the cheapest boxing.

        Raises
        ------
        LayoutError
            The layout does not fit the tensor or the mesh.
        """
        target = Layout.parse(layout)
        check_layout(target, self.type, self.mesh, "to_layout of")
        if target == self.layout:
            return self
        program = layout_program(Operand(self.type, self.layout), target, self.mesh, self._ranks)
        return GlobalTensor(self.type, target, self.mesh, program.run([self._local])[0], self._ranks, program.records)

    def numpy(self) -> numpy.ndarray:
        """The global array, on the host; Partial parts are reduced. With several processes, all of them must call it.

        Raises
        ------
        LayoutError, PlanError
            Ranks that should hold the same numbers do not.
        """
        backend, communicator = places(self._ranks, self.mesh)
        register = Register(0, f"tensor {self.type}", self.type, self.layout, "activation", self.type.bytes)
        return numpy.array(placement.collect(self._local, register, self.mesh, backend, communicator))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype)

    def item(self) -> Any:
        """The only element as a Python number."""
        if self.size != 1:
            raise GraphError(f"{self} has {self.size} elements; item() needs exactly one.")
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    # -- operators ---------------------------------------------------------------------------------------------------

    def __sbp_apply__(self, op: Operator, inputs: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        tensors = [
            item if isinstance(item, GlobalTensor) else self._beside(item, op, at) for at, item in enumerate(inputs)
        ]
        for at, item in enumerate(tensors):
            if item.mesh != self.mesh or item._ranks != self._ranks:
                raise MeshError(
                    f"operator {op.name}: input {at} is {item}, another one {self}; operands lie on one mesh, "
                    "on the same communicator. Take one over with sbp.from_numpy(x.numpy(), layout, mesh)."
                )
        return apply(op, tensors, attributes, self.mesh, self._ranks)

    def _beside(self, item: Any, op: Operator, at: int) -> GlobalTensor:
        """A number or array beside global tensors; numbers take the tensor's element type where it can hold them."""
        if hasattr(item, "__sbp_apply__"):
            raise GraphError(
                f"operator {op.name}: input {at} is {item!r}, another one the global tensor {self}; "
                "a program that is being traced takes symbols only, an eager one global tensors only."
            )
        array = numpy.asarray(item)
        if array.dtype.kind not in "fiub":
            raise GraphError(f"operator {op.name}: input {at} is {item!r}; give a global tensor, an array or a number.")
        kind = dtype_named(array.dtype.name)
        if not isinstance(item, (numpy.ndarray, numpy.generic)) and kind != "bool":
            holds = is_floating(self.dtype) or (array.dtype.kind in "iu" and self.dtype != "bool")
            kind = self.dtype if holds else "f32" if array.dtype.kind == "f" else "i64"
        return _place(array, TensorType(array.shape, kind), broadcast_layout(self.mesh.ndim), self.mesh, self._ranks)


def apply(
    op: Operator,
    tensors: Sequence[GlobalTensor],
    attributes: Mapping[str, Any],
    mesh: Mesh,
    ranks: Ranks,
    wanted: tuple[Layout, ...] | None = None,
) -> Any:
    """An operator applied to global tensors of one mesh; a tuple for operators with several outputs."""
    numbers: dict[int, int] = {}
    places = tuple(numbers.setdefault(id(tensor), len(numbers)) for tensor in tensors)
    different = [tensors[places.index(number)] for number in range(len(numbers))]
    operands = tuple(Operand(tensor.type, tensor.layout) for tensor in different)
    program = operator_program(op, operands, places, Attributes.of(attributes), mesh, ranks, wanted)
    arrays = program.run([tensor._local for tensor in different])
    made = tuple(
        GlobalTensor(operand.type, operand.layout, mesh, local, ranks, program.records)
        for operand, local in zip(program.outputs, arrays)
    )
    return made if op.several else made[0]


def as_mesh(mesh: MeshLike) -> Mesh:
    """A mesh from itself, a number of ranks, a shape or a text such as `"dp=2,tp=4"`."""
    return mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh) if isinstance(mesh, str) else Mesh(mesh)  # type: ignore[arg-type]


def as_layout(layout: LayoutLike, mesh: Mesh) -> Layout:
    """A layout from anything `Layout.parse` reads; None is the whole tensor on every rank."""
    return broadcast_layout(mesh.ndim) if layout is None else Layout.parse(layout)


def from_numpy(array: Any, layout: LayoutLike = None, mesh: MeshLike = 1, dtype: str | None = None) -> GlobalTensor:
    """A global array laid out over a mesh.

    Parameters
    ----------
    array
        The whole tensor, or anything NumPy makes an array of. With several processes, the same in each.
    layout
        Default: the whole tensor on every rank. Of a Partial tensor the first rank holds all, the others the
        reduction's identity.
    mesh
        `Mesh`, number of ranks, shape, or text such as `"dp=2,tp=4"`.
    dtype
        Default the array's own.

    Raises
    ------
    LayoutError
        The layout does not fit.
    """
    array, grid = _array(array, "from_numpy"), as_mesh(mesh)
    type = TensorType(array.shape, dtype_named(array.dtype.name if dtype is None else dtype))
    chosen = as_layout(layout, grid)
    check_layout(chosen, type, grid, "from_numpy of")
    return _place(array, type, chosen, grid, current_ranks())


def from_local(
    arrays: Sequence[Any] | Mapping[int, Any],
    layout: LayoutLike,
    mesh: MeshLike,
    shape: int | Iterable[int] | None = None,
    check_replicas: bool = True,
) -> GlobalTensor:
    """A global tensor from what every rank holds.

    Parameters
    ----------
    arrays
        One array per rank, in rank order; or rank -> array for the ranks of this process.
    layout, mesh
        What the arrays are pieces of. Uneven splits follow torch.chunk: equal pieces, the last ones smaller or empty.
    shape
        Global shape; default what the pieces add up to (all ranks must then be in this process).
    check_replicas
        Compare ranks that should hold the same numbers (only where all ranks are in this process).

    Raises
    ------
    LayoutError
        A piece has another shape than the layout gives its rank, or replicas differ; the message names rank, the shape
        it has and the one expected.
    """
    grid, ranks = as_mesh(mesh), current_ranks()
    backend, communicator = places(ranks, grid)
    if not isinstance(arrays, Iterable):
        raise LayoutError(f"from_local on {grid}: got {arrays!r}; give a list of one array per rank.")
    given = dict(arrays) if isinstance(arrays, Mapping) else dict(enumerate(arrays))
    if set(given) != set(communicator.ranks):
        raise LayoutError(
            f"from_local on {grid}: got arrays for the ranks {sorted(given)}, but this process holds "
            f"{list(communicator.ranks)}; give one array for each."
        )
    local = {rank: _array(given[rank], f"from_local: rank {rank}") for rank in sorted(given)}
    kinds = {array.dtype for array in local.values()}
    if len(kinds) > 1:
        raise LayoutError(f"from_local: the pieces have the types {', '.join(sorted(map(str, kinds)))}; give one type.")
    chosen = as_layout(layout, grid)
    if shape is None:
        if len(local) != grid.size:
            raise LayoutError("from_local: with ranks in several processes the global shape must be given.")
        whole = global_shape([array.shape for array in local.values()], chosen, grid, "from_local")
    else:
        whole = (shape,) if isinstance(shape, int) else tuple(shape)
    type = TensorType(whole, dtype_named(next(iter(local.values())).dtype.name))
    check_layout(chosen, type, grid, "from_local of")
    for rank, array in local.items():
        expected = chosen.shard(whole, grid.shape, grid.coordinate(rank)).shape
        if array.shape != expected:
            raise LayoutError(
                f"from_local of {type} {chosen} on {grid}: rank {rank} at {grid.coordinate(rank)} was given shape "
                f"{list(array.shape)}, expected {list(expected)}. Uneven splits follow torch.chunk: equal pieces, the "
                "last ones smaller or empty."
            )
    if check_replicas and len(local) == grid.size:
        gather(list(local.values()), chosen, grid, whole, what="from_local")
    held = {
        rank: backend.from_host(numpy.array(array, dtype=backend.dtype(type.dtype), order="C"))
        for rank, array in local.items()
    }
    return GlobalTensor(type, chosen, grid, held, ranks)


def _array(given: Any, what: str) -> numpy.ndarray:
    try:
        return numpy.asarray(given)
    except (TypeError, ValueError) as error:
        raise GraphError(f"{what}: {type(given).__name__} cannot be made an array: {error}") from None


def _place(array: numpy.ndarray, type: TensorType, layout: Layout, mesh: Mesh, ranks: Ranks) -> GlobalTensor:
    backend, communicator = places(ranks, mesh)
    register = Register(0, "tensor", type, layout, "input", type.bytes)
    local = placement.place(array, register, mesh, backend, communicator.ranks, type.dtype)
    return GlobalTensor(type, layout, mesh, local, ranks)


def places(ranks: Ranks, mesh: Mesh) -> tuple[Backend, Communicator]:
    """The backend, and a communicator of as many ranks as the mesh has."""
    backend: Backend = NumpyBackend() if ranks.backend is None else ranks.backend
    if ranks.communicator is None:
        return backend, InProcessCommunicator(mesh.size, backend.xp)
    if ranks.communicator.size != mesh.size:
        raise MeshError(
            f"{mesh} has {mesh.size} ranks, the communicator {ranks.communicator.size}; start as many processes as the "
            "mesh has ranks."
        )
    return backend, ranks.communicator
