"""A plan's step as a pipeline: cut into stages on a cluster, for any number of micro-batches.

The plan is that of one micro-batch on the ranks of one stage; stage s has the ranks behind those of stage s - 1.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sbp.planner import stage_pipeline
from sbp.planner.cluster import Cluster
from sbp.planner.collective import placement, transfers_seconds
from sbp.planner.physical import PhysicalPlan
from sbp.planner.pipeline import P2P, Pipeline
from sbp.planner.stages import cut
from sbp.planner.timing import links_of, pipeline_of


def plan_pipeline(
    physical: PhysicalPlan,
    cluster: Cluster,
    stages: int = 1,
    chunks: int = 1,
    micro_batches: int = 1,
    *,
    weights_apart: bool = False,
) -> Pipeline:
    """The pipeline of a plan.

    Every rank sends its part of what the next chunk reads to its like on the next stage; of the stages the slowest
    boundary counts for all. Nodes are added where the cluster has fewer ranks than all stages need. With
    `weights_apart` gradients of parameters are a phase of their own (see `sbp.planner.stages.cut`).

    Raises
    ------
    PipelineError
        The plan has fewer layers than chunks.
    ClusterError
        The cluster has no link to further nodes.
    """
    links, slowdown = dict(links_of(physical.mesh, cluster)), cluster.device.overlap_slowdown
    if stages * chunks * micro_batches == 1 and not weights_apart:
        return pipeline_of(physical, links, slowdown)
    staged = cut(physical, stages, chunks, weights_apart=weights_apart)
    size = physical.mesh.size
    nodes = math.ceil(stages * size / cluster.devices_per_node)
    whole = cluster.with_nodes(max(nodes, cluster.nodes))
    # With chunks the last stage sends to the first.
    boundaries = [
        [(stage * size + rank, (stage + 1) % stages * size + rank) for rank in range(size)]
        for stage in range(stages if chunks > 1 else stages - 1)
        if stages > 1
    ]
    if boundaries:
        order = [tier.name for tier in whole.tiers]
        tiers = {placement(whole, pair).meetings[-1].tier.name for pairs in boundaries for pair in pairs}
        links[P2P] = max(tiers, key=order.index)

    def send_seconds(size: int) -> float:
        return max((transfers_seconds(whole, pairs, size) for pairs in boundaries), default=0.0)

    pipeline = stage_pipeline.pipeline_of(staged, micro_batches, send_seconds)
    return replace(pipeline, links=links, compute_slowdown=slowdown)
