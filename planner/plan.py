"""A plan: decisions with everything that follows from them, printable, saved and loaded, verified and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbp.errors import PlanError, SbpError
from sbp.fields import Field
from sbp.graph import Graph
from sbp.json_file import read_json_file
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.planner.arena import Arena, arena_of
from sbp.planner.boxing import BoxingTable
from sbp.planner.cluster import Cluster
from sbp.planner.cost import CostModel, as_cost_model
from sbp.planner.decisions import Decisions
from sbp.planner.lowering import lower
from sbp.planner.memory import MemoryProfile, live_at, memory_profile
from sbp.planner.meshes import check_mesh
from sbp.planner.physical import COLLECTIVES, Box, Compute, PhysicalPlan, Register
from sbp.planner.search import objective_seconds
from sbp.planner.solver import Status
from sbp.planner.timing import Timeline, links_of, predict_timeline
from sbp.planner.trace import save_trace
from sbp.rule import Signature

if TYPE_CHECKING:
    from sbp.planner.explain import Explanation
    from sbp.runtime.verify import Verification

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds of one step.

    Attributes
    ----------
    compute_seconds
        All operators on the rank with the largest shards, local layout changes included.
    boxing_seconds
        Mesh axis name -> collectives along it, and borders fetched from neighbours.
    step_seconds
        Length of the step when collectives overlap with compute as the order of the plan allows.
    exposed_seconds
        The part of the collectives that does not hide behind compute: step less compute.
    objective_seconds
        Compute and collectives added up: what the search minimises.
    flops
        FLOP of one rank.
    """

    compute_seconds: float
    boxing_seconds: Mapping[str, float]
    step_seconds: float
    exposed_seconds: float
    objective_seconds: float
    flops: float


