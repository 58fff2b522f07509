"""Proof by running: a plan's sharded step against the unsharded program, on random inputs, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.dtype import FLOATING
from sbp.errors import LayoutError, PlanError
from sbp.graph import Graph
from sbp.initial import draw_all, generator
from sbp.interpreter import evaluate
from sbp.layout import Layout
from sbp.planner.physical import Compute, PhysicalPlan
from sbp.runtime.boxing import Local
from sbp.runtime.executor import Executor
from sbp.runtime.threads import fitting

FLOOR = 1e-2
"""Errors are relative to a tensor's own largest element, but to no less than this part of what is usual for its kind.

Some tensors are zero but for rounding (the gradient of a key's bias in attention, or of a scalar whose terms cancel):
their own largest element is noise.
"""


class VerificationError(PlanError):
    """The sharded program computes something else than the unsharded one."""


@dataclass(frozen=True, slots=True)
class Check:
    """One value of the sharded program, compared.

    Parameters
    ----------
    value
        Its name.
    role
        "output", "state" (its next value) or the value's kind, such as "gradient".
    layout
        The layout of the register that was compared.
    producer
        The operation that filled the register.
    error
        Largest absolute difference over `scale`; infinite where one side is not a number or not finite.
    scale
        What the error is relative to.
    passed
        Whether it is within the tolerance.
    detail
        What is wrong where there is no difference to speak of: replicas that differ among themselves.
    """

    value: str
    role: str
    type: str
    layout: Layout
    producer: str
    error: float
    scale: float
    passed: bool
    detail: str = ""

    def __str__(self) -> str:
        what = f"{self.role} {self.value}: {self.type} {self.layout} made by {self.producer}, error {self.error:.2e}"
        return f"{what} ({self.detail.rstrip('.')})" if self.detail else what


@dataclass(frozen=True, slots=True)
class Verification:
    """All comparisons of one run, in program order."""

    graph: str
    mesh: str
    rtol: float
    checks: tuple[Check, ...]
    first_wrong: Check | None = None

    @property
    def passed(self) -> bool:
        """Every value is within the tolerance."""
        return all(check.passed for check in self.checks)

    @property
    def worst(self) -> Check | None:
        """The comparison with the largest error."""
        return max(self.checks, key=lambda check: check.error, default=None)

    def raise_if_wrong(self) -> Verification:
        """Itself, or `VerificationError` naming the first wrong value of the program."""
        if not self.passed:
            raise VerificationError(str(self))
        return self

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        if self.passed:
            worst = self.worst
            detail = f"; the largest error is {worst.error:.1e} ({worst.role} {worst.value})" if worst else ""
            count = f"{len(self.checks)} values equal" if len(self.checks) != 1 else "1 value equals"
            return f"{self.graph} on {self.mesh}: {count} the unsharded run within {self.rtol:g}{detail}."
        wrong = [check for check in self.checks if not check.passed]
        first = self.first_wrong or wrong[0]
        return (
            f"{self.graph} on {self.mesh}: {len(wrong)} of {len(self.checks)} values differ from the unsharded run by "
            f"more than {self.rtol:g} of their scale. The first wrong one of the program is {first}; look at that "
            "operation's signature."
        )


def verify(
    graph: Graph,
    physical: PhysicalPlan,
    seed: int = 0,
    *,
    backend: Backend | None = None,
    communicator: Communicator | None = None,
    rtol: float = 1e-9,
    floating: str | None = "f64",
    keep_gradients: bool = True,
    feeds: Mapping[str, Any] | None = None,
) -> Verification:
    """Run one step sharded and unsharded and compare every output, next state and gradient.

    Parameters
    ----------
    graph, physical
        The program, and a plan for it.
    seed
        Inputs and state are drawn with it (`drawn_warm`).
    backend, communicator
        As for `Executor`. Under several processes every one of them must call this.
    rtol
        Tolerance, relative to the largest element of a value (see `FLOOR`). Integers and booleans must be equal.
    floating
        Element type of the run.
    keep_gradients
        Compare, besides outputs and state, the gradients that the optimizer reads.
    feeds
        Global arrays by name instead of drawn ones.

    Returns
    -------
    Verification
        With all comparisons. If one is wrong, the program is run again with everything kept, to find where it began.
    """
    if not graph.outputs and not graph.updates:
        raise PlanError(f"graph {graph.name} has no outputs and updates no state: there is nothing to verify.")
    arrays = drawn_warm(graph, seed, floating) if feeds is None else dict(feeds)
    gradients = _gradients(graph) if keep_gradients else ()
    first = None
    with fitting(physical):
        checks = _compare(graph, physical, arrays, gradients, backend, communicator, rtol, floating)
        if not all(check.passed for check in checks):
            made = [name for node in graph.nodes for name in node.outputs]
            full = _compare(graph, physical, arrays, made, backend, communicator, rtol, floating)
            first = next((check for check in full if not check.passed), None)
    return Verification(graph.name, str(physical.mesh), rtol, tuple(checks), first)


def drawn_warm(graph: Graph, seed: int = 0, floating: str | None = "f64") -> dict[str, Any]:
    """Inputs and state as after some steps: optimizer state that starts at zero is drawn from uniform(0.5, 1.5).

    From zero, Adam's first update of an element is the sign of its gradient, whatever its size: rounding noise in a
    gradient that is zero but for rounding would come out as a whole step.
    """
    arrays = draw_all(graph, seed, floating)
    for name in graph.state:
        value = graph.values[name]
        if value.kind == "optimizer" and value.dtype in FLOATING and not arrays[name].any():
            arrays[name] = generator(name, seed).uniform(0.5, 1.5, value.shape).astype(arrays[name].dtype)
    return arrays


def _gradients(graph: Graph) -> tuple[str, ...]:
    """Gradients that nodes of the optimizer read, in program order."""
    read = {name for node in graph.nodes if node.phase == "optimizer" for name in node.inputs}
    return tuple(name for name, value in graph.values.items() if value.kind == "gradient" and name in read)


def _compare(
    graph: Graph,
    physical: PhysicalPlan,
    arrays: Mapping[str, Any],
    values: Sequence[str],
    backend: Backend | None,
    communicator: Communicator | None,
    rtol: float,
    floating: str | None,
) -> list[Check]:
    """Checks in the order in which the program fills the registers."""
    wanted = set(values)
    registers = [register.number for register in physical.registers if register.value in wanted]
    executor = Executor(physical, backend, communicator, floating=floating, keep=registers)
    result = executor.run(
        executor.place({value: arrays[value] for value in graph.state if value in physical.sources}),
        executor.place({value: arrays[value] for value in graph.inputs if value in physical.sources}),
    )
    expected = evaluate(graph, arrays, floating=floating, keep=[name for name in values if name in graph.values])
    states = set(physical.updates)
    compared: list[tuple[str, str, int, Local]] = []  # value, role, register, local arrays
    for number in registers:
        value = physical.registers[number].value
        compared.append((value, graph.values[value].kind, number, result.kept[number]))
    compared.extend((value, "output", number, result.outputs[value]) for value, number in physical.outputs.items())
    compared.extend((value, "state", number, result.state[value]) for value, number in physical.updates.items())
    missing = [f"output {name}" for name in graph.outputs if name not in physical.outputs]
    missing += [f"update of {name}" for name in graph.updates if name not in states]
    if missing:
        raise PlanError(
            f"the plan lacks the {', '.join(missing)} of graph {graph.name}; it was made for another graph."
        )
    filled = _filled(physical)
    compared.sort(key=lambda item: filled[item[2]][0])
    found = [
        (*_collected(executor, local, number), numpy.asarray(_host(expected[value], executor)))
        for value, _, number, local in compared
    ]
    kinds = [graph.values[value].kind if role == "state" else role for value, role, _, _ in compared]
    references = [reference for *_, reference in found]
    usual = _usual_sizes(kinds, references)
    # A kind of which there are scalars only, such as the gradient of one scale, is measured by all there is.
    given = [numpy.asarray(_host(array, executor)) for array in arrays.values()]
    typical = _usual_sizes([""] * (len(references) + len(given)), [*references, *given]).get("", 0.0)
    checks = []
    for (value, role, number, _), kind, (array, detail, reference) in zip(compared, kinds, found):
        difference, scale = _difference(array, reference, FLOOR * usual.get(kind, typical))
        register = physical.registers[number]
        tolerance = rtol if reference.dtype.kind == "f" else 0.0
        checks.append(
            Check(
                value,
                role,
                str(register.type),
                register.layout,
                filled[number][1],
                difference,
                scale,
                difference <= tolerance,
                detail,
            )
        )
    return checks


def _collected(executor: Executor, local: Local, number: int) -> tuple[Any, str]:
    """The global array, or None and what is wrong with the shards."""
    try:
        return executor.collect(local, number), ""
    except (LayoutError, PlanError) as error:
        return None, str(error)


def _host(array: Any, executor: Executor) -> Any:
    return array if isinstance(array, (numpy.ndarray, numpy.generic)) else executor.backend.to_host(array)


def _filled(physical: PhysicalPlan) -> dict[int, tuple[int, str]]:
    """Register -> (when it is filled, by what)."""
    filled = dict.fromkeys(physical.sources.values(), (-1, "the start"))
    for index, operation in enumerate(physical.operations):
        if isinstance(operation, Compute):
            name = f"node {operation.node} ({operation.op})"
        else:
            name = f"{operation.kind} along {physical.mesh.names[operation.mesh_axis]}"
        for number in operation.outputs:
            filled[number] = (index, name)
    return filled


def _usual_sizes(kinds: Sequence[str], references: Sequence[Any]) -> dict[str, float]:
    """Per kind the upper quartile of the tensors' largest elements, scalars apart."""
    sizes: dict[str, list[float]] = {}
    for kind, reference in zip(kinds, references):
        if reference.size and reference.ndim and reference.dtype.kind == "f":
            sizes.setdefault(kind, []).append(_largest(reference))
    return {kind: sorted(found)[(3 * (len(found) - 1) + 3) // 4] for kind, found in sizes.items()}


def _largest(array: Any) -> float:
    finite = array[numpy.isfinite(array)]
    return float(numpy.abs(finite).max()) if finite.size else 0.0


def _difference(array: Any, reference: Any, floor: float) -> tuple[float, float]:
    """Largest difference over the scale, and the scale; non-finite elements must be the same ones on both sides."""
    if array is None or array.shape != reference.shape:
        return float("inf"), 1.0
    if reference.dtype.kind != "f":
        return (0.0 if numpy.array_equal(array, reference) else float("inf")), 1.0
    if numpy.isnan(reference).any():
        return float("inf"), 1.0  # equal or not, it would prove nothing
    same = array == reference
    if same.all():
        return 0.0, 1.0
    if not (numpy.isfinite(array) & numpy.isfinite(reference))[~same].all():
        return float("inf"), 1.0
    scale = max(_largest(reference), floor) or 1.0
    return float(numpy.abs(array[~same] - reference[~same]).max()) / scale, scale
