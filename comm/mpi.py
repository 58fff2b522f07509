"""One rank per MPI process, through mpi4py, on NumPy arrays. Bit for bit the in-process communicator's results."""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from typing import Any

import numpy

from sbp.comm.exchange import ExchangeCommunicator
from sbp.comm.interface import Array, CommunicationError, Groups

FAILED = 2
"""Exit code of all processes after one of them failed."""


class MPICommunicator(ExchangeCommunicator):
    """The ranks of an MPI communicator, default `MPI.COMM_WORLD`; start the program with `mpirun -n RANKS`.

    Raises
    ------
    CommunicationError
        mpi4py, or the MPI library it wants, is not installed.
    """

    def __init__(self, world: Any = None) -> None:
        try:
            from mpi4py import MPI
            from mpi4py.util.dtlib import from_numpy_dtype
        except (ImportError, RuntimeError) as error:
            raise CommunicationError(
                f"the MPI communicator needs mpi4py and an MPI library ({error}); "
                "install them with pip install 'sbp[mpi]'."
            ) from None
        self._world = MPI.COMM_WORLD if world is None else world
        self._datatype = from_numpy_dtype
        self._null = MPI.PROC_NULL
        self._made: dict[tuple[int, ...], Any] = {}
        super().__init__(self._world.Get_rank(), self._world.Get_size(), numpy)

    def exchange(
        self, groups: Groups, blocks: Sequence[Array], shapes: Sequence[Sequence[int]], dtype: Any
    ) -> list[Array]:
        """One Alltoallv."""
        blocks = [_checked(block, self._rank) for block in blocks]
        sent = numpy.concatenate([block.reshape(-1) for block in blocks])
        counts = [math.prod(shape) for shape in shapes]
        received = numpy.empty(sum(counts), dtype)
        kind = self._datatype(received.dtype)
        self._among(groups).Alltoallv(
            [sent, ([block.size for block in blocks], None), kind], [received, (counts, None), kind]
        )
        return _pieces(received, counts, shapes)

    def gather(self, groups: Groups, array: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """One Allgatherv."""
        sent = numpy.ascontiguousarray(_checked(array, self._rank))
        counts = [math.prod(shape) for shape in shapes]
        received = numpy.empty(sum(counts), sent.dtype)
        kind = self._datatype(received.dtype)
        self._among(groups).Allgatherv([sent, sent.size, kind], [received, (counts, None), kind])
        return _pieces(received, counts, shapes)

    def send_receive(
        self, array: Array | None, target: int | None, source: int | None, shape: Sequence[int], dtype: Any
    ) -> Array | None:
        """One Sendrecv."""
        sent = numpy.empty(0, dtype) if array is None else numpy.ascontiguousarray(_checked(array, self._rank))
        received = numpy.empty(() if source is None else tuple(shape), dtype)
        kind = self._datatype(received.dtype)
        self._world.Sendrecv(
            [sent, sent.size, kind],
            dest=self._null if target is None else target,
            recvbuf=[received, received.size, kind],
            source=self._null if source is None else source,
        )
        return None if source is None else received

    def barrier(self) -> None:
        """MPI's barrier."""
        self._world.Barrier()

    def fail(self) -> None:
        """End all processes when this one ends, which leaves it the time to report its error."""
        if self.size > 1:
            atexit.register(self._world.Abort, FAILED)

    def close(self) -> None:
        """Free the groups' communicators."""
        for made in self._made.values():
            made.Free()
        self._made.clear()

    def _among(self, groups: Groups) -> Any:
        number, _ = self.place(groups)
        group = groups[number]
        made = self._made.get(group)
        if made is None:
            members = self._world.Get_group().Incl(list(group))
            made = self._made[group] = self._world.Create_group(members)
        return made


def _checked(array: Array, rank: int) -> Any:
    if not isinstance(array, (numpy.ndarray, numpy.generic)):
        raise CommunicationError(
            f"the MPI communicator moves NumPy arrays, rank {rank} gave "
            f"{type(array).__module__}.{type(array).__name__}; use the nccl communicator for arrays on a GPU."
        )
    return numpy.asarray(array)


def _pieces(flat: Any, counts: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[Array]:
    stops = numpy.cumsum(counts)
    return [flat[stop - count : stop].reshape(shape) for count, stop, shape in zip(counts, stops, shapes)]
