"""A plan applied to a PyTorch module: parameters become DTensors, `forward` and autograd run the plan's operations.

PyTorch keeps what is PyTorch's: the module with its names, its parameters and `state_dict`, `loss.backward()`,
`torch.optim`, gradient clipping and accumulation, checkpoints, process groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sbp.comm.torch_distributed import TorchCommunicator, arrived
from sbp.cuda.torch_backend import TorchBackend
from sbp.frontend.torch import Imported
from sbp.initial import draw
from sbp.layout import broadcast_layout
from sbp.planner.boxing import Step
from sbp.planner.plan import Plan
from sbp.runtime.torch_autograd import PlannedStep
from sbp.runtime.torch_gradients import gradients_of, seed_of
from sbp.runtime.torch_homes import differences_of, homes_of
from sbp.runtime.torch_program import ExportError, Mover, Table, TorchProgram
from sbp.runtime.torch_report import Collective, Difference, ExportReport, collectives_of, steps_of
from sbp.runtime.torch_tensors import Distributor, Places, check_like, feeds_of, identity, places_of

KNOWN_START = ("zeros", "ones", "constant", "arange")
"""How state may start that the module does not have (a count of steps, say), as every process then starts the same."""


def to_torch(plan: Plan, module: Any, device_mesh: Any, strict: bool = False) -> Any:
    """Make a PyTorch module run a plan, in place as `fully_shard` does; returns it.

    Parameters
    ----------
    plan
        Its graph must have been made from this module, or from one with the same names and shapes of parameters.
    module
        The module, or the `Imported` it was imported as (needed if the program has constants that the module does not
        hold, such as masks). The first rank's values are taken. Parameters on the meta device become empty ones, to be
        filled from a checkpoint.
    device_mesh
        `torch.distributed.device_mesh.init_device_mesh(device, plan.mesh.shape, mesh_dim_names=plan.mesh.names)`.
    strict
        Refuse what would run otherwise than planned; default: do what is nearest and report it.

    Returns
    -------
    module
        Its `forward` takes the plan's inputs by their names or in their order: global tensors (the same on every
        process), this process' shards, or DTensors. It returns the plan's outputs: the loss of a training step as an
        ordinary tensor, anything that lies split as a DTensor. `module.sbp` is the `TorchExport` with the report.

    Raises
    ------
    ExportError
        No device mesh is given; names, shapes or element types differ; the plan has no loss to start from; with
        `strict`, any difference.
    CommunicationError
        The device mesh has another shape than the plan's mesh.
    """
    constants: Mapping[str, Any] = {}
    if isinstance(module, Imported):
        module, constants = module.module, module.constants
    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"to_torch takes a torch.nn.Module or an Imported, got {type(module).__name__}.")
    if not hasattr(device_mesh, "device_type"):
        raise ExportError(
            f"device_mesh is a {type(device_mesh).__name__}; give init_device_mesh(device, {plan.mesh.shape}, "
            f"mesh_dim_names={plan.mesh.names}) of torch.distributed.device_mesh."
        )
    export = TorchExport(plan, device_mesh)
    found = export.report.differences
    if strict and found:
        listed = "; ".join(f"{d.place}: planned {d.planned}, exported {d.exported} ({d.why})" for d in found)
        raise ExportError(f"strict, but {len(found)} would not be as planned: {listed}.")
    export.take(module, constants)
    return module


class TorchExport:
    """A plan made ready for PyTorch on one process of a device mesh.

    Attributes
    ----------
    plan, device_mesh
        What it was made of.
    homes
        Parameter -> where it lies between steps.
    """

    def __init__(self, plan: Plan, device_mesh: Any) -> None:
        self.plan, self.device_mesh = plan, device_mesh
        kind = device_mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self._backend = TorchBackend(device)
        self._communicator = TorchCommunicator(plan.mesh, device_mesh, overlap=True)
        self._distributor = Distributor(plan.mesh, device_mesh, device, self._communicator)
        graph, physical = plan.graph, plan.physical
        gradients = gradients_of(graph, physical)
        self.homes = homes_of(plan, gradients)
        self._trained = list(gradients)
        self._buffers = {
            value: physical.updates[value] for value in graph.updates if graph.values[value].kind == "buffer"
        }
        self._program = TorchProgram(
            physical,
            physical.outputs,
            self._buffers,
            {name: gradient.register for name, gradient in gradients.items()},
            seed_of(graph, physical) if gradients else None,
            self._backend,
            self._communicator,
        )
        self._gather = {name: self._mover(name, home.gather) for name, home in self.homes.items() if home.gather}
        self._collect = {name: self._mover(name, home.collect) for name, home in self.homes.items() if home.collect}
        self._parameters: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._differences = list(differences_of(plan, self.homes, gradients))

    def _mover(self, name: str, steps: tuple[Step, ...]) -> Mover:
        kind = self.plan.graph.values[name].type
        return Mover(steps, kind, self.plan.mesh, self._backend, self._communicator)

    # -- report ------------------------------------------------------------------------------------------------------

    @property
    def report(self) -> ExportReport:
        """What is not as planned, and the collectives of a step."""
        plan = self.plan
        return ExportReport(
            plan.graph.name,
            plan.mesh,
            tuple(self._differences),
            collectives_of(plan.physical, plan.physical.operations),
            self.collectives("forward") + self.collectives("backward"),
            tuple(sorted(self._backend.on_host)),
        )

    def collectives(self, part: str) -> tuple[Collective, ...]:
        """Those of "forward" in training, of "backward", or of "evaluation"; parameters' own after the program's."""
        plan = self.plan
        operations = [plan.physical.operations[number] for number in getattr(self._program.parts, part)]
        found = collectives_of(plan.physical, operations)
        for name, home in self.homes.items():
            steps = home.collect if part == "backward" else home.gather
            found += steps_of(steps, plan.graph.values[name].type, plan.mesh, part)
        return found

    # -- the module --------------------------------------------------------------------------------------------------

    def take(self, module: Any, constants: Mapping[str, Any]) -> None:
        """Replace the module's parameters and its `forward`; nothing is changed if something does not fit.

        Parameters
        ----------
        constants
            State that the module does not have, by name.

        Raises
        ------
        ExportError
            See `to_torch`.
        """
        if getattr(module, "sbp", None) is not None:
            raise ExportError("the module runs a plan already; build it anew to apply another one.")
        places, values = places_of(module), self.plan.graph.values
        names = [name for name in self.plan.graph.state if values[name].kind != "optimizer"]
        for name in names:
            value = values[name]
            if name in places or name in constants:
                check_like(value, places[name].tensor if name in places else constants[name])
            elif value.kind == "parameter" or value.initial is None or value.initial.kind not in KNOWN_START:
                listed = ", ".join(sorted(places)[:8]) + (", ..." if len(places) > 8 else "")
                hint = "" if value.kind == "parameter" else " (a constant of an imported program is in its Imported)"
                raise ExportError(
                    f"the plan has the {value.kind} {value}, the module has none of that name; export the module whose "
                    f"graph was planned{hint}. This one has {listed or 'no parameters'}."
                )
        taken = {identity(places[name].tensor) for name in names if name in places}
        for name in names:
            if name in places:
                self._take(name, places[name])
            else:
                self._keep(name, constants.get(name))
        for name, place in places.items():
            if identity(place.tensor) not in taken and isinstance(place.tensor, torch.nn.Parameter):
                taken.add(identity(place.tensor))
                self._leave(name, place)
        object.__setattr__(module, "sbp", self)
        module.forward = self._forward(module)

    def _keep(self, name: str, constant: Any) -> None:
        """State that is not the module's: a constant of the program, or what starts the same everywhere."""
        value, layout = self.plan.graph.values[name], self.plan.decisions.sources[name]
        start = self._backend.from_host(draw(value)) if constant is None else constant.to(self._distributor.device)
        self._state[name] = self._distributor.cut(start, layout)
        if name in self._buffers:
            why = "the module has no such buffer, so it is not part of its state_dict"
            self._differences.append(Difference(name, "state of the step", "kept beside the module", why))

    def _take(self, name: str, place: Places) -> None:
        value = self.plan.graph.values[name]
        layout = self.homes[name].layout if name in self.homes else self.plan.decisions.sources[name]
        local = self._distributor.placed(place.tensor, layout)
        if value.kind == "parameter":
            made = self._distributor.dtensor(local, value.shape, layout)
            self._parameters[name] = torch.nn.Parameter(made, requires_grad=place.tensor.requires_grad)
            place.put(self._parameters[name])
        else:
            self._state[name] = local
            place.put(local if layout.is_broadcast else self._distributor.dtensor(local, value.shape, layout))

    def _leave(self, name: str, place: Places) -> None:
        """What the plan does not read becomes a replicated DTensor too, so that optimizers see one kind of tensor."""
        layout = broadcast_layout(self.plan.mesh.ndim)
        local = self._distributor.placed(place.tensor, layout)
        made = self._distributor.dtensor(local, tuple(local.shape), layout)
        place.put(torch.nn.Parameter(made, requires_grad=place.tensor.requires_grad))
        self._differences.append(Difference(name, "not read", "replicated", "the planned step does not use it"))

    def _forward(self, module: Any) -> Callable[..., Any]:
        def forward(*arguments: Any, **named: Any) -> Any:
            return self.run(feeds_of(self.plan.graph.inputs, arguments, named), module.training)

        return forward

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, Any], training: bool) -> Any:
        """The outputs for inputs by name; see `to_torch`.

        Raises
        ------
        ExportError
            An input does not fit, or a training step with dropout or running statistics is run for evaluation.
        """
        graph, decisions = self.plan.graph, self.plan.decisions
        if not training and (self._buffers or any(node.op == "dropout" for node in graph.nodes)):
            raise ExportError(
                f"{graph.name}: the module is in evaluation mode, but the plan is of a training step with dropout or "
                "running statistics; plan it with training=False and export that for evaluation."
            )
        placed = {
            value: self._distributor.fed(graph.values[value], decisions.sources[value], tensor)
            for value, tensor in feeds.items()
        }
        trained = [self._parameters[name] for name in self._trained]
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in trained):
            made = PlannedStep.apply(self, placed, self._trained, *trained)
        else:
            made, _ = self.run_forward(placed, keep=False)
        outputs = tuple(
            tensor
            if decisions.outputs[value].is_broadcast
            else self._distributor.dtensor(tensor, graph.values[value].shape, decisions.outputs[value])
            for value, tensor in zip(graph.outputs, made)
        )
        return outputs[0] if len(outputs) == 1 else outputs

    def run_forward(self, placed: Mapping[str, Any], keep: bool) -> tuple[tuple[Any, ...], Table | None]:
        """Outputs in order, from this process' part of the inputs; with `keep` also what backward goes on from."""
        sources = dict(placed)
        for name, parameter in self._parameters.items():
            local = parameter.detach().to_local()
            sources[name] = self._gather[name](local) if name in self._gather else local
        for name, tensor in self._state.items():
            # Backward may read what this step began with.
            sources[name] = tensor.clone() if name in self._buffers else tensor
        outputs, buffers, table = self._program.forward(sources, keep)
        for name, tensor in buffers.items():
            self._state[name].copy_(tensor)
        return tuple(outputs[value] for value in self.plan.graph.outputs), table

    def run_backward(self, table: Table, seed: Any, wanted: Mapping[str, bool]) -> dict[str, Any]:
        """Gradients of the wanted parameters as DTensors, from that of the loss."""
        known = {tensor.untyped_storage().data_ptr() for tensor in table if isinstance(tensor, torch.Tensor)}
        known.add(seed.untyped_storage().data_ptr())
        found = self._program.backward(table, seed)
        made = {}
        for name, local in found.items():
            if wanted[name]:
                local = arrived(self._collect[name](local) if name in self._collect else local)
                storage = local.untyped_storage()
                if storage.data_ptr() in known or storage.nbytes() > local.numel() * local.element_size():
                    # Clipping scales gradients in place: none may share memory with another or with an input.
                    local = local.clone(memory_format=torch.contiguous_format)
                known.add(local.untyped_storage().data_ptr())
                made[name] = self._distributor.dtensor(
                    local.contiguous(), self.plan.graph.values[name].shape, self.homes[name].layout
                )
        return made
