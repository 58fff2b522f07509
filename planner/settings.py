"""Which setting of a training framework a plan is, or is nearest to, and what the difference costs.

A setting gives every mesh axis a role: data parallelism with its ZeRO stage, expert parallelism within it, tensor
parallelism with or without sequence parallelism, context parallelism. A role is a style (see `sbp.planner.styles`), so
a plan is a setting exactly if every one of its layouts is one that the styles allow. Where it is none, the plans of the
settings that it departs from least are made, and the cheapest of them is the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from sbp.errors import InfeasibleError, PlanError, SbpError, TimeLimitError
from sbp.graph import Graph
from sbp.layout import Broadcast
from sbp.mesh import Mesh
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import MOST_MEMORY_BYTES
from sbp.planner.physical import Box
from sbp.planner.plan import Plan
from sbp.planner.styles import (
    ContextParallel,
    DataParallel,
    ExpertParallel,
    Facts,
    FullyShardedDataParallel,
    ShardedOptimizer,
    Style,
    Styles,
    TensorParallel,
)

ROLES: Mapping[str, Style] = {
    "data": DataParallel(),
    "data, sharded optimizer": ShardedOptimizer(),
    "data, fully sharded": FullyShardedDataParallel(),
    "experts": ExpertParallel(),
    "tensor": TensorParallel(),
    "tensor and sequence": TensorParallel(sequence=True),
    "context": ContextParallel(),
}
"""Role of a mesh axis -> its style. Of several that fit, the first is taken."""

DATA = tuple(role for role in ROLES if role.startswith("data"))
TRIED = 3
"""Settings that are planned to find the nearest."""


@dataclass(frozen=True)
class Setting:
    """Degrees of parallelism as frameworks ask for them.

    Attributes
    ----------
    roles
        Mesh axis -> its role, one of `ROLES`; axes of one rank have none.
    replicate, shard
        Data-parallel ranks that hold copies, and those that hold shards of parameters or optimizer state.
    zero
        Stage: 0 nothing sharded, 1 optimizer state, 2 gradients reduced to shards too, 3 parameters too.
    regather
        Stage 3: parameters are gathered again for the backward phase, not kept from the forward phase.
    tensor, sequence, context, experts
        Degree of tensor parallelism, whether with sequence parallelism, degrees of context and expert parallelism; the
        ranks of the last are among those that replicate.
    batch, length
        Global batch size, sequence length (0: the inputs have none).
    """

    roles: Mapping[str, str]
    replicate: int
    shard: int
    zero: int
    regather: bool
    tensor: int
    sequence: bool
    context: int
    experts: int
    batch: int
    length: int
    precision: str
    recompute: bool

    @property
    def data(self) -> int:
        """Degree of data parallelism."""
        return self.replicate * self.shard


@dataclass(frozen=True)
class Departure:
    """A layout of the plan that the setting does not have."""

    place: str
    axis: str
    layout: str


@dataclass(frozen=True)
class Recognised:
    """The setting that a plan is, or is nearest to.

    Attributes
    ----------
    exact
        Whether the plan is the setting.
    found_seconds, setting_seconds
        Objective of the plan, and of the best plan under the setting; equal if exact.
    departures
        Where the plan is not the setting.
    fits
        Whether the setting's plan fits the memory that the plan was made for.
    tried
        Roles, joined -> objective of its plan, or why there is none, for the settings that were planned.
    """

    setting: Setting
    exact: bool
    found_seconds: float
    setting_seconds: float
    departures: tuple[Departure, ...]
    fits: bool
    tried: Mapping[str, float | str]

    @property
    def loss_seconds(self) -> float:
        """What a step under the setting costs more than under the plan."""
        return self.setting_seconds - self.found_seconds


def recognise(plan: Plan, time_limit: float = 30.0, tried: int = TRIED) -> Recognised:
    """The setting that a plan is, or the nearest one.

    Parameters
    ----------
    time_limit
        Seconds for planning the settings that might be nearest; none are planned if the plan is one.
    tried
        How many of them, those with the fewest departures first.

    Raises
    ------
    PlanError
        The plan is of inference, or none of the settings has a plan.
    """
    if not plan.graph.updates:
        raise PlanError(f"{plan.graph.name}: settings are those of training; plan a training step.")
    facts = Facts.of(plan.graph)
    axes = tuple(axis for axis in range(plan.mesh.ndim) if plan.mesh.shape[axis] > 1)
    found = {axis: _departures_by_role(plan, facts, axis) for axis in axes}
    ranked = sorted(
        _combinations(axes, facts), key=lambda roles: sum(len(found[axis][role]) for axis, role in roles.items())
    )
    best = ranked[0]
    departures = tuple(item for axis, role in best.items() for item in found[axis][role])
    if not departures:
        return Recognised(
            _setting(plan, plan, facts, best), True, plan.objective_seconds, plan.objective_seconds, (), True, {}
        )
    return _nearest(plan, facts, ranked[:tried], found, time_limit)


def _nearest(
    plan: Plan,
    facts: Facts,
    candidates: list[dict[int, str]],
    found: Mapping[int, Mapping[str, list[Departure]]],
    time_limit: float,
) -> Recognised:
    tried: dict[str, float | str] = {}
    plans: list[tuple[bool, float, int, Plan]] = []
    for number, roles in enumerate(candidates):
        name = _name(plan.mesh, roles)
        try:
            made, fits = _plan_under(plan, roles, time_limit / len(candidates))
        except SbpError as error:
            tried[name] = str(error)
        else:
            tried[name] = made.objective_seconds
            plans.append((not fits, made.objective_seconds, number, made))
    if not plans:
        raise PlanError(
            f"{plan.graph.name} on {plan.mesh}: no setting has a plan. {'; '.join(map(str, tried.values()))}"
        )
    unfit, seconds, number, made = min(plans, key=lambda item: item[:3])
    roles = candidates[number]
    departures = tuple(item for axis, role in roles.items() for item in found[axis][role])
    return Recognised(
        _setting(plan, made, facts, roles), False, plan.objective_seconds, seconds, departures, not unfit, tried
    )


def _plan_under(plan: Plan, roles: Mapping[int, str], seconds: float) -> tuple[Plan, bool]:
    """The best plan under a setting, and whether it fits the plan's memory."""

    def restriction(graph: Graph, mesh: Mesh) -> Styles:
        styles = [ROLES[roles[axis]] if axis in roles else DataParallel() for axis in range(mesh.ndim)]
        return Styles(graph, mesh, *styles)

    limits = [plan.memory_limit, MOST_MEMORY_BYTES] if plan.memory_limit is not None else [MOST_MEMORY_BYTES]
    for limit in limits:
        try:
            made = auto_parallel(
                plan.graph, plan.cluster, mesh=plan.mesh, memory_limit=limit, time_limit=max(seconds, 1.0),
                cost_model=plan.cost_model, restriction=restriction,
            )  # fmt: skip
        except (InfeasibleError, TimeLimitError):
            if limit == limits[-1]:
                raise
        else:
            return made, limit == limits[0]
    raise AssertionError("the last limit returns or raises")


