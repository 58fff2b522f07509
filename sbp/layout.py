"""Layouts: how one tensor lies on a mesh, one SBP per mesh axis, and the exact shard every rank holds.

Chunks follow `torch.chunk`: a dimension of n elements split k ways has chunks of ceil(n / k), so the last ones may be
shorter or empty. Two mesh axes that split the same dimension nest left to right: the right one chunks what the left
one left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from sbp.errors import LayoutError

REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True, slots=True)
class Split:
    """The tensor's dimension `axis` is cut into one chunk per rank of the mesh axis."""

    axis: int

    def __post_init__(self) -> None:
        if not isinstance(self.axis, int) or self.axis < 0:
            raise LayoutError(f"Split takes a dimension number of at least 0, got {self.axis!r}; count from the left.")

    def __str__(self) -> str:
        return f"S({self.axis})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every rank of the mesh axis holds the whole tensor."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank holds a tensor of the full shape; the value is their elementwise `reduce` ("sum", "max" or "min")."""

    reduce: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce not in REDUCTIONS:
            raise LayoutError(f"Partial reduces by one of {', '.join(REDUCTIONS)}, got {self.reduce!r}.")

    def __str__(self) -> str:
        return "P" if self.reduce == "sum" else f"P({self.reduce})"


SBP = Split | Broadcast | Partial

_SPELLING = re.compile(r"(?P<name>[A-Za-z]+)\s*(?:\(\s*(?P<argument>[^()]*?)\s*\))?")
_SPLIT_NAMES = {"s", "split", "shard"}
_BROADCAST_NAMES = {"b", "r", "broadcast", "replicate"}
_PARTIAL_NAMES = {"p", "partial"}


def parse_sbp(text: str) -> SBP:
    """One SBP from its spelling: `S(0)`, `B`, `P`, `P(max)`, or DTensor's `Shard(0)`, `Replicate()`, `Partial(sum)`.

    Raises
    ------
    LayoutError
        The text is none of these.
    """
    match = _SPELLING.fullmatch(text.strip())
    expected = "write S(dimension), B, P, P(max) or P(min)"
    if match is None:
        raise LayoutError(f"{text.strip()!r} is not an SBP; {expected}.")
    name, argument = match["name"].lower(), match["argument"]
    if name in _SPLIT_NAMES:
        value = re.fullmatch(r"(?:(?:dim|axis)\s*=\s*)?(\d+)", argument or "")
        if value is None:
            raise LayoutError(f"{text.strip()!r} needs a dimension number of at least 0 in parentheses, such as S(0).")
        return Split(int(value[1]))
    if name in _BROADCAST_NAMES and not argument:
        return Broadcast()
    if name in _PARTIAL_NAMES:
        reduce = re.sub(r"^(?:reduce|reduce_op)\s*=\s*", "", argument or "sum").strip("'\"")
        return Partial(reduce)
    raise LayoutError(f"{text.strip()!r} is not an SBP; {expected}.")


@dataclass(frozen=True, slots=True)
class Shard:
    """The box of a global tensor that one rank holds: per dimension an offset and a size, within the global shape."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The indices of this box in the global tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape))


