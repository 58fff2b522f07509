"""The best plan of a small graph by enumeration, independent of the formulation and of every solver."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import cache
from itertools import chain

from sbp.graph import Graph
from sbp.layout import Layout
from sbp.planner.boxing import LayoutSpace
from sbp.planner.decisions import Decisions
from sbp.planner.strategies import Strategies
from sbp.planner.uses import groups_of, is_resident


def making_seconds(space: LayoutSpace, root: Layout, wanted: frozenset[Layout], *more_at_hand: Layout) -> float:
    """The least cost of having all of `wanted`, given what is at hand: shortest path over sets of layouts."""
    # In large spaces at most four layouts beside root and wanted ones: a tree has one meeting point per target.
    most = len(space.layouts) if len(space.layouts) <= 9 else len(wanted) + 5
    start = frozenset({root, *more_at_hand})
    best = {start: 0.0}
    queue = [(0.0, 0, start)]
    ticket = 0
    while queue:
        cost, _, have = heapq.heappop(queue)
        if wanted <= have:
            return cost
        if cost > best[have]:
            continue
        for before in have:
            for after in space.layouts:
                if after in have:
                    continue
                step = space._steps.get((space.index[before], space.index[after]))
                if step is None:
                    continue
                more = have | {after}
                if len(more) > most:
                    continue
                if cost + step.seconds < best.get(more, math.inf):
                    best[more] = cost + step.seconds
                    ticket += 1
                    heapq.heappush(queue, (best[more], ticket, more))
    return math.inf


def best_by_enumeration(strategies: Strategies) -> tuple[float, Decisions]:
    """Depth first over all signatures and stored layouts; a value is priced once its producer and readers are set."""
    graph = strategies.graph
    groups = groups_of(graph)
    names = [*graph.sources, *(node.name for node in graph.nodes), *(f"output {value}" for value in graph.outputs)]
    options: dict[str, list] = {}
    for value in graph.sources:
        space = strategies.space(value)
        options[value] = [space.layouts[number] for number in strategies.of_source(value)]
    seconds: dict[str, list[float]] = {}
    for node in graph.nodes:
        known = strategies.of_node(node)
        options[node.name] = list(known.signatures)
        seconds[node.name] = known.seconds.tolist()
    for value in graph.outputs:
        space = strategies.space(value)
        options[f"output {value}"] = [space.layouts[number] for number in strategies.storable(value)]

    def places(value: str) -> Iterator[str]:
        producer = graph.producers.get(value)
        yield value if producer is None else graph.nodes[producer[0]].name
        for use in chain.from_iterable(group.uses for group in groups.get(value, ())):
            if use.operand == -1:
                yield f"output {value}"
            elif use.operand == -2:
                yield use.state
            else:
                yield graph.nodes[use.node].name

    order = {name: at for at, name in enumerate(names)}
    priced: dict[int, list[str]] = {}
    for value in graph.values:
        priced.setdefault(max(order[name] for name in places(value)), []).append(value)

    @cache
    def price(value: str, made: Layout, wanted: tuple[frozenset[Layout], ...]) -> tuple[float, Layout | None]:
        """The cost of a value's boxing, and the copy to keep."""
        space = strategies.space(value)
        if len(wanted) == 1:
            return making_seconds(space, made, wanted[0]), None
        first, rest = wanted[0], wanted[1:]
        resident = is_resident(graph, value)
        phases = [graph.nodes[g.first].phase if g.first < len(graph.nodes) else "optimizer" for g in groups[value]]
        best = making_seconds(space, made, first) + making_seconds(space, made, rest[0]), None
        if not resident or phases[1] == "backward":
            for keep in first:
                again = making_seconds(space, keep, rest[0], *((made,) if resident else ()))
                cost = making_seconds(space, made, first) + again
                if cost < best[0]:
                    best = cost, keep
        return best[0] + sum(making_seconds(space, made, group) for group in rest[1:]), best[1]

    found: list = [math.inf, None]
    chosen: dict[str, object] = {}

    def decisions(kept: dict[str, Layout]) -> Decisions:
        return Decisions(
            {value: chosen[value] for value in graph.sources},
            {node.name: chosen[node.name] for node in graph.nodes},
            {value: chosen[f"output {value}"] for value in graph.outputs},
            kept,
        )

    def descend(at: int, cost: float, kept: dict[str, Layout]) -> None:
        if cost >= found[0]:
            return
        if at == len(names):
            found[:] = [cost, decisions(dict(kept))]
            return
        name = names[at]
        for number, option in enumerate(options[name]):
            chosen[name] = option
            total = cost + (seconds[name][number] if name in seconds else 0.0)
            keep = dict(kept)
            for value in priced.get(at, ()):
                if not groups.get(value):
                    continue
                made = _made(graph, chosen, value)
                wanted = tuple(frozenset(_wanted(graph, chosen, value, group)) for group in groups[value])
                extra, copy = price(value, made, wanted)
                total += extra
                if copy is not None:
                    keep[value] = copy
                if total >= found[0]:
                    break
            descend(at + 1, total, keep)
        chosen.pop(name, None)

    descend(0, 0.0, {})
    return found[0], found[1]


def _made(graph: Graph, chosen: dict, value: str) -> Layout:
    producer = graph.producers.get(value)
    return chosen[value] if producer is None else chosen[graph.nodes[producer[0]].name].outputs[producer[1]]


def _wanted(graph: Graph, chosen: dict, value: str, group) -> Iterator[Layout]:
    for use in group.uses:
        if use.operand == -1:
            yield chosen[f"output {value}"]
        elif use.operand == -2:
            yield chosen[use.state]
        else:
            yield chosen[graph.nodes[use.node].name].inputs[use.operand]
