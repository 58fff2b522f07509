"""What a communicator must offer: collectives over groups of ranks, in lockstep.

A communicator speaks for the ranks that live in this process (`ranks`): all of them in process, one per process under
MPI and NCCL. Every call names all groups of the whole communicator, so that every process posts the same sequence of
collectives whatever its shards hold; an empty shard takes part like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sbp.errors import SbpError

Array = Any
"""An array of the backend's module: `numpy.ndarray` or `cupy.ndarray`."""

Groups = tuple[tuple[int, ...], ...]
"""Disjoint groups of ranks, each in the order of its mesh axis, as `Mesh.groups` gives them."""

Sizes = tuple[tuple[int, ...], ...]
"""Per group, per member, the member's size along a dimension. Sizes may differ and may be zero."""


class CommunicationError(SbpError):
    """Ranks that cannot reach each other, or a communicator that does not fit the mesh or the arrays."""


class Communicator(Protocol):
    """Collectives on the arrays of the local ranks.

    `arrays` maps local ranks to arrays; the result maps the same ranks to new arrays, which ranks may share and which
    must not be written to. Within a group all arrays have one dtype, and one shape but for the dimension that `sizes`
    speaks of. Local ranks outside every group are absent from both. Reductions run in the order of the group.
    """

    @property
    def size(self) -> int:
        """Number of ranks, of all processes together."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this process, ascending."""

    def all_reduce(self, arrays: Mapping[int, Array], groups: Groups, reduce: str) -> dict[int, Array]:
        """P -> B: every member gets the group's elementwise sum, max or min."""

    def all_gather(self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes) -> dict[int, Array]:
        """S(axis) -> B: every member gets the concatenation along `axis` of shards of the given sizes."""

    def reduce_scatter(
        self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes, reduce: str
    ) -> dict[int, Array]:
        """P -> S(axis): every member gets its chunk, of the given size, of the group's elementwise reduction."""

    def all_to_all(
        self,
        arrays: Mapping[int, Array],
        groups: Groups,
        source_axis: int,
        source_sizes: Sizes,
        target_axis: int,
        target_sizes: Sizes,
    ) -> dict[int, Array]:
        """S(source_axis) -> S(target_axis): chunks of `target_axis` are sent, and concatenated along `source_axis`."""

    def broadcast(self, arrays: Mapping[int, Array], groups: Groups, root: int) -> dict[int, Array]:
        """Every member gets the array of the member at position `root`; the others' arrays give shape and dtype."""

    def permute(
        self,
        arrays: Mapping[int, Array],
        pairs: Sequence[tuple[int, int]],
        shapes: Mapping[int, Sequence[int]],
        dtype: Any,
    ) -> dict[int, Array]:
        """Point to point: per pair (source, target) the source's array, of shape `shapes[target]`, goes to the target.

        A rank is the source of at most one pair and the target of at most one; local targets are in the result.
        """

    def barrier(self) -> None:
        """Return once every rank has come here."""

    def fail(self) -> None:
        """A rank of this process failed and posts nothing more: see to it that the others do not wait for ever."""

    def close(self) -> None:
        """Release what the communicator holds; it cannot be used afterwards."""
