"""Runs small programs of operators, with gradients, in float64; for the tests of operator families."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy

from sbp.autodiff import backward
from sbp.dtype import is_floating
from sbp.graph import Graph
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder


def kind_of(array: numpy.ndarray) -> str:
    """The element type an array stands for; floating ones are traced as f64."""
    return "f64" if array.dtype.kind == "f" else {"int64": "i64", "int32": "i32", "bool": "bool"}[str(array.dtype)]


class Program:
    """A function of symbols, traced for arrays: its outputs, and the gradients of sum(outputs * weights).

    The weights are random, so that no gradient is right by symmetry.
    """

    def __init__(self, function: Callable, *arrays: Any, differentiate: bool = True) -> None:
        self.arrays = [numpy.asarray(array) for array in arrays]
        builder = GraphBuilder("program")
        sources = [
            builder.source(f"x{i}", TensorType(array.shape, kind_of(array))) for i, array in enumerate(self.arrays)
        ]
        rng = numpy.random.default_rng(7)
        self.feeds = {f"x{i}": array for i, array in enumerate(self.arrays)}
        with builder:
            made = function(*sources)
            outputs = list(made) if isinstance(made, (tuple, list)) else [made]
            loss = None
            for i, out in enumerate(outputs):
                if is_floating(out.dtype):
                    weight = builder.source(f"w{i}", out.value.type)
                    self.feeds[f"w{i}"] = rng.standard_normal(out.shape)
                    term = ops.sum(ops.mul(out, weight))
                    loss = term if loss is None else ops.add(loss, term)
        wanted = [source for source in sources if is_floating(source.dtype)]
        self.gradients: dict[str, str] = {}
        if differentiate and loss is not None and wanted:
            self.gradients = {name: symbol.name for name, symbol in backward(builder, loss, wanted).items()}
        self.outputs = [out.name for out in outputs]
        self.loss = loss.name if loss is not None else None
        self.floating = [source.name for source in wanted]
        results = list(dict.fromkeys([*self.outputs, *self.gradients.values(), *([self.loss] if self.loss else [])]))
        self.graph: Graph = builder.finish([builder.symbols[name] for name in results])

    def run(self, feeds: Mapping[str, Any] | None = None) -> dict[str, numpy.ndarray]:
        """All results by value name."""
        with numpy.errstate(all="ignore"):
            return evaluate(self.graph, {**self.feeds, **(feeds or {})})

    def forward(self) -> list[numpy.ndarray]:
        """The outputs."""
        found = self.run()
        return [found[name] for name in self.outputs]

    def gradient(self) -> list[numpy.ndarray]:
        """The gradient of every floating input, zeros where there is none."""
        found = self.run()
        return [
            found[self.gradients[name]] if name in self.gradients else numpy.zeros(self.feeds[name].shape)
            for name in self.floating
        ]

    def differences(self, step: float = 1e-6) -> list[numpy.ndarray]:
        """The same by central differences."""
        result = []
        for name in self.floating:
            base = self.feeds[name]
            found = numpy.zeros(base.shape)
            for index in numpy.ndindex(*base.shape):
                values = []
                for sign in (1, -1):
                    moved = base.copy()
                    moved[index] += sign * step
                    values.append(self.run({name: moved})[self.loss])
                found[index] = (values[0] - values[1]) / (2 * step)
            result.append(found)
        return result


def check_against_torch(function: Callable, reference: Callable, *arrays: Any, tolerance: float = 1e-12) -> None:
    """Outputs and gradients equal those of a function of torch tensors (float64)."""
    import torch

    program = Program(function, *arrays)
    tensors = [torch.from_numpy(numpy.array(array)) for array in program.arrays]
    leaves = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    made = reference(*tensors)
    expected = list(made) if isinstance(made, (tuple, list)) else [made]
    found = program.forward()
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected):
        close(mine, theirs.detach().numpy(), tolerance)
    terms = [
        (out * torch.from_numpy(numpy.asarray(program.feeds[f"w{i}"]))).sum()
        for i, out in enumerate(expected)
        if out.is_floating_point() and out.requires_grad
    ]
    if not terms:
        return
    theirs = torch.autograd.grad(sum(terms), leaves, allow_unused=True)
    for mine, gradient in zip(program.gradient(), theirs):
        close(mine, numpy.zeros(mine.shape) if gradient is None else gradient.numpy(), tolerance)


def close(found: Any, expected: Any, tolerance: float) -> None:
    """Shapes equal, and numbers up to a tolerance relative to the largest one."""
    found, expected = numpy.asarray(found), numpy.asarray(expected)
    assert found.shape == expected.shape
    if expected.dtype.kind != "f":
        numpy.testing.assert_array_equal(found, expected)
        return
    finite = numpy.abs(expected[numpy.isfinite(expected)])
    numpy.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * max(1.0, finite.max(initial=0)))
