"""Run under torchrun: every case of `collective_cases` on the communicator of torch.distributed."""

import numpy
import torch
import torch.distributed as dist
from collective_cases import check, check_point_to_point
from torch.distributed.device_mesh import init_device_mesh

from sbp.comm.interface import CommunicationError
from sbp.comm.torch_distributed import TorchCommunicator
from sbp.mesh import Mesh


class OnArrays:
    """The communicator with NumPy arrays in place of tensors."""

    def __init__(self, communicator):
        self._communicator = communicator
        self.size, self.ranks = communicator.size, communicator.ranks

    def __getattr__(self, name):
        method = getattr(self._communicator, name)

        def call(*arguments):
            if arguments:
                tensors = {rank: torch.from_numpy(numpy.array(array)) for rank, array in arguments[0].items()}
                arguments = (tensors, *arguments[1:])
            made = method(*arguments)
            return made and {rank: getattr(x, "wait", lambda x=x: x)().numpy() for rank, x in made.items()}

        return call


def main():
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    meshes = [Mesh((size,)), Mesh((2, size // 2))] if size > 2 else [Mesh((size,))]
    count = 0
    for mesh in meshes:
        device_mesh = init_device_mesh("cpu", mesh.shape)
        for overlap in (False, True):
            communicator = OnArrays(TorchCommunicator(mesh, device_mesh, overlap))
            count += check(communicator, mesh)
            check_point_to_point(communicator)
        try:
            TorchCommunicator(Mesh((size + 1,)), device_mesh)
        except CommunicationError as error:
            assert "init_device_mesh" in str(error)
        else:
            raise AssertionError("a mesh of another shape was taken")
    print(f"rank {dist.get_rank()} of {size} passed {count} cases", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
