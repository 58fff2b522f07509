"""A plain simulator of pipelines that plays every rank: the reference for `sbp.planner.simulator`.

No graph, no heap, no marks: at every event time it looks at all ranks of all stages and starts what can start. Each
rank has streams, links and memory of its own. A task on the stream of a mesh axis is a collective of the ranks along
that axis: it starts when all of them can, takes as long as its longest part, and goes at the speed of the slowest. A
transfer goes from a rank to its like on the next stage.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from sbp.planner.pipeline import COMPUTE, P2P, PHASES


@dataclass(eq=False)
class Item:
    """A task or transfer on one rank."""

    rank: tuple
    stream: str
    seconds: float
    run: Run
    number: int | None
    allocates: int = 0
    frees: int = 0
    early: bool = False
    late: bool = False
    inputs: tuple = ()
    far: tuple | None = None
    partners: list = field(default_factory=list)
    state: str = "waiting"
    start: float = math.nan
    stop: float = math.nan
    rest: float = 0.0
    since: float = 0.0
    slow: float = 0.0
    finish: float = math.inf


@dataclass(eq=False)
class Run:
    """A segment on one rank."""

    rank: tuple
    action: tuple
    tasks: list = field(default_factory=list)
    send: Item | None = None
    sends_after: int | None = None
    begun: bool = False

    @property
    def ended(self):
        return self.begun and all(task.state == "done" for task in self.tasks if not task.late)

    @property
    def output_there(self):
        if self.sends_after is None:
            return self.ended
        return self.tasks[self.sends_after].state == "done"

    @property
    def arrived(self):
        return self.output_there if self.send is None else self.send.state == "done"


class Twin:
    """The step of a pipeline whose stages have ranks arranged as a mesh, axis name -> size; results by rank.

    `plan` is a Schedule, or Credits (then `orders` is what fired).
    """

    def __init__(self, pipeline, plan, mesh=None):
        self.pipeline, self.plan = pipeline, plan
        axes = dict(mesh or {})
        self.coordinates = list(itertools.product(*(range(size) for size in axes.values())))
        self.axes = list(axes)
        self.ranks = [(stage, at) for stage in range(pipeline.stages) for at in self.coordinates]
        self.greedy = not hasattr(plan, "orders")
        self.program = {rank: [] for rank in self.ranks}
        self.by_action = {}
        for rank in self.ranks:
            self._fill(rank)
        self._meet()
        self.orders = [[] for _ in range(pipeline.stages)]
        self.chosen = {
            rank: [run for run in self.program[rank] if not self.greedy or run.action[1] < 0] for rank in self.ranks
        }
        self.waiting = {
            rank: {phase: [run for run in self.program[rank] if run.action[0] == phase] for phase in PHASES}
            for rank in self.ranks
        }
        self.now = 0.0
        self.held = dict.fromkeys(self.ranks, 0)
        self.samples = {rank: [] for rank in self.ranks}
        self.busy = {(rank, stream): 0.0 for rank in self.ranks for stream in pipeline.streams}
        self.exposed = dict.fromkeys(self.busy, 0.0)
        self.touched = dict.fromkeys(self.ranks, 0.0)
        self.running = []
        self._play()

    # -- what there is -----------------------------------------------------------------------------------------------

    def _fill(self, rank):
        pipeline, stage = self.pipeline, rank[0]
        if self.greedy:
            order = [(phase, *run) for phase in PHASES for run in self.plan.queues[stage].get(phase, ())]
        else:
            order = list(self.plan.orders[stage])
        once = [[("before", -1, 0)] if pipeline.before else [], [("after", -1, 0)] if pipeline.after else []]
        for action in [*once[0], *order, *once[1]]:
            phase, chunk, micro_batch = action
            if chunk < 0:
                segment = (pipeline.before if phase == "before" else pipeline.after)[stage]
            else:
                segment = pipeline.segment(chunk, phase, micro_batch)
            run = Run(rank, action, sends_after=segment.sends_after)
            for number, task in enumerate(segment.tasks):
                item = Item(rank, task.stream, task.seconds, run, number, task.allocates, task.frees)
                item.early, item.late, item.inputs, item.meets = task.early, task.late, task.inputs, task.meets
                run.tasks.append(item)
            to = chunk + (1 if phase == "forward" else -1)
            inside = phase in ("forward", "backward") and 0 <= to < pipeline.stages * pipeline.chunks
            if inside and to % pipeline.stages != stage and (segment.sends_seconds or segment.sends_bytes):
                run.send = Item(rank, P2P, segment.sends_seconds, run, None, far=(to % pipeline.stages, rank[1]))
            self.program[rank].append(run)
            self.by_action[rank[1], action if chunk >= 0 else (phase, stage)] = run

    def _meet(self):
        """Who starts together: the ranks along a task's axis, and the stages that name the same meeting."""
        for rank in self.ranks:
            for at, run in enumerate(self.program[rank]):
                for item in run.tasks:
                    if item.stream in self.axes:
                        axis = self.axes.index(item.stream)
                        others = [
                            (rank[0], other)
                            for other in self.coordinates
                            if all(a == b for k, (a, b) in enumerate(zip(other, rank[1])) if k != axis)
                        ]
                    else:
                        others = [rank]
                    partners = [self.program[other][at].tasks[item.number] for other in others]
                    if item.meets:
                        partners = [
                            task
                            for other in self.ranks
                            for partner in self.program[other]
                            for task in partner.tasks
                            if task.meets == item.meets and other[1] in {where for _, where in others}
                        ]
                    item.partners = partners

    # -- what may happen ---------------------------------------------------------------------------------------------

    def _received(self, run):
        phase, chunk, micro_batch = run.action
        where = run.rank[1]
        giver = chunk + (-1 if phase == "forward" else 1)
        inside = phase != "weight" and 0 <= giver < self.pipeline.stages * self.pipeline.chunks
        if inside and not self.by_action[where, (phase, giver, micro_batch)].arrived:
            return False
        if phase == "forward":
            return True
        previous = PHASES[PHASES.index(phase) - 1]
        return self.by_action[where, (previous, chunk, micro_batch)].ended

    def _done_with(self, run):
        """The stage is free for what comes after a segment."""
        return run.ended and (not self.pipeline.blocking_sends or run.send is None or run.send.state == "done")

    def _may_begin(self, rank, at):
        chosen = self.chosen[rank]
        run = chosen[at]
        if run.action[0] == "after":
            others = [other for other in self.program[rank] if other is not run]
            last = others if self.greedy else others[-1:]
            return all(self._done_with(other) for other in last) and all(
                other.ended and all(task.state == "done" for task in other.tasks) for other in others
            )
        if self.greedy and run.action[0] != "before":
            return True
        return (at == 0 or self._done_with(chosen[at - 1])) and (run.action[1] < 0 or self._received(run))

    def _choose(self, rank):
        """Credits: the most urgent segment that can run."""
        before = self.by_action.get((rank[1], ("before", rank[0])))
        if before is not None and not self._done_with(before):
            return False
        if any(run.action[1] >= 0 and not self._done_with(run) for run in self.chosen[rank]):
            return False
        for phase in self.plan.priority:
            if not self.waiting[rank][phase] or not self._received(self.waiting[rank][phase][0]):
                continue
            if phase == "forward":
                started = sum(run.action[0] == "forward" for run in self.chosen[rank])
                ended = {
                    other: sum(run.action[0] == other and run.ended for run in self.chosen[rank])
                    for other in self.plan.buffers[rank[0]]
                }
                if any(started - ended[other] >= count for other, count in self.plan.buffers[rank[0]].items()):
                    continue
            run = self.waiting[rank][phase].pop(0)
            at = len(self.chosen[rank]) - bool(self.pipeline.after)
            self.chosen[rank].insert(at, run)
            if rank[1] == self.coordinates[0]:
                self.orders[rank[0]].append(run.action)
            return True
        return False

    def _may_start(self, item):
        rank, run = item.rank, item.run
        queue = []
        for other in self.chosen[rank]:
            queue += [task for task in other.tasks if task.stream == item.stream]
            if other.send is not None and item.stream == P2P:
                queue.append(other.send)
        if item.state != "waiting" or item not in queue:
            return False
        if any(other.state != "done" for other in queue[: queue.index(item)]):
            return False
        if item.number is None:
            return run.output_there
        if any(run.tasks[number].state != "done" for number in item.inputs):
            return False
        if not item.early or (self.greedy and run.action[0] != "before"):
            return run.begun
        at = self.chosen[rank].index(run)
        return at == 0 or self.chosen[rank][at - 1].begun

    # -- speeds and time ---------------------------------------------------------------------------------------------

    def _link(self, item):
        return self.pipeline.links.get(item.stream, item.stream)

    def _share(self, item):
        if item.stream == COMPUTE:
            beside = [
                other for other in self.running if other.stream != COMPUTE and item.rank in (other.rank, other.far)
            ]
            return 1 + self.pipeline.compute_slowdown if beside else 1.0
        same = [other for other in self.running if other.stream != COMPUTE and self._link(other) == self._link(item)]
        here, there = item.rank, item.rank if item.far is None else item.far
        out = sum(other.rank == here for other in same)
        into = sum((other.rank if other.far is None else other.far) == there for other in same)
        return float(max(out, into))

    def _account(self, items):
        """Exposed time of the ranks on which something changes now."""
        changing = {rank for item in items for rank in (item.rank, item.far) if rank is not None}
        for rank in changing:
            passed = self.now - self.touched[rank]
            self.touched[rank] = self.now
            mine = [item for item in self.running if item.rank == rank or item.far == rank]
            if any(item.stream == COMPUTE for item in mine):
                continue
            mine = [item for item in mine if item.rank != rank or item.far is None or self.pipeline.blocking_sends]
            for item in mine:
                self.exposed[rank, item.stream] += passed / len(mine)

    def _begin_what_can(self, ended):
        """Everything that can start at this time starts; then speeds and memory."""
        begun = []
        changed = True
        while changed:
            changed = False
            for rank in self.ranks:
                for at, run in enumerate(self.chosen[rank]):
                    if not run.begun and self._may_begin(rank, at):
                        run.begun = changed = True
            for item in self._items():
                if item not in begun and item.state == "waiting" and all(map(self._may_start, item.partners)):
                    for partner in item.partners:
                        partner.state = "running"
                        begun.append(partner)
                    changed = True
            if not changed and self.greedy:
                changed = any(self._choose(rank) for rank in self.ranks)
        self._account([*ended, *begun])
        self.running = [item for item in self.running if item not in ended]
        for item in ended:
            self.held[item.rank] -= item.frees
            self.busy[item.rank, item.stream] += self.now - item.start
        for item in begun:
            item.start = item.since = self.now
            item.rest = max(partner.seconds for partner in item.partners)
            self.held[item.rank] += item.allocates
            self.running.append(item)
        for item in self.running:
            slow = max(map(self._share, item.partners))
            if slow != item.slow:
                if item.slow:
                    item.rest = max(item.rest - (self.now - item.since) / item.slow, 0.0)
                item.since, item.slow = self.now, slow
                item.finish = self.now + item.rest * slow
        for rank in self.ranks:
            last = self.samples[rank][-1][1] if self.samples[rank] else 0
            if self.held[rank] != last:
                self.samples[rank].append((self.now, self.held[rank]))

    def _items(self):
        for rank in self.ranks:
            for run in self.chosen[rank]:
                yield from run.tasks
                if run.send is not None:
                    run.send.partners = [run.send]
                    yield run.send

    def _play(self):
        self._begin_what_can([])
        while self.running:
            self.now = min(item.finish for item in self.running)
            ended = [item for item in self.running if item.finish == self.now]
            for item in ended:
                item.state, item.stop = "done", self.now
            self._begin_what_can(ended)
        self.finished = all(item.state == "done" for item in self._items())
        self.finished = self.finished and all(run.begun for rank in self.ranks for run in self.program[rank])
