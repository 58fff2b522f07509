"""Starts programs of several processes with torchrun, with an end to waiting."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def torchrun(processes, program, *arguments, timeout=150):
    """The output of a program of this folder (or of a path); fails with its errors if it fails or takes too long."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONPATH"] = os.pathsep.join((str(HERE.parent), str(HERE)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [str(HERE / program), *map(str, arguments)]
    # A session of its own: torchrun ends its processes when it is told to end, and not when it is killed.
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        try:
            output, errors = started.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            started.terminate()
            output, errors = started.communicate(timeout=60)
            raise AssertionError(f"{program} took more than {timeout} s\n{output}\n{errors}") from None
    assert started.returncode == 0, f"{output}\n{errors}"
    return output
