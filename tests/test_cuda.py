"""Backends and CUDA sources without a GPU: NVRTC compiles them, g++ runs them, a stand-in takes CuPy's place."""

import inspect
import re
import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_cupy import FakeCupy, ndarray
from hand_plans import mlp, random_plan
from host_cuda import HostModule, compiler

from sbp.cuda import fused
from sbp.cuda.cupy_backend import CupyBackend
from sbp.cuda.fused import OVERRIDES
from sbp.cuda.interface import Backend, BackendError
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.cuda.nvrtc import KERNELS, compile_source, find_library
from sbp.dtype import SIZES
from sbp.graph import Initial
from sbp.initial import draw_all
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, TensorType
from sbp.ops import library as ops
from sbp.runtime.executor import Executor
from sbp.runtime.verify import verify
from sbp.trace import GraphBuilder

needs_nvrtc = pytest.mark.skipif(find_library() is None, reason="no libnvrtc (pip install nvidia-cuda-nvrtc-cu12)")
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to run CUDA source on the host")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_kernels_compile(architecture):
    ptx = compile_source(KERNELS.read_text(encoding="utf-8"), architecture)
    made = set(re.findall(r"\.entry (\w+)", ptx))
    assert made == {f"{name}_{suffix}" for name in ("adamw", "layer_norm", "rms_norm") for suffix in ("f32", "f64")}
    assert f".target sm_{architecture[-2:]}" in ptx


@needs_nvrtc
def test_compiler_errors_carry_the_log():
    with pytest.raises(BackendError, match=r"(?s)bad.cu does not compile for compute_80.*\"y\" is undefined"):
        compile_source('extern "C" __global__ void f(int* x) { *x = y; }', "compute_80", "bad.cu")
    with pytest.raises(BackendError, match="does not compile for compute_1:"):
        compile_source("", "compute_1")


class Counting(HostModule):
    """Remembers the last module, to count its launches."""

    last = None

    def __init__(self, code, options=()):
        super().__init__(code, options)
        Counting.last = self


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(Counting, "last", None)
    return CupyBackend(cupy=FakeCupy(raw_module=Counting))


def on_device(array):
    return numpy.array(array).view(ndarray)


def both(backend, name, arrays, attributes):
    """The results of the fused kernel and of the operator's own, each as a tuple."""
    op = REGISTRY[name]
    complete = op.complete(attributes)
    made = backend.kernel(name, op.kernel)(backend.xp, *map(on_device, arrays), **complete)
    expected = op.kernel(numpy, *arrays, **complete)
    return [tuple(item) if isinstance(item, tuple) else (item,) for item in (made, expected)]


