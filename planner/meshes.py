"""Which meshes to try on a cluster: one axis, and two axes of which the inner one respects the nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from itertools import permutations

from sbp.errors import MeshError
from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster
from sbp.planner.cost import CostModel, as_cost_model
from sbp.wording import counted


def candidate_meshes(cluster: Cluster) -> tuple[Mesh, ...]:
    """The 1-D mesh and the 2-D factorizations whose inner axis is part of a node, or whole nodes.

    The 1-D mesh comes first: it is planned soonest, and its plan lets the others stop when their bound exceeds it.
    """
    size, inside = cluster.size, cluster.devices_per_node
    small = [divisor for divisor in range(2, math.isqrt(size) + 1) if size % divisor == 0]
    inner_sizes = {*small, *(size // divisor for divisor in small)}
    found = [Mesh((size // inner, inner)) for inner in inner_sizes if inside % inner == 0 or inner % inside == 0]
    found.sort(key=lambda mesh: (mesh.shape[1] != inside, -mesh.shape[1]))
    return (Mesh((size,)), *found)


def make_mesh(
    sizes: Mapping[str, int],
    cluster: Cluster,
    traffic: Iterable[tuple[str, str, float]],
    costs: CostModel | None = None,
) -> Mesh:
    """The order of named axes under which given collectives take least time; the last axis has neighbouring ranks.

    Parameters
    ----------
    sizes
        Axis -> its ranks; their product is the cluster's size.
    traffic
        (axis, kind of collective, payload in bytes per rank) of every collective of a step.
    costs
        Default the analytic model of the cluster.

    Returns
    -------
    Mesh
        Of equally good orders that in which `sizes` names the axes, or the one nearest to it.

    Examples
    --------
    >>> cluster = Cluster.preset("a100-80g", nodes=2, devices_per_node=4)
    >>> str(make_mesh({"tp": 4, "dp": 2}, cluster, [("tp", "all_reduce", 1e8), ("dp", "all_reduce", 1e6)]))
    'mesh(dp=2, tp=4)'
    """
    model, wanted = as_cost_model(cluster if costs is None else costs), tuple(traffic)
    for axis, _, _ in wanted:
        if axis not in sizes:
            raise MeshError(f"the traffic names the axis {axis!r}; the mesh has {', '.join(map(repr, sizes))}.")

    def seconds(mesh: Mesh) -> float:
        return sum(
            model.collective_seconds(kind, mesh, mesh.names.index(axis), payload) for axis, kind, payload in wanted
        )

    orders = (check_mesh(Mesh(tuple(sizes[name] for name in names), names), cluster) for names in permutations(sizes))
    return min(orders, key=seconds)


def check_mesh(mesh: Mesh, cluster: Cluster) -> Mesh:
    """Raise `MeshError` unless the mesh has as many ranks as the cluster has devices."""
    if mesh.size != cluster.size:
        raise MeshError(
            f"{mesh} has {counted(mesh.size, 'rank')}, but the cluster {cluster.name} has "
            f"{counted(cluster.nodes, 'node')} x {counted(cluster.devices_per_node, 'device')} = {cluster.size}; "
            f"choose sizes whose product is {cluster.size}."
        )
    return mesh
