"""`sbp run`: train with a plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from sbp.cli import options
from sbp.cli.output import console_on, print_json, say, tables

if TYPE_CHECKING:
    from sbp.comm.interface import Communicator
    from sbp.cuda.interface import Backend
    from sbp.runtime.planned import Beginning

DIFFERENT = 1
"""Exit code of --compare where a loss differs from the unsharded run's."""

TOLERANCE = {"f64": 1e-9, None: 1e-4}
"""Relative difference of losses that --compare allows: in float64, and in the element types of the plan."""


@click.command("run")
@click.argument("plan_file", metavar="PLAN.JSON")
@click.option("--steps", type=click.IntRange(min=1), default=10, show_default=True, help="Training steps.")
@click.option("--text", type=click.Path(), help="Text file whose bytes are the tokens; default one that Python ships.")
@click.option("--backend", type=click.Choice(["numpy", "cupy"]), default="numpy", show_default=True,
              help="Where arrays live: this machine's memory, or the GPU's (extra cuda).")  # fmt: skip
@click.option("--comm", type=click.Choice(["inprocess", "mpi", "nccl"]), default="inprocess", show_default=True,
              help="mpi: start under mpirun; nccl: start under torchrun, or with its variables set.")  # fmt: skip
@click.option("--float64", "double", is_flag=True, help="Compute in float64 in place of the plan's element types.")
@click.option("--compare", is_flag=True, help="Train unsharded too, and compare the losses step by step.")
@click.option("--seed", type=click.IntRange(min=0),
              help="Of the initial state and the batches; default 0, or that of the run resumed.")  # fmt: skip
@click.option("--save", type=click.Path(), metavar="FOLDER", help="Save the state here at the end.")
@click.option("--save-every", type=click.IntRange(min=1), metavar="STEPS", help="And after every so many steps.")
@click.option("--resume", type=click.Path(), metavar="FOLDER",
              help="Go on from a saved state, whatever ranks and layouts it was saved from.")  # fmt: skip
