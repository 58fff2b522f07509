"""LAMB against its formulas, Adafactor and Muon against torch.optim."""

import numpy
import pytest
from operator_programs import Program

from sbp.errors import RuleError
from sbp.ops import library as ops

torch = pytest.importorskip("torch")

RNG = numpy.random.default_rng(14)
SHAPES = [(6, 4), (4, 6), (5,)]


def grads(shape):
    rng = numpy.random.default_rng(15)
    return [rng.standard_normal(shape) * 10.0**-k for k in range(4)]


def stepped(function, parameter, state):
    """Parameters after every step of `function(parameter, grad, *state, step)`."""
    found = []
    for step, grad in enumerate(grads(parameter.shape), 1):
        made = Program(function, parameter, grad, *state, numpy.asarray(step), differentiate=False).forward()
        parameter, state = made[0], made[1:]
        found.append(parameter)
    return found


def by_torch(make, parameter):
    parameter = torch.nn.Parameter(torch.from_numpy(parameter.copy()))
    optimizer = make([parameter])
    found = []
    for grad in grads(tuple(parameter.shape)):
        parameter.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        found.append(parameter.detach().numpy().copy())
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adafactor(shape, decay):
    start = RNG.standard_normal(shape)
    state = [numpy.zeros((*shape[:-1], 1)), numpy.zeros((1, *shape[1:]))] if len(shape) > 1 else [numpy.zeros(shape)]

    def function(parameter, grad, *rest):
        new, variances = ops.adafactor_update(parameter, grad, rest[:-1], rest[-1], lr=0.05, weight_decay=decay)
        return (new, *variances)

    expected = by_torch(
        lambda p: torch.optim.Adafactor(p, lr=0.05, weight_decay=decay, eps=(2**-23, 1e-3), foreach=False), start
    )
    for found, wanted in zip(stepped(function, start, state), expected):
        numpy.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lamb(shape):
    start = RNG.standard_normal(shape)
    zeros = numpy.zeros(shape)
    options = {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    found = stepped(lambda p, g, m, v, t: ops.lamb_update(p, g, m, v, t, **options), start, [zeros, zeros])
    parameter, first, second = start, zeros, zeros
    for step, (grad, mine) in enumerate(zip(grads(shape), found), 1):
        first = 0.8 * first + 0.2 * grad
        second = 0.95 * second + 0.05 * grad**2
        direction = (first / (1 - 0.8**step)) / (numpy.sqrt(second / (1 - 0.95**step)) + 1e-6) + 0.1 * parameter
        ratio = numpy.linalg.norm(parameter) / numpy.linalg.norm(direction)
        parameter = parameter - 0.05 * ratio * direction
        numpy.testing.assert_allclose(mine, parameter, rtol=1e-10)


def test_lamb_of_a_parameter_of_zeros_moves_by_the_direction():
    zeros = numpy.zeros(4)
    grad = numpy.ones(4)
    made = Program(ops.lamb_update, zeros, grad, zeros, zeros, numpy.asarray(1), differentiate=False).forward()
    numpy.testing.assert_allclose(made[0], numpy.full(4, -1e-3), rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("match", [False, True])
def test_muon(shape, match):
    start = RNG.standard_normal(shape)
    found = stepped(lambda p, g, b, t: ops.muon_update(p, g, b, lr=0.1, match_adamw=match), start, [numpy.zeros(shape)])
    adjust = "match_rms_adamw" if match else "original"
    expected = by_torch(lambda p: torch.optim.Muon(p, lr=0.1, weight_decay=0.1, adjust_lr_fn=adjust), start)
    for mine, wanted in zip(found, expected):
        # PyTorch orthogonalizes in bfloat16: 8 bits, amplified by the iterations
        numpy.testing.assert_allclose(mine, wanted, atol=0.03 * len(expected))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_orthogonalized(shape):
    x = RNG.standard_normal(shape)
    found = Program(ops.orthogonalized, x).forward()[0]
    values = numpy.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.3
    left, _, right = numpy.linalg.svd(x, full_matrices=False)
    aligned = left.T @ found @ right.T
    numpy.testing.assert_allclose(aligned, numpy.diag(numpy.diag(aligned)), atol=1e-12)


def test_refuses():
    x = numpy.zeros((2, 3, 4))
    with pytest.raises(RuleError, match="matrix"):
        Program(ops.orthogonalized, x)
    with pytest.raises(RuleError, match="two variances"):
        Program(lambda p, g, t: ops.adafactor_update(p, g, (p,), t), x, x, numpy.asarray(1))
