"""Runs a physical plan: operations in program order over registers, for the ranks that live in this process.

Everything that depends on the plan alone (local attributes, shapes, slices, groups) is worked out once, so that a step
only fetches arrays, calls kernels and posts collectives. A register is empty, filled once by its producer, and emptied
after its last use: the program order needs one buffer of each register's credits. Which registers share memory, and
when it is given up, is what `sbp.planner.buffers` says, so that the plan's memory is what is held here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy

from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.dtype import is_floating
from sbp.errors import PlanError, SbpError
from sbp.interpreter import attributes_in
from sbp.layout import Shard
from sbp.operator import REGISTRY
from sbp.planner.arena import arena_of
from sbp.planner.buffers import buffers_of, is_view
from sbp.planner.physical import Compute, PhysicalPlan, Register
from sbp.runtime import placement
from sbp.runtime.arena import ArenaStore
from sbp.runtime.borders import prepare_borders
from sbp.runtime.boxing import Local, prepare

Table = list[Local | None]
"""Per register what the local ranks hold; None while it is empty."""


class ExecutionError(SbpError):
    """A kernel that failed, or made something else than the plan says, on some rank."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step made, as the local ranks' arrays.

    Parameters
    ----------
    outputs
        Output value -> arrays.
    state
        State value -> arrays after the step.
    kept
        Register number -> arrays, for the registers named in `keep`.
    timeline
        Per operation its start and stop in seconds since the step began; empty unless asked for.
    """

    outputs: Mapping[str, Local]
    state: Mapping[str, Local]
    kept: Mapping[int, Local] = field(default_factory=dict)
    timeline: tuple[tuple[float, float], ...] = ()


class Executor:
    """A physical plan, ready to run.

    Parameters
    ----------
    physical
        The plan.
    backend
        Where arrays live; default NumPy.
    communicator
        How they move; default all ranks in this process.
    floating
        Element type that replaces every floating one, as in `sbp.interpreter.evaluate`; None keeps the plan's.
    keep
        Numbers of registers that are not emptied and appear in `StepResult.kept`.
    share
        Ranks of this process that would run a kernel on the very same arrays, with the same attributes, share its
        result: replicated work is done once. False does it on every rank, for measurements.
    arena
        Run out of one preallocated buffer per rank (see `sbp.planner.arena`), in which every register has its place
        and updates are made where the old values lie. The state that a step returns lies there, too, so that the next
        step overwrites it; outputs are copies.

    Raises
    ------
    PlanError
        The communicator has another number of ranks than the mesh, or the program reads a register that is empty.
    """

    def __init__(
        self,
        physical: PhysicalPlan,
        backend: Backend | None = None,
        communicator: Communicator | None = None,
        *,
        floating: str | None = None,
        keep: Collection[int] = (),
        share: bool = True,
        arena: bool = False,
    ) -> None:
        self._share = share and not arena
        self.physical = physical
        self.backend: Backend = NumpyBackend() if backend is None else backend
        if communicator is None:
            communicator = InProcessCommunicator(physical.mesh.size, self.backend.xp)
        self.communicator: Communicator = communicator
        self.floating = floating
        if self.communicator.size != physical.mesh.size:
            raise PlanError(
                f"the plan is for {physical.mesh} with {physical.mesh.size} ranks, the communicator has "
                f"{self.communicator.size}; start as many processes as the mesh has ranks."
            )
        check_program(physical)
        self._keep = tuple(sorted(keep))
        self._shards: dict[tuple[Any, ...], tuple[Shard, ...]] = {}
        self._state = {
            value: number for value, number in physical.sources.items() if physical.registers[number].kind != "input"
        }
        self._feeds = {value: number for value, number in physical.sources.items() if value not in self._state}
        self._shapes = {
            number: {rank: shard.shape for rank, shard in zip(self.communicator.ranks, self._local(number))}
            for number in physical.sources.values()
        }
        if arena and self._keep:
            raise PlanError(
                f"registers {', '.join(map(str, self._keep))} cannot be kept: out of an arena their places are used "
                "again. Run without arena, or keep nothing."
            )
        kept = set(self._keep)
        buffers = buffers_of(physical)
        self._in_place = buffers.in_place
        self._arena = self._store() if arena else None
        self._steps = [
            (
                self._prepare(index) if self._arena is None else self._prepare_out_of(self._arena, index),
                tuple(number for number in released if number not in kept),
            )
            for index, released in enumerate(buffers.releases)
        ]

    # -- in and out --------------------------------------------------------------------------------------------------

    def place(self, arrays: Mapping[str, Any]) -> dict[str, Local]:
        """The local ranks' shards of global arrays, by the names of inputs or state values, in their stored layouts."""
        placed = {}
        for value, array in arrays.items():
            if value not in self.physical.sources:
                raise PlanError(f"the plan has no input or state {value!r}; it has {', '.join(self.physical.sources)}.")
            register = self.physical.registers[self.physical.sources[value]]
            placed[value] = placement.place(
                array, register, self.physical.mesh, self.backend, self.communicator.ranks, self.dtype(register)
            )
        return placed

    def collect(self, local: Local, register: int) -> numpy.ndarray:
        """The global array of a register from the local ranks' arrays; checks that replicas agree.

        Every process must call it, in the same order.
        """
        found = self.physical.registers[register]
        return placement.collect(local, found, self.physical.mesh, self.backend, self.communicator)

    def collect_outputs(self, outputs: Mapping[str, Local]) -> dict[str, numpy.ndarray]:
        """The global arrays of a step's outputs."""
        return {value: self.collect(local, self.physical.outputs[value]) for value, local in outputs.items()}

    def collect_state(self, state: Mapping[str, Local]) -> dict[str, numpy.ndarray]:
        """The global arrays of state values, as they are placed before a step or come out of one."""
        return {value: self.collect(local, self.physical.sources[value]) for value, local in state.items()}

    def dtype(self, register: Register) -> str:
        """A register's element type, under the overriding floating type."""
        kind = register.type.dtype
        return self.floating if self.floating is not None and is_floating(kind) else kind

    # -- run ---------------------------------------------------------------------------------------------------------

    def step(self, state: Mapping[str, Local], feeds: Mapping[str, Local]) -> tuple[dict[str, Local], dict[str, Local]]:
        """One step: (outputs, new state), each value -> {rank: local array}."""
        result = self.run(state, feeds)
        return dict(result.outputs), dict(result.state)

    def run(self, state: Mapping[str, Local], feeds: Mapping[str, Local], timed: bool = False) -> StepResult:
        """One step, with what is kept and, if `timed`, when every operation ran (each is then waited for).

        Raises
        ------
        PlanError
            An input or state value is missing or has a wrong local shape.
        ExecutionError
            A kernel failed; the message names node, rank and local shapes.
        """
        try:
            table, times = self._run(state, feeds, timed)
        except BaseException:
            self.communicator.fail()
            raise
        physical = self.physical
        if self._arena is not None:
            return self._result_out_of(self._arena, table, times)
        after = {value: table[physical.updates.get(value, number)] for value, number in self._state.items()}
        return StepResult(
            {value: _full(table[number]) for value, number in physical.outputs.items()},
            {value: _full(local) for value, local in after.items()},
            {number: _full(table[number]) for number in self._keep},
            tuple(times),
        )

    def _run(
        self, state: Mapping[str, Local], feeds: Mapping[str, Local], timed: bool
    ) -> tuple[Table, list[tuple[float, float]]]:
        """The registers after the last operation, and the operations' times."""
        table: Table = [None] * len(self.physical.registers)
        for sources, given, kind in ((self._state, state, "state"), (self._feeds, feeds, "input")):
            for value, number in sources.items():
                given_ = self._given(value, number, given, kind)
                table[number] = given_ if self._arena is None else self._arena.put(number, given_)
        times: list[tuple[float, float]] = []
        if timed:
            self.backend.synchronize()
        origin = time.perf_counter()
        for run, released in self._steps:
            start = time.perf_counter()
            run(table)
            if timed:
                self.backend.synchronize()
                times.append((start - origin, time.perf_counter() - origin))
            for number in released:
                table[number] = None
        return table, times

    def _given(self, value: str, number: int, given: Mapping[str, Local], kind: str) -> Local:
        local = given.get(value)
        register = self.physical.registers[number]
        if local is None:
            raise PlanError(f"{kind} {value!r} ({register.type}) is not given; place it with Executor.place.")
        for rank, shape in self._shapes[number].items():
            if rank not in local or local[rank].shape != shape:
                found = list(local[rank].shape) if rank in local else "nothing"
                raise PlanError(
                    f"{kind} {value!r} in {register.layout} is {list(shape)} on rank {rank}, but was given {found}; "
                    "place global arrays with Executor.place."
                )
        return local

    # -- preparation -------------------------------------------------------------------------------------------------

    def _local(self, number: int) -> tuple[Shard, ...]:
        """A register's boxes on the local ranks."""
        register, mesh = self.physical.registers[number], self.physical.mesh
        key = (register.layout, register.type.shape)
        found = self._shards.get(key)
        if found is None:
            found = self._shards[key] = tuple(
                register.layout.shard(register.type.shape, mesh.shape, mesh.coordinate(rank))
                for rank in self.communicator.ranks
            )
        return found

    def _prepare(self, index: int) -> Callable[[Table], None]:
        operation, registers = self.physical.operations[index], self.physical.registers
        if isinstance(operation, Compute):
            return self._prepare_compute(operation)
        (source,), (target,) = operation.inputs, operation.outputs
        move = prepare(
            operation,
            registers[source],
            registers[target],
            self.physical.mesh,
            self.backend,
            self.communicator,
            self.dtype(registers[source]),
        )

        def box(table: Table) -> None:
            table[target] = move(table[source])  # type: ignore[arg-type]  # it is full when this runs

        return box

    # -- out of an arena ---------------------------------------------------------------------------------------------

    def _store(self) -> ArenaStore:
        registers, backend = self.physical.registers, self.backend
        dtypes = [backend.dtype(self.dtype(register)) for register in registers]
        held = {register.type.dtype: dtype.itemsize for register, dtype in zip(registers, dtypes)}
        arena = arena_of(self.physical, item_bytes=held)
        shards = [self._local(register.number) for register in registers]
        return ArenaStore(self.physical, arena, backend, self.communicator.ranks, shards, dtypes)

    def _prepare_out_of(self, store: ArenaStore, index: int) -> Callable[[Table], None]:
        """The operation, with its results put in their places."""
        run, operation = self._prepare(index), self.physical.operations[index]
        if is_view(operation):
            return run

        def into_place(table: Table) -> None:
            run(table)
            for number in operation.outputs:
                table[number] = store.put(number, _full(table[number]))

        return into_place

    def _result_out_of(self, store: ArenaStore, table: Table, times: list[tuple[float, float]]) -> StepResult:
        """The step's results; next values that were made beside the old ones move to where those lie."""
        outputs = {value: _copied(table[number]) for value, number in self.physical.outputs.items()}
        moved = {
            value: _copied(table[number])
            for value, number in self.physical.updates.items()
            if number not in self._in_place
        }
        state = {}
        for value, home in self._state.items():
            state[value] = store.put(home, moved[value]) if value in moved else store.slot(home)
        return StepResult(outputs, state, {}, tuple(times))

    def _prepare_compute(self, operation: Compute) -> Callable[[Table], None]:
        op = REGISTRY[operation.op]
        kernel, xp, view = self.backend.kernel(op.name, op.kernel), self.backend.xp, is_view(operation)
        inputs, outputs = operation.inputs, operation.outputs
        registers = self.physical.registers
        read, moves = prepare_borders(
            op,
            operation.attributes,
            [registers[number] for number in inputs],
            [registers[number] for number in outputs],
            self.physical.mesh,
            self.communicator,
            xp,
        )
        after = [self._local(number) for number in outputs]
        dtypes = [self.backend.dtype(self.dtype(self.physical.registers[number])) for number in outputs]
        known: dict[tuple[Any, ...], dict[str, Any]] = {}
        calls = []
        for position, rank in enumerate(self.communicator.ranks):
            boxes = read[rank], tuple(shards[position] for shards in after)
            attributes = known.get(boxes)
            if attributes is None:
                attributes = known[boxes] = attributes_in(
                    op.local_attributes(operation.attributes, *boxes), self.floating
                )
            calls.append((rank, attributes, [shard.shape for shard in boxes[1]]))

        share = self._share and len(calls) > 1

        def compute(table: Table) -> None:
            sources: list[Any] = [
                table[number] if move is None else move(_full(table[number])) for number, move in zip(inputs, moves)
            ]
            made: list[Local] = [{} for _ in outputs]
            done: dict[tuple[int, ...], int] = {}
            for rank, attributes, shapes in calls:
                arrays = [source[rank] for source in sources]
                if share:
                    first = done.setdefault((id(attributes), *map(id, arrays)), rank)
                    if first != rank:
                        for local in made:
                            local[rank] = local[first]
                        continue
                try:
                    results = kernel(xp, *arrays, **attributes)
                except Exception as error:
                    raise _failed(operation, rank, arrays, f"{type(error).__name__}: {error}") from error
                if not isinstance(results, (tuple, list)):
                    results = (results,)
                if len(results) != len(shapes):
                    raise _failed(operation, rank, arrays, f"made {len(results)} arrays, the plan has {len(shapes)}")
                for local, result, shape, dtype in zip(made, results, shapes, dtypes):
                    if result.shape != shape:
                        raise _failed(
                            operation, rank, arrays, f"made {list(result.shape)}, the plan says {list(shape)}"
                        )
                    # Kernels may give scalars for arrays of no dimensions, and compute in a wider type.
                    held = result if shape and result.dtype == dtype else xp.asarray(result, dtype=dtype)
                    local[rank] = held if view else _own(xp, held, arrays)
            for number, local in zip(outputs, made):
                table[number] = local

        return compute


