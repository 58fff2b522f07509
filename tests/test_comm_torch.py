"""The communicator of torch.distributed, under torchrun and gloo with 2 and 4 processes."""

import re

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")

from torch_launch import torchrun


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size):
    output = torchrun(size, "torch_collectives_program.py")
    found = re.findall(rf"rank (\d) of {size} passed (\d+) cases", output)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(size)]
    assert len({count for _, count in found}) == 1 and int(found[0][1]) > 120
