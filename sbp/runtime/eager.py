"""One operator at a time: the cheapest signature for the layouts at hand, the boxing it needs, the run on all ranks.

A call is planned as a plan of one node and run by the executor that runs whole plans; programs are kept, so
that a second call with equal types, attributes and layouts only runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.errors import LayoutError
from sbp.layout import Layout, Partial
from sbp.mesh import Mesh
from sbp.operator import SIZES, Operator, TensorType
from sbp.planner.boxing import BoxingTable, CollectiveCosts, Step
from sbp.planner.cluster import Cluster
from sbp.planner.cost import CostModel, as_cost_model
from sbp.planner.physical import LOCAL_STEPS, Box, Compute, Operation, PhysicalPlan, Register
from sbp.runtime.boxing import Local
from sbp.runtime.executor import Executor

LOGGER = logging.getLogger("sbp.boxing")
"""Every boxing step of eager operators is logged here, at level INFO."""

LATENCY_SECONDS = 1e-6
BYTES_PER_SECOND = 1e11
"""What `BytesMoved` takes a collective and a link to be; only the proportion matters: 100 kB weigh as one step."""


class BytesMoved:
    """The default costs of eager boxing: a constant per collective, and the bytes that a rank sends by ring algorithms.

    For n ranks and a payload of N bytes (n - 1) / n * N, twice that for all-reduce (Thakur, Rabenseifner and Gropp,
    2005); steps without communication are free.
    """

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """Nominal seconds of one boxing step."""
        if kind in LOCAL_STEPS:
            return 0.0
        ranks = mesh.shape[axis]
        rounds = 2 if kind == "all_reduce" else 1
        return LATENCY_SECONDS + rounds * (ranks - 1) / ranks * bytes / BYTES_PER_SECOND


_BYTES_MOVED = BytesMoved()


class PartialOwes:
    """Costs under which filling or padding into a Partial layout costs what reducing it again will.

    A plan sees who reads a value and weighs such a step by what follows. An operator on its own does not; were the step
    free, the sum of two tensors split along different dimensions would always be left to somebody else.
    """

    def __init__(self, costs: CollectiveCosts) -> None:
        self._costs = costs

    def collective_seconds(self, kind: str, mesh: Mesh, axis: int, bytes: float) -> float:
        """Seconds of one boxing step, and for those that make parts of their reduction too."""
        seconds = self._costs.collective_seconds(kind, mesh, axis, bytes)
        if kind in ("fill", "pad"):
            seconds += self._costs.collective_seconds("reduce_scatter", mesh, axis, bytes)
        return seconds


@dataclass(frozen=True)
class Ranks:
    """Where the ranks of eager tensors live and what their boxing costs.

    Parameters
    ----------
    backend
        Arrays; default NumPy.
    communicator
        How they move; default all ranks in this process.
    costs
        By which the cheapest boxing is chosen; default the bytes moved.
    """

    backend: Backend | None = None
    communicator: Communicator | None = None
    costs: Any = _BYTES_MOVED


_RANKS: ContextVar[Ranks] = ContextVar("where new global tensors live", default=Ranks())  # noqa: B039  frozen


def current_ranks() -> Ranks:
    """Where tensors made now live."""
    return _RANKS.get()


@contextmanager
def ranks(
    communicator: Communicator | None = None,
    backend: Backend | None = None,
    costs: CostModel | Cluster | None = None,
) -> Iterator[Ranks]:
    """Global tensors made inside live on this communicator and backend, and are boxed by these costs.

    Parameters
    ----------
    communicator
        For instance `sbp.comm.mpi.MPICommunicator()`; every process then runs the same program. Default: all ranks in
        this process.
    backend
        Default NumPy.
    costs
        A cluster or a cost model, as for `auto_parallel`; default the bytes moved.
    """
    chosen = Ranks(backend, communicator, _BYTES_MOVED if costs is None else as_cost_model(costs))
    token = _RANKS.set(chosen)
    try:
        yield chosen
    finally:
        _RANKS.reset(token)


# -- what was boxed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoxingRecord:
    """One boxing step of an eager operation: `what` says of which operand, `bytes` is the payload per rank."""

    what: str
    type: TensorType
    mesh: Mesh
    before: Layout
    after: Layout
    kind: str
    mesh_axis: int
    bytes: int

    @property
    def communicates(self) -> bool:
        """Whether anything is sent; slices, fills and pads are made where they are needed."""
        return self.kind not in LOCAL_STEPS

    def __str__(self) -> str:
        moved = f"{self.bytes} bytes per rank" if self.communicates else "nothing sent"
        return (
            f"{self.what}: {self.type} {self.before} -> {self.after} on {self.mesh}: "
            f"{self.kind} along {self.mesh.names[self.mesh_axis]}, {moved}"
        )


class BoxingLog:
    """The boxing steps recorded inside `explain_boxing`, in order; prints one per line."""

    def __init__(self) -> None:
        self._records: list[BoxingRecord] = []

    @property
    def records(self) -> tuple[BoxingRecord, ...]:
        """All steps so far."""
        return tuple(self._records)

    @property
    def bytes(self) -> int:
        """Payload per rank of the steps that communicate, together."""
        return sum(record.bytes for record in self._records if record.communicates)

    def add(self, records: Sequence[BoxingRecord]) -> None:
        """Append steps."""
        self._records.extend(records)

    def __iter__(self) -> Iterator[BoxingRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self._records)

    def __str__(self) -> str:
        return "\n".join(map(str, self._records)) or "nothing was boxed"


_LOGS: ContextVar[tuple[BoxingLog, ...]] = ContextVar("the logs of the surrounding explain_boxing", default=())


@contextmanager
def explain_boxing() -> Iterator[BoxingLog]:
    """Record every boxing step that eager operators make inside::

    with sbp.explain_boxing() as log:
        y = x @ w
    print(log)
    """
    log = BoxingLog()
    token = _LOGS.set((*_LOGS.get(), log))
    try:
        yield log
    finally:
        _LOGS.reset(token)


# -- programs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attributes:
    """Attributes of a call as part of a key: 1, 1.0 and True are different, and so are 0.0 and -0.0."""

    spelling: str
    values: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Attributes:
        """The attributes with their key."""
        return cls(repr(sorted(values.items())), values)


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of a call: its type, and the layout it is in."""

    type: TensorType
    layout: Layout


