"""How the loss of a whole batch follows from those of its micro-batches, found in the plan's program.

A mean over equally many elements is the mean of the micro-batches' means, and a sum is their sum. A mean over what
counts only (targets that are not ignored) is neither: the means must be weighted by their counts, of which the sum is
known when the last micro-batch has been counted. Gradients are linear in the loss and are added up the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sbp.errors import PipelineError
from sbp.layout import Broadcast
from sbp.planner.physical import Box, Compute, PhysicalPlan

MEAN, SUM, COUNTED = "mean", "sum", "counted"

_PASS_ON = ("neg", "cast", "reshape", "squeeze", "unsqueeze")
"""Operators whose result is a mean, or a sum, where their first operand is one."""


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What a micro-batch weighs in the step.

    Attributes
    ----------
    kind
        `MEAN`: all weigh the same, and results are divided by their number. `SUM`: results are added up. `COUNTED`: a
        micro-batch weighs its count, and results are divided by the sum of counts.
    counts
        The registers that hold a micro-batch's count, the same number on every rank; empty unless counted.
    """

    kind: str
    counts: frozenset[int] = frozenset()

    def divisor(self, weights: Mapping[int, float], micro_batches: int) -> float:
        """What the weighted sum over all micro-batches is divided by; `weights` are those of the micro-batches."""
        if self.kind == SUM:
            return 1.0
        return math.fsum(weights.values()) if self.kind == COUNTED else float(micro_batches)


@dataclass(frozen=True, slots=True)
class _Term:
    kind: str
    shape: tuple[int, ...] = ()  # of what is summed
    count: str = ""  # the value that holds the count


def accumulation_of(physical: PhysicalPlan) -> Accumulation:
    """How micro-batches of this plan add up, from the first scalar output: the loss.

    Of a loss that is a sum of terms the counted one decides, else the mean: what stands beside it (an auxiliary loss of
    experts) is not linear in the batch anyway. A sum times one over a number of its elements is a mean.

    Raises
    ------
    PipelineError
        Terms that are means over different counts, or a mean over something that is not a count: of such losses no
        weights of micro-batches exist.
    """
    scalars = [number for number in physical.outputs.values() if not physical.registers[number].type.shape]
    made = {number: operation for operation in physical.operations for number in operation.outputs}
    reader = _Reader(physical, made)
    term = reader.term(scalars[0]) if scalars else None
    if term is None or term.kind == MEAN:
        return Accumulation(MEAN)
    if term.kind == SUM:
        return Accumulation(SUM)
    counts = {
        register.number
        for register in physical.registers
        if register.value == term.count and all(isinstance(sbp, Broadcast) for sbp in register.layout)
    }
    return Accumulation(COUNTED, frozenset(counts))


class _Reader:
    """Reads the program back from the loss."""

    def __init__(self, physical: PhysicalPlan, made: Mapping[int, Box | Compute]) -> None:
        self.physical, self.made = physical, made
        self.fixed = {  # what depends on the inputs alone: no state, nothing learned
            number for number in physical.sources.values() if physical.registers[number].kind == "input"
        }
        for operation in physical.operations:
            if operation.inputs and self.fixed.issuperset(operation.inputs):
                self.fixed.update(operation.outputs)

    def term(self, number: int) -> _Term | None:
        """What a scalar register is over the batch; None if that is not known."""
        operation = self.made.get(number)
        while operation is not None and (isinstance(operation, Box) or operation.op in _PASS_ON):
            number = operation.inputs[0]
            operation = self.made.get(number)
        if not isinstance(operation, Compute):
            return None
        if operation.op == "mean":
            return _Term(MEAN)
        if operation.op == "sum":
            return _Term(SUM, self.physical.registers[operation.inputs[0]].type.shape)
        if operation.op == "scale":
            return _scaled(self.term(operation.inputs[0]), float(operation.attributes["factor"]))
        if operation.op == "add":
            return self.added([self.term(n) for n in operation.inputs])
        if operation.op == "div" and operation.inputs[1] in self.fixed:
            return self.divided(operation)
        return None

    def added(self, terms: list[_Term | None]) -> _Term | None:
        found = [term for term in terms if term is not None]
        counted = {term.count for term in found if term.kind == COUNTED}
        if len(counted) > 1:
            raise PipelineError(
                f"the loss adds means over different counts ({', '.join(sorted(counted))}): over micro-batches no "
                "weights make both right. Use one micro-batch, or one count."
            )
        for kind in (COUNTED, MEAN):
            for term in found:
                if term.kind == kind:
                    return term
        return found[0] if found and len(found) == len(terms) else None

    def divided(self, operation: Compute) -> _Term:
        above, below = map(self.term, operation.inputs)
        value = self.physical.registers[operation.inputs[1]].value
        if above is None or below is None or above.kind != SUM or below.kind != SUM:
            raise PipelineError(
                f"{operation.node}: the loss is divided by {value}, which depends on the batch but is not a count that "
                "adds up over micro-batches. Divide a sum by a sum over the inputs, or use one micro-batch."
            )
        return _Term(COUNTED, count=value)


def _scaled(term: _Term | None, factor: float) -> _Term | None:
    if term is None or term.kind != SUM:
        return term
    sizes = [math.prod(term.shape[:stop]) for stop in range(1, len(term.shape) + 1)]
    mean = any(size and math.isclose(factor, 1 / size, rel_tol=1e-6) for size in sizes)
    return _Term(MEAN) if mean else term
