"""`auto_parallel`: from a model and a cluster to a plan."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from sbp.errors import InfeasibleError, LayoutError, PlanError, SbpError, TimeLimitError
from sbp.frontend.model import TorchModel, is_torch_module
from sbp.graph import STATE_KINDS, Graph
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.nn.module import Module
from sbp.optim import Optimizer
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import CostModel, as_cost_model
from sbp.planner.decisions import Decisions
from sbp.planner.lowering import lower
from sbp.planner.meshes import candidate_meshes, check_mesh
from sbp.planner.pins import Both, Pins
from sbp.planner.plan import Plan, Tried
from sbp.planner.search import Outbid, Outcome, gib, needed_bytes, objective_seconds, search
from sbp.planner.solver import Limits, Status
from sbp.planner.strategies import LEAST_FILL, Restriction
from sbp.planner.workload import workload

MOST_DEVICES = 1 << 20

_SAME = 1e-9
"""Relative difference of objectives that is taken for none, as they are sums in another order."""

RECOMPUTE = ("auto", "none", "full")
Progress = Callable[[str], None]
RestrictionFor = Callable[[Graph, Mesh], Restriction]


def auto_parallel(
    model: str | Module | Graph | TorchModel | Any,
    cluster: str | Path | Cluster,
    *,
    example_inputs: Any = None,
    loss: Any = None,
    targets: Any = (),
    nodes: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    training: bool = True,
    optimizer: Optimizer | str | None = None,
    precision: str | None = None,
    recompute: str = "auto",
    mesh: Mesh | Sequence[int] | str | None = None,
    pins: Mapping[str, str | Layout] | None = None,
    memory_limit: int | None = None,
    time_limit: float = 60.0,
    threads: int = 2,
    seed: int = 0,
    cost_model: CostModel | None = None,
    least_fill: float = LEAST_FILL,
    restriction: RestrictionFor | None = None,
    hint: Plan | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Choose the layout of every tensor of a training or inference step, and prove how far from the best it can be.

    Parameters
    ----------
    model
        A preset's name (`sbp.models.presets()`), a module of `sbp.nn`, a graph, or a `torch.nn.Module`, whose batch,
        sequence and element types are those of itself and its example inputs unless given.
    cluster
        A preset's name (`sbp clusters`), the path of a cluster file, or a `Cluster`.
    example_inputs, loss, targets
        Of a `torch.nn.Module`: what its `forward` takes, a callable that makes the loss of its output and the targets
        (default the loss that it returns itself); see `sbp.frontend.torch.import_module`.
    nodes
        Number of nodes; default the cluster's own.
    batch, sequence
        Global batch size (default 64 samples per device; of sequences 8, or fewer with at most 8,192 tokens) and
        sequence length (default the model's own).
    training
        A training step with optimizer (default), or inference.
    optimizer
        An optimizer of `sbp.optim` or its name; default AdamW.
    precision
        "mixed" (default in training: bf16 compute, f32 state), "bf16" (default in inference), "f32" or "f64".
    recompute
        "none": activations are kept; "full": every layer's forward part is run again in the backward phase (see
        `sbp.passes.recompute`); "auto" (default): none, and full where nothing fits otherwise.
    mesh
        A mesh or its sizes; default: the 1-D and 2-D meshes that respect the nodes are all tried.
    pins
        Value name or glob -> layout that it must be stored in (parameters, inputs) or made in (all others).
    memory_limit
        Bytes per device; default the device's memory less what the framework reserves.
    time_limit
        Seconds for all searches together; where building a problem takes longer than its share of them, a quarter of
        the share is added for its solve.
    cost_model
        Your own (see `sbp.planner.cost.CostModel`); default the analytic one of the cluster.
    least_fill
        Splits whose mean shard is less than this fraction of the largest are left out.
    restriction
        Narrows the choice further, a function of graph and mesh (the baselines use this).
    hint
        A plan of a graph of this structure (sizes and cluster may differ) to start from: the result costs no more than
        its decisions do here. Its mesh is tried too. Where it does not fit into memory it is left aside.
    progress
        Called with a line of text now and then.

    Returns
    -------
    Plan
        The best over all meshes tried; `status` and `lower_bound_seconds` speak of its own mesh, `tried` of the others.

    Raises
    ------
    InfeasibleError
        No layout fits the memory or satisfies the pins; says how much is missing, or which pins conflict.
    TimeLimitError
        No plan was found in time.
    SbpError
        Bad input; names the place.
    """
    if is_torch_module(model) or example_inputs is not None or loss is not None:
        model = TorchModel.of(model, example_inputs, loss, targets)
    _check_arguments(model, batch, sequence, training, optimizer, precision)
    _check_numbers(nodes, batch, sequence, memory_limit, time_limit, threads, seed)
    if recompute not in RECOMPUTE:
        raise PlanError(f"recompute is one of {', '.join(RECOMPUTE)}, got {recompute!r}.")
    if pins is not None and not (isinstance(pins, Mapping) and all(isinstance(key, str) for key in pins)):
        raise PlanError(f"pins is a mapping of names or globs to layouts, got {pins!r}.")
    machine = Cluster.resolve(cluster, nodes)
    if machine.size > MOST_DEVICES:
        raise PlanError(f"{machine.name} has {machine.size:,} devices; plans are made for up to {MOST_DEVICES:,}.")
    if memory_limit is None:
        memory_limit = machine.device.usable_memory_bytes
    meshes = _meshes(mesh, machine, pins, hint)
    task = _Task(
        as_cost_model(machine if cost_model is None else cost_model),
        meshes,
        pins or {},
        restriction,
        memory_limit,
        time.monotonic() + time_limit,
        Limits(time_limit, threads, seed),
        least_fill,
        progress or (lambda text: None),
    )
    step = workload(model, machine.size, batch, sequence, training, optimizer, precision, recompute == "full")
    if not step.graph.nodes:
        raise PlanError(f"graph {step.graph.name} has no nodes: there is nothing to plan.")
    if sum(state_bytes_per_device(step.graph, machine).values()) > memory_limit:
        raise _why_nothing(task, [], step.graph, machine)
    known = None if hint is None else _hinted(task, step.graph, hint)
    best, tried, failures = _best_over_meshes(task, step.graph, known)
    if best is None and recompute == "auto" and training and any(isinstance(e, InfeasibleError) for e in failures):
        again = workload(model, machine.size, batch, sequence, training, optimizer, precision, True)
        if len(again.graph.nodes) > len(step.graph.nodes):
            task.progress(f"{step.graph.name} does not fit; planning it with recompute")
            found, tried_again, _ = _best_over_meshes(task, again.graph)
            if found is not None:
                best, step, tried = found, again, [*tried, *tried_again]
    if best is None:
        raise _why_nothing(task, failures, step.graph, machine)
    return Plan(
        graph=step.graph,
        cluster=machine,
        mesh=best.mesh,
        decisions=best.decisions,
        status=best.status,
        lower_bound_seconds=best.lower_bound_seconds,
        memory_limit=memory_limit,
        reason=best.reason,
        model=step.model,
        pins={pattern: str(Layout.parse(layout)) for pattern, layout in (pins or {}).items()},
        tried=tuple(tried),
        cost_model=cost_model,
    )


