"""Matrix products: batched, with PyTorch's weight layout, outer, and by an einsum text."""

from __future__ import annotations

import math
import re
from typing import Any

from sbp.errors import RuleError
from sbp.operator import operator
from sbp.ops.broadcasting import unbroadcast
from sbp.ops.precision import one_type
from sbp.ops.reduction import sum_
from sbp.ops.slicing import tril, triu
from sbp.ops.views import expand, operand, permute, reshape, transpose, unsqueeze


@operator("*b m k+, *b k+ n -> *b m n", linear="each", dtype=one_type)
def matmul(xp, x, w):
    """Batched matrix product: x (*b, m, k), w (*b, k, n) -> (*b, m, n); batch dimensions broadcast."""
    return xp.matmul(x, w)


matmul.flops = lambda b, m, k, n: 2 * b * m * k * n
matmul.product = lambda b, m, k, n: (b, m, n, k)


@matmul.gradient
def _(grad, x, w):
    if len(w.shape) == 2:  # one matrix for the whole batch: its gradient sums over the batch inside the product
        return linear(grad, w), linear_weight_gradient(x, grad)
    return (
        unbroadcast(matmul(grad, transpose(w)), x),
        unbroadcast(matmul(transpose(x), grad), w),
    )


matmul.case("f32[4,6]", "f32[6,5]")
matmul.case("f32[2,3,4]", "f32[4,5]")
matmul.case("f32[2,1,3,2]", "f32[3,2,5]")
matmul.case("f32[3,1,4]", "f32[3,4,1]")


@operator("*b k+, n k+ -> *b n", linear="each", dtype=one_type)
def linear(xp, x, w):
    """Product with a weight in PyTorch's layout: x (*b, k), w (n, k) -> (*b, n)."""
    rows = math.prod(x.shape[:-1])
    return xp.matmul(x.reshape(rows, x.shape[-1]), w.T).reshape(*x.shape[:-1], w.shape[0])


linear.flops = lambda b, k, n: 2 * b * k * n
linear.product = lambda b, k, n: (1, b, n, k)


@linear.gradient
def _(grad, x, w):
    dx = matmul(grad, w) if len(grad.shape) > 1 else linear(grad, transpose(w))
    return dx, linear_weight_gradient(grad, x)


linear.case("f32[4,6]", "f32[5,6]")
linear.case("f32[2,3,4]", "f32[7,4]")
linear.case("f32[5]", "f32[3,5]")
linear.case("f32[1,4,1]", "f32[2,1]")


@operator("*b+ n, *b+ k -> n k", linear="each", dtype=one_type)
def linear_weight_gradient(xp, grad, x):
    """Sum over the batch of outer products: grad (*b, n), x (*b, k) -> (n, k), the weight gradient of `linear`."""
    rows = math.prod(x.shape[:-1])
    return xp.matmul(grad.reshape(rows, grad.shape[-1]).T, x.reshape(rows, x.shape[-1]))


linear_weight_gradient.flops = lambda b, n, k: 2 * b * n * k
linear_weight_gradient.product = lambda b, n, k: (1, n, k, b)


@linear_weight_gradient.gradient
def _(grad, left, right):
    if len(left.shape) == 1:
        return linear(right, grad), linear(left, transpose(grad))
    return linear(right, grad), matmul(left, grad)


linear_weight_gradient.case("f32[4,6]", "f32[4,5]")
linear_weight_gradient.case("f32[2,3,4]", "f32[2,3,7]")
linear_weight_gradient.case("f32[5]", "f32[3]")
linear_weight_gradient.case("f32[1,5,2]", "f32[1,5,1]")


@operator("m, n -> m n", linear="each", dtype=one_type)
def outer(xp, x, y):
    """Outer product: x (m,), y (n,) -> (m, n)."""
    return x[:, None] * y[None, :]


@outer.gradient
def _(grad, x, y):
    return linear(y, grad), linear(x, transpose(grad))


outer.case("f32[4]", "f32[6]")
outer.case("f32[5]", "f32[7]")
outer.case("f32[1]", "f32[4]")


def _einsum_parts(subscripts: str, count: int) -> tuple[list[str], str]:
    """Operand texts and the output text of an einsum, without spaces and with the output always given."""
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    operands = left.split(",")
    for part in (*operands, right):
        if re.fullmatch(r"(\.\.\.)?[A-Za-z]*", part) is None:
            raise RuleError(f"einsum {subscripts!r}: {part!r} is not letters, optionally after a leading '...'")
    if len(operands) != count:
        raise RuleError(f"einsum {subscripts!r} names {len(operands)} operands, got {count}")
    letters = left.replace(".", "").replace(",", "")
    if not arrow:
        right = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    unknown = set(right.replace(".", "")) - set(letters)
    if unknown or any(right.count(c) > 1 for c in right if c != "."):
        raise RuleError(f"einsum {subscripts!r}: every output letter must be an input's, and stand once")
    return operands, right


def _terms(part: str) -> list[str]:
    return re.findall(r"\.\.\.|[A-Za-z]", part)


