"""Lower bounds by message passing (TRW-S) with the memory rows priced (Lagrangian), and labels that become choices.

Sources: Kolmogorov 2006, "Convergent tree-reweighted message passing", in the form of Kolmogorov 2015 (SRMP): an edge holds
``T(s, t) - message to first(s) - message to second(t)`` and a node what its messages add up to. Any messages and any prices
>= 0 give a lower bound; `exact_bound` recomputes it in integers.
"""

from libc.math cimport ceil, fabs, floor, rint
from libc.stdint cimport int32_t, int64_t, uint64_t

import numpy as np

cimport numpy as cnp

cnp.import_array()

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
    #define SBP_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
    #else
    #define SBP_CLONES
    #endif
    #if defined(__GNUC__) && !defined(__clang__)
    #pragma GCC push_options
    #pragma GCC optimize ("finite-math-only", "no-signed-zeros", "no-trapping-math")
    #endif
    /* out[t] = min over s of table[s, t] - a[s] */
    SBP_CLONES static void sbp_pull_columns(const double *table, const double *a, double *out, int rows, int columns) {
        for (int t = 0; t < columns; t++) out[t] = table[t] - a[0];
        for (int s = 1; s < rows; s++) {
            const double *row = table + (long)s * columns;
            double shift = a[s];
            for (int t = 0; t < columns; t++) {
                double entry = row[t] - shift;
                out[t] = entry < out[t] ? entry : out[t];
            }
        }
    }
    /* out[s] = min over t of table[s, t] - b[t] */
    SBP_CLONES static void sbp_pull_rows(const double *table, const double *b, double *out, int rows, int columns) {
        for (int s = 0; s < rows; s++) {
            const double *row = table + (long)s * columns;
            double low = row[0] - b[0];
            for (int t = 1; t < columns; t++) {
                double entry = row[t] - b[t];
                low = entry < low ? entry : low;
            }
            out[s] = low;
        }
    }
    #if defined(__GNUC__) && !defined(__clang__)
    #pragma GCC pop_options
    #endif
    typedef __int128 sbp_wide;
    """
    void sbp_pull_columns(const double *table, const double *a, double *out, int rows, int columns) noexcept nogil
    void sbp_pull_rows(const double *table, const double *b, double *out, int rows, int columns) noexcept nogil
    ctypedef long long sbp_wide

cdef double LARGE = 1e28
cdef int64_t HALF = (<int64_t>1) << 59
# Prices are multiples of 2**-40 in the exact bound, so that prefix sums are exact integers.
cdef double PRICE_UNIT = 1.0 / (1 << 40)


cdef class Dual:
    """Messages and row prices of one core; `ascend` improves them."""

    cdef readonly int node_count, edge_count, row_count, piece_count
    cdef object core
    cdef int64_t[::1] node_offsets, table_offsets, piece_offsets, capacities, costs_integer, usages_integer
    cdef int64_t[::1] table_integer
    cdef int32_t[:, ::1] edge_nodes, piece_rows
    cdef int32_t[::1] piece_nodes
    cdef double[::1] costs, table, usages, priced, capacity_float
    cdef int64_t[::1] message_first, message_second
    cdef double[::1] messages
    # incident edges of a node: lower neighbours first
    cdef int32_t[::1] incident_offsets, incident_split, incident
    cdef double[::1] price, prefix, best_price, direction, load, theta, scratch
    cdef double[::1] best_messages
    cdef int32_t[::1] label, best_label
    cdef readonly double bound, best_bound, constant
    cdef readonly int passes
    cdef readonly double feasible_cost
    cdef int32_t[::1] feasible_label
    cdef readonly double label_cost, label_excess
    cdef public double step_level, flatness
    cdef bint has_best

    def __init__(self, core, prices=None):
        self.core = core
        self.node_count = core.node_count
        self.edge_count = len(core.edge_nodes)
        self.row_count = len(core.capacities)
        self.piece_count = len(core.piece_nodes)
        self.constant = float(core.constant)
        self.node_offsets = core.node_offsets
        self.table_offsets = core.table_offsets
        self.piece_offsets = core.piece_offsets
        self.capacities = core.capacities
        self.costs_integer = core.costs
        self.usages_integer = core.piece_usages
        self.table_integer = core.table_values
        self.edge_nodes = core.edge_nodes
        self.piece_rows = core.piece_rows
        self.piece_nodes = core.piece_nodes
        self.costs = core.costs.astype(np.float64)
        table = core.table_values.astype(np.float64)
        table[core.table_values >= HALF] = LARGE
        self.table = table
        self.usages = core.piece_usages.astype(np.float64)
        self.capacity_float = core.capacities.astype(np.float64)
        self.priced = np.array(self.costs)
        sizes = np.diff(core.node_offsets)
        cdef cnp.ndarray ends = core.edge_nodes
        first = sizes[ends[:, 0]] if self.edge_count else np.empty(0, np.int64)
        second = sizes[ends[:, 1]] if self.edge_count else np.empty(0, np.int64)
        starts = np.concatenate([[0], np.cumsum(first + second)]).astype(np.int64)
        self.message_first = starts[: self.edge_count].copy()
        self.message_second = starts[: self.edge_count] + first
        self.messages = np.zeros(int(starts[self.edge_count]))
        self.build_incidence(ends)
        self.price = np.zeros(self.row_count) if prices is None else np.array(prices, np.float64)
        self.best_price = np.array(self.price)
        self.best_messages = np.array(self.messages)
        self.prefix = np.zeros(self.row_count + 1)
        self.direction = np.zeros(self.row_count)
        self.load = np.zeros(self.row_count + 1)
        largest = int(sizes.max()) if self.node_count else 1
        self.theta = np.zeros(largest)
        self.scratch = np.zeros(largest)
        self.label = np.zeros(self.node_count, np.int32)
        self.best_label = np.zeros(self.node_count, np.int32)
        self.feasible_label = np.zeros(self.node_count, np.int32)
        self.feasible_cost = np.inf
        self.bound = -np.inf
        self.best_bound = -np.inf
        self.passes = 0
        self.step_level = -1.0
        self.flatness = 0.2
        self.has_best = False
        self.apply_prices()

    def build_incidence(self, ends):
        n = self.node_count
        edges = np.arange(self.edge_count, dtype=np.int32)
        node = np.concatenate([ends[:, 0], ends[:, 1]])
        other = np.concatenate([ends[:, 1], ends[:, 0]])
        edge = np.concatenate([edges, edges])
        order = np.lexsort((edge, other, node))
        counts = np.bincount(node, minlength=n) if len(node) else np.zeros(n, np.int64)
        lower = np.bincount(node[other < node], minlength=n) if len(node) else np.zeros(n, np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.incident_offsets = offsets
        self.incident_split = (offsets[:n] + lower).astype(np.int32)
        self.incident = np.ascontiguousarray(edge[order], np.int32)

    # ------------------------------------------------------------------ pieces of an iteration

    cdef void apply_prices(self) noexcept nogil:
        """priced = costs + price . usage"""
        cdef int r, p, v, i, d
        cdef double weight
        cdef double *into
        cdef double *usage
        self.prefix[0] = 0
        for r in range(self.row_count):
            self.prefix[r + 1] = self.prefix[r] + self.price[r]
        for i in range(<int>self.costs.shape[0]):
            self.priced[i] = self.costs[i]
        for p in range(self.piece_count):
            weight = self.prefix[self.piece_rows[p, 1]] - self.prefix[self.piece_rows[p, 0]]
            if weight <= 0:
                continue
            v = self.piece_nodes[p]
            into = &self.priced[self.node_offsets[v]]
            usage = &self.usages[self.piece_offsets[p]]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            for i in range(d):
                into[i] += weight * usage[i]

    cdef double sweep(self, bint forward) noexcept nogil:
        """One TRW-S pass. Sets `label`; returns the bound (constant included)."""
        cdef int position, v, k, e, w, d, dw, s, inner, outer, best
        cdef int lo, mid, hi
        cdef double total = self.constant
        cdef double share, low, keep
        cdef double *theta = &self.theta[0]
        cdef double *into
        cdef double *decode = &self.scratch[0]
        cdef double *values
        cdef double *cost
        for position in range(self.node_count):
            v = position if forward else self.node_count - 1 - position
            lo = self.incident_offsets[v]
            mid = self.incident_split[v]
            hi = self.incident_offsets[v + 1]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            cost = &self.priced[self.node_offsets[v]]
            for s in range(d):
                theta[s] = cost[s]
                decode[s] = cost[s]
            for k in range(lo, hi):
                e = self.incident[k]
                if self.edge_nodes[e, 0] == v:
                    w = self.edge_nodes[e, 1]
                    into = &self.messages[self.message_first[e]]
                else:
                    w = self.edge_nodes[e, 0]
                    into = &self.messages[self.message_second[e]]
                if (k < mid) == forward:
                    dw = <int>(self.node_offsets[w + 1] - self.node_offsets[w])
                    values = &self.table[self.table_offsets[e]]
                    if self.edge_nodes[e, 0] == v:
                        sbp_pull_rows(values, &self.messages[self.message_second[e]], into, d, dw)
                        for s in range(d):
                            decode[s] += values[s * dw + self.label[w]]
                    else:
                        sbp_pull_columns(values, &self.messages[self.message_first[e]], into, dw, d)
                        values += self.label[w] * d
                        for s in range(d):
                            decode[s] += values[s]
                else:
                    for s in range(d):
                        decode[s] += into[s]
                for s in range(d):
                    theta[s] += into[s]
            best = 0
            for s in range(1, d):
                if decode[s] < decode[best]:
                    best = s
            self.label[v] = best
            inner = mid - lo if forward else hi - mid
            outer = hi - mid if forward else mid - lo
            low = theta[0]
            for s in range(1, d):
                if theta[s] < low:
                    low = theta[s]
            if outer == 0:
                total += low
                continue
            share = 1.0 / (outer if outer >= inner else inner)
            keep = 1.0 - share * outer
            if outer >= inner:
                keep = 0.0
            total += keep * low
            for k in range(lo, hi):
                if (k < mid) == forward:
                    continue
                e = self.incident[k]
                into = &self.messages[self.message_first[e] if self.edge_nodes[e, 0] == v else self.message_second[e]]
                for s in range(d):
                    into[s] -= share * theta[s]
        self.passes += 1
        return total

    cdef void measure(self) noexcept nogil:
        """Loads and cost of the current label."""
        cdef int p, r, v, e, du, dv
        cdef double amount, total, entry
        for r in range(self.row_count + 1):
            self.load[r] = 0
        for p in range(self.piece_count):
            amount = self.usages[self.piece_offsets[p] + self.label[self.piece_nodes[p]]]
            self.load[self.piece_rows[p, 0]] += amount
            self.load[self.piece_rows[p, 1]] -= amount
        self.label_excess = 0
        for r in range(self.row_count):
            if r:
                self.load[r] += self.load[r - 1]
            if self.load[r] > self.capacity_float[r]:
                self.label_excess += self.load[r] - self.capacity_float[r]
        total = self.constant
        for v in range(self.node_count):
            total += self.costs[self.node_offsets[v] + self.label[v]]
        for e in range(self.edge_count):
            dv = <int>(self.node_offsets[self.edge_nodes[e, 1] + 1] - self.node_offsets[self.edge_nodes[e, 1]])
            total += self.table[
                self.table_offsets[e] + self.label[self.edge_nodes[e, 0]] * dv + self.label[self.edge_nodes[e, 1]]
            ]
        self.label_cost = total
        if self.label_excess == 0 and total < self.feasible_cost:
            self.feasible_cost = total
            self.feasible_label[:] = self.label

    cdef void step(self, double length, double inertia) noexcept nogil:
        """Move the prices along the smoothed excess by a level step of `length` (cost).

        The metric mixes equal weights with weights proportional to the prices (a multiplicative update): thousands of rows
        overlap, few of them bind, and the mixture finds those without forgetting the others.
        """
        cdef int r
        cdef double excess, norm = 0, gain, weight, mean = 0, change
        for r in range(self.row_count):
            mean += self.price[r]
        mean /= self.row_count
        for r in range(self.row_count):
            excess = (self.load[r] - self.capacity_float[r])
            self.direction[r] = inertia * self.direction[r] + (1.0 - inertia) * excess
            if self.price[r] > 0 or self.direction[r] > 0:
                weight = self.flatness + (1.0 - self.flatness) * self.price[r] / mean if mean > 0 else 1.0
                norm += weight * self.direction[r] * self.direction[r]
        if norm <= 0:
            return
        gain = length / norm
        for r in range(self.row_count):
            if self.price[r] > 0 or self.direction[r] > 0:
                weight = self.flatness + (1.0 - self.flatness) * self.price[r] / mean if mean > 0 else 1.0
                self.price[r] += gain * weight * self.direction[r]
                if self.price[r] < 0:
                    self.price[r] = 0

    cdef double paid(self) noexcept nogil:
        cdef int r
        cdef double total = 0
        for r in range(self.row_count):
            total += self.price[r] * self.capacity_float[r]
        return total

    # ------------------------------------------------------------------ public

    def ascend(self, int iterations, double upper, double inertia=0.7, int patience=12, double time_limit=1e9):
        """Improve prices and messages; returns the best bound (float, constant included).

        Parameters
        ----------
        iterations : int
            Each is one forward and one backward pass and, with rows, one step of the prices.
        upper : float
            Cost of the best known choice (inf if none); stops when the bound reaches it.
        """
        import time

        cdef int i, stalled = 0, gained = 0
        cdef double bound, last = -1e300
        cdef double stop = time.monotonic() + time_limit
        cdef double shift
        if self.node_count == 0:
            self.best_bound = self.constant
            return self.best_bound
        for i in range(iterations):
            with nogil:
                self.apply_prices()
                self.sweep(True)
                bound = self.sweep(False) - self.paid()
                self.measure()
            self.bound = bound
            if bound > self.best_bound:
                if bound > self.best_bound + 0.02 * (self.step_level if self.step_level > 0 else 0):
                    stalled = 0
                    gained += 1
                else:
                    stalled += 1
                self.best_bound = bound
                self.best_price[:] = self.price
                self.best_messages[:] = self.messages
            else:
                stalled += 1
                gained = 0
            if self.best_bound >= upper or time.monotonic() > stop:
                break
            if self.row_count == 0:
                if bound - last <= 1e-9 * fabs(bound) + 1e-9 and i > 3:
                    break
                last = bound
                continue
            if self.step_level < 0:
                self.step_level = 0.05 * max(fabs(bound - self.constant), 1.0)
            if stalled >= patience:
                self.step_level *= 0.6
                self.price[:] = self.best_price
                self.messages[:] = self.best_messages
                self.direction[:] = 0
                stalled = 0
            elif gained >= 5:
                self.step_level = min(1.5 * self.step_level, 0.5 * (upper - self.best_bound))
                gained = 0
            # the level: so far above the best bound, plus what the current point is below it
            self.step(self.step_level + self.best_bound - bound, inertia)
        return self.best_bound

    def restore_best(self):
        """Go back to the prices and messages of the best bound."""
        self.price[:] = self.best_price
        self.messages[:] = self.best_messages
        self.apply_prices()

    def exact_bound(self):
        """The bound of the current prices and messages in integers, rounded down (constant included)."""
        return self.exact()[0]

    def exact(self, bint with_costs=False):
        """(bound, reduced cost per strategy, per table entry, what rounding took from each strategy, and from the bound).

        Prices and messages are rounded to integers (any are valid), node costs are rounded down after pricing, so
        ``bound + reduced cost`` is a lower bound of every feasible choice that uses the strategy or pair.
        """
        cdef int r, p, v, e, i, j, d, du, dv
        cdef int64_t low, entry, amount, units
        # Any prices >= 0 are valid; those of infeasible problems grow without limit and must fit 64 bits.
        prices_array = np.asarray(self.price)
        heaviest = float(prices_array.sum()) * float(max(np.asarray(self.usages_integer).max(initial=0), 1))
        if heaviest > 2.0**56:
            prices_array = prices_array * (2.0**56 / heaviest)
        messages_float = np.asarray(self.messages)
        if len(messages_float) and np.abs(messages_float).max() > 2.0**57:
            messages_float = np.zeros_like(messages_float)
        units_array = np.floor(prices_array / PRICE_UNIT)
        self.price = units_array * PRICE_UNIT
        prefix = [0]
        unit_list = [int(value) for value in units_array.tolist()]
        paid = 0
        cdef object total = 0
        for r in range(self.row_count):
            total += unit_list[r]
            prefix.append(total)
        capacities = np.asarray(self.capacities).tolist()
        paid = sum(a * b for a, b in zip(unit_list, capacities) if a)
        priced_array = np.array(self.costs_integer)
        cdef int64_t[::1] priced = priced_array
        fraction_array = np.zeros(len(priced_array) if with_costs else 0)
        cdef double[::1] fraction = fraction_array
        cdef double estimate, product
        for p in range(self.piece_count):
            weight = prefix[self.piece_rows[p, 1]] - prefix[self.piece_rows[p, 0]]
            if weight == 0:
                continue
            v = self.piece_nodes[p]
            d = <int>(self.node_offsets[v + 1] - self.node_offsets[v])
            estimate = <double>weight
            for i in range(d):
                amount = self.usages_integer[self.piece_offsets[p] + i]
                if amount:
                    # the float product is good to 2**-51 relatively; going 2**-50 below it is a lower bound
                    product = estimate * <double>amount * PRICE_UNIT
                    units = <int64_t>floor(product * (1.0 - 1.0 / (<int64_t>1 << 50)))
                    priced[self.node_offsets[v] + i] += units
                    if with_costs:
                        fraction[self.node_offsets[v] + i] += product - <double>units
        messages_array = np.rint(messages_float).astype(np.int64)
        cdef int64_t[::1] message = messages_array
        entries_array = np.zeros(self.table_integer.shape[0] if with_costs else 0, np.int64)
        cdef int64_t[::1] entries = entries_array
        cdef int64_t *first
        cdef int64_t *second
        bound = int(self.core.constant)
        cdef int64_t edge_sum = 0
        for e in range(self.edge_count):
            du = <int>(self.node_offsets[self.edge_nodes[e, 0] + 1] - self.node_offsets[self.edge_nodes[e, 0]])
            dv = <int>(self.node_offsets[self.edge_nodes[e, 1] + 1] - self.node_offsets[self.edge_nodes[e, 1]])
            first = &message[self.message_first[e]]
            second = &message[self.message_second[e]]
            for i in range(du):
                priced[self.node_offsets[self.edge_nodes[e, 0]] + i] += first[i]
            for j in range(dv):
                priced[self.node_offsets[self.edge_nodes[e, 1]] + j] += second[j]
            low = HALF
            for i in range(du):
                for j in range(dv):
                    entry = self.table_integer[self.table_offsets[e] + i * dv + j]
                    if entry < HALF:
                        entry -= first[i] + second[j]
                        if entry < low:
                            low = entry
            edge_sum += low
            if with_costs:
                for i in range(du):
                    for j in range(dv):
                        entry = self.table_integer[self.table_offsets[e] + i * dv + j]
                        if entry < HALF:
                            entry -= first[i] + second[j] + low
                        entries[self.table_offsets[e] + i * dv + j] = entry
        bound += int(edge_sum)
        cdef int64_t node_sum = 0
        for v in range(self.node_count):
            low = priced[self.node_offsets[v]]
            for i in range(<int>self.node_offsets[v] + 1, <int>self.node_offsets[v + 1]):
                if priced[i] < low:
                    low = priced[i]
            node_sum += low
            for i in range(<int>self.node_offsets[v], <int>self.node_offsets[v + 1]):
                priced[i] -= low
        bound += int(node_sum)
        bound -= -((-paid) >> 40)
        return bound, priced_array, entries_array, fraction_array, float(((-paid) >> 40) * -(1 << 40) - paid) * PRICE_UNIT

    @property
    def prices(self):
        return np.array(self.price)

    @property
    def labels(self):
        return np.array(self.label)

    @property
    def priced_costs(self):
        return np.array(self.priced)

    @property
    def feasible_labels(self):
        return np.array(self.feasible_label)

