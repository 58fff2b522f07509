"""Numbers of GPUs: what a program calls GPU 0 is what CUDA_VISIBLE_DEVICES names first."""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """The machine's numbers (or UUIDs) of the GPUs that a program sees, by the numbers it has for them.

    None where the variable is not set, and all are seen by their own numbers. As CUDA reads it: the list ends before
    the first entry that is no GPU, such as -1.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE)
    if text is None:
        return None
    found: list[str] = []
    for item in (piece.strip() for piece in text.split(",")):
        if not (item.isdecimal() or item.startswith(("GPU-", "MIG-"))) or item in found:
            break
        found.append(item)
    return tuple(found)


def device_text(device: int, environ: Mapping[str, str] | None = None) -> str:
    """`GPU 1`, and which one of the machine that is where the two numbers need not be the same."""
    seen = visible_devices(environ)
    if seen is None or device >= len(seen):
        return f"GPU {device}"
    return f"GPU {device} ({VARIABLE}={','.join(seen)}: the machine's {seen[device]})"
