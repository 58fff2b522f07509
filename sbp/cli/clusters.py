"""`sbp clusters`: the clusters that come with the package, and one of them (or a file) as YAML to edit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from sbp.cli.output import tables

if TYPE_CHECKING:
    from sbp.planner.cluster import Cluster, Tier


@click.command("clusters")
@click.argument("name", required=False, metavar="[NAME-OR-FILE]")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes, in place of the preset's own.")
@click.option(
    "--devices-per-node", type=click.IntRange(min=1), help="Devices in each node, in place of the preset's own."
)
@click.option("--json", "as_json", is_flag=True, help="Data in SI units on stdout.")
def clusters(name: str | None, nodes: int | None, devices_per_node: int | None, as_json: bool) -> None:
    """List the cluster presets, or show one as the YAML file to edit.

    \b
    sbp clusters
    sbp clusters a100-80g --nodes 16 > mine.yaml
    """
    from sbp.planner.cluster import Cluster, presets

    if name is not None:
        cluster = Cluster.resolve(name, nodes, devices_per_node)
        click.echo(_json(cluster.to_json()) if as_json else _yaml(cluster), nl=False)
        return
    if nodes is not None or devices_per_node is not None:
        raise click.UsageError("--nodes and --devices-per-node resize one cluster; name it.")
    found = [Cluster.preset(preset) for preset in presets()]
    if as_json:
        click.echo(_json([cluster.to_json() for cluster in found]), nl=False)
    else:
        _print_table(found)


def _json(data: object) -> str:
    import json

    return json.dumps(data, indent=2) + "\n"


def _yaml(cluster: Cluster) -> str:
    from sbp.planner.cluster_file import dump_cluster

    return dump_cluster(cluster)


def _link(tier: Tier) -> str:
    """A tier's name and bandwidth; of a network card where ranks share them."""
    shared = "" if tier.links is None else f" x {tier.links} per node"
    return f"{tier.name} {tier.bandwidth_bytes_per_second / 1e9:g}{shared}"


def _print_table(clusters: Iterable[Cluster]) -> None:
    """The presets with what distinguishes them, on stdout, which carries no data then."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, caption="bf16 TFLOP/s; GB/s: memory, then per device and direction by tier")
    for title in ("preset", "devices", "TFLOP/s", "GiB", "memory", "links"):
        left = title in ("preset", "links")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for cluster in clusters:
        device = cluster.device
        table.add_row(
            cluster.name,
            f"{cluster.nodes} x {cluster.devices_per_node}",
            f"{device.peak('bf16') / 1e12:g}",
            f"{device.memory_bytes / 2**30:.1f}",
            f"{device.memory_bandwidth_bytes_per_second / 1e9:g}",
            ", ".join(map(_link, cluster.tiers)),
        )
    tables(as_json=False).print(table)
