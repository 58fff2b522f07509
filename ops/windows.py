"""Sliding windows over spatial dimensions, shared by convolution and pooling. Works on NumPy and CuPy arrays alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from sbp.errors import RuleError

Sizes = tuple[int, ...]


def per_dimension(value: int | tuple[int, ...], count: int, what: str) -> Sizes:
    """One number per spatial dimension from a number or a tuple."""
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) != count or any(not isinstance(size, int) for size in sizes):
        raise RuleError(f"{what}={value!r} must be a whole number, or {count} of them")
    return sizes


@dataclass(frozen=True, slots=True)
class Windows:
    """Where windows of `kernel` lie in the spatial dimensions `size`; every field has one number per dimension."""

    size: Sizes
    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes

    @classmethod
    def of(cls, size: Sizes, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Windows:
        """From attributes that may be single numbers."""
        count = len(size)
        return cls(
            tuple(size),
            per_dimension(kernel, count, "kernel_size"),
            per_dimension(stride, count, "stride"),
            per_dimension(padding, count, "padding"),
            per_dimension(dilation, count, "dilation"),
        )

    def check(self) -> Windows:
        """Raise `RuleError` where the numbers make no sense globally (a rank's shard may well be empty)."""
        if min((*self.kernel, *self.stride, *self.dilation), default=1) < 1 or min(self.padding, default=0) < 0:
            raise RuleError(
                f"kernel {list(self.kernel)}, stride {list(self.stride)} and dilation {list(self.dilation)} must be at "
                f"least 1, padding {list(self.padding)} at least 0"
            )
        if min(self.counts, default=1) < 1:
            raise RuleError(
                f"windows of {list(self.kernel)} with dilation {list(self.dilation)} do not fit into {list(self.size)} "
                f"padded by {list(self.padding)}"
            )
        return self

    @property
    def tiles(self) -> tuple[bool, ...]:
        """Per dimension, whether the windows lie side by side and cover it, so that it can be split between them."""
        return tuple(
            stride == kernel and pad == 0 and (dilation == 1 or kernel == 1) and size == count * kernel
            for size, kernel, stride, pad, dilation, count in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, self.counts
            )
        )

    def terms(self, window: str = "", inside: str = "") -> tuple[str, str, str, dict[str, int]]:
        """How rules write the spatial dimensions of the input, the kernel and the windows, and the sizes of the names.

        A dimension in tiles is the compound (window, place inside it), with these marks; another one is never split.
        """
        size, kernel, windows, sizes = [], [], [], {}
        for number, tiled in enumerate(self.tiles):
            p, y = (f"p{number}{window}", f"y{number}{inside}") if tiled else (f"p{number}^", f"y{number}^")
            size.append(f"({p} {y})" if tiled else f"h{number}^")
            windows.append(p)
            kernel.append(y)
            sizes.update({f"p{number}": self.counts[number], f"y{number}": self.kernel[number]})
            if not tiled:
                sizes[f"h{number}"] = self.size[number]
        return " ".join(size), " ".join(kernel), " ".join(windows), sizes

    @property
    def counts(self) -> Sizes:
        """Number of windows, the spatial size of the output."""
        return tuple(
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation
            )
        )

    def pad(self, xp: Any, x: Any, value: float = 0) -> Any:
        """x (*b, *size) with the padding around."""
        if not any(self.padding):
            return x
        lead = x.ndim - len(self.size)
        padded = xp.full(
            (*x.shape[:lead], *(size + 2 * pad for size, pad in zip(self.size, self.padding))), value, x.dtype
        )
        padded[self._inner()] = x
        return padded

    def _inner(self) -> tuple:
        """Index of what is not padding."""
        return (..., *(slice(pad, pad + size) for size, pad in zip(self.size, self.padding)))

    def offsets(self) -> Iterator[tuple[int, tuple]]:
        """(flat number, index into the padded tensor) for each place inside the kernel: that place of every window."""
        for flat, place in enumerate(product(*map(range, self.kernel))):
            yield flat, (
                ...,
                *(
                    slice(at * dilation, at * dilation + stride * (count - 1) + 1, stride)
                    for at, dilation, stride, count in zip(place, self.dilation, self.stride, self.counts)
                ),
            )

    def gather(self, xp: Any, x: Any, value: float = 0) -> Any:
        """x (*b, *size) -> (*b, kernel elements, windows), padded with `value`."""
        lead = x.shape[: x.ndim - len(self.size)]
        padded = self.pad(xp, x, value)
        steps = padded.strides[len(lead) :]
        view = xp.lib.stride_tricks.as_strided(
            padded,
            (*lead, *self.kernel, *self.counts),
            (
                *padded.strides[: len(lead)],
                *(step * dilation for step, dilation in zip(steps, self.dilation)),
                *(step * stride for step, stride in zip(steps, self.stride)),
            ),
        )
        return view.reshape(*lead, math.prod(self.kernel), math.prod(self.counts))

    def scatter(self, xp: Any, columns: Any) -> Any:
        """The adjoint of `gather`: (*b, kernel elements, windows) -> (*b, *size), overlaps added."""
        lead = columns.shape[:-2]
        padded = xp.zeros((*lead, *(size + 2 * pad for size, pad in zip(self.size, self.padding))), columns.dtype)
        columns = columns.reshape(*lead, columns.shape[-2], *self.counts)
        leading = (slice(None),) * len(lead)
        for flat, index in self.offsets():
            place = (*leading, flat)
            padded[index] += columns[place]
        return padded[self._inner()]
