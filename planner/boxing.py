"""Boxing: the cheapest sequence of collectives between any two layouts of a tensor, and between one and several.

A step changes one mesh axis. It is possible only where the chunks stay contiguous: an axis that splits (or comes to
split) a tensor dimension may not stand to the left of another axis that splits the same dimension, because splits nest
left to right. Every pair of layouts is still connected, through layouts in between; shortest paths find the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Protocol

import numpy as np

from sbp.dtype import SIZES, is_floating
from sbp.layout import SBP, Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.operator import TensorType


class CollectiveCosts(Protocol):
    """What boxing needs of a cost model."""

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """Seconds of one boxing step along a mesh axis with `bytes` of payload per rank."""


@dataclass(frozen=True, slots=True)
class Step:
    """One boxing step: `kind` (see `sbp.planner.physical`) along `mesh_axis`, with its payload in bytes per rank."""

    kind: str
    mesh_axis: int
    before: Layout
    after: Layout
    bytes: int
    seconds: float


MOST_EXACT_TARGETS = 4
"""Trees to more layouts than this, which only hand-made and random decisions ask for, are not proven the cheapest."""

_KINDS = {
    (Split, Broadcast): "all_gather",
    (Partial, Split): "reduce_scatter",
    (Partial, Broadcast): "all_reduce",
    (Split, Split): "all_to_all",
    (Broadcast, Split): "slice",
    (Broadcast, Partial): "fill",
    (Split, Partial): "pad",
}


def step_kind(before: SBP, after: SBP) -> str | None:
    """The step that turns one SBP into another on one mesh axis; None if there is none (between kinds of Partial)."""
    return None if before == after else _KINDS.get((type(before), type(after)))


def is_contiguous_step(layout: Layout, axis: int, after: SBP) -> bool:
    """Whether changing `axis` keeps every rank's shard one box: no axis to the right splits a dimension concerned."""
    concerned = {sbp.axis for sbp in (layout[axis], after) if isinstance(sbp, Split)}
    return not any(isinstance(sbp, Split) and sbp.axis in concerned for sbp in layout.axes[axis + 1 :])


