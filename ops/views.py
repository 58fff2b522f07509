"""Views: the same elements in another shape or order, cut out, or put together. Every Partial passes through them."""

from __future__ import annotations

import math
from typing import Any

from sbp.errors import RuleError
from sbp.operator import operator
from sbp.ops.broadcasting import unbroadcast

EVERY = {"linear": "all", "monotone": "all"}
"""What an operator lets pass that moves elements and does not change them."""


def normal_axis(axis: int, rank: int) -> int:
    """A dimension number counted from the left; raises `RuleError` if there is none such."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise RuleError(f"there is no dimension {axis!r} among {rank}; count from 0, or backwards from -1")
    return axis % rank


def normal_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Dimension numbers in ascending order from an int, several, or None (all)."""
    if axis is None:
        return tuple(range(rank))
    found = sorted(normal_axis(item, rank) for item in (axis if isinstance(axis, (tuple, list)) else (axis,)))
    if len(set(found)) != len(found):
        raise RuleError(f"axis {axis!r} names a dimension twice")
    return tuple(found)


def operand(names: list[str] | tuple[str, ...]) -> str:
    """The pattern of the only input of a rule; one without dimensions is an empty group, as '' would be no input."""
    return " ".join(names) or "*none^"


def _names(rank: int) -> list[str]:
    return [f"d{number}" for number in range(rank)]


# -- reshape -----------------------------------------------------------------------------------------------------------


