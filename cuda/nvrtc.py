"""Compile CUDA source for an architecture without a GPU, with NVIDIA's run-time compiler through ctypes.

CuPy compiles the same source by itself when it runs; this is for checking it where there is no GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from sbp.cuda.interface import BackendError

KERNELS = Path(__file__).with_name("kernels.cu")
"""The source of the fused kernels."""


def find_library() -> Path | None:
    """libnvrtc from the wheel nvidia-cuda-nvrtc-cu12 (or -cu13), else the system's; None if there is none."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        found = None
    for folder in found.submodule_search_locations or () if found else ():
        libraries = sorted(Path(folder).glob("c*/lib/libnvrtc.so.*"))
        if libraries:
            return libraries[-1]
    from ctypes.util import find_library as on_system

    name = on_system("nvrtc")
    return Path(name) if name else None


def compile_source(source: str, architecture: str, name: str = "kernels.cu", options: Sequence[str] = ()) -> str:
    """PTX of CUDA source.

    Parameters
    ----------
    source
        CUDA C++.
    architecture
        Such as `"compute_80"` (A100) or `"compute_90"` (H100).
    name
        The name that messages of the compiler give to the source.
    options
        Further options of the compiler.

    Raises
    ------
    BackendError
        There is no libnvrtc, or the source does not compile: then with the compiler's log.
    """
    path = find_library()
    if path is None:
        raise BackendError("no libnvrtc is installed; pip install nvidia-cuda-nvrtc-cu12.")
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    program = ctypes.c_void_p()

    def check(status: int, what: str) -> None:
        if status:
            raise BackendError(f"NVRTC failed to {what} {name}: {library.nvrtcGetErrorString(status).decode()}.")

    check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None),
        "take the source",
    )
    try:
        given = [f"--gpu-architecture={architecture}", "--std=c++17", *options]
        array = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        if library.nvrtcCompileProgram(program, len(given), array):
            log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
            raise BackendError(f"{name} does not compile for {architecture}:\n{log.strip()}")
        return _text(library.nvrtcGetPTXSize, library.nvrtcGetPTX, program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of, get, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.value.decode(errors="replace")