@dataclass(frozen=True, eq=False)
class LayoutSpace:
    """All layouts of one tensor type on a mesh, with the cheapest way between any two.

    Attributes
    ----------
    layouts, index
        The layouts in a fixed order, and each one's position.
    bytes
        int64 (layouts,): bytes on the largest rank.
    seconds
        float64 (layouts, layouts): the cheapest boxing from row to column; 0 on the diagonal.
    """

    type: TensorType
    layouts: tuple[Layout, ...]
    index: dict[Layout, int]
    bytes: np.ndarray
    seconds: np.ndarray
    _steps: dict[tuple[int, int], Step]
    _next: np.ndarray

    def is_slice(self, before: int, after: int) -> bool:
        """Whether one numbered layout is cut out of the other along one mesh axis, without communication."""
        step = self._steps.get((before, after))
        return step is not None and step.kind == "slice"

    def path(self, before: Layout, after: Layout) -> tuple[Step, ...]:
        """The steps of the cheapest boxing."""
        at, end = self.index[before], self.index[after]
        steps = []
        while at != end:
            following = int(self._next[at, end])
            steps.append(self._steps[at, following])
            at = following
        return tuple(steps)

    def tree(self, root: Layout, targets: Iterable[Layout], other: Layout | None = None) -> dict[Layout, Step]:
        """The cheapest way to make all `targets` from `root`, common steps paid once (a Steiner arborescence).

        Exact for up to `MOST_EXACT_TARGETS` targets, which covers whatever a planner offers; nearest first beyond.

        Parameters
        ----------
        other
            A second layout at hand, from which targets are made where that is cheaper.

        Returns
        -------
        dict
            Layout -> the step that makes it; what was at hand is absent.
        """
        steps: dict[Layout, Step] = {}
        at_hand = {self.index[root]} if other is None else {self.index[root], self.index[other]}
        ends = sorted({self.index[target] for target in targets} - at_hand)
        if len(ends) > MOST_EXACT_TARGETS:
            return self._nearest_first(at_hand, ends)

        def grow(start: int, wanted: tuple[int, ...]) -> None:
            if not wanted:
                return
            if len(wanted) == 1:
                for step in self.path(self.layouts[start], self.layouts[wanted[0]]):
                    steps.setdefault(step.after, step)
                return
            meeting, left, right = self._branch(wanted)[1][start]
            grow(start, (meeting,))
            grow(meeting, left)
            grow(meeting, right)

        if other is None:
            grow(self.index[root], tuple(ends))
        else:
            first, second = self.index[root], self.index[other]
            mine, others = min(
                _bipartitions(tuple(ends)),
                key=lambda pair: self.tree_seconds(pair[0])[first] + self.tree_seconds(pair[1])[second],
            )
            grow(first, mine)
            grow(second, others)
        return steps

    def _nearest_first(self, at_hand: set[int], ends: Sequence[int]) -> dict[Layout, Step]:
        """A tree for many targets: always the target that is nearest to what is at hand, steps on the way included."""
        steps: dict[Layout, Step] = {}
        have, left = sorted(at_hand), list(ends)
        while left:
            block = self.seconds[np.ix_(have, left)]
            row, column = np.unravel_index(int(np.argmin(block)), block.shape)
            for step in self.path(self.layouts[have[row]], self.layouts[left[column]]):
                steps.setdefault(step.after, step)
            have = sorted(at_hand | {self.index[layout] for layout in steps})
            left = [end for end in left if end not in have]
        return steps

    def tree_seconds(self, targets: Sequence[int]) -> np.ndarray:
        """float64 (layouts,): the cost of `tree` from every root to the layouts numbered `targets`."""
        wanted = tuple(sorted(set(targets)))
        if not wanted:
            return np.zeros(len(self.layouts))
        if len(wanted) == 1:
            return self.seconds[:, wanted[0]]
        costs, _ = self._branch(wanted)
        return costs

    def forest_seconds(self, root: int, targets: Sequence[int]) -> np.ndarray:
        """float64 (layouts,): the cost of `tree` from the layout numbered `root` and any other one, both at hand."""
        costs = np.full(len(self.layouts), np.inf)
        wanted = tuple(sorted(set(targets) - {root}))
        for mine, others in _bipartitions(wanted):
            costs = np.minimum(costs, self.tree_seconds(mine)[root] + self.tree_seconds(others))
        return costs

    @lru_cache(maxsize=1 << 14)  # noqa: B019  spaces live as long as the table that made them
    def _branch(self, wanted: tuple[int, ...]) -> tuple[np.ndarray, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]:
        """Dreyfus-Wagner: per root the cost of reaching all `wanted`, and where its tree branches to which of them."""
        best = np.full(len(self.layouts), np.inf)
        parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        at_meeting = np.full(len(self.layouts), -1)
        first, rest = wanted[0], wanted[1:]
        for mask in range(2 ** len(rest) - 1):
            left = (first, *(item for bit, item in enumerate(rest) if mask >> bit & 1))
            right = tuple(item for bit, item in enumerate(rest) if not mask >> bit & 1)
            cost = self.tree_seconds(left) + self.tree_seconds(right)
            better = cost < best
            at_meeting[better] = len(parts)
            best = np.where(better, cost, best)
            parts.append((left, right))
        # A root that is itself wanted reaches the others only.
        through = self.seconds + best[None, :]
        meeting = np.argmin(through, axis=1)
        cost = through[np.arange(len(best)), meeting]
        choices = [(int(m), *parts[at_meeting[m]]) for m in meeting]
        return cost, choices


