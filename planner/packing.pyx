# cython: language_level=3
"""First and best fit of intervals into one arena; the twin in the tests is tests/test_arena.py's `place`."""

import numpy as np

cimport numpy as cnp
from libc.stdlib cimport free, malloc
from libc.string cimport memmove

cnp.import_array()


def place(
    const cnp.int64_t[::1] sizes,
    const cnp.int64_t[::1] starts,
    const cnp.int64_t[::1] stops,
    const cnp.int64_t[::1] order,
    bint best,
    cnp.int64_t[::1] offsets,
    cnp.int64_t ceiling,
):
    """Put items down one after another, each into a gap among the items of its time that were put before it.

    Parameters
    ----------
    sizes, starts, stops
        int64 (items,): bytes, and the half-open time during which they are held.
    order
        int64 (items,): the order in which they are put.
    best
        Into the smallest gap that holds it, else the lowest.
    offsets
        int64 (items,): filled.
    ceiling
        Stop once the arena is larger than this.

    Returns
    -------
    int
        The end of the highest item; more than `ceiling` if it stopped, and then the offsets are of no use.
    """
    cdef Py_ssize_t count = order.shape[0], put = 0, at, number, low, high, middle, step
    cdef cnp.int64_t top = 0, size, start, stop, free_from, gap, found, smallest
    # Items that were put, by offset; their numbers, and copies of what the scan reads, next to each other.
    cdef Py_ssize_t* placed = <Py_ssize_t*> malloc(max(count, 1) * sizeof(Py_ssize_t))
    if placed == NULL:
        raise MemoryError()
    try:
        with nogil:
            for at in range(count):
                number = order[at]
                size = sizes[number]
                if size == 0:
                    offsets[number] = 0
                    continue
                start = starts[number]
                stop = stops[number]
                free_from = 0
                found = -1
                smallest = 0
                for step in range(put):
                    low = placed[step]
                    if starts[low] >= stop or stops[low] <= start:
                        continue
                    gap = offsets[low] - free_from
                    if gap >= size:
                        if not best:
                            found = free_from
                            break
                        if found < 0 or gap < smallest:
                            found = free_from
                            smallest = gap
                    if offsets[low] + sizes[low] > free_from:
                        free_from = offsets[low] + sizes[low]
                if found < 0:
                    found = free_from
                offsets[number] = found
                if found + size > top:
                    top = found + size
                    if top > ceiling:
                        break
                low = 0
                high = put
                while low < high:
                    middle = (low + high) // 2
                    if offsets[placed[middle]] <= found:
                        low = middle + 1
                    else:
                        high = middle
                memmove(placed + low + 1, placed + low, (put - low) * sizeof(Py_ssize_t))
                placed[low] = number
                put += 1
    finally:
        free(placed)
    return top