def complete_shape(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """A target shape with its -1 replaced; raises `RuleError` if the number of elements differs."""
    total, known = math.prod(shape), math.prod(size for size in target if size != -1)
    if target.count(-1) > 1 or any(size < -1 for size in target):
        raise RuleError(f"shape {list(target)} may hold one -1 and no other negative size")
    if -1 in target:
        if known == 0 or total % known:
            raise RuleError(f"{total} elements of shape {list(shape)} do not divide into {list(target)}")
        return tuple(total // known if size == -1 else size for size in target)
    if total != known:
        raise RuleError(f"shape {list(shape)} has {total} elements, {list(target)} has {known}")
    return target


def reshape_rule(shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    """The rule of a reshape: both shapes written as compounds of common factors, major ones first.

    Both shapes are walked from the left. A size that divides the other's remaining size is a factor of both; where
    neither divides the other, their greatest common divisor is, and the rest, up to where as many elements have passed
    on both sides, is never split: (6, 4) -> (4, 6) is "(f0 r1^) r2^ -> (f0 r3^) r4^" with f0 = 2.
    """
    sizes: dict[str, int] = {}

    def name(size: int, mark: str = "") -> str:
        label = f"f{len(sizes)}"
        sizes[label] = size
        return label + mark

    def text(terms: list[list[str]]) -> list[str]:
        return ["1" if not term else term[0] if len(term) == 1 else f"({' '.join(term)})" for term in terms]

    left: list[list[str]] = [[] for _ in shape]
    right: list[list[str]] = [[] for _ in target]
    if 0 in shape:  # no elements: only leading dimensions that are equal keep their meaning
        same = 0
        while same < min(len(shape), len(target)) and shape[same] == target[same]:
            left[same] = right[same] = [name(shape[same])]
            same += 1
        left[same:] = [[name(size, "^")] for size in shape[same:]]
        right[same:] = [[name(size, "^")] for size in target[same:]]
        return f"{operand(text(left))} -> {' '.join(text(right))}", sizes
    i = j = 0
    while i < len(shape) or j < len(target):
        if i < len(shape) and j < len(target) and shape[i] == target[j]:
            left[i] = right[j] = [name(shape[i])]
            i, j = i + 1, j + 1
            continue
        if i < len(shape) and shape[i] == 1:
            i += 1
            continue
        if j < len(target) and target[j] == 1:
            j += 1
            continue
        rest_in, rest_out = shape[i], target[j]
        aligned = True
        while True:
            common = math.gcd(rest_in, rest_out) if aligned else 1
            if common > 1:
                label = name(common)
                left[i].append(label)
                right[j].append(label)
                rest_in, rest_out = rest_in // common, rest_out // common
            if rest_in == 1 and rest_out == 1:
                break
            if rest_in != 1 and rest_out != 1:
                aligned = False
                i, j = _unaligned(shape, target, i, j, rest_in, rest_out, left, right, name)
                break
            if rest_in == 1:
                i += 1
                while shape[i] == 1:
                    i += 1
                rest_in = shape[i]
            else:
                j += 1
                while target[j] == 1:
                    j += 1
                rest_out = target[j]
        i, j = i + 1, j + 1
    return f"{operand(text(left))} -> {' '.join(text(right))}", sizes


def _unaligned(shape, target, i, j, rest_in, rest_out, left, right, name) -> tuple[int, int]:
    """Give the rest of dimensions i and j, and all that follow until both sides have as many elements, to no split."""
    left[i].append(name(rest_in, "^"))
    right[j].append(name(rest_out, "^"))
    passed_in, passed_out = rest_in, rest_out
    while passed_in != passed_out:
        if passed_in < passed_out:
            i += 1
            passed_in *= shape[i]
            if shape[i] != 1:
                left[i] = [name(shape[i], "^")]
        else:
            j += 1
            passed_out *= target[j]
            if target[j] != 1:
                right[j] = [name(target[j], "^")]
    return i, j


@operator(lambda x, *, shape: reshape_rule(x, complete_shape(x, tuple(shape))), **EVERY)
def reshape(xp, x, *, shape):
    """The same elements in row-major order in another shape, in which one size may be -1."""
    return x.reshape(tuple(shape))


reshape.flops = reshape.traffic = lambda: 0
reshape.view = True


@reshape.localize
def _(attributes, inputs, outputs):
    return {**attributes, "shape": outputs[0].shape}


@reshape.gradient
def _(grad, x):
    return reshape(grad, shape=x.shape)


for _shape, _target in (
    ("4,6", (24,)), ("8,4", (2, 4, 4)), ("6,4", (4, 6)), ("2,3,4", (6, -1)), ("5,1,4", (5, 2, 2)),
    ("4,6", (2, 2, 3, 2)), ("1,5", (5, 1)), ("7", (1, 7)), ("4,3,2", (4, 2, 3)),
    ("4,3,2,4", (2, 12, 4)),
):  # fmt: skip
    reshape.case(f"f32[{_shape}]", shape=_target)


@operator("*d -> *d", **EVERY)
def detach(xp, x):
    """The same tensor, through which no gradient flows."""
    return x


detach.flops = detach.traffic = lambda: 0
detach.view = True
detach.gradient(lambda grad, x: None)
detach.case("f32[4,6]")
detach.case("f32[5]")
detach.case("i64[2,1,3]")


# -- order and size-one dimensions -------------------------------------------------------------------------------------


def _permute_rule(x: tuple[int, ...], *, order: tuple[int, ...]) -> str:
    if sorted(normal_axis(axis, len(x)) for axis in order) != list(range(len(x))):
        raise RuleError(f"order {list(order)} must name each of the {len(x)} dimensions of {list(x)} once")
    names = _names(len(x))
    return f"{operand(names)} -> {' '.join(names[axis] for axis in order)}"


@operator(_permute_rule, **EVERY)
def permute(xp, x, *, order):
    """Dimensions in another order: dimension i of the result is dimension order[i] of x."""
    return xp.transpose(x, tuple(order))


permute.flops = lambda: 0


@permute.gradient
def _(grad, x, *, order):
    rank = len(x.shape)
    inverse = sorted(range(rank), key=lambda axis: order[axis] % rank)
    return permute(grad, order=tuple(inverse))


permute.case("f32[4,6]", order=(1, 0))
permute.case("f32[2,5,3]", order=(2, 0, 1))
permute.case("i64[1,4]", order=(-1, 0))


def _transpose_rule(x: tuple[int, ...], *, first: int, second: int) -> str:
    before = _names(len(x))
    after = list(before)
    i, j = normal_axis(first, len(x)), normal_axis(second, len(x))
    after[i], after[j] = after[j], after[i]
    return f"{operand(before)} -> {' '.join(after)}"


@operator(_transpose_rule, **EVERY)
def transpose(xp, x, *, first=-2, second=-1):
    """Two dimensions exchanged."""
    return xp.swapaxes(x, first, second)


transpose.flops = lambda: 0


@transpose.gradient
def _(grad, x, *, first, second):
    return transpose(grad, first=first, second=second)


transpose.case("f32[4,6]")
transpose.case("f32[3,1,5]", first=0, second=2)
transpose.case("i64[2,1,4,3]", first=1, second=-1)


def _squeeze_rule(x: tuple[int, ...], *, axis: Any) -> str:
    ones = tuple(number for number, size in enumerate(x) if size == 1)
    dropped = set(normal_axes(ones if axis is None else axis, len(x)))
    for number in dropped:
        if x[number] != 1:
            raise RuleError(f"dimension {number} of {list(x)} has size {x[number]}; only size one can be dropped")
    names = ["1" if number in dropped else f"d{number}" for number in range(len(x))]
    return f"{operand(names)} -> {' '.join(name for name in names if name != '1')}"


@operator(_squeeze_rule, **EVERY)
def squeeze(xp, x, *, axis=None):
    """Without the dimensions `axis` of size one (an int, several, or None: all of size one)."""
    return xp.squeeze(x, axis=tuple(axis) if isinstance(axis, list) else axis)


squeeze.flops = squeeze.traffic = lambda: 0
squeeze.view = True


@squeeze.localize
def _(attributes, inputs, outputs):
    if attributes["axis"] is not None:
        return attributes
    # A shard of a longer dimension may have size one as well: drop only what has size one globally.
    return {**attributes, "axis": tuple(axis for axis, size in enumerate(inputs[0].global_shape) if size == 1)}


@squeeze.gradient
def _(grad, x):
    return reshape(grad, shape=x.shape)


squeeze.case("f32[4,1,6]", axis=1)
squeeze.case("f32[1,3,1]")
squeeze.case("f32[1,5,1]", axis=(0, -1))


def _unsqueeze_rule(x: tuple[int, ...], *, axis: Any) -> str:
    rank = len(x) + (len(axis) if isinstance(axis, (tuple, list)) else 1)
    added = normal_axes(axis, rank)
    names = iter(_names(len(x)))
    return f"{operand(_names(len(x)))} -> {' '.join('1' if at in added else next(names) for at in range(rank))}"


@operator(_unsqueeze_rule, **EVERY)
def unsqueeze(xp, x, *, axis):
    """With new dimensions of size one at the places `axis` (an int or several) of the result."""
    return xp.expand_dims(x, tuple(axis) if isinstance(axis, list) else axis)


unsqueeze.flops = unsqueeze.traffic = lambda: 0
unsqueeze.view = True


@unsqueeze.gradient
def _(grad, x):
    return reshape(grad, shape=x.shape)


unsqueeze.case("f32[4,6]", axis=1)
unsqueeze.case("f32[5]", axis=-1)
unsqueeze.case("f32[3,2]", axis=(0, 3))
unsqueeze.case("f32[]", axis=0)


# -- expand ------------------------------------------------------------------------------------------------------------


def _expand_rule(x: tuple[int, ...], *, shape: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    added = len(shape) - len(x)
    if added < 0 or -1 in shape[:added]:
        raise RuleError(
            f"cannot expand {list(x)} to {list(shape)}; -1 only keeps the size of a dimension that is there"
        )
    sizes: dict[str, int] = {}
    before, after = [], []
    for at, size in enumerate(shape):
        old = x[at - added] if at >= added else None
        if old is not None and size in (-1, old):
            before.append(f"d{at}")
            after.append(f"d{at}")
        elif old in (None, 1):
            before += ["1"] if old == 1 else []
            after.append(f"e{at}")
            sizes[f"e{at}"] = size
        else:
            raise RuleError(f"cannot expand dimension {at - added} of {list(x)} from {old} to {size}; only 1 repeats")
    return f"{operand(before)} -> {' '.join(after)}", sizes


@operator(_expand_rule, **EVERY)
def expand(xp, x, *, shape):
    """Dimensions of size one repeated to `shape` (-1 keeps a size), new dimensions added on the left."""
    added = len(shape) - x.ndim
    return xp.broadcast_to(x, tuple(x.shape[at - added] if size == -1 else size for at, size in enumerate(shape)))


expand.flops = expand.traffic = lambda: 0


@expand.localize
def _(attributes, inputs, outputs):
    return {**attributes, "shape": outputs[0].shape}


@expand.gradient
def _(grad, x):
    return unbroadcast(grad, x)


expand.case("f32[1,6]", shape=(4, 6))
expand.case("f32[5]", shape=(3, -1))
expand.case("f32[]", shape=(2, 3))
expand.case("f32[2,1,3]", shape=(2, 4, 3))