@dataclass(frozen=True, slots=True)
class BoxingStep:
    """One boxing step of a plan: which value, how, along which mesh axis, for whom."""

    value: str
    kind: str
    axis: str
    before: Layout
    after: Layout
    bytes: int
    seconds: float
    phase: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory per device at the peak of the step, in bytes, by kind (see `sbp.planner.memory.KINDS`), and its limit."""

    by_kind: Mapping[str, int]
    peak_bytes: int
    limit_bytes: int | None
    reserved_bytes: int

    def fits(self, device_bytes: float) -> bool:
        """Whether the step fits on a device with so much memory, with what the framework reserves of it."""
        return self.peak_bytes + self.reserved_bytes <= device_bytes


@dataclass(frozen=True, slots=True)
class Tried:
    """A mesh that the search tried, with what came of it."""

    mesh: Mesh
    objective_seconds: float | None
    lower_bound_seconds: float | None
    outcome: str


class Layouts(dict[str, Layout]):
    """Layouts by value; a name that is not there raises `PlanError` with those near it."""

    def __missing__(self, name: str) -> Layout:
        near = get_close_matches(str(name), self, n=3, cutoff=0.5)
        hint = f"; near names: {', '.join(near)}" if near else ""
        raise PlanError(f"the plan has no value {name!r}{hint}.")


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every tensor lies, what moves, what it costs, and how far from the best it can be.

    Attributes
    ----------
    status, lower_bound_seconds
        What the solver proved on this mesh; the bound holds for every plan on it.
    model
        How the graph was made (configuration, batch, sequence, optimizer, precision); {} for a graph of one's own.
    tried
        The meshes tried.
    """

    graph: Graph
    cluster: Cluster
    mesh: Mesh
    decisions: Decisions
    status: Status
    lower_bound_seconds: float
    memory_limit: int | None = None
    reason: str = ""
    model: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, str] = field(default_factory=dict)
    tried: tuple[Tried, ...] = ()
    cost_model: CostModel | None = None

    @cached_property
    def costs(self) -> CostModel:
        """The cost model that prices this plan."""
        return as_cost_model(self.cost_model or self.cluster)

    @cached_property
    def physical(self) -> PhysicalPlan:
        """The program of every rank."""
        return lower(self.graph, self.mesh, self.decisions, self.costs, BoxingTable(self.mesh, self.costs))

    @cached_property
    def timeline(self) -> Timeline:
        """When every operation of `physical` is predicted to run.

        Mesh axes on one link tier share it, and kernels are slower while data moves (`Device.overlap_slowdown`).
        """
        slowdown = self.cluster.device.overlap_slowdown
        return predict_timeline(self.physical, links_of(self.mesh, self.cluster), slowdown)

    @cached_property
    def memory_profile(self) -> MemoryProfile:
        """Memory over the operations of `physical`."""
        return memory_profile(self.physical)

    @cached_property
    def arena(self) -> Arena:
        """Where every buffer of `physical` lies in one arena per rank, beside the least that any arena needs."""
        return arena_of(self.physical, within=self.memory_limit)

    @property
    def objective_seconds(self) -> float:
        """Compute and boxing of the finished plan, added up operation by operation."""
        return objective_seconds(self.physical)

    @property
    def gap(self) -> float:
        """(objective - lower bound) / objective."""
        objective = self.objective_seconds
        return max(0.0, (objective - self.lower_bound_seconds) / objective) if objective > 0 else 0.0

    @cached_property
    def cost(self) -> Cost:
        """Predicted times."""
        by_axis = dict.fromkeys(self.mesh.names, 0.0)
        flops = 0.0
        for operation in self.physical.operations:
            if isinstance(operation, Box) and operation.kind in COLLECTIVES:
                by_axis[self.mesh.names[operation.mesh_axis]] += operation.seconds
            elif isinstance(operation, Compute):
                flops += operation.flops
                for axis, seconds in operation.borders:
                    by_axis[self.mesh.names[axis]] += seconds
        timeline = self.timeline
        return Cost(
            timeline.compute_seconds,
            by_axis,
            timeline.step_seconds,
            timeline.exposed_seconds,
            self.objective_seconds,
            flops,
        )

    @cached_property
    def memory(self) -> Memory:
        """Memory per device at the peak."""
        profile = self.memory_profile
        return Memory(
            profile.at_peak(), profile.peak_bytes, self.memory_limit, self.cluster.device.reserved_memory_bytes
        )

    @cached_property
    def live_at_peak(self) -> tuple[Register, ...]:
        """The registers that hold the memory of the peak (see `memory_profile`), the largest first."""
        return live_at(self.physical, self.memory_profile.peak_at)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """Value -> the layout it is stored in (sources) or made in (all others)."""
        return Layouts({name: self.decisions.made(self.graph, name) for name in self.graph.values})

    @cached_property
    def boxing(self) -> tuple[BoxingStep, ...]:
        """Every boxing step, in program order."""
        registers = self.physical.registers
        return tuple(
            BoxingStep(
                registers[operation.inputs[0]].value,
                operation.kind,
                self.mesh.names[operation.mesh_axis],
                registers[operation.inputs[0]].layout,
                registers[operation.outputs[0]].layout,
                operation.bytes,
                operation.seconds,
                operation.phase,
            )
            for operation in self.physical.operations
            if isinstance(operation, Box)
        )

    # -- printing ----------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        from sbp.report.text import plan_text

        return plan_text(self)

    def __repr__(self) -> str:
        proof = f"{self.status.value}, gap {self.gap:.2%}"
        return f"<Plan of {self.graph.name} on {self.mesh}: {self.objective_seconds:.6g} s, {proof}>"

    def _repr_html_(self) -> str:
        from sbp.report.html import plan_html

        return plan_html(self)

    def explain(self, name: str) -> Explanation:
        """Why a value lies as it does, what is moved and for whom; print it. See `sbp.planner.explain.explain`."""
        from sbp.planner.explain import explain

        return explain(self, name)

    def show(self) -> Any:
        """Interactive figures (plotly): layouts, step-time breakdown, memory over time."""
        from sbp.report.figures import plan_figures

        return plan_figures(self)

    def trace(self, path: str | Path) -> None:
        """Write the predicted timeline for chrome://tracing or ui.perfetto.dev; see `sbp.planner.trace`."""
        save_trace(self.timeline.step, path)

    # -- files -------------------------------------------------------------------------------------------------------

    def to_json(self, offsets: bool = False, placements: bool = False) -> dict[str, Any]:
        """Plain data of schema `SCHEMA`; the same plan gives the same data.

        With `offsets` it also says where every register lies in a rank's arena (see `arena_json`), with `placements`
        in DTensor's words how parameters and what enters and leaves modules lie (see `placements`).
        """
        nodes = {node.name: self.decisions.signatures[node.name] for node in self.graph.nodes}
        return {
            "format": "sbp-plan",
            "schema": SCHEMA,
            "model": dict(self.model),
            "cluster": self.cluster.to_json(),
            "mesh": {"shape": list(self.mesh.shape), "names": list(self.mesh.names)},
            "status": self.status.value,
            "reason": self.reason,
            "objective_seconds": self.objective_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "memory_limit_bytes": self.memory_limit,
            "pins": dict(self.pins),
            "tried": [
                {
                    "mesh": {"shape": list(t.mesh.shape), "names": list(t.mesh.names)},
                    "objective_seconds": t.objective_seconds,
                    "lower_bound_seconds": t.lower_bound_seconds,
                    "outcome": t.outcome,
                }
                for t in self.tried
            ],
            "sources": {name: str(layout) for name, layout in self.decisions.sources.items()},
            "signatures": {
                name: [list(map(str, signature.inputs)), list(map(str, signature.outputs))]
                for name, signature in nodes.items()
            },
            "outputs": {name: str(layout) for name, layout in self.decisions.outputs.items()},
            "kept": {name: str(layout) for name, layout in self.decisions.kept.items()},
            "graph": self.graph.to_json(),
            **({"arena": self.arena_json()} if offsets else {}),
            **({"placements": self.placements()} if placements else {}),
        }

    def arena_json(self) -> dict[str, Any]:
        """The arena as plain data: its size, the lower bound, and per register its value, layout and place.

        `first` and `last` are the operations of `physical` at which the place begins and ceases to hold it.
        """
        arena, physical = self.arena, self.physical
        return {
            "size_bytes": arena.size_bytes,
            "lower_bound_bytes": arena.lower_bound_bytes,
            "alignment_bytes": arena.alignment,
            "registers": [
                {
                    "value": register.value,
                    "layout": str(register.layout),
                    "offset": offset,
                    "bytes": register.bytes * register.credits,
                    "first": first,
                    "last": last,
                }
                for register, offset, (first, last) in zip(
                    physical.registers, arena.register_offsets, physical.lifetimes
                )
            ],
            "workspaces": [
                {"operation": at, "offset": offset, "bytes": physical.operations[at].workspace}
                for at, offset in arena.workspace_offsets.items()
            ],
        }

    def placements(self) -> dict[str, Any]:
        """DTensor placements of parameters, inputs, outputs and modules; schema in `sbp.planner.placements`."""
        from sbp.planner.placements import placements_of

        return placements_of(self)

    def save(self, path: str | Path, offsets: bool = False) -> None:
        """Write the plan file (JSON), with `offsets` the arena's too; the same plan gives the same bytes."""
        import orjson

        if not str(path):
            raise PlanError("the path of the plan file to write is empty; give it a name.")
        data = orjson.dumps(self.to_json(offsets), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        try:
            Path(path).write_bytes(data)
        except OSError as error:
            raise PlanError(f"cannot write the plan file {path}: {error.strerror or error}.") from None

    @classmethod
    def load(cls, path: str | Path, cost_model: CostModel | None = None) -> Plan:
        """Read a plan file, checking that every layout in it is legal.

        Raises
        ------
        PlanError
            Missing, truncated, of another schema, or contradictory; the message names the file and the field.
        """
        data = read_json_file(path, "plan", "Plan.save", PlanError)
        try:
            return cls.from_json(data, cost_model)
        except SbpError as error:
            raise PlanError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, data: Mapping[str, Any], cost_model: CostModel | None = None) -> Plan:
        """Read what `to_json` wrote.

        The objective is computed anew: a file that states another one, or a lower bound above it, is refused. Both
        hold under the cost model the plan was made with, so neither is compared where `cost_model` is another one.
        """
        if not isinstance(data, Mapping) or data.get("format") != "sbp-plan":
            raise PlanError("this is not a plan; `sbp plan ... --out plan.json` writes one.")
        if data.get("schema") != SCHEMA:
            raise PlanError(f"plan of schema {data.get('schema')!r}, this version reads schema {SCHEMA}; plan again.")
        file = Field(data, "plan file", PlanError)
        for key in ("graph", "cluster"):
            file[key].mapping()
        graph = Graph.from_json(file["graph"].value)
        cluster = Cluster.from_json(file["cluster"].value)
        mesh = check_mesh(_mesh_from(file["mesh"]), cluster)
        limit = file["memory_limit_bytes"]
        plan = cls(
            graph,
            cluster,
            mesh,
            _decisions_from(file).check(graph, mesh),
            _status_from(file["status"]),
            file["lower_bound_seconds"].number(least=0.0),
            None if limit.value is None else limit.whole(least=0),
            file["reason"].text(),
            _model_from(file["model"]),
            {name: layout.text() for name, layout in file["pins"].mapping().items()},
            tuple(map(_tried_from, file["tried"].list())),
            cost_model,
        )
        stated = file.get("objective_seconds", None)
        return _checked_costs(plan, None if stated.value is None else stated.number(least=0.0))

    # -- running -----------------------------------------------------------------------------------------------------

    def on(self, graph: Graph) -> Plan:
        """The same decisions on a graph of equal structure and other sizes (same node and value names).

        All costs and the memory are those of the new sizes. What the solver proved about the old ones is not kept: the
        status is FEASIBLE, the lower bound 0, and `reason` says so.

        Raises
        ------
        PlanError
            A node or value is missing, or a signature is not legal for the other sizes.
        """
        return replace(
            self,
            graph=graph,
            decisions=self.decisions.check(graph, self.mesh),
            status=Status.FEASIBLE,
            lower_bound_seconds=0.0,
            memory_limit=None,
            reason=f"layouts taken over from a plan of {self.graph.name}; nothing is proven for these sizes",
            model={},
            tried=(),
        )

    def verify(self, seed: int = 0, **options: Any) -> Verification:
        """Run the plan on in-process ranks with random inputs, in float64, against the unsharded program.

        A plan whose tensors are too large for this machine is verified on scaled-down shapes; options as for
        `sbp.runtime.planned.verify_plan`.
        """
        from sbp.runtime.planned import verify_plan

        return verify_plan(self, seed=seed, **options)

    def run(self, steps: int = 1, progress: Callable[..., None] | None = None, **options: Any) -> Any:
        """Run training (or inference) steps of the plan; see `sbp.runtime.planned.run_plan`."""
        from sbp.runtime.planned import run_plan

        return run_plan(self, steps=steps, progress=progress, **options)

    def to_torch(self, module: Any, device_mesh: Any, strict: bool = False) -> Any:
        """Make a PyTorch module run this plan on torch.distributed; see `sbp.runtime.torch_export.to_torch`."""
        from sbp.cuda.torch_backend import TorchBackend

        TorchBackend()  # says what to install where PyTorch is missing
        from sbp.runtime.torch_export import to_torch

        return to_torch(self, module, device_mesh, strict)


