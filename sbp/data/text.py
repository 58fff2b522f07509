"""Byte-level batches from a text file, or from a text that every Python brings along."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy

from sbp.errors import SbpError

VOCABULARY = 256
"""Every byte is a token."""


class DataError(SbpError):
    """A text that cannot be read or is too short."""


def default_text() -> bytes:
    """The Python language reference and tutorial as `help()` shows them: several hundred kB of English with code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: str | PathLike[str] | None = None) -> bytes:
    """The bytes of a text file; without a path, `default_text`.

    Raises
    ------
    DataError
        The file cannot be read.
    """
    if path is None:
        return default_text()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read the text {str(path)!r}: {error.strerror}; give the path of a text file."
        ) from None


def batches(
    path: str | PathLike[str] | None = None, batch: int = 8, sequence: int = 64, seed: int = 0, first: int = 0
) -> Iterator[dict[str, Any]]:
    """Endless random windows of a text, the same for the same seed; without the `first` so many batches.

    Yields
    ------
    dict
        `tokens` and `targets`, int64 (batch, sequence) each; the targets are the tokens one place on.

    Raises
    ------
    DataError
        The text cannot be read, or has no `sequence` + 1 bytes. Raised by the call, not by the first batch.
    """
    text = numpy.frombuffer(read_text(path), dtype=numpy.uint8)
    if batch < 1 or sequence < 1:
        raise DataError(f"batch and sequence must be at least 1, got batch {batch} and sequence {sequence}.")
    if len(text) < sequence + 1:
        raise DataError(
            f"the text {str(path)!r} has {len(text)} bytes, a sequence of {sequence} needs {sequence + 1}; "
            "give a longer text or a shorter sequence."
        )
    return _windows(text, batch, sequence, seed, first)


def _windows(text: Any, batch: int, sequence: int, seed: int, first: int) -> Iterator[dict[str, Any]]:
    random = numpy.random.default_rng(seed)
    for _ in range(first):
        random.integers(0, len(text) - sequence, batch)
    while True:
        starts = random.integers(0, len(text) - sequence, batch)
        windows = text[starts[:, None] + numpy.arange(sequence + 1)].astype(numpy.int64)
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}