@dataclass(frozen=True)
class Program:
    """A call made ready: the executor, and type and layout of what comes out."""

    executor: Executor
    outputs: tuple[Operand, ...]
    records: tuple[BoxingRecord, ...]

    def run(self, inputs: Sequence[Local]) -> list[Local]:
        """The local ranks' arrays of the outputs."""
        result = self.executor.run({}, {_input(number): local for number, local in enumerate(inputs)})
        if self.records:
            for log in _LOGS.get():
                log.add(self.records)
            if LOGGER.isEnabledFor(logging.INFO):
                for record in self.records:
                    LOGGER.info("%s", record)
        return [result.outputs[_output(number)] for number in range(len(self.outputs))]


@lru_cache(maxsize=64)
def boxing_table(mesh: Mesh, costs: Any) -> BoxingTable:
    """The ways between layouts on a mesh."""
    return BoxingTable(mesh, PartialOwes(costs))


@lru_cache(maxsize=4096)
def operator_program(
    op: Operator,
    operands: tuple[Operand, ...],
    places: tuple[int, ...],
    attributes: Attributes,
    mesh: Mesh,
    where: Ranks,
    wanted: tuple[Layout, ...] | None = None,
) -> Program:
    """A call of an operator.

    Parameters
    ----------
    operands
        The different tensors that go in.
    places
        Per input of the operator the number of its operand; a tensor that goes in twice is boxed once per layout.
    wanted
        Layouts of the outputs; default what the cheapest signature gives.

    Raises
    ------
    RuleError
        The operator does not take such inputs.
    """
    types = [operands[place].type for place in places]
    rule = op.bind(types, attributes.values)
    made = op.infer(types, attributes.values)
    table = boxing_table(mesh, where.costs)
    best = None
    for signature in rule.signatures(mesh.shape):
        moves = dict.fromkeys(zip(places, signature.inputs))
        paths = [_path(table, operands[place].type, operands[place].layout, layout) for place, layout in moves]
        if wanted is not None:
            paths += [_path(table, t, layout, end) for t, layout, end in zip(made, signature.outputs, wanted)]
        steps = [step for path in paths for step in path if mesh.shape[step.mesh_axis] > 1]
        # Ten digits, so that sums in another order still tie; then fewer steps; then the signature that comes first.
        cost = float(f"{sum(step.seconds for step in steps):.9e}"), len(steps)
        if best is None or cost < best[0]:
            best = cost, signature
            if cost == (0.0, 0):
                break
    assert best is not None, "every rule has the signature in which all is broadcast"
    signature = best[1]
    builder = _Builder(mesh, table, where)
    sources = [builder.source(number, operand) for number, operand in enumerate(operands)]
    labels = [f"{op.name}, input {op.input_names[min(at, len(op.input_names) - 1)]}" for at in range(len(places))]
    if op.variadic:
        start = len(op.input_names) - 1
        labels[start:] = [f"{label} {at}" for at, label in enumerate(labels[start:])]
    inputs = [builder.box(sources[p], layout, what) for p, layout, what in zip(places, signature.inputs, labels)]
    results = [builder.register(op.name, t, layout) for t, layout in zip(made, signature.outputs)]
    builder.compute(op, attributes.values, inputs, results)
    if wanted is not None:
        results = [builder.box(number, layout, f"{op.name}, result") for number, layout in zip(results, wanted)]
    return builder.finish(results)


