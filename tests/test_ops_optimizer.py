"""Optimizer updates against torch.optim over several steps."""

import numpy
import pytest

from sbp.errors import RuleError
from sbp.operator import REGISTRY, parse_type
from sbp.ops import library as ops

torch = pytest.importorskip("torch")

RNG = numpy.random.default_rng(12)
START = RNG.standard_normal((4, 5))
GRADS = [RNG.standard_normal((4, 5)) * 10.0**-k for k in range(5)]
ZERO = numpy.zeros_like(START)


def theirs(make):
    parameter = torch.nn.Parameter(torch.from_numpy(START.copy()))
    optimizer = make([parameter])
    found = []
    for grad in GRADS:
        parameter.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        found.append(parameter.detach().numpy().copy())
    return found


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_sgd(decay):
    parameter = START
    for grad, expected in zip(GRADS, theirs(lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=decay))):
        parameter = ops.sgd_update(parameter, grad, lr=0.1, weight_decay=decay)
        numpy.testing.assert_allclose(parameter, expected, rtol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_momentum(options):
    parameter, buffer = START, ZERO
    for step, (grad, expected) in enumerate(zip(GRADS, theirs(lambda p: torch.optim.SGD(p, lr=0.1, **options))), 1):
        parameter, buffer = ops.momentum_update(parameter, grad, buffer, numpy.asarray(step), lr=0.1, **options)
        numpy.testing.assert_allclose(parameter, expected, rtol=1e-13)


@pytest.mark.parametrize("name, theirs_of", [("adam_update", torch.optim.Adam), ("adamw_update", torch.optim.AdamW)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("step_type", ["int64", "float32"])
def test_adam(name, theirs_of, decay, step_type):
    parameter, first, second = START, ZERO, ZERO
    options = {"lr": 0.01, "eps": 1e-6, "weight_decay": decay}
    expected_steps = theirs(lambda p: theirs_of(p, betas=(0.8, 0.95), **options))
    for step, (grad, expected) in enumerate(zip(GRADS, expected_steps), 1):
        count = numpy.asarray(step, step_type)
        parameter, first, second = getattr(ops, name)(
            parameter, grad, first, second, count, beta1=0.8, beta2=0.95, **options
        )
        numpy.testing.assert_allclose(parameter, expected, rtol=1e-12)


def test_gradients_of_lower_precision_leave_the_state_in_its_own():
    kinds = [parse_type(text) for text in ("f32[4]", "bf16[4]", "f32[4]", "f32[4]", "i64[]")]
    assert [str(kind) for kind in REGISTRY["adamw_update"].infer(kinds, {})] == ["f32[4]"] * 3
    single = [array.astype("float32") for array in (START, ZERO, ZERO)]
    made = ops.adamw_update(single[0], GRADS[0].astype("float16"), *single[1:], numpy.asarray(1))
    assert [array.dtype for array in made] == [numpy.float32] * 3
    parameter, buffer = ops.momentum_update(single[0], GRADS[0].astype("float16"), single[1], lr=0.1)
    assert parameter.dtype == buffer.dtype == numpy.float32


def test_dampening_needs_the_step():
    with pytest.raises(RuleError, match="step"):
        ops.momentum_update(START, GRADS[0], ZERO, lr=0.1, dampening=0.5)


def test_refuses_shapes_that_differ():
    with pytest.raises(RuleError, match="one shape"):
        REGISTRY["sgd_update"].infer([parse_type("f32[4]"), parse_type("f32[1]")], {"lr": 0.1})
