"""Images read at places that a tensor says: bilinear and nearest sampling, put together from other operators."""

from __future__ import annotations

from itertools import product
from typing import Any

from sbp.errors import RuleError
from sbp.ops.comparison import logical_and, logical_not, masked_fill, not_equal, where
from sbp.ops.elementwise import abs_, add, cast, clamp, floor, mul, round_, scale, shift, sub
from sbp.ops.embedding import take_along
from sbp.ops.slicing import select
from sbp.ops.views import expand, reshape

_MODES = ("bilinear", "nearest")
_PADDINGS = ("zeros", "border", "reflection")


def grid_sample(
    x: Any, grid: Any, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool = False
) -> Any:
    """x (n, c, h, w) read at grid (n, ho, wo, 2) -> (n, c, ho, wo), as torch.nn.functional.grid_sample.

    The samples and the channels may be split, and so may the places; of a split image every rank reads its own pixels.

    Parameters
    ----------
    grid
        Places (across, down): -1 and 1 are the two sides of the image.
    mode
        "bilinear" or "nearest".
    padding_mode
        What lies beyond: "zeros", the "border"'s pixels, or the image's "reflection".
    align_corners
        Whether -1 and 1 are the centres of the outermost pixels (otherwise their outer edges).
    """
    if mode not in _MODES or padding_mode not in _PADDINGS:
        raise RuleError(
            f"grid_sample: mode {mode!r} is one of {', '.join(_MODES)}, padding_mode {padding_mode!r} one of "
            f"{', '.join(_PADDINGS)}"
        )
    if len(x.shape) != 4 or len(grid.shape) != 4 or grid.shape[3] != 2 or grid.shape[0] != x.shape[0]:
        raise RuleError(
            f"grid_sample takes an image (n, c, h, w) and places (n, ho, wo, 2), got {list(x.shape)} and "
            f"{list(grid.shape)}"
        )
    n, c, h, w = x.shape
    _, down, across, _ = grid.shape
    at = [_place(select(grid, 3, number), size, padding_mode, align_corners) for number, size in ((1, h), (0, w))]
    flat = reshape(x, shape=(n, c, h * w))

    def pixels(row: Any, column: Any) -> Any:
        """The image at whole numbers of rows and columns, 0 beyond it."""
        inside = logical_and(_within(row, h), _within(column, w))
        index = add(scale(cast(row, dtype="i64"), factor=w), cast(column, dtype="i64"))
        index = masked_fill(index, logical_not(inside), value=-1)  # take_along gives 0 there
        index = expand(reshape(index, shape=(n, 1, down * across)), shape=(n, c, down * across))
        return reshape(take_along(flat, index, axis=2), shape=(n, c, down, across))

    if mode == "nearest":
        return pixels(*map(round_, at))
    first = [floor(place) for place in at]
    share = [sub(place, low) for place, low in zip(at, first)]
    total = None
    for corner in product((0, 1), repeat=2):
        row, column = (shift(low, amount=step) if step else low for low, step in zip(first, corner))
        parts = [part if step else shift(scale(part, factor=-1), amount=1) for part, step in zip(share, corner)]
        weight = reshape(mul(*parts), shape=(n, 1, down, across))
        part = mul(pixels(row, column), weight)
        total = part if total is None else add(total, part)
    return total


def _within(place: Any, size: int) -> Any:
    held = clamp(place, low=0, high=size - 1)
    return logical_not(not_equal(held, place))


def _place(place: Any, size: int, padding: str, aligned: bool) -> Any:
    """Places from -1 to 1 in pixels of a dimension, those beyond it moved as the padding says."""
    if aligned:
        place = scale(shift(place, amount=1), factor=(size - 1) / 2)
    else:
        place = shift(scale(place, factor=size / 2), amount=(size - 1) / 2)
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if aligned else (-0.5, float(size))
        if not span:
            return scale(place, factor=0)
        far = abs_(shift(place, amount=-low))
        turns = floor(scale(far, factor=1 / span))
        rest = sub(far, scale(turns, factor=span))
        odd = not_equal(scale(floor(scale(turns, factor=0.5)), factor=2), turns)
        place = shift(where(odd, shift(scale(rest, factor=-1), amount=span), rest), amount=low)
    return place if padding == "zeros" else clamp(place, low=0, high=size - 1)
