"""Every operator's kernel on torch tensors against its kernel on NumPy, on the operator's own example calls."""

import numpy
import pytest
from own_operators import OWN

from sbp.cuda.interface import BackendError
from sbp.dtype import is_floating
from sbp.operator import REGISTRY
from sbp.ops import library  # noqa: F401  registers all operators
from sbp.trial import draw_inputs

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")

from sbp.cuda.torch_backend import TorchBackend  # noqa: E402
from sbp.cuda.torch_types import torch_dtype  # noqa: E402

HALF = {"mean", "softmax", "gelu", "silu", "layer_norm", "rms_norm", "attention", "linear", "matmul", "add", "pow"}


def _inputs(op, case):
    rng = numpy.random.default_rng(3)
    drawn = draw_inputs(op, case, rng)
    return [numpy.array(a, numpy.float32 if is_floating(t.dtype) else a.dtype) for a, t in zip(drawn, case.types)]


def _tuple(made):
    return tuple(made) if isinstance(made, (tuple, list)) else (made,)


@pytest.mark.parametrize("name", OWN)
def test_kernels(name):
    op, backend = REGISTRY[name], TorchBackend()
    kernel = backend.kernel(name, op.kernel)
    assert op.cases
    for case in op.cases:
        inputs = _inputs(op, case)
        with numpy.errstate(all="ignore"):
            expected = _tuple(op.kernel(numpy, *inputs, **op.complete(case.attributes)))
        made = _tuple(kernel(backend.xp, *map(backend.from_host, inputs), **op.complete(case.attributes)))
        assert len(made) == len(expected)
        for kind, tensor, array in zip(op.infer(case.types, case.attributes), made, expected):
            assert tuple(tensor.shape) == kind.shape
            numpy.testing.assert_allclose(
                backend.to_host(tensor).astype(numpy.float64), numpy.asarray(array, numpy.float64), 2e-5, 2e-5
            )


def test_few_operators_need_the_host():
    """The rest would be copied from a GPU and back."""
    backend = TorchBackend()
    for name in OWN:
        op = REGISTRY[name]
        backend.kernel(name, op.kernel)(
            backend.xp,
            *map(backend.from_host, _inputs(op, op.cases[0])),
            **op.complete(op.cases[0].attributes),
        )
    assert backend.on_host <= {"resample", "resample_backward"}


@pytest.mark.parametrize("name", sorted(HALF))
def test_half_precision(name):
    """bf16 goes in, and what comes out is near the float32 result."""
    op, backend = REGISTRY[name], TorchBackend()
    for case in op.cases:
        if not any(is_floating(t.dtype) for t in case.types):
            continue
        tensors = [backend.from_host(array) for array in _inputs(op, case)]
        tensors = [t.bfloat16() if t.is_floating_point() else t for t in tensors]
        exact = [t.float().numpy() if t.is_floating_point() else t.numpy() for t in tensors]
        attributes = op.complete(case.attributes)
        with numpy.errstate(all="ignore"):
            expected = _tuple(op.kernel(numpy, *exact, **attributes))
        for tensor, array in zip(_tuple(backend.kernel(name, op.kernel)(backend.xp, *tensors, **attributes)), expected):
            scale = max(1.0, float(numpy.nanmax(numpy.abs(numpy.asarray(array)), initial=0)))
            numpy.testing.assert_allclose(tensor.float().numpy(), array, 2e-2, 2e-2 * scale)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv", [1, 2, 4])
def test_flash_kernels_are_the_operators(kv, causal):
    """Larger than the operators' examples, with grouped queries; forward's logsumexp feeds backward."""
    rng = numpy.random.default_rng(0)
    q, grad = (rng.standard_normal((2, 4, 9, 8)) for _ in range(2))
    k, v = (rng.standard_normal((2, kv, 9, 8)) for _ in range(2))
    backend = TorchBackend()
    attributes = {"causal": causal, "scale": None, "offset": 0}
    forward, backward = REGISTRY["attention"], REGISTRY["attention_backward"]
    expected = forward.kernel(numpy, q, k, v, **attributes)
    tensors = [backend.from_host(array) for array in (q, k, v)]
    made = backend.kernel("attention", forward.kernel)(backend.xp, *tensors, **attributes)
    for tensor, array in zip(made, expected):
        numpy.testing.assert_allclose(tensor.numpy(), array, 1e-6, 1e-6)
    gradients = backward.kernel(numpy, grad, q, k, v, *expected, **attributes)
    found = backend.kernel("attention_backward", backward.kernel)(
        backend.xp, backend.from_host(grad), *tensors, *made, **attributes
    )
    for tensor, array in zip(found, gradients):
        numpy.testing.assert_allclose(tensor.numpy(), array, 1e-6, 1e-6)


def test_the_calls_of_flash_kernels_on_a_gpu_are_well_formed():
    """On the meta device: names, argument order and shapes, not numbers; the numbers need a GPU."""
    from sbp.cuda import torch_attention

    q = torch.empty(2, 8, 16, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device="meta")
    assert torch_attention.flash_applies(q, k, k, True, 0)
    out, logsumexp = torch_attention.flash(q, k, k, True, 0.125)
    assert out.shape == q.shape and logsumexp.shape == (2, 8, 16)
    dq, dk, dv = torch_attention.flash_backward(q, q, k, k, out, logsumexp, True, 0.125)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape


def test_a_kernel_that_needs_numpy_itself_runs_on_the_host():
    backend = TorchBackend()

    def kernel(xp, x):
        return xp.lib.stride_tricks.sliding_window_view(x, 2).sum(axis=-1)

    made = backend.kernel("windows", kernel)(backend.xp, torch.arange(4.0))
    assert made.tolist() == [1, 3, 5] and backend.on_host == {"windows"}
    with pytest.raises(ZeroDivisionError):
        backend.kernel("wrong", lambda xp, x: 1 // 0)(backend.xp, torch.arange(4.0))


def test_element_types():
    for name in ("f64", "f32", "bf16", "f16", "i64", "i32", "i8", "u8", "bool"):
        assert torch_dtype(name) == torch_dtype(str(torch_dtype(name)))


def test_missing_torch_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match=r"sbp\[torch\]"):
        TorchBackend()