def _check_numbers(
    nodes: object,
    batch: object,
    sequence: object,
    memory_limit: object,
    time_limit: object,
    threads: object,
    seed: object,
) -> None:
    """Raise `PlanError` naming the argument that is of the wrong type or out of range."""

    def whole(name: str, value: object, least: int, optional: bool = True) -> None:
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
            raise PlanError(f"{name} must be a whole number of at least {least}, got {value!r}.")

    whole("nodes", nodes, 1)
    whole("batch", batch, 1)
    whole("sequence", sequence, 1)
    whole("memory_limit (bytes)", memory_limit, 1)
    whole("threads", threads, 1, optional=False)
    whole("seed", seed, 0, optional=False)
    if isinstance(time_limit, bool) or not isinstance(time_limit, Real) or not 0 < float(time_limit) < math.inf:
        raise PlanError(f"time_limit must be a finite number of seconds above 0, got {time_limit!r}.")


def _check_arguments(
    model: object, batch: object, sequence: object, training: bool, optimizer: object, precision: object
) -> None:
    """Raise `PlanError` where arguments contradict each other."""
    if isinstance(optimizer, type):
        raise PlanError(f"optimizer is the class {optimizer.__name__}; give an instance, {optimizer.__name__}().")
    if not training and optimizer is not None:
        raise PlanError("inference has no optimizer; leave one of training=False and optimizer out.")
    given = {"batch": batch, "sequence": sequence, "optimizer": optimizer, "precision": precision}
    unused = [name for name, value in given.items() if value is not None]
    if isinstance(model, Graph) and unused:
        raise PlanError(f"the model is a finished graph, which fixes {', '.join(unused)}; leave these arguments out.")


