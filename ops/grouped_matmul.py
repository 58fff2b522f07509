"""Matrix products of consecutive groups of rows, each with a weight of its own: experts on tokens sorted by expert.

How long each group is the data says, so a split of the rows or of the experts leaves ranks that may differ in work;
what is counted is the even share.
"""

from __future__ import annotations

from typing import Any

from sbp.dtype import is_floating
from sbp.errors import RuleError
from sbp.operator import TensorType, operator
from sbp.ops.precision import one_type
from sbp.ops.views import transpose


def _types(x: TensorType, y: TensorType, ends: TensorType, **_: Any) -> str:
    if is_floating(ends.dtype) or ends.dtype == "bool":
        raise RuleError(f"the ends of groups are whole numbers, got {ends}")
    return one_type(x, y)


def _groups(ends: Any, first: int, groups: int, start: int, rows: int):
    """(group, first row, end) of the groups from `first` on, in rows counted from `start`; empty ones are left out."""
    bounds = [0, *ends.tolist()]
    for group in range(groups):
        begin = min(max(bounds[first + group] - start, 0), rows)
        end = min(max(bounds[first + group + 1] - start, 0), rows)
        if begin < end:
            yield group, begin, end


@operator("t k+, e+ k+ n, g^ -> t n", linear="x | w", dtype=_types)
def grouped_matmul(xp, x, w, ends, *, first=0, start=0):
    """x (t, k) times w[e] (e, k, n) for the rows of group e -> (t, n); rows of no group give zeros.

    Group e is the rows from ends[e - 1] (0 for the first) to ends[e], ends (e,) ascending. `first`, the number of the
    first expert, and `start`, that of the first row, are set for shards.
    """
    out = xp.zeros((x.shape[0], w.shape[2]), x.dtype)
    for group, begin, end in _groups(ends, first, w.shape[0], start, x.shape[0]):
        out[begin:end] += xp.matmul(x[begin:end], w[group])
    return out


@grouped_matmul.localize
def _(attributes, inputs, outputs):
    return {"first": attributes["first"] + inputs[1].offset[0], "start": attributes["start"] + inputs[0].offset[0]}


@grouped_matmul.gradient
def _(grad, x, w, ends):
    dw = grouped_weight_gradient(x, grad, ends)
    return grouped_matmul(grad, transpose(w), ends), dw, None


@operator(
    lambda x, y, ends, **_: ("t+ k, t+ n, g^ -> e k n", {"e": ends[0]}),
    linear="x | y",
    dtype=_types,
)
def grouped_weight_gradient(xp, x, y, ends, *, first=0, start=0, groups=None):
    """x[group]^T y[group] for every group of rows: x (t, k), y (t, n), ends (e,) -> (e, k, n)."""
    groups = ends.shape[0] if groups is None else groups
    out = xp.zeros((groups, x.shape[1], y.shape[1]), x.dtype)
    for group, begin, end in _groups(ends, first, groups, start, x.shape[0]):
        out[group] += xp.matmul(x[begin:end].swapaxes(0, 1), y[begin:end])
    return out


@grouped_weight_gradient.localize
def _(attributes, inputs, outputs):
    return {
        "first": attributes["first"] + outputs[0].offset[0],
        "start": attributes["start"] + inputs[0].offset[0],
        "groups": outputs[0].shape[0],
    }


@grouped_weight_gradient.gradient
def _(grad, x, y, ends):
    return grouped_matmul(y, transpose(grad), ends), grouped_matmul(x, grad, ends), None


grouped_matmul.flops = lambda t, k, n, e, g: 2 * t * k * n * e / (g or 1)
grouped_weight_gradient.flops = lambda t, k, n, e, g: 2 * t * k * n * e / (g or 1)

for _x, _w, _y, _ends in (
    ("f32[5,3]", "f32[2,3,4]", "f32[5,4]", "i64[2]"),
    ("f32[6,2]", "f32[3,2,2]", "f32[6,2]", "i32[3]"),
    ("f32[4,1]", "f32[4,1,3]", "f32[4,3]", "i64[4]"),
):
    _rows = int(_x[4])
    grouped_matmul.case(_x, _w, _ends, ranges={"ends": (0, _rows + 2)})
    grouped_weight_gradient.case(_x, _y, _ends, ranges={"ends": (0, _rows + 2)})
