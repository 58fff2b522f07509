"""`sbp profile`: measure this machine and write it down as a cluster file."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from sbp.cli import options
from sbp.cli.output import check_writable, print_json, progress, say, tables

if TYPE_CHECKING:
    from sbp.runtime.profiling import Profile

_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables that mpirun sets."""


@click.command("profile")
@click.option("--out", type=click.Path(), metavar="FILE.YAML", help="Cluster file to write; default stdout.")
@click.option("--ranks", type=click.IntRange(min=1, max=1024),
              help="Ranks in this process, default 4, on a GPU 1; under mpirun or torchrun theirs count.")  # fmt: skip
@click.option("--backend", type=click.Choice(["numpy", "cupy"]), default="numpy", show_default=True,
              help="Where arrays live: this machine's memory, or the GPU's (extra cuda).")  # fmt: skip
@click.option("--comm", type=click.Choice(["inprocess", "mpi", "nccl"]),
              help="Default mpi under mpirun, nccl under torchrun with --backend cupy, else inprocess.")  # fmt: skip
@click.option("--name", default="profiled", show_default=True, help="Name of the cluster.")
@click.option("--quick", is_flag=True, help="Seconds instead of a minute or two, with smaller sizes.")
@options.json_option
@options.quiet_option
def profile(
    out: str | None, ranks: int | None, backend: str, comm: str | None, name: str, quick: bool, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Measure matrix products, memory, kernels and collectives here, as a cluster file for --cluster.

    All ranks are measured at once: of ranks that take turns in this process, each counts as its part of one core.
    Leave the machine alone meanwhile.

    \b
    sbp profile --out here.yaml
    sbp plan gpt2 --size layers=2 --cluster here.yaml
    mpirun -n 4 sbp profile --out here.yaml
    torchrun --nproc-per-node 8 --no-python sbp profile --backend cupy --out node.yaml
    """
    from sbp.cli.run import communicator_for, speaks_for_all
    from sbp.runtime.profiling import profile as measure

    chosen = comm or _started_under(backend)
    if chosen != "inprocess" and ranks is not None:
        raise click.UsageError(f"--ranks counts ranks in this process; with --comm {chosen} start as many processes.")
    if not name.strip():
        raise click.UsageError("--name must not be empty; plans show it.")
    if out is not None:
        check_writable(out, "the cluster file")
    if ranks is None:
        ranks = 4 if backend == "numpy" else 1
    made, communicator = communicator_for(backend, chosen, quiet)
    speaks = speaks_for_all(communicator)
    with progress(quiet or not speaks) as shown:
        found = measure(ranks, backend=made, communicator=communicator, quick=quick, name=name, say=shown)
    if communicator is not None:
        communicator.close()
    if not speaks:
        return
    if out is not None:
        found.cluster.save(out)
    if as_json:
        print_json(_data(found))
    elif out is None:
        from sbp.planner.cluster_file import dump_cluster

        click.echo(dump_cluster(found.cluster), nl=False)
    if not quiet:
        _print(found, as_json or out is None)
        if out is not None:
            say(f"wrote {out}; plan with --cluster {out}")


def _started_under(backend: str) -> str:
    """The communicator of whatever started this process."""
    if backend == "numpy" and any(os.environ.get(name, "1") != "1" for name in _WORLD_SIZES):
        return "mpi"
    return "nccl" if backend == "cupy" and os.environ.get("WORLD_SIZE", "1") != "1" else "inprocess"


def _data(found: Profile) -> dict[str, Any]:
    return {
        "cluster": found.cluster.to_json(),
        "seconds": found.seconds,
        "products": [asdict(item) for item in found.products],
        "operators": [asdict(item) for item in found.operators],
        "collectives": [asdict(item) for item in found.transports],
    }


def _print(found: Profile, beside_data: bool) -> None:
    """What was found, and how well the cluster file repeats the measurements."""
    from sbp.report.text import table

    console, cluster = tables(beside_data), found.cluster
    device = cluster.device
    rows = [
        ["matrix products, " + dtype, f"{peak / 1e9:.4g} GFLOP/s", f"{len(times)}", _error(times)]
        for dtype, peak in device.peak_flops_per_second
        if (times := [item for item in found.products if item.dtype == dtype])
    ]
    rows.append(["memory", f"{device.memory_bandwidth_bytes_per_second / 1e9:.4g} GB/s", "1", ""])
    rows.append(["kernel start", f"{device.launch_seconds * 1e6:.3g} us", "1", ""])
    if found.operators:
        rows.append([f"{len(device.operators)} operators", "in steps", f"{len(found.operators)}", ""])
    for members, nodes in sorted({(item.members, item.nodes) for item in found.transports}):
        here = [item for item in found.transports if (item.members, item.nodes) == (members, nodes)]
        tier = cluster.tiers[-1 if nodes > 1 else 0]
        where = f"{members} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
        rate = f"{tier.bandwidth(members) / 1e9:.4g} GB/s"
        rows.append([f"collectives of {where}", rate, f"{len(here)}", _error(here)])
    title = f"{cluster}, a rank's part of it, measured in {found.seconds:.0f} s"
    console.print(table(title, ("what", ">rate", ">measurements", ">mean error of the file"), rows, ""))


def _error(items: Any) -> str:
    errors = [abs(item.predicted / item.seconds - 1) for item in items]
    return f"{sum(errors) / len(errors):.0%}"
