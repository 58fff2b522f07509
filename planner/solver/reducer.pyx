"""Exact reductions of an integer layout problem, with an undo log in terms of original strategies.

Every step keeps at least one optimal choice and its cost. The log is one flat list of int32 records, each saying what an
eliminated node chooses as a function of one or two surviving neighbours' *original* strategies; undoing reads it backwards.

Source of the ideas: soft arc consistency and dead-end elimination for weighted constraint networks (Cooper et al. 2010,
"Soft arc consistency revisited"), bucket elimination (Dechter 1999). Memory is kept exact: a merged node carries the pieces of
both, and usages are stored relative to their minimum, which is charged to the capacity of the rows.
"""

from libc.stdint cimport int8_t, int32_t, int64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

import numpy as np

cimport numpy as cnp

cnp.import_array()

cdef int64_t FORBIDDEN = (<int64_t>1) << 60
cdef int64_t HALF = (<int64_t>1) << 59

FORBIDDEN_COST = int(FORBIDDEN)

# What a pass may use; `SWITCH_ALL` is everything.
SWITCH_ELIMINATE = 1
SWITCH_FUNCTIONAL = 2
SWITCH_DOMINANCE = 4
SWITCH_ROWS = 8
SWITCH_ALL = 15

cdef int RECORD_FIXED = 0
cdef int RECORD_ONE = 1
cdef int RECORD_TWO = 2

ctypedef struct Piece:
    int first
    int last
    int64_t *usage


cdef inline int64_t plus(int64_t a, int64_t b) noexcept nogil:
    if a >= HALF or b >= HALF:
        return FORBIDDEN
    return a + b


cdef void *allocate(size_t size) except NULL:
    cdef void *memory = malloc(size if size else 1)
    if memory == NULL:
        raise MemoryError("out of memory in the reductions")
    return memory


