"""The moves of the primal search: flips, ejections and exact tree blocks on cost + prices . usage + mu x overflow.

An `Annealer` holds one choice of a core with everything that makes a move cheap: the local cost of every strategy given the
neighbours' labels, and the slack of every memory row under two levels of block minima, so that a flip that does not reach
a tight row is judged without looking at rows. Schedules are in `sbp.planner.solver.search`.
"""

from libc.math cimport exp, log
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.string cimport memcpy

import numpy as np

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
    #define SBP_CLONES __attribute__((target_clones("avx2", "default")))
    #else
    #define SBP_CLONES
    #endif
    /* into[t] += plus[t] - minus[t] */
    SBP_CLONES static void sbp_exchange(double *into, const double *plus, const double *minus, int count) {
        for (int t = 0; t < count; t++) into[t] += plus[t] - minus[t];
    }
    SBP_CLONES static void sbp_subtract(double *into, const double *minus, int count) {
        for (int t = 0; t < count; t++) into[t] -= minus[t];
    }
    /* into[s] += min over t of cost[t] + table[t, s]; low is scratch */
    SBP_CLONES static void sbp_message(double *into, double *low, const double *cost, const double *table, int rows, int columns) {
        for (int s = 0; s < columns; s++) low[s] = cost[0] + table[s];
        for (int t = 1; t < rows; t++) {
            const double *row = table + (long)t * columns;
            double shift = cost[t];
            for (int s = 0; s < columns; s++) {
                double entry = row[s] + shift;
                low[s] = entry < low[s] ? entry : low[s];
            }
        }
        for (int s = 0; s < columns; s++) into[s] += low[s];
    }
    /* what using delta more costs in overflow, over rows of slack[r] + shift */
    SBP_CLONES static double sbp_overflow_change(const double *slack, int count, double shift, double delta) {
        double total = 0;
        for (int r = 0; r < count; r++) {
            double now = slack[r] + shift;
            double then = now - delta;
            total += (now < 0 ? now : 0) - (then < 0 ? then : 0);
        }
        return total;
    }
    SBP_CLONES static double sbp_minimum(const double *values, int count) {
        double low = values[0];
        for (int r = 1; r < count; r++) low = values[r] < low ? values[r] : low;
        return low;
    }
    """
    void sbp_exchange(double *into, const double *plus, const double *minus, int count) noexcept nogil
    void sbp_subtract(double *into, const double *minus, int count) noexcept nogil
    void sbp_message(double *into, double *low, const double *cost, const double *table, int rows, int columns) noexcept nogil
    double sbp_overflow_change(const double *slack, int count, double shift, double delta) noexcept nogil
    double sbp_minimum(const double *values, int count) noexcept nogil

cdef int BLOCK_BITS = 6
cdef int GROUP_BITS = 10  # 16 blocks
cdef int GUMBELS = 1 << 16
cdef int RESPONSES = 8
cdef int CHAIN = 3
cdef double NOTHING = 1e300
cdef int64_t HALF = (<int64_t>1) << 59


def disjoint_pieces(core):
    """The core's pieces cut so that those of one node do not overlap.

    Returns
    -------
    offsets : int32 (nodes + 1,)
    rows : int32 (segments, 2)
        First row and last + 1.
    starts : int64 (segments + 1,)
        Where a segment's usages begin.
    usages : float64
        Usage of every strategy of the node.
    """
    cdef int v
    counts = np.bincount(core.piece_nodes, minlength=core.node_count) if len(core.piece_nodes) else np.zeros(core.node_count, int)
    first_piece = np.concatenate([[0], np.cumsum(counts)])
    order = np.argsort(core.piece_nodes, kind="stable")
    sizes = core.sizes
    offsets, rows, blocks = [0], [], []
    for v in range(core.node_count):
        pieces = order[first_piece[v] : first_piece[v + 1]]
        intervals = core.piece_rows[pieces]
        cuts = np.unique(intervals)
        d = int(sizes[v])
        usage = np.zeros((max(len(cuts) - 1, 0), d))
        for piece, low, high in zip(pieces.tolist(), np.searchsorted(cuts, intervals[:, 0]), np.searchsorted(cuts, intervals[:, 1])):
            usage[low:high] += core.piece_usages[core.piece_offsets[piece] : core.piece_offsets[piece + 1]]
        last = -1
        for position in range(len(cuts) - 1):
            if not usage[position].any():
                last = -1
                continue
            if last >= 0 and (usage[position] == usage[last]).all():
                rows[len(rows) - 1][1] = cuts[position + 1]
                continue
            rows.append([cuts[position], cuts[position + 1]])
            blocks.append(usage[position])
            last = position
        offsets.append(len(rows))
    starts = np.concatenate([[0], np.cumsum([len(block) for block in blocks])]).astype(np.int64)
    return (
        np.array(offsets, np.int32),
        np.array(rows, np.int32).reshape(-1, 2),
        starts,
        np.concatenate(blocks) if blocks else np.zeros(0),
    )


cdef class Annealer:
    """One choice of a core and the moves on it. Everything is double; costs exclude the core's constant.

    Parameters
    ----------
    core : Core
    seed : int
    scale : float
        A forbidden strategy or pair counts this much: more than any choice of interest costs.
    """

    cdef readonly int node_count, row_count, group_count
    cdef readonly double energy, cost, overflow, best_cost
    cdef readonly int64_t accepted, tried
    cdef object core
    cdef double forbidden
    cdef int64_t[::1] node_offsets
    cdef double[::1] costs, priced, local
    # arcs: both directions of every edge; the table of an arc is [source strategy, target strategy]
    cdef int32_t[::1] arc_offsets, arc_target
    cdef int64_t[::1] arc_table
    cdef double[::1] tables
    cdef int32_t[::1] segment_offsets, segment_node
    cdef int32_t[:, ::1] segment_rows
    cdef int64_t[::1] segment_starts
    cdef double[::1] usages, capacities
    cdef int64_t[::1] block_offsets
    cdef int32_t[::1] block_segments
    cdef double[::1] slack, block_shift, block_low, group_shift, group_low
    cdef int32_t[::1] label, best_label
    cdef float[::1] gumbels
    cdef uint64_t random
    cdef double[::1] key, low_scratch, tree_cost
    cdef int64_t tree_room
    cdef int32_t[::1] stamp, touched, touches, frontier, tree, tree_parent, tree_arc, tree_label, position
    cdef int64_t[::1] tree_start
    cdef int32_t now
    cdef int32_t[::1] journal_node, journal_label
    cdef int journal

    def __init__(self, core, seed=0, scale=None):
        self.core = core
        self.node_count = n = core.node_count
        self.row_count = len(core.capacities)
        self.forbidden = float(2 * (core.worst_cost() - core.constant) + 1 if scale is None else scale)
        self.node_offsets = core.node_offsets
        self.costs = np.where(core.costs >= HALF, self.forbidden, core.costs.astype(np.float64))
        self.priced = np.array(self.costs)
        self.local = np.array(self.costs)
        self._build_arcs()
        offsets, rows, starts, usages = disjoint_pieces(core)
        self.segment_offsets, self.segment_rows, self.segment_starts, self.usages = offsets, rows, starts, usages
        self.segment_node = np.repeat(np.arange(n, dtype=np.int32), np.diff(offsets))
        self._build_blocks(rows)
        self.capacities = core.capacities.astype(np.float64)
        self.label = np.zeros(n, np.int32)
        self.best_label = np.zeros(n, np.int32)
        self.best_cost = np.inf
        levels = (np.arange(GUMBELS) + 0.5) / GUMBELS
        self.gumbels = (-np.log(-np.log(levels))).astype(np.float32)
        self.random = ((int(seed) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 64)) | 1
        largest = int(core.sizes.max()) if n else 1
        self.key = np.zeros(largest)
        self.low_scratch = np.zeros(largest)
        self.tree_room = max(1 << 16, 4 * largest)
        self.tree_cost = np.zeros(self.tree_room)
        self.stamp = np.zeros(n, np.int32)
        self.touched = np.zeros(n, np.int32)
        self.touches = np.zeros(n, np.int32)
        self.frontier = np.zeros(2 * n + 2, np.int32)
        self.tree = np.zeros(n + 1, np.int32)
        self.tree_parent = np.zeros(n + 1, np.int32)
        self.tree_arc = np.zeros(n + 1, np.int32)
        self.tree_label = np.zeros(n + 1, np.int32)
        self.position = np.zeros(n, np.int32)
        self.tree_start = np.zeros(n + 1, np.int64)
        self.journal_node = np.zeros(n + CHAIN + 2, np.int32)
        self.journal_label = np.zeros(n + CHAIN + 2, np.int32)
        self.set_state(np.zeros(n, np.int32), np.zeros(self.row_count))

    def _build_arcs(self):
        core = self.core
        ends = core.edge_nodes
        edges = len(ends)
        sizes = core.sizes
        values = np.where(core.table_values >= HALF, self.forbidden, core.table_values.astype(np.float64))
        total = len(values)
        tables = np.empty(2 * total)
        tables[:total] = values
        for edge in range(edges):
            low, high = core.table_offsets[edge], core.table_offsets[edge + 1]
            tables[total + low : total + high] = (
                values[low:high].reshape(sizes[ends[edge, 0]], sizes[ends[edge, 1]]).T.ravel()
            )
        self.tables = tables
        source = np.concatenate([ends[:, 0], ends[:, 1]])
        target = np.concatenate([ends[:, 1], ends[:, 0]])
        where = np.concatenate([core.table_offsets[:edges], total + core.table_offsets[:edges]])
        order = np.lexsort((target, source))
        counts = np.bincount(source, minlength=self.node_count) if edges else np.zeros(self.node_count, int)
        self.arc_offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.arc_target = np.ascontiguousarray(target[order], np.int32)
        self.arc_table = np.ascontiguousarray(where[order], np.int64)

    def _build_blocks(self, rows):
        self.group_count = (self.row_count >> GROUP_BITS) + 1
        blocks = self.group_count << (GROUP_BITS - BLOCK_BITS)
        first = rows[:, 0] >> BLOCK_BITS
        counts = ((rows[:, 1] - 1) >> BLOCK_BITS) - first + 1
        segment = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
        ends = np.cumsum(counts)
        block = np.repeat(first, counts) + np.arange(len(segment)) - np.repeat(ends - counts, counts)
        order = np.argsort(block, kind="stable")
        self.block_segments = np.ascontiguousarray(segment[order])
        self.block_offsets = np.concatenate([[0], np.cumsum(np.bincount(block, minlength=blocks))]).astype(np.int64)
        self.slack = np.full(self.group_count << GROUP_BITS, NOTHING)
        self.block_shift = np.zeros(blocks)
        self.block_low = np.zeros(blocks)
        self.group_shift = np.zeros(self.group_count)
        self.group_low = np.zeros(self.group_count)

    # ------------------------------------------------------------------ state

    def set_state(self, labels, prices=None):
        """Take over a choice and, when given, row prices >= 0 (cost per byte); everything cached is recomputed."""
        cdef int g, v, i, d, a, k, w, dw
        cdef int64_t start
        cdef double weight, before, used
        cdef int32_t[::1] given = np.ascontiguousarray(labels, np.int32)
        self.label[:] = given
        if prices is not None:
            prefix = np.concatenate([[0.0], np.cumsum(np.asarray(prices, np.float64))])
            self.priced[:] = self.costs
            if len(self.segment_node):
                weights = np.maximum(prefix[np.asarray(self.segment_rows)[:, 1]] - prefix[np.asarray(self.segment_rows)[:, 0]], 0.0)
                for g in range(self.segment_node.shape[0]):
                    weight = weights[g]
                    if weight > 0:
                        v = self.segment_node[g]
                        d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
                        for i in range(d):
                            self.priced[self.node_offsets[v] + i] += weight * self.usages[self.segment_starts[g] + i]
        cdef double[::1] change = np.zeros(self.row_count + 1)
        with nogil:
            self.local[:] = self.priced
            for v in range(self.node_count):
                a = self.label[v]
                for k in range(self.arc_offsets[v], self.arc_offsets[v + 1]):
                    w = self.arc_target[k]
                    dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
                    start = self.arc_table[k] + <int64_t>a * dw
                    for i in range(dw):
                        self.local[self.node_offsets[w] + i] += self.tables[start + i]
            self.energy = 0
            self.cost = 0
            for v in range(self.node_count):
                start = self.node_offsets[v] + self.label[v]
                # half of the edges: each is counted from both ends
                before = 0.5 * (self.local[start] - self.priced[start])
                self.energy += self.priced[start] + before
                self.cost += self.costs[start] + before
            for g in range(self.segment_node.shape[0]):
                used = self.usages[self.segment_starts[g] + self.label[self.segment_node[g]]]
                change[self.segment_rows[g, 0]] += used
                change[self.segment_rows[g, 1]] -= used
            used = 0
            self.overflow = 0
            for i in range(self.row_count):
                used += change[i]
                self.slack[i] = self.capacities[i] - used
                if self.slack[i] < 0:
                    self.overflow -= self.slack[i]
            self.block_shift[:] = 0
            self.group_shift[:] = 0
            for g in range(self.group_count << (GROUP_BITS - BLOCK_BITS)):
                self.block_low[g] = sbp_minimum(&self.slack[g << BLOCK_BITS], 1 << BLOCK_BITS)
            for g in range(self.group_count):
                self.group_low[g] = sbp_minimum(&self.block_low[g << (GROUP_BITS - BLOCK_BITS)], 1 << (GROUP_BITS - BLOCK_BITS))
            self.note_best()

    def forget_best(self):
        """Start the record of the best feasible choice anew."""
        self.best_cost = np.inf
        self.note_best()

    cdef inline void note_best(self) noexcept nogil:
        if self.overflow < 0.5 and self.cost < self.best_cost - 0.25 and self.cost < self.forbidden:
            self.best_cost = self.cost
            memcpy(&self.best_label[0], &self.label[0], self.node_count * sizeof(int32_t))

    cdef inline uint64_t draw(self) noexcept nogil:
        self.random ^= self.random >> 12
        self.random ^= self.random << 25
        self.random ^= self.random >> 27
        return self.random * <uint64_t>2685821657736338717

    cdef inline int below(self, int count) noexcept nogil:
        return <int>(((self.draw() >> 32) * <uint64_t>count) >> 32)

    cdef inline double uniform(self) noexcept nogil:
        return <double>(self.draw() >> 11) * (1.0 / 9007199254740992.0)

    cdef inline double gumbel(self) noexcept nogil:
        return self.gumbels[self.draw() >> 48]

    cdef inline bint take(self, double change, double temperature) noexcept nogil:
        if change <= 0:
            return True
        return temperature > 0 and change < 40 * temperature and self.uniform() < exp(-change / temperature)

    # ------------------------------------------------------------------ memory rows

    cdef double interval_change(self, int low, int high, double delta) noexcept nogil:
        """What `delta` more bytes on rows [low, high) change of the overflow."""
        cdef int row = low, group, block, end
        cdef double total = 0, need = delta if delta > 0 else 0
        while row < high:
            group = row >> GROUP_BITS
            if self.group_low[group] >= need:
                row = (group + 1) << GROUP_BITS
                continue
            block = row >> BLOCK_BITS
            end = (block + 1) << BLOCK_BITS
            if end > high:
                end = high
            if self.block_low[block] + self.group_shift[group] < need:
                total += sbp_overflow_change(
                    &self.slack[row], end - row, self.block_shift[block] + self.group_shift[group], delta
                )
            row = end
        return total

    cdef void interval_add(self, int low, int high, double delta) noexcept nogil:
        """Use `delta` more bytes on rows [low, high)."""
        cdef int row = low, group, block, end, i
        while row < high:
            group = row >> GROUP_BITS
            if (row & ((1 << GROUP_BITS) - 1)) == 0 and row + (1 << GROUP_BITS) <= high:
                self.group_shift[group] -= delta
                self.group_low[group] -= delta
                row += 1 << GROUP_BITS
                continue
            block = row >> BLOCK_BITS
            end = (block + 1) << BLOCK_BITS
            if row == block << BLOCK_BITS and end <= high:
                self.block_shift[block] -= delta
                self.block_low[block] -= delta
            else:
                if end > high:
                    end = high
                for i in range(row, end):
                    self.slack[i] -= delta
                self.block_low[block] = (
                    sbp_minimum(&self.slack[block << BLOCK_BITS], 1 << BLOCK_BITS) + self.block_shift[block]
                )
            row = end
            if row >= high or (row & ((1 << GROUP_BITS) - 1)) == 0:
                self.group_low[group] = self.group_shift[group] + sbp_minimum(
                    &self.block_low[group << (GROUP_BITS - BLOCK_BITS)], 1 << (GROUP_BITS - BLOCK_BITS)
                )

    cdef double flip_overflow(self, int v, int b) noexcept nogil:
        """Change of the overflow when node v alone goes to strategy b."""
        cdef int g, a = self.label[v]
        cdef double total = 0, delta
        for g in range(self.segment_offsets[v], self.segment_offsets[v + 1]):
            delta = self.usages[self.segment_starts[g] + b] - self.usages[self.segment_starts[g] + a]
            if delta != 0:
                total += self.interval_change(self.segment_rows[g, 0], self.segment_rows[g, 1], delta)
        return total

    cdef double relief(self, int v) noexcept nogil:
        """The most overflow that node v can remove."""
        cdef int g, a = self.label[v]
        cdef double total = 0, used
        if self.overflow <= 0:
            return 0
        for g in range(self.segment_offsets[v], self.segment_offsets[v + 1]):
            used = self.usages[self.segment_starts[g] + a]
            if used > 0:
                total -= self.interval_change(self.segment_rows[g, 0], self.segment_rows[g, 1], -used)
        return total

    # ------------------------------------------------------------------ moves

    cdef void flip(self, int v, int b) noexcept nogil:
        cdef int a = self.label[v], k, w, dw, g
        cdef int64_t base = self.node_offsets[v]
        cdef double delta, change
        change = self.local[base + b] - self.local[base + a]
        self.energy += change
        self.cost += change - (self.priced[base + b] - self.priced[base + a]) + self.costs[base + b] - self.costs[base + a]
        for k in range(self.arc_offsets[v], self.arc_offsets[v + 1]):
            w = self.arc_target[k]
            dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
            sbp_exchange(
                &self.local[self.node_offsets[w]],
                &self.tables[self.arc_table[k] + <int64_t>b * dw],
                &self.tables[self.arc_table[k] + <int64_t>a * dw],
                dw,
            )
        for g in range(self.segment_offsets[v], self.segment_offsets[v + 1]):
            delta = self.usages[self.segment_starts[g] + b] - self.usages[self.segment_starts[g] + a]
            if delta != 0:
                self.overflow += self.interval_change(self.segment_rows[g, 0], self.segment_rows[g, 1], delta)
                self.interval_add(self.segment_rows[g, 0], self.segment_rows[g, 1], delta)
        self.label[v] = b

    cdef void flip_noted(self, int v, int b) noexcept nogil:
        self.journal_node[self.journal] = v
        self.journal_label[self.journal] = self.label[v]
        self.journal += 1
        self.flip(v, b)

    cdef void back(self) noexcept nogil:
        while self.journal > 0:
            self.journal -= 1
            self.flip(self.journal_node[self.journal], self.journal_label[self.journal])

    cdef int answer(self, int v, double temperature, double mu, double *gain) noexcept nogil:
        """Strategy of least local cost + mu x overflow (+ Gumbel noise); `gain` is what it is below the current one.

        The change of the overflow is computed only for strategies that could win.
        """
        cdef int64_t base = self.node_offsets[v]
        cdef int d = <int>(self.node_offsets[v + 1] - base), s, a = self.label[v], best = a, candidate
        cdef double *key = &self.key[0]
        cdef double here = self.local[base + a], lowest, value, slack
        if temperature > 0:
            for s in range(d):
                key[s] = self.local[base + s] - here - temperature * self.gumbel()
        else:
            for s in range(d):
                key[s] = self.local[base + s] - here
        lowest = key[a]
        gain[0] = 0
        key[a] = NOTHING
        slack = mu * self.relief(v)
        value = lowest
        while True:
            candidate = 0
            for s in range(1, d):
                if key[s] < key[candidate]:
                    candidate = s
            if key[candidate] - slack >= lowest:
                break
            value = key[candidate] + mu * self.flip_overflow(v, candidate)
            key[candidate] = NOTHING
            if value < lowest:
                lowest = value
                best = candidate
                gain[0] = -value
        return best

    cdef bint heat_bath(self, int v, double temperature, double mu) noexcept nogil:
        cdef double gain
        cdef int best = self.answer(v, temperature, mu, &gain)
        if best == self.label[v]:
            return False
        self.flip(v, best)
        return True

    cdef bint ejection(self, int v, double temperature, double mu) noexcept nogil:
        """Move v whatever memory says; then let nodes on the row that suffers most answer, and judge the whole."""
        cdef int64_t base = self.node_offsets[v]
        cdef int d = <int>(self.node_offsets[v + 1] - base), s, a = self.label[v], best = -1, step, row, tries, g, w, block
        cdef int response, chosen, chosen_label
        cdef double low = NOTHING, value, gain, chosen_gain
        cdef double energy = self.energy, overflow = self.overflow
        cdef int64_t start, count
        if d < 2:
            return False
        for s in range(d):
            if s != a:
                value = self.local[base + s] - temperature * self.gumbel()
                if value < low:
                    low = value
                    best = s
        if self.local[base + best] - self.local[base + a] > 0.5 * self.forbidden:
            return False
        self.journal = 0
        self.flip_noted(v, best)
        for step in range(CHAIN):
            if self.overflow <= overflow:
                break
            row = self.worst_row(self.journal_node[self.journal - 1], self.journal_label[self.journal - 1])
            if row < 0:
                break
            block = row >> BLOCK_BITS
            start = self.block_offsets[block]
            count = self.block_offsets[block + 1] - start
            chosen = -1
            chosen_label = 0
            chosen_gain = -NOTHING
            for tries in range(RESPONSES):
                g = self.block_segments[start + self.below(<int>count)]
                w = self.segment_node[g]
                if w == v or row < self.segment_rows[g, 0] or row >= self.segment_rows[g, 1]:
                    continue
                if self.usages[self.segment_starts[g] + self.label[w]] <= 0:
                    continue
                response = self.answer(w, 0, mu, &gain)
                if response != self.label[w] and gain > chosen_gain:
                    chosen, chosen_label, chosen_gain = w, response, gain
            if chosen < 0:
                break
            self.flip_noted(chosen, chosen_label)
        if self.take(self.energy - energy + mu * (self.overflow - overflow), temperature):
            return True
        self.back()
        return False

    cdef int worst_row(self, int v, int before) noexcept nogil:
        """The row of least (negative) slack among those that node v uses more than with strategy `before`."""
        cdef int g, row, worst = -1, block, end
        cdef double least = 0, shift
        for g in range(self.segment_offsets[v], self.segment_offsets[v + 1]):
            if self.usages[self.segment_starts[g] + self.label[v]] <= self.usages[self.segment_starts[g] + before]:
                continue
            row = self.segment_rows[g, 0]
            while row < self.segment_rows[g, 1]:
                if self.group_low[row >> GROUP_BITS] >= least:
                    row = ((row >> GROUP_BITS) + 1) << GROUP_BITS
                    continue
                block = row >> BLOCK_BITS
                end = (block + 1) << BLOCK_BITS
                if end > self.segment_rows[g, 1]:
                    end = self.segment_rows[g, 1]
                shift = self.block_shift[block] + self.group_shift[row >> GROUP_BITS]
                if self.block_low[block] + self.group_shift[row >> GROUP_BITS] < least:
                    while row < end:
                        if self.slack[row] + shift < least:
                            least = self.slack[row] + shift
                            worst = row
                        row += 1
                row = end
        return worst

    cdef int grow(self, int root, int most) noexcept nogil:
        """A random induced tree: `tree`, `tree_parent` (positions) and `tree_arc` (arc from a node to its parent)."""
        cdef int count = 0, waiting = 0, v = root, parent = -1, pick, k, w, up
        cdef int64_t room = 0
        self.now += 1
        if self.now == 2147483647:
            self.now = 1
            self.stamp[:] = 0
            self.touched[:] = 0
        while True:
            room += self.node_offsets[v + 1] - self.node_offsets[v]
            if room > self.tree_room:
                break
            self.tree_start[count] = room - (self.node_offsets[v + 1] - self.node_offsets[v])
            up = -1
            self.stamp[v] = self.now
            self.position[v] = count
            self.tree_arc[count] = -1
            self.tree_parent[count] = -1
            for k in range(self.arc_offsets[v], self.arc_offsets[v + 1]):
                w = self.arc_target[k]
                if self.stamp[w] == self.now:
                    self.tree_arc[count] = k
                    self.tree_parent[count] = self.position[w]
                elif self.touched[w] != self.now:
                    self.touched[w] = self.now
                    self.touches[w] = 1
                    if waiting < 2 * self.node_count:
                        self.frontier[waiting] = w
                        waiting += 1
                else:
                    self.touches[w] += 1
            self.tree[count] = v
            count += 1
            if count >= most:
                break
            v = -1
            while waiting > 0:
                pick = self.below(waiting)
                w = self.frontier[pick]
                waiting -= 1
                self.frontier[pick] = self.frontier[waiting]
                if self.touches[w] == 1:
                    v = w
                    break
            if v < 0:
                break
        return count

    cdef void solve_tree(self, int count, double temperature, int mode) noexcept nogil:
        """Exact labels of the grown tree, all else fixed, into `tree_label`.

        `mode` 0: with Gumbel noise of `temperature`. 1: without noise, the root at another label than now, drawn by its
        min-marginals. 2: the same, drawn uniformly.
        """
        cdef int i, s, t, v, w, d, dw, k, best
        cdef double *cost
        cdef double *table
        cdef double value, low
        for i in range(count):
            v = self.tree[i]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            cost = &self.tree_cost[self.tree_start[i]]
            memcpy(cost, &self.local[self.node_offsets[v]], d * sizeof(double))
            if mode == 0 and temperature > 0:
                for s in range(d):
                    cost[s] -= temperature * self.gumbel()
        for i in range(1, count):
            # take the tree's own edges out of the local costs of both ends
            v = self.tree[i]
            k = self.tree_arc[i]
            w = self.arc_target[k]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
            table = &self.tables[self.arc_table[k]]
            sbp_subtract(&self.tree_cost[self.tree_start[self.tree_parent[i]]], table + <int64_t>self.label[v] * dw, dw)
            cost = &self.tree_cost[self.tree_start[i]]
            for s in range(d):
                cost[s] -= table[<int64_t>s * dw + self.label[w]]
        for i in range(count - 1, 0, -1):
            v = self.tree[i]
            k = self.tree_arc[i]
            w = self.arc_target[k]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
            sbp_message(
                &self.tree_cost[self.tree_start[self.tree_parent[i]]],
                &self.low_scratch[0],
                &self.tree_cost[self.tree_start[i]],
                &self.tables[self.arc_table[k]],
                d,
                dw,
            )
        v = self.tree[0]
        d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
        cost = &self.tree_cost[0]
        best = -1
        if mode == 2 and d > 1:
            best = self.below(d - 1)
            if best >= self.label[v]:
                best += 1
        else:
            low = NOTHING
            for s in range(d):
                if mode == 1:
                    if s == self.label[v]:
                        continue
                    value = cost[s] - temperature * self.gumbel()
                else:
                    value = cost[s]
                if best < 0 or value < low:
                    low = value
                    best = s
            if best < 0:
                best = self.label[v]
        self.tree_label[0] = best
        for i in range(1, count):
            v = self.tree[i]
            k = self.tree_arc[i]
            w = self.arc_target[k]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
            table = &self.tables[self.arc_table[k]]
            cost = &self.tree_cost[self.tree_start[i]]
            s = self.tree_label[self.tree_parent[i]]
            best = 0
            low = cost[0] + table[s]
            for t in range(1, d):
                value = cost[t] + table[<int64_t>t * dw + s]
                if value < low:
                    low = value
                    best = t
            self.tree_label[i] = best

    cdef bint tree_move(self, int root, int most, double temperature, double mu, int mode) noexcept nogil:
        cdef int count = self.grow(root, most), i
        cdef double energy = self.energy, overflow = self.overflow, change
        if count == 0:
            return False
        self.solve_tree(count, temperature, mode)
        self.journal = 0
        for i in range(count):
            if self.tree_label[i] != self.label[self.tree[i]]:
                self.flip_noted(self.tree[i], self.tree_label[i])
        if self.journal == 0:
            return False
        change = mu * (self.overflow - overflow)
        # Noise has already judged the energy of a free tree.
        if mode != 0 or temperature <= 0:
            change += self.energy - energy
        if self.energy - energy < 0.5 * self.forbidden and self.take(change, temperature):
            return True
        self.back()
        return False

    # ------------------------------------------------------------------ public

    def run(self, int64_t moves, double temperature, double mu, double free=0.01, double forced=0.03, double eject=0.1, int largest=80):
        """Make so many moves at one temperature and price of overflow (cost per byte and row).

        Parameters
        ----------
        free, forced, eject : float
            Fractions of the moves that are free trees, forced trees and ejections; the rest are heat-bath flips.
        largest : int
            Most nodes of a tree; sizes are log-uniform from 2.
        """
        cdef int64_t i
        cdef int v, most
        cdef double kind, ratio
        cdef bint done
        if self.node_count == 0:
            return
        largest = max(2, min(largest, self.node_count))
        ratio = log(largest / 2.0 + 1e-9)
        with nogil:
            for i in range(moves):
                v = self.below(self.node_count)
                kind = self.uniform()
                if kind >= free + forced + eject:
                    done = self.heat_bath(v, temperature, mu)
                elif kind < free + forced:
                    most = <int>(2.0 * exp(self.uniform() * ratio) + 0.5)
                    if kind < free:
                        done = self.tree_move(v, most, temperature, mu, 0)
                    else:
                        done = self.tree_move(v, most, temperature, mu, 1 if self.draw() >> 63 else 2)
                else:
                    done = self.ejection(v, temperature, mu)
                self.tried += 1
                if done:
                    self.accepted += 1
                    self.note_best()

    def try_tree(self, int root, int most, int mode=0, double temperature=0.0):
        """Grow and solve one tree without moving: (nodes, their exact labels). Mode as in `solve_tree`."""
        cdef int count = self.grow(root, most)
        self.solve_tree(count, temperature, mode)
        return np.array(self.tree[:count]), np.array(self.tree_label[:count])

    def overflow_if(self, int v, int b):
        """The overflow (bytes, summed over rows) after node v alone goes to strategy b."""
        return self.overflow + self.flip_overflow(v, b)

    def move_to(self, int v, int b):
        """Flip one node."""
        self.flip(v, b)
        self.note_best()

    @property
    def labels(self):
        return np.array(self.label)

    @property
    def best_labels(self):
        return np.array(self.best_label)

    @property
    def local_costs(self):
        return np.array(self.local)

    @property
    def slacks(self):
        """Capacity minus load of every row, bytes."""
        blocks = np.asarray(self.block_shift).repeat(1 << BLOCK_BITS)
        groups = np.asarray(self.group_shift).repeat(1 << GROUP_BITS)
        return (np.asarray(self.slack) + blocks + groups)[: self.row_count]

    def row_capacities(self):
        """Capacity of every row, bytes."""
        return np.array(self.capacities)

    def mean_usage_change(self):
        """Mean of |usage(s) - usage(label)| over the pieces' strategies, bytes."""
        cdef int g, i, d, v
        cdef double total = 0
        cdef int64_t count = 0
        for g in range(self.segment_node.shape[0]):
            v = self.segment_node[g]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            for i in range(d):
                total += abs(self.usages[self.segment_starts[g] + i] - self.usages[self.segment_starts[g] + self.label[v]])
            count += d
        return total / count if count else 0.0