def _bipartitions(items: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for mask in range(2 ** len(items)):
        yield (
            tuple(item for bit, item in enumerate(items) if mask >> bit & 1),
            tuple(item for bit, item in enumerate(items) if not mask >> bit & 1),
        )


class BoxingTable:
    """The layout spaces of one mesh under one cost model, made once per tensor type."""

    def __init__(self, mesh: Mesh, costs: CollectiveCosts) -> None:
        self.mesh = mesh
        self.costs = costs
        self._spaces: dict[tuple[TensorType, frozenset[str]], LayoutSpace] = {}

    def space(self, type: TensorType, reductions: Iterable[str] = ("sum",)) -> LayoutSpace:
        """The space of a tensor type, with Partial layouts of the given reductions."""
        key = (type, frozenset(reductions))
        if key not in self._spaces:
            self._spaces[key] = self._build(*key)
        return self._spaces[key]

    def path(self, type: TensorType, before: Layout, after: Layout) -> tuple[Step, ...]:
        """The cheapest boxing of one value from one layout to another."""
        kinds = {sbp.reduce for layout in (before, after) for sbp in layout if isinstance(sbp, Partial)}
        return self.space(type, kinds | {"sum"}).path(before, after)

    def seconds(self, type: TensorType, before: Layout, after: Layout) -> float:
        """The cost of `path`."""
        return sum(step.seconds for step in self.path(type, before, after))

    def _build(self, type: TensorType, reductions: frozenset[str]) -> LayoutSpace:
        layouts, moves = _layouts_and_moves(len(type.shape), self.mesh.ndim, tuple(sorted(reductions)))
        size = SIZES[type.dtype]
        local = np.array(
            [
                size * int(np.prod(layout.local_shape(type.shape, self.mesh.shape), dtype=np.int64))
                for layout in layouts
            ],
            dtype=np.int64,
        )
        count = len(layouts)
        index = {layout: number for number, layout in enumerate(layouts)}
        seconds = np.full((count, count), np.inf)
        np.fill_diagonal(seconds, 0.0)
        steps: dict[tuple[int, int], Step] = {}
        following = np.tile(np.arange(count), (count, 1))
        hops = np.full((count, count), np.inf)
        np.fill_diagonal(hops, 0.0)
        for before, after, kind, axis in moves:
            if kind == "pad" and not _pads(type.dtype, layouts[after][axis]):
                continue
            payload = int(max(local[before], local[after]))
            cost = (
                float(self.costs.collective_seconds(kind, self.mesh, axis, payload))
                if self.mesh.shape[axis] > 1
                else 0.0
            )
            steps[before, after] = Step(kind, axis, layouts[before], layouts[after], payload, cost)
            seconds[before, after] = cost
            hops[before, after] = 1.0
        for middle in range(count):  # Floyd-Warshall; ties go to fewer steps
            through = seconds[:, middle : middle + 1] + seconds[middle : middle + 1, :]
            length = hops[:, middle : middle + 1] + hops[middle : middle + 1, :]
            slack = 1e-15
            better = (through < seconds - slack) | ((through <= seconds + slack) & (length < hops))
            seconds = np.where(better, through, seconds)
            hops = np.where(better, length, hops)
            following = np.where(better, following[:, middle : middle + 1], following)
        return LayoutSpace(type, layouts, index, local, seconds, steps, following)


def _pads(dtype: str, sbp: SBP) -> bool:
    """Whether a chunk may be padded to a Partial tensor with the reduction's identity.

    Of whole numbers under max and min that is the type's limit, where the arithmetic that lets parts pass (shift, sub)
    wraps around; there the chunks are gathered instead.
    """
    return is_floating(dtype) or dtype == "bool" or (isinstance(sbp, Partial) and sbp.reduce == "sum")


@lru_cache(maxsize=256)
def _layouts_and_moves(
    rank: int, axes: int, reductions: tuple[str, ...]
) -> tuple[tuple[Layout, ...], tuple[tuple[int, int, str, int], ...]]:
    """All layouts of tensors with `rank` dimensions, and the possible steps (before, after, kind, mesh axis)."""
    choices: tuple[SBP, ...] = (*map(Split, range(rank)), Broadcast(), *map(Partial, reductions))
    layouts = tuple(
        layout
        for layout in map(Layout, product(choices, repeat=axes))
        if len({sbp.reduce for sbp in layout if isinstance(sbp, Partial)}) <= 1
    )
    index = {layout: number for number, layout in enumerate(layouts)}
    moves = []
    for layout in layouts:
        for axis, after in product(range(axes), choices):
            kind = step_kind(layout[axis], after)
            target = layout.replace(axis, after)
            if kind is not None and target in index and is_contiguous_step(layout, axis, after):
                moves.append((index[layout], index[target], kind, axis))
    return layouts, tuple(moves)
