"""What one rank does for one micro-batch: the kernels and collectives of a physical plan, without their times.

A model of one layer is planned with pinned layouts and lowered; its operations, told apart by module, are those of the
embedding, of every layer, and of the head with the loss. Decisions do not depend on sizes, so they are made once per
kind of model and split; every other size is lowered under the same decisions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from sbp.graph import Graph
from sbp.mesh import Mesh
from sbp.models.llama import LlamaConfig
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster, Device, Tier
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.decisions import Decisions
from sbp.planner.lowering import lower
from sbp.planner.replay.configuration import ModelConfig
from sbp.planner.replay.extraction import Program, extract
from sbp.planner.replay.layouts import MegatronLayouts
from sbp.planner.search import search
from sbp.planner.solver import Limits
from sbp.planner.workload import workload

_LAYOUT_CLUSTER = Cluster(
    "layouts", Device("any", (("f32", 1e14),), 1 << 60, 1e12), 1, 1, (Tier("any", None, 1e-5, 1e11),)
)
"""Where layouts are decided: pinned ones do not depend on the hardware."""


@lru_cache(maxsize=2048)
def program(
    model: ModelConfig, ranks: int, sequence_parallel: bool, batch: int, sequence: int, precision: str
) -> Program:
    """The program of one micro-batch of a model on `ranks` tensor-parallel ranks; `model.layers` is not used.

    Raises
    ------
    SbpError
        Sizes that the model or the split cannot take.
    """
    graph = _graph(model, batch, sequence, precision)
    mesh = Mesh((ranks,), ("tp",))
    kind = _small(model)
    decisions = _decisions(kind, min(ranks, 2), sequence_parallel and ranks > 1, precision)
    costs = AnalyticCostModel(_LAYOUT_CLUSTER.with_nodes(ranks))
    return extract(graph, lower(graph, mesh, decisions, costs, BoxingTable(mesh, costs)))


def _small(model: ModelConfig) -> ModelConfig:
    """A model whose graph has the same nodes, small enough to be planned at once."""
    if isinstance(model, LlamaConfig):
        return replace(model, layers=1, heads=2, kv_heads=2, hidden=64, vocabulary=128, positions=16, intermediate=128)
    return replace(model, layers=1, heads=2, hidden=64, vocabulary=128, positions=16, intermediate=128)


def _graph(model: ModelConfig, batch: int, sequence: int, precision: str) -> Graph:
    fitting = replace(model, layers=1, positions=max(model.positions, sequence))
    return workload(fitting.build(), 1, batch, sequence, True, None, precision).graph


@lru_cache(maxsize=64)
def _decisions(model: ModelConfig, ranks: int, sequence_parallel: bool, precision: str) -> Decisions:
    """The pinned layouts of a kind of model."""
    graph = _graph(model, 4, 16, precision)
    mesh = Mesh((ranks,), ("tp",))
    costs = AnalyticCostModel(_LAYOUT_CLUSTER.with_nodes(ranks))
    return search(
        graph, mesh, costs, None, Limits(60.0, 1, 0), MegatronLayouts(graph, mesh, sequence_parallel)
    ).decisions
