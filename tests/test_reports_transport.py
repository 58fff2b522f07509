"""Reports of users of other systems: what is sent, and how processes find each other. Each test names its report."""

import numpy
import pytest

import sbp
from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.interface import CommunicationError
from sbp.comm.nccl import NCCLCommunicator, _from_bytes, _to_bytes
from sbp.comm.rendezvous import Store
from sbp.cuda.cupy_backend import CupyBackend
from sbp.cuda.devices import device_text, visible_devices
from sbp.cuda.interface import BackendError
from sbp.errors import GraphError
from tests.fake_cupy import FakeCupy, World
from tests.test_comm_nccl import on_ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_r038_complex_numbers_are_summed_and_have_no_maximum(ranks):
    communicator = InProcessCommunicator(ranks)
    groups = (tuple(range(ranks)),)
    parts = {rank: numpy.array([1 + 2j], "complex64") for rank in range(ranks)}
    assert communicator.all_reduce(parts, groups, "sum")[1].tolist() == [ranks * (1 + 2j)]
    sizes = (((1,) + (0,) * (ranks - 1)),)
    assert communicator.reduce_scatter(parts, groups, 0, sizes, "sum")[0].tolist() == [ranks * (1 + 2j)]
    for reduce in ("max", "min"):
        with pytest.raises(CommunicationError, match=f"no order, so there is no '{reduce}' of complex64"):
            communicator.all_reduce(parts, groups, reduce)
        with pytest.raises(CommunicationError, match="no order"):
            communicator.reduce_scatter(parts, groups, 0, sizes, reduce)
    with pytest.raises(GraphError, match="unknown element type 'complex64'"):
        sbp.from_numpy(parts[0], "S(0)", ranks)


def test_r138_every_byte_of_an_id_comes_through_the_store():
    """As bytes (128 to 255 among them), and as the signed numbers of old versions of CuPy."""
    identities = [bytes(range(256)), bytes(reversed(range(256))), tuple(range(-128, 128)), b"e" * 128, b"t" * 128, b""]

    def program(rank, environment):
        store = Store(environment, timeout=20)
        for number, identity in enumerate(identities):
            if rank == 0:
                store.set(f"id {number}", _to_bytes(identity))
            assert _from_bytes(store.get(f"id {number}")) == identity
        store.set(f"done {rank}", b"")
        store.get("done 0"), store.get("done 1")
        return True

    assert on_ranks(2, program) == {0: True, 1: True}


def test_r140_one_rank_makes_the_id_of_a_group():
    """Rank 0 for all ranks, the first of each other group; everybody else gets it from the store."""
    world, made = World(), []

    def program(rank, environment):
        cupy = FakeCupy(world)
        make = cupy.cuda.nccl.get_unique_id
        cupy.cuda.nccl.get_unique_id = lambda: made.append(rank) or make()
        communicator = NCCLCommunicator(environment, cupy, timeout=20)
        communicator.all_reduce({rank: cupy.ones(2)}, ((0, 1), (2, 3)), "sum")
        communicator.all_reduce({rank: cupy.ones(2)}, ((0, 1), (2, 3)), "sum")
        communicator.close()

    on_ranks(4, program)
    assert sorted(made) == [0, 0, 2]


def test_r141_no_rank_waits_for_an_id_that_cannot_be_made():
    """Rank 0 fails to make it: all ranks raise the same error, though the store would wait for five minutes."""
    world = World()
    messages = {}

    def program(rank, environment):
        cupy = FakeCupy(world)

        def fails():
            raise RuntimeError("no network interface")

        cupy.cuda.nccl.get_unique_id = fails
        with pytest.raises(CommunicationError, match="could not make NCCL's id") as error:
            NCCLCommunicator(environment, cupy, timeout=300)
        messages[rank] = str(error.value)

    on_ranks(3, program)
    assert len(messages) == 3 and len(set(messages.values())) == 1
    assert "RuntimeError: no network interface" in messages[2]


@pytest.mark.parametrize(("local_rank", "machine"), [(0, 4), (1, 5)])
def test_r150_local_ranks_are_numbers_among_the_visible_gpus(monkeypatch, local_rank, machine):
    """The scheduler gives GPUs 4 and 5: local ranks 0 and 1 take them by the numbers 0 and 1; both are said."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    cupy = FakeCupy(devices=2)
    backend = CupyBackend(cupy=cupy)
    assert cupy.used == [local_rank]
    assert backend.place == f"GPU {local_rank} (CUDA_VISIBLE_DEVICES=4,5: the machine's {machine})"


def test_r150_a_rank_without_a_gpu_is_told_which_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_RANK", "4")  # the machine's number is not the program's
    with pytest.raises(
        BackendError, match=r"no GPU 4; of this machine CUDA_VISIBLE_DEVICES=4,5 shows 2, numbered from 0"
    ):
        CupyBackend(cupy=FakeCupy(devices=2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4,5", ("4", "5")), (" 1 , 0", ("1", "0")), ("", ()), ("-1", ()), ("3,-1,2", ("3",)), ("0,0", ("0",)),
        ("GPU-8932f937,GPU-46322caf", ("GPU-8932f937", "GPU-46322caf")), ("NoDevFiles", ()),
    ],
)  # fmt: skip
def test_r150_the_variable_is_read_as_cuda_reads_it(text, expected):
    assert visible_devices({"CUDA_VISIBLE_DEVICES": text}) == expected
    assert visible_devices({}) is None and device_text(3, {}) == "GPU 3"
    assert device_text(3, {"CUDA_VISIBLE_DEVICES": text}) == "GPU 3"


def test_r150_the_command_says_which_gpu_a_rank_runs_on(monkeypatch, tmp_path, capsys):
    from sbp.cli.main import run
    from sbp.cuda import cupy_backend

    monkeypatch.setattr(cupy_backend, "_cupy", lambda: FakeCupy(devices=2))
    monkeypatch.setattr(cupy_backend, "OVERRIDES", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    path = str(tmp_path / "plan.json")
    sbp.auto_parallel("tiny-mlp", "cpu", batch=4, mesh=(4,)).save(path)
    assert run(["run", path, "--steps", "1", "--backend", "cupy"]) == 0
    assert "all ranks on GPU 1 (CUDA_VISIBLE_DEVICES=4,5: the machine's 5)" in capsys.readouterr().err
