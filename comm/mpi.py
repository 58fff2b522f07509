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

LARGEST = 2**31 - 1
"""Elements that one MPI call can count, and displacements that it can state: they are C ints."""


class MPICommunicator(ExchangeCommunicator):
    """The ranks of an MPI communicator, default `MPI.COMM_WORLD`; start the program with `mpirun -n RANKS`.

    Parameters
    ----------
    world
        An mpi4py communicator.
    limit
        The most elements of one call; larger arrays go in several. All ranks must give the same.

    Raises
    ------
    CommunicationError
        mpi4py, or the MPI library it wants, is not installed.
    """

    def __init__(self, world: Any = None, limit: int = LARGEST) -> None:
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
        self._wait = MPI.Request.Waitall
        self._limit = limit
        self._made: dict[tuple[int, ...], Any] = {}
        super().__init__(self._world.Get_rank(), self._world.Get_size(), numpy)

    def exchange(
        self, groups: Groups, blocks: Sequence[Array], shapes: Sequence[Sequence[int]], dtype: Any
    ) -> list[Array]:
        """One Alltoallv; of blocks that are too large for it the rest follows from rank to rank."""
        among = self._among(groups)
        flats = [_checked(block, self._rank).reshape(-1) for block in blocks]
        counts = [math.prod(shape) for shape in shapes]
        most = max(1, self._limit // len(flats))  # so that displacements stay within the limit as well
        heads = [min(count, most) for count in counts]
        sent = numpy.concatenate([flat[:most] for flat in flats])
        received = numpy.empty(sum(heads), dtype)
        kind = self._datatype(received.dtype)
        among.Alltoallv([sent, ([min(flat.size, most) for flat in flats], None), kind], [received, (heads, None), kind])
        if heads == counts and all(flat.size <= most for flat in flats):
            return _pieces(received, counts, shapes)
        # Sender and receiver both know the size of what passes between them, and so what is left of it.
        rests = [numpy.ascontiguousarray(flat[most:]) for flat in flats]
        whole = [numpy.empty(count, dtype) for count in counts]
        requests = []
        for peer, (made, head) in enumerate(zip(whole, _pieces(received, heads, [(head,) for head in heads]))):
            made[: len(head)] = head
            requests += self._receives(among, made[len(head) :], peer)
        for peer, rest in enumerate(rests):
            requests += self._sends(among, rest, peer)
        self._wait(requests)
        return [made.reshape(shape) for made, shape in zip(whole, shapes)]

    def gather(self, groups: Groups, array: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """One Allgatherv, or as many as the largest array takes; every member knows all sizes."""
        among = self._among(groups)
        sent = numpy.ascontiguousarray(_checked(array, self._rank)).reshape(-1)
        counts = [math.prod(shape) for shape in shapes]
        kind = self._datatype(sent.dtype)
        if sum(counts) <= self._limit:
            received = numpy.empty(sum(counts), sent.dtype)
            among.Allgatherv([sent, sent.size, kind], [received, (counts, None), kind])
            return _pieces(received, counts, shapes)
        whole = [numpy.empty(count, sent.dtype) for count in counts]
        most = max(1, self._limit // len(counts))
        for start in range(0, max(counts), most):
            part = sent[start : start + most]
            here = [min(max(count - start, 0), most) for count in counts]
            received = numpy.empty(sum(here), sent.dtype)
            among.Allgatherv([part, part.size, kind], [received, (here, None), kind])
            for made, piece in zip(whole, _pieces(received, here, [(count,) for count in here])):
                made[start : start + len(piece)] = piece
        return [made.reshape(shape) for made, shape in zip(whole, shapes)]

    def send_receive(
        self, array: Array | None, target: int | None, source: int | None, shape: Sequence[int], dtype: Any
    ) -> Array | None:
        """Isend and Irecv, waited for together."""
        requests = []
        received = None
        if source is not None:
            received = numpy.empty(math.prod(shape), dtype)
            requests += self._receives(self._world, received, source)
        if array is not None and target is not None:
            sent = numpy.ascontiguousarray(_checked(array, self._rank)).reshape(-1)
            requests += self._sends(self._world, sent, target)
        self._wait(requests)
        return None if received is None else received.reshape(tuple(shape))

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

    def _sends(self, among: Any, flat: Any, target: int) -> list[Any]:
        kind = self._datatype(flat.dtype)
        return [among.Isend([part, part.size, kind], dest=target) for part in self._parts(flat)]

    def _receives(self, among: Any, flat: Any, source: int) -> list[Any]:
        kind = self._datatype(flat.dtype)
        return [among.Irecv([part, part.size, kind], source=source) for part in self._parts(flat)]

    def _parts(self, flat: Any) -> list[Any]:
        return [flat[start : start + self._limit] for start in range(0, flat.size, self._limit)]

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
