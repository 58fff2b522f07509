"""Everything that reports say about a plan, as plain data: text, HTML and JSON are three ways to show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbp.layout import Broadcast, broadcast_layout
from sbp.operator import REGISTRY
from sbp.planner.links import AxisLinks, axis_links
from sbp.planner.physical import COLLECTIVES, Box, Compute, PhysicalPlan
from sbp.report.layouts import LayoutRow, layout_rows
from sbp.report.naming import grouped_names, template_of
from sbp.rule import Signature

if TYPE_CHECKING:
    from sbp.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class TimeRow:
    """A part of the step: `kind` is "compute" (by phase), "collective" (by mesh axis and collective) or "local".

    Local steps are layout changes that move nothing between ranks; they run among the computation.
    """

    kind: str
    name: str
    seconds: float
    count: int


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """Operations of equal layers, operator and phase added up; `flops` is one rank's."""

    module: str
    op: str
    phase: str
    count: int
    seconds: float
    flops: float


@dataclass(frozen=True, slots=True)
class BoxingCost:
    """Boxing steps of equal layers added up; `bytes` is the payload per rank of all of them."""

    value: str
    type: str
    kind: str
    axis: str
    before: str
    after: str
    phase: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Summary:
    """A plan in figures.

    Attributes
    ----------
    sizes
        `layers=2`: sizes in which the model differs from the preset it is named after.
    sequence
        Length of the sequences, where the model reads tokens.
    split
        Whether any tensor is split or held in parts anywhere.
    utilisation
        Time in which devices at their peak would do what each rank does, over the step's time.
    model_utilisation
        The same of the model's own FLOP, spread evenly: what ranks compute twice does not count.
    links
        The links of every mesh axis.
    memory_bytes
        Bytes per device at the peak by kind, and under "peak", "limit" and "reserved" what they say.
    arena
        Bytes of the arena that holds everything, and the most that is held at once, sizes rounded up.
    peak_operation
        Where the peak is reached.
    """

    title: str
    cluster: str
    mesh: str
    model: Mapping[str, Any]
    sizes: tuple[str, ...]
    sequence: int | None
    split: bool
    status: str
    reason: str
    objective_seconds: float
    lower_bound_seconds: float
    gap: float
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    boxing_seconds: Mapping[str, float]
    flops: float
    utilisation: float
    model_utilisation: float
    time: tuple[TimeRow, ...]
    links: tuple[AxisLinks, ...]
    memory_bytes: Mapping[str, int | None]
    arena: Mapping[str, int]
    peak_operation: str
    layouts: tuple[LayoutRow, ...]
    operators: tuple[OperatorCost, ...]
    boxing: tuple[BoxingCost, ...]
    tried: tuple[Mapping[str, Any], ...]
    pins: Mapping[str, str]


