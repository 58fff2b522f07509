"""Every operator that has a gradient, on every one of its cases, against central differences."""

import numpy
import pytest
from operator_programs import Program, close

from sbp.autodiff import backward
from sbp.dtype import is_floating
from sbp.errors import GraphError, RuleError
from sbp.operator import REGISTRY, TensorType
from sbp.ops import library as ops
from sbp.trace import GraphBuilder
from sbp.trial import draw_inputs

# Their gradient is the whole one of the composite they are part of, which other tests check; detach means to have none.
EXCEPT = {"log_probability", "batch_norm_apply", "detach"}
# Further outputs of these only serve the backward pass.
FIRST_OUTPUT_ONLY = {"attention", "masked_attention"}

CASES = [
    (name, index)
    for name in REGISTRY
    for index, case in enumerate(REGISTRY[name].cases)
    if REGISTRY[name].differentiable and name not in EXCEPT and any(is_floating(kind.dtype) for kind in case.types)
]


@pytest.mark.parametrize("name, index", CASES, ids=[f"{name}-{index}" for name, index in CASES])
def test_equals_central_differences(name, index):
    op = REGISTRY[name]
    case = op.cases[index]
    inputs = draw_inputs(op, case, numpy.random.default_rng(11))

    def function(*xs):
        made = op(*xs, **case.attributes)
        return made[0] if name in FIRST_OUTPUT_ONLY else made

    try:
        program = Program(function, *inputs)
    except GraphError as error:
        if "has no gradient here" in str(error):
            pytest.skip(str(error))
        raise
    if program.loss is None:
        return  # integers come out, and nothing differentiable
    for found, expected in zip(program.gradient(), program.differences()):
        close(found, expected, 1e-6)


NAMES = sorted({name for name, _ in CASES} | {"log_probability"})
# Families that take operands of different floating types.
MIXING = ("activation", "comparison", "elementwise", "embedding", "loss", "reduction", "views")
HALVES = [("all", name) for name in NAMES]
HALVES += [
    (half, name)
    for half in ("first", "last")
    for name in NAMES
    if REGISTRY[name].kernel.__module__.rpartition(".")[2] in MIXING
]


@pytest.mark.parametrize("half, name", HALVES)
def test_gradients_have_the_types_of_their_inputs(half, name):
    """With floating inputs in bf16, all of them or one: `backward` raises if a gradient's type is another."""
    op = REGISTRY[name]
    for case in op.cases:
        floating = [index for index, kind in enumerate(case.types) if is_floating(kind.dtype)]
        chosen = {"all": floating, "first": floating[:1], "last": floating[-1:]}[half]
        kinds = [TensorType(kind.shape, "bf16") if index in chosen else kind for index, kind in enumerate(case.types)]
        builder = GraphBuilder()
        sources = [builder.source(f"x{index}", kind) for index, kind in enumerate(kinds)]
        try:
            made = op(*sources, **case.attributes)
        except RuleError:
            continue  # the operator does not take these types together
        out = made[0] if isinstance(made, tuple) else made
        if is_floating(out.dtype):
            try:
                with builder:
                    backward(builder, ops.sum(out), [sources[index] for index in floating])
            except GraphError as error:
                assert "has no gradient here" in str(error)
