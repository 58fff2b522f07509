"""Cutting tensors and putting them together. A dimension that is cut is not split, the others are free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbp.dtype import holds
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.elementwise import add
from sbp.ops.precision import one_type
from sbp.ops.views import EVERY, normal_axis, operand, reshape, unsqueeze

# -- slice and its gradient --------------------------------------------------------------------------------------------

Bounds = tuple[tuple[int, int, int], ...]


def bounds(shape: Sequence[int], starts: Sequence, stops: Sequence, steps: Sequence | None) -> Bounds:
    """(first, end, step) per dimension, counted from the left; None and negative numbers as in Python's slices."""
    steps = (1,) * len(shape) if steps is None else steps
    if not len(starts) == len(stops) == len(steps) == len(shape):
        raise RuleError(f"starts, stops and steps need one number per dimension of {list(shape)}")
    if any(step is not None and step < 1 for step in steps):
        raise RuleError(f"steps {list(steps)} must be at least 1; use flip to reverse a dimension")
    found = []
    for size, start, stop, step in zip(shape, starts, stops, steps):
        first, end, stride = slice(start, stop, step).indices(size)
        found.append((first, max(first, end), stride))
    return tuple(found)


def _count(bound: tuple[int, int, int]) -> int:
    return len(range(*bound))


def _whole(bound: tuple[int, int, int], size: int) -> bool:
    return bound == (0, size, 1)


def _slice_rule(x: tuple[int, ...], *, starts: Any, stops: Any, steps: Any) -> tuple[str, dict[str, int]]:
    found = bounds(x, starts, stops, steps)
    cut = [not _whole(bound, size) for bound, size in zip(found, x)]
    before = [f"d{at}^" if cut[at] else f"d{at}" for at in range(len(x))]
    after = [f"c{at}^" if cut[at] else f"d{at}" for at in range(len(x))]
    return f"{operand(before)} -> {' '.join(after)}", {f"c{at}": _count(found[at]) for at in range(len(x)) if cut[at]}


@operator(_slice_rule, name="slice", **EVERY)
def slice_(xp, x, *, starts, stops, steps=None):
    """x[start:stop:step] in every dimension; None and negative numbers as in Python, steps of at least 1."""
    return x[tuple(slice(*bound) for bound in bounds(x.shape, starts, stops, steps))]


slice_.flops = lambda: 0
slice_.traffic = lambda elements_out, itemsize: 2 * elements_out * itemsize


@slice_.localize
def _(attributes, inputs, outputs):
    box = inputs[0]
    found = bounds(box.global_shape, attributes["starts"], attributes["stops"], attributes["steps"])
    found = tuple((0, local, 1) if _whole(b, size) else b for b, size, local in zip(found, box.global_shape, box.shape))
    starts, stops, steps = zip(*found) if found else ((), (), ())
    return {"starts": starts, "stops": stops, "steps": steps}


@slice_.gradient
def _(grad, x, *, starts, stops, steps):
    return slice_backward(grad, shape=tuple(x.shape), starts=starts, stops=stops, steps=steps)


slice_.case("f32[4,6]", starts=(0, 1), stops=(4, 5))
slice_.case("f32[7,3]", starts=(1, None), stops=(-1, None), steps=(2, 1))
slice_.case("f32[2,5,4]", starts=(1, 0, 0), stops=(2, 5, 4))
slice_.case("f32[4,6]", starts=(0, 0), stops=(4, 6))
slice_.reasons = {"S(*) -> S(*)": "some cuts happen to fall on the borders of shards"}


def _slice_backward_rule(grad: tuple[int, ...], *, shape: Any, starts: Any, stops: Any, steps: Any):
    found = bounds(shape, starts, stops, steps)
    if tuple(map(_count, found)) != tuple(grad):
        raise RuleError(f"the slice of {list(shape)} is not of shape {list(grad)}")
    cut = [not _whole(bound, size) for bound, size in zip(found, shape)]
    before = [f"c{at}^" if cut[at] else f"d{at}" for at in range(len(shape))]
    after = [f"d{at}^" if cut[at] else f"d{at}" for at in range(len(shape))]
    return f"{operand(before)} -> {' '.join(after)}", {f"d{at}": size for at, size in enumerate(shape)}


@operator(_slice_backward_rule, **EVERY)
def slice_backward(xp, grad, *, shape, starts, stops, steps=None):
    """Zeros of `shape`, with `grad` where the slice was: the gradient of `slice`."""
    out = xp.zeros(tuple(shape), grad.dtype)
    out[tuple(slice(*bound) for bound in bounds(shape, starts, stops, steps))] = grad
    return out


slice_backward.flops = lambda: 0