def summarize(plan: Plan) -> Summary:
    """The figures of a plan; rows are ordered by their cost, ties by name."""
    cost, memory = plan.cost, plan.memory
    ideal, ideal_model = _ideal_seconds(plan)
    step = cost.step_seconds
    return Summary(
        title=plan.graph.name,
        cluster=str(plan.cluster),
        mesh=str(plan.mesh),
        model=plan.model,
        sizes=_other_sizes(plan.model),
        sequence=_sequence(plan),
        split=is_split(plan.physical),
        status=plan.status.value,
        reason=plan.reason,
        objective_seconds=cost.objective_seconds,
        lower_bound_seconds=plan.lower_bound_seconds,
        gap=plan.gap,
        step_seconds=step,
        compute_seconds=cost.compute_seconds,
        exposed_seconds=cost.exposed_seconds,
        boxing_seconds=cost.boxing_seconds,
        flops=cost.flops,
        utilisation=ideal / step if step > 0 else 0.0,
        model_utilisation=ideal_model / step if step > 0 else 0.0,
        time=_time_rows(plan),
        links=axis_links(plan.mesh, plan.cluster, plan.costs),
        memory_bytes={
            **memory.by_kind,
            "peak": memory.peak_bytes,
            "limit": memory.limit_bytes,
            "reserved": memory.reserved_bytes,
        },
        arena={"size_bytes": plan.arena.size_bytes, "lower_bound_bytes": plan.arena.lower_bound_bytes},
        peak_operation=_peak_operation(plan),
        layouts=layout_rows(plan),
        operators=_operator_costs(plan),
        boxing=_boxing_costs(plan),
        tried=tuple(
            {
                "mesh": str(item.mesh),
                "objective_seconds": item.objective_seconds,
                "lower_bound_seconds": item.lower_bound_seconds,
                "outcome": item.outcome,
            }
            for item in plan.tried
        ),
        pins=plan.pins,
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """The figures of a plan as data for programs: what `sbp plan --json` and `sbp report --json` print."""
    summary = summarize(plan)
    return {
        "graph": summary.title,
        "model": dict(plan.model),
        "cluster": plan.cluster.name,
        "devices": plan.cluster.size,
        "mesh": {"shape": list(plan.mesh.shape), "names": list(plan.mesh.names)},
        "status": summary.status,
        "reason": summary.reason,
        "objective_seconds": summary.objective_seconds,
        "lower_bound_seconds": summary.lower_bound_seconds,
        "gap": summary.gap,
        "step_seconds": summary.step_seconds,
        "compute_seconds": summary.compute_seconds,
        "boxing_seconds": dict(summary.boxing_seconds),
        "exposed_seconds": summary.exposed_seconds,
        "flops_per_device": summary.flops,
        "flop_utilisation": summary.utilisation,
        "model_flop_utilisation": summary.model_utilisation,
        "time": [
            {"kind": row.kind, "name": row.name, "seconds": row.seconds, "count": row.count} for row in summary.time
        ],
        "links": [item.to_json() for item in summary.links],
        "memory_bytes": dict(summary.memory_bytes),
        "arena": dict(summary.arena),
        "memory_peak_at": summary.peak_operation,
        "layouts": {name: str(layout) for name, layout in plan.layouts.items()},
        "parameters": [
            {
                "names": row.names,
                "type": row.type,
                "count": row.count,
                "stored": row.stored,
                "forward": list(row.forward),
                "backward": list(row.backward),
                "optimizer": list(row.optimizer),
                "bytes_per_device": row.bytes,
            }
            for row in summary.layouts
        ],
        "operators": [
            {
                "module": item.module,
                "op": item.op,
                "phase": item.phase,
                "count": item.count,
                "seconds": item.seconds,
                "flops": item.flops,
            }
            for item in summary.operators
        ],
        "boxing": [
            {
                "value": item.value,
                "type": item.type,
                "kind": item.kind,
                "axis": item.axis,
                "before": item.before,
                "after": item.after,
                "phase": item.phase,
                "count": item.count,
                "bytes": item.bytes,
                "seconds": item.seconds,
            }
            for item in summary.boxing
        ],
        "tried": [dict(item) for item in summary.tried],
        "pins": dict(summary.pins),
    }


def is_split(physical: PhysicalPlan) -> bool:
    """Whether some register holds anything but the whole tensor on every rank."""
    return any(not isinstance(sbp, Broadcast) for register in physical.registers for sbp in register.layout)


def _sequence(plan: Plan) -> int | None:
    """From the graph, which knows the model's own length where none was asked for."""
    tokens = plan.graph.values.get("tokens")
    asked = plan.model.get("sequence") if plan.model else None
    return tokens.shape[1] if tokens is not None and tokens.kind == "input" and len(tokens.shape) == 2 else asked


def _other_sizes(model: Mapping[str, Any]) -> tuple[str, ...]:
    """A plan file has lists where the preset has tuples."""
    from sbp.models import is_preset, preset_sizes, size_text

    name = model.get("name", "")
    if not is_preset(name):
        return ()
    own = {key: tuple(size) if isinstance(size, list) else size for key, size in model.get("config", {}).items()}
    return tuple(size_text(key, own[key]) for key, size in preset_sizes(name).items() if own.get(key, size) != size)


def _ideal_seconds(plan: Plan) -> tuple[float, float]:
    """Seconds at peak FLOP/s of one rank's work, and of an even share of the unsharded work."""
    device, graph = plan.cluster.device, plan.graph
    nodes = {node.name: node for node in graph.nodes}
    ideal = whole = 0.0
    seen: dict[tuple[str, Any, Any], float] = {}
    for operation in plan.physical.operations:
        if not isinstance(operation, Compute):
            continue
        node = nodes[operation.node]
        made = graph.types(node.outputs)
        peak = device.peak(made[0].dtype)
        ideal += operation.flops / peak
        types = graph.types(node.inputs)
        key = (node.op, types, tuple(sorted((name, repr(value)) for name, value in node.attributes.items())))
        if key not in seen:
            layout = broadcast_layout(1)
            unsharded = Signature((layout,) * len(types), (layout,) * len(made))
            seen[key] = REGISTRY[node.op].work(graph.rule(node), types, made, node.attributes, unsharded, (1,))[0]
        whole += seen[key] / peak
    return ideal, whole / plan.mesh.size


def _time_rows(plan: Plan) -> tuple[TimeRow, ...]:
    found: dict[tuple[str, str], list[float]] = {}
    for operation in plan.physical.operations:
        if isinstance(operation, Compute):
            key = ("compute", operation.phase)
        elif operation.kind in COLLECTIVES:
            key = ("collective", f"{plan.mesh.names[operation.mesh_axis]}: {operation.kind}")
        else:
            key = ("local", operation.kind)
        entry = found.setdefault(key, [0.0, 0])
        entry[0] += operation.seconds
        entry[1] += 1
    order = ("compute", "local", "collective")
    rows = [TimeRow(kind, name, seconds, int(count)) for (kind, name), (seconds, count) in found.items()]
    axes = {name: at for at, name in enumerate(plan.mesh.names)}
    return tuple(sorted(rows, key=lambda row: (order.index(row.kind), axes.get(row.name.split(":")[0], 0))))


def _peak_operation(plan: Plan) -> str:
    operations = plan.physical.operations
    if not operations:
        return "the start"
    operation = operations[plan.memory_profile.peak_at]
    if isinstance(operation, Compute):
        return f"{operation.node} ({operation.op}, {operation.phase})"
    value = plan.physical.registers[operation.inputs[0]].value
    return f"{operation.kind} of {value} ({operation.phase})"


def _operator_costs(plan: Plan) -> tuple[OperatorCost, ...]:
    found: dict[Any, list[Compute]] = {}
    for operation in plan.physical.operations:
        if isinstance(operation, Compute):
            found.setdefault((template_of(operation.module)[0], operation.op, operation.phase), []).append(operation)
    costs = [
        OperatorCost(
            ", ".join(grouped_names(dict.fromkeys(item.module for item in members))),
            op,
            phase,
            len(members),
            sum(item.seconds for item in members),
            sum(item.flops for item in members),
        )
        for (_, op, phase), members in found.items()
    ]
    return tuple(sorted(costs, key=lambda item: (-item.seconds, item.module, item.op, item.phase)))


def _boxing_costs(plan: Plan) -> tuple[BoxingCost, ...]:
    registers = plan.physical.registers
    found: dict[Any, list[Box]] = {}
    for operation in plan.physical.operations:
        if isinstance(operation, Box):
            before, after = registers[operation.inputs[0]], registers[operation.outputs[0]]
            key = (
                template_of(before.value)[0],
                before.type,
                operation.kind,
                operation.mesh_axis,
                before.layout,
                after.layout,
                operation.phase,
            )
            found.setdefault(key, []).append(operation)
    costs = [
        BoxingCost(
            ", ".join(grouped_names(dict.fromkeys(registers[item.inputs[0]].value for item in members))),
            str(type_),
            kind,
            plan.mesh.names[axis],
            str(before),
            str(after),
            phase,
            len(members),
            sum(item.bytes for item in members),
            sum(item.seconds for item in members),
        )
        for (_, type_, kind, axis, before, after, phase), members in found.items()
    ]
    return tuple(sorted(costs, key=lambda item: (-item.seconds, item.value, item.kind, item.axis, item.phase)))
