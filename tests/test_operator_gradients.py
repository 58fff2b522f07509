"""Every operator that has a gradient, on every one of its cases, against central differences."""

import numpy
import pytest
from operator_programs import Program, close

from sbp.dtype import is_floating
from sbp.errors import GraphError
from sbp.operator import REGISTRY
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
