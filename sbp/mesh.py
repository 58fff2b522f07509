"""A mesh: ranks arranged in an n-dimensional, named grid, row-major."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from sbp.errors import MeshError

DEFAULT_NAMES = ("x", "y", "z", "u", "v", "w")


@dataclass(frozen=True, slots=True)
class Mesh:
    """`Mesh((16, 8), ("dp", "tp"))`: 128 ranks, rank = 8 * dp + tp. Names default to x, y, z, ...

    Raises
    ------
    MeshError
        A size below 1, a repeated name, or not one name per axis.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (self.shape,)
        if not shape or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in shape):
            raise MeshError(f"A mesh needs at least one axis of whole size 1 or more, got {list(shape)}.")
        names = (self.names,) if isinstance(self.names, str) else tuple(self.names) or _default_names(len(shape))
        if len(names) != len(shape) or len(set(names)) != len(names):
            raise MeshError(
                f"A mesh of shape {list(shape)} needs {len(shape)} different axis names, got {list(names)}."
            )
        if not all(isinstance(name, str) and name.strip() for name in names):
            raise MeshError(f"The axes of a mesh have names that are texts and not empty, got {list(names)}.")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "names", names)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """A mesh from `"2,8"` or `"dp=2,tp=8"`."""
        sizes, names = [], []
        for piece in text.split(","):
            name, equals, size = piece.rpartition("=")
            if not size.strip().isdecimal() or (equals and not name.strip()):
                raise MeshError(f"{text!r} is not a mesh; write sizes such as 2,8 or named ones such as dp=2,tp=8.")
            sizes.append(int(size))
            if name.strip():
                names.append(name.strip())
        return cls(tuple(sizes), tuple(names))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands, one index per axis."""
        if rank not in range(self.size):
            raise MeshError(f"{self} has the ranks 0 to {self.size - 1}, got {rank}.")
        return _coordinates(self.shape)[rank]

    def rank(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        if len(coordinate) != len(self.shape) or any(not 0 <= at < size for at, size in zip(coordinate, self.shape)):
            raise MeshError(
                f"{list(coordinate)} is no place of {self}; give one index per axis, each below its size."
            )
        found = 0
        for index, size in zip(coordinate, self.shape):
            found = found * size + index
        return found

    def stride(self, axis: int) -> int:
        """The distance in ranks between neighbours along an axis."""
        return math.prod(self.shape[axis + 1 :])

    def groups(self, axis: int) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axis`, each in order of that axis."""
        return _groups(self.shape, axis)

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Every coordinate, in rank order."""
        return iter(_coordinates(self.shape))

    def __getitem__(self, names: str | tuple[str, ...]) -> Mesh:
        """The mesh of some of the axes, named in this mesh's order: `mesh["dp", "tp"]`."""
        axes = self._axes(names)
        return Mesh(tuple(self.shape[axis] for axis in axes), tuple(self.names[axis] for axis in axes))

    def ranks(self, names: str | tuple[str, ...], **at: int) -> tuple[int, ...]:
        """This mesh's ranks that make up `mesh[names]`, in its order; the other axes stand at 0, or as `at` says."""
        axes = self._axes(names)
        unknown = [name for name in at if name not in self.names or self.names.index(name) in axes]
        if unknown:
            raise MeshError(f"{self}: {', '.join(unknown)} is no axis beside {', '.join(self[names].names)}.")
        place = [at.get(name, 0) for name in self.names]
        found = []
        for inner in self[names].coordinates():
            for axis, index in zip(axes, inner):
                place[axis] = index
            found.append(self.rank(place))
        return tuple(found)

    def _axes(self, names: str | tuple[str, ...]) -> tuple[int, ...]:
        wanted = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, (tuple, list)) else ()
        axes = tuple(self.names.index(name) for name in wanted if name in self.names)
        if not wanted or len(axes) != len(wanted) or list(axes) != sorted(set(axes)):
            raise MeshError(
                f"{names!r} does not name axes of {self}; name some of {', '.join(map(repr, self.names))}, each once "
                "and in this order."
            )
        return axes

    def __str__(self) -> str:
        return "mesh(" + ", ".join(f"{name}={size}" for name, size in zip(self.names, self.shape)) + ")"


def _default_names(count: int) -> tuple[str, ...]:
    return DEFAULT_NAMES[:count] if count <= len(DEFAULT_NAMES) else tuple(f"axis{index}" for index in range(count))


@lru_cache(maxsize=256)
def _coordinates(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(product(*map(range, shape)))


@lru_cache(maxsize=256)
def _groups(shape: tuple[int, ...], axis: int) -> tuple[tuple[int, ...], ...]:
    stride, size = math.prod(shape[axis + 1 :]), shape[axis]
    starts = (outer * stride * size + inner for outer in range(math.prod(shape[:axis])) for inner in range(stride))
    return tuple(tuple(start + step * stride for step in range(size)) for start in starts)
