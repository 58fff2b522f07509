"""Optimizers with PyTorch's names, defaults and formulas, as nodes of the step that they add to a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sbp.errors import GraphError
from sbp.graph import Initial
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder, Symbol

STEP = "optimizer.step"
"""Name of the state value that counts the steps that were made."""


class Optimizer(Protocol):
    """Anything that adds the update of parameters to a graph."""

    def apply(self, builder: GraphBuilder, parameters: Sequence[Symbol], gradients: Mapping[str, Symbol]) -> None:
        """Add update nodes, in the phase "optimizer", and the optimizer's own state.

        Parameters
        ----------
        parameters
            State values to update; each becomes an update of the graph.
        gradients
            Gradients by parameter name, of the parameters' types.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum optionally (`torch.optim.SGD`).

    State, with momentum only: `<parameter>.momentum_buffer`; with dampening also the step counter.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and (self.momentum <= 0 or self.dampening != 0):
            raise GraphError("SGD: nesterov needs a momentum above 0 and no dampening.")

    def apply(self, builder: GraphBuilder, parameters: Sequence[Symbol], gradients: Mapping[str, Symbol]) -> None:
        """See `Optimizer.apply`."""
        step = (_counted_step(builder),) if self.momentum and self.dampening else ()
        for parameter in parameters:
            gradient = gradients[parameter.name]
            with builder, builder.at("optimizer", _module(parameter)):
                if not self.momentum:
                    new = ops.sgd_update(parameter, gradient, lr=self.lr, weight_decay=self.weight_decay)
                    builder.update(parameter, new)
                    continue
                buffer = _state(builder, parameter, "momentum_buffer")
                new, new_buffer = ops.momentum_update(
                    parameter,
                    gradient,
                    buffer,
                    *step,
                    lr=self.lr,
                    momentum=self.momentum,
                    dampening=self.dampening,
                    nesterov=self.nesterov,
                    weight_decay=self.weight_decay,
                )
                builder.update(parameter, new)
                builder.update(buffer, new_buffer)


@dataclass(frozen=True)
class Adam:
    """Adam (`torch.optim.Adam`; Kingma and Ba 2014, arXiv:1412.6980); weight decay is added to the gradient.

    State: `<parameter>.exp_avg`, `<parameter>.exp_avg_sq` in the parameter's type, and one step counter for all.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    operator = "adam_update"

    def __post_init__(self) -> None:
        _check(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise GraphError(
                f"{type(self).__name__}: betas must be two numbers of at least 0 and below 1, got {self.betas}."
            )

    def apply(self, builder: GraphBuilder, parameters: Sequence[Symbol], gradients: Mapping[str, Symbol]) -> None:
        """See `Optimizer.apply`."""
        step = _counted_step(builder)
        update = getattr(ops, self.operator)
        for parameter in parameters:
            with builder, builder.at("optimizer", _module(parameter)):
                first, second = (_state(builder, parameter, label) for label in ("exp_avg", "exp_avg_sq"))
                new = update(
                    parameter,
                    gradients[parameter.name],
                    first,
                    second,
                    step,
                    lr=self.lr,
                    beta1=self.betas[0],
                    beta2=self.betas[1],
                    eps=self.eps,
                    weight_decay=self.weight_decay,
                )
                for state, next_value in zip((parameter, first, second), new):
                    builder.update(state, next_value)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (`torch.optim.AdamW`; Loshchilov and Hutter 2017, arXiv:1711.05101)."""

    weight_decay: float = 1e-2

    operator = "adamw_update"


def _check(optimizer: object, **positive: float) -> None:
    for name, value in positive.items():
        if not value >= 0:
            raise GraphError(f"{type(optimizer).__name__}: {name} must be at least 0, got {value}.")


def _module(parameter: Symbol) -> str:
    return parameter.name.rpartition(".")[0]


def _state(builder: GraphBuilder, parameter: Symbol, label: str) -> Symbol:
    return builder.source(f"{parameter.name}.{label}", parameter.value.type, "optimizer", Initial("zeros", ()))


def _counted_step(builder: GraphBuilder) -> Symbol:
    """The number of this step, counted from 1, from the counter in the state."""
    step = builder.source(STEP, TensorType((), "i64"), "optimizer", Initial("zeros", ()))
    with builder, builder.at("optimizer"):
        new = ops.shift(step, amount=1)
    builder.update(step, new)
    return new


OPTIMIZERS: Mapping[str, Optimizer] = {"sgd": SGD(), "momentum": SGD(momentum=0.9), "adam": Adam(), "adamw": AdamW()}
"""By the names that the command line takes, with default settings."""


def optimizer_named(name: str | Optimizer) -> Optimizer:
    """An optimizer by its name; unknown names raise `GraphError`."""
    if not isinstance(name, str):
        return name
    if name.lower() not in OPTIMIZERS:
        raise GraphError(f"unknown optimizer {name!r}; known are {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[name.lower()]
