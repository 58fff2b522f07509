"""Annealing by single changes under priced memory: turns almost feasible labels into feasible choices and improves them.

Heat-bath moves (Gumbel noise on the local costs of a random node) on
``cost + prices . usage + penalty * overflow``; overflow sums over rows. The penalty rises until the end is feasible.
"""

from libc.math cimport exp, log
from libc.stdint cimport int32_t, int64_t, uint64_t

import numpy as np

cimport numpy as cnp

cnp.import_array()

cdef int64_t HALF = (<int64_t>1) << 59
cdef double LARGE = 1e28


cdef inline uint64_t next_random(uint64_t *state) noexcept nogil:
    # splitmix64
    state[0] += <uint64_t>0x9E3779B97F4A7C15
    cdef uint64_t z = state[0]
    z = (z ^ (z >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * <uint64_t>0x94D049BB133111EB
    return z ^ (z >> 31)


cdef inline double uniform(uint64_t *state) noexcept nogil:
    return (<double>(next_random(state) >> 11) + 0.5) * (1.0 / 9007199254740992.0)


cdef class Annealer:
    """A choice of a core with its loads; `run` changes it."""

    cdef int n, rows
    cdef int64_t[::1] node_offsets, table_offsets, piece_offsets, capacities, usages, costs_integer, table_integer
    cdef int32_t[:, ::1] edge_nodes, piece_rows
    cdef int32_t[::1] piece_starts, incident_offsets, incident
    cdef double[::1] costs, table, local, noisy, prefix
    cdef int64_t[::1] load
    cdef int32_t[::1] choice, best_choice, order, movable
    cdef uint64_t state
    cdef readonly double best_cost
    cdef readonly bint found
    cdef object core

    def __init__(self, core, prices, uint64_t seed=0):
        self.core = core
        self.n = core.node_count
        self.rows = len(core.capacities)
        self.node_offsets = core.node_offsets
        self.table_offsets = core.table_offsets
        self.piece_offsets = core.piece_offsets
        self.capacities = core.capacities
        self.usages = core.piece_usages
        self.edge_nodes = core.edge_nodes
        self.piece_rows = core.piece_rows
        self.costs = core.costs.astype(np.float64)
        table = core.table_values.astype(np.float64)
        table[core.table_values >= HALF] = LARGE
        self.table = table
        self.piece_starts = np.searchsorted(core.piece_nodes, np.arange(self.n + 1)).astype(np.int32)
        ends = core.edge_nodes
        node = np.concatenate([ends[:, 0], ends[:, 1]])
        edge = np.concatenate([np.arange(len(ends)), np.arange(len(ends))])
        by_node = np.argsort(node, kind="stable")
        self.incident_offsets = np.searchsorted(node[by_node], np.arange(self.n + 1)).astype(np.int32)
        self.incident = edge[by_node].astype(np.int32)
        widest = int(core.sizes.max()) if self.n else 1
        self.local = np.zeros(widest)
        self.noisy = np.zeros(widest)
        self.order = np.zeros(widest, np.int32)
        self.prefix = np.concatenate([[0.0], np.cumsum(prices)])
        self.load = np.zeros(self.rows + 1, np.int64)
        self.choice = np.zeros(self.n, np.int32)
        self.best_choice = np.zeros(self.n, np.int32)
        self.movable = np.flatnonzero(core.sizes > 1).astype(np.int32)
        self.state = seed * 2654435761 + 12345
        self.best_cost = np.inf
        self.found = False

    def start(self, choice):
        """Stand at a choice."""
        cdef int32_t[::1] given = np.ascontiguousarray(choice, np.int32)
        cdef int64_t[::1] loads = self.core.loads(np.asarray(choice, np.int64))
        cdef int r
        self.choice[:] = given
        for r in range(self.rows):
            self.load[r] = loads[r]

    cdef double overflow_change(self, int v, int s, int64_t *now) noexcept nogil:
        """Change of the summed overflow if v takes strategy s; `now` receives the present overflow of v's rows."""
        cdef int p, r
        cdef int64_t difference, excess, after, total = 0, present = 0
        for p in range(self.piece_starts[v], self.piece_starts[v + 1]):
            difference = self.usages[self.piece_offsets[p] + s] - self.usages[self.piece_offsets[p] + self.choice[v]]
            if difference == 0:
                continue
            for r in range(self.piece_rows[p, 0], self.piece_rows[p, 1]):
                excess = self.load[r] - self.capacities[r]
                after = excess + difference
                if excess > 0:
                    total -= excess
                    present += excess
                if after > 0:
                    total += after
        now[0] = present
        return <double>total

    cdef void move(self, int v, int s) noexcept nogil:
        cdef int p, r
        cdef int64_t difference
        for p in range(self.piece_starts[v], self.piece_starts[v + 1]):
            difference = self.usages[self.piece_offsets[p] + s] - self.usages[self.piece_offsets[p] + self.choice[v]]
            if difference != 0:
                for r in range(self.piece_rows[p, 0], self.piece_rows[p, 1]):
                    self.load[r] += difference
        self.choice[v] = s

    cdef bint try_node(self, int v, double temperature, double penalty) noexcept nogil:
        cdef int d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
        cdef int s, k, e, w, dw, p, best
        cdef double weight, entry, low
        cdef double *local = &self.local[0]
        cdef double *values
        cdef int64_t present
        for s in range(d):
            local[s] = self.costs[self.node_offsets[v] + s]
        for p in range(self.piece_starts[v], self.piece_starts[v + 1]):
            weight = self.prefix[self.piece_rows[p, 1]] - self.prefix[self.piece_rows[p, 0]]
            if weight > 0:
                for s in range(d):
                    local[s] += weight * <double>self.usages[self.piece_offsets[p] + s]
        for k in range(self.incident_offsets[v], self.incident_offsets[v + 1]):
            e = self.incident[k]
            values = &self.table[self.table_offsets[e]]
            if self.edge_nodes[e, 0] == v:
                w = self.edge_nodes[e, 1]
                dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
                for s in range(d):
                    local[s] += values[s * dw + self.choice[w]]
            else:
                values += self.choice[self.edge_nodes[e, 0]] * d
                for s in range(d):
                    local[s] += values[s]
        if temperature > 0:
            for s in range(d):
                local[s] += temperature * log(-log(uniform(&self.state)))
        best = self.choice[v]
        low = local[best]
        # without its overflow a strategy is a lower bound only if nothing overflows now; test the promising ones exactly
        for s in range(d):
            if s == self.choice[v]:
                continue
            if local[s] >= LARGE * 0.5:
                continue
            if penalty > 0 and self.rows:
                if local[s] >= low and self.piece_starts[v + 1] == self.piece_starts[v]:
                    continue
                entry = local[s] + penalty * self.overflow_change(v, s, &present)
            else:
                entry = local[s]
            if entry < low:
                low = entry
                best = s
        if best != self.choice[v]:
            self.move(v, best)
            return True
        return False

    cdef double total_cost(self) noexcept nogil:
        cdef int v, e, dw
        cdef double total = 0
        for v in range(self.n):
            total += self.costs[self.node_offsets[v] + self.choice[v]]
        for e in range(<int>self.edge_nodes.shape[0]):
            dw = <int>(self.node_offsets[self.edge_nodes[e, 1] + 1] - self.node_offsets[self.edge_nodes[e, 1]])
            total += self.table[self.table_offsets[e] + self.choice[self.edge_nodes[e, 0]] * dw + self.choice[self.edge_nodes[e, 1]]]
        return total

    cdef bint fits(self) noexcept nogil:
        cdef int r
        for r in range(self.rows):
            if self.load[r] > self.capacities[r]:
                return False
        return True

    def run(self, double start_temperature, double end_temperature, double start_penalty, double end_penalty,
            int rounds, double seconds):
        """`rounds` sweeps over random nodes, temperature and penalty geometric; True if a better feasible choice was met."""
        import time

        cdef int i, k, count = len(self.movable)
        cdef double temperature, penalty, share, cost
        cdef double stop = time.monotonic() + seconds
        cdef bint better = False
        cdef int changed
        if count == 0:
            return False
        for i in range(rounds):
            share = <double>i / max(rounds - 1, 1)
            temperature = start_temperature * (end_temperature / start_temperature) ** share if start_temperature > 0 else 0.0
            penalty = start_penalty * (end_penalty / start_penalty) ** share
            if i >= rounds - 3:
                temperature = 0.0
                penalty *= 100.0
            with nogil:
                changed = 0
                for k in range(count):
                    changed += self.try_node(self.movable[next_random(&self.state) % <uint64_t>count], temperature, penalty)
                if self.fits():
                    cost = self.total_cost()
                    if cost < self.best_cost and cost < LARGE * 0.5:
                        self.best_cost = cost
                        self.best_choice[:] = self.choice
                        self.found = True
                        better = True
            if time.monotonic() > stop:
                break
        return better

    @property
    def best(self):
        return np.array(self.best_choice)

    @property
    def present(self):
        return np.array(self.choice)
