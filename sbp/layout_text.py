"""A layout drawn in text: which ranks hold which part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.errors import LayoutError
from sbp.layout import Layout, Partial, Split
from sbp.mesh import Mesh


def show_layout(tensor: Any, layout: Any = None, mesh: Any = None) -> str:
    """Which ranks hold which part, as a grid over the dimensions that are split; ranks that hold the same share a cell.

    Parameters
    ----------
    tensor
        A global tensor, or a shape; with a shape, `layout` (anything that `Layout.parse` reads) and `mesh` (a `Mesh`,
        a number of ranks, a shape, or a text such as `"dp=2,tp=4"`) are needed.

    Raises
    ------
    LayoutError
        The layout does not fit the shape or the mesh.

    Examples
    --------
    >>> print(show_layout((8, 6), "S(0), S(1)", Mesh((2, 2))))
    [8, 6] (S(0), S(1)) on mesh(x=2, y=2)
    [0:4, 0:3] rank 0   [0:4, 3:6] rank 1
    [4:8, 0:3] rank 2   [4:8, 3:6] rank 3
    """
    if layout is None:
        tensor, layout, mesh = tensor.shape, tensor.layout, tensor.mesh
    if mesh is None:
        raise LayoutError(f"show_layout of {tensor}: a shape needs a mesh beside its layout, such as Mesh((2, 2)).")
    mesh = mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh) if isinstance(mesh, str) else Mesh(mesh)
    shape, found = tuple(tensor), Layout.parse(layout)
    found.check(shape, mesh.shape, "show_layout")
    held: dict[tuple[tuple[int, int], ...], list[int]] = {}
    idle = []
    for rank, place in enumerate(mesh.coordinates()):
        shard = found.shard(shape, mesh.shape, place)
        if 0 in shard.shape and 0 not in shape:
            idle.append(rank)
        else:
            held.setdefault(tuple((at, at + size) for at, size in zip(shard.offset, shard.shape)), []).append(rank)
    lines = [f"{list(shape)} {found} on {mesh}"]
    if 0 in shape:
        lines.append("the tensor is empty, and so are all shards")
    else:
        lines += _grid(held, sorted({sbp.axis for sbp in found if isinstance(sbp, Split)}))
    if idle:
        lines.append(f"{_ranks(idle)}: nothing")
    for sbp, name in zip(found, mesh.names):
        if isinstance(sbp, Partial):
            lines.append(f"along {name} ranks hold parts, whose {sbp.reduce} is the tensor")
    return "\n".join(lines)


def _grid(held: dict[tuple[tuple[int, int], ...], list[int]], split: Sequence[int]) -> list[str]:
    """Cells by the chunk of the first split dimension (down) and of the second (across); one per line for more."""
    cells = {box: f"[{', '.join(f'{low}:{high}' for low, high in box)}] {_ranks(ranks)}" for box, ranks in held.items()}
    if len(split) != 2:
        return [cells[box] for box in sorted(cells)]
    down, across = split
    rows = sorted({box[down] for box in cells})
    columns = sorted({box[across] for box in cells})
    table = {(box[down], box[across]): text for box, text in cells.items()}
    width = max(map(len, cells.values()))
    return ["   ".join(table[row, column].ljust(width) for column in columns).rstrip() for row in rows]


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`, or `ranks 4 to 7` where they follow each other."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
