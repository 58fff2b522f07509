"""Every operator that has a gradient, on every one of its cases, against central differences."""

import numpy
import pytest
from operator_programs import Program, close

from sbp.dtype import is_floating
from sbp.operator import REGISTRY
from sbp.trial import draw_inputs

# Their gradient is that of the composite they are part of, which tests of losses check.
PART_OF_A_COMPOSITE = {"log_probability"}

CASES = [
    (name, index)
    for name in REGISTRY
    for index, case in enumerate(REGISTRY[name].cases)
    if REGISTRY[name].differentiable
    and name not in PART_OF_A_COMPOSITE
    and any(is_floating(kind.dtype) for kind in case.types)
]


@pytest.mark.parametrize("name, index", CASES, ids=[f"{name}-{index}" for name, index in CASES])
def test_equals_central_differences(name, index):
    op = REGISTRY[name]
    case = op.cases[index]
    inputs = draw_inputs(op, case, numpy.random.default_rng(11))
    program = Program(lambda *xs: op(*xs, **case.attributes), *inputs)
    if program.loss is None:
        return  # integers come out, and nothing differentiable
    for found, expected in zip(program.gradient(), program.differences()):
        close(found, expected, 1e-6)
