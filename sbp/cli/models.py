"""`sbp models`: the presets, and the values of one, as pins name them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from sbp.cli import options
from sbp.cli.output import print_json, tables


@click.command("models")
@click.argument("name", required=False)
@click.option(
    "--values", is_flag=True, help="List activations and gradients too, not only parameters, inputs and state."
)
@options.model_options
@options.json_option
def models(
    name: str | None,
    values: bool,
    batch: int | None,
    seq: int | None,
    sizes: tuple[str, ...],
    optimizer: str | None,
    precision: str | None,
    recompute: str,
    inference: bool,
    as_json: bool,
) -> None:
    """List the model presets; with NAME, its sizes and the values of its step, by the names that --pin matches.

    \b
    sbp models
    sbp models gpt2
    sbp models gpt2 --values --batch 8 --seq 128
    """
    if inference and optimizer is not None:
        raise click.UsageError("--inference has no optimizer; leave --optimizer out.")
    if name is None:
        if values or sizes or batch or seq or optimizer or precision or inference or recompute != "auto":
            raise click.UsageError("these options describe one model; name it.")
        _list(as_json)
        return
    from sbp.models import size_text
    from sbp.planner.workload import workload

    model = options.resolve_model(name, sizes)
    again = recompute == "full"
    step = workload(model, 1, batch, seq, not inference, options.optimizer_named(optimizer), precision, again)
    graph = step.graph
    shown = [graph.values[value] for value in (graph.values if values else graph.sources)]
    if as_json:
        print_json(
            {
                "name": graph.name,
                "config": dict(step.model.get("config", {})),
                "parameters": sum(graph.values[label].type.elements for label in graph.parameters),
                "nodes": len(graph.nodes),
                "values": [
                    {"name": value.name, "shape": list(value.shape), "dtype": value.dtype, "kind": value.kind}
                    for value in shown
                ],
            }
        )
        return
    from sbp.report.naming import grouped_names, template_of
    from sbp.report.tables import table
    from sbp.report.units import bytes_text, count_text
    from sbp.wording import counted

    groups: dict[Any, list[str]] = {}
    for value in shown:
        groups.setdefault((template_of(value.name)[0], value.type, value.kind), []).append(value.name)
    rows = [
        (
            ", ".join(grouped_names(names)),
            str(kind_type),
            kind,
            str(len(names)),
            bytes_text(kind_type.bytes * len(names)),
        )
        for (_, kind_type, kind), names in groups.items()
    ]
    elements = sum(graph.values[label].type.elements for label in graph.parameters)
    sizes_text = ", ".join(size_text(key, item) for key, item in step.model.get("config", {}).items())
    console = tables(as_json)
    console.print(f"{graph.name}: {count_text(elements)} parameters, {counted(len(graph.nodes), 'node')} in its step")
    if sizes_text:
        console.print(sizes_text)
    console.print(table("Values", ("!name", "!type", "kind", ">count", ">bytes"), rows))


def _list(as_json: bool) -> None:
    from sbp.models import PRESETS, config_named, names, presets, size_text

    published = presets()
    found = {name: config_named(name) for name in names()}
    counts = {name: published.get(name) or config.build().count_parameters() for name, config in found.items()}
    if as_json:
        print_json(
            [
                {"name": name, "parameters": counts[name], "family": type(config).__name__.removesuffix("Config")}
                | {"tiny": name not in PRESETS, "config": asdict(config)}
                for name, config in found.items()
            ]
        )
        return
    from sbp.report.tables import table
    from sbp.report.units import count_text

    rows = [
        (
            name,
            type(config).__name__.removesuffix("Config"),
            count_text(counts[name]),
            ", ".join(size_text(key, value) for key, value in asdict(config).items() if value is not None),
        )
        for name, config in found.items()
    ]
    note = "`--size NAME=VALUE` replaces a size; the tiny ones run in milliseconds on ranks in this process"
    tables(as_json).print(table("Model presets", ("!preset", "?!family", ">parameters", "sizes"), rows, note))
