"""The cost model: seconds of a kernel and of a collective; analytic from a cluster, or a user's own."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from sbp.errors import ClusterError
from sbp.mesh import Mesh
from sbp.operator import Operator
from sbp.planner.cluster import Cluster
from sbp.planner.collective import Placement, Terms, collective_terms, placements
from sbp.planner.kernels import Kernels
from sbp.planner.list_calls import ListCalls
from sbp.planner.physical import COLLECTIVES, LOCAL_STEPS

VIEWS = frozenset({"reshape", "squeeze", "unsqueeze", "flatten", "view", "identity"})
"""Operators that only reinterpret a tensor: they move nothing and cost nothing."""

Sizes = tuple[int, int, int, int]
"""(batch, m, n, k) of matrix products."""


@runtime_checkable
class CostModel(Protocol):
    """What the planner asks; anything with these two methods will do.

    A model may have a third, `product_seconds(op, sizes, flops, bytes, dtype)`: the time of a matrix product whose
    local sizes (batch, m, n, k) are known, asked in place of `compute_seconds` for operators that state them
    (`sbp.operator.Operator.product`).
    """

    def compute_seconds(self, op: str, flops: float, bytes: float, dtype: str) -> float:
        """Time of one kernel on one rank: its local FLOP, the bytes that it reads and writes, its element type."""
        ...

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """Time of one boxing step along a mesh axis, all groups of the axis at once.

        `kind` is one of `sbp.planner.physical.COLLECTIVES` or `LOCAL_STEPS`; `bytes` is the payload per rank, the
        larger of the local tensors before and after.
        """
        ...


class AnalyticCostModel:
    """Roofline compute, and collectives by the cluster's link tiers.

    A kernel takes max(FLOP / (peak * ceiling), bytes / memory bandwidth) and one launch (Williams, Waterman and
    Patterson, "Roofline", CACM 2009); a matrix product on a device whose multiprocessors are known takes whole waves of
    tiles (`sbp.planner.kernels`); one of the device's measured `operators` takes the sum of its own start, FLOP and
    bytes. A collective takes what its slowest group takes; see `sbp.planner.collective`.

    Parameters
    ----------
    cluster
        The hardware.
    views
        Names of operators that move nothing.
    lists
        What a framework adds whose collectives take lists of tensors; default none of that.
    """

    def __init__(self, cluster: Cluster, views: Collection[str] = VIEWS, lists: ListCalls | None = None) -> None:
        device = cluster.device
        self.cluster = cluster
        self.views = frozenset(views)
        self.lists = lists
        self.kernels = Kernels(device)
        self._seconds_per_byte = 1.0 / (device.memory_bandwidth_bytes_per_second * device.memory_ceiling)
        self._launch = device.launch_seconds
        self._operators = {name: (seconds, 1.0 / rate) for name, seconds, rate in device.operators}
        self._seconds_per_flop: dict[str, float] = {}
        self._terms: dict[tuple[str, Mesh, int], tuple[Terms, ...]] = {}
        self._placements: dict[tuple[tuple[int, ...], int], tuple[Placement, ...]] = {}

    def __repr__(self) -> str:
        return f"AnalyticCostModel({self.cluster})"

    def compute_seconds(self, op: str, flops: float, bytes: float, dtype: str) -> float:
        """Time of one kernel; views, and kernels without FLOP and bytes, are free."""
        measured = self._operators.get(op)
        if measured is None and (op in self.views or (flops <= 0 and bytes <= 0)):
            return 0.0
        per_flop = self._seconds_per_flop.get(dtype)
        if per_flop is None:
            device = self.cluster.device
            per_flop = self._seconds_per_flop[dtype] = 1.0 / (device.peak(dtype) * device.matmul_ceiling)
        if measured is not None:
            start, per_byte = measured
            return start + flops * per_flop + bytes * per_byte
        return max(flops * per_flop, bytes * self._seconds_per_byte) + self._launch

    def product_seconds(self, op: str, sizes: Sizes, flops: float, bytes: float, dtype: str) -> float:
        """Time of a matrix product of local sizes (batch, m, n, k)."""
        if self.cluster.device.multiprocessors is None or op in self._operators or flops <= 0:
            return self.compute_seconds(op, flops, bytes, dtype)
        waves = self.kernels.waves_seconds(*sizes, dtype)
        return max(waves, bytes * self._seconds_per_byte) + self._launch

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """Time of one boxing step; nothing to move, or nobody to move it to, is free.

        Raises
        ------
        ClusterError
            An unknown kind, an axis that the mesh lacks, or a mesh with more ranks than the cluster.
        """
        key = (kind, mesh, axis)
        terms = self._terms.get(key)
        if terms is None:
            terms = self._terms[key] = self._prepare(kind, mesh, axis)
        if bytes <= 0 or not terms:
            return 0.0
        root = math.sqrt(bytes)
        wire = max(term.constant + term.root * root + term.linear * bytes for term in terms)
        if self.lists is None or kind in LOCAL_STEPS:
            return wire
        return wire + self.lists.seconds(kind, mesh.shape[axis], bytes, self.cluster.device)

    def _prepare(self, kind: str, mesh: Mesh, axis: int) -> tuple[Terms, ...]:
        """The terms of the differently placed groups of an axis; none for groups of one rank."""
        if kind not in COLLECTIVES and kind not in LOCAL_STEPS:
            known = ", ".join((*COLLECTIVES, *LOCAL_STEPS))
            raise ClusterError(f"no boxing step is called {kind!r}; known are {known}.")
        if not 0 <= axis < mesh.ndim:
            raise ClusterError(f"{mesh} has no axis {axis}; give one from 0 to {mesh.ndim - 1}.")
        if mesh.size > self.cluster.size:
            raise ClusterError(
                f"{mesh} has {mesh.size} ranks, but the cluster {self.cluster} has {self.cluster.size}; "
                f"use a smaller mesh or more nodes."
            )
        members = mesh.shape[axis]
        if members == 1:
            return ()
        if kind in LOCAL_STEPS:
            # slice reads and writes one chunk; fill writes the whole; pad reads a chunk and writes the whole.
            moved = {"slice": 2 / members, "fill": 1.0, "pad": 1 + 1 / members}[kind]
            return (Terms(self._launch, 0.0, moved * self._seconds_per_byte),)
        place = (mesh.shape, axis)
        if place not in self._placements:
            # Most groups lie alike; dict.fromkeys keeps the different ones, in order.
            found = dict.fromkeys(placements(self.cluster, mesh.groups(axis)))
            self._placements[place] = tuple(found)
        return tuple(dict.fromkeys(collective_terms(kind, placed) for placed in self._placements[place]))


class ComputeCosts(Protocol):
    """What pricing a kernel needs of a cost model."""

    def compute_seconds(self, op: str, flops: float, bytes: float, dtype: str) -> float:
        """See `CostModel`."""


def kernel_seconds(
    costs: ComputeCosts, op: Operator, case: tuple[Any, ...], flops: float, bytes: float, dtype: str
) -> float:
    """Time of an operator under a signature: by the sizes of its product where both sides know of them.

    `case` is what `Operator.work` takes, whose results `flops` and `bytes` are.
    """
    if op.product is not None and (by_sizes := getattr(costs, "product_seconds", None)) is not None:
        return by_sizes(op.name, op.product_sizes(*case), flops, bytes, dtype)
    return costs.compute_seconds(op.name, flops, bytes, dtype)


class CheckedCostModel:
    """A user's cost model whose every answer is checked: a finite number of at least 0."""

    def __init__(self, model: CostModel) -> None:
        self.model = model

    def compute_seconds(self, op: str, flops: float, bytes: float, dtype: str) -> float:
        """What the user's model says, checked."""
        return self._checked("compute_seconds", (op, flops, bytes, dtype))

    def product_seconds(self, op: str, sizes: Sizes, flops: float, bytes: float, dtype: str) -> float:
        """What the user's model says, checked; by FLOP and bytes where it has no method for products."""
        if callable(getattr(self.model, "product_seconds", None)):
            return self._checked("product_seconds", (op, sizes, flops, bytes, dtype))
        return self.compute_seconds(op, flops, bytes, dtype)

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """What the user's model says, checked."""
        return self._checked("collective_seconds", (kind, mesh, axis, bytes))

    def _checked(self, method: str, arguments: tuple) -> float:
        answer = getattr(self.model, method)(*arguments)
        try:
            seconds = float(answer)
        except (TypeError, ValueError):
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds >= 0.0):
            shown = ", ".join(repr(a) if isinstance(a, str) else str(a) for a in arguments)
            raise ClusterError(
                f"{type(self.model).__name__}.{method}({shown}) returned {answer!r}; "
                "a cost must be a finite number of seconds, at least 0."
            )
        return seconds


def as_cost_model(model: CostModel | Cluster) -> CostModel:
    """The model to plan with: the analytic one of a cluster, or a user's own, whose answers are then checked.

    Raises
    ------
    ClusterError
        The object lacks one of the two methods.
    """
    if isinstance(model, Cluster):
        return AnalyticCostModel(model)
    if type(model) in (AnalyticCostModel, CheckedCostModel):
        return model
    lacking = [name for name in ("compute_seconds", "collective_seconds") if not callable(getattr(model, name, None))]
    if lacking:
        raise ClusterError(f"{type(model).__name__} is no cost model: it lacks the method {' and '.join(lacking)}.")
    return CheckedCostModel(model)
