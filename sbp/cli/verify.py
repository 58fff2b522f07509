"""`sbp verify`: a plan's step on ranks in this process, against the unsharded program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sbp.cli import options
from sbp.cli.output import print_json, progress, tables

if TYPE_CHECKING:
    from sbp.graph import Graph
    from sbp.nn.module import Module
    from sbp.planner.cluster import Cluster
    from sbp.planner.plan import Plan
    from sbp.runtime.verify import Verification

WRONG = 1
"""Exit code where the sharded program computes something else than the unsharded one."""

_SLOWER = 100.0
"""The FLOP per byte of a product grows with its widths; tiny ones have about this much less."""

_OF_A_MODEL = frozenset(
    {"--mesh", "--cluster", "--nodes", "--devices-per-node", "--batch", "--seq", "--size", "--optimizer"}
    | {"--precision", "--inference", "--pin", "--memory-limit"}
)


@click.command("verify")
@click.argument("what", metavar="PLAN.JSON|MODEL")
@click.option(
    "--scaled", is_flag=True, help="The same step with tiny widths; the default where it is too large to run."
)
@click.option("--random", "random_plans", type=click.IntRange(min=0), default=0, metavar="N",
              help="Verify N random legal plans besides.")  # fmt: skip
@options.cluster_options(required=False)
@options.model_options
@options.search_options
@options.json_option
@options.quiet_option
@click.pass_context
def verify(
    context: click.Context, what: str, scaled: bool, random_plans: int, sizes: tuple[str, ...],
    as_json: bool, quiet: bool, **given: Any,
) -> None:  # fmt: skip
    """Run one step of a plan sharded, with random inputs in float64, and compare all it makes with the unsharded run.

    PLAN.JSON is what `sbp plan --out` wrote; a MODEL (see `sbp models`, or a graph's JSON file) is planned first, on a
    mesh of its own, given by --mesh, unless a cluster is named. Every output, gradient and next state must agree;
    exit code 1 if one does not.

    \b
    sbp verify plan.json
    sbp verify gpt2 --mesh 2,2 --scaled
    sbp verify resnet-50 --mesh 3 --scaled --random 20
    """
    with progress(quiet) as say:
        if _is_plan(what):
            _refuse(context)
            from sbp.planner.plan import Plan

            plan = Plan.load(what)
        else:
            plan = _planned(what, sizes, scaled, given, say)
        results = _verified(plan, scaled and _is_plan(what), given["seed"], random_plans, say)
    if not quiet:
        from sbp.report.text import NOTHING_SPLIT

        console = tables(as_json)
        for name, result, split in results:
            console.print(f"{name}: {result}{'' if split else f' Nothing is split: {NOTHING_SPLIT}.'}")
    if as_json:
        print_json(
            {
                "passed": all(result.passed for _, result, _ in results),
                "plans": [{"plan": name, "split": split, **_data(result)} for name, result, split in results],
            }
        )
    if not all(result.passed for _, result, _ in results):
        context.exit(WRONG)


def _is_plan(what: str) -> bool:
    """A file that says it is a plan; a graph's file is planned like a model."""
    if not what.endswith(".json"):
        return False
    try:
        with Path(what).open("rb") as file:
            head = file.read(400)
            return b'"sbp-plan"' in head or b'"values"' not in head
    except OSError:
        return True  # reading the plan then says what is wrong


def _refuse(context: click.Context) -> None:
    """Options that choose a plan say nothing about one that is made."""
    given = [
        name
        for parameter in context.command.params
        for name in parameter.opts
        if name in _OF_A_MODEL
        and context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"{', '.join(given)}: these choose how a model is planned; the plan file is planned already."
        )


def _planned(
    what: str, sizes: tuple[str, ...], scaled: bool, given: dict[str, Any], say: Callable[[str], None] | None
) -> Plan:
    from sbp.mesh import Mesh
    from sbp.planner.auto_parallel import auto_parallel

    if given["cluster"] is None:
        if given["mesh"] is None:
            raise click.UsageError("a model needs --mesh (such as --mesh 2,2) or --cluster to be planned on.")
        mesh = Mesh.parse(given["mesh"])
        given = {**given, "cluster": "cpu", "nodes": 1, "devices_per_node": mesh.size}
    arguments = options.planning_arguments(**given)
    model = _scaled(what, sizes) if scaled else options.resolve_model(what, sizes)
    if scaled:
        arguments["cluster"] = _scaled_cluster(arguments["cluster"])
        if arguments["batch"] is None:
            arguments["batch"] = 2 * arguments["cluster"].size
    return auto_parallel(model, arguments.pop("cluster"), progress=say, **arguments)


def _scaled(name: str, sizes: tuple[str, ...]) -> Module | Graph:
    """The module of a preset with tiny widths."""
    from sbp.models import build, called, config_named

    if name.endswith(".json") or "/" in name:
        raise click.UsageError("--scaled makes a preset small; the graph of a file has its own sizes.")
    config = config_named(name).scaled()
    try:
        return called(build(config, **options.parse_sizes(sizes)), f"scaled {name}")
    except (TypeError, ValueError) as error:
        raise click.UsageError(f"--size {','.join(sizes)} does not fit {name}: {error}.") from None


def _scaled_cluster(cluster: Cluster) -> Cluster:
    """The cluster as tiny widths would see it at full size: nothing to start, slower arithmetic.

    On the real one nothing that small is worth splitting, and a plan that keeps everything everywhere proves little.
    """
    from dataclasses import replace

    device = cluster.device
    peaks = tuple((dtype, peak / _SLOWER) for dtype, peak in device.peak_flops_per_second)
    tiers = (
        replace(tier, latency_seconds=0.0, hop_seconds=0.0, ramp_seconds_per_sqrt_byte=0.0) for tier in cluster.tiers
    )
    return replace(
        cluster,
        name=f"{cluster.name}, scaled",
        device=replace(device, launch_seconds=0.0, peak_flops_per_second=peaks),
        tiers=tuple(tiers),
    )


def _verified(
    plan: Plan, scaled: bool, seed: int, random_plans: int, say: Callable[[str], None] | None
) -> list[tuple[str, Verification, bool]]:
    """Name, comparison, and whether anything is split, of the plan and of random ones."""
    from sbp.report.summary import is_split
    from sbp.runtime.planned import is_small, verify_plan
    from sbp.runtime.verify import verify as compare_runs

    if say:
        say(f"running {plan.graph.name} on {plan.mesh}, sharded and unsharded")
    results = [("plan", verify_plan(plan, seed, scaled=True if scaled else None), is_split(plan.physical))]
    if not random_plans:
        return results
    from sbp.planner.boxing import BoxingTable
    from sbp.planner.decisions import random_decisions
    from sbp.planner.lowering import lower
    from sbp.planner.workload import scaled_workload

    graph = scaled_workload(plan.model) if scaled or not is_small(plan.graph) else plan.graph
    boxing = BoxingTable(plan.mesh, plan.costs)
    for number in range(random_plans):
        if say:
            say(f"running random plan {number + 1} of {random_plans}")
        decisions = random_decisions(graph, plan.mesh, seed + number)
        physical = lower(graph, plan.mesh, decisions, plan.costs, boxing)
        results.append((f"random plan {number + 1}", compare_runs(graph, physical, seed), is_split(physical)))
    return results


def _data(result: Verification) -> dict[str, Any]:
    def one(check: Any) -> dict[str, Any]:
        return {
            "value": check.value,
            "role": check.role,
            "type": check.type,
            "layout": str(check.layout),
            "producer": check.producer,
            "error": check.error,
            "passed": check.passed,
        }

    return {
        "graph": result.graph,
        "mesh": result.mesh,
        "rtol": result.rtol,
        "passed": result.passed,
        "worst": one(result.worst) if result.worst else None,
        "first_wrong": one(result.first_wrong) if result.first_wrong else None,
        "checks": [one(check) for check in result.checks],
    }
