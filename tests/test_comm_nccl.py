"""The NCCL communicator's own code, on a stand-in for CuPy: ranks are threads that meet over the real rendezvous."""

import socket
import sys
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from collective_cases import check, check_point_to_point
from fake_cupy import FakeCupy, World, ndarray
from hand_plans import mlp, random_plan, replicated_plan
from host_cuda import HostModule, compiler
from ranks_as_threads import free_port, on_ranks

from sbp.comm.interface import CommunicationError
from sbp.comm.nccl import NCCLCommunicator, _from_bytes, _to_bytes
from sbp.comm.rendezvous import Environment, Store
from sbp.cuda import fused
from sbp.cuda.cupy_backend import CupyBackend
from sbp.errors import PlanError
from sbp.mesh import Mesh
from sbp.runtime.executor import Executor
from sbp.runtime.train import train
from sbp.runtime.verify import verify


def to_array(array):
    return numpy.array(array).view(ndarray)


@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (2, 2), (2, 3)], ids=str)
def test_collectives(shape):
    mesh, world = Mesh(shape), World()

    def program(rank, environment):
        cupy = FakeCupy(world)
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        assert communicator.ranks == (rank,) and communicator.size == mesh.size and cupy.used == [rank]
        count = check(communicator, mesh, to_array)
        check_point_to_point(communicator, to_array)
        communicator.close()
        return count

    counts = on_ranks(mesh.size, program)
    assert len(set(counts.values())) == 1 and counts[0] > 60


@pytest.mark.skipif(compiler() is None, reason="no g++ to run CUDA source on the host")
@pytest.mark.parametrize("shape", [(2,), (2, 2), (3,)], ids=str)
def test_a_plan_over_nccl_on_the_cupy_backend(shape, monkeypatch):
    """What `--backend cupy --comm nccl` runs: verified in every process, and trained like in process."""
    monkeypatch.setattr(fused, "ELEMENT_THREADS", 16)  # the host is slow to start threads
    mesh, world, graph = Mesh(shape), World(), mlp()
    plan = random_plan(graph, mesh, 3)
    random = numpy.random.default_rng(0)
    given = [{n: random.standard_normal(graph.values[n].shape) for n in graph.inputs} for _ in range(3)]

    def program(rank, environment):
        cupy = FakeCupy(world, raw_module=HostModule)
        backend = CupyBackend(rank, cupy=cupy)
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        found = verify(graph, plan, 5, backend=backend, communicator=communicator)
        assert found.passed, str(found)
        trained = train(graph, plan, given, 3, backend, communicator, floating="f64")
        communicator.close()
        return trained.losses

    results = on_ranks(mesh.size, program)
    assert len(set(results.values())) == 1
    numpy.testing.assert_allclose(results[0], train(graph, plan, given, 3, floating="f64").losses, rtol=1e-12)


def test_replicas_that_differ_are_found_on_every_rank():
    world, plan = World(), replicated_plan(mlp(), Mesh((2, 2), ("dp", "tp")))

    def program(rank, environment):
        cupy = FakeCupy(world)
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        executor = Executor(plan, CupyBackend(rank, cupy=cupy), communicator)
        number = plan.sources["w0"]
        local = executor.place({"w0": numpy.ones((5, 7))})["w0"]
        assert (executor.collect(local, number) == 1).all()
        with pytest.raises(PlanError, match="w0: ranks along mesh axis tp of .* hold different numbers"):
            executor.collect({rank: local[rank] + (rank == 2)}, number)
        communicator.close()

    on_ranks(4, program)


def test_group_communicators_are_destroyed_and_made_once():
    world, made = World(), []

    def program(rank, environment):
        cupy = FakeCupy(world)
        plain = cupy.cuda.nccl.NcclCommunicator
        cupy.cuda.nccl.NcclCommunicator = lambda *given: made.append(plain(*given)) or made[-1]
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        groups = ((0, 2), (1, 3))
        for _ in range(3):
            result = communicator.all_reduce({rank: to_array(numpy.full(4, float(rank)))}, groups, "sum")
            assert (result[rank] == (2.0 if rank % 2 == 0 else 4.0)).all()
        communicator.close()

    on_ranks(4, program)
    assert len(made) == 8 and all(item.destroyed for item in made)


def test_a_failed_rank_aborts_its_communicators():
    world, made = World(), {}

    def program(rank, environment):
        cupy = FakeCupy(world)
        plain = cupy.cuda.nccl.NcclCommunicator
        cupy.cuda.nccl.NcclCommunicator = lambda *given: made.setdefault(rank, plain(*given))
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        executor = Executor(replicated_plan(mlp(), Mesh((2,))), CupyBackend(rank, cupy=cupy), communicator)
        if rank == 1:
            with pytest.raises(PlanError, match="is not given"):
                executor.step({}, {})

    on_ranks(2, program)
    assert made[1].destroyed and not made[0].destroyed


