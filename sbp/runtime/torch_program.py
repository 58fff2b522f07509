"""A plan's step on torch tensors, cut where PyTorch cuts it: forward, then backward when autograd asks for gradients.

The optimizer's part is left to torch.optim. What remains are the plan's own operations in the plan's order, on this
rank's shards, so that every activation and every gradient has its planned layout and every collective is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp.comm.torch_distributed import TorchCommunicator, arrived
from sbp.cuda.torch_backend import TorchBackend
from sbp.errors import SbpError
from sbp.layout import Shard
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, TensorType
from sbp.planner.boxing import Step
from sbp.planner.physical import Box, Compute, PhysicalPlan, Register
from sbp.runtime.borders import prepare_borders
from sbp.runtime.boxing import prepare

Table = list[Any]
"""Per register this rank's tensor, or a `Pending` one; None while it is empty."""


class ExportError(SbpError):
    """A module, a mesh or a tensor that does not fit the plan, or a plan that PyTorch cannot run."""


@dataclass(frozen=True)
class Parts:
    """Numbers of the operations of a step, in program order.

    Attributes
    ----------
    forward
        What outputs and buffers need, and what is of the forward phase and gradients need.
    backward
        The rest of what gradients need.
    evaluation
        What outputs alone need.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    evaluation: tuple[int, ...]


def parts_of(physical: PhysicalPlan, outputs: Iterable[int], buffers: Iterable[int], gradients: Iterable[int]) -> Parts:
    """How a step is cut, given the registers of its outputs, of its buffers' next values, and of its gradients."""
    outputs = tuple(outputs)
    evaluation = _needed(physical, outputs)
    first = evaluation | _needed(physical, buffers)
    wanted = _needed(physical, gradients)
    first |= {number for number in wanted if physical.operations[number].phase == "forward"}
    first |= _needed(physical, (register for number in first for register in physical.operations[number].inputs))
    return Parts(tuple(sorted(first)), tuple(sorted(wanted - first)), tuple(sorted(evaluation)))


def _needed(physical: PhysicalPlan, registers: Iterable[int]) -> set[int]:
    wanted, found = set(registers), set()
    for number in reversed(range(len(physical.operations))):
        operation = physical.operations[number]
        if wanted.intersection(operation.outputs):
            found.add(number)
            wanted.update(operation.inputs)
    return found


class Mover:
    """A change of layout outside the plan's own program, on this rank's tensors."""

    def __init__(
        self,
        steps: Sequence[Step],
        kind: TensorType,
        mesh: Mesh,
        backend: TorchBackend,
        communicator: TorchCommunicator,
    ) -> None:
        self._rank = communicator.ranks[0]
        self._moves = []
        for step in steps:
            source = Register(0, "parameter", kind, step.before, "parameter", step.bytes)
            target = replace(source, layout=step.after)
            box = Box(step.kind, step.mesh_axis, (0,), (0,), "forward", step.seconds, step.bytes)
            self._moves.append(prepare(box, source, target, mesh, backend, communicator, kind.dtype))

    def __call__(self, tensor: Any) -> Any:
        for move in self._moves:
            tensor = move({self._rank: arrived(tensor)})[self._rank]
        return tensor


Run = Callable[[Table], None]


