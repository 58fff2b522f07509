"""Runs CUDA source on the host: compiled by g++ behind a small header, a real thread per CUDA thread of a block.

`__shared__` memory is static, `__syncthreads` is a barrier; blocks run one after another. It is slow and exact.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy

HEADER = r"""
#include <cmath>
#include <pthread.h>
using std::pow;
using std::sqrt;
struct Index { unsigned x, y, z; };
static thread_local Index threadIdx, blockIdx;
static Index blockDim, gridDim;
static pthread_barrier_t barrier;
#define __global__
#define __device__ static
#define __shared__ static
#define __syncthreads() pthread_barrier_wait(&barrier)
extern "C" void host_launch(unsigned grid, unsigned block) {
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  pthread_barrier_init(&barrier, nullptr, block);
}
extern "C" void host_place(unsigned block, unsigned thread) {
  blockIdx = {block, 0, 0};
  threadIdx = {thread, 0, 0};
}
extern "C" void host_finish() { pthread_barrier_destroy(&barrier); }
"""


def compiler():
    """g++, or None."""
    return shutil.which("g++")


class HostModule:
    """In the place of `cupy.RawModule`; counts the launches of every kernel."""

    running = threading.Lock()  # all modules of one source share its static memory

    def __init__(self, code, options=()):
        folder = Path(tempfile.gettempdir()) / "sbp host cuda"
        folder.mkdir(exist_ok=True)
        library = folder / f"{hashlib.sha256((HEADER + code).encode()).hexdigest()[:20]}.so"
        if not library.exists():
            source = library.with_suffix(f".{threading.get_ident()}.cpp")
            source.write_text(HEADER + code)
            made = source.with_suffix(".so")
            command = [compiler(), "-O1", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"]
            subprocess.run([*command, str(source), "-o", str(made)], check=True, capture_output=True, text=True)
            made.rename(library)
            source.unlink()
        self.library = ctypes.CDLL(str(library))
        self.launches = {}
        self.code = code

    def get_function(self, name):
        function = getattr(self.library, name)
        # The types of the parameters, as a launch on a GPU would take them: pointers and numbers of the right width.
        body = re.sub(r"\\\n", " ", self.code)
        base, _, suffix = name.rpartition("_")
        signature = re.search(rf"__global__ void {base}_##suffix\(([^)]*)\)", body)[1]
        kinds = [kind.strip() for kind in signature.split(",")]

        def launch(grid, block, arguments):
            assert len(arguments) == len(kinds), f"{name} takes {len(kinds)} arguments, got {len(arguments)}"
            given = [_argument(kind, value, suffix) for kind, value in zip(kinds, arguments)]
            assert len(grid) == len(block) == 1 and 1 <= block[0] <= 1024 and grid[0] >= 1
            self.launches[name] = self.launches.get(name, 0) + 1
            with self.running:
                self._run(function, grid[0], block[0], given)

        return launch

    def _run(self, function, blocks, threads, given):
        self.library.host_launch(blocks, threads)

        def run(thread):
            for block in range(blocks):
                self.library.host_place(block, thread)
                function(*given)
                meeting.wait()  # blocks share the static memory, so one ends before the next begins

        meeting = threading.Barrier(threads)
        workers = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        self.library.host_finish()


def _argument(kind, value, suffix):
    element = {"f32": numpy.float32, "f64": numpy.float64}[suffix]
    types = {"T": element, "double": numpy.float64, "long long": numpy.int64}
    base = re.match(r"(?:const )?(T|double|long long)", kind)[1]
    if "*" in kind:
        assert value.dtype == types[base] and value.flags.c_contiguous, f"{kind} is given {value.dtype}{value.shape}"
        return ctypes.c_void_p(value.data.ptr)
    assert type(value) is types[base], f"{kind} is given {type(value).__name__}"
    by_type = {numpy.float32: ctypes.c_float, numpy.float64: ctypes.c_double, numpy.int64: ctypes.c_longlong}
    return by_type[type(value)](value)
