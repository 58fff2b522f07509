"""Every differentiable operator against PyTorch on its own cases: outputs and gradients to float64 round-off.

The table is `torch_table.TABLE`; an operator that is added to the registry fails here until it has a counterpart there,
or a reason why there is none.
"""

import numpy
import pytest
from operator_programs import check_against_torch

from sbp.dtype import is_floating
from sbp.operator import REGISTRY
from sbp.trial import draw_inputs

pytest.importorskip("torch")

from own_operators import OWN
from torch_table import REASONS, TABLE

OPERATORS = [name for name in OWN if REGISTRY[name].differentiable]
# Further outputs of these only serve the backward pass.
FIRST_OUTPUT_ONLY = {"attention", "masked_attention"}


def test_every_differentiable_operator_has_a_counterpart_or_a_reason():
    known = set(TABLE) | set(REASONS)
    assert not set(TABLE) & set(REASONS)
    assert not set(OPERATORS) - known, "add the function of PyTorch to tests/torch_table.py, or why there is none"
    assert not known - set(OPERATORS), "these are no differentiable operators any more"
    assert all(len(reason) > 20 for reason in REASONS.values())


@pytest.mark.parametrize("name, index", [
    (name, index) for name in OPERATORS if name in TABLE for index in range(len(REGISTRY[name].cases))
])  # fmt: skip
def test_equals_pytorch(name, index):
    op = REGISTRY[name]
    case = op.cases[index]
    inputs = draw_inputs(op, case, numpy.random.default_rng([index, len(name)]))
    if not any(is_floating(kind.dtype) for kind in (*case.types, *op.infer(case.types, case.attributes))):
        pytest.skip("integers only; nothing to differentiate")

    def function(*xs):
        made = op(*xs, **case.attributes)
        return made[0] if name in FIRST_OUTPUT_ONLY else made

    check_against_torch(function, lambda *xs: TABLE[name](*xs, **case.attributes), *inputs)