# -- roles of axes -----------------------------------------------------------------------------------------------------


def _departures_by_role(plan: Plan, facts: Facts, axis: int) -> dict[str, list[Departure]]:
    return {role: list(_departures(plan, facts, axis, style)) for role, style in ROLES.items()}


def _departures(plan: Plan, facts: Facts, axis: int, style: Style) -> Iterator[Departure]:
    graph, name = plan.graph, plan.mesh.names[axis]
    for value, layout in plan.decisions.sources.items():
        if not style.source(facts, value, layout[axis], plan.mesh.shape[axis]):
            yield Departure(value, name, str(layout))
    for node in graph.nodes:
        signature = plan.decisions.signatures[node.name]
        operands = zip((*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs))
        wrong = [(value, layout) for value, layout in operands if not style.operand(facts, node, value, layout[axis])]
        if wrong:
            yield Departure(f"{node.name}: {wrong[0][0]}", name, str(wrong[0][1]))


def _combinations(axes: tuple[int, ...], facts: Facts) -> list[dict[int, str]]:
    """A role per axis; all but data parallelism at most once, and shards of data parallelism in one way."""
    found = []
    for roles in product([role for role in ROLES if role != "experts" or facts.experts], repeat=len(axes)):
        counts = [sum(role.startswith(kind) for role in roles) for kind in ("tensor", "context", "experts")]
        sharded = {role for role in roles if role in DATA[1:]}
        if max(counts) <= 1 and len(sharded) <= 1:
            found.append(dict(zip(axes, roles)))
    return found


