"""The layout problem of a graph on a mesh: numbers only, and the way back from an assignment to decisions.

Nodes of the problem are the sources (strategies: stored layouts), the graph's nodes (their signatures), the outputs
(the layout each is left in) and, beside every value that is read more than once, *copies* nodes, whose strategies are
small sets of layouts to be made. A set's cost is that of the cheapest tree of boxing steps, on the edge to the
producer; edges to the readers are zero where the set holds the layout read, and forbidden elsewhere. So a layout is
paid once.

A value that is read in the forward phase and later has two copies nodes. The first also says which layout is kept; the
second what is made again from it. For a state value, which stays anyway, a copy may be kept besides, or none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np

from sbp.graph import Graph, Node
from sbp.layout import Layout
from sbp.operator import REGISTRY
from sbp.planner.boxing import LayoutSpace
from sbp.planner.decisions import Decisions
from sbp.planner.problem import Problem, ProblemBuilder
from sbp.planner.strategies import Strategies, StrategySet
from sbp.planner.uses import OUTPUT, UPDATE, Group, Use, groups_of, is_resident

LARGEST_SET = 3
MOST_SETS = 100
"""A copies node offers every set of up to three of the layouts that its readers ask for. Where that would make more
than 100 sets (2-D meshes), it offers single layouts, and pairs of which one is cut out of the other without
communication."""

MOST_AGAIN = 25
"""What is made again of what was kept: any of those sets while they are no more than 25; beyond that one layout, beside
the kept one."""

MOST_KEPT = 200
"""Kept can be any layout that is read, or that in which the value came to be; where sets and kept layouts together make
more than 200 strategies, the latter only beside a single layout that is no smaller, and not if it is Partial."""

NOTHING = -1


@dataclass(frozen=True, eq=False)
class Formulation:
    """A problem with the way back from its assignment."""

    problem: Problem
    graph: Graph
    strategies: Strategies
    source_numbers: Mapping[str, tuple[int, np.ndarray]]
    node_numbers: tuple[tuple[int, StrategySet], ...]
    output_numbers: Mapping[str, tuple[int, np.ndarray]]
    kept_numbers: Mapping[str, tuple[int, np.ndarray]]
    copies: tuple[Copies, ...]

    def encode(self, decisions: Decisions) -> np.ndarray | None:
        """The choice that stands for legal decisions, int64 (nodes,); None where the problem does not offer them."""
        space = self.strategies.space
        choice = np.zeros(self.problem.node_count, dtype=np.int64)
        for table, layouts in ((self.source_numbers, decisions.sources), (self.output_numbers, decisions.outputs)):
            for value, (at, numbers) in table.items():
                found = np.flatnonzero(numbers == space(value).index[layouts[value]])
                if not len(found):
                    return None
                choice[at] = found[0]
        for node, (at, options) in zip(self.graph.nodes, self.node_numbers):
            if decisions.signatures[node.name] not in options.signatures:
                return None
            choice[at] = options.signatures.index(decisions.signatures[node.name])
        for copies in self.copies:
            number = copies.choice(space(copies.value), self.graph, decisions)
            if number is None:
                return None
            choice[copies.node] = number
        return choice

    def held_by(self, node: int) -> tuple[str, str]:
        """The kind and name of the value whose memory a node of the problem stands for."""
        for value, (at, _) in (*self.source_numbers.items(), *self.output_numbers.items()):
            if at == node:
                return self.graph.values[value].kind, value
        for copies in self.copies:
            if copies.node == node:
                return self.graph.values[copies.value].kind, copies.value
        value = next(n.outputs[0] for n, (at, _) in zip(self.graph.nodes, self.node_numbers) if at == node)
        return self.graph.values[value].kind, value

    def decode(self, choice: Sequence[int] | np.ndarray) -> Decisions:
        """The decisions that an assignment stands for."""
        space = self.strategies.space

        def chosen(table: Mapping[str, tuple[int, np.ndarray]]) -> dict[str, Layout]:
            picked = {value: int(numbers[choice[at]]) for value, (at, numbers) in table.items()}
            return {value: space(value).layouts[number] for value, number in picked.items() if number != NOTHING}

        signatures = {
            node.name: options.signatures[choice[at]]
            for node, (at, options) in zip(self.graph.nodes, self.node_numbers)
        }
        decisions = Decisions(chosen(self.source_numbers), signatures, chosen(self.output_numbers))
        kept = {
            value: layout
            for value, layout in chosen(self.kept_numbers).items()
            if is_resident(self.graph, value) or layout != decisions.made(self.graph, value)
        }
        return Decisions(decisions.sources, signatures, decisions.outputs, kept)


@dataclass(frozen=True, eq=False)
class Copies:
    """A copies node: number `node` of the problem, beside `value`, for the uses of one group."""

    node: int
    value: str
    group: Group
    sets: _Sets

    def choice(self, space: LayoutSpace, graph: Graph, decisions: Decisions) -> int | None:
        """The strategy that legal decisions ask for; None if it is not offered."""
        wanted = {space.index[layout] for layout in decisions.wanted(graph, self.value, self.group)}
        kept = NOTHING
        if self.sets.keeps:
            if self.value in decisions.kept:
                kept = space.index[decisions.kept[self.value]]
            elif not is_resident(graph, self.value):
                kept = space.index[decisions.made(graph, self.value)]
        # A set may also hold what is kept, which then needs no making.
        for members in (tuple(sorted(wanted)), tuple(sorted(wanted | {kept}))):
            number = self.sets.numbers.get((members, kept))
            if number is not None:
                return number
        return None


def formulate(strategies: Strategies, usage_limit: int | None = None) -> Formulation:
    """The layout problem of a graph, in seconds and bytes per device; time is counted in nodes of the graph."""
    return _Formulation(strategies).run(usage_limit)


@dataclass(frozen=True, eq=False)
class _Sets:
    """The strategies of a copies node: the layouts to make, and the layout kept (NOTHING for none).

    Bytes per strategy: of the copy that waits between uses (if it is the only one), of what is kept, and of what is
    kept aside, without being read in this group.
    """

    sets: tuple[tuple[int, ...], ...]
    kept: np.ndarray
    between_bytes: np.ndarray
    kept_bytes: np.ndarray
    aside_bytes: np.ndarray
    keeps: bool

    @cached_property
    def numbers(self) -> Mapping[tuple[tuple[int, ...], int], int]:
        """(layouts to make, layout kept) -> the strategy."""
        return {pair: number for number, pair in enumerate(zip(self.sets, self.kept.tolist()))}


class _Formulation:
    def __init__(self, strategies: Strategies) -> None:
        self.strategies = strategies
        self.graph = strategies.graph
        self.builder = ProblemBuilder(self.graph.name)
        self.end = len(self.graph.nodes)
        self.sources: dict[str, tuple[int, np.ndarray]] = {}
        self.nodes: list[tuple[int, StrategySet]] = []
        self.outputs: dict[str, tuple[int, np.ndarray]] = {}
        self.kept: dict[str, tuple[int, np.ndarray]] = {}
        self.copies: list[Copies] = []
        self.counted: dict[str, int] = {}
        self.from_time = 0
        self._made: dict[Hashable, np.ndarray] = {}
        self._specifications: dict[Hashable, _Sets] = {}
        self._alive: list[object] = []  # keeps arrays whose id() is a key

    def run(self, usage_limit: int | None) -> Formulation:
        graph, builder = self.graph, self.builder
        for value in graph.sources:
            numbers = self.strategies.of_source(value)
            at = builder.add_node(np.zeros(len(numbers)), value)
            self.sources[value] = at, numbers
        for time, node in enumerate(graph.nodes):
            options = self.strategies.of_node(node)
            self.nodes.append((builder.add_node(options.seconds, node.name), options))
            self.workspace(time, node, *self.nodes[-1])
        for value in graph.outputs:
            numbers = self.strategies.storable(value)
            self.outputs[value] = builder.add_node(np.zeros(len(numbers)), f"output {value}"), numbers
        groups = groups_of(graph)
        self.counted = _counted_from(graph, groups)
        for value in graph.values:
            self.value(value, groups.get(value, ()))
        return Formulation(
            builder.build(usage_limit),
            graph,
            self.strategies,
            self.sources,
            tuple(self.nodes),
            self.outputs,
            self.kept,
            tuple(self.copies),
        )

    # -- one value ---------------------------------------------------------------------------------------------------

    def value(self, value: str, groups: tuple[Group, ...]) -> None:
        space = self.strategies.space(value)
        resident = is_resident(self.graph, value)
        producer, made = self.producer(value)
        self.from_time = self.counted.get(value, 0)
        two_phases = len(groups) > 1 and (not resident or self.graph_phase(groups[1]) == "backward")
        if resident:
            self.usage(producer, 0, self.end + 1, space.bytes[made])
        else:
            # An input is there from the start, any other value from the node that makes it, until its first reading.
            start = self.graph.producers[value][0] if value in self.graph.producers else 0
            least = start + 1 if value in self.graph.producers else 0
            if not groups or groups[0].uses[0].operand != UPDATE:
                self.usage(producer, start, max(groups[0].first if groups else 0, least), space.bytes[made])
            self.read_usage(value, groups)
        rest = groups
        if two_phases:
            self.two_phases(value, space, resident, producer, made, groups[0], groups[1])
            rest = groups[2:]
        for group in rest:
            self.one_phase(value, space, producer, made, group, resident)

    def graph_phase(self, group: Group) -> str:
        return self.graph.nodes[group.first].phase if group.first < self.end else "optimizer"

    def producer(self, value: str) -> tuple[int, np.ndarray]:
        made = self.graph.producers.get(value)
        if made is None:
            return self.sources[value]
        at, options = self.nodes[made[0]]
        return at, options.outputs[made[1]]

    def consumer(self, value: str, use: Use) -> tuple[int, np.ndarray]:
        """The problem node that reads the value, and per strategy the number of the layout it reads."""
        if use.operand == OUTPUT:
            return self.outputs[value]
        if use.operand == UPDATE:
            at, numbers = self.sources[use.state]
            here, there = self.strategies.space(value), self.strategies.space(use.state)
            if here is there:
                return at, numbers
            key = ("translate", id(here), id(there), id(numbers))
            return at, self.cached(key, lambda: np.array([here.index[there.layouts[n]] for n in numbers]), numbers)
        at, options = self.nodes[use.node]
        return at, options.inputs[use.operand]

    def one_phase(
        self, value: str, space: LayoutSpace, producer: int, made: np.ndarray, group: Group, resident: bool
    ) -> None:
        if len(group.uses) == 1:
            reader, wanted = self.consumer(value, group.uses[0])
            if reader != producer:
                self.edge(producer, reader, self.box_table(space, made, wanted))
            return
        sets = self.sets(space, value, group)
        at = self.builder.add_node(np.zeros(len(sets.sets)), f"copies of {value}")
        self.copies.append(Copies(at, value, group, sets))
        self.edge(producer, at, self.tree_table(space, made, sets))
        self.readers(value, group, at, sets)
        if not resident:
            self.copies_usage(at, group, sets.between_bytes)

    def two_phases(
        self,
        value: str,
        space: LayoutSpace,
        resident: bool,
        producer: int,
        made: np.ndarray,
        first: Group,
        later: Group,
    ) -> None:
        forward = self.sets(space, value, first, made, resident)
        at = self.builder.add_node(np.zeros(len(forward.sets)), f"copies of {value}")
        self.kept[value] = at, forward.kept
        self.copies.append(Copies(at, value, first, forward))
        self.edge(producer, at, self.tree_table(space, made, forward))
        self.readers(value, first, at, forward)
        if not resident:
            self.copies_usage(at, first, forward.between_bytes)
            self.usage(at, first.first, first.last + 1, forward.aside_bytes)
        self.usage(at, first.last + 1, later.first, forward.kept_bytes)
        if len(later.uses) == 1 and not resident:
            reader, wanted = self.consumer(value, later.uses[0])
            self.edge(at, reader, self.box_table(space, forward.kept, wanted))
            return
        again = self.sets_again(space, value, later, forward)
        free = np.zeros(len(again.sets))
        costs = free if resident else self.cached(("again", id(again)), lambda: self.again_costs(space, again), again)
        second = self.builder.add_node(costs, f"copies of {value} made again")
        self.copies.append(Copies(second, value, later, again))
        self.edge(at, second, self.same_table(forward, again))
        if resident:
            self.edge(producer, second, self.again_table(space, made, again))
        self.readers(value, later, second, again)
        if not resident:
            self.copies_usage(second, later, again.between_bytes)

    def readers(self, value: str, group: Group, at: int, sets: _Sets) -> None:
        for use in group.uses:
            reader, wanted = self.consumer(value, use)
            self.edge(at, reader, self.member_table(sets, wanted))

    # -- memory ------------------------------------------------------------------------------------------------------
    #
    # Counted is what surely is there while a node runs: what it reads, what waits to be read, what is kept, all state.
    # So the problem never demands more than the finished plan, and its bound holds. What exists only while layouts
    # change, and sets of several copies between their uses, are left to the finished plan's own account. So are
    # views, but for the one that outlives all that it may share memory with.

    def usage(self, node: int, start: int, stop: int, usage: np.ndarray) -> None:
        start = max(start, self.from_time)
        if stop > start:
            self.builder.add_usage(node, start, stop, usage)

    def workspace(self, time: int, node: Node, at: int, options: StrategySet) -> None:
        """What the kernel holds while it runs, besides what it reads and makes."""
        op = REGISTRY[node.op]
        if op.workspace is None and not op.borders:
            return

        def build() -> np.ndarray:
            rule, types, made = self.graph.rule(node), self.graph.types(node.inputs), self.graph.types(node.outputs)
            shape = self.strategies.mesh.shape
            cases = ((rule, types, made, node.attributes, signature, shape) for signature in options.signatures)
            return np.array([op.workspace_bytes(*case) for case in cases], dtype=np.int64)

        self.usage(at, time, time + 1, self.cached(("workspace", id(options)), build, options))

    def read_usage(self, value: str, groups: tuple[Group, ...]) -> None:
        """Every reader holds what it reads while it runs."""
        space = self.strategies.space(value)
        seen = set()
        for use in (use for group in groups for use in group.uses):
            if use.operand != UPDATE and use.node not in seen:
                seen.add(use.node)
                reader, wanted = self.consumer(value, use)
                self.usage(reader, use.node, use.node + 1, space.bytes[wanted])

    def copies_usage(self, at: int, group: Group, between: np.ndarray) -> None:
        """Between its uses, a copy waits."""
        times = sorted({use.node for use in group.uses})
        for before, after in zip(times, times[1:]):
            self.usage(at, before + 1, after, between)

    # -- strategies of copies nodes ----------------------------------------------------------------------------------

    def sets(
        self, space: LayoutSpace, value: str, group: Group, made: np.ndarray | None = None, resident: bool = False
    ) -> _Sets:
        """Sets of the layouts that a group reads; with `made`, each with the layouts that could be kept."""
        wanted = [self.consumer(value, use)[1] for use in group.uses]
        key = ("sets", id(space), tuple(map(id, wanted)), id(made), resident)
        if key not in self._specifications:
            pairs = self._with_kept(space, _small_sets(space, wanted), made, resident)
            chosen, kept = [members for members, _ in pairs], [keep for _, keep in pairs]
            self._specifications[key] = self._with_bytes(space, chosen, kept, made is not None)
            self._alive.append((space, wanted, made))
        return self._specifications[key]

    @staticmethod
    def _with_kept(
        space: LayoutSpace, sets: list[tuple[int, ...]], made: np.ndarray | None, resident: bool
    ) -> list[tuple[tuple[int, ...], int]]:
        """Every set with every layout that could be kept beside or out of it."""
        if made is None:
            return [(members, NOTHING) for members in sets]
        if resident:
            return [(members, keep) for members in sets for keep in (NOTHING, *members)]
        unread = np.unique(made).tolist()
        every = [(m, keep) for m in sets for keep in (*m, *(n for n in unread if n not in m))]
        if len(every) <= MOST_KEPT:
            return every

        def worth_keeping(number: int, members: tuple[int, ...]) -> bool:
            small = len(members) == 1 and space.bytes[number] <= space.bytes[members[0]]
            return small and not space.layouts[number].has_partial

        return [(m, keep) for m, keep in every if keep in m or worth_keeping(keep, m)]

    def sets_again(self, space: LayoutSpace, value: str, group: Group, before: _Sets) -> _Sets:
        """What the later group makes, for every layout that may have been kept."""
        wanted = [self.consumer(value, use)[1] for use in group.uses]
        key = ("again", id(space), tuple(map(id, wanted)), id(before))
        if key not in self._specifications:
            pairs = [
                (members, keep)
                for keep in np.unique(before.kept).tolist()
                for members in _sets_with(keep, _small_sets(space, wanted), wanted)
            ]
            self._specifications[key] = self._with_bytes(space, [p[0] for p in pairs], [p[1] for p in pairs], True)
            self._alive.append((space, wanted, before))
        return self._specifications[key]

    @staticmethod
    def _with_bytes(space: LayoutSpace, chosen: list[tuple[int, ...]], kept: list[int], keeps: bool) -> _Sets:
        local = space.bytes.tolist()
        between = [local[members[0]] if len(members) == 1 else 0 for members in chosen]
        kept_bytes = [0 if keep == NOTHING else local[keep] for keep in kept]
        aside = [0 if keep in members else size for members, keep, size in zip(chosen, kept, kept_bytes)]
        return _Sets(
            tuple(chosen),
            _frozen(np.array(kept)),
            _frozen(np.array(between)),
            _frozen(np.array(kept_bytes)),
            _frozen(np.array(aside)),
            keeps,
        )

    @staticmethod
    def again_costs(space: LayoutSpace, sets: _Sets) -> np.ndarray:
        trees = {members: space.tree_seconds(members) for members in set(sets.sets)}
        return np.array([trees[m][k] for m, k in zip(sets.sets, sets.kept.tolist())])

    # -- tables (shared by equal pairs) --------------------------------------------------------------------------------

    def cached(self, key: Hashable, make, *alive: object) -> np.ndarray:
        if key not in self._made:
            self._made[key] = _frozen(make())
            self._alive.append(alive)
        return self._made[key]

    def edge(self, first: int, second: int, table: np.ndarray) -> None:
        self.builder.add_edge(first, second, table)

    def box_table(self, space: LayoutSpace, made: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        key = ("box", id(space), id(made), id(wanted))
        return self.cached(key, lambda: space.seconds[made[:, None], wanted[None, :]], space, made, wanted)

    def tree_table(self, space: LayoutSpace, made: np.ndarray, sets: _Sets) -> np.ndarray:
        def build() -> np.ndarray:
            unique = list(dict.fromkeys(sets.sets))
            where = {members: i for i, members in enumerate(unique)}
            columns = np.stack([space.tree_seconds(members)[made] for members in unique], axis=1)
            table = columns[:, [where[members] for members in sets.sets]]
            free = np.array([k == NOTHING or k in members for members, k in zip(sets.sets, sets.kept.tolist())])
            return np.where(free[None, :] | (made[:, None] == sets.kept[None, :]), table, np.inf)

        return self.cached(("tree", id(space), id(made), id(sets)), build, space, made, sets)

    def again_table(self, space: LayoutSpace, made: np.ndarray, sets: _Sets) -> np.ndarray:
        """What is made again of a state value: from its stored layout, and from the copy that was kept besides."""

        def build() -> np.ndarray:
            columns = [
                space.tree_seconds(members) if keep == NOTHING else space.forest_seconds(keep, members)
                for members, keep in zip(sets.sets, sets.kept.tolist())
            ]
            return np.stack([column[made] for column in columns], axis=1)

        return self.cached(("again table", id(space), id(made), id(sets)), build, space, made, sets)

    def same_table(self, before: _Sets, after: _Sets) -> np.ndarray:
        key = ("same", id(before), id(after))
        return self.cached(
            key, lambda: np.where(before.kept[:, None] == after.kept[None, :], 0.0, np.inf), before, after
        )

    def member_table(self, sets: _Sets, wanted: np.ndarray) -> np.ndarray:
        def build() -> np.ndarray:
            unique = list(dict.fromkeys(sets.sets))
            where = {members: i for i, members in enumerate(unique)}
            rows = np.stack([np.where(np.isin(wanted, members), 0.0, np.inf) for members in unique])
            return rows[[where[members] for members in sets.sets]]

        return self.cached(("member", id(sets), id(wanted)), build, sets, wanted)


def _counted_from(graph: Graph, groups: Mapping[str, tuple[Group, ...]]) -> dict[str, int]:
    """Per value that may share another's memory the time from which it is counted.

    Views are families, with what they are views of. At any time one value of such a family is: the first one until its
    last use, after that the one that is used last.
    """
    family: dict[str, list[str]] = {}
    root: dict[str, str] = {}
    for node in graph.nodes:
        if REGISTRY[node.op].view:
            first = root[node.outputs[0]] = root.get(node.inputs[0], node.inputs[0])
            family.setdefault(first, []).append(node.outputs[0])

    def last_use(value: str) -> int:
        if value not in graph.producers and graph.values[value].kind != "input":
            return len(graph.nodes)
        return groups[value][-1].last if value in groups else graph.producers.get(value, (0, 0))[0]

    found: dict[str, int] = {}
    never = len(graph.nodes) + 1
    for first, views in family.items():
        found.update(dict.fromkeys(views, never))
        heir = max(views, key=last_use)
        found[heir] = last_use(first) + 1
    # A state's next value may lie where the old one did, which is counted throughout.
    found.update((new, never) for new in graph.updates.values() if new in graph.producers)
    return found


def _small_sets(space: LayoutSpace, wanted: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    """The sets of layouts that a copies node offers to its readers, smallest first (see `MOST_SETS`)."""
    numbers = sorted(set(np.concatenate(wanted).tolist()))
    largest = min(len(wanted), LARGEST_SET)
    if sum(comb(len(numbers), size) for size in range(1, largest + 1)) <= MOST_SETS:
        return [members for size in range(1, largest + 1) for members in combinations(numbers, size)]
    pairs = (pair for pair in combinations(numbers, 2) if space.is_slice(*pair) or space.is_slice(*pair[::-1]))
    return [*((number,) for number in numbers), *pairs]


def _sets_with(keep: int, sets: list[tuple[int, ...]], wanted: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    """The sets to make again; where there are many (see `MOST_AGAIN`), one layout beside what is kept."""
    numbers = sorted(set(np.concatenate(wanted).tolist()))
    if len(sets) <= MOST_AGAIN:
        return sets
    if keep not in numbers:
        return [(number,) for number in numbers]
    return [tuple(sorted({number, keep})) for number in numbers]


def _frozen(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    array.flags.writeable = False
    return array
