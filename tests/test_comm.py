"""The in-process communicator, and what all communicators share, against layouts cut from one global tensor."""

import inspect
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from collective_cases import CHANGES, change, check, check_point_to_point

from sbp.comm.arrays import chunk_slices, reduce_in_order
from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.interface import CommunicationError, Communicator
from sbp.comm.mpi import MPICommunicator
from sbp.comm.nccl import NCCLCommunicator
from sbp.layout import Layout
from sbp.mesh import Mesh

MESHES = ((1,), (2,), (3,), (4,), (8,), (2, 2), (2, 3), (3, 2), (2, 2, 2))


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_collectives(shape):
    mesh = Mesh(shape)
    assert check(InProcessCommunicator(mesh.size), mesh) > 60


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_point_to_point(size):
    check_point_to_point(InProcessCommunicator(size))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(MESHES[1:]),
    st.integers(0, 2),
    st.sampled_from(CHANGES),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from(["float64", "float32", "int64"]),
    st.integers(0, 99),
)
def test_any_size(mesh_shape, axis, texts, shape, dtype, seed):
    mesh = Mesh(mesh_shape)
    layouts = [Layout.parse(["B"] * mesh.ndim).replace(axis % mesh.ndim, Layout.parse(text)[0]) for text in texts]
    case = change(mesh, axis % mesh.ndim, *layouts, shape, dtype, numpy.random.default_rng(seed))
    check(InProcessCommunicator(mesh.size), mesh, collective=case)


def test_reductions_run_in_the_order_of_the_group():
    parts = [numpy.array(value) for value in (1.0, 1e100, 1.0, -1e100)]
    assert reduce_in_order(numpy, parts, "sum") == ((1.0 + 1e100) + 1.0) - 1e100
    backwards = InProcessCommunicator(4).all_reduce(dict(enumerate(parts)), ((3, 2, 1, 0),), "sum")
    assert backwards[0] == ((-1e100 + 1.0) + 1e100) + 1.0


def test_sums_of_many_parts_are_the_same_bits_every_time():
    random = numpy.random.default_rng(0)
    arrays = {rank: random.standard_normal((50, 3)) for rank in range(8)}
    groups = (tuple(range(8)),)
    first, second = (InProcessCommunicator(8).all_reduce(arrays, groups, "sum") for _ in range(2))
    assert all(first[rank].tobytes() == second[rank].tobytes() for rank in range(8))


def test_not_a_number_survives_every_reduction():
    arrays = {0: numpy.array([1.0, numpy.nan]), 1: numpy.array([numpy.nan, 2.0])}
    for reduce in ("sum", "max", "min"):
        assert numpy.isnan(InProcessCommunicator(2).all_reduce(arrays, ((0, 1),), reduce)[1]).all()


def test_chunks_are_consecutive():
    everything = slice(None)
    expected = [(everything, slice(start, stop)) for start, stop in ((0, 2), (2, 2), (2, 5))]
    assert chunk_slices((2, 0, 3), 1) == expected


def signatures(kind):
    members = {name: item for name, item in vars(kind).items() if not name.startswith("_") and callable(item)}
    return {name: list(inspect.signature(item).parameters) for name, item in members.items()}


@pytest.mark.parametrize("kind", [InProcessCommunicator, MPICommunicator, NCCLCommunicator])
def test_every_communicator_has_the_calls_of_the_interface(kind):
    expected = signatures(Communicator)
    found = {name: each for base in reversed(kind.__mro__) for name, each in signatures(base).items()}
    assert len(expected) == 9 and {name: found[name] for name in expected} == expected


def test_errors_say_what_is_known():
    with pytest.raises(CommunicationError, match="sum, max, min"):
        InProcessCommunicator(2).all_reduce({0: numpy.ones(2), 1: numpy.ones(2)}, ((0, 1),), "product")
    with pytest.raises(CommunicationError, match="at least 1 rank"):
        InProcessCommunicator(0)