@dataclass(frozen=True, slots=True)
class Layout:
    """One SBP per mesh axis (OneFlow's nd_sbp, DTensor's placements).

    Examples
    --------
    >>> str(Layout.parse("S(0), B"))
    '(S(0), B)'
    """

    axes: tuple[SBP, ...]

    @classmethod
    def parse(cls, text: str | SBP | Layout | Sequence) -> Layout:
        """A layout from `"S(0), B"`, `"(S(0), B)"`, `"[Shard(0), Replicate()]"`, an SBP, or a sequence of these.

        DTensor's own placement objects are read by how they print.
        """
        if isinstance(text, Layout):
            return text
        if isinstance(text, (Split, Broadcast, Partial)):
            return cls((text,))
        if not isinstance(text, (str, Iterable)):
            raise LayoutError(f"{text!r} is not a layout; write one SBP per mesh axis, such as 'S(0), B'.")
        if not isinstance(text, str):
            return cls(
                tuple(
                    item
                    if isinstance(item, (Split, Broadcast, Partial))
                    else parse_sbp(item if isinstance(item, str) else repr(item))
                    for item in text
                )
            )
        inner = text.strip()
        if (inner.startswith("(") and inner.endswith(")")) or (inner.startswith("[") and inner.endswith("]")):
            inner = inner[1:-1]
        pieces = re.split(r",(?![^()]*\))", inner)
        if pieces[-1].strip() == "" and len(pieces) > 1:
            pieces.pop()
        return cls(tuple(parse_sbp(piece) for piece in pieces))

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.axes)) + ")"

    def __repr__(self) -> str:
        return f"Layout{self}"

    def __len__(self) -> int:
        return len(self.axes)

    def __iter__(self) -> Iterator[SBP]:
        return iter(self.axes)

    def __getitem__(self, index: int) -> SBP:
        return self.axes[index]

    def _repr_html_(self) -> str:
        from sbp.report.html import layout_html

        return layout_html(self)

    def replace(self, axis: int, sbp: SBP) -> Layout:
        """The same layout with another SBP on one mesh axis."""
        return Layout(self.axes[:axis] + (sbp,) + self.axes[axis + 1 :])

    def normal(self, mesh_shape: Sequence[int]) -> Layout:
        """The same layout with B on mesh axes of one rank, where every SBP means the same."""
        return Layout(tuple(Broadcast() if size == 1 else sbp for sbp, size in zip(self.axes, mesh_shape, strict=True)))

    @property
    def is_broadcast(self) -> bool:
        """Every rank holds the whole tensor."""
        return all(isinstance(sbp, Broadcast) for sbp in self.axes)

    @property
    def has_partial(self) -> bool:
        """Some mesh axis holds unreduced parts."""
        return any(isinstance(sbp, Partial) for sbp in self.axes)

    def check(self, shape: Sequence[int], mesh_shape: Sequence[int], what: str = "tensor") -> None:
        """Raise `LayoutError` unless the layout has one SBP per mesh axis and splits dimensions that exist."""
        if len(self.axes) != len(mesh_shape):
            raise LayoutError(
                f"{what}: layout {self} has {_counted(len(self.axes), 'entry', 'entries')}, but the mesh "
                f"{tuple(mesh_shape)} has {_counted(len(mesh_shape), 'axis', 'axes')}; write one SBP per mesh axis."
            )
        for sbp in self.axes:
            if isinstance(sbp, Split) and sbp.axis >= len(shape):
                raise LayoutError(
                    f"{what}: layout {self} splits dimension {sbp.axis}, but the shape {list(shape)} has "
                    f"{_counted(len(shape), 'dimension', 'dimensions')}, numbered from 0."
                )

    def shard(self, shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Shard:
        """The box held by the rank at `coordinate`; an empty shard's offset is the end of what was split."""
        return _shard(self, tuple(shape), tuple(mesh_shape), tuple(coordinate))

    def local_shape(self, shape: Sequence[int], mesh_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape on the first rank, which is the largest of all."""
        return self.shard(shape, mesh_shape, (0,) * len(mesh_shape)).shape


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of chunk `index` of `parts` in `size` elements, as `torch.chunk` cuts them."""
    step = -(-size // parts)
    start = min(index * step, size)
    return start, min(start + step, size) - start


@lru_cache(maxsize=1 << 18)
def _shard(layout: Layout, shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Shard:
    layout.check(shape, mesh_shape)
    offset, local = [0] * len(shape), list(shape)
    for sbp, parts, index in zip(layout.axes, mesh_shape, coordinate):
        if isinstance(sbp, Split):
            start, size = chunk(local[sbp.axis], parts, index)
            offset[sbp.axis] += start
            local[sbp.axis] = size
    return Shard(shape, tuple(offset), tuple(local))


def broadcast_layout(axes: int) -> Layout:
    """The layout that holds the whole tensor everywhere."""
    return Layout((Broadcast(),) * axes)


def layouts_of(texts: Iterable[str]) -> tuple[Layout, ...]:
    """Several layouts from their spellings."""
    return tuple(Layout.parse(text) for text in texts)


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
