"""Every combination of layouts that gives the right numbers, whatever any rule says: found by trying them all.

Layouts with the same boxes (B and all Partials) are tried together: whether shapes fit is asked once for each of
their combinations, and numbers are compared only where they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod

from sbp.layout import SBP, Broadcast, Layout, Partial, Split
from sbp.mesh import Mesh
from sbp.rule import Signature
from sbp.shards import partial_axes
from sbp.trial import Trial

_MANY = 4_000
"""Above this number of combinations of boxes, only those outputs are tried that split one and the same dimension or
none, and (on several mesh axes) nothing at all."""

_MANY_PARTIALS = 256
"""Above this number of combinations of Partials over the same boxes, at most one input is P(max) or P(min)."""


def right_signatures(trials: Callable[[int], Trial], confirmations: int) -> Iterator[tuple[Signature | None, int]]:
    """Every right signature of a case, and the number of combinations that were tried since the last one.

    Left out are layouts under which some rank holds nothing (what is right then may be so by chance), and Partial
    outputs where B is right as well, as B turns into any Partial for nothing. On several mesh axes Partial is not
    tried. The last item is (None, number).

    Parameters
    ----------
    trials
        Gives the trial with the n-th set of random inputs.
    confirmations
        The number of sets that a signature must survive.
    """
    first = trials(0)
    mesh = first.mesh
    in_kinds = [(shape, array.dtype == bool) for shape, array in zip(first.in_shapes, first.inputs)]
    out_kinds = [(shape, array.dtype == bool) for shape, array in zip(first.out_shapes, first.expected)]
    in_boxes = [_boxes(shape, mesh) for shape, _ in in_kinds]
    groups = list(product(*(_boxes(shape, mesh) for shape, _ in out_kinds)))
    out_options = {
        group: [_variants(layout, kind[1], mesh.ndim == 1) for layout, kind in zip(group, out_kinds)]
        for group in groups
    }
    tried = 0
    if len(groups) * prod(map(len, in_boxes)) > _MANY:
        if mesh.ndim > 1:
            in_boxes = [[]]
        groups = [group for group in groups if _is_coherent(group)]
    for boxes in product(*in_boxes):
        variants = [_variants(layout, kind[1], mesh.ndim == 1) for layout, kind in zip(boxes, in_kinds)]
        many = prod(map(len, variants)) > _MANY_PARTIALS
        fitting = _fitting(first, boxes, groups)
        others = sum(prod(map(len, out_options[group])) for group in groups if group not in fitting)
        tried += prod(map(len, variants)) * others
        for inputs in product(*variants) if fitting else ():
            if many and sum(_is_extremum(layout) for layout in inputs) > 1:
                continue
            right: list[tuple[Layout, ...]] = []
            for group in fitting:
                tried += prod(map(len, out_options[group]))
                right += _right_outputs(first, inputs, group, out_options[group])
            for found in _undominated(right):
                again = (trials(number) for number in range(1, confirmations))
                if not any(trial.difference(inputs, found, borders=False) for trial in again):
                    yield Signature(inputs, found), tried
                    tried = 0
    yield None, tried


def _boxes(shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """The layouts over {S(i), B} that leave no rank empty."""
    options: list[SBP] = [Broadcast(), *(Split(axis) for axis, size in enumerate(shape) if size > 1)]
    last = tuple(size - 1 for size in mesh.shape)
    found = (Layout(axes) for axes in product(options, repeat=mesh.ndim))
    return [layout for layout in found if 0 not in layout.shard(shape, mesh.shape, last).shape or 0 in shape]


def _variants(layout: Layout, is_bool: bool, with_partial: bool) -> list[Layout]:
    """The layouts with the same boxes: B exchanged for Partials of one kind. Booleans have no sum."""
    found = [layout]
    if with_partial:
        for reduce in ("max", "min") if is_bool else ("sum", "max", "min"):
            options: list[list[SBP]] = [[sbp, Partial(reduce)] if sbp == Broadcast() else [sbp] for sbp in layout]
            found += [Layout(axes) for axes in product(*options)][1:]
    return found


def _is_coherent(group: tuple[Layout, ...]) -> bool:
    return len({sbp for layout in group for sbp in layout if isinstance(sbp, Split)}) <= 1


def _is_extremum(layout: Layout) -> bool:
    return any(isinstance(sbp, Partial) and sbp.reduce != "sum" for sbp in layout)


def _fitting(trial: Trial, boxes: tuple[Layout, ...], groups: list[tuple[Layout, ...]]) -> list[tuple[Layout, ...]]:
    """The output boxes whose shapes the kernel's results have."""
    if len(boxes) > 2 and len(groups) > 1 and not _runs(trial, boxes, groups[0]):
        return []  # inputs of several boxes that do not fit together, whatever the attributes
    fitting = []
    for group in groups:
        try:
            results = trial.results(boxes, group)
        except Exception:
            if not trial.op.localizes:
                return []
            continue
        if all(
            parts[index].shape == box.shape
            for index, (shape, layout) in enumerate(zip(trial.out_shapes, group))
            for parts, box in zip(results, trial.boxes(shape, layout))
        ):
            fitting.append(group)
    return fitting


def _runs(trial: Trial, boxes: tuple[Layout, ...], group: tuple[Layout, ...]) -> bool:
    try:
        trial.results(boxes, group)
    except Exception:
        return False
    return True


def _right_outputs(
    trial: Trial, inputs: tuple[Layout, ...], group: tuple[Layout, ...], options: list[list[Layout]]
) -> list[tuple[Layout, ...]]:
    try:
        results = trial.results(inputs, group)
    except Exception:  # Partial parts of an index may lie outside of what it indexes
        return []
    right = []
    for index, layouts in enumerate(options):
        found = [layout for layout in layouts[:1] if not trial.output_difference(results, index, layout)]
        # Where B is right, Partials have nothing to add.
        right.append(found or [layout for layout in layouts[1:] if not trial.output_difference(results, index, layout)])
        if not right[-1]:
            return []
    return list(product(*right))


def _undominated(right: list[tuple[Layout, ...]]) -> Iterator[tuple[Layout, ...]]:
    known = set(right)
    for found in right:
        weaker = (
            (*found[:k], layout.replace(axis, Broadcast()), *found[k + 1 :])
            for k, layout in enumerate(found)
            for axis in partial_axes(layout)
        )
        if not any(other in known for other in weaker):
            yield found