# -- fields of a plan file ---------------------------------------------------------------------------------------------


def _mesh_from(item: Field) -> Mesh:
    shape = tuple(size.whole(least=1) for size in item["shape"].list())
    return Mesh(shape, item["names"].texts())


def _status_from(item: Field) -> Status:
    known = [status.value for status in Status]
    if item.text() not in known:
        raise item.wrong(f"one of {', '.join(known)}")
    return Status(item.value)


def _layouts_from(item: Field) -> dict[str, Layout]:
    return {name: text.parsed(Layout.parse) for name, text in item.mapping().items()}


def _decisions_from(file: Field) -> Decisions:
    signatures = {}
    for name, pair in file["signatures"].mapping().items():
        inputs, outputs = pair.list(2)
        signatures[name] = Signature(
            tuple(text.parsed(Layout.parse) for text in inputs.list()),
            tuple(text.parsed(Layout.parse) for text in outputs.list()),
        )
    return Decisions(
        _layouts_from(file["sources"]), signatures, _layouts_from(file["outputs"]), _layouts_from(file["kept"])
    )


def _tried_from(item: Field) -> Tried:
    objective, bound = item["objective_seconds"], item["lower_bound_seconds"]
    return Tried(
        _mesh_from(item["mesh"]),
        None if objective.value is None else objective.number(least=0.0),
        None if bound.value is None else bound.number(least=0.0),
        item["outcome"].text(),
    )


