"""What tests/test_global_tensor.py starts on every MPI rank: eager operators give what in-process ranks give."""

import numpy

import sbp
from sbp.comm.mpi import MPICommunicator
from sbp.mesh import Mesh
from sbp.ops import library as ops


def results(mesh, own):
    """Numbers and layouts of a small program; `own` are the ranks of this process."""
    x = sbp.randn((5, 6), "S(0)" if mesh.ndim == 1 else "S(0), S(1)", mesh, "f64")
    w = sbp.randn((6, 3), "B" if mesh.ndim == 1 else "B, S(0)", mesh, "f64", seed=1)
    y = (x @ w + 1.0).updated((slice(None, 2), 0), 7.0)
    z = ops.softmax(ops.cumsum(y, axis=0), axis=-1)
    part = sbp.from_local(
        {rank: numpy.full(2, float(rank)) for rank in own}, "P" if mesh.ndim == 1 else "P, P", mesh, (2,)
    )
    made = [x, y, z, z.sum(), part, x[1:4, ::2], sbp.randint(0, 9, (4,), None, mesh)]
    return [(str(tensor), tensor.numpy()) for tensor in made]


communicator = MPICommunicator()
for shape in {2: ((2,),), 4: ((4,), (2, 2))}[communicator.size]:
    mesh = Mesh(shape)
    expected = results(mesh, range(mesh.size))
    with sbp.ranks(communicator):
        found = results(mesh, communicator.ranks)
        try:
            sbp.zeros((4,), None, mesh).to_local((communicator.ranks[0] + 1) % mesh.size)
            raise AssertionError("another process' shard was given")
        except sbp.errors.MeshError as error:
            assert "lives in another process" in str(error)
    for (text, array), (other, reference) in zip(found, expected, strict=True):
        assert text == other
        numpy.testing.assert_array_equal(array, reference)
print(f"rank {communicator.ranks[0]} of {communicator.size} agrees")
communicator.close()
