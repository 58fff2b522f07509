"""Baselines: data parallel, ZeRO-3/FSDP, Megatron tensor parallel and their product, priced by the same cost model.

Each restricts every mesh axis to a style (see `sbp.planner.styles`); the search then finds the best plan that respects
it, so a baseline is never worse than the hand-written scheme of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sbp.errors import InfeasibleError, SbpError
from sbp.frontend.model import TorchModel
from sbp.graph import Graph
from sbp.mesh import Mesh
from sbp.nn.module import Module
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import MOST_MEMORY_BYTES, Cluster
from sbp.planner.plan import Plan
from sbp.planner.styles import (
    COLUMN_PARALLEL,
    ROW_PARALLEL,
    DataParallel,
    FullyShardedDataParallel,
    Style,
    Styles,
    TensorParallel,
)
from sbp.planner.workload import workload


@dataclass(frozen=True)
class Row:
    """One line of a comparison: a plan, or why there is none; `fits` says whether it stays within the memory limit."""

    name: str
    plan: Plan | None
    fits: bool
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """The found plan and the baselines under the same cost model, the found plan first."""

    rows: tuple[Row, ...]

    @property
    def found(self) -> Plan:
        """The plan that `auto_parallel` found."""
        plan = self.rows[0].plan
        assert plan is not None
        return plan

    def to_json(self) -> list[dict[str, Any]]:
        """One entry per row."""
        return [
            {
                "name": row.name,
                "fits": row.fits,
                "reason": row.reason,
                "mesh": None if row.plan is None else list(row.plan.mesh.shape),
                "objective_seconds": None if row.plan is None else row.plan.objective_seconds,
                "step_seconds": None if row.plan is None else row.plan.cost.step_seconds,
                "peak_bytes": None if row.plan is None else row.plan.memory.peak_bytes,
            }
            for row in self.rows
        ]

    def __str__(self) -> str:
        from sbp.report.text import comparison_text

        return comparison_text(self)


def baselines_for(graph: Graph, cluster: Cluster) -> dict[str, tuple[Mesh, tuple[Style, ...]]]:
    """Name -> mesh and styles of every baseline that makes sense for the graph on the cluster."""
    size, inside = cluster.size, cluster.devices_per_node
    found: dict[str, tuple[Mesh, tuple[Style, ...]]] = {
        "data parallel": (Mesh((size,), ("dp",)), (DataParallel(),)),
        "ZeRO-3 / FSDP": (Mesh((size,), ("dp",)), (FullyShardedDataParallel(),)),
    }
    names = graph.parameters
    transformer = any(COLUMN_PARALLEL.search(n) for n in names) and any(ROW_PARALLEL.search(n) for n in names)
    if transformer:
        found["tensor parallel"] = (Mesh((size,), ("tp",)), (TensorParallel(),))
        found["tensor + sequence parallel"] = (Mesh((size,), ("tp",)), (TensorParallel(sequence=True),))
        inner = inside if size > inside else next((d for d in range(2, size) if size % d == 0), size)
        if 1 < inner < size:
            mesh = Mesh((size // inner, inner), ("dp", "tp"))
            found["DP x TP"] = (mesh, (DataParallel(), TensorParallel(sequence=True)))
            found["FSDP x TP"] = (mesh, (FullyShardedDataParallel(), TensorParallel(sequence=True)))
    return found


def compare(
    model: str | Module | Graph | TorchModel,
    cluster: str | Cluster,
    *,
    nodes: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    training: bool = True,
    precision: str | None = None,
    progress: Callable[[str], None] | None = None,
    found: Plan | None = None,
    **options: Any,
) -> Comparison:
    """Plan the model freely and under every baseline.

    Parameters
    ----------
    found
        The free plan, where it is already there.
    options
        Passed to `auto_parallel`.

    A baseline that exceeds the memory limit is priced without it and marked as not fitting.
    """
    machine = Cluster.resolve(cluster, nodes)
    graph = workload(model, machine.size, batch, sequence, training, options.get("optimizer"), precision).graph
    arguments = dict(
        batch=batch, sequence=sequence, training=training, precision=precision, progress=progress, **options
    )
    best = found or auto_parallel(model, machine, **arguments)
    rows = [Row("found", best, True)]
    arguments.pop("pins", None)
    for name, (mesh, styles) in baselines_for(graph, machine).items():
        arguments["mesh"] = mesh

        def restriction(graph: Graph, mesh: Mesh, styles: tuple[Style, ...] = styles) -> Styles:
            return Styles(graph, mesh, *styles)

        try:
            rows.append(Row(name, auto_parallel(model, machine, restriction=restriction, **arguments), True))
        except InfeasibleError as error:
            unlimited: Mapping[str, Any] = {**arguments, "memory_limit": MOST_MEMORY_BYTES}
            try:
                rows.append(
                    Row(name, auto_parallel(model, machine, restriction=restriction, **unlimited), False, str(error))
                )
            except SbpError as again:
                rows.append(Row(name, None, False, str(again)))
        except SbpError as error:
            rows.append(Row(name, None, False, str(error)))
    return Comparison(tuple(rows))