def _name(mesh: Mesh, roles: Mapping[int, str]) -> str:
    return ", ".join(f"{mesh.names[axis]}: {role}" for axis, role in roles.items())


# -- the setting -------------------------------------------------------------------------------------------------------


def _setting(plan: Plan, under: Plan, facts: Facts, roles: Mapping[int, str]) -> Setting:
    """The degrees; stage and gathering as the plan `under` the setting has them."""
    mesh = plan.mesh

    def degree(*wanted: str) -> int:
        return math.prod(mesh.shape[axis] for axis, role in roles.items() if role in wanted)

    zero = 0
    if DATA[1] in roles.values():
        zero = 2 if _reduces_to_shards(under, facts) else 1
    if DATA[2] in roles.values():
        zero = 3
    return Setting(
        {mesh.names[axis]: role for axis, role in roles.items()},
        degree("data", "experts"),
        degree(*DATA[1:]),
        zero,
        zero == 3 and not _keeps_gathered(under, facts),
        degree("tensor", "tensor and sequence"),
        "tensor and sequence" in roles.values(),
        degree("context"),
        degree("experts"),
        facts.batch,
        facts.length if any(len(plan.graph.values[name].shape) == 2 for name in plan.graph.inputs) else 0,
        _precision(plan),
        bool(plan.model.get("recompute", False)),
    )


def _reduces_to_shards(plan: Plan, facts: Facts) -> bool:
    """Whether gradients of weights are reduced by reduce-scatters more than by all-reduces, in bytes."""
    sent = dict.fromkeys(("reduce_scatter", "all_reduce"), 0)
    for operation in plan.physical.operations:
        if isinstance(operation, Box) and operation.kind in sent:
            value = plan.physical.registers[operation.inputs[0]].value
            if value in facts.weights and plan.graph.values[value].kind == "gradient":
                sent[operation.kind] += operation.bytes
    return sent["reduce_scatter"] > sent["all_reduce"]


def _keeps_gathered(plan: Plan, facts: Facts) -> bool:
    kept = [layout for value, layout in plan.decisions.kept.items() if value in facts.weights]
    return any(isinstance(sbp, Broadcast) for layout in kept for sbp in layout)


def _precision(plan: Plan) -> str:
    known = plan.model.get("precision")
    if known:
        return str(known)
    kinds = {plan.graph.values[name].dtype for name in plan.graph.parameters}
    half = any(value.dtype == "bf16" for value in plan.graph.values.values())
    return "mixed" if half and kinds == {"f32"} else "bf16" if half else "f64" if kinds == {"f64"} else "f32"


def setting_json(recognised: Recognised) -> dict[str, Any]:
    """Plain data: the setting, whether it is exact, and what it costs."""
    setting = recognised.setting
    return {
        "exact": recognised.exact,
        "setting": {
            "axes": dict(setting.roles),
            "data_parallel": setting.data,
            "data_parallel_replicate": setting.replicate,
            "data_parallel_shard": setting.shard,
            "zero_stage": setting.zero,
            "tensor_parallel": setting.tensor,
            "sequence_parallel": setting.sequence,
            "context_parallel": setting.context,
            "pipeline_parallel": 1,
            "expert_parallel": setting.experts,
            "global_batch": setting.batch,
            "sequence_length": setting.length,
            "precision": setting.precision,
            "recompute": setting.recompute,
        },
        "plan_seconds": recognised.found_seconds,
        "setting_seconds": recognised.setting_seconds,
        "loss_seconds": recognised.loss_seconds,
        "fits": recognised.fits,
        "departures": len(recognised.departures),
        "first_departures": [
            {"place": item.place, "axis": item.axis, "layout": item.layout} for item in recognised.departures[:8]
        ],
        "tried": dict(recognised.tried),
    }
