"""A planned step as one function of autograd: forward runs the plan's forward part, backward its backward part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from sbp.runtime.torch_program import ExportError, Table


class Runs(Protocol):
    """What knows how to run the parts."""

    def run_forward(self, placed: Mapping[str, Any], keep: bool) -> tuple[tuple[Any, ...], Table | None]:
        """Outputs in order, and the table to go on from."""

    def run_backward(self, table: Table, seed: Any, wanted: Mapping[str, bool]) -> dict[str, Any]:
        """Gradients of the wanted parameters as DTensors, from that of the first output."""


class PlannedStep(torch.autograd.Function):
    """`PlannedStep.apply(runs, inputs by name, names of the parameters, *parameters)`."""

    @staticmethod
    def forward(ctx: Any, runs: Runs, placed: Mapping[str, Any], names: list[str], *parameters: Any) -> Any:
        """The outputs; all but the first, the loss, have no gradient."""
        made, table = runs.run_forward(placed, keep=True)
        ctx.runs, ctx.names, ctx.table = runs, names, table
        ctx.mark_non_differentiable(*made[1:])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """The parameters' gradients."""
        if ctx.table is None:
            raise ExportError("backward runs once for every forward; run forward again.")
        table, ctx.table = ctx.table, None
        wanted = dict(zip(ctx.names, ctx.needs_input_grad[3:]))
        found = ctx.runs.run_backward(table, grads[0], wanted)
        return (None, None, None, *(found.get(name) for name in ctx.names))
