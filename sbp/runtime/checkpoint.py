"""Checkpoints: tensors in files by their place in the global tensor, written by some ranks and read by any others.

A checkpoint is a folder. Every rank writes the shards that it owns into a safetensors file of its own (of replicas one
rank owns each shard), whose metadata say where in the global tensors they belong. `checkpoint.json` lists all pieces
and is replaced last, in one step: whoever reads the folder finds the old checkpoint or the new one, whole, whenever a
write breaks off. File names carry a number that grows with every save, so that no file of a finished checkpoint is
written to again; those that no index names any more are removed after the index was replaced.

Reading needs neither the mesh nor the layouts of the writer: a shard is put together from the pieces that overlap it,
and only those parts of the files are read. Pieces that are read whole are compared with their checksum.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.dtype import dtype_named, is_floating, numpy_name
from sbp.errors import SbpError
from sbp.fields import Field
from sbp.json_file import read_json_file
from sbp.layout import Broadcast, Layout, Partial, Shard
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.runtime.boxing import Local
from sbp.runtime.placement import place_shards

Made = TypeVar("Made")

SCHEMA = 1
INDEX = "checkpoint.json"
_DATA_FILE = re.compile(r"(\d{6,})-rank\d{5,}\.safetensors(\.part)?")


class CheckpointError(SbpError):
    """A checkpoint that cannot be written or read, or that is of something else."""


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor as it lies on the ranks of a mesh: the arrays of those in this process."""

    type: TensorType
    layout: Layout
    local: Local


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor, in one of the checkpoint's files under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint: its pieces cover it, each element once."""

    type: TensorType
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Checkpoint:
    """An index that was read; arrays are read when they are asked for.

    Attributes
    ----------
    path
        The folder.
    tensors
        Name -> type and pieces.
    facts
        What the writer said besides, such as the number of training steps done.
    """

    path: Path
    tensors: Mapping[str, Stored]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The number of training steps done when it was saved; 0 where it was not saved by a training run."""
        steps = self.facts.get("steps", 0)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise CheckpointError(f"{self.path / INDEX}: steps must be a whole number of at least 0, got {steps!r}.")
        return steps

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self.tensors)} tensors>"

    def read(self, name: str, shard: Shard | None = None) -> numpy.ndarray:
        """The box of a tensor that `shard` names, or all of it.

        Raises
        ------
        CheckpointError
            There is no such tensor, or a file is missing or damaged.
        """
        stored = self._stored(name)
        shape = stored.type.shape
        box = Shard(shape, (0,) * len(shape), shape) if shard is None else shard
        if box.global_shape != shape:
            raise CheckpointError(f"{self.path}: {name} is {stored.type}, not of shape {list(box.global_shape)}.")
        found: numpy.ndarray | None = None
        for piece in stored.pieces:
            begin = tuple(map(max, piece.offset, box.offset))
            end = tuple(
                min(a + b, c + d) for a, b, c, d in zip(piece.offset, piece.shape, box.offset, box.shape, strict=True)
            )
            if any(first >= last for first, last in zip(begin, end)):
                continue
            part = self._part(name, piece, tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, piece.offset)))
            if found is None:
                found = numpy.empty(box.shape, part.dtype)
            elif found.dtype != part.dtype:
                raise CheckpointError(
                    f"{self.path / piece.file}: holds {name} as {part.dtype}, another file as {found.dtype}; the files "
                    "are not of one checkpoint."
                )
            found[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, box.offset))] = part
        return numpy.empty(box.shape, numpy_name(stored.type.dtype)) if found is None else found

    def arrays(self) -> dict[str, numpy.ndarray]:
        """All tensors, whole."""
        return {name: self.read(name) for name in self.tensors}

    def place(
        self,
        name: str,
        type: TensorType,
        layout: Layout,
        mesh: Mesh,
        backend: Backend,
        ranks: Iterable[int],
        dtype: str | None = None,
    ) -> Local:
        """The shards of a tensor that some ranks hold under a layout; `dtype` replaces the type's element type.

        Raises
        ------
        CheckpointError
            The checkpoint has no such tensor, or one of another shape or kind of number.
        """
        self.check_type(name, type)
        return place_shards(
            lambda shard: self.read(name, shard), type, layout, mesh, backend, tuple(ranks), dtype or type.dtype
        )

    def check_type(self, name: str, type: TensorType) -> None:
        """Raise `CheckpointError` unless the tensor has this shape and kind of number; floating types are one kind."""
        stored = self._stored(name).type
        same = stored.dtype == type.dtype or (is_floating(stored.dtype) and is_floating(type.dtype))
        if stored.shape != type.shape or not same:
            raise CheckpointError(
                f"{name} is {type} here, but {stored} in the checkpoint {self.path}; it is of another model, or of one "
                "of other sizes."
            )

    def _stored(self, name: str) -> Stored:
        if name not in self.tensors:
            raise CheckpointError(f"the checkpoint {self.path} has no tensor {name!r}.")
        return self.tensors[name]

    def _part(self, name: str, piece: Piece, slices: tuple[slice, ...]) -> numpy.ndarray:
        from safetensors import SafetensorError, safe_open

        path = self.path / piece.file
        whole = all(part.stop - part.start == size for part, size in zip(slices, piece.shape, strict=True))
        try:
            with safe_open(path, framework="numpy") as file:
                said = _places((file.metadata() or {}).get("sbp", "{}")).get(name, {})
                kept = file.get_slice(name)
                shape = tuple(kept.get_shape())
                part = file.get_tensor(name) if whole or not shape else kept[slices]
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read {name} of the checkpoint ({_short(error)}).") from None
        kind, made = self._stored(name).type.dtype, dtype_named(part.dtype.name)
        # A run in float64 keeps its numbers as they are; the index has the graph's own types.
        same = part.dtype == numpy_name(kind) or (is_floating(kind) and is_floating(made))
        wanted = {"shape": list(piece.shape), "offset": list(piece.offset), "type": kind}
        found = {"shape": list(shape), "offset": said.get("offset", wanted["offset"]), "type": kind if same else made}
        for fact, value in wanted.items():
            if found[fact] != value:
                raise CheckpointError(
                    f"{path}: holds {name} of {fact} {found[fact]}, but {INDEX} says {value}; the files are not of one "
                    "checkpoint, or their names were exchanged."
                )
        if whole and said.get("crc32", _checksum(part)) != _checksum(part):
            raise CheckpointError(
                f"{path}: the numbers of {name} are not those that were written; the file is damaged."
            )
        return part


@lru_cache(maxsize=8)
def _places(text: str) -> dict[str, Any]:
    """What a file says about its arrays: where they belong, and the checksum of their bytes."""
    return json.loads(text)


def _checksum(array: numpy.ndarray) -> int:
    return zlib.crc32(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8).data)


# -- reading -----------------------------------------------------------------------------------------------------------


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint's index.

    Raises
    ------
    CheckpointError
        There is none, it is damaged or of another schema, or its pieces do not make up its tensors.
    """
    folder = Path(path)
    if not str(path) or not (folder / INDEX).is_file():
        raise CheckpointError(f"there is no checkpoint in {str(path)!r}: a folder with a {INDEX} is one.")
    data = read_json_file(folder / INDEX, "checkpoint", "a training run with a place to save", CheckpointError)
    file = Field(data, str(folder / INDEX), CheckpointError)
    if file.get("format", None).value != "sbp-checkpoint" or file.get("schema", None).value != SCHEMA:
        raise CheckpointError(f"{folder / INDEX}: is not a checkpoint of schema {SCHEMA}, which this version reads.")
    tensors = {}
    for name, item in file["tensors"].mapping().items():
        kind = TensorType(_wholes(item["shape"]), item["dtype"].text())
        pieces = tuple(
            Piece(piece["file"].text(), _wholes(piece["offset"]), _wholes(piece["shape"]))
            for piece in item["pieces"].list()
        )
        _check_cover(folder, name, kind, pieces)
        tensors[name] = Stored(kind, pieces)
    return Checkpoint(folder, tensors, {name: item.value for name, item in file["facts"].mapping().items()})


