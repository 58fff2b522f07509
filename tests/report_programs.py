"""Small programs planned for real with pinned layouts and run on ranks in process: what reports' tests stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from sbp.dtype import dtype_named
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.plan import Plan
from sbp.runtime.executor import Executor
from sbp.trace import GraphBuilder


@dataclass(frozen=True)
class Sharded:
    """A plan and what came out of running it: per output the global array, its layout, and what every rank held."""

    plan: Plan
    values: list[numpy.ndarray]
    layouts: list[str]
    parts: list[list[numpy.ndarray]]

    @property
    def boxing(self) -> list[tuple[str, str]]:
        """(value, kind) of every boxing step."""
        return [(step.value, step.kind) for step in self.plan.boxing]

    @property
    def moved(self) -> int:
        """Bytes sent, counting only steps that communicate."""
        return sum(step.bytes for step in self.plan.boxing if step.kind not in ("slice", "fill", "pad"))


def run_sharded(
    function: Callable[..., Any],
    arrays: Mapping[str, Any],
    mesh: tuple[int, ...],
    pins: Mapping[str, str] | None = None,
    backward: Callable[[GraphBuilder, dict[str, Any], Any], list[Any]] | None = None,
) -> Sharded:
    """Plan `function(*symbols)` on a mesh with pinned layouts of inputs (by argument) and values; run it in float64.

    With `backward` the outputs are what it returns from the builder, the inputs by name and the function's result.
    """
    given = {name: numpy.asarray(array) for name, array in arrays.items()}
    builder = GraphBuilder("report")
    with builder:
        symbols = {
            name: builder.source(name, TensorType(array.shape, dtype_named(array.dtype.name)))
            for name, array in given.items()
        }
        made = function(*symbols.values())
        if backward is not None:
            made = backward(builder, symbols, made)
    graph = builder.finish(list(made) if isinstance(made, (tuple, list)) else [made])
    grid = Mesh(mesh)
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=grid.size)
    plan = auto_parallel(graph, cluster, mesh=grid, pins=pins, least_fill=0.0)
    executor = Executor(plan.physical, floating="f64")
    result = executor.run({}, executor.place(given))
    values, layouts, parts = [], [], []
    for name in graph.outputs:
        register = plan.physical.outputs[name]
        local = result.outputs[name]
        values.append(executor.collect(local, register))
        layouts.append(str(plan.physical.registers[register].layout))
        parts.append([local[rank] for rank in sorted(local)])
    return Sharded(plan, values, layouts, parts)


def signatures(op: Any, *types: str, mesh: tuple[int, ...] = (2,), **attributes: Any) -> set[str]:
    """An operator's signatures as text: `S(0), B -> S(0)`."""
    from sbp.check_rules import signature_text
    from sbp.operator import parse_type

    rule = op.bind([parse_type(text) for text in types], attributes)
    return {signature_text(one.inputs, one.outputs) for one in rule.signatures(mesh)}


def layout(text: str) -> Layout:
    """A layout from its spelling."""
    return Layout.parse(text)