@dataclass(frozen=True)
class _Task:
    """What a search over meshes needs besides the graph; `deadline` is a time of `time.monotonic`."""

    costs: CostModel
    meshes: tuple[Mesh, ...]
    pins: Mapping[str, str | Layout]
    restriction: RestrictionFor | None
    memory_limit: int
    deadline: float
    limits: Limits
    least_fill: float
    progress: Progress

    def search(
        self,
        graph: Graph,
        mesh: Mesh,
        seconds: float,
        pins: Mapping[str, str | Layout],
        cutoff: float | None = None,
        hint: Decisions | None = None,
    ) -> Outcome:
        """The search on one mesh, under the pins and the restriction."""
        narrowed = self.narrowed(graph, mesh, pins)
        return search(
            graph,
            mesh,
            self.costs,
            self.memory_limit,
            replace(self.limits, time_limit=max(seconds, 0.01)),
            narrowed if narrowed.parts else None,
            self.least_fill,
            self.progress,
            cutoff,
            hint,
        )

    def narrowed(self, graph: Graph, mesh: Mesh, pins: Mapping[str, str | Layout]) -> Both:
        """The pins and the restriction on one mesh."""
        return Both(
            Pins(graph, mesh, pins) if pins else None,
            self.restriction(graph, mesh) if self.restriction else None,
        )


def _hinted(task: _Task, graph: Graph, hint: Plan) -> Outcome | None:
    """What a plan's decisions come to here; None where they do not fit into memory.

    Raises
    ------
    PlanError
        The plan is of a graph of other structure, or it contradicts a pin or the restriction.
    """
    mesh = task.meshes[0]
    decisions = hint.decisions.check(graph, mesh)
    narrowed = task.narrowed(graph, mesh, task.pins)
    refused = [name for name, layout in decisions.sources.items() if not narrowed.allows_source(graph, name, layout)]
    refused += [
        node.name for node in graph.nodes if not narrowed.allows(graph, node, decisions.signatures[node.name])
    ]
    if refused:
        raise PlanError(
            f"the hint cannot be a start: it has another layout of {refused[0]} than "
            f"{narrowed.describe(graph, refused[0])} asks for; leave one of the two out."
        )
    physical = lower(graph, mesh, decisions, task.costs, BoxingTable(mesh, task.costs))
    needed = needed_bytes(physical, task.memory_limit)
    if needed > task.memory_limit:
        task.progress(f"the hint needs {gib(needed)} per device, more than the limit of {gib(task.memory_limit)}")
        return None
    return Outcome(mesh, decisions, physical, objective_seconds(physical), 0.0, Status.FEASIBLE, "the hint")


def _best_over_meshes(
    task: _Task, graph: Graph, hinted: Outcome | None = None
) -> tuple[Outcome | None, list[Tried], list[SbpError]]:
    """The best plan over all meshes, what came of each, and why there was none; `hinted` is of the first mesh."""
    best = hinted
    tried: list[Tried] = []
    failures: list[SbpError] = []
    for number, mesh in enumerate(task.meshes):
        share = (task.deadline - time.monotonic()) / (len(task.meshes) - number)
        if best is not None and best is not hinted and share <= 0:
            tried.append(Tried(mesh, None, None, "not tried: the time limit passed"))
            continue
        task.progress(f"planning {graph.name} on {mesh} ({number + 1} of {len(task.meshes)})")
        try:
            start = hinted.decisions if hinted is not None and number == 0 else None
            found = task.search(graph, mesh, share, task.pins, best.objective_seconds if best else None, start)
        except Outbid as outbid:
            stopped = "stopped: its lower bound exceeds the best plan"
            tried.append(Tried(mesh, None, outbid.lower_bound_seconds, stopped))
        except (InfeasibleError, TimeLimitError) as error:
            failures.append(error)
            tried.append(Tried(mesh, None, None, str(error)))
        else:
            tried.append(Tried(mesh, found.objective_seconds, found.lower_bound_seconds, found.status.value))
            if best is None or found.objective_seconds < best.objective_seconds * (1 + _SAME if best is hinted else 1):
                best = found
            elif best is hinted and number == 0:  # no search found better in time; what it proved holds all the same
                bound = min(found.lower_bound_seconds, best.objective_seconds)
                hinted = best = replace(best, lower_bound_seconds=bound, reason=f"the hint; {found.reason}")
    return best, tried, failures


