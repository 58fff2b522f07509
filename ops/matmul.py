"""Matrix products."""

from __future__ import annotations

from sbp.operator import operator


@operator("*b m k+, *b k+ n -> *b m n", linear="each")
def matmul(xp, x, w):
    """Batched matrix product: x (*b, m, k), w (*b, k, n) -> (*b, m, n)."""
    return xp.matmul(x, w)


matmul.flops = lambda b, m, k, n: 2 * b * m * k * n