def _wholes(item: Field) -> tuple[int, ...]:
    return tuple(size.whole(least=0) for size in item.list())


def _check_cover(folder: Path, name: str, kind: TensorType, pieces: tuple[Piece, ...]) -> None:
    """Raise unless the pieces lie in the tensor, do not overlap, and have as many elements as it has."""
    rank, shape = len(kind.shape), numpy.array(kind.shape, dtype=int)
    good = all(len(piece.offset) == len(piece.shape) == rank for piece in pieces)
    if good and rank:
        low = numpy.array([piece.offset for piece in pieces], dtype=int).reshape(-1, rank)
        high = low + numpy.array([piece.shape for piece in pieces], dtype=int).reshape(-1, rank)
        overlap = ((low[:, None] < high[None]) & (low[None] < high[:, None])).all(axis=-1)
        good = bool((high <= shape).all()) and overlap.sum() == len(pieces)
    if not good or sum(math.prod(piece.shape) for piece in pieces) != kind.elements:
        raise CheckpointError(
            f"{folder / INDEX}: the pieces of {name} do not make up {kind}, each element once; the index is damaged."
        )


# -- writing -----------------------------------------------------------------------------------------------------------


def write_checkpoint(
    path: str | Path,
    tensors: Mapping[str, Held],
    mesh: Mesh,
    backend: Backend,
    communicator: Communicator,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write tensors that lie on a mesh; every process calls it, with a folder that all of them reach.

    An older checkpoint in the folder stays as it is until the new one is complete, and is then removed.

    Raises
    ------
    CheckpointError
        On all processes, if one of them could not write.
    """
    folder = Path(path)
    if not str(path):
        raise CheckpointError("the path of the checkpoint to write is empty; give the name of a folder.")
    whole = {name: _reduced(held, mesh, communicator) for name, held in tensors.items()}
    owners = owners_of({name: (held.type, held.layout) for name, held in whole.items()}, mesh)
    # All processes look for the number before any of them writes a file that would raise it.
    seen = _together(lambda: _next_generation(folder), folder, backend, communicator)
    generation = _agree(seen, "max", backend, communicator)
    _together(
        lambda: _write_ranks(folder, generation, whole, owners, backend, communicator), folder, backend, communicator
    )
    index = {
        "format": "sbp-checkpoint",
        "schema": SCHEMA,
        "facts": {} if facts is None else dict(facts),
        "tensors": {
            name: {
                "shape": list(held.type.shape),
                "dtype": held.type.dtype,
                "pieces": [
                    {"file": _file(generation, rank), "offset": list(shard.offset), "shape": list(shard.shape)}
                    for shard, rank in owners[name].items()
                ],
            }
            for name, held in whole.items()
        },
    }

    _together(
        lambda: _finish(folder, generation, index) if 0 in communicator.ranks else None, folder, backend, communicator
    )


def owners_of(tensors: Mapping[str, tuple[TensorType, Layout]], mesh: Mesh) -> dict[str, dict[Shard, int]]:
    """Tensor -> shard -> the rank that writes it: of those that hold it, the one with least to write so far.

    Shards without elements are left out. The same in every process, as it follows from the layouts alone.
    """
    load = [0] * mesh.size
    owners: dict[str, dict[Shard, int]] = {}
    for name, (kind, layout) in tensors.items():
        holders: dict[Shard, list[int]] = {}
        for rank, place in enumerate(mesh.coordinates()):
            shard = layout.shard(kind.shape, mesh.shape, place)
            if math.prod(shard.shape):
                holders.setdefault(shard, []).append(rank)
        owners[name] = {}
        for shard, ranks in holders.items():
            owner = min(ranks, key=load.__getitem__)
            load[owner] += TensorType(shard.shape, kind.dtype).bytes
            owners[name][shard] = owner
    return owners


def _write_ranks(
    folder: Path,
    generation: int,
    tensors: Mapping[str, Held],
    owners: Mapping[str, Mapping[Shard, int]],
    backend: Backend,
    communicator: Communicator,
) -> None:
    """The files of this process's ranks."""
    from safetensors.numpy import save_file

    for rank in communicator.ranks:
        arrays, places = {}, {}
        for name, held in tensors.items():
            for shard, owner in owners[name].items():
                if owner == rank:
                    arrays[name] = numpy.ascontiguousarray(backend.to_host(held.local[rank])).reshape(shard.shape)
                    places[name] = {
                        "global_shape": shard.global_shape,
                        "offset": shard.offset,
                        "crc32": _checksum(arrays[name]),
                    }
        if not arrays:
            continue
        path = folder / _file(generation, rank)
        part = path.with_name(f"{path.name}.part")
        save_file(arrays, part, metadata={"sbp": json.dumps(places)})
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    _sync_folder(folder)


def _next_generation(folder: Path) -> int:
    """A number above that of every file in the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    matches = (_DATA_FILE.fullmatch(item.name) for item in folder.iterdir())
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _finish(folder: Path, generation: int, index: Mapping[str, Any]) -> None:
    """Put the index in place, then remove what older ones named."""
    part = folder / f"{INDEX}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(index, file)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / INDEX)
    _sync_folder(folder)
    for item in folder.iterdir():
        match = _DATA_FILE.fullmatch(item.name)
        if match and int(match[1]) < generation:
            with suppress(OSError):  # left for the next save; the checkpoint is complete without
                item.unlink()


def _reduced(held: Held, mesh: Mesh, communicator: Communicator) -> Held:
    """The same tensor without Partial: its parts are summed (or their maximum or minimum taken)."""
    layout, local = held.layout, held.local
    for axis, sbp in enumerate(held.layout):
        if isinstance(sbp, Partial):
            local = communicator.all_reduce(local, mesh.groups(axis), sbp.reduce)
            layout = layout.replace(axis, Broadcast())
    return Held(held.type, layout, local)


def _together(action: Callable[[], Made], folder: Path, backend: Backend, communicator: Communicator) -> Made:
    """Do something in every process and return what it made; if it fails in one, raise in all."""
    from safetensors import SafetensorError

    problem: Exception | None = None
    made: Any = None
    try:
        made = action()
    except (OSError, SafetensorError) as error:
        problem = error
    worked = _agree(0 if problem else 1, "min", backend, communicator)
    if problem is not None:
        raise CheckpointError(f"cannot write the checkpoint {folder}: {_short(problem)}.") from None
    if not worked:
        raise CheckpointError(f"the checkpoint {folder} was not written: another process failed to write its part.")
    return made


def _agree(number: int, reduce: str, backend: Backend, communicator: Communicator) -> int:
    """The smallest or largest number over all processes."""
    if len(communicator.ranks) == communicator.size:
        return number
    own = {rank: backend.xp.full((1,), number, dtype="int32") for rank in communicator.ranks}
    return int(communicator.all_reduce(own, (tuple(range(communicator.size)),), reduce)[communicator.ranks[0]][0])


def _file(generation: int, rank: int) -> str:
    return f"{generation:06d}-rank{rank:05d}.safetensors"


def _sync_folder(folder: Path) -> None:
    """Have the folder's entries on disk, where the system can do that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def some_of(names: Sequence[str], most: int = 4) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _short(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error) or type(error).__name__
