"""Global tensors in files: written by their ranks, read in any layout on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from sbp.errors import GraphError, LayoutError, MeshError
from sbp.runtime.checkpoint import Held, open_checkpoint, write_checkpoint
from sbp.runtime.eager import check_layout, current_ranks
from sbp.runtime.global_tensor import GlobalTensor, LayoutLike, MeshLike, as_layout, as_mesh, places


def save(path: str | Path, tensors: Mapping[str, GlobalTensor]) -> None:
    """Write global tensors of one mesh into a folder, each rank its own shards (see `sbp.runtime.checkpoint`).

    A checkpoint that the folder holds is replaced when the new one is complete. With several processes, all call it.

    Raises
    ------
    MeshError
        The tensors lie on different meshes.
    GraphError
        Something is no global tensor.
    CheckpointError
        The folder cannot be written.
    """
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, GlobalTensor):
            raise GraphError(f"save takes global tensors by name, got {name!r}: {type(tensor).__name__}.")
    meshes = {str(tensor.mesh): tensor for tensor in tensors.values()}
    if len(meshes) != 1:
        raise MeshError(
            f"save takes tensors of one mesh, got {' and '.join(sorted(meshes)) or 'none'}; save them apart, or take "
            "some over with sbp.from_numpy(x.numpy(), layout, mesh)."
        )
    (first,) = meshes.values()
    backend, communicator = places(first._ranks, first.mesh)
    held = {name: Held(tensor.type, tensor.layout, tensor._local) for name, tensor in tensors.items()}
    write_checkpoint(path, held, first.mesh, backend, communicator)


def load(
    path: str | Path, layout: LayoutLike | Mapping[str, LayoutLike] = None, mesh: MeshLike = 1
) -> dict[str, GlobalTensor]:
    """Read the tensors of a folder that `save` or a training run wrote, whatever mesh and layouts it was written from.

    Parameters
    ----------
    layout
        Of every tensor, or by name; default (and for names left out) the whole tensor on every rank.
    mesh
        As for `sbp.from_numpy`.

    Raises
    ------
    CheckpointError
        There is no checkpoint, or it is damaged.
    LayoutError
        A layout does not fit, or is for a tensor that the checkpoint has not.
    """
    checkpoint, grid, ranks = open_checkpoint(path), as_mesh(mesh), current_ranks()
    backend, communicator = places(ranks, grid)
    if isinstance(layout, Mapping):
        for name in layout:
            if name not in checkpoint.tensors:
                near = get_close_matches(str(name), checkpoint.tensors, 3)
                hint = (
                    f"did you mean {' or '.join(near)}" if near else f"it has {', '.join(list(checkpoint.tensors)[:8])}"
                )
                raise LayoutError(f"load: a layout for {name!r}, which the checkpoint {path} has not; {hint}?")
    found = {}
    for name, stored in checkpoint.tensors.items():
        chosen = as_layout(layout.get(name) if isinstance(layout, Mapping) else layout, grid)
        check_layout(chosen, stored.type, grid, f"load of {name}:")
        local = checkpoint.place(name, stored.type, chosen, grid, backend, communicator.ranks)
        found[name] = GlobalTensor(stored.type, chosen, grid, local, ranks)
    return found
