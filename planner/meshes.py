"""Which meshes to try on a cluster: one axis, and two axes of which the inner one respects the nodes."""

from __future__ import annotations

import math

from sbp.errors import MeshError
from sbp.mesh import Mesh
from sbp.planner.cluster import Cluster
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


def check_mesh(mesh: Mesh, cluster: Cluster) -> Mesh:
    """Raise `MeshError` unless the mesh has as many ranks as the cluster has devices."""
    if mesh.size != cluster.size:
        raise MeshError(
            f"{mesh} has {counted(mesh.size, 'rank')}, but the cluster {cluster.name} has "
            f"{counted(cluster.nodes, 'node')} x {counted(cluster.devices_per_node, 'device')} = {cluster.size}; "
            f"choose sizes whose product is {cluster.size}."
        )
    return mesh
