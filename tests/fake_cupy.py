"""A stand-in for CuPy and its NCCL on the host: NumPy arrays with device pointers, ranks as threads.

Collectives read and write raw memory by pointer, count and element type, as NCCL does, and fail when the ranks of a
communicator post different ones. Kernels of a RawModule are the real CUDA source, compiled for the host (`host_cuda`).
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy

TIMEOUT = 20.0


class ndarray(numpy.ndarray):
    """A NumPy array whose `data` has a pointer, as CuPy's has."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return numpy.array(self)


def _wrapped(value):
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return numpy.asarray(value).view(ndarray)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrapped(item) for item in value)
    return value


class World:
    """What the threads share: unique ids, and the meeting places of collectives."""

    def __init__(self):
        self.condition = threading.Condition()
        self.made = 0
        self.slots = defaultdict(dict)
        self.mail = defaultdict(list)

    def unique_id(self):
        with self.condition:
            self.made += 1
            return bytes([self.made % 251, self.made // 251]) + bytes(range(126))

    def meet(self, key, size, rank, value):
        """Give a value, wait for the others', return all of them in rank order."""
        with self.condition:
            slot = self.slots[key]
            assert rank not in slot, f"rank {rank} came twice to {key}"
            slot[rank] = value
            self.condition.notify_all()
            if not self.condition.wait_for(lambda: len(slot) == size, TIMEOUT):
                raise TimeoutError(f"only ranks {sorted(slot)} of {size} came to {key}")
            return [slot[other] for other in range(size)]


class FakeCupy:
    """The module, one per rank or shared; everything NumPy has, giving arrays with pointers."""

    def __init__(self, world=None, devices=8, raw_module=None):
        self.world = World() if world is None else world
        self.ndarray = ndarray
        self.used = []
        self.pool = SimpleNamespace(limit=None, used_bytes=lambda: 4096, total_bytes=lambda: 8192)
        self.pool.set_limit = lambda size: setattr(self.pool, "limit", size)
        self.waits = 0
        stream = SimpleNamespace(ptr=0, synchronize=self._wait, use=lambda: None)
        self.cuda = SimpleNamespace(
            nccl=FakeNccl(self.world),
            Device=lambda number=0: SimpleNamespace(use=lambda: self.used.append(number), synchronize=self._wait),
            Stream=lambda non_blocking=False: stream,
            get_current_stream=lambda: stream,
            runtime=SimpleNamespace(getDeviceCount=lambda: devices),
        )
        if raw_module is not None:
            self.RawModule = raw_module

    def _wait(self):
        self.waits += 1

    def get_default_memory_pool(self):
        return self.pool

    def asnumpy(self, array):
        return numpy.array(array)

    def __getattr__(self, name):
        found = getattr(numpy, name)
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *args, **kwargs: _wrapped(found(*args, **kwargs))


_NAMES = {
    "INT8": "int8", "UINT8": "uint8", "INT32": "int32", "UINT32": "uint32", "INT64": "int64", "UINT64": "uint64",
    "FLOAT16": "float16", "FLOAT32": "float32", "FLOAT64": "float64",
}  # fmt: skip


class FakeNccl:
    """`cupy.cuda.nccl`: module functions, constants and communicators."""

    available = True
    NCCL_SUM, NCCL_MAX, NCCL_MIN = 0, 2, 3

    def __init__(self, world):
        self.world = world
        self.local = threading.local()
        self.types = {}
        for number, (label, dtype) in enumerate(_NAMES.items()):
            setattr(self, f"NCCL_{label}", number)
            self.types[number] = numpy.dtype(dtype)

    def get_unique_id(self):
        return self.world.unique_id()

    def NcclCommunicator(self, size, identity, rank):
        return FakeCommunicator(self, size, identity, rank)

    def groupStart(self):
        self.local.posted = []

    def groupEnd(self):
        posted, self.local.posted = self.local.posted, None
        for _, run in sorted(posted, key=lambda item: item[0]):  # sends first, as they proceed together
            run()

    def post(self, order, run):
        posted = getattr(self.local, "posted", None)
        assert posted is not None, "sends, receives and reductions to one root must be grouped"
        posted.append((order, run))


class FakeCommunicator:
    """One rank's end of a communicator; every call takes and gives raw memory."""

    def __init__(self, nccl, size, identity, rank):
        assert isinstance(identity, bytes) and len(identity) == 128
        self.nccl, self.world, self.count, self.identity, self.rank = nccl, nccl.world, size, identity, rank
        self.calls = 0
        self.destroyed = False
        self.world.meet((identity, "start"), size, rank, None)

    def _memory(self, pointer, count, kind):
        dtype = self.nccl.types[kind]
        buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
        return numpy.frombuffer(buffer, dtype)

    def _meet(self, what, value):
        assert not self.destroyed
        self.calls += 1
        found = self.world.meet((self.identity, self.calls), self.count, self.rank, (what, value))
        assert len({other for other, _ in found}) == 1, f"ranks posted different collectives: {[w for w, _ in found]}"
        return [value for _, value in found]

    def _reduced(self, parts, operation):
        function = {0: numpy.add, 2: numpy.maximum, 3: numpy.minimum}[operation]
        return function.reduce(parts)

    def allReduce(self, source, target, count, kind, operation, stream):
        parts = self._meet(("allReduce", count, kind, operation), self._memory(source, count, kind).copy())
        self._memory(target, count, kind)[:] = self._reduced(parts, operation)

    def allGather(self, source, target, count, kind, stream):
        parts = self._meet(("allGather", count, kind), self._memory(source, count, kind).copy())
        self._memory(target, count * self.count, kind)[:] = numpy.concatenate(parts)

    def reduceScatter(self, source, target, count, kind, operation, stream):
        whole = self._memory(source, count * self.count, kind).copy()
        total = self._reduced(self._meet(("reduceScatter", count, kind, operation), whole), operation)
        self._memory(target, count, kind)[:] = total[self.rank * count : (self.rank + 1) * count]

    def reduce(self, source, target, count, kind, operation, root, stream):
        def run():
            parts = self._meet(("reduce", count, kind, operation, root), self._memory(source, count, kind).copy())
            if self.rank == root:
                self._memory(target, count, kind)[:] = self._reduced(parts, operation)

        self.nccl.post(0, run)

    def send(self, source, count, kind, peer, stream):
        def run():
            with self.world.condition:
                place = self.world.mail[self.identity, self.rank, peer]
                place.append((kind, self._memory(source, count, kind).copy()))
                self.world.condition.notify_all()

        assert count and not self.destroyed
        self.nccl.post(0, run)

    def recv(self, target, count, kind, peer, stream):
        def run():
            place = self.world.mail[self.identity, peer, self.rank]
            with self.world.condition:
                if not self.world.condition.wait_for(lambda: place, TIMEOUT):
                    raise TimeoutError(f"rank {self.rank} received nothing from {peer}")
                found, data = place.pop(0)
            assert found == kind and data.size == count, f"rank {self.rank} got {data.size} elements, wanted {count}"
            self._memory(target, count, kind)[:] = data

        assert count and not self.destroyed
        self.nccl.post(1, run)

    def destroy(self):
        self.destroyed = True

    def abort(self):
        self.destroyed = True
