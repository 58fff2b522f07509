"""`sbp`: the group of commands, and what every error becomes: one paragraph and an exit code, never a traceback.

Exit codes: 0 done, 1 a check found something wrong, 2 bad input, 3 infeasible, 4 time limit without a solution, 70 a
fault of sbp, 130 Ctrl-C, 141 the reader of stdout went away.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from sbp.cli.streams import silence, stand_in_for_closed_streams, unwritable

COMMANDS = {
    "plan": ("sbp.cli.plan", "plan", "Choose the layout of every tensor of a model on a cluster."),
    "report": ("sbp.cli.report", "report", "Show where a plan's time and memory go, and its layouts."),
    "compare": ("sbp.cli.compare", "compare", "Put the found plan beside data, tensor and fully sharded parallelism."),
    "verify": ("sbp.cli.verify", "verify", "Run a plan on ranks in this process against the unsharded program."),
    "run": ("sbp.cli.run", "run", "Train with a plan on ranks in this process, over MPI or over NCCL."),
    "predict": ("sbp.cli.predict", "predict", "Predict time and memory of a given training configuration."),
    "validate": ("sbp.cli.validate", "validate", "Hold predictions against published runs."),
    "simulate": ("sbp.cli.simulate", "simulate", "Simulate a step of a plan or pipeline, event by event."),
    "export": ("sbp.cli.export", "export", "Write a plan for PyTorch, Megatron-LM or TorchTitan."),
    "models": ("sbp.cli.models", "models", "List the model presets, or the values of one."),
    "clusters": ("sbp.cli.clusters", "clusters", "List the cluster presets, or show one as a file to edit."),
    "profile": ("sbp.cli.profile", "profile", "Measure this machine and write it as a cluster file."),
    "check-rules": ("sbp.cli.check_rules", "check_rules", "Prove operators' layout rules by brute force."),
    "solve": ("sbp.cli.solve", "solve", "Solve a layout problem in the contest's JSON."),
    "evaluate": ("sbp.cli.solve", "evaluate", "Check a solution of a layout problem and state its cost."),
}
"""Command -> (module, attribute, what it does); the modules are imported when their command runs."""

FAULT, INTERRUPTED, READER_GONE = 70, 130, 141


class ReaderGone(Exception):
    """Whoever read stdout has left."""


class Commands(click.Group):
    """A group that imports a command's module when it is called, not to list it."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except BrokenPipeError:  # --help and --version print here
            raise ReaderGone from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGone from None  # click would exit with 1, which means something else here

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}? Commands" if near else "commands"
            raise click.UsageError(f"there is no command {args[0]!r}; {hint} are {', '.join(COMMANDS)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="sbp", prog_name="sbp")
def cli() -> None:
    """Plan how a model's tensors lie over a cluster, see what it costs, prove the plan by running it.

    \b
    sbp plan gpt2 --cluster a100-80g --nodes 1 --batch 64 --seq 1024 --out plan.json
    sbp report plan.json
    sbp verify plan.json

    Exit codes: 0 done, 1 verify, run --compare or check-rules found something wrong, 2 bad input, 3 infeasible,
    4 time limit without a solution. SBP_DEBUG=1 shows tracebacks.
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script: run a command and exit with its code."""
    stand_in_for_closed_streams()
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run a command; returns its exit code."""
    command = next((item for item in arguments if item in COMMANDS), "")
    place = f"sbp {command}".strip()
    from sbp.errors import SbpError

    try:
        code = cli.main(arguments, prog_name="sbp", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (BrokenPipeError, ReaderGone):
        silence(sys.stdout)
        return READER_GONE
    except (KeyboardInterrupt, click.Abort):
        _say(f"{place}: interrupted.")
        return INTERRUPTED
    except click.ClickException as error:
        usage = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else place
        _say(f"{usage}: {error.format_message()} `{usage} --help` lists the options.")
        return 2
    except SbpError as error:
        if _debugging():
            traceback.print_exc()
        _say(f"{place}: {error}")
        return error.exit_code
    except MemoryError:
        _say(
            f"{place}: this machine's memory does not suffice; use smaller sizes, or --scaled where the command has it."
        )
        return 2
    except OSError as error:
        if _debugging():
            traceback.print_exc()
        why = unwritable(error)
        if not why:  # a file, a folder, a socket: what the system refuses is no fault of sbp
            subject = f"{error.filename}: " if error.filename is not None else ""
            why = f"the system refused: {subject}{error.strerror or error}"
        _say(f"{place}: {why}.")
        return 2
    except Exception as error:
        if _debugging():
            traceback.print_exc()
        _say(
            f"{place}: stopped by a fault of sbp, not of your input: {type(error).__name__}: {_one_line(error)} "
            "Please report it with the command line; SBP_DEBUG=1 in the environment shows where it happened."
        )
        return FAULT


def _debugging() -> bool:
    return os.environ.get("SBP_DEBUG", "") not in ("", "0")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text[:400] + " ..." if len(text) > 400 else text
    return text if text.endswith((".", "!", "?")) else f"{text}." if text else ""


def _say(text: str) -> None:
    """A paragraph on stderr; where stderr is gone as well, nobody listens."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)