cdef class Reducer:
    """A problem that shrinks in place; see `sbp.planner.solver.reduce` for the function around it."""

    cdef int node_count, row_count, switches
    cdef int8_t *alive
    cdef int32_t *domain
    cdef int32_t **original
    cdef int64_t **cost
    # incident edges of a node; an edge knows its place in both lists, so removal is O(1)
    cdef int32_t **incident
    cdef int32_t *degree
    cdef int32_t *room
    cdef int32_t edge_count, edge_room
    cdef int32_t *end_a
    cdef int32_t *end_b
    cdef int32_t *place_a
    cdef int32_t *place_b
    cdef int64_t **table
    cdef int8_t *dirty
    cdef Piece **pieces
    cdef int32_t *piece_count
    cdef int64_t *capacity
    cdef int32_t *row_original
    cdef int32_t *queue
    cdef int8_t *state          # bit 1: waits in the queue, bit 2: waits for the dominance test
    cdef int queue_head, queue_size
    cdef int32_t *log
    cdef size_t log_size, log_room
    cdef list record_starts
    cdef int64_t *scratch
    cdef int32_t *scratch_index
    cdef size_t scratch_room
    cdef public object constant
    cdef readonly bint infeasible
    cdef readonly str infeasible_because
    cdef readonly int infeasible_node, infeasible_row
    cdef readonly dict counts
    cdef public int64_t growth_limit
    cdef public int64_t table_limit
    cdef public int64_t work_limit
    cdef object original_nodes

    def __cinit__(self):
        self.node_count = 0
        self.edge_count = 0
        self.log = NULL
        self.scratch = NULL
        self.scratch_index = NULL

    def __init__(
        self,
        cnp.ndarray[cnp.int64_t, ndim=1] node_offsets,
        cnp.ndarray[cnp.int64_t, ndim=1] costs,
        cnp.ndarray[cnp.int32_t, ndim=2] edge_nodes,
        cnp.ndarray[cnp.int32_t, ndim=1] edge_tables,
        cnp.ndarray[cnp.int64_t, ndim=1] table_offsets,
        cnp.ndarray[cnp.int64_t, ndim=1] table_values,
        cnp.ndarray[cnp.int32_t, ndim=1] piece_nodes,
        cnp.ndarray[cnp.int32_t, ndim=2] piece_rows,
        cnp.ndarray[cnp.int64_t, ndim=1] piece_offsets,
        cnp.ndarray[cnp.int64_t, ndim=1] piece_usages,
        cnp.ndarray[cnp.int64_t, ndim=1] capacities,
        int switches=15,
    ):
        cdef int n = len(node_offsets) - 1
        cdef int m = len(edge_tables)
        cdef int v, e, i, d
        cdef int64_t offset
        self.node_count = n
        self.row_count = len(capacities)
        self.switches = switches
        self.constant = 0
        self.infeasible = False
        self.infeasible_because = ""
        self.infeasible_node = -1
        self.infeasible_row = -1
        self.growth_limit = 1 << 14
        self.table_limit = 1 << 18
        self.work_limit = 1 << 26
        self.record_starts = []
        self.counts = dict.fromkeys(
            ("forced", "leaf", "degree two", "functional", "dominated", "arc consistency", "parallel", "rows"), 0
        )
        self.alive = <int8_t *>allocate(n)
        self.domain = <int32_t *>allocate(n * sizeof(int32_t))
        self.original = <int32_t **>allocate(n * sizeof(void *))
        self.cost = <int64_t **>allocate(n * sizeof(void *))
        self.incident = <int32_t **>allocate(n * sizeof(void *))
        self.degree = <int32_t *>allocate(n * sizeof(int32_t))
        self.room = <int32_t *>allocate(n * sizeof(int32_t))
        self.pieces = <Piece **>allocate(n * sizeof(void *))
        self.piece_count = <int32_t *>allocate(n * sizeof(int32_t))
        self.queue = <int32_t *>allocate(n * sizeof(int32_t))
        self.state = <int8_t *>allocate(n)
        self.queue_head = 0
        self.queue_size = 0
        memset(self.state, 0, n)
        for v in range(n):
            d = <int>(node_offsets[v + 1] - node_offsets[v])
            self.alive[v] = 1
            self.domain[v] = d
            self.original[v] = <int32_t *>allocate(d * sizeof(int32_t))
            self.cost[v] = <int64_t *>allocate(d * sizeof(int64_t))
            offset = node_offsets[v]
            for i in range(d):
                self.original[v][i] = i
                self.cost[v][i] = costs[offset + i] if costs[offset + i] < HALF else FORBIDDEN
            self.incident[v] = NULL
            self.degree[v] = 0
            self.room[v] = 0
            self.pieces[v] = NULL
            self.piece_count[v] = 0
        self.edge_room = m + 16
        self.end_a = <int32_t *>allocate(self.edge_room * sizeof(int32_t))
        self.end_b = <int32_t *>allocate(self.edge_room * sizeof(int32_t))
        self.place_a = <int32_t *>allocate(self.edge_room * sizeof(int32_t))
        self.place_b = <int32_t *>allocate(self.edge_room * sizeof(int32_t))
        self.table = <int64_t **>allocate(self.edge_room * sizeof(void *))
        self.dirty = <int8_t *>allocate(self.edge_room)
        self.log_room = 1 << 16
        self.log_size = 0
        self.log = <int32_t *>allocate(self.log_room * sizeof(int32_t))
        self.scratch_room = 0
        self.capacity = <int64_t *>allocate(self.row_count * sizeof(int64_t))
        self.row_original = <int32_t *>allocate(self.row_count * sizeof(int32_t))
        for i in range(self.row_count):
            self.capacity[i] = capacities[i]
            self.row_original[i] = i
        cdef int64_t *values
        cdef int64_t size, k
        for e in range(m):
            offset = table_offsets[edge_tables[e]]
            size = <int64_t>self.domain[edge_nodes[e, 0]] * self.domain[edge_nodes[e, 1]]
            values = <int64_t *>allocate(size * sizeof(int64_t))
            for k in range(size):
                values[k] = table_values[offset + k] if table_values[offset + k] < HALF else FORBIDDEN
            self.add_edge(edge_nodes[e, 0], edge_nodes[e, 1], values)
        cdef int p
        for p in range(len(piece_nodes)):
            if piece_rows[p, 1] > piece_rows[p, 0]:
                v = piece_nodes[p]
                values = <int64_t *>allocate(self.domain[v] * sizeof(int64_t))
                for i in range(self.domain[v]):
                    values[i] = piece_usages[piece_offsets[p] + i]
                self.add_piece(v, piece_rows[p, 0], piece_rows[p, 1], values)
        for v in range(n):
            self.push(v, 3)

    def __dealloc__(self):
        cdef int v, p
        if self.log == NULL:
            return
        for v in range(self.node_count):
            self.release_node(v)
            free(self.incident[v])
        for v in range(self.edge_count):
            free(self.table[v])
        free(self.alive)
        free(self.domain)
        free(self.original)
        free(self.cost)
        free(self.incident)
        free(self.degree)
        free(self.room)
        free(self.pieces)
        free(self.piece_count)
        free(self.queue)
        free(self.state)
        free(self.end_a)
        free(self.end_b)
        free(self.place_a)
        free(self.place_b)
        free(self.table)
        free(self.dirty)
        free(self.log)
        free(self.capacity)
        free(self.row_original)
        free(self.scratch)
        free(self.scratch_index)

    # ------------------------------------------------------------------ storage

    cdef void release_node(self, int v) noexcept:
        cdef int p
        free(self.original[v])
        free(self.cost[v])
        self.original[v] = NULL
        self.cost[v] = NULL
        for p in range(self.piece_count[v]):
            free(self.pieces[v][p].usage)
        free(self.pieces[v])
        self.pieces[v] = NULL
        self.piece_count[v] = 0

    cdef int need_scratch(self, size_t size) except -1:
        if size > self.scratch_room:
            free(self.scratch)
            free(self.scratch_index)
            self.scratch = NULL
            self.scratch_index = NULL
            self.scratch = <int64_t *>allocate(2 * size * sizeof(int64_t))
            self.scratch_index = <int32_t *>allocate(2 * size * sizeof(int32_t))
            self.scratch_room = 2 * size
        return 0

    cdef inline void push(self, int v, int bits) noexcept:
        # The queue holds each node at most once; bit 2 alone waits until the queue is empty.
        cdef int tail
        if bits & 1 and not self.state[v] & 1:
            tail = self.queue_head + self.queue_size
            if tail >= self.node_count:
                tail -= self.node_count
            self.queue[tail] = v
            self.queue_size += 1
        self.state[v] |= bits

    cdef int attach(self, int v, int e) except -1:
        cdef int32_t *grown
        if self.degree[v] == self.room[v]:
            grown = <int32_t *>realloc(self.incident[v], (2 * self.room[v] + 4) * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError("out of memory in the reductions")
            self.incident[v] = grown
            self.room[v] = 2 * self.room[v] + 4
        self.incident[v][self.degree[v]] = e
        if self.end_a[e] == v:
            self.place_a[e] = self.degree[v]
        else:
            self.place_b[e] = self.degree[v]
        self.degree[v] += 1
        return 0

    cdef void detach(self, int v, int e) noexcept:
        cdef int place = self.place_a[e] if self.end_a[e] == v else self.place_b[e]
        cdef int last = self.degree[v] - 1
        cdef int moved = self.incident[v][last]
        self.incident[v][place] = moved
        if self.end_a[moved] == v:
            self.place_a[moved] = place
        else:
            self.place_b[moved] = place
        self.degree[v] = last

    cdef void remove_edge(self, int e) noexcept:
        self.detach(self.end_a[e], e)
        self.detach(self.end_b[e], e)
        free(self.table[e])
        self.table[e] = NULL

    cdef int find_edge(self, int u, int v) noexcept:
        cdef int i, e
        if self.degree[u] > self.degree[v]:
            u, v = v, u
        for i in range(self.degree[u]):
            e = self.incident[u][i]
            if self.end_a[e] == v or self.end_b[e] == v:
                return e
        return -1

    cdef int add_edge(self, int u, int v, int64_t *values) except -2:
        """Take over `values` (domain[u], domain[v]); a parallel edge is added up at once."""
        cdef int e = self.find_edge(u, v)
        cdef int i, j
        cdef int du = self.domain[u]
        cdef int dv = self.domain[v]
        cdef int64_t *into
        cdef void *grown
        if e >= 0:
            self.counts["parallel"] += 1
            into = self.table[e]
            if self.end_a[e] == u:
                for i in range(du * dv):
                    into[i] = plus(into[i], values[i])
            else:
                for i in range(du):
                    for j in range(dv):
                        into[j * du + i] = plus(into[j * du + i], values[i * dv + j])
            free(values)
        else:
            e = self.edge_count
            if e == self.edge_room:
                self.edge_room = 2 * self.edge_room
                self.end_a = <int32_t *>realloc(self.end_a, self.edge_room * sizeof(int32_t))
                self.end_b = <int32_t *>realloc(self.end_b, self.edge_room * sizeof(int32_t))
                self.place_a = <int32_t *>realloc(self.place_a, self.edge_room * sizeof(int32_t))
                self.place_b = <int32_t *>realloc(self.place_b, self.edge_room * sizeof(int32_t))
                self.table = <int64_t **>realloc(self.table, self.edge_room * sizeof(void *))
                self.dirty = <int8_t *>realloc(self.dirty, self.edge_room)
                if self.end_a == NULL or self.end_b == NULL or self.place_a == NULL or self.place_b == NULL or self.table == NULL or self.dirty == NULL:
                    raise MemoryError("out of memory in the reductions")
            self.edge_count += 1
            self.end_a[e] = u
            self.end_b[e] = v
            self.table[e] = values
            self.attach(u, e)
            self.attach(v, e)
        self.dirty[e] = 1
        self.push(u, 3)
        self.push(v, 3)
        return e

    cdef int add_piece(self, int v, int first, int last, int64_t *usage) except -1:
        """Take over `usage`; its minimum is charged to the rows, and what is constant vanishes."""
        cdef int p, i
        cdef int d = self.domain[v]
        cdef Piece *grown
        for p in range(self.piece_count[v]):
            if self.pieces[v][p].first == first and self.pieces[v][p].last == last:
                for i in range(d):
                    self.pieces[v][p].usage[i] += usage[i]
                free(usage)
                return self.settle_piece(v, p)
        grown = <Piece *>realloc(self.pieces[v], (self.piece_count[v] + 1) * sizeof(Piece))
        if grown == NULL:
            raise MemoryError("out of memory in the reductions")
        self.pieces[v] = grown
        p = self.piece_count[v]
        grown[p].first = first
        grown[p].last = last
        grown[p].usage = usage
        self.piece_count[v] = p + 1
        return self.settle_piece(v, p)

    cdef int settle_piece(self, int v, int p) except -1:
        """Move the minimum of a piece to the capacities; drop the piece when nothing is left. Returns 1 if dropped."""
        cdef Piece *piece = &self.pieces[v][p]
        cdef int64_t low = piece.usage[0]
        cdef int64_t high = piece.usage[0]
        cdef int i, r
        for i in range(1, self.domain[v]):
            if piece.usage[i] < low:
                low = piece.usage[i]
            if piece.usage[i] > high:
                high = piece.usage[i]
        if low:
            for i in range(self.domain[v]):
                piece.usage[i] -= low
            for r in range(piece.first, piece.last):
                self.capacity[r] -= low
        if high == low:
            free(piece.usage)
            self.piece_count[v] -= 1
            self.pieces[v][p] = self.pieces[v][self.piece_count[v]]
            return 1
        return 0

    # ------------------------------------------------------------------ undo log

    cdef int log_room_for(self, size_t size) except -1:
        cdef int32_t *grown
        if self.log_size + size > self.log_room:
            while self.log_size + size > self.log_room:
                self.log_room *= 2
            grown = <int32_t *>realloc(self.log, self.log_room * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError("out of memory in the undo log")
            self.log = grown
        self.record_starts.append(self.log_size)
        return 0

    cdef int record_fixed(self, int v, int strategy) except -1:
        self.log_room_for(3)
        cdef int32_t *log = self.log + self.log_size
        log[0] = RECORD_FIXED
        log[1] = v
        log[2] = self.original[v][strategy]
        self.log_size += 3
        return 0

    cdef int record_one(self, int v, int w, int32_t *best) except -1:
        """`best[j]` is the strategy (current index) of v for strategy j of w."""
        cdef int d = self.domain[w]
        cdef int j
        self.log_room_for(4 + 2 * d)
        cdef int32_t *log = self.log + self.log_size
        log[0] = RECORD_ONE
        log[1] = v
        log[2] = w
        log[3] = d
        for j in range(d):
            log[4 + j] = self.original[w][j]
            log[4 + d + j] = self.original[v][best[j]]
        self.log_size += 4 + 2 * d
        return 0

    cdef int record_two(self, int v, int a, int b, int32_t *best) except -1:
        cdef int da = self.domain[a]
        cdef int db = self.domain[b]
        cdef int j
        cdef size_t size = 6 + da + db + <size_t>da * db
        self.log_room_for(size)
        cdef int32_t *log = self.log + self.log_size
        log[0] = RECORD_TWO
        log[1] = v
        log[2] = a
        log[3] = b
        log[4] = da
        log[5] = db
        for j in range(da):
            log[6 + j] = self.original[a][j]
        for j in range(db):
            log[6 + da + j] = self.original[b][j]
        for j in range(da * db):
            log[6 + da + db + j] = self.original[v][best[j]]
        self.log_size += size
        return 0

    # ------------------------------------------------------------------ single reductions

    cdef int fail(self, str because, int node, int row) except -1:
        self.infeasible = True
        self.infeasible_because = because
        self.infeasible_node = node
        self.infeasible_row = row
        return 0

    cdef int normalise(self, int e) except -1:
        """Move row and column minima to the nodes. Returns 1 when the table became all zero and the edge was removed."""
        cdef int u = self.end_a[e]
        cdef int v = self.end_b[e]
        cdef int du = self.domain[u]
        cdef int dv = self.domain[v]
        cdef int64_t *values = self.table[e]
        cdef int64_t *cost_u = self.cost[u]
        cdef int64_t *cost_v = self.cost[v]
        cdef int64_t low, entry
        cdef int i, j
        cdef bint zero = True
        cdef bint changed_u = False
        cdef bint changed_v = False
        self.dirty[e] = 0
        for i in range(du):
            low = FORBIDDEN
            for j in range(dv):
                entry = values[i * dv + j]
                if cost_v[j] < HALF and entry < low:
                    low = entry
            if low >= HALF:
                if cost_u[i] < HALF:
                    cost_u[i] = FORBIDDEN
                    self.counts["arc consistency"] += 1
                    changed_u = True
            elif low != 0:
                if cost_u[i] < HALF:
                    cost_u[i] += low
                    changed_u = True
                for j in range(dv):
                    if values[i * dv + j] < HALF:
                        values[i * dv + j] -= low
        for j in range(dv):
            low = FORBIDDEN
            for i in range(du):
                entry = values[i * dv + j]
                if cost_u[i] < HALF and entry < low:
                    low = entry
            if low >= HALF:
                if cost_v[j] < HALF:
                    cost_v[j] = FORBIDDEN
                    self.counts["arc consistency"] += 1
                    changed_v = True
            elif low != 0:
                if cost_v[j] < HALF:
                    cost_v[j] += low
                    changed_v = True
                for i in range(du):
                    if values[i * dv + j] < HALF:
                        values[i * dv + j] -= low
        for i in range(du):
            if cost_u[i] < HALF:
                for j in range(dv):
                    if values[i * dv + j] != 0 and cost_v[j] < HALF:
                        zero = False
                        break
                if not zero:
                    break
        if changed_u:
            self.push(u, 3)
        if changed_v:
            self.push(v, 3)
        if zero:
            self.remove_edge(e)
            self.push(u, 3)
            self.push(v, 3)
            return 1
        return 0

    cdef int prune(self, int v) except -1:
        """Drop the forbidden strategies of v. Returns how many, or -2 after declaring the problem infeasible."""
        cdef int d = self.domain[v]
        cdef int kept = 0
        cdef int i, j, k, e, w, dw, p
        cdef int64_t *values
        for i in range(d):
            if self.cost[v][i] < HALF:
                kept += 1
        if kept == d:
            return 0
        if kept == 0:
            self.fail("no strategy is left", v, -1)
            return 0
        self.need_scratch(d)
        cdef int32_t *keep = self.scratch_index
        kept = 0
        for i in range(d):
            if self.cost[v][i] < HALF:
                keep[kept] = i
                kept += 1
        for k in range(self.degree[v]):
            e = self.incident[v][k]
            values = self.table[e]
            if self.end_a[e] == v:
                dw = self.domain[self.end_b[e]]
                for i in range(kept):
                    if keep[i] != i:
                        memcpy(values + i * dw, values + keep[i] * dw, dw * sizeof(int64_t))
                self.push(self.end_b[e], 3)
            else:
                dw = self.domain[self.end_a[e]]
                for j in range(dw):
                    for i in range(kept):
                        values[j * kept + i] = values[j * d + keep[i]]
                self.push(self.end_a[e], 3)
            self.dirty[e] = 1
        for i in range(kept):
            self.cost[v][i] = self.cost[v][keep[i]]
            self.original[v][i] = self.original[v][keep[i]]
        for p in range(self.piece_count[v]):
            for i in range(kept):
                self.pieces[v][p].usage[i] = self.pieces[v][p].usage[keep[i]]
        self.domain[v] = kept
        p = 0
        while p < self.piece_count[v]:
            if not self.settle_piece(v, p):
                p += 1
        self.push(v, 3)
        return d - kept

    cdef int settle_cost(self, int v) except -1:
        """Move the minimum of the node cost to the constant."""
        cdef int i
        cdef int64_t low = self.cost[v][0]
        for i in range(1, self.domain[v]):
            if self.cost[v][i] < low:
                low = self.cost[v][i]
        if low != 0 and low < HALF:
            for i in range(self.domain[v]):
                if self.cost[v][i] < HALF:
                    self.cost[v][i] -= low
            self.constant += low
        return 0

    cdef int retire(self, int v) except -1:
        self.alive[v] = 0
        self.release_node(v)
        free(self.incident[v])
        self.incident[v] = NULL
        self.room[v] = 0
        return 0

    cdef int force(self, int v) except -1:
        """v has one strategy: fold its tables into the neighbours."""
        cdef int k, e, w, j
        while self.degree[v]:
            e = self.incident[v][self.degree[v] - 1]
            w = self.end_b[e] if self.end_a[e] == v else self.end_a[e]
            for j in range(self.domain[w]):
                self.cost[w][j] = plus(self.cost[w][j], self.table[e][j])
            self.remove_edge(e)
            self.push(w, 3)
        self.record_fixed(v, 0)
        self.retire(v)
        self.counts["forced"] += 1
        return 0

    cdef int eliminate_isolated(self, int v) except -1:
        cdef int i
        cdef int best = 0
        for i in range(1, self.domain[v]):
            if self.cost[v][i] < self.cost[v][best]:
                best = i
        self.constant += self.cost[v][best]
        self.record_fixed(v, best)
        self.retire(v)
        self.counts["leaf"] += 1
        return 0

    cdef int eliminate_leaf(self, int v) except -1:
        cdef int e = self.incident[v][0]
        cdef bint first = self.end_a[e] == v
        cdef int w = self.end_b[e] if first else self.end_a[e]
        cdef int d = self.domain[v]
        cdef int dw = self.domain[w]
        cdef int64_t *values = self.table[e]
        cdef int i, j
        cdef int64_t low, entry
        self.need_scratch(dw)
        for j in range(dw):
            low = FORBIDDEN
            self.scratch_index[j] = 0
            for i in range(d):
                entry = plus(self.cost[v][i], values[i * dw + j] if first else values[j * d + i])
                if entry < low:
                    low = entry
                    self.scratch_index[j] = i
            self.cost[w][j] = plus(self.cost[w][j], low)
        self.record_one(v, w, self.scratch_index)
        self.remove_edge(e)
        self.retire(v)
        self.push(w, 3)
        self.counts["leaf"] += 1
        return 0

    cdef int eliminate_two(self, int v) except -1:
        """Returns 0 when the new table would be too large."""
        cdef int ea = self.incident[v][0]
        cdef int eb = self.incident[v][1]
        cdef int a = self.end_b[ea] if self.end_a[ea] == v else self.end_a[ea]
        cdef int b = self.end_b[eb] if self.end_a[eb] == v else self.end_a[eb]
        cdef int d = self.domain[v]
        cdef int da = self.domain[a]
        cdef int db = self.domain[b]
        cdef int64_t size = <int64_t>da * db
        if size > self.table_limit or size * d > self.work_limit:
            return 0
        cdef int64_t *result = <int64_t *>allocate(size * sizeof(int64_t))
        # both operands laid out with v's strategies outermost, so that the inner loop runs along a row
        self.need_scratch(<size_t>d * (da + db) + size)
        cdef int64_t *left = self.scratch
        cdef int64_t *right = self.scratch + <size_t>d * da
        cdef int32_t *best = self.scratch_index
        cdef int i, j, k
        cdef int64_t base, entry
        for k in range(d):
            for i in range(da):
                left[k * da + i] = plus(
                    self.cost[v][k], self.table[ea][k * da + i] if self.end_a[ea] == v else self.table[ea][i * d + k]
                )
            for j in range(db):
                right[k * db + j] = self.table[eb][k * db + j] if self.end_a[eb] == v else self.table[eb][j * d + k]
        for i in range(size):
            result[i] = FORBIDDEN
            best[i] = 0
        for k in range(d):
            for i in range(da):
                base = left[k * da + i]
                if base >= HALF:
                    continue
                for j in range(db):
                    entry = base + right[k * db + j]
                    if entry < result[i * db + j]:
                        result[i * db + j] = entry
                        best[i * db + j] = k
        for i in range(size):
            if result[i] >= HALF:
                result[i] = FORBIDDEN
        self.record_two(v, a, b, best)
        self.remove_edge(ea)
        self.remove_edge(eb)
        self.retire(v)
        self.add_edge(a, b, result)
        self.counts["degree two"] += 1
        return 1

    cdef bint determines(self, int e, int v, int32_t *image) noexcept:
        """Whether each strategy of v allows exactly one of the other end; `image` receives which."""
        cdef bint first = self.end_a[e] == v
        cdef int w = self.end_b[e] if first else self.end_a[e]
        cdef int d = self.domain[v]
        cdef int dw = self.domain[w]
        cdef int i, j, found
        cdef int64_t *values = self.table[e]
        if dw > d:
            return False
        for i in range(d):
            found = -1
            for j in range(dw):
                if (values[i * dw + j] if first else values[j * d + i]) < HALF:
                    if found >= 0:
                        return False
                    found = j
            if found < 0:
                return False
            image[i] = found
        return True

    cdef int64_t merge_growth(self, int u, int v) noexcept:
        """Table entries added (or, negative, saved) when u is merged into v."""
        cdef int64_t total = -(<int64_t>self.domain[u]) * self.domain[v]
        cdef int k, e, w
        for k in range(self.degree[u]):
            e = self.incident[u][k]
            w = self.end_b[e] if self.end_a[e] == u else self.end_a[e]
            if w != v:
                total += <int64_t>self.domain[w] * (self.domain[v] - self.domain[u])
        return total

    cdef int merge_into(self, int u, int v, int e, int32_t *given) except -1:
        """u's strategy is image[v's strategy]: everything of u moves to v."""
        cdef int d = self.domain[v]
        cdef int du = self.domain[u]
        cdef int dw, i, j, k, f, w, p
        cdef int64_t *values
        cdef int64_t *moved
        cdef int32_t *image = <int32_t *>allocate(d * sizeof(int32_t))
        memcpy(image, given, d * sizeof(int32_t))
        for i in range(d):
            self.cost[v][i] = plus(
                plus(self.cost[v][i], self.cost[u][image[i]]),
                self.table[e][i * du + image[i]] if self.end_a[e] == v else self.table[e][image[i] * d + i],
            )
        self.remove_edge(e)
        while self.degree[u]:
            f = self.incident[u][self.degree[u] - 1]
            w = self.end_b[f] if self.end_a[f] == u else self.end_a[f]
            dw = self.domain[w]
            values = self.table[f]
            moved = <int64_t *>allocate(<size_t>d * dw * sizeof(int64_t))
            for i in range(d):
                for j in range(dw):
                    moved[i * dw + j] = values[image[i] * dw + j] if self.end_a[f] == u else values[j * du + image[i]]
            self.remove_edge(f)
            self.add_edge(v, w, moved)
        for p in range(self.piece_count[u]):
            moved = <int64_t *>allocate(d * sizeof(int64_t))
            for i in range(d):
                moved[i] = self.pieces[u][p].usage[image[i]]
            self.add_piece(v, self.pieces[u][p].first, self.pieces[u][p].last, moved)
        self.record_one(u, v, image)
        self.retire(u)
        free(image)
        self.push(v, 3)
        self.counts["functional"] += 1
        return 0

    cdef int try_functional(self, int v) except -1:
        """Returns 1 if v was merged away or grew, 0 if nothing was found."""
        cdef int k = 0
        cdef int e, w, i
        cdef int d = self.domain[v]
        cdef bint both
        self.need_scratch(2 * d)
        while k < self.degree[v]:
            e = self.incident[v][k]
            w = self.end_b[e] if self.end_a[e] == v else self.end_a[e]
            if self.domain[w] <= d and self.determines(e, v, self.scratch_index):
                both = self.domain[w] == d  # then arc consistency makes it a bijection
                if both:
                    memset(self.scratch_index + d, 0, d * sizeof(int32_t))
                    for i in range(d):
                        self.scratch_index[d + self.scratch_index[i]] += 1
                    for i in range(d):
                        if self.scratch_index[d + i] != 1:
                            both = False
                if both and self.degree[v] < self.degree[w]:
                    for i in range(d):
                        self.scratch_index[d + self.scratch_index[i]] = i
                    self.merge_into(v, w, e, self.scratch_index + d)
                    return 1
                if both or self.merge_growth(w, v) <= self.growth_limit:
                    self.merge_into(w, v, e, self.scratch_index)
                    return 1
            k += 1
        return 0

    cdef int dominate(self, int v) except -1:
        """Forbid strategies that another one beats whatever the neighbours do. Returns how many."""
        cdef int d = self.domain[v]
        cdef int degree = self.degree[v]
        cdef int r, s, k, e, p, t, dw
        cdef int found = 0
        cdef int64_t slack, worst, a, b
        cdef bint beats, first
        cdef int64_t *values
        cdef int64_t *cost = self.cost[v]
        if d < 2:
            return 0
        # where each strategy's table row is smallest: a cheap necessary test
        self.need_scratch(<size_t>d * (degree + 1))
        cdef int32_t *least = self.scratch_index
        for k in range(degree):
            e = self.incident[v][k]
            first = self.end_a[e] == v
            dw = self.domain[self.end_b[e] if first else self.end_a[e]]
            values = self.table[e]
            for r in range(d):
                least[k * d + r] = 0
                worst = FORBIDDEN
                for t in range(dw):
                    a = values[r * dw + t] if first else values[t * d + r]
                    if a < worst:
                        worst = a
                        least[k * d + r] = t
        for r in range(d):
            for s in range(d):
                if s == r or cost[s] >= HALF or cost[s] > cost[r]:
                    continue
                slack = cost[r] - cost[s]
                beats = True
                for k in range(degree):
                    e = self.incident[v][k]
                    t = least[k * d + r]
                    if self.end_a[e] == v:
                        dw = self.domain[self.end_b[e]]
                        a = self.table[e][s * dw + t]
                        b = self.table[e][r * dw + t]
                    else:
                        a = self.table[e][t * d + s]
                        b = self.table[e][t * d + r]
                    if a >= HALF:
                        beats = False
                        break
                    if b < HALF and a - b > slack:
                        beats = False
                        break
                if not beats:
                    continue
                for p in range(self.piece_count[v]):
                    if self.pieces[v][p].usage[s] > self.pieces[v][p].usage[r]:
                        beats = False
                        break
                if not beats:
                    continue
                for k in range(degree):
                    e = self.incident[v][k]
                    first = self.end_a[e] == v
                    dw = self.domain[self.end_b[e] if first else self.end_a[e]]
                    values = self.table[e]
                    worst = -FORBIDDEN
                    for t in range(dw):
                        b = values[r * dw + t] if first else values[t * d + r]
                        if b >= HALF:
                            continue
                        a = values[s * dw + t] if first else values[t * d + s]
                        if a >= HALF:
                            beats = False
                            break
                        if a - b > worst:
                            worst = a - b
                    if not beats:
                        break
                    if worst > -HALF:
                        slack -= worst
                    if slack < 0:
                        beats = False
                        break
                if beats:
                    cost[r] = FORBIDDEN
                    found += 1
                    break
        if found:
            self.counts["dominated"] += found
            self.push(v, 3)
        return found

    cdef int process(self, int v) except -1:
        cdef int k, e
        if not self.alive[v]:
            return 0
        self.prune(v)
        if self.infeasible:
            return 0
        k = 0
        while k < self.degree[v]:
            e = self.incident[v][k]
            if self.dirty[e] and self.normalise(e):
                continue
            k += 1
        self.prune(v)
        if self.infeasible:
            return 0
        self.settle_cost(v)
        if self.domain[v] == 1:
            self.force(v)
            return 0
        if self.switches & 1 and self.piece_count[v] == 0:
            if self.degree[v] == 0:
                self.eliminate_isolated(v)
                return 0
            if self.degree[v] == 1:
                self.eliminate_leaf(v)
                return 0
            if self.degree[v] == 2 and self.eliminate_two(v):
                return 0
        if self.switches & 2:
            self.try_functional(v)
        return 0

    # ------------------------------------------------------------------ rows

    cdef int row_pass(self) except -1:
        """Drop rows that cannot be exceeded or that another row implies; forbid what no row can take. Returns changes."""
        cdef int rows = self.row_count
        cdef int v, p, i, r, kept, previous, following
        cdef int changes = 0
        cdef int64_t high, room
        if rows == 0:
            return 0
        load_array = np.zeros(rows + 1, np.int64)
        starts_array = np.zeros(rows + 1, np.int32)
        stops_array = np.zeros(rows + 1, np.int32)
        cdef int64_t[::1] load = load_array
        cdef int32_t[::1] starts = starts_array
        cdef int32_t[::1] stops = stops_array
        for r in range(rows):
            if self.capacity[r] < 0:
                self.fail("memory", -1, self.row_original[r])
                return 0
        for v in range(self.node_count):
            if not self.alive[v]:
                continue
            for p in range(self.piece_count[v]):
                room = FORBIDDEN
                for r in range(self.pieces[v][p].first, self.pieces[v][p].last):
                    if self.capacity[r] < room:
                        room = self.capacity[r]
                high = 0
                for i in range(self.domain[v]):
                    if self.pieces[v][p].usage[i] > room and self.cost[v][i] < HALF:
                        self.cost[v][i] = FORBIDDEN
                        changes += 1
                        self.push(v, 3)
                    elif self.pieces[v][p].usage[i] > high:
                        high = self.pieces[v][p].usage[i]
                load[self.pieces[v][p].first] += high
                load[self.pieces[v][p].last] -= high
                starts[self.pieces[v][p].first] += 1
                stops[self.pieces[v][p].last] += 1
        for r in range(1, rows):
            load[r] += load[r - 1]
        # a linked list of the surviving rows
        before_array = np.arange(-1, rows, dtype=np.int32)
        after_array = np.arange(1, rows + 2, dtype=np.int32)
        dead_array = np.zeros(rows + 1, np.int8)
        cdef int32_t[::1] before = before_array
        cdef int32_t[::1] after = after_array
        cdef int8_t[::1] dead = dead_array
        cdef int removed = 0
        cdef int target
        for r in range(rows):
            if load[r] <= self.capacity[r]:
                dead[r] = 1
                removed += 1
                starts[r + 1] += starts[r]
                stops[r + 1] += stops[r]
                if before[r] >= 0:
                    after[before[r]] = after[r]
                before[after[r]] = before[r]
        # r is implied by its predecessor if nothing starts at r, by its successor if nothing stops there
        r = 0
        while r < rows and dead[r]:
            r += 1
        while r < rows:
            previous = before[r]
            if previous >= 0 and starts[r] == 0 and self.capacity[r] >= self.capacity[previous]:
                target = r
            elif previous >= 0 and stops[r] == 0 and self.capacity[previous] >= self.capacity[r]:
                target = previous
            else:
                r = after[r]
                continue
            following = after[target]
            starts[following] += starts[target]
            stops[following] += stops[target]
            if before[target] >= 0:
                after[before[target]] = following
            before[following] = before[target]
            dead[target] = 1
            removed += 1
            if target == r:
                # the predecessor has a new successor to be compared with
                r = following if following < rows else rows
        if removed:
            self.counts["rows"] += removed
            new_array = np.empty(rows + 1, np.int32)
            self.keep_rows(dead_array, new_array)
        return changes + removed

    cdef int keep_rows(self, int8_t[::1] dead, int32_t[::1] new) except -1:
        cdef int rows = self.row_count
        cdef int r, v, p
        cdef int kept = 0
        for r in range(rows):
            new[r] = kept
            if not dead[r]:
                self.capacity[kept] = self.capacity[r]
                self.row_original[kept] = self.row_original[r]
                kept += 1
        new[rows] = kept
        self.row_count = kept
        cdef int p2
        for v in range(self.node_count):
            if not self.alive[v] or self.piece_count[v] == 0:
                continue
            p = 0
            while p < self.piece_count[v]:
                self.pieces[v][p].first = new[self.pieces[v][p].first]
                self.pieces[v][p].last = new[self.pieces[v][p].last]
                if self.pieces[v][p].first >= self.pieces[v][p].last:
                    free(self.pieces[v][p].usage)
                    self.piece_count[v] -= 1
                    self.pieces[v][p] = self.pieces[v][self.piece_count[v]]
                    self.push(v, 3)
                else:
                    p += 1
            self.join_pieces(v)
        return 0

    cdef int join_pieces(self, int v) except -1:
        """Pieces that now cover the same rows become one."""
        cdef int p = 0
        cdef int q, i
        cdef bint joined
        while p < self.piece_count[v]:
            q = p + 1
            joined = False
            while q < self.piece_count[v]:
                if self.pieces[v][p].first == self.pieces[v][q].first and self.pieces[v][p].last == self.pieces[v][q].last:
                    for i in range(self.domain[v]):
                        self.pieces[v][p].usage[i] += self.pieces[v][q].usage[i]
                    free(self.pieces[v][q].usage)
                    self.piece_count[v] -= 1
                    self.pieces[v][q] = self.pieces[v][self.piece_count[v]]
                    joined = True
                else:
                    q += 1
            if joined:
                self.push(v, 3)
                if self.settle_piece(v, p):
                    continue
            p += 1
        return 0

    # ------------------------------------------------------------------ the pass

    def run(self, object out_of_time=None):
        """Reduce until nothing changes (or `out_of_time()` says stop). Returns False when proven infeasible."""
        cdef int v, steps, found
        if self.switches & 8:
            self.row_pass()
        while not self.infeasible:
            steps = 0
            while self.queue_size and not self.infeasible:
                v = self.queue[self.queue_head]
                self.queue_head += 1
                if self.queue_head == self.node_count:
                    self.queue_head = 0
                self.queue_size -= 1
                self.state[v] &= ~1
                self.process(v)
                steps += 1
                if steps & 1023 == 0 and out_of_time is not None and out_of_time():
                    return True
            if self.infeasible:
                break
            found = 0
            if self.switches & 4:
                for v in range(self.node_count):
                    if self.alive[v] and self.state[v] & 2:
                        self.state[v] &= ~2
                        found += self.dominate(v)
                        if v & 255 == 0 and out_of_time is not None and out_of_time():
                            return True
            if found:
                continue
            if self.switches & 8:
                if self.row_pass():
                    continue
            elif not self.check_rows():
                break
            if self.queue_size == 0:
                break
        return not self.infeasible

    cdef int check_rows(self) except -1:
        cdef int r
        for r in range(self.row_count):
            if self.capacity[r] < 0:
                self.fail("memory", -1, self.row_original[r])
                return 0
        return 1

    # ------------------------------------------------------------------ in and out

    def extract(self):
        """The surviving problem as a dictionary of flat arrays (see `sbp.planner.solver.core.Core`)."""
        cdef int n = self.node_count
        cdef int v, e, i, k, p, kept = 0, edges = 0, pieces = 0
        cdef int64_t strategies = 0, entries = 0, usages = 0, o, size
        for v in range(n):
            if self.alive[v]:
                kept += 1
                strategies += self.domain[v]
                pieces += self.piece_count[v]
                usages += <int64_t>self.piece_count[v] * self.domain[v]
        for e in range(self.edge_count):
            if self.table[e] != NULL:
                edges += 1
                entries += <int64_t>self.domain[self.end_a[e]] * self.domain[self.end_b[e]]
        nodes_a = np.empty(kept, np.int32)
        offsets_a = np.zeros(kept + 1, np.int64)
        costs_a = np.empty(strategies, np.int64)
        original_a = np.empty(strategies, np.int32)
        edge_nodes_a = np.empty((edges, 2), np.int32)
        table_offsets_a = np.zeros(edges + 1, np.int64)
        values_a = np.empty(entries, np.int64)
        piece_nodes_a = np.empty(pieces, np.int32)
        piece_rows_a = np.empty((pieces, 2), np.int32)
        piece_offsets_a = np.zeros(pieces + 1, np.int64)
        usages_a = np.empty(usages, np.int64)
        capacities_a = np.empty(self.row_count, np.int64)
        rows_a = np.empty(self.row_count, np.int32)
        index_a = np.full(n, -1, np.int32)
        cdef int32_t[::1] nodes = nodes_a, original = original_a, piece_nodes = piece_nodes_a, rows = rows_a, index = index_a
        cdef int64_t[::1] offsets = offsets_a, costs = costs_a, table_offsets = table_offsets_a, values = values_a
        cdef int64_t[::1] piece_offsets = piece_offsets_a, usage = usages_a, capacities = capacities_a
        cdef int32_t[:, ::1] edge_nodes = edge_nodes_a, piece_rows = piece_rows_a
        kept = 0
        pieces = 0
        usages = 0
        o = 0
        for v in range(n):
            if not self.alive[v]:
                continue
            index[v] = kept
            nodes[kept] = v
            for i in range(self.domain[v]):
                costs[o + i] = self.cost[v][i]
                original[o + i] = self.original[v][i]
            o += self.domain[v]
            offsets[kept + 1] = o
            for p in range(self.piece_count[v]):
                piece_nodes[pieces] = kept
                piece_rows[pieces, 0] = self.pieces[v][p].first
                piece_rows[pieces, 1] = self.pieces[v][p].last
                for i in range(self.domain[v]):
                    usage[usages + i] = self.pieces[v][p].usage[i]
                usages += self.domain[v]
                pieces += 1
                piece_offsets[pieces] = usages
            kept += 1
        edges = 0
        o = 0
        for e in range(self.edge_count):
            if self.table[e] == NULL:
                continue
            edge_nodes[edges, 0] = index[self.end_a[e]]
            edge_nodes[edges, 1] = index[self.end_b[e]]
            size = <int64_t>self.domain[self.end_a[e]] * self.domain[self.end_b[e]]
            for k in range(size):
                values[o + k] = self.table[e][k]
            o += size
            edges += 1
            table_offsets[edges] = o
        for i in range(self.row_count):
            capacities[i] = self.capacity[i]
            rows[i] = self.row_original[i]
        return {
            "nodes": nodes_a,
            "node_offsets": offsets_a,
            "costs": costs_a,
            "original": original_a,
            "edge_nodes": edge_nodes_a,
            "table_offsets": table_offsets_a,
            "table_values": values_a,
            "piece_nodes": piece_nodes_a,
            "piece_rows": piece_rows_a,
            "piece_offsets": piece_offsets_a,
            "piece_usages": usages_a,
            "capacities": capacities_a,
            "rows": rows_a,
            "constant": int(self.constant),
        }

    def forbid(self, cnp.ndarray[cnp.int32_t, ndim=1] nodes, cnp.ndarray[cnp.int32_t, ndim=1] strategies):
        """Forbid strategies (current indices) of surviving nodes (original numbers), before the next `run`."""
        cdef int k
        for k in range(len(nodes)):
            self.cost[nodes[k]][strategies[k]] = FORBIDDEN
            self.push(nodes[k], 3)

    def forbid_pairs(self, cnp.ndarray[cnp.int32_t, ndim=1] first, cnp.ndarray[cnp.int32_t, ndim=1] second,
                     cnp.ndarray[cnp.int32_t, ndim=1] row, cnp.ndarray[cnp.int32_t, ndim=1] column):
        """Forbid pairs of strategies (current indices) of adjacent surviving nodes (original numbers)."""
        cdef int k, e, u, v
        cdef int last_u = -1, last_v = -1
        e = -1
        for k in range(len(first)):
            u = first[k]
            v = second[k]
            if u != last_u or v != last_v:
                e = self.find_edge(u, v)
                last_u = u
                last_v = v
                if e >= 0:
                    self.dirty[e] = 1
                    self.push(u, 3)
                    self.push(v, 3)
            if e < 0:
                continue
            if self.end_a[e] == u:
                self.table[e][row[k] * self.domain[v] + column[k]] = FORBIDDEN
            else:
                self.table[e][column[k] * self.domain[u] + row[k]] = FORBIDDEN

    def undo(self, cnp.ndarray[cnp.int32_t, ndim=1] choice):
        """Fill in the eliminated nodes: `choice` (nodes,) holds original strategies of the surviving ones, else anything."""
        cdef size_t start
        cdef int32_t *log
        cdef int32_t[::1] out = np.array(choice, dtype=np.int32)
        cdef int v, d, low, high, middle, place, second
        cdef object position
        for position in reversed(self.record_starts):
            start = position
            log = self.log + start
            v = log[1]
            if log[0] == RECORD_FIXED:
                out[v] = log[2]
            elif log[0] == RECORD_ONE:
                d = log[3]
                place = locate(log + 4, d, out[log[2]])
                out[v] = log[4 + d + place]
            else:
                place = locate(log + 6, log[4], out[log[2]])
                second = locate(log + 6 + log[4], log[5], out[log[3]])
                out[v] = log[6 + log[4] + log[5] + place * log[5] + second]
        return np.asarray(out)

    @property
    def alive_count(self):
        cdef int v, total = 0
        for v in range(self.node_count):
            total += self.alive[v]
        return total


cdef int locate(int32_t *values, int size, int32_t wanted) noexcept:
    cdef int low = 0
    cdef int high = size - 1
    cdef int middle
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low
