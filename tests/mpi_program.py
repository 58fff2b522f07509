"""What tests/test_comm_mpi.py starts on every MPI rank: all collectives, the bits of a sum, whole plans."""

import sys

import numpy
from collective_cases import check, check_point_to_point
from hand_plans import mlp, physical, random_plan
from spatial_programs import network, split_plan

from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.interface import CommunicationError
from sbp.comm.mpi import MPICommunicator
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.errors import SbpError
from sbp.mesh import Mesh
from sbp.runtime.train import train
from sbp.runtime.verify import verify


def same_bits(communicator):
    """Sums of numbers that round must have the bits of the in-process communicator, short and long arrays alike."""
    groups = (tuple(range(communicator.size)),)
    for shape in ((3,), (), (90, 71)):
        ranks = range(communicator.size)
        arrays = {rank: numpy.asarray(numpy.random.default_rng(rank).standard_normal(shape)) for rank in ranks}
        expected = InProcessCommunicator(communicator.size).all_reduce(arrays, groups, "sum")
        mine = {rank: arrays[rank] for rank in communicator.ranks}
        for rank, array in communicator.all_reduce(mine, groups, "sum").items():
            assert array.tobytes() == expected[rank].tobytes()


def run_plans(communicator):
    """A plan is verified in every process, and trains with the very losses of the in-process ranks."""
    graph, mesh = mlp(), Mesh({2: (2,), 4: (2, 2)}[communicator.size])
    random = numpy.random.default_rng(0)
    given = [{name: random.standard_normal(graph.values[name].shape) for name in graph.inputs} for _ in range(5)]
    for seed in range(3):
        plan = random_plan(graph, mesh, seed)
        verify(graph, plan, seed, communicator=communicator).raise_if_wrong()
        losses = train(graph, plan, given, 5, communicator=communicator, floating="f64").losses
        assert losses == train(graph, plan, given, 5, floating="f64").losses


def fetch_borders(communicator):
    """Rows of pictures split over the ranks, some with none: forward and backward as in process."""
    graph = network(1, 2, 9, 5)
    plan = split_plan(graph, Mesh((communicator.size,)), "(S(2))")
    verify(graph, plan, communicator=communicator).raise_if_wrong()


def fail_on_one_rank(communicator):
    """Rank 1 meets an error in a kernel, the others wait for it in a collective: all must end."""

    class Breaking(NumpyBackend):
        def kernel(self, name, default):
            return default if communicator.ranks != (1,) or name != "relu" else lambda xp, x: x[:0]

    graph = mlp()
    mesh = Mesh((communicator.size,))
    by_rows = physical(graph, mesh, lambda _, found: next((s for s in found if str(s).startswith("(S(0)")), found[0]),
                       lambda _, found: found[0])  # fmt: skip
    train(graph, by_rows, [{n: numpy.ones(graph.values[n].shape) for n in graph.inputs}], 1, Breaking(), communicator)


def main(limit):
    communicator = MPICommunicator(**limit)
    count = 0
    for shape in {2: ((2,),), 4: ((4,), (2, 2))}[communicator.size]:
        count += check(communicator, Mesh(shape))
    check_point_to_point(communicator)
    same_bits(communicator)
    try:
        communicator.all_reduce({communicator.ranks[0]: memoryview(b"12")}, (tuple(range(communicator.size)),), "sum")
    except CommunicationError as error:
        assert "moves NumPy arrays" in str(error)
    else:
        raise AssertionError("an array that is not NumPy's was accepted")
    run_plans(communicator)
    fetch_borders(communicator)
    communicator.close()
    sys.stdout.write(f"rank {communicator.ranks[0]} of {communicator.size} passed {count} cases\n")


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["fail"]:
            try:
                fail_on_one_rank(MPICommunicator())
            except SbpError as error:
                sys.exit(f"reported: {error}")
        main({"limit": int(sys.argv[2])} if sys.argv[1:2] == ["limit"] else {})
    except SystemExit:
        raise
    except BaseException:
        import traceback

        from mpi4py import MPI

        traceback.print_exc()
        MPI.COMM_WORLD.Abort(1)
