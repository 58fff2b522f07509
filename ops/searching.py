"""Finding and counting: where numbers belong in a sorted sequence, which are among others, how often each occurs.

All of these count or ask "is there one", so that the sequence that is searched may be split: counts are parts of a sum,
answers parts of a maximum.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from sbp.dtype import is_floating
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.comparison import equal_number
from sbp.ops.elementwise import cast, clamp, scale, shift
from sbp.ops.elementwise import floor as floor_
from sbp.ops.reduction import sum_
from sbp.ops.slicing import pad
from sbp.ops.views import reshape


def _searched_rule(sequence: tuple[int, ...], values: tuple[int, ...], *, right: bool) -> str:
    if len(sequence) == 1:
        return "n+, ... -> ..."
    if sequence[:-1] != values[:-1]:
        raise RuleError(f"sequences {list(sequence)} and values {list(values)} differ before the last dimension")
    lead = " ".join(f"d{number}" for number in range(len(sequence) - 1))
    return f"{lead} n+, {lead} k -> {lead} k"


@operator(_searched_rule, monotone="values", dtype=lambda *_, **__: "i64")
def searchsorted(xp, sequence, values, *, right=False):
    """How many elements of a sequence are less than each value: where it belongs in a sorted one (torch.searchsorted).

    sequence (n,) with values of any shape, or (*b, n) with values (*b, k). `right` counts equal elements, too.
    """
    side = "right" if right else "left"
    ordered = xp.sort(sequence, axis=-1)  # a count does not ask for an order, and what is sorted stays so
    if sequence.ndim == 1:
        return xp.searchsorted(ordered, values.reshape(-1), side=side).reshape(values.shape).astype(xp.int64)
    made = xp.zeros(values.shape, dtype=xp.int64)
    for place in product(*map(range, values.shape[:-1])):
        made[place] = xp.searchsorted(ordered[place], values[place], side=side)
    return made


# A binary search in n elements takes log2(n) comparisons; one more keeps empty sequences from counting as free.
searchsorted.flops = lambda n, elements_out: elements_out * (int(n).bit_length() + 1)


def bucketize(values: Any, boundaries: Any, right: bool = False) -> Any:
    """The number of the interval between sorted `boundaries` (n,) in which each value lies (torch.bucketize)."""
    return searchsorted(boundaries, values, right=right)


@operator("..., t> -> ...", dtype=lambda *_, **__: "bool")
def isin(xp, x, tests):
    """Whether each element of x is one of `tests` (t,)."""
    return xp.isin(x, tests)


def _counted_rule(x: tuple[int, ...], *, size: int, offset: int) -> tuple[str, dict[str, int]]:
    if size < 0:
        raise RuleError(f"size={size} must be at least 0: how many different numbers are counted")
    return "*b+ -> v", {"v": size}


def _counted_type(x: TensorType, **attributes: Any) -> str:
    if is_floating(x.dtype) or x.dtype == "bool":
        raise RuleError(f"counts integers, got {x}")
    return "i64"


@operator(_counted_rule, dtype=_counted_type)
def bincount(xp, x, *, size, offset=0):
    """How often each of the numbers 0 to size - 1 occurs in x: (size,); others are not counted.

    torch.bincount makes its result as long as the largest number asks for, which a graph of known shapes cannot.
    `offset`, the number that is counted first, is set for shards.
    """
    places = x.reshape(-1) - offset
    return xp.bincount(places[(places >= 0) & (places < size)], minlength=size)[:size].astype(xp.int64)


@bincount.localize
def _(attributes, inputs, outputs):
    (start,), (size,) = outputs[0].offset, outputs[0].shape
    return {**attributes, "size": size, "offset": attributes["offset"] + start}


def histc(x: Any, bins: int, low: float, high: float) -> Any:
    """How many elements of x lie in each of `bins` equal intervals from `low` to `high`: (bins,) of x's type.

    The last interval includes `high`; what lies outside is not counted (torch.histc, whose limits must be given here).
    """
    if not low < high or bins < 1:
        raise RuleError(f"histc takes low below high and at least one bin, got low={low}, high={high}, bins={bins}")
    flat = reshape(x, shape=(-1,))
    places = floor_(scale(shift(flat, amount=-float(low)), factor=bins / (float(high) - float(low))))
    last = cast(clamp(places, low=-1.0, high=float(bins)), dtype="i64")
    counts = bincount(last, size=bins)
    # The upper limit itself comes out one interval too far.
    edge = sum_(cast(equal_number(flat, number=float(high)), dtype="i64"), axis=(0,), keepdims=True)
    return cast(counts + pad(edge, before=(bins - 1,), after=(0,)), dtype=x.dtype)


searchsorted.case("f32[4]", "f32[3,5]")
searchsorted.case("f32[7]", "f32[5]", right=True)
searchsorted.case("f32[1]", "f32[1]")
searchsorted.case("i64[5]", "i64[2,3]")
searchsorted.reasons["P(m??), B -> P(m??)"] = "only the count in a sequence of one number falls with it"
isin.case("i64[4,6]", "i64[5]")
isin.case("i64[5]", "i64[1]")
isin.case("i64[2,1,3]", "i64[4]")
isin.flops = lambda elements_out, t: elements_out * t
bincount.case("i64[4,6]", size=5, ranges={"x": (0, 7)})
bincount.case("i64[7]", size=4, ranges={"x": (-1, 4)})
bincount.case("i64[1,5]", size=2, ranges={"x": (0, 3)})
searchsorted.case("f32[2,4]", "f32[2,3]")
