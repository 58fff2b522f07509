"""The discrete events of a simulated step: nodes of a graph on streams, which slow each other down on shared links.

A node is a task on a slot (one stream of one stage), or a mark that takes no time and no slot. A task starts when its
predecessors have ended and it is the first of its slot's queue; tasks that meet start when all of them can. Everything
that happens at one time is handled in rounds: all that ends (memory is given back), then all that starts (memory is
taken), then the new speeds. So the result does not depend on the order within a round.

Either the queues are given, or (credits) a mark that opens a segment waits until its stage is free, is the next of its
phase, has its buffers, and is the most urgent of those; then its tasks join the queues. A stage that could choose
several marks takes the phase that comes first in the priority; of several stages the one with the lowest number.
"""

from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint8_t

import numpy as np

cdef int PHASE_COUNT = 3


cdef class Engine:
    """The state of one run; arrays as `sbp.planner.simulator` makes them."""

    cdef int64_t nodes, slots, stages, streams
    # the graph
    cdef const double[::1] seconds
    cdef const int32_t[::1] slot, successor, meeting, member, link, far, gate, closes, releases, stop_of, queue_node
    cdef const int32_t[::1] priority
    cdef const int64_t[::1] successor_start, member_start, allocates, frees, queue_start
    cdef const uint8_t[::1] counts_here
    cdef double slowdown
    cdef bint greedy
    # what happens
    cdef int32_t[::1] pending, following, head, tail, cause, sequence, met, queue_at, buffers
    cdef uint8_t[::1] ready, running, arrived, free
    cdef double[::1] start, stop, rest, since, slow, finish, touched, exposed, busy, sample_time
    cdef int64_t[::1] held, peak, sampled, sample_bytes
    cdef int32_t[::1] sample_stage, load, links_at, incoming, heap, place, todo, begun, dirty, active
    cdef uint8_t[::1] is_dirty, is_changed
    cdef int32_t[::1] changed
    cdef int64_t heap_size, todo_size, begun_size, dirty_size, changed_size, done, samples, started, links
    cdef double now

    def __init__(self, graph, int stages, int streams, int links, double slowdown):
        self.seconds, self.slot = graph["seconds"], graph["slot"]
        self.successor_start, self.successor = graph["successor_start"], graph["successor"]
        self.meeting, self.member_start, self.member = graph["meeting"], graph["member_start"], graph["member"]
        self.link, self.far, self.counts_here = graph["link"], graph["far"], graph["counts_here"]
        self.allocates, self.frees = graph["allocates"], graph["frees"]
        self.gate, self.closes, self.releases = graph["gate"], graph["closes"], graph["releases"]
        self.stop_of, self.queue_start, self.queue_node = graph["stop_of"], graph["queue_start"], graph["queue_node"]
        self.priority = graph["priority"]
        self.greedy = graph["greedy"]
        self.slowdown = slowdown
        nodes = self.nodes = len(graph["seconds"])
        self.stages, self.streams, self.links = stages, streams, links
        slots = self.slots = stages * streams
        self.pending, self.following = graph["pending"].copy(), graph["following"].copy()
        self.head, self.tail = graph["head"].copy(), graph["tail"].copy()
        self.buffers = graph["buffers"].copy()
        self.cause = np.full(nodes, -1, np.int32)
        self.sequence = np.full(nodes, -1, np.int32)
        self.met = np.zeros(max(len(graph["member_start"]) - 1, 0), np.int32)
        self.queue_at = np.asarray(graph["queue_start"][: stages * PHASE_COUNT], np.int32)
        self.ready, self.running, self.arrived = (np.zeros(nodes, np.uint8) for _ in range(3))
        self.free = np.ones(stages, np.uint8)
        self.start, self.stop = np.zeros(nodes), np.zeros(nodes)
        self.rest, self.since, self.slow = np.zeros(nodes), np.zeros(nodes), np.ones(nodes)
        self.finish = np.full(slots, INFINITY)
        self.touched = np.zeros(stages)
        self.exposed, self.busy = np.zeros(slots), np.zeros(slots)
        samples = 2 * int(np.count_nonzero((np.asarray(self.allocates) != 0) | (np.asarray(self.frees) != 0)))
        self.sample_time, self.sample_bytes = np.zeros(samples), np.zeros(samples, np.int64)
        self.sample_stage = np.zeros(samples, np.int32)
        self.held, self.peak, self.sampled = (np.zeros(stages, np.int64) for _ in range(3))
        self.load = np.zeros(stages * links * 2, np.int32)
        self.links_at = np.zeros(stages, np.int32)
        self.incoming = np.full(stages * 2, -1, np.int32)
        self.heap, self.place = np.zeros(slots, np.int32), np.full(slots, -1, np.int32)
        self.active = np.full(slots, -1, np.int32)
        self.todo, self.begun = np.zeros(nodes, np.int32), np.zeros(nodes, np.int32)
        self.dirty, self.is_dirty = np.zeros(stages, np.int32), np.zeros(stages, np.uint8)
        self.changed, self.is_changed = np.zeros(stages, np.int32), np.zeros(stages, np.uint8)

    # -- a heap of slots by the time at which their task ends ---------------------------------------------------------

    cdef inline bint before(self, int32_t a, int32_t b) noexcept nogil:
        return self.finish[a] < self.finish[b] or (self.finish[a] == self.finish[b] and a < b)

    cdef void sift_up(self, int64_t at) noexcept nogil:
        cdef int32_t slot = self.heap[at]
        cdef int64_t above
        while at > 0:
            above = (at - 1) // 2
            if not self.before(slot, self.heap[above]):
                break
            self.heap[at] = self.heap[above]
            self.place[self.heap[at]] = <int32_t>at
            at = above
        self.heap[at] = slot
        self.place[slot] = <int32_t>at

    cdef void sift_down(self, int64_t at) noexcept nogil:
        cdef int32_t slot = self.heap[at]
        cdef int64_t below
        while True:
            below = 2 * at + 1
            if below >= self.heap_size:
                break
            if below + 1 < self.heap_size and self.before(self.heap[below + 1], self.heap[below]):
                below += 1
            if not self.before(self.heap[below], slot):
                break
            self.heap[at] = self.heap[below]
            self.place[self.heap[at]] = <int32_t>at
            at = below
        self.heap[at] = slot
        self.place[slot] = <int32_t>at

    cdef void push(self, int32_t slot) noexcept nogil:
        if self.place[slot] < 0:
            self.heap[self.heap_size] = slot
            self.place[slot] = <int32_t>self.heap_size
            self.heap_size += 1
        self.sift_up(self.place[slot])
        self.sift_down(self.place[slot])

    cdef int32_t pop(self) noexcept nogil:
        cdef int32_t slot = self.heap[0]
        self.heap_size -= 1
        self.place[slot] = -1
        if self.heap_size > 0:
            self.heap[0] = self.heap[self.heap_size]
            self.place[self.heap[0]] = 0
            self.sift_down(0)
        return slot

    # -- nodes --------------------------------------------------------------------------------------------------------

    cdef inline void enable(self, int32_t node, int32_t cause) noexcept nogil:
        """All predecessors have ended."""
        self.cause[node] = cause
        self.todo[self.todo_size] = node
        self.todo_size += 1

    cdef void release(self, int32_t node) noexcept nogil:
        """Tell the successors of what has ended."""
        cdef int64_t at
        cdef int32_t other
        self.done += 1
        for at in range(self.successor_start[node], self.successor_start[node + 1]):
            other = self.successor[at]
            self.pending[other] -= 1
            if self.pending[other] == 0:
                self.enable(other, node)
        if self.greedy:
            if self.closes[node] >= 0:
                self.buffers[self.closes[node]] += 1
                self.wake(self.closes[node] // PHASE_COUNT)
            if self.releases[node] >= 0:
                self.free[self.releases[node]] = 1
                self.wake(self.releases[node])

    cdef inline void wake(self, int32_t stage) noexcept nogil:
        """The stage may be able to choose."""
        if not self.is_changed[stage]:
            self.is_changed[stage] = 1
            self.changed[self.changed_size] = stage
            self.changed_size += 1

    cdef void open(self, int32_t node) noexcept nogil:
        """A segment begins: with credits its tasks join the queues of their slots now."""
        cdef int32_t other, slot
        self.start[node] = self.stop[node] = self.now
        self.sequence[node] = <int32_t>self.started
        self.started += 1
        if self.greedy and self.stop_of[node] > 0:
            for other in range(node + 1, self.stop_of[node]):
                slot = self.slot[other]
                if slot < 0:
                    continue
                if self.head[slot] < 0:
                    self.head[slot] = other
                else:
                    self.following[self.tail[slot]] = other
                self.tail[slot] = other
        self.release(node)

    cdef void settle(self) noexcept nogil:
        """Pass on everything that takes no time, and gather what starts."""
        cdef int32_t node, stage
        while True:
            while self.todo_size > 0:
                self.todo_size -= 1
                node = self.todo[self.todo_size]
                if self.slot[node] >= 0:
                    self.ready[node] = 1
                    if self.head[self.slot[node]] == node:
                        self.attempt(node)
                elif self.greedy and self.gate[node] >= 0:
                    self.arrived[node] = 1
                    self.wake(self.gate[node] // PHASE_COUNT)
                else:
                    self.open(node)
            if self.changed_size == 0:
                return
            self.choose(self.take_changed())

    cdef int32_t take_changed(self) noexcept nogil:
        """The lowest of the stages that may be able to choose."""
        cdef int64_t at, best = 0
        cdef int32_t stage
        for at in range(1, self.changed_size):
            if self.changed[at] < self.changed[best]:
                best = at
        stage = self.changed[best]
        self.changed_size -= 1
        self.changed[best] = self.changed[self.changed_size]
        self.is_changed[stage] = 0
        return stage

    cdef void choose(self, int32_t stage) noexcept nogil:
        """A free stage fires the most urgent segment that can run."""
        cdef int32_t at, phase, which, node
        if not self.free[stage]:
            return
        for at in range(self.priority.shape[0]):
            phase = self.priority[at]
            which = stage * PHASE_COUNT + phase
            if self.queue_at[which] >= self.queue_start[which + 1]:
                continue
            node = self.queue_node[self.queue_at[which]]
            if not self.arrived[node]:
                continue
            if phase == 0:
                if self.buffers[which + 1] <= 0 or self.buffers[which + 2] <= 0:
                    continue
                self.buffers[which + 1] -= 1
                self.buffers[which + 2] -= 1
            self.queue_at[which] += 1
            self.free[stage] = 0
            self.open(node)
            return

    cdef void attempt(self, int32_t node) noexcept nogil:
        """A task is ready and the first of its queue; it starts unless others that it meets cannot yet."""
        cdef int32_t which = self.meeting[node]
        cdef int64_t at
        if which < 0:
            self.begin(node)
            return
        self.met[which] += 1
        if self.met[which] == self.member_start[which + 1] - self.member_start[which]:
            for at in range(self.member_start[which], self.member_start[which + 1]):
                # What the others waited for is what the last of them waited for.
                self.cause[self.member[at]] = self.cause[node]
                self.begin(self.member[at])

    cdef void begin(self, int32_t node) noexcept nogil:
        cdef int32_t slot = self.slot[node]
        cdef int32_t stage = slot // <int32_t>self.streams
        self.touch(stage)
        if self.far[node] >= 0:
            self.touch(self.far[node])
        self.start[node] = self.since[node] = self.now
        self.rest[node] = self.seconds[node]
        self.slow[node] = 0
        self.running[node] = 1
        self.sequence[node] = <int32_t>self.started
        self.started += 1
        self.active[slot] = node
        self.held[stage] += self.allocates[node]
        self.occupy(node, stage, 1)
        self.begun[self.begun_size] = node
        self.begun_size += 1

    cdef void end(self, int32_t node) noexcept nogil:
        cdef int32_t slot = self.slot[node]
        cdef int32_t stage = slot // <int32_t>self.streams
        cdef int32_t follower
        self.touch(stage)
        if self.far[node] >= 0:
            self.touch(self.far[node])
        self.stop[node] = self.now
        self.busy[slot] += self.now - self.start[node]
        self.running[node] = 0
        self.active[slot] = -1
        self.held[stage] -= self.frees[node]
        self.occupy(node, stage, -1)
        self.head[slot] = follower = self.following[node]
        self.release(node)
        if follower >= 0 and self.ready[follower]:
            self.cause[follower] = node
            self.attempt(follower)

    cdef void occupy(self, int32_t node, int32_t stage, int32_t change) noexcept nogil:
        """A link stream takes its share of the link's directions, or gives it back."""
        cdef int32_t link = self.link[node]
        cdef int32_t far = self.far[node]
        cdef int64_t at
        if link < 0:
            return
        self.links_at[stage] += change
        self.load[(stage * self.links + link) * 2] += change
        if far < 0:
            self.load[(stage * self.links + link) * 2 + 1] += change
            return
        self.links_at[far] += change
        self.load[(far * self.links + link) * 2 + 1] += change
        # A stage receives from its two neighbours, one transfer at a time from each.
        for at in range(far * 2, far * 2 + 2):
            if self.incoming[at] == (-1 if change > 0 else node):
                self.incoming[at] = node if change > 0 else -1
                return

    # -- stages -------------------------------------------------------------------------------------------------------

    cdef void touch(self, int32_t stage) noexcept nogil:
        """Before something changes on a stage: what was exposed since the last change."""
        cdef double passed
        cdef int64_t slot, first = stage * self.streams
        cdef int32_t working = 0, node, at
        if not self.is_dirty[stage]:
            self.is_dirty[stage] = 1
            self.dirty[self.dirty_size] = stage
            self.dirty_size += 1
        passed = self.now - self.touched[stage]
        if passed <= 0:
            return
        self.touched[stage] = self.now
        if self.active[first] >= 0:
            return
        for slot in range(first + 1, first + self.streams):
            node = self.active[slot]
            if node >= 0 and self.counts_here[node]:
                working += 1
        for at in range(2):
            if self.incoming[stage * 2 + at] >= 0:
                working += 1
        if working == 0:
            return
        passed = passed / working
        for slot in range(first + 1, first + self.streams):
            node = self.active[slot]
            if node >= 0 and self.counts_here[node]:
                self.exposed[slot] += passed
        for at in range(2):
            node = self.incoming[stage * 2 + at]
            if node >= 0:
                self.exposed[first + self.slot[node] % self.streams] += passed

    cdef inline double share(self, int32_t node) noexcept nogil:
        """How many times as long as undisturbed a task takes now."""
        cdef int32_t stage = self.slot[node] // <int32_t>self.streams
        cdef int32_t link = self.link[node], far = self.far[node]
        cdef int32_t most, other
        if link < 0:
            return 1 + self.slowdown if self.links_at[stage] > 0 else 1.0
        most = self.load[(stage * self.links + link) * 2]
        other = self.load[((stage if far < 0 else far) * self.links + link) * 2 + 1]
        return other if other > most else most

    cdef void refresh(self, int32_t node) noexcept nogil:
        """The speed of a running task, and of all that meet it, from now on."""
        cdef double slow = self.share(node), other
        cdef int32_t which = self.meeting[node]
        cdef int64_t at
        if which < 0:
            self.pace(node, slow)
            return
        for at in range(self.member_start[which], self.member_start[which + 1]):
            other = self.share(self.member[at])
            if other > slow:
                slow = other
        for at in range(self.member_start[which], self.member_start[which + 1]):
            self.pace(self.member[at], slow)

    cdef void pace(self, int32_t node, double slow) noexcept nogil:
        cdef int32_t slot = self.slot[node]
        if slow == self.slow[node]:
            return
        if self.slow[node] > 0:
            self.rest[node] -= (self.now - self.since[node]) / self.slow[node]
            if self.rest[node] < 0:
                self.rest[node] = 0
        self.since[node] = self.now
        self.slow[node] = slow
        self.finish[slot] = self.now + self.rest[node] * slow
        self.push(slot)

    cdef void close_round(self) noexcept nogil:
        """After all that starts at this time: speeds, memory."""
        cdef int64_t at, slot
        cdef int32_t stage, node
        for at in range(self.begun_size):
            self.refresh(self.begun[at])
        self.begun_size = 0
        for at in range(self.dirty_size):
            stage = self.dirty[at]
            self.is_dirty[stage] = 0
            for slot in range(stage * self.streams, (stage + 1) * self.streams):
                node = self.active[slot]
                if node >= 0:
                    self.refresh(node)
            for slot in range(stage * 2, stage * 2 + 2):
                node = self.incoming[slot]
                if node >= 0:
                    self.refresh(node)
            self.sample(stage)
        self.dirty_size = 0

    cdef void sample(self, int32_t stage) noexcept nogil:
        cdef int64_t held = self.held[stage]
        if held > self.peak[stage]:
            self.peak[stage] = held
        # What changes memory changes it at most twice, so there is room for all samples.
        if held != self.sampled[stage]:
            self.sampled[stage] = held
            self.sample_time[self.samples] = self.now
            self.sample_stage[self.samples] = stage
            self.sample_bytes[self.samples] = held
            self.samples += 1

    # -- the run ------------------------------------------------------------------------------------------------------

    cdef void play(self) noexcept nogil:
        cdef int64_t node
        cdef double now
        for node in range(self.nodes - 1, -1, -1):
            if self.pending[node] == 0:
                self.enable(<int32_t>node, -1)
        self.settle()
        self.close_round()
        while self.heap_size > 0:
            now = self.finish[self.heap[0]]
            self.now = now
            while self.heap_size > 0 and self.finish[self.heap[0]] == now:
                self.end(self.active[self.pop()])
            self.settle()
            self.close_round()

    def run(self):
        """Play all events; the arrays of what happened, by node, slot and stage."""
        with nogil:
            self.play()
        count = self.samples
        return {
            "finished": self.done == self.nodes,
            "now": self.now,
            "start": np.asarray(self.start),
            "stop": np.asarray(self.stop),
            "cause": np.asarray(self.cause),
            "sequence": np.asarray(self.sequence),
            "following": np.asarray(self.following),
            "pending": np.asarray(self.pending),
            "busy": np.asarray(self.busy).reshape(self.stages, self.streams),
            "exposed": np.asarray(self.exposed).reshape(self.stages, self.streams),
            "peak": np.asarray(self.peak),
            "samples": (
                np.asarray(self.sample_time)[:count],
                np.asarray(self.sample_stage)[:count],
                np.asarray(self.sample_bytes)[:count],
            ),
        }


def latest_stops(
    const int64_t[::1] successor_start,
    const int32_t[::1] successor,
    const int32_t[::1] following,
    const int32_t[::1] meeting,
    const int64_t[::1] member_start,
    const int32_t[::1] member,
    const int64_t[::1] by_sequence,
    const double[::1] start,
    const double[::1] stop,
    double step_seconds,
):
    """The time by which every node must end so that the step does not take longer, all else as it happened."""
    latest_array = np.full(len(start), step_seconds)
    cdef double[::1] latest = latest_array
    # A collective that meets others must end early enough for all of them.
    begin_array = np.full(len(start), INFINITY)
    cdef double[::1] begin = begin_array
    cdef int64_t at, k, edge
    cdef int32_t node, other, which
    cdef double found
    with nogil:
        for at in range(by_sequence.shape[0] - 1, -1, -1):
            node = <int32_t>by_sequence[at]
            which = meeting[node]
            if which >= 0 and begin[node] < INFINITY:
                continue
            if which < 0:
                found = latest_of(node, successor_start, successor, following, begin, step_seconds)
                latest[node] = found
                begin[node] = found - (stop[node] - start[node])
                continue
            found = step_seconds
            for k in range(member_start[which], member_start[which + 1]):
                found = min(found, latest_of(member[k], successor_start, successor, following, begin, step_seconds))
            for k in range(member_start[which], member_start[which + 1]):
                other = member[k]
                latest[other] = found
                begin[other] = found - (stop[other] - start[other])
    return latest_array


cdef inline double latest_of(
    int32_t node,
    const int64_t[::1] successor_start,
    const int32_t[::1] successor,
    const int32_t[::1] following,
    const double[::1] begin,
    double step_seconds,
) noexcept nogil:
    """The earliest time at which something that waits for the node must begin."""
    cdef double found = step_seconds
    cdef int64_t edge
    for edge in range(successor_start[node], successor_start[node + 1]):
        found = min(found, begin[successor[edge]])
    if following[node] >= 0:
        found = min(found, begin[following[node]])
    return found
