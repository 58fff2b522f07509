"""Pairwise interactions of feature vectors, as DLRM uses them (Naumov et al. 2019, arXiv:1906.00091)."""

from __future__ import annotations

from typing import Any

from sbp.errors import RuleError
from sbp.operator import operator


def _places(xp: Any, size: int) -> Any:
    """Places of the entries below the diagonal in a flat (size, size) matrix, row by row."""
    places = xp.arange(size * size)
    return places[places // max(size, 1) > places % max(size, 1)]


def _triangle_rule(x: tuple[int, ...]) -> tuple[str, dict[str, int]]:
    if len(x) < 2 or x[-1] != x[-2]:
        raise RuleError(f"takes square matrices (*b, f, f), got shape {list(x)}")
    return "*b f^ f^ -> *b p^", {"p": x[-1] * (x[-1] - 1) // 2}


@operator(_triangle_rule, linear="all", monotone="all")
def lower_triangle(xp, x):
    """Entries strictly below the diagonal, row by row: x (*b, f, f) -> (*b, f (f - 1) / 2)."""
    size = x.shape[-1]
    return x.reshape(*x.shape[:-2], size * size)[..., _places(xp, size)]


@lower_triangle.gradient
def _(grad, x):
    return lower_triangle_backward(grad, size=x.shape[-1])


lower_triangle.case("f32[4,5,5]")
lower_triangle.case("f32[2,3,2,2]")
lower_triangle.case("f32[5,3,3]")


def _backward_rule(grad: tuple[int, ...], *, size: int) -> tuple[str, dict[str, int]]:
    if not grad or grad[-1] != size * (size - 1) // 2:
        raise RuleError(f"takes {size * (size - 1) // 2} entries for matrices of size {size}, got shape {list(grad)}")
    return "*b p^ -> *b f^ f^", {"f": size}


@operator(_backward_rule, linear="all", monotone="all")
def lower_triangle_backward(xp, grad, *, size):
    """Matrices (*b, size, size) with `grad` (*b, size (size - 1) / 2) below the diagonal and zeros elsewhere."""
    out = xp.zeros((*grad.shape[:-1], size * size), grad.dtype)
    out[..., _places(xp, size)] = grad
    return out.reshape(*grad.shape[:-1], size, size)


@lower_triangle_backward.gradient
def _(grad, entries):
    return lower_triangle(grad)


lower_triangle_backward.case("f32[4,10]", size=5)
lower_triangle_backward.case("f32[2,3,1]", size=2)
lower_triangle_backward.case("f32[5,3]", size=3)