@lru_cache(maxsize=4096)
def layout_program(operand: Operand, layout: Layout, mesh: Mesh, where: Ranks) -> Program:
    """A change of layout."""
    builder = _Builder(mesh, boxing_table(mesh, where.costs), where)
    return builder.finish([builder.box(builder.source(0, operand), layout, "to_layout")])


def check_layout(layout: Layout, type: TensorType, mesh: Mesh, what: str) -> None:
    """Raise `LayoutError` unless a tensor can be held so."""
    layout.check(type.shape, mesh.shape, f"{what} {type} on {mesh}")
    reduces = {sbp.reduce for sbp in layout if isinstance(sbp, Partial)}
    if len(reduces) > 1:
        raise LayoutError(
            f"{what} {type}: layout {layout} holds parts of a {' and a '.join(sorted(reduces))}; it can hold one kind."
        )
    if type.dtype == "bool" and "sum" in reduces:
        raise LayoutError(f"{what} {type}: booleans have no sum, so {layout} cannot hold them; use P(max) or P(min).")


def _path(table: BoxingTable, type: TensorType, before: Layout, after: Layout) -> tuple[Step, ...]:
    return () if before == after else table.path(type, before, after)


def _input(number: int) -> str:
    return f"input {number}"


def _output(number: int) -> str:
    return f"output {number}"


class _Builder:
    """Collects the registers and operations of a program."""

    def __init__(self, mesh: Mesh, table: BoxingTable, where: Ranks) -> None:
        self.mesh, self.table, self.where = mesh, table, where
        self.registers: list[Register] = []
        self.operations: list[Operation] = []
        self.sources: dict[str, int] = {}
        self.records: list[BoxingRecord] = []
        self._boxed: dict[tuple[int, Layout], int] = {}

    def register(self, value: str, type: TensorType, layout: Layout, kind: str = "activation") -> int:
        """Storage for a value in a layout; its number."""
        number, size = len(self.registers), SIZES[type.dtype]
        for parts in layout.local_shape(type.shape, self.mesh.shape):
            size *= parts
        self.registers.append(Register(number, value, type, layout, kind, size))
        return number

    def source(self, number: int, operand: Operand) -> int:
        """The register of a given operand."""
        register = self.register(_input(number), operand.type, operand.layout, "input")
        self.sources[_input(number)] = register
        return register

    def box(self, number: int, layout: Layout, what: str) -> int:
        """The register that holds a register's value in another layout, made by the cheapest steps."""
        start = self.registers[number]
        key = (number, layout)
        if start.layout == layout or key in self._boxed:
            return self._boxed.get(key, number)
        at = number
        for step in self.table.path(start.type, start.layout, layout):
            made = self.register(start.value, start.type, step.after)
            self.operations.append(Box(step.kind, step.mesh_axis, (at,), (made,), "forward", step.seconds, step.bytes))
            if self.mesh.shape[step.mesh_axis] > 1:  # along an axis of one rank only the name of the layout changes
                self.records.append(
                    BoxingRecord(
                        what, start.type, self.mesh, step.before, step.after, step.kind, step.mesh_axis, step.bytes
                    )
                )
            at = made
        self._boxed[key] = at
        return at

    def compute(self, op: Operator, attributes: Mapping[str, Any], inputs: list[int], outputs: list[int]) -> None:
        """The operator itself."""
        self.operations.append(
            Compute(op.name, op.name, attributes, tuple(inputs), tuple(outputs), "forward", "", 0.0, 0.0)
        )

    def finish(self, outputs: list[int]) -> Program:
        """The program that ends with these registers."""
        named = {_output(number): register for number, register in enumerate(outputs)}
        physical = PhysicalPlan(self.mesh, tuple(self.registers), tuple(self.operations), self.sources, named, {})
        executor = Executor(physical, self.where.backend, self.where.communicator)
        made = tuple(Operand(self.registers[number].type, self.registers[number].layout) for number in outputs)
        return Program(executor, made, tuple(self.records))
