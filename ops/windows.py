"""Sliding windows over spatial dimensions, shared by convolution and pooling. Works on NumPy and CuPy arrays alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from sbp.errors import RuleError
from sbp.layout import Shard

Sizes = tuple[int, ...]


def per_dimension(value: int | tuple[int, ...], count: int, what: str) -> Sizes:
    """One number per spatial dimension from a number or a tuple."""
    sizes = (value,) * count if isinstance(value, int) else tuple(value)
    if len(sizes) != count or any(not isinstance(size, int) for size in sizes):
        raise RuleError(f"{what}={value!r} must be a whole number, or {count} of them")
    return sizes


def paddings(value: Any, count: int) -> tuple[tuple[int, int], ...]:
    """(before, after) per spatial dimension from a number, one number per dimension, or one such pair per dimension."""
    wide = (value,) * count if isinstance(value, int) else tuple(value)
    pairs = tuple((each, each) if isinstance(each, int) else tuple(each) for each in wide)
    if len(pairs) != count or any(len(pair) != 2 or not all(isinstance(n, int) for n in pair) for pair in pairs):
        raise RuleError(
            f"padding={value!r} must be a whole number, or {count} of them, or {count} pairs (before, after)"
        )
    return pairs


@dataclass(frozen=True, slots=True)
class Windows:
    """Where windows of `kernel` lie in the spatial dimensions `size`; every field has one number per dimension.

    `padding` has pairs (before, after); negative ones leave out what a rank holds and no window of its own covers.
    """

    size: Sizes
    kernel: Sizes
    stride: Sizes
    padding: tuple[tuple[int, int], ...]
    dilation: Sizes

    @classmethod
    def of(cls, size: Sizes, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Windows:
        """From attributes that may be single numbers."""
        count = len(size)
        return cls(
            tuple(size),
            per_dimension(kernel, count, "kernel_size"),
            per_dimension(stride, count, "stride"),
            paddings(padding, count),
            per_dimension(dilation, count, "dilation"),
        )

    def check(self) -> Windows:
        """Raise `RuleError` where the numbers make no sense globally (a rank's shard may well be empty)."""
        least = min((*self.kernel, *self.stride, *self.dilation), default=1)
        if least < 1 or min(map(min, self.padding), default=0) < 0:
            raise RuleError(
                f"kernel {list(self.kernel)}, stride {list(self.stride)} and dilation {list(self.dilation)} must be at "
                f"least 1, padding {self.written_padding!r} at least 0"
            )
        if min(self.counts, default=1) < 1:
            raise RuleError(
                f"windows of {list(self.kernel)} with dilation {list(self.dilation)} do not fit into {list(self.size)} "
                f"padded by {self.written_padding!r}"
            )
        return self

    @property
    def tiles(self) -> tuple[bool, ...]:
        """Per dimension, whether the windows lie side by side and cover it, so that it can be split between them."""
        return tuple(
            stride == kernel and pad == (0, 0) and (dilation == 1 or kernel == 1) and size == count * kernel
            for size, kernel, stride, pad, dilation, count in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation, self.counts
            )
        )

    @property
    def written_padding(self) -> tuple:
        """The padding as an attribute says it: one number where both sides are equal."""
        return tuple(pair[0] if pair[0] == pair[1] else pair for pair in self.padding)

    def terms(self, window: str = "", inside: str = "") -> tuple[str, str, str, dict[str, int]]:
        """How rules write the spatial dimensions of the input, the kernel and the windows, and the sizes of the names.

        A dimension in tiles is the compound (window, place inside it), with these marks; another one is split along
        with its windows, of which a rank reads those that it needs from its neighbours.
        """
        size, kernel, windows, sizes = [], [], [], {}
        for number, tiled in enumerate(self.tiles):
            p, y = (f"p{number}{window}", f"y{number}{inside}") if tiled else (f"p{number}{window}", f"y{number}^")
            size.append(f"({p} {y})" if tiled else f"h{number}~p{number}")
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
            (size + sum(pad) - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation
            )
        )

    def covered(self, dimension: int, windows: tuple[int, int]) -> tuple[int, int]:
        """Start and stop of the cells, padding included, that a range (first, number) of windows spans."""
        first, number = windows
        start = first * self.stride[dimension] - self.padding[dimension][0]
        last = start + (number - 1) * self.stride[dimension]
        return start, last + self.dilation[dimension] * (self.kernel[dimension] - 1) + 1

    def touching(self, dimension: int, cells: tuple[int, int]) -> tuple[int, int]:
        """The range (first, number) of windows that reach into a range (offset, size) of cells."""
        offset, size = cells
        stride, reach = self.stride[dimension], self.dilation[dimension] * (self.kernel[dimension] - 1)
        before = self.padding[dimension][0]
        first = min(max(0, -(-(offset + before - reach) // stride)), self.counts[dimension])
        stop = min(self.counts[dimension], (offset + size - 1 + before) // stride + 1)
        return (first, max(0, stop - first)) if size else (first, 0)

    def local_padding(self, cells: Shard, windows: Shard) -> tuple:
        """The padding with which a rank's windows lie around its cells; both shards end in the spatial dimensions."""
        count = len(self.size)
        sides = []
        for number in range(count):
            at = number - count
            start, stop = self.covered(number, (windows.offset[at], windows.shape[at]))
            sides.append((cells.offset[at] - start, stop - cells.offset[at] - cells.shape[at]))
        # What no window covers at the end of an unsplit dimension needs no cutting; tiles lie in shards as they are.
        whole = [tiled or (cells.shape[at] == size and n == made) for at, size, n, made, tiled in zip(
            range(-count, 0), self.size, windows.shape[-count:], self.counts, self.tiles)]  # fmt: skip
        return tuple(
            own if keep else (pair[0] if pair[0] == pair[1] >= 0 else pair)
            for keep, own, pair in zip(whole, self.written_padding, sides)
        )

    def cells_read(self, held: Shard, windows: Shard) -> Shard:
        """The box of the cells that a rank's windows cover, or what it holds if that contains it."""
        return _spatial_box(held, self.tiles, [
            _clipped(self.covered(number, (windows.offset[at], windows.shape[at])), size)
            for number, (at, size) in enumerate(zip(range(-len(self.size), 0), self.size))
        ])  # fmt: skip

    def windows_read(self, held: Shard, cells: Shard) -> Shard:
        """The box of the windows that reach into a rank's cells, or what it holds if that contains it."""
        return _spatial_box(held, self.tiles, [
            self.touching(number, (cells.offset[at], cells.shape[at]))
            for number, at in enumerate(range(-len(self.size), 0))
        ])  # fmt: skip

    def pad(self, xp: Any, x: Any, value: float = 0) -> Any:
        """x (*b, *size) with the padding around, or without what it leaves out."""
        if not any(map(any, self.padding)):
            return x
        lead = x.ndim - len(self.size)
        padded = xp.full((*x.shape[:lead], *self._padded_size()), value, x.dtype)
        inner, outer = self._inner()
        padded[outer] = x[inner]
        return padded

    def _padded_size(self) -> Sizes:
        return tuple(size + sum(pad) for size, pad in zip(self.size, self.padding))

    def _inner(self) -> tuple[tuple, tuple]:
        """Indices of what is neither padding nor left out: among the cells, and among the padded cells."""
        inner, outer = [], []
        for size, (before, after) in zip(self.size, self.padding):
            start, stop = max(0, -before), min(size, size + after)
            stop = max(start, stop)
            inner.append(slice(start, stop))
            outer.append(slice(start + before, stop + before) if stop > start else slice(0, 0))
        return (..., *inner), (..., *outer)

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
        padded = xp.zeros((*lead, *self._padded_size()), columns.dtype)
        columns = columns.reshape(*lead, columns.shape[-2], *self.counts)
        leading = (slice(None),) * len(lead)
        for flat, index in self.offsets():
            place = (*leading, flat)
            padded[index] += columns[place]
        if not any(map(any, self.padding)):
            return padded
        inner, outer = self._inner()
        if all(n >= 0 for pair in self.padding for n in pair):
            return padded[outer]
        cells = xp.zeros((*lead, *self.size), columns.dtype)
        cells[inner] = padded[outer]
        return cells


SLICED = (
    "a whole input is sliced for nothing before, and the ranks then fetch the borders of their windows: "
    "the signature that splits it along with the windows says that"
)
SUMMED = "windows split along with their places make shards, for the price of borders, instead of parts of the whole"
CHANCE = "some windows happen to lie in one shard each"


def _clipped(span: tuple[int, int], size: int) -> tuple[int, int]:
    """(offset, length) of the part of a span (start, stop) that is no padding."""
    start = min(max(span[0], 0), size)
    return start, max(min(span[1], size) - start, 0)


def _spatial_box(held: Shard, tiles: tuple[bool, ...], wanted: list[tuple[int, int]]) -> Shard:
    """The shard with these (offset, length) in the last dimensions, but as it is where it contains them or is tiled."""
    offset, shape = list(held.offset), list(held.shape)
    for number, (tiled, (start, length)) in enumerate(zip(tiles, wanted)):
        at = number - len(tiles)
        if not tiled and not (length == 0 or (offset[at] <= start and start + length <= offset[at] + shape[at])):
            offset[at], shape[at] = start, length
    return Shard(held.global_shape, tuple(offset), tuple(shape))