def _einsum_rule(*shapes: tuple[int, ...], subscripts: str) -> str:
    operands, output = _einsum_parts(subscripts, len(shapes))
    kept = set(_terms(output))
    diagonal = {c for part in operands for c in part if c != "." and part.count(c) > 1}

    def pattern(part: str) -> str:
        marks = {c: "^" if c in diagonal else "" if c in kept else "+" for c in _terms(part)}
        return " ".join(c + marks[c] for c in _terms(part))

    inputs = ", ".join(operand([pattern(part)] if part else []) for part in operands)
    return f"{inputs} -> {pattern(output)}".replace("...", "*batch")


def _einsum_moves(*types: Any, subscripts: str) -> str:
    """An einsum of one operand that sums nothing only moves elements, so maxima pass."""
    operands, output = _einsum_parts(subscripts, len(types))
    return "all" if len(operands) == 1 and set(_terms(operands[0])) == set(_terms(output)) else ""


@operator(_einsum_rule, linear="each", monotone=_einsum_moves, dtype=one_type)
def einsum(xp, *operands, subscripts):
    """Einstein summation, such as `einsum(x, y, subscripts="bij,bjk->bik")`; `...` broadcasts."""
    return xp.einsum(subscripts.replace(" ", ""), *operands, optimize=True)


def _einsum_flops(subscripts: str, batch: int, **sizes: int) -> float:
    operands, _ = _einsum_parts(subscripts, subscripts.count(",") + 1)
    letters = {term for part in operands for term in _terms(part) if term != "..."}
    return 2.0 * batch * math.prod(sizes[letter] for letter in letters)


einsum.flops = _einsum_flops


@einsum.gradient
def _(grad, *operands, subscripts):
    parts, output = _einsum_parts(subscripts, len(operands))
    found = []
    for index, (part, x) in enumerate(zip(parts, operands)):
        others = [(p, o) for k, (p, o) in enumerate(zip(parts, operands)) if k != index]
        known = {term for p in (output, *(p for p, _ in others)) for term in _terms(p)}
        # A letter that only this operand has was summed away: every one of its places gets the same gradient.
        once = list(dict.fromkeys(_terms(part)))
        present = "".join(term for term in once if term in known)
        text = ",".join((output, *(p for p, _ in others))) + "->" + present
        piece = einsum(grad, *(o for _, o in others), subscripts=text)
        wanted = _sized(part, x.shape)
        sized = [item for at, item in enumerate(wanted) if item[0] == "..." or item not in wanted[:at]]
        piece = _summed(piece, tuple(size for term, size in sized if term in known))
        if present != "".join(once):
            piece = reshape(piece, shape=tuple(size if term in known else 1 for term, size in sized))
            piece = expand(piece, shape=tuple(size for _, size in sized))
        found.append(_diagonals(piece, sized, wanted))
    return tuple(found)


def _diagonals(grad: Any, sized: list[tuple[str, int]], wanted: list[tuple[str, int]]) -> Any:
    """Dimensions that an operand repeats put back: `grad` on their diagonal, zeros elsewhere."""
    have = [term for term, _ in sized]
    for at, (term, size) in enumerate(wanted):
        if have[at : at + 1] == [term]:
            continue
        # The letter again, at its place: as the last two dimensions, of which only the diagonal stays.
        source, rank = have.index(term), len(have)
        grad = permute(grad, order=(*(k for k in range(rank) if k != source), source))
        grad = expand(unsqueeze(grad, axis=rank), shape=(*grad.shape, size))
        grad = triu(tril(grad))
        rest = iter(range(rank - 1))
        back = [rank - 1 if k == source else next(rest) for k in range(rank)]
        back.insert(at, rank)
        grad = permute(grad, order=tuple(back))
        have.insert(at, term)
    return grad


def _sized(part: str, shape: tuple[int, ...]) -> list[tuple[str, int]]:
    """(term, size) for every dimension of an operand; the dimensions of `...` each under that name."""
    terms = _terms(part)
    spread = len(shape) - len([term for term in terms if term != "..."])
    names = [name for term in terms for name in ([term] * spread if term == "..." else [term])]
    return list(zip(names, shape))


def _summed(grad: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the leading dimensions that `...` repeated."""
    added = len(grad.shape) - len(shape)
    axes = tuple(at for at, size in enumerate(grad.shape) if at < added or (shape[at - added] == 1 and size != 1))
    if axes:
        grad = sum_(grad, axis=axes, keepdims=True)
    return reshape(grad, shape=shape) if added else grad


einsum.case("f32[2,3,4]", "f32[2,4,5]", subscripts="bij,bjk->bik")
einsum.case("f32[3,4]", "f32[5]", "f32[4]", subscripts="ij,k,j->ki")
einsum.case("f32[2,5,3]", subscripts="...ij->...j")
einsum.case("f32[1,4,3]", "f32[2,3,5]", subscripts="...ij,...jk->...ik")
einsum.case("f32[4,4,3]", subscripts="iij->ij")
einsum.case("f32[3,2,3]", "f32[2,3]", subscripts="iji,ji->j")
