"""One arena per rank: offsets for all buffers of a plan, so that no two that are held at once overlap.

Packing intervals into the smallest arena is dynamic storage allocation, which is strongly NP-hard (Garey and Johnson
1979, SR2). Several orders of first and best fit are tried, then the best of them is improved by moving what lies on
top to the front. What is reached is stated beside the lower bound, the most bytes that are held at once. No arena can
be smaller than that, but some problems have none of that size (Buchsbaum et al. 2003, "OPT versus LOAD in dynamic
storage allocation").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbp.dtype import SIZES
from sbp.errors import PlanError
from sbp.planner.buffers import Buffer, buffers_of, register_bytes
from sbp.planner.packing import place
from sbp.planner.physical import PhysicalPlan

ALIGNMENT = 512
"""Bytes. Offsets and sizes are multiples of it, as PyTorch's allocator has them; CUDA's own alignment is 256."""

ALIGNMENT_COST = 1e-3
"""Part of what is held at most that rounding sizes up may add; plans of a few kilobytes take a smaller alignment."""

EFFORT = 2_000_000_000
"""Comparisons of two items that improving may take: about two seconds for large plans."""

MOST_MOVES = 400
"""Moves that improving may try."""

MOST_EXACT = 60
"""Items up to which `pack` lets a constraint solver look for the optimum, where it is asked to."""


@dataclass(frozen=True, eq=False)
class Packing:
    """Offsets of items in one arena.

    Attributes
    ----------
    offsets
        int64 (items,): bytes from the arena's start.
    size_bytes, lower_bound_bytes
        The arena, and the most that is held at once with every size rounded up to the alignment.
    method
        What found it.
    """

    offsets: np.ndarray
    size_bytes: int
    lower_bound_bytes: int
    method: str

    @property
    def gap(self) -> float:
        """(size - lower bound) / lower bound."""
        return (self.size_bytes - self.lower_bound_bytes) / self.lower_bound_bytes if self.lower_bound_bytes else 0.0


@dataclass(frozen=True, eq=False)
class Arena:
    """Where every buffer of a plan, and every operation's workspace, lies on every rank.

    Offsets are those for the rank with the largest shards; no other rank needs more anywhere.

    Attributes
    ----------
    register_offsets
        Per register bytes from the arena's start; registers that share memory have the same.
    workspace_offsets
        Operation -> offset of its workspace, for those that have one.
    """

    register_offsets: tuple[int, ...]
    workspace_offsets: Mapping[int, int]
    size_bytes: int
    lower_bound_bytes: int
    alignment: int
    method: str

    @property
    def gap(self) -> float:
        """(size - lower bound) / lower bound."""
        return (self.size_bytes - self.lower_bound_bytes) / self.lower_bound_bytes if self.lower_bound_bytes else 0.0


def arena_of(
    physical: PhysicalPlan,
    *,
    alignment: int | None = None,
    within: int | None = None,
    enough: int | None = None,
    exact: bool = False,
    item_bytes: Mapping[str, int] = SIZES,
) -> Arena:
    """The arena of a plan.

    Parameters
    ----------
    alignment
        Of offsets and sizes, bytes; default `ALIGNMENT`, or the largest power of two at which rounding sizes up adds
        no more than `ALIGNMENT_COST` and the arena is no larger than `within`.
    within
        Bytes of a memory limit.
    enough, exact
        As for `pack`.
    item_bytes
        Bytes of an element by its type, where they are held in other ones than the plan says.
    """
    buffers = buffers_of(physical).buffers
    working = [at for at, operation in enumerate(physical.operations) if operation.workspace]
    sizes = [_bytes(physical, buffer, item_bytes) for buffer in buffers]
    items = (
        [*sizes, *(physical.operations[at].workspace for at in working)],
        [*(buffer.start for buffer in buffers), *working],
        [*(buffer.stop for buffer in buffers), *(at + 1 for at in working)],
    )
    packing = None
    columns = (np.array(column, dtype=np.int64) for column in items)
    for size in _alignments(*columns) if alignment is None else [alignment]:
        tried = pack(*items, alignment=size, enough=enough, exact=exact)
        if packing is None or tried.size_bytes < packing.size_bytes:
            packing, alignment = tried, size
        if within is None or tried.size_bytes <= within:
            break
    assert packing is not None and alignment is not None
    offsets = packing.offsets.tolist()
    registers = [0] * len(physical.registers)
    for buffer, offset in zip(buffers, offsets):
        for number in buffer.registers:
            registers[number] = offset
    return Arena(
        tuple(registers),
        dict(zip(working, offsets[len(buffers) :])),
        packing.size_bytes,
        packing.lower_bound_bytes,
        alignment,
        packing.method,
    )


def pack(
    sizes: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    *,
    alignment: int = ALIGNMENT,
    enough: int | None = None,
    exact: bool = False,
    effort: int = EFFORT,
) -> Packing:
    """Pack items that are held during [start, stop) into a small arena; the same items give the same offsets.

    Parameters
    ----------
    sizes
        Bytes.
    enough
        Stop at the first arena of at most this size.
    exact
        Look for the optimum with OR-Tools' CP-SAT, for up to `MOST_EXACT` items (10 seconds).
    effort
        Comparisons that improving may take, see `EFFORT`.

    Raises
    ------
    PlanError
        A negative size, an empty lifetime, or an alignment below 1.
    """
    if alignment < 1:
        raise PlanError(f"the arena's alignment must be at least 1 byte, got {alignment}.")
    first, last = np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)
    rounded = -(-np.array(sizes, dtype=np.int64) // alignment) * alignment
    if not len(rounded) == len(first) == len(last) or (rounded < 0).any() or (last <= first).any():
        raise PlanError("an arena's items have a size of at least 0, a start, and a stop after it, one of each.")
    bound = _most_at_once(rounded, first, last)
    target = bound if enough is None else max(bound, enough)
    best: tuple[int, str, np.ndarray, np.ndarray] | None = None
    for method, order, smallest in _orders(rounded, first, last):
        offsets = np.zeros(len(rounded), dtype=np.int64)
        ceiling = np.iinfo(np.int64).max if best is None else best[0] - 1
        top = place(rounded, first, last, order, smallest, offsets, ceiling)
        if best is None or top < best[0]:
            best = top, method, offsets, order
        if top <= target:
            break
    assert best is not None
    top, method, offsets, order = best
    if top > target:
        top, offsets, improved = _improved(rounded, first, last, order, offsets, top, target, effort)
        method += ", improved" if improved else ""
    if exact and top > bound and len(rounded) <= MOST_EXACT:
        found = _optimum(rounded, first, last, bound, top, offsets)
        if found is not None and found[0] <= top:
            top, offsets, method = *found, "exact"
    return Packing(offsets, int(top), int(bound), method)


def _alignments(sizes: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> list[int]:
    """Alignments that cost little, the largest first; 1, which costs nothing, is the last."""
    exact = _most_at_once(sizes, starts, stops)
    found = []
    alignment = ALIGNMENT
    while alignment > 1:
        rounded = -(-sizes // alignment) * alignment
        if _most_at_once(rounded, starts, stops) <= exact * (1 + ALIGNMENT_COST):
            found.append(alignment)
        alignment //= 2
    return [*found, 1]


def _bytes(physical: PhysicalPlan, buffer: Buffer, item_bytes: Mapping[str, int]) -> int:
    return register_bytes(physical.registers[buffer.registers[0]], physical.mesh, 0, item_bytes)


def _most_at_once(sizes: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> int:
    return int(_held(sizes, starts, stops).max(initial=0))


def _held(sizes: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """int64 (times,): bytes that are held at each time."""
    if not len(sizes):
        return np.zeros(0, dtype=np.int64)
    change = np.zeros(int(stops.max()) + 1, dtype=np.int64)
    np.add.at(change, starts, sizes)
    np.subtract.at(change, stops, sizes)
    return np.cumsum(change)[:-1]


def _orders(sizes: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Iterator[tuple[str, np.ndarray, bool]]:
    """Orders to put items in, likely ones first, and whether each goes into the smallest gap."""
    length = stops - starts
    number = np.arange(len(sizes))
    held = _held(sizes, starts, stops)
    fullest = np.array([held[a:b].max() for a, b in zip(starts, stops)]) if len(sizes) else held
    keys = {
        "longest first": (number, starts, -sizes, -length),
        "largest first": (number, starts, -length, -sizes),
        "largest area first": (number, starts, -(sizes.astype(np.float64) * length)),
        "fullest time first": (number, starts, -length, -sizes, -fullest),
        "fullest time first, longest first": (number, starts, -sizes, -length, -fullest),
        "in time": (number, -sizes, -length, starts),
        "in time, longest first": (number, -sizes, starts, -stops, starts),
    }
    for name, key in keys.items():
        order = np.ascontiguousarray(np.lexsort(key), dtype=np.int64)
        yield f"{name}, lowest gap", order, False
        yield f"{name}, smallest gap", order, True


def _improved(
    sizes: np.ndarray,
    starts: np.ndarray,
    stops: np.ndarray,
    order: np.ndarray,
    offsets: np.ndarray,
    top: int,
    target: int,
    effort: int,
) -> tuple[int, np.ndarray, bool]:
    """What lies highest goes before what is held at its time: a few places forward, or to the front, at random.

    Equal arenas are accepted too, so that the search wanders along them.
    """
    generator = np.random.default_rng(0)
    begun = top
    kept_offsets = offsets
    for _ in range(min(MOST_MOVES, int(effort // max(len(sizes), 1) ** 2))):
        highest = np.flatnonzero(offsets + sizes == top)
        item = int(generator.choice(highest))
        at = int(np.flatnonzero(order == item)[0])
        if at == 0:
            break
        beside = order[:at][(starts[order[:at]] < stops[item]) & (stops[order[:at]] > starts[item])]
        if not len(beside):
            break
        before = int(np.flatnonzero(order == generator.choice(beside))[0])
        tried = np.concatenate([order[:before], [item], order[before:at], order[at + 1 :]])
        made = np.zeros_like(offsets)
        for smallest in (False, True):
            reached = place(sizes, starts, stops, tried, smallest, made, top)
            if reached <= top:
                order, offsets, made = tried, made, np.zeros_like(offsets)
                if reached < top:
                    kept_offsets, top = offsets, reached
                break
        if top <= target:
            break
    return top, kept_offsets if top < begun else offsets, top < begun


def _optimum(
    sizes: np.ndarray, starts: np.ndarray, stops: np.ndarray, bound: int, top: int, hint: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """The smallest arena by CP-SAT, as rectangles that do not overlap; None without OR-Tools or in 10 seconds."""
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        return None
    unit = int(np.gcd.reduce(sizes[sizes > 0])) if (sizes > 0).any() else 1
    model = cp_model.CpModel()
    height = model.new_int_var(bound // unit, top // unit, "height")
    places, across, up = {}, [], []
    for number in np.flatnonzero(sizes).tolist():
        size = int(sizes[number]) // unit
        where = places[number] = model.new_int_var(0, top // unit - size, f"offset {number}")
        model.add_hint(where, int(hint[number]) // unit)
        begin, end = int(starts[number]), int(stops[number])
        across.append(model.new_fixed_size_interval_var(begin, end - begin, f"time {number}"))
        up.append(model.new_fixed_size_interval_var(where, size, f"memory {number}"))
        model.add(where + size <= height)
    model.add_no_overlap_2d(across, up)
    model.minimize(height)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = 10.0
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    offsets = np.zeros(len(sizes), dtype=np.int64)
    for number, where in places.items():
        offsets[number] = solver.value(where) * unit
    return int((offsets + sizes).max(initial=0)), offsets
