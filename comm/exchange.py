"""Collectives for one rank per process, built on two primitives: gather all members' arrays, exchange blocks pairwise.

Reductions are done here, in the order of the group, so that every communicator that keeps these gives the same bits as
the in-process one. MPI keeps them; NCCL replaces them by its own, which are faster and reduce in an order of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from sbp.comm.arrays import chunk_slices, reduce_in_order, with_size
from sbp.comm.interface import Array, CommunicationError, Groups, Sizes
from sbp.layout import chunk

SMALL = 1 << 14
"""Bytes up to which an all-reduce gathers the whole arrays (one round) instead of reducing piecewise (two rounds)."""


class ExchangeCommunicator(ABC):
    """One rank of several processes; subclasses give the primitives.

    Parameters
    ----------
    rank, size
        This process' rank and the number of ranks.
    xp
        Module of the arrays.
    """

    def __init__(self, rank: int, size: int, xp: Any) -> None:
        self.size = size
        self.ranks = (rank,)
        self._rank = rank
        self._xp = xp
        self._places: dict[Groups, tuple[int, int]] = {}

    # -- primitives --------------------------------------------------------------------------------------------------

    @abstractmethod
    def exchange(
        self, groups: Groups, blocks: Sequence[Array], shapes: Sequence[Sequence[int]], dtype: Any
    ) -> list[Array]:
        """Send `blocks[k]` to member k of this rank's group; returns what each sent here, in `shapes`."""

    @abstractmethod
    def gather(self, groups: Groups, array: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """Every member's array, of the given shapes."""

    @abstractmethod
    def send_receive(
        self, array: Array | None, target: int | None, source: int | None, shape: Sequence[int], dtype: Any
    ) -> Array | None:
        """Send to one rank and receive from another at once; either may be None."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has come here."""

    @abstractmethod
    def fail(self) -> None:
        """See to it that the others do not wait for this rank."""

    @abstractmethod
    def close(self) -> None:
        """Release what the communicator holds."""

    # -- collectives -------------------------------------------------------------------------------------------------

    def place(self, groups: Groups) -> tuple[int, int]:
        """Number of this rank's group and its position there; (-1, -1) if it is in none."""
        found = self._places.get(groups)
        if found is None:
            found = (-1, -1)
            for number, group in enumerate(groups):
                if self._rank in group:
                    found = (number, group.index(self._rank))
            self._places[groups] = found
        return found

    def all_reduce(self, arrays: Mapping[int, Array], groups: Groups, reduce: str) -> dict[int, Array]:
        """P -> B."""
        number, position = self.place(groups)
        if number < 0:
            return {}
        array, count = arrays[self._rank], len(groups[number])
        if count == 1:
            return {self._rank: array}
        if array.nbytes <= SMALL:
            parts = self.gather(groups, array, [array.shape] * count)
            return {self._rank: reduce_in_order(self._xp, parts, reduce)}
        flat = array.reshape(-1)
        pieces = [chunk(flat.size, count, index) for index in range(count)]
        blocks = [flat[start : start + size] for start, size in pieces]
        received = self.exchange(groups, blocks, [(pieces[position][1],)] * count, array.dtype)
        mine = reduce_in_order(self._xp, received, reduce)
        whole = self.gather(groups, mine, [(size,) for _, size in pieces])
        return {self._rank: self._xp.concatenate(whole).reshape(array.shape)}

    def all_gather(self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes) -> dict[int, Array]:
        """S(axis) -> B."""
        number, _ = self.place(groups)
        if number < 0:
            return {}
        array = arrays[self._rank]
        if len(groups[number]) == 1:
            return {self._rank: array}
        shapes = [with_size(array.shape, axis, size) for size in sizes[number]]
        return {self._rank: self._xp.concatenate(self.gather(groups, array, shapes), axis=axis)}

    def reduce_scatter(
        self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes, reduce: str
    ) -> dict[int, Array]:
        """P -> S(axis)."""
        number, position = self.place(groups)
        if number < 0:
            return {}
        array = arrays[self._rank]
        if len(groups[number]) == 1:
            return {self._rank: array}
        blocks = [array[place] for place in chunk_slices(sizes[number], axis)]
        mine = with_size(array.shape, axis, sizes[number][position])
        received = self.exchange(groups, blocks, [mine] * len(blocks), array.dtype)
        return {self._rank: reduce_in_order(self._xp, received, reduce)}

    def all_to_all(
        self,
        arrays: Mapping[int, Array],
        groups: Groups,
        source_axis: int,
        source_sizes: Sizes,
        target_axis: int,
        target_sizes: Sizes,
    ) -> dict[int, Array]:
        """S(source_axis) -> S(target_axis)."""
        number, position = self.place(groups)
        if number < 0:
            return {}
        array = arrays[self._rank]
        if len(groups[number]) == 1:
            return {self._rank: array}
        blocks = [array[place] for place in chunk_slices(target_sizes[number], target_axis)]
        mine = with_size(array.shape, target_axis, target_sizes[number][position])
        shapes = [with_size(mine, source_axis, size) for size in source_sizes[number]]
        received = self.exchange(groups, blocks, shapes, array.dtype)
        return {self._rank: self._xp.concatenate(received, axis=source_axis)}

    def broadcast(self, arrays: Mapping[int, Array], groups: Groups, root: int) -> dict[int, Array]:
        """From the member at position `root` to all."""
        number, position = self.place(groups)
        if number < 0:
            return {}
        array, count = arrays[self._rank], len(groups[number])
        if count == 1:
            return {self._rank: array}
        nothing = array.reshape(-1)[:0]
        blocks = [array if position == root else nothing] * count
        shapes = [array.shape if member == root else (0,) for member in range(count)]
        return {self._rank: self.exchange(groups, blocks, shapes, array.dtype)[root]}

    def permute(
        self,
        arrays: Mapping[int, Array],
        pairs: Sequence[tuple[int, int]],
        shapes: Mapping[int, Sequence[int]],
        dtype: Any,
    ) -> dict[int, Array]:
        """Point to point."""
        target = next((b for a, b in pairs if a == self._rank), None)
        source = next((a for a, b in pairs if b == self._rank), None)
        if target == self._rank:
            return {self._rank: arrays[self._rank]}
        if target is not None and self._rank not in arrays:
            raise CommunicationError(f"rank {self._rank} is to send to rank {target}, but was given no array.")
        sent = None if target is None else arrays[self._rank]
        shape = () if source is None else shapes[self._rank]
        received = self.send_receive(sent, target, source, shape, dtype)
        return {} if source is None else {self._rank: received}