def _meshes(
    mesh: Mesh | Sequence[int] | str | None,
    cluster: Cluster,
    pins: Mapping[str, str | Layout] | None,
    hint: Plan | None,
) -> tuple[Mesh, ...]:
    """The meshes to try, that of the hint first."""
    if mesh is not None:
        if isinstance(mesh, str):
            mesh = Mesh.parse(mesh)
        elif not isinstance(mesh, Mesh):
            mesh = Mesh(tuple(mesh) if not isinstance(mesh, int) else (mesh,))
        if hint is not None and hint.mesh.shape != mesh.shape:
            raise PlanError(f"the hint is a plan on {hint.mesh}, the search is on {mesh}; leave one of the two out.")
        return (check_mesh(mesh, cluster),)
    meshes = candidate_meshes(cluster)
    if hint is not None:
        meshes = (check_mesh(hint.mesh, cluster), *(other for other in meshes if other.shape != hint.mesh.shape))
    if not pins:
        return meshes
    lengths = {pattern: len(Layout.parse(layout)) for pattern, layout in pins.items()}
    if len(set(lengths.values())) > 1:
        raise LayoutError(
            "the pins have layouts of different numbers of mesh axes ("
            + ", ".join(f"{pattern!r}: {count}" for pattern, count in lengths.items())
            + "); give all one SBP per mesh axis."
        )
    (count,) = set(lengths.values())
    fitting = tuple(candidate for candidate in meshes if candidate.ndim == count)
    if not fitting:
        raise LayoutError(
            f"the pins have {count} SBPs each, but only meshes of 1 or 2 axes are searched on this cluster "
            f"({', '.join(map(str, meshes))}); give mesh= to plan on another."
        )
    return fitting


def _why_nothing(task: _Task, failures: list[SbpError], graph: Graph, cluster: Cluster) -> SbpError:
    """Why no mesh has a plan: the kind of memory that is missing, the pins that conflict, or the first reason given."""
    if failures and all(isinstance(error, TimeLimitError) for error in failures):
        return failures[0]
    needed = state_bytes_per_device(graph, cluster)
    total = sum(needed.values())
    if total > task.memory_limit:
        parts = ", ".join(f"{kind} {gib(size)}" for kind, size in needed.items() if size)
        return InfeasibleError(
            f"{graph.name} does not fit on {cluster.name} ({cluster.size} devices of {gib(task.memory_limit)} usable "
            f"each): even cut into {cluster.size} equal shards its state needs {gib(total)} per device ({parts}), "
            f"{gib(total - task.memory_limit)} too much. Use more devices, a device with more memory, a lower "
            "precision or an optimizer with less state."
        )
    first = next(error for error in failures if isinstance(error, InfeasibleError))
    conflict = _conflicting_pins(task, graph) if task.pins else ()
    if conflict:
        listed = ", ".join(f"{pattern!r}: {Layout.parse(task.pins[pattern])}" for pattern in conflict)
        together = (
            " together; without any one of them there is a plan" if len(conflict) > 1 else "; without it there is"
        )
        return InfeasibleError(
            f"{graph.name} on {task.meshes[0]}: no plan satisfies the pins {listed}{together}. {first}"
        )
    return first


def state_bytes_per_device(graph: Graph, cluster: Cluster) -> dict[str, int]:
    """Kind of state -> the least bytes per device there can be: every value in equal shards over all devices."""
    found = dict.fromkeys(STATE_KINDS, 0)
    for name in graph.state:
        value = graph.values[name]
        found[value.kind] += -(-value.type.bytes // cluster.size)
    return found


def _conflicting_pins(task: _Task, graph: Graph) -> tuple[str, ...]:
    """A minimal set of pins that no plan satisfies, by leaving out one by one; empty if the pins are not to blame."""

    def feasible(chosen: Mapping[str, str | Layout]) -> bool:
        try:
            task.search(graph, task.meshes[0], 10.0, chosen)
        except (InfeasibleError, TimeLimitError):
            return False
        return True

    if not feasible({}):
        return ()
    needed = dict(task.pins)
    for pattern in task.pins:
        without = {key: value for key, value in needed.items() if key != pattern}
        if not feasible(without):
            needed = without
    return tuple(needed)