class TorchProgram:
    """The parts of a step, ready to run on this rank.

    Parameters
    ----------
    physical
        The plan's program.
    outputs
        Output value -> its register.
    buffers
        State value -> the register of its next value, for state that changes in the forward part.
    gradients
        Parameter -> the register of its gradient.
    seed
        Register of the gradient of the loss, which autograd gives; None in inference.
    """

    def __init__(
        self,
        physical: PhysicalPlan,
        outputs: Mapping[str, int],
        buffers: Mapping[str, int],
        gradients: Mapping[str, int],
        seed: int | None,
        backend: TorchBackend,
        communicator: TorchCommunicator,
    ) -> None:
        from sbp.cuda.torch_types import torch_dtype

        self.physical, self.backend, self.communicator = physical, backend, communicator
        self._torch_dtype = torch_dtype
        self._rank = communicator.ranks[0]
        self._place = physical.mesh.coordinate(self._rank)
        self._outputs, self._buffers, self._gradients, self._seed = outputs, buffers, gradients, seed
        self.parts = parts_of(physical, outputs.values(), buffers.values(), gradients.values())
        made = {number: self._prepare(number) for number in sorted({*self.parts.forward, *self.parts.backward})}
        whole = [*self.parts.forward, *self.parts.backward]
        releases = self._releases(whole, {*gradients.values()})
        steps = [(made[number], released) for number, released in zip(whole, releases)]
        cut = len(self.parts.forward)
        self._forward = steps[:cut]
        seeds = {number for number in self.parts.backward if seed in physical.operations[number].outputs}
        self._backward = [step for number, step in zip(whole[cut:], steps[cut:]) if number not in seeds]
        releases = self._releases(self.parts.evaluation, set())
        self._evaluation = [(made[number], released) for number, released in zip(self.parts.evaluation, releases)]

    def shard(self, register: Register) -> Shard:
        """The box of a register's value that this rank holds."""
        return register.layout.shard(register.type.shape, self.physical.mesh.shape, self._place)

    # -- run ---------------------------------------------------------------------------------------------------------

    def forward(
        self, sources: Mapping[str, Any], training: bool
    ) -> tuple[dict[str, Any], dict[str, Any], Table | None]:
        """Outputs, next values of buffers, and, in training, the table from which `backward` goes on.

        Parameters
        ----------
        sources
            Input or state value -> this rank's tensor in the stored layout.
        """
        table: Table = [None] * len(self.physical.registers)
        for value, tensor in sources.items():
            table[self.physical.sources[value]] = tensor
        keep = training or bool(self._buffers)
        for run, released in self._forward if keep else self._evaluation:
            run(table)
            for number in released:
                table[number] = None
        outputs = {value: arrived(table[number]) for value, number in self._outputs.items()}
        buffers = {value: arrived(table[number]) for value, number in self._buffers.items()} if keep else {}
        return outputs, buffers, table if training else None

    def backward(self, table: Table, seed: Any) -> dict[str, Any]:
        """Parameter -> this rank's part of its gradient, from that of the loss. The table is used up."""
        assert self._seed is not None
        table[self._seed] = seed.to(self._torch_dtype(self.physical.registers[self._seed].type.dtype))
        for run, released in self._backward:
            run(table)
            for number in released:
                table[number] = None
        found = {value: arrived(table[number]) for value, number in self._gradients.items()}
        table.clear()
        return found

    # -- preparation -------------------------------------------------------------------------------------------------

    def _releases(self, numbers: Sequence[int], wanted: set[int]) -> list[tuple[int, ...]]:
        """Per operation the registers that nothing after it in the sequence reads."""
        kept = wanted | set(self._outputs.values()) | set(self._buffers.values())
        last: dict[int, int] = {}
        for at, number in enumerate(numbers):
            operation = self.physical.operations[number]
            for register in (*operation.inputs, *operation.outputs):
                last[register] = at
        found: list[list[int]] = [[] for _ in numbers]
        for register, at in last.items():
            if register not in kept:
                found[at].append(register)
        return [tuple(sorted(items)) for items in found]

    def _prepare(self, number: int) -> Run:
        operation, registers = self.physical.operations[number], self.physical.registers
        if isinstance(operation, Compute):
            return self._compute(operation)
        (source,), (target,) = operation.inputs, operation.outputs
        before = registers[source]
        move = prepare(
            operation, before, registers[target], self.physical.mesh, self.backend, self.communicator, before.type.dtype
        )
        rank = self._rank

        def box(table: Table) -> None:
            table[source] = arrived(table[source])
            table[target] = move({rank: table[source]})[rank]

        return box

    def _compute(self, operation: Compute) -> Run:
        op, registers = REGISTRY[operation.op], self.physical.registers
        kernel, xp = self.backend.kernel(op.name, op.kernel), self.backend.xp
        read, moves = prepare_borders(
            op,
            operation.attributes,
            [registers[number] for number in operation.inputs],
            [registers[number] for number in operation.outputs],
            self.physical.mesh,
            self.communicator,
            xp,
        )
        rank = self._rank
        before = read[rank]
        after = tuple(self.shard(registers[number]) for number in operation.outputs)
        attributes = op.local_attributes(operation.attributes, before, after)
        wanted = [
            (number, box.shape, self._torch_dtype(registers[number].type.dtype))
            for number, box in zip(operation.outputs, after)
        ]
        inputs = operation.inputs

        def compute(table: Table) -> None:
            tensors = []
            for number, move in zip(inputs, moves):
                table[number] = arrived(table[number])
                tensors.append(table[number] if move is None else arrived(move({rank: table[number]})[rank]))
            try:
                made = kernel(xp, *tensors, **attributes)
            except Exception as error:
                raise self._failed(operation, tensors, f"{type(error).__name__}: {error}") from error
            results = made if isinstance(made, (tuple, list)) else (made,)
            for result, (number, shape, dtype) in zip(results, wanted):
                if result.shape != shape:
                    raise self._failed(operation, tensors, f"made {list(result.shape)}, the plan says {list(shape)}")
                table[number] = result if result.dtype == dtype else result.to(dtype)

        return compute

    def _failed(self, operation: Compute, tensors: Sequence[Any], what: str) -> ExportError:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        place = f", module {operation.module}" if operation.module else ""
        return ExportError(
            f"node {operation.node} ({operation.op}{place}) on rank {self._rank} with local inputs {shapes}: {what}."
        )
