"""`sbp predict`: step time, utilisation and memory of a given configuration of a given framework."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sbp.cli import options
from sbp.cli.output import print_json, tables

if TYPE_CHECKING:
    from sbp.planner.replay import Configuration, Prediction


@click.command("predict")
@click.option(
    "--model", type=click.Choice(("gpt", "llama", "bert")), default="gpt", show_default=True, help="Kind of layers."
)
@click.option("--layers", type=click.IntRange(min=1), required=True, help="Transformer layers.")
@click.option("--hidden", type=click.IntRange(min=1), required=True, help="Width of the residual stream.")
@click.option("--heads", type=click.IntRange(min=1), required=True, help="Attention heads.")
@click.option("--kv-heads", type=click.IntRange(min=1), help="Key/value heads of a llama; default those of queries.")
@click.option("--ffn", type=click.IntRange(min=1), help="Width of the feed-forward layer; default 4 times hidden.")
@click.option("--seq", type=click.IntRange(min=1), required=True, help="Tokens of a sequence.")
@click.option("--vocab", type=click.IntRange(min=1), required=True, help="Tokens of the vocabulary.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", type=click.IntRange(min=1), default=1, show_default=True, help="Pipeline stages.")
@click.option("--dp", type=click.IntRange(min=1), default=1, show_default=True, help="Data-parallel replicas.")
@click.option("--cp", type=click.IntRange(min=1), default=1, show_default=True, help="Context-parallel ranks.")
@click.option("--micro-batch", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at once.")
@click.option("--global-batch", type=click.IntRange(min=1), required=True, help="Sequences of a step.")
@click.option(
    "--schedule", default="1f1b", show_default=True, metavar="NAME", help="1f1b, gpipe, interleaved:2 or zero-bubble."
)
@click.option(
    "--recompute",
    type=click.Choice(("none", "selective", "full")),
    default="none",
    show_default=True,
    help="What the backward phase runs again: nothing, attention, or every layer.",
)
@click.option("--sequence-parallel", is_flag=True, help="Split the residual stream along the sequence.")
@click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="What replicas share.")
@click.option(
    "--precision",
    type=click.Choice(("mixed", "f32", "fp8")),
    default="mixed",
    show_default=True,
    help="Element types of the matrix products.",
)
@click.option("--framework", default="megatron-core", show_default=True, metavar="NAME", help="Traits by name.")
@click.option("--cluster", required=True, metavar="PRESET-OR-FILE", help="See `sbp clusters`; sized by the ranks.")
@click.option("--devices-per-node", type=click.IntRange(min=1), help="Default the cluster's own.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write the timeline for Perfetto.")
@options.json_option
def predict(trace: Path | None, as_json: bool, **given: Any) -> None:
    """Predict step time, utilisation and peak memory of a training configuration.

    \b
    sbp predict --model gpt --layers 80 --hidden 12288 --heads 96 --seq 2048 --vocab 51200 --tp 8 --pp 8 --dp 24 \\
      --micro-batch 2 --global-batch 2304 --schedule interleaved:2 --recompute full --framework megatron-2021 \\
      --cluster a100-80g
    """
    from sbp.planner.replay import predict as predict_configuration

    prediction = predict_configuration(_configuration(**given))
    if trace is not None:
        from sbp.planner.trace import save_trace

        save_trace(prediction.step, trace)
    if as_json:
        print_json(prediction.to_json())
    else:
        _print(prediction)


def _configuration(
    model: str, layers: int, hidden: int, heads: int, kv_heads: int | None, ffn: int | None, seq: int, vocab: int,
    cluster: str, devices_per_node: int | None, framework: str, tp: int, pp: int, dp: int, cp: int, **rest: Any,
) -> Configuration:  # fmt: skip
    from sbp.models.bert import BertConfig
    from sbp.models.gpt import GPTConfig
    from sbp.models.llama import LlamaConfig
    from sbp.planner.cluster import Cluster
    from sbp.planner.frameworks import Framework
    from sbp.planner.replay import Configuration, for_ranks

    if kv_heads is not None and model != "llama":
        raise click.UsageError("--kv-heads is for --model llama; leave it out.")
    wide = ffn or 4 * hidden
    sizes: GPTConfig | LlamaConfig | BertConfig
    if model == "gpt":
        sizes = GPTConfig(layers, heads, hidden, vocab, seq, wide, dropout=0.1)
    elif model == "llama":
        sizes = LlamaConfig(layers, heads, kv_heads or heads, hidden, wide, vocab, seq)
    else:
        sizes = BertConfig(layers, heads, hidden, wide, vocab, seq)
    machine = for_ranks(Cluster.resolve(cluster, None, devices_per_node), tp * pp * dp * cp)
    rest["sequence"] = seq
    return Configuration(sizes, machine, Framework.named(framework), tp=tp, pp=pp, dp=dp, cp=cp, **rest)


def _print(prediction: Prediction) -> None:
    from rich.table import Table

    run, step = prediction.configuration, prediction.step
    console = tables(as_json=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    gib = 2**30
    memory = run.cluster.device.memory_bytes
    spread = f"tp {run.tp} x pp {run.pp} x dp {run.dp}" + (f" x cp {run.cp}" if run.cp > 1 else "")
    for name, value in (
        ("ranks", f"{run.ranks} = {spread} of {run.cluster}"),
        ("step", f"{prediction.step_seconds:.4g} s, {run.micro_batches} micro-batches of {run.micro_batch}"),
        ("tokens", f"{prediction.tokens_per_second:,.0f} per second"),
        ("MFU, HFU", f"{100 * prediction.mfu:.1f} %, {100 * prediction.hfu:.1f} %"),
        ("bubble", f"{100 * step.bubble_fraction:.1f} % of the stages' time"),
        *((name, f"{seconds:.4g} s") for name, seconds in step.breakdown_seconds.items()),
        ("peak memory", f"{prediction.peak_bytes / gib:.1f} of {memory / gib:.1f} GiB"),
        ("fits", "yes" if prediction.feasible else "no"),
    ):
        table.add_row(name, value)
    console.print(table)
    stages = Table(box=None, pad_edge=False, title="GiB per device, by stage", title_justify="left")
    names = ("weights", "gradients", "optimizer", "activations", "working", "context", "total")
    for name in ("stage", *names):
        stages.add_column(name, justify="right")
    shown = list(enumerate(prediction.memory))
    for stage, item in shown if len(shown) <= 8 else [*shown[:3], *shown[-3:]]:
        stages.add_row(str(stage), *(f"{getattr(item, name) / gib:.1f}" for name in names))
    console.print(stages)
