"""One rank per process and GPU, through `cupy.cuda.nccl`; processes meet by torchrun's environment variables.

NCCL reduces in an order of its own: results are deterministic for one machine and NCCL version, but need not have the
bits of the other communicators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sbp.comm.arrays import chunk_slices, with_size
from sbp.comm.exchange import ExchangeCommunicator
from sbp.comm.interface import Array, CommunicationError, Groups, Sizes
from sbp.comm.rendezvous import Environment, Store

_TYPES = {
    "float64": "NCCL_FLOAT64", "float32": "NCCL_FLOAT32", "float16": "NCCL_FLOAT16", "int64": "NCCL_INT64",
    "int32": "NCCL_INT32", "uint32": "NCCL_UINT32", "int8": "NCCL_INT8", "uint8": "NCCL_UINT8", "bool": "NCCL_UINT8",
}  # fmt: skip
_REDUCTIONS = {"sum": "NCCL_SUM", "max": "NCCL_MAX", "min": "NCCL_MIN"}


class NCCLCommunicator(ExchangeCommunicator):
    """The rank of this process, on the GPU numbered by its local rank.

    Parameters
    ----------
    environment
        This process' place; default from the environment variables.
    cupy
        The CuPy module, for tests with a stand-in; default the installed one.
    timeout
        Seconds to wait for the other processes.

    Raises
    ------
    CommunicationError
        CuPy or NCCL is missing, an environment variable is missing, there are fewer GPUs than local ranks, or the
        others cannot be reached.
    """

    def __init__(self, environment: Environment | None = None, cupy: Any = None, timeout: float = 300.0) -> None:
        self._cupy = _cupy_with_nccl() if cupy is None else cupy
        self._nccl = self._cupy.cuda.nccl
        self._environment = Environment.read() if environment is None else environment
        try:
            found = self._cupy.cuda.runtime.getDeviceCount()
        except Exception as error:  # CuPy raises its own types, which exist only where CuPy does
            raise CommunicationError(
                f"no GPU can be used ({error}); run with the inprocess or mpi communicator."
            ) from None
        if self._environment.local_rank >= found:
            raise CommunicationError(
                f"rank {self._environment.rank} has LOCAL_RANK {self._environment.local_rank}, but this machine has "
                f"{found} GPUs; start at most one process per GPU."
            )
        super().__init__(self._environment.rank, self._environment.size, self._cupy)
        self._cupy.cuda.Device(self._environment.local_rank).use()
        self._store = Store(self._environment, timeout)
        self._made: dict[tuple[int, ...], Any] = {}
        self._world: Groups = (tuple(range(self.size)),)
        self._among(self._world)

    # -- primitives --------------------------------------------------------------------------------------------------

    def exchange(
        self, groups: Groups, blocks: Sequence[Array], shapes: Sequence[Sequence[int]], dtype: Any
    ) -> list[Array]:
        """Grouped sends and receives; a pair whose block is empty posts neither, as both know its size."""
        communicator, stream = self._among(groups), self._stream()
        _, position = self.place(groups)
        sent = [self._cupy.ascontiguousarray(block) for block in blocks]
        received = [self._cupy.empty(shape, dtype) for shape in shapes]
        with self._grouped():
            for peer, (block, room) in enumerate(zip(sent, received)):
                if peer == position:
                    continue
                if block.size:
                    communicator.send(block.data.ptr, block.size, self._type(block), peer, stream)
                if room.size:
                    communicator.recv(room.data.ptr, room.size, self._type(room), peer, stream)
        received[position] = sent[position].reshape(shapes[position])
        return received

    def gather(self, groups: Groups, array: Array, shapes: Sequence[Sequence[int]]) -> list[Array]:
        """NCCL's all-gather where all shapes are one, else every pair by itself."""
        if any(tuple(shape) != tuple(shapes[0]) for shape in shapes):
            return self.exchange(groups, [array] * len(shapes), shapes, array.dtype)
        sent = self._cupy.ascontiguousarray(array)
        received = self._cupy.empty((len(shapes), *shapes[0]), array.dtype)
        if sent.size:
            self._among(groups).allGather(sent.data.ptr, received.data.ptr, sent.size, self._type(sent), self._stream())
        return list(received)

    def send_receive(
        self, array: Array | None, target: int | None, source: int | None, shape: Sequence[int], dtype: Any
    ) -> Array | None:
        """A grouped send and receive on the communicator of all ranks."""
        communicator, stream = self._among(self._world), self._stream()
        sent = None if array is None else self._cupy.ascontiguousarray(array)
        received = None if source is None else self._cupy.empty(tuple(shape), dtype)
        with self._grouped():
            if sent is not None and sent.size:
                communicator.send(sent.data.ptr, sent.size, self._type(sent), target, stream)
            if received is not None and received.size:
                communicator.recv(received.data.ptr, received.size, self._type(received), source, stream)
        return received

    # -- collectives that NCCL has itself ----------------------------------------------------------------------------

    def all_reduce(self, arrays: Mapping[int, Array], groups: Groups, reduce: str) -> dict[int, Array]:
        """ncclAllReduce."""
        number, _ = self.place(groups)
        if number < 0:
            return {}
        communicator = self._among(groups)
        array = self._cupy.ascontiguousarray(arrays[self._rank]).reshape(arrays[self._rank].shape)
        if len(groups[number]) == 1 or not array.size:
            return {self._rank: array}
        made = self._cupy.empty(array.shape, array.dtype)
        kind, stream = self._type(array), self._stream()
        communicator.allReduce(array.data.ptr, made.data.ptr, array.size, kind, self._reduction(reduce), stream)
        return {self._rank: made}

    def reduce_scatter(
        self, arrays: Mapping[int, Array], groups: Groups, axis: int, sizes: Sizes, reduce: str
    ) -> dict[int, Array]:
        """ncclReduceScatter for even chunks, else one ncclReduce to each member, grouped."""
        number, position = self.place(groups)
        if number < 0:
            return {}
        communicator = self._among(groups)
        array, chunks = arrays[self._rank], sizes[number]
        if len(chunks) == 1:
            return {self._rank: array}
        made = self._cupy.empty(with_size(array.shape, axis, chunks[position]), array.dtype)
        kind, operation, stream = self._type(made), self._reduction(reduce), self._stream()
        places = chunk_slices(chunks, axis)
        if len(set(chunks)) == 1:
            if made.size:
                sent = self._cupy.concatenate([array[place].reshape(-1) for place in places])
                communicator.reduceScatter(sent.data.ptr, made.data.ptr, made.size, kind, operation, stream)
            return {self._rank: made}
        blocks = [self._cupy.ascontiguousarray(array[place]) for place in places]
        with self._grouped():
            for root, block in enumerate(blocks):
                if block.size:
                    # Only the root's NCCL writes to the receiving buffer.
                    communicator.reduce(block.data.ptr, made.data.ptr, block.size, kind, operation, root, stream)
        return {self._rank: made}

    def barrier(self) -> None:
        """An all-reduce of one number, waited for."""
        self.all_reduce({self._rank: self._cupy.zeros(1, "int32")}, self._world, "sum")
        self._cupy.cuda.get_current_stream().synchronize()

    def fail(self) -> None:
        """Abort NCCL's communicators, so that this process can end; torchrun then ends the others."""
        for made in self._made.values():
            if made is not None:
                made.abort()
        self._made.clear()

    def close(self) -> None:
        """Destroy NCCL's communicators and leave the store; waits until every rank has come here."""
        self.barrier()
        for made in self._made.values():
            if made is not None:
                made.destroy()
        self._made.clear()
        self._store.close()

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _among(self, groups: Groups) -> Any:
        """NCCL's communicator of this rank's group (None for a group of one), made at first use by all its members."""
        number, position = self.place(groups)
        group = groups[number]
        if group in self._made:
            return self._made[group]
        made = None
        if len(group) > 1:
            key = f"group {group}"
            if position == 0:
                self._store.set(key, self._identity(group))
            identity = self._store.get(key)
            if identity[:1] == _FAILED:
                raise CommunicationError(identity[1:].decode())
            made = self._nccl.NcclCommunicator(len(group), _from_bytes(identity), position)
        self._made[group] = made
        return made

    def _identity(self, group: tuple[int, ...]) -> bytes:
        """What the first rank of a group tells the others: NCCL's unique id, or why there is none, which all raise."""
        try:
            return _to_bytes(self._nccl.get_unique_id())
        except Exception as error:  # NCCL raises CuPy's own types, which exist only where CuPy does
            text = (
                f"rank {self._rank} could not make NCCL's id for the ranks {group} ({type(error).__name__}: {error})."
            )
            return _FAILED + text.encode()

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def _stream(self) -> int:
        return self._cupy.cuda.get_current_stream().ptr

    def _type(self, array: Array) -> int:
        name = _TYPES.get(str(array.dtype))
        if name is None:
            raise CommunicationError(f"NCCL cannot move arrays of {array.dtype}; it moves {', '.join(_TYPES)}.")
        return getattr(self._nccl, name)

    def _reduction(self, reduce: str) -> int:
        if reduce not in _REDUCTIONS:
            raise CommunicationError(f"unknown reduction {reduce!r}; known are {', '.join(_REDUCTIONS)}.")
        return getattr(self._nccl, _REDUCTIONS[reduce])


_FAILED = b"e"
"""Marks the message that stands in the store where an id should."""


def _cupy_with_nccl() -> Any:
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        raise CommunicationError(
            f"the NCCL communicator needs CuPy and NCCL ({error}); install them with pip install 'sbp[cuda]'."
        ) from None
    if not getattr(nccl, "available", False):
        raise CommunicationError("this CuPy has no NCCL; install it with pip install nvidia-nccl-cu12.")
    return cupy


def _to_bytes(identity: Any) -> bytes:
    """NCCL's unique id, marked with the form of CuPy: bytes, before version 14 a tuple of signed numbers."""
    return b"b" + identity if isinstance(identity, bytes) else b"t" + bytes(item & 0xFF for item in identity)


def _from_bytes(text: bytes) -> Any:
    """The unique id in the form in which it was given."""
    return text[1:] if text[:1] == b"b" else tuple(item - 256 if item > 127 else item for item in text[1:])