def _model_from(item: Field) -> dict[str, Any]:
    """The description of the model; what is needed to make it again is checked when that is asked for."""
    fields = item.mapping()
    for key in ("name", "family", "precision"):
        if key in fields:
            fields[key].text()
    if "config" in fields:
        fields["config"].mapping()
    if "optimizer" in fields and fields["optimizer"].value is not None:
        fields["optimizer"]["kind"].text()
    for key in ("batch", "sequence"):
        if key in fields and not (key == "sequence" and fields[key].value is None):
            fields[key].whole(least=1)
    for key in ("training", "recompute"):
        if key in fields:
            fields[key].truth()
    return dict(item.value)


def _checked_costs(plan: Plan, stated: float | None) -> Plan:
    """Raise `PlanError` unless the plan costs what its file states, and no less than the bound stated for it."""
    try:
        objective = plan.objective_seconds
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise PlanError(
            f"the plan has no program: an operator's attributes do not fit its shards "
            f"({type(error).__name__}: {error}); plan again."
        ) from None
    if plan.cost_model is not None:
        return plan
    if stated is not None and abs(stated - objective) > 1e-9 * max(stated, objective):
        raise PlanError(
            f"objective_seconds is {stated!r}, but the plan of the file costs {objective!r} on its cluster; it was "
            "changed, or made with a cost model of your own (Plan.load(path, cost_model) takes it). Plan again."
        )
    if plan.lower_bound_seconds > objective * (1 + 1e-9):
        raise PlanError(
            f"lower_bound_seconds is {plan.lower_bound_seconds!r}, but the plan of the file costs {objective!r}: it "
            "undercuts its own bound. The file was changed; plan again."
        )
    return plan