def test_a_rank_outside_the_groups_takes_no_part():
    world = World()

    def program(rank, environment):
        communicator = NCCLCommunicator(environment, FakeCupy(world), timeout=20)
        given = {rank: to_array(numpy.full(3, float(rank)))}
        first = communicator.all_reduce(given, ((0, 1),), "sum")
        second = communicator.all_gather(given, ((1, 2),), 0, ((3, 3),))
        communicator.close()
        return sorted(first), sorted(second)

    assert on_ranks(3, program) == {0: ([0], []), 1: ([1], [1]), 2: ([], [2])}


def test_unsupported_type_is_named():
    def program(rank, environment):
        communicator = NCCLCommunicator(environment, FakeCupy(world), timeout=20)
        with pytest.raises(CommunicationError, match="complex128"):
            communicator.all_reduce({rank: to_array(numpy.ones(2, complex))}, ((0, 1),), "sum")
        with pytest.raises(CommunicationError, match="sum, max, min"):
            communicator.all_reduce({rank: to_array(numpy.ones(2))}, ((0, 1),), "product")
        communicator.close()

    world = World()
    on_ranks(2, program)


def test_more_processes_than_gpus():
    with pytest.raises(CommunicationError, match=r"LOCAL_RANK 2, but this machine has 2 GPUs"):
        NCCLCommunicator(Environment(2, 4, 2, "127.0.0.1", 1), FakeCupy(devices=2))


def test_unique_ids_of_old_and_new_cupy():
    old = tuple(range(-64, 64))
    assert _from_bytes(_to_bytes(old)) == old
    assert _from_bytes(_to_bytes(bytes(range(128)))) == bytes(range(128))


GOOD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_environment():
    assert Environment.read(GOOD) == Environment(1, 4, 1, "host", 29500)
    assert Environment.read({**GOOD, "TORCHELASTIC_USE_AGENT_STORE": "True"}).port == 29501
    assert Environment.read({**GOOD, "TORCHELASTIC_USE_AGENT_STORE": "True", "SBP_PORT": "7000"}).port == 7000


@pytest.mark.parametrize(
    "change, message",
    [
        ({"RANK": ""}, "lacks RANK; start the program with torchrun"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "lacks MASTER_ADDR, MASTER_PORT"),
        ({"RANK": "4"}, "RANK is '4'; expected a whole number from 0 to 3"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"MASTER_PORT": "70000"}, "from 1 to 65535"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"SBP_PORT": "x"}, "SBP_PORT is 'x'"),
    ],
)
def test_environment_errors(change, message):
    with pytest.raises(CommunicationError, match=message):
        Environment.read({**GOOD, **change})


def test_store_waits_for_a_key_and_overwrites():
    def program(rank, environment):
        store = Store(environment, timeout=20)
        if rank == 0:
            found = store.get("from 1")
            store.set("from 0", found + b"!")
            store.set("from 0", found + b"?")
            store.set("done", b"")
        else:
            store.set("from 1", bytes(1000))
            assert store.get("done") == b""
            assert store.get("from 0") == bytes(1000) + b"?"
            store.set("end", b"")
        store.get("end")
        return True

    assert on_ranks(2, program) == {0: True, 1: True}


def test_store_on_an_ipv6_address():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
            port = listener.getsockname()[1]
    except OSError:
        pytest.skip("no IPv6 on this machine")
    store = Store(Environment(0, 1, 0, "::1", port), timeout=5)
    store.set("key", b"value")
    assert store.get("key") == b"value"
    store.close()


def test_store_errors():
    port = free_port()
    with pytest.raises(CommunicationError, match=f"could not reach rank 0 at 127.0.0.1:{port} within 0.2 seconds"):
        Store(Environment(1, 2, 1, "127.0.0.1", port), timeout=0.2)
    store = Store(Environment(0, 2, 0, "127.0.0.1", port), timeout=0.2)
    with pytest.raises(CommunicationError, match="waited 0.2 seconds for 'nothing'"):
        store.get("nothing")
    with pytest.raises(CommunicationError, match="cannot listen"):
        Store(Environment(0, 2, 0, "127.0.0.1", port), timeout=0.2)
    store.close()
    with pytest.raises(CommunicationError, match="lost rank 0"):
        store.get("nothing")


def test_missing_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(CommunicationError, match=r"sbp\[cuda\]"):
        NCCLCommunicator(Environment(0, 1, 0, "127.0.0.1", 1))