def check_program(physical: PhysicalPlan) -> None:
    """Raise `PlanError` unless every register is filled once, before it is read, and every layout fits its value."""
    mesh, registers = physical.mesh, physical.registers
    for number, register in enumerate(registers):
        if register.number != number:
            raise PlanError(
                f"register {number} of the plan is numbered {register.number}; registers are numbered in order."
            )
        register.layout.check(register.type.shape, mesh.shape, register.value)
    full = set(physical.sources.values())
    for index, operation in enumerate(physical.operations):
        name = operation.node if isinstance(operation, Compute) else operation.kind
        for number in (*operation.inputs, *operation.outputs):
            if not 0 <= number < len(registers):
                raise PlanError(f"operation {index} ({name}) uses register {number}; the plan has {len(registers)}.")
        for number in operation.inputs:
            if number not in full:
                raise PlanError(
                    f"operation {index} ({name}) reads register {number} ({registers[number].value} in "
                    f"{registers[number].layout}), which nothing has filled; the program's order is wrong."
                )
        for number in operation.outputs:
            if number in full:
                raise PlanError(
                    f"operation {index} ({name}) fills register {number} ({registers[number].value}), "
                    "which is full already."
                )
            full.add(number)
    for value, number in (*physical.outputs.items(), *physical.updates.items()):
        if number not in full:
            raise PlanError(f"{value}: its register {number} is never filled.")
    for value, number in physical.updates.items():
        source = physical.sources.get(value)
        if source is None or registers[source].layout != registers[number].layout:
            stored = "no register" if source is None else str(registers[source].layout)
            raise PlanError(
                f"state {value!r} is stored in {stored}, its next value in {registers[number].layout}; they must agree."
            )


def _own(xp: Any, array: Any, inputs: list[Any]) -> Any:
    """The array as contiguous memory that nothing else uses and that holds nothing else."""
    owner = array if array.base is None else array.base
    alone = array.flags.c_contiguous and getattr(owner, "nbytes", -1) == array.nbytes
    if alone and not any(owner is other or owner is other.base for other in inputs):
        return array
    return xp.array(array, order="C")


def _failed(operation: Compute, rank: int, arrays: list[Any], detail: str) -> ExecutionError:
    shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
    return ExecutionError(f"node {operation.node} ({operation.op}) on rank {rank}, on local ({shapes}): {detail}.")


def _copied(local: Local | None) -> Local:
    return {rank: array.copy() for rank, array in _full(local).items()}


def _full(local: Local | None) -> Local:
    assert local is not None, "check_program lets no empty register be read"
    return local