@click.option("--force", is_flag=True, help="Run in this process even what is too large for it.")
@options.json_option
@options.quiet_option
@click.pass_context
def run(
    context: click.Context, plan_file: str, steps: int, text: str | None, backend: str, comm: str, double: bool,
    compare: bool, seed: int | None, save: str | None, save_every: int | None, resume: str | None, force: bool,
    as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Train with a plan: language models on the bytes of a text, all others on random inputs.

    All ranks live in this process unless --comm says otherwise. The plan must be for training, and small enough for
    the machine.

    \b
    sbp run plan.json --steps 50
    sbp run plan.json --steps 20 --compare --float64
    sbp run plan.json --steps 500 --save state --save-every 100
    sbp run other-plan.json --steps 500 --resume state
    mpirun -n 4 sbp run plan.json --steps 50 --comm mpi
    torchrun --nproc-per-node 8 --no-python sbp run plan.json --steps 50 --backend cupy --comm nccl
    """
    from sbp.planner.plan import Plan
    from sbp.runtime.planned import resumed, run_plan

    if save_every is not None and save is None:
        raise click.UsageError("--save-every says how often to save; give --save FOLDER too.")
    plan = Plan.load(plan_file)
    begin = resumed(plan, resume, text, seed)
    made, communicator = communicator_for(backend, comm, quiet)
    speaks = speaks_for_all(communicator)
    floating = "f64" if double else None
    # Read now: the run may save over what it resumes from.
    state = begin.checkpoint.arrays() if compare and speaks and begin.checkpoint is not None else None
    with _bar("sharded", begin.steps, steps, quiet or not speaks) as shown:
        trained = run_plan(
            plan, steps, text=text, seed=begin.seed, floating=floating, backend=made, communicator=communicator,
            progress=shown, force=force, save=save, save_every=save_every, resume=begin.checkpoint,
        )
    if communicator is not None:
        communicator.close()
    if save is not None and speaks and not quiet:
        say(f"The state after {begin.steps + steps} steps is in {save}.")
    if not speaks:
        return
    data: dict[str, Any] = {
        "first_step": begin.steps, "steps": steps, "mesh": str(plan.mesh), "losses": list(trained.losses),
    }  # fmt: skip
    reference = _unsharded(plan, begin, steps, text, state, floating, quiet) if compare else None
    worst = 0.0
    if reference is not None:
        worst = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(trained.losses, reference))
        data |= {"unsharded_losses": list(reference), "largest_relative_difference": worst}
    if not quiet:
        _print(plan, begin.steps, trained.losses, reference, worst, as_json)
    if as_json:
        print_json(data)
    if not worst <= TOLERANCE[floating]:  # a loss that is not a number is different, too
        click.echo(
            f"sbp run: the losses differ from the unsharded run by up to {worst:.2e}, more than the "
            f"{TOLERANCE[floating]:g} allowed; `sbp verify {plan_file}` finds the operation.", err=True,
        )  # fmt: skip
        context.exit(DIFFERENT)


def communicator_for(backend: str, comm: str, quiet: bool) -> tuple[Backend | None, Communicator | None]:
    """The backend and communicator that a command's options name; None stands for the default."""
    if comm == "nccl" and backend != "cupy":
        raise click.UsageError("--comm nccl moves GPU arrays; give --backend cupy too.")
    if comm == "mpi" and backend != "numpy":
        raise click.UsageError("--comm mpi moves host arrays; use --backend numpy, or --comm nccl.")
    made: Backend | None = None
    communicator: Communicator | None = None
    if comm == "mpi":
        from sbp.comm.mpi import MPICommunicator

        communicator = MPICommunicator()
    elif comm == "nccl":
        from sbp.comm.nccl import NCCLCommunicator

        communicator = NCCLCommunicator()
    if backend == "cupy":
        from sbp.cuda.cupy_backend import CupyBackend

        made = gpu = CupyBackend()
        if not quiet:
            ranks = "all ranks" if communicator is None else f"rank {', '.join(map(str, communicator.ranks))}"
            say(f"{ranks} on {gpu.place}")
    return made, communicator


def speaks_for_all(communicator: Communicator | None) -> bool:
    """Of several processes one prints."""
    return communicator is None or 0 in communicator.ranks


def _unsharded(
    plan: Any, begin: Beginning, steps: int, text: str | None, state: Mapping[str, Any] | None, floating: str | None,
    quiet: bool,
) -> tuple[float, ...]:  # fmt: skip
    from sbp.runtime.planned import batches_for
    from sbp.runtime.train import train_unsharded

    with _bar("unsharded", begin.steps, steps, quiet) as shown:
        batches = batches_for(plan, text, begin.seed, begin.steps)
        return train_unsharded(
            plan.graph, batches, steps, seed=begin.seed, floating=floating, state=state, progress=shown,
            first_step=begin.steps,
        ).losses  # fmt: skip


@contextmanager
def _bar(title: str, first: int, steps: int, quiet: bool) -> Iterator[Callable[[int, float], None] | None]:
    """A progress bar with the loss, on stderr; ten lines where no terminal is."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        every, last = max(1, steps // 10), first + steps

        def line(step: int, loss: float) -> None:
            if (step + 1 - first) % every == 0 or step + 1 == last:
                say(f"{title}: step {step + 1} of {last}, loss {loss:.6f}")

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console_on(sys.stderr)) as shown:
        task = shown.add_task(title, total=first + steps, completed=first, loss="")
        yield lambda step, loss: shown.update(task, completed=step + 1, loss=f"loss {loss:.6f}")


def _print(
    plan: Any, first: int, losses: tuple[float, ...], reference: tuple[float, ...] | None, worst: float, as_json: bool
) -> None:
    from sbp.report.text import table

    steps = len(losses)
    shown = sorted({*range(min(3, steps)), *range(0, steps, max(1, steps // 10)), steps - 1})
    rows = []
    for step in shown:
        row = [str(first + step + 1), f"{losses[step]:.9f}"]
        if reference is not None:
            row += [
                f"{reference[step]:.9f}",
                f"{abs(losses[step] - reference[step]) / max(abs(reference[step]), 1e-30):.1e}",
            ]
        rows.append(row)
    columns = (">step", ">loss") if reference is None else (">step", ">loss", ">unsharded", ">relative difference")
    console = tables(as_json)
    title = f"{plan.graph.name} on {plan.mesh}, {plan.mesh.size} ranks"
    note = "" if reference is None else f"largest relative difference of a loss over all {steps} steps: {worst:.1e}"
    console.print(table(title, columns, rows, note))