@slice_backward.localize
def _(attributes, inputs, outputs):
    box = outputs[0]
    found = bounds(box.global_shape, attributes["starts"], attributes["stops"], attributes["steps"])
    found = tuple((0, local, 1) if _whole(b, size) else b for b, size, local in zip(found, box.global_shape, box.shape))
    starts, stops, steps = zip(*found) if found else ((), (), ())
    return {"shape": box.shape, "starts": starts, "stops": stops, "steps": steps}


@slice_backward.gradient
def _(grad, x, *, starts, stops, steps):
    return slice_(grad, starts=starts, stops=stops, steps=steps)


slice_backward.case("f32[4,4]", shape=(4, 6), starts=(0, 1), stops=(4, 5))
slice_backward.case("f32[3,5]", shape=(7, 5), starts=(1, None), stops=(-1, None), steps=(2, 1))
slice_backward.case("f32[1,2,4]", shape=(3, 2, 4), starts=(-1, 0, 0), stops=(None, 2, 4))
slice_backward.reasons = slice_.reasons


def narrow(x: Any, axis: int, start: int, length: int) -> Any:
    """`length` elements from `start` on, along one dimension."""
    rank = len(x.shape)
    at = normal_axis(axis, rank)
    if not 0 <= start <= start + length <= x.shape[at]:
        raise RuleError(f"narrow: {length} elements from {start} on are not within dimension {at} of {list(x.shape)}")
    starts = tuple(start if k == at else 0 for k in range(rank))
    stops = tuple(start + length if k == at else size for k, size in enumerate(x.shape))
    return slice_(x, starts=starts, stops=stops)


def select(x: Any, axis: int, index: int) -> Any:
    """Element `index` of one dimension, which goes."""
    at = normal_axis(axis, len(x.shape))
    if not -x.shape[at] <= index < x.shape[at]:
        raise RuleError(f"index {index} is outside dimension {at} of {list(x.shape)}")
    cut = narrow(x, at, index % x.shape[at], 1)
    return reshape(cut, shape=tuple(size for k, size in enumerate(x.shape) if k != at))


# -- pad ---------------------------------------------------------------------------------------------------------------


def _pad_rule(x: tuple[int, ...], *, before: Any, after: Any, value: float) -> tuple[str, dict[str, int]]:
    if not len(before) == len(after) == len(x) or min((*before, *after), default=0) < 0:
        raise RuleError(f"before and after need one number of at least 0 per dimension of {list(x)}")
    wider = [bool(low or high) for low, high in zip(before, after)]
    left = [f"d{at}^" if wider[at] else f"d{at}" for at in range(len(x))]
    right = [f"p{at}^" if wider[at] else f"d{at}" for at in range(len(x))]
    sizes = {f"p{at}": x[at] + before[at] + after[at] for at in range(len(x)) if wider[at]}
    return f"{operand(left)} -> {' '.join(right)}", sizes


def _padded(x: TensorType, *, before: Any, after: Any, value: float) -> str:
    if not holds(x.dtype, value):
        raise RuleError(f"value {value} is none of the whole numbers that {x} holds; cast it to a floating type first")
    return x.dtype


@operator(
    _pad_rule, dtype=_padded, monotone="all", linear=lambda x, *, before, after, value: "all" if value == 0 else ""
)
def pad(xp, x, *, before, after, value=0):
    """With `before` and `after` further elements of `value` at the ends of every dimension."""
    return xp.pad(x, tuple(zip(before, after)), constant_values=value) if x.ndim else x


pad.flops = lambda: 0


@pad.gradient
def _(grad, x, *, before):
    return slice_(grad, starts=tuple(before), stops=tuple(low + size for low, size in zip(before, x.shape)))


pad.case("f32[4,6]", before=(0, 1), after=(0, 2))
pad.case("f32[5,3]", before=(1, 0), after=(0, 0), value=2.0)
pad.case("f32[2,3,1]", before=(0, 0, 0), after=(0, 0, 3))


# -- concat, split, stack ----------------------------------------------------------------------------------------------


def _concat_rule(*shapes: tuple[int, ...], axis: int) -> tuple[str, dict[str, int]]:
    if not shapes:
        raise RuleError("needs at least one tensor")
    rank = len(shapes[0])
    at = normal_axis(axis, rank)
    if any(len(shape) != rank for shape in shapes):
        raise RuleError(f"tensors of different ranks: {', '.join(str(list(shape)) for shape in shapes)}")
    mark = ["c"] if len(shapes) == 1 else [f"c{i}^" for i in range(len(shapes))]
    operands = [" ".join(mark[i] if k == at else f"d{k}" for k in range(rank)) for i in range(len(shapes))]
    out = " ".join("c" + "^" * (len(shapes) > 1) if k == at else f"d{k}" for k in range(rank))
    return f"{', '.join(operands)} -> {out}", {"c": sum(shape[at] for shape in shapes)}


