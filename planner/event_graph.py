"""A pipeline and a schedule as the flat graph that `sbp.planner.events` plays: nodes, edges, queues.

Every segment that runs becomes a range of nodes: the mark at which it begins, its tasks, what it sends, the mark at
which it ends. Marks take no time. All edges between segments go through marks and transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sbp.planner.pipeline import P2P, PHASES, Pipeline, Segment
from sbp.planner.schedule import Action, Credits, Schedule

UNLIMITED = np.iinfo(np.int32).max // 2
"""More buffers than segments."""


class _Template:
    """The nodes of a segment, numbered from its beginning, and the edges between them."""

    def __init__(self, segment: Segment, streams: dict[str, int], sends: bool, blocking: bool) -> None:
        tasks, count = segment.tasks, len(segment.tasks)
        self.sends = sends
        self.size = count + 2 + sends
        self.end = self.size - 1
        transfer = count + 1
        self.source = self.end if segment.sends_after is None else segment.sends_after + 1
        """What ends when the output of the segment is there."""
        self.arrival = transfer if sends else self.source
        """What ends when it has arrived."""
        self.early = [at + 1 for at, task in enumerate(tasks) if task.early]
        self.late = [at + 1 for at, task in enumerate(tasks) if task.late]
        self.meets = [(at + 1, task.meets) for at, task in enumerate(tasks) if task.meets]
        self.seconds = np.zeros(self.size)
        self.stream = np.full(self.size, -1, np.int32)
        self.allocates, self.frees = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        self.task = np.full(self.size, -1, np.int32)
        edges = [(0, self.end)]
        read = {number for task in tasks if not task.late for number in task.inputs}
        for at, task in enumerate(tasks):
            node = at + 1
            self.seconds[node] = task.seconds
            self.stream[node] = streams[task.stream]
            self.allocates[node], self.frees[node] = task.allocates, task.frees
            self.task[node] = at
            edges += [(number + 1, node) for number in task.inputs]
            if not task.early and all(tasks[number].early for number in task.inputs):
                edges.append((0, node))
            if not task.late and at not in read:
                edges.append((node, self.end))
        if sends:
            self.seconds[transfer] = segment.sends_seconds
            self.stream[transfer] = streams[P2P]
            edges.append((self.source, transfer))
        blocks = sends and blocking
        if blocks and self.source != self.end:
            edges.append((transfer, self.end))  # the transfer may end before the segment does
        self.done = transfer if blocks and self.source == self.end else self.end
        """What ends when the stage is free for its next segment."""
        self.edges = np.array(edges, np.int64).T


@dataclass(frozen=True, slots=True)
class Instance:
    """One segment run once: its action (phase "before" and "after" with chunk -1), and its first node."""

    stage: int
    action: Action
    first: int
    template: _Template

    @property
    def end(self) -> int:
        return self.first + self.template.end

    @property
    def arrival(self) -> int:
        return self.first + self.template.arrival

    @property
    def done(self) -> int:
        return self.first + self.template.done

    @property
    def late(self) -> list[int]:
        return [self.first + at for at in self.template.late]


class EventGraph:
    """The graph of a pipeline under a schedule, or under credits (then the engine finds the order).

    Attributes
    ----------
    instances
        Every run of a segment, stage by stage in program order.
    """

    def __init__(self, pipeline: Pipeline, plan: Schedule | Credits) -> None:
        self.pipeline, self.plan = pipeline, plan
        self.streams = pipeline.streams
        self.greedy = isinstance(plan, Credits)
        self._numbers = {stream: at for at, stream in enumerate(self.streams)}
        self._templates: dict[tuple[int, bool], _Template] = {}
        self._edges: list[tuple[int, int]] = []
        self.instances: list[Instance] = []
        self.size = 0
        self._by_action: dict[Action, Instance] = {}
        self._once: dict[tuple[str, int], Instance] = {}
        for stage, order in enumerate(self._orders()):
            self._add_stage(stage, order)
        for instance in self.instances:
            self._connect(instance)
        for stage in range(pipeline.stages):
            self._connect_stage(stage)

    def _orders(self) -> list[tuple[Action, ...]]:
        if isinstance(self.plan, Schedule):
            return list(self.plan.orders)
        return [
            tuple((phase, *run) for phase in PHASES for run in queues.get(phase, ())) for queues in self.plan.queues
        ]

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _add_stage(self, stage: int, order: tuple[Action, ...]) -> None:
        pipeline = self.pipeline
        if pipeline.before:
            self._once["before", stage] = self._add(stage, ("before", -1, 0), pipeline.before[stage], False)
        for action in order:
            phase, chunk, micro_batch = action
            to = chunk + (1 if phase == "forward" else -1)
            segment = pipeline.segment(chunk, phase, micro_batch)
            sends = phase != "weight" and 0 <= to < pipeline.stages * pipeline.chunks and pipeline.stages > 1
            sends = sends and (segment.sends_seconds > 0 or segment.sends_bytes > 0)
            self._by_action[action] = self._add(stage, action, segment, sends)
        if pipeline.after:
            self._once["after", stage] = self._add(stage, ("after", -1, 0), pipeline.after[stage], False)

    def _add(self, stage: int, action: Action, segment: Segment, sends: bool) -> Instance:
        # The pipeline keeps its segments alive, so that an id stands for one of them.
        key = (id(segment), sends)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = _Template(segment, self._numbers, sends, self.pipeline.blocking_sends)
        found = Instance(stage, action, self.size, template)
        self.instances.append(found)
        self.size += template.size
        return found

    # -- edges -------------------------------------------------------------------------------------------------------

    def _connect(self, instance: Instance) -> None:
        """What a segment waits for besides the order of its stage."""
        phase, chunk, micro_batch = instance.action
        if phase not in PHASES:
            return
        edges, begin = self._edges, instance.first
        chunks = self.pipeline.stages * self.pipeline.chunks
        giver = chunk + (-1 if phase == "forward" else 1)
        if phase != "weight" and 0 <= giver < chunks:
            edges.append((self._by_action[phase, giver, micro_batch].arrival, begin))
        if phase != "forward":
            previous = PHASES[PHASES.index(phase) - 1]
            edges.append((self._by_action[previous, chunk, micro_batch].end, begin))

    def _connect_stage(self, stage: int) -> None:
        """The order of a stage: with credits only what is before and after all segments."""
        mine = self.by_stage[stage]
        before, after = self._once.get(("before", stage)), self._once.get(("after", stage))
        for at, instance in enumerate(mine):
            free = self.greedy and instance.action[0] in PHASES
            giver = mine[at - 1] if at and not free else before if free else None
            begin = instance.first
            if giver is not None:
                self._edges.append((giver.done, begin))
            for node in instance.template.early:
                if self.greedy and instance.action[0] != "before":
                    self._edges.append((begin, begin + node))
                elif giver is not None:
                    self._edges.append((giver.first, begin + node))
        if after is not None:
            for instance in mine[:-1]:
                if self.greedy:
                    self._edges.append((instance.done, after.first))
                self._edges += [(node, after.first) for node in instance.late]

    @cached_property
    def by_stage(self) -> list[list[Instance]]:
        """Per stage its runs of segments, in program order."""
        found: list[list[Instance]] = [[] for _ in range(self.pipeline.stages)]
        for instance in self.instances:
            found[instance.stage].append(instance)
        return found

    # -- arrays ------------------------------------------------------------------------------------------------------

    @cached_property
    def links(self) -> list[str]:
        """The links that streams use, by name."""
        return sorted({self.pipeline.links.get(stream, stream) for stream in self.streams[1:]})

    def _spread(self, name: str, dtype: Any) -> np.ndarray:
        found = np.empty(self.size, dtype)
        for instance in self.instances:
            found[instance.first : instance.first + instance.template.size] = getattr(instance.template, name)
        return found

    @cached_property
    def stream(self) -> np.ndarray:
        """int32 (nodes,): number of the stream, -1 for marks."""
        return self._spread("stream", np.int32)

    @cached_property
    def task(self) -> np.ndarray:
        """int32 (nodes,): number of the task in its segment, -1 for marks and transfers."""
        return self._spread("task", np.int32)

    @cached_property
    def instance(self) -> np.ndarray:
        """int32 (nodes,): which of `instances` a node belongs to."""
        sizes = [instance.template.size for instance in self.instances]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    @cached_property
    def arrays(self) -> dict[str, Any]:
        """What `sbp.planner.events.Engine` reads."""
        pipeline, streams = self.pipeline, len(self.streams)
        stage = np.array([instance.stage for instance in self.instances], np.int32)[self.instance]
        slot = np.where(self.stream >= 0, stage * streams + self.stream, -1).astype(np.int32)
        names = [pipeline.links.get(stream, stream) for stream in self.streams[1:]]
        numbers = [self.links.index(name) for name in names]
        link = np.array([-1, *numbers, -1], np.int32)[self.stream]
        far = np.full(self.size, -1, np.int32)
        counts_here = np.ones(self.size, np.uint8)
        for instance in self.instances:
            if instance.template.sends:
                phase, chunk, _ = instance.action
                far[instance.arrival] = pipeline.stage_of(chunk + (1 if phase == "forward" else -1))
                counts_here[instance.arrival] = pipeline.blocking_sends
        before, after = self._all_edges()
        pending = np.bincount(after, minlength=self.size).astype(np.int32)
        order = np.argsort(before, kind="stable")
        meetings = self._meetings()
        seconds = self._spread("seconds", np.float64)
        for a, b in zip(meetings["member_start"], meetings["member_start"][1:]):
            # What meets ends together: the slowest decides.
            seconds[meetings["member"][a:b]] = seconds[meetings["member"][a:b]].max()
        return {
            "seconds": seconds,
            "slot": slot,
            "allocates": self._spread("allocates", np.int64),
            "frees": self._spread("frees", np.int64),
            "link": link,
            "far": far,
            "counts_here": counts_here,
            "pending": pending,
            "successor": after[order].astype(np.int32),
            "successor_start": _starts(before, self.size),
            **self._queues(slot),
            **meetings,
            **self._gates(),
        }

    def _all_edges(self) -> tuple[np.ndarray, np.ndarray]:
        inside = [instance.template.edges + instance.first for instance in self.instances]
        across = np.array(self._edges, np.int64).reshape(-1, 2).T
        both = np.concatenate([*inside, across], axis=1)
        return both[0], both[1]

    def _queues(self, slot: np.ndarray) -> dict[str, np.ndarray]:
        """Per slot the first and the last of its queue, and per node the next one.

        Queues are in program order, which is the order of the nodes. With credits they are empty until segments fire,
        but for what runs before all of them.
        """
        tasks = np.flatnonzero(slot >= 0)
        if self.greedy:
            once = {at for at, item in enumerate(self.instances) if item.action[0] == "before"}
            tasks = tasks[np.isin(self.instance[tasks], list(once))]
        order = tasks[np.argsort(slot[tasks], kind="stable")]
        head, tail = (np.full(self.pipeline.stages * len(self.streams), -1, np.int32) for _ in range(2))
        following = np.full(self.size, -1, np.int32)
        same = slot[order[1:]] == slot[order[:-1]]
        following[order[:-1][same]] = order[1:][same]
        tail[slot[order]] = order
        head[slot[order][::-1]] = order[::-1]
        return {"head": head, "tail": tail, "following": following}

    def _meetings(self) -> dict[str, np.ndarray]:
        found: dict[str, list[int]] = {}
        for instance in self.instances:
            for at, name in instance.template.meets:
                found.setdefault(name, []).append(instance.first + at)
        meeting = np.full(self.size, -1, np.int32)
        for number, nodes in enumerate(found.values()):
            meeting[nodes] = number
        sizes = [len(nodes) for nodes in found.values()]
        return {
            "meeting": meeting,
            "member": np.array([node for nodes in found.values() for node in nodes], np.int32),
            "member_start": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        }

    def _gates(self) -> dict[str, Any]:
        """With credits: the marks at which a stage chooses, what gives buffers back, what sets the stage free."""
        gate, closes, releases, stop_of = (np.full(self.size, -1, np.int32) for _ in range(4))
        stages = self.pipeline.stages
        buffers = np.full((stages, len(PHASES)), UNLIMITED, np.int32)
        queues: list[list[int]] = [[] for _ in range(stages * len(PHASES))]
        priority: list[int] = []
        if isinstance(self.plan, Credits):
            priority = [PHASES.index(phase) for phase in self.plan.priority]
            for stage, waiting in enumerate(self.plan.buffers):
                for phase, count in waiting.items():
                    buffers[stage, PHASES.index(phase)] = count
            for instance in self.instances:
                if instance.action[0] != "before":  # whose tasks are in the queues from the start
                    stop_of[instance.first] = instance.end
                if instance.action[0] not in PHASES:
                    continue
                which = instance.stage * len(PHASES) + PHASES.index(instance.action[0])
                gate[instance.first] = which
                queues[which].append(instance.first)
                if instance.action[0] != "forward":
                    closes[instance.end] = which
                releases[instance.done] = instance.stage
        return {
            "greedy": self.greedy,
            "gate": gate,
            "closes": closes,
            "releases": releases,
            "stop_of": stop_of,
            "priority": np.array(priority, np.int32),
            "buffers": buffers.reshape(-1),
            "queue_node": np.array([node for queue in queues for node in queue], np.int32),
            "queue_start": np.concatenate([[0], np.cumsum([len(queue) for queue in queues])]).astype(np.int64),
        }


def _starts(keys: np.ndarray, count: int) -> np.ndarray:
    """Where each key's entries begin when they are sorted, and the end."""
    return np.concatenate([[0], np.cumsum(np.bincount(keys, minlength=count))]).astype(np.int64)
