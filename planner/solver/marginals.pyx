"""Min-marginals of non-negative reduced costs over random spanning forests: what forcing a strategy or pair costs at least.

With a bound and reduced costs that are all >= 0 (from `Dual.exact`), the cheapest completion *within a forest* of a strategy is
a lower bound of what it adds to the bound, because everything outside the forest is >= 0 too. Exact integers throughout.
"""

from libc.stdint cimport int32_t, int64_t

import numpy as np

cimport numpy as cnp

cnp.import_array()

cdef int64_t HALF = (<int64_t>1) << 59


def forest(int node_count, cnp.ndarray[cnp.int32_t, ndim=2] edge_nodes, cnp.ndarray[cnp.int64_t, ndim=1] edge_order):
    """Spanning forest by Kruskal in the given order of edges: (order, parent edge) with parents before children."""
    cdef int e, u, v, k, head, tail, x
    cdef int32_t[::1] leader = np.arange(node_count, dtype=np.int32)
    used_array = np.zeros(len(edge_nodes), np.int8)
    cdef cnp.int8_t[::1] used = used_array
    for k in range(len(edge_order)):
        e = edge_order[k]
        u = edge_nodes[e, 0]
        v = edge_nodes[e, 1]
        while leader[u] != u:
            leader[u] = leader[leader[u]]
            u = leader[u]
        while leader[v] != v:
            leader[v] = leader[leader[v]]
            v = leader[v]
        if u != v:
            leader[u] = v
            used[e] = 1
    chosen = np.flatnonzero(used_array)
    ends = edge_nodes[chosen]
    node = np.concatenate([ends[:, 0], ends[:, 1]])
    edge = np.concatenate([chosen, chosen])
    by_node = np.argsort(node, kind="stable")
    cdef int32_t[::1] starts = np.searchsorted(node[by_node], np.arange(node_count + 1)).astype(np.int32)
    cdef int32_t[::1] incident = edge[by_node].astype(np.int32)
    order_array = np.empty(node_count, np.int32)
    parent_array = np.full(node_count, -1, np.int32)
    seen_array = np.zeros(node_count, np.int8)
    cdef int32_t[::1] order = order_array, parent = parent_array
    cdef cnp.int8_t[::1] seen = seen_array
    head = 0
    tail = 0
    for x in range(node_count):
        if seen[x]:
            continue
        seen[x] = 1
        order[tail] = x
        tail += 1
        while head < tail:
            u = order[head]
            head += 1
            for k in range(starts[u], starts[u + 1]):
                e = incident[k]
                v = edge_nodes[e, 1] if edge_nodes[e, 0] == u else edge_nodes[e, 0]
                if not seen[v]:
                    seen[v] = 1
                    parent[v] = e
                    order[tail] = v
                    tail += 1
    return order_array, parent_array


def forest_marginals(core, cnp.ndarray[cnp.int64_t, ndim=1] node_cost, cnp.ndarray[cnp.int64_t, ndim=1] entry_cost,
                     cnp.ndarray[cnp.int32_t, ndim=1] order, cnp.ndarray[cnp.int32_t, ndim=1] parent):
    """Cheapest completion within the forest, per strategy and per table entry of the forest's edges (others stay 0).

    Returns (strategies,), (entries,) int64: forbidden entries hold 2**59 or more.
    """
    cdef cnp.int64_t[::1] offsets = core.node_offsets
    cdef cnp.int64_t[::1] table_offsets = core.table_offsets
    cdef int32_t[:, ::1] ends = core.edge_nodes
    cdef int n = core.node_count
    cdef int64_t total = len(core.costs)
    # down: subtree of the node; up: everything else seen from the node; message: child's answer to the parent's strategy
    down_array = np.array(node_cost)
    up_array = np.zeros(total, np.int64)
    entries_array = np.zeros(len(entry_cost), np.int64)
    cdef int64_t[::1] down = down_array, up = up_array, entries = entries_array, entry = entry_cost
    widest = int(np.diff(core.node_offsets).max()) if n else 1
    cdef int32_t[::1] parent_of = parent
    cdef int k, v, w, e, i, j, d, dw
    cdef bint first
    cdef int64_t low, value, base
    # the message of each child to its parent, stored at the child's edge: sized by the parent's domain
    message_starts = np.zeros(n + 1, np.int64)
    cdef int64_t[::1] starts = message_starts
    for v in range(n):
        e = parent_of[v]
        d = 0
        if e >= 0:
            w = ends[e, 1] if ends[e, 0] == v else ends[e, 0]
            d = <int>(offsets[w + 1] - offsets[w])
        starts[v + 1] = starts[v] + d
    message_array = np.zeros(int(starts[n]), np.int64)
    cdef int64_t[::1] message = message_array
    for k in range(n - 1, -1, -1):
        v = order[k]
        e = parent_of[v]
        if e < 0:
            continue
        first = ends[e, 0] == v
        w = ends[e, 1] if first else ends[e, 0]
        d = <int>(offsets[v + 1] - offsets[v])
        dw = <int>(offsets[w + 1] - offsets[w])
        for j in range(dw):
            low = HALF
            for i in range(d):
                value = entry[table_offsets[e] + (i * dw + j if first else j * d + i)]
                if value < HALF:
                    value += down[offsets[v] + i]
                    if value < low:
                        low = value
            message[starts[v] + j] = low
            down[offsets[w] + j] = down[offsets[w] + j] + low if down[offsets[w] + j] < HALF and low < HALF else HALF
    for k in range(n):
        v = order[k]
        e = parent_of[v]
        if e < 0:
            continue
        first = ends[e, 0] == v
        w = ends[e, 1] if first else ends[e, 0]
        d = <int>(offsets[v + 1] - offsets[v])
        dw = <int>(offsets[w + 1] - offsets[w])
        for i in range(d):
            up[offsets[v] + i] = HALF
        for j in range(dw):
            base = down[offsets[w] + j]
            if base >= HALF or up[offsets[w] + j] >= HALF:
                base = HALF
            else:
                base += up[offsets[w] + j] - message[starts[v] + j]
            for i in range(d):
                value = entry[table_offsets[e] + (i * dw + j if first else j * d + i)]
                if value >= HALF or base >= HALF:
                    value = HALF
                else:
                    value += base
                    if value < up[offsets[v] + i]:
                        up[offsets[v] + i] = value
                    if down[offsets[v] + i] < HALF:
                        value += down[offsets[v] + i]
                    else:
                        value = HALF
                entries[table_offsets[e] + (i * dw + j if first else j * d + i)] = value
    for i in range(total):
        up[i] = down[i] + up[i] if down[i] < HALF and up[i] < HALF else HALF
    return up_array, entries_array