@operator(_concat_rule, linear="all", monotone="all|each", dtype=one_type)
def concat(xp, *xs, axis=0):
    """Tensors one after the other along a dimension."""
    return xp.concatenate(xs, axis=axis)


concat.flops = lambda: 0


@concat.gradient
def _(grad, *xs, axis):
    if len(xs) == 1:
        return (grad,)
    return split(grad, sizes=tuple(x.shape[axis] for x in xs), axis=axis)


concat.case("f32[4,3]", "f32[4,5]", axis=1)
concat.case("f32[2,5]", "f32[1,5]", axis=-2)
concat.case("f32[1]", "f32[3]")
concat.case("f32[2,4]", axis=0)
concat.reasons = {
    "P(max), P(max), B -> *": "several of many operands being Partial is admitted only for one or all of them",
}


def _split_rule(x: tuple[int, ...], *, sizes: tuple[int, ...], axis: int) -> tuple[str, dict[str, int]]:
    at = normal_axis(axis, len(x))
    if sum(sizes) != x[at] or min(sizes, default=-1) < 0:
        raise RuleError(f"sizes {list(sizes)} must add up to {x[at]}, the size of dimension {at} of {list(x)}")
    if len(sizes) == 1:
        same = " ".join(f"d{k}" for k in range(len(x)))
        return f"{same} -> {same}", {}
    before = " ".join("c^" if k == at else f"d{k}" for k in range(len(x)))
    outs = [" ".join(f"c{i}^" if k == at else f"d{k}" for k in range(len(x))) for i in range(len(sizes))]
    return f"{before} -> {', '.join(outs)}", {f"c{i}": size for i, size in enumerate(sizes)}


@operator(_split_rule, outputs=("*out",), **EVERY)
def split(xp, x, *, sizes, axis=0):
    """Pieces of the given sizes along a dimension, one output each."""
    pieces, start = [], 0
    for size in sizes:
        index = [slice(None)] * x.ndim
        index[axis] = slice(start, start + size)
        pieces.append(x[tuple(index)])
        start += size
    return tuple(pieces)


split.flops = lambda: 0


@split.gradient
def _(grad, x, *, sizes, axis):
    if all(piece is not None for piece in grad):
        return grad[0] if len(grad) == 1 else concat(*grad, axis=axis)
    total, start = None, 0
    at = normal_axis(axis, len(x.shape))
    for size, piece in zip(sizes, grad):
        if piece is not None:
            before = tuple(start if k == at else 0 for k in range(len(x.shape)))
            after = tuple(x.shape[at] - start - size if k == at else 0 for k in range(len(x.shape)))
            wider = pad(piece, before=before, after=after)
            total = wider if total is None else add(total, wider)
        start += size
    return total


split.case("f32[4,6]", sizes=(2, 4), axis=1)
split.case("f32[5,3]", sizes=(1, 0, 4))
split.case("f32[2,3]", sizes=(3,), axis=-1)


def chunk(x: Any, chunks: int, axis: int = 0) -> tuple[Any, ...]:
    """At most `chunks` pieces of equal size (the last may be smaller), as `torch.chunk` cuts them."""
    size = x.shape[normal_axis(axis, len(x.shape))]
    step = max(1, -(-size // chunks))
    sizes = tuple(min(step, size - start) for start in range(0, size, step)) or (0,)
    return split(x, sizes=sizes, axis=axis)


def stack(*xs: Any, axis: int = 0) -> Any:
    """Tensors of one shape along a new dimension."""
    if not xs:
        raise RuleError("stack needs at least one tensor")
    return concat(*(unsqueeze(x, axis=axis) for x in xs), axis=axis)


# -- triangles ---------------------------------------------------------------------------------------------------------


def _triangle(name: str, text: str):
    def kernel(xp, x, *, diagonal=0):
        return getattr(xp, name)(x, diagonal)

    kernel.__name__, kernel.__doc__, kernel.__module__ = name, text, __name__
    op = operator("*b m n -> *b m n", **EVERY)(kernel)

    @op.localize
    def _(attributes, inputs, outputs):
        rows, columns = inputs[0].offset[-2:]
        return {**attributes, "diagonal": attributes["diagonal"] + rows - columns}

    @op.gradient
    def _(grad, x, *, diagonal):
        return op(grad, diagonal=diagonal)

    op.case("f32[4,6]")
    op.case("f32[5,3]", diagonal=1)
    op.case("f32[2,3,4]", diagonal=-2)
    return op


tril = _triangle("tril", "The elements on and below a diagonal of the last two dimensions, zeros above.")
triu = _triangle("triu", "The elements on and above a diagonal of the last two dimensions, zeros below.")