@needs_compiler
@pytest.mark.parametrize("dtype, rtol", [("float32", 2e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("shape", [(1,), (5, 7), (300,), (2, 3, 50)], ids=str)
def test_fused_adamw(backend, dtype, rtol, shape):
    random = numpy.random.default_rng(0)
    parameter, grad, first = (random.standard_normal(shape).astype(dtype) for _ in range(3))
    second = random.uniform(0, 1, shape).astype(dtype)
    for step in (1, 7):
        for attributes in ({"lr": 0.1, "weight_decay": 0.3}, {"beta1": 0.5, "beta2": 0.6, "eps": 0.01}):
            arrays = (parameter, grad, first, second, numpy.array(step))
            for made, expected in zip(*both(backend, "adamw_update", arrays, attributes)):
                assert made.dtype == expected.dtype == dtype and made.shape == shape
                numpy.testing.assert_allclose(made, expected, rtol=rtol, atol=rtol)
    assert Counting.last.launches == {f"adamw_f{dtype[-2:]}": 4}


@needs_compiler
@pytest.mark.parametrize("dtype, rtol", [("float32", 2e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 129), (2, 3, 300), (64,)], ids=str)
def test_fused_norms(backend, dtype, rtol, shape):
    random = numpy.random.default_rng(1)
    x = (random.standard_normal(shape) + 3).astype(dtype)
    weight, bias = (random.standard_normal(shape[-1:]).astype(dtype) for _ in range(2))
    for name, arrays in (("layer_norm", (x, weight, bias)), ("rms_norm", (x, weight))):
        (made,), (expected,) = both(backend, name, arrays, {"eps": 1e-3})
        assert made.dtype == expected.dtype == dtype and made.shape == shape
        numpy.testing.assert_allclose(made, expected, rtol=rtol, atol=rtol * 10)
    assert Counting.last.launches == {f"layer_norm_f{dtype[-2:]}": 1, f"rms_norm_f{dtype[-2:]}": 1}


@needs_compiler
def test_arrays_that_are_not_contiguous(backend):
    x = numpy.random.default_rng(2).standard_normal((6, 4)).T
    (made,), (expected,) = both(backend, "layer_norm", (x, numpy.ones(6), numpy.zeros(6)), {})
    numpy.testing.assert_allclose(made, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "name, arrays",
    [
        ("layer_norm", (numpy.ones((2, 3), "float16"), numpy.ones(3, "float16"), numpy.ones(3, "float16"))),
        ("layer_norm", (numpy.ones((0, 3)), numpy.ones(3), numpy.ones(3))),
        ("rms_norm", (numpy.ones((2, 3), "float16"), numpy.ones(3, "float32"))),
        ("rms_norm", (numpy.ones((2, 0, 3)), numpy.ones(3))),
        ("adamw_update", (*(numpy.ones((0, 3)),) * 4, numpy.array(1))),
        ("adamw_update", (numpy.ones(3), numpy.ones(3, "float32"), numpy.ones(3), numpy.ones(3), numpy.array(1))),
        ("adamw_update", (*(numpy.ones(3),) * 4, numpy.array(1.0))),
    ],
)
def test_what_the_fused_kernels_do_not_take_runs_as_before(backend, name, arrays):
    for made, expected in zip(*both(backend, name, arrays, {})):
        assert made.dtype == expected.dtype and made.shape == expected.shape
        assert numpy.array_equal(made, expected)
    assert Counting.last is None, "the CUDA source was compiled for nothing"


def test_overrides_have_the_operators_parameters(backend):
    for name, build in OVERRIDES.items():
        own = [p.name for p in inspect.signature(REGISTRY[name].kernel).parameters.values()]
        fused = build(lambda label: None, REGISTRY[name].kernel)
        assert [p.name for p in inspect.signature(fused).parameters.values()] == own


@needs_compiler
def test_executor_on_the_cupy_backend(backend, monkeypatch):
    """The same plan, with fused kernels and the module's own arrays, verified as on NumPy."""
    monkeypatch.setattr(fused, "ELEMENT_THREADS", 16)  # the host is slow to start threads
    graph = mlp(4, (3, 5, 2))
    for seed in range(3):
        found = verify(graph, random_plan(graph, Mesh((2,)), seed), seed, backend=backend)
        assert found.passed, str(found)
    assert Counting.last.launches["adamw_f64"] > 0
    arrays = draw_all(graph)
    executor = Executor(random_plan(graph, Mesh((2,)), 0), backend)
    state = executor.place({name: arrays[name] for name in graph.state})
    outputs, state = executor.step(state, executor.place({name: arrays[name] for name in graph.inputs}))
    kinds = {type(array) for local in (*outputs.values(), *state.values()) for array in local.values()}
    assert kinds == {ndarray} and Counting.last.launches["adamw_f32"] > 0


@needs_compiler
def test_norms_in_a_plan_use_the_fused_kernels(backend):
    builder = GraphBuilder("norms")
    x = builder.source("x", TensorType((3, 8), "f32"), "input")
    weight = builder.source("weight", TensorType((8,), "f32"), "parameter", Initial("uniform", (0.5, 1.5)))
    with builder:
        graph = builder.finish([ops.layer_norm(ops.rms_norm(x, weight), weight, weight)])
    assert verify(graph, random_plan(graph, Mesh((2, 2)), 1), backend=backend).passed
    assert set(Counting.last.launches) == {"rms_norm_f64", "layer_norm_f64"}


def test_cupy_backend_names_its_device_and_limits_its_pool(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    cupy = FakeCupy(devices=4)
    backend = CupyBackend(cupy=cupy, memory_limit=1 << 20)
    assert backend.device == 3 and cupy.used == [3] and cupy.pool.limit == 1 << 20
    assert backend.memory() == (4096, 8192)
    backend.synchronize()
    assert cupy.waits == 1
    with pytest.raises(BackendError, match="there is no GPU 3; this machine has 2"):
        CupyBackend(cupy=FakeCupy(devices=2))
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(BackendError, match="LOCAL_RANK is 'first'"):
        CupyBackend(cupy=cupy)

    def no_driver():
        raise RuntimeError("cudaErrorNoDevice")

    cupy.cuda.runtime.getDeviceCount = no_driver
    with pytest.raises(BackendError, match="no GPU can be used .cudaErrorNoDevice.; run with the numpy backend"):
        CupyBackend(0, cupy=cupy)


@pytest.mark.parametrize("kind", [NumpyBackend, CupyBackend])
def test_every_backend_has_the_calls_of_the_interface(kind):
    public = {name: item for name, item in vars(Backend).items() if not name.startswith("_")}
    calls = {name: item for name, item in public.items() if inspect.isfunction(item)}
    assert len(calls) == 7
    for name, item in calls.items():
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(item).parameters)


def test_missing_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendError, match=r"sbp\[cuda\]"):
        CupyBackend(0)


@pytest.mark.parametrize("make", [NumpyBackend, lambda: CupyBackend(0, cupy=FakeCupy())], ids=["numpy", "cupy"])
def test_every_backend(make):
    backend = make()
    for name in SIZES:
        array = numpy.ones((2, 3)).astype(backend.dtype(name))
        assert backend.dtype(name).itemsize >= SIZES[name]
        back = backend.to_host(backend.from_host(array))
        assert type(back) is numpy.ndarray and back.dtype == array.dtype and numpy.array_equal(back, array)
    drawn = backend.random((50, 40), "f32", 3)
    assert drawn.shape == (50, 40) and drawn.dtype == numpy.float32
    assert abs(float(drawn.mean())) < 0.1 and abs(float(drawn.std()) - 1) < 0.1
    assert numpy.array_equal(drawn, backend.random((50, 40), "f32", 3))
    assert not numpy.array_equal(drawn, backend.random((50, 40), "f32", 4))
    assert backend.kernel("matmul", ops.matmul.kernel) is ops.matmul.kernel
    assert len(backend.memory()) == 2 and backend.to_host(numpy.float64(1)).shape == ()
