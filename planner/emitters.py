"""Settings written as Megatron-LM's arguments and as TorchTitan's configuration file.

Names of arguments are those of Megatron-LM's `megatron/training/arguments.py` (core 0.12 and later) and of TorchTitan's
job configuration in TOML (0.2). Only what a plan decides is written; the model and the data are the user's.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbp.planner.plan import Plan
from sbp.planner.settings import Recognised, Setting

RECOMPUTE = ("--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1")
FULLY_SHARDED = (
    "--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params", "--use-distributed-optimizer",
    "--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor",
)  # fmt: skip


def megatron(plan: Plan, recognised: Recognised) -> str:
    """Arguments for Megatron-LM's pretraining scripts, one a line, after comments on what they cost."""
    return "\n".join([*_comments(plan, recognised, "Megatron-LM"), *megatron_arguments(recognised.setting)]) + "\n"


def megatron_arguments(setting: Setting) -> list[str]:
    """`--tensor-model-parallel-size 2` and so on."""
    found = [
        f"--tensor-model-parallel-size {setting.tensor}",
        "--pipeline-model-parallel-size 1",
        f"--context-parallel-size {setting.context}",
    ]
    if setting.experts > 1:
        found.append(f"--expert-model-parallel-size {setting.experts}")
    if setting.sequence:
        found.append("--sequence-parallel")
    if setting.zero == 3:
        found += FULLY_SHARDED
    elif setting.zero:
        found.append("--use-distributed-optimizer")
    if setting.zero and setting.replicate > 1:
        found.append(f"--num-distributed-optimizer-instances {setting.replicate}")
    found.append(f"--micro-batch-size {_local_batch(setting)}")
    found.append(f"--global-batch-size {setting.batch}")
    if setting.length:
        found.append(f"--seq-length {setting.length}")
    if setting.precision in ("mixed", "bf16"):
        found.append("--bf16")
    if setting.recompute:
        found += RECOMPUTE
    return found


def torchtitan(plan: Plan, recognised: Recognised) -> str:
    """The sections of TorchTitan's configuration that a plan decides, after comments on what they cost."""
    setting = recognised.setting
    replicate, shard = setting.replicate, setting.shard
    lines = [
        *_comments(plan, recognised, "TorchTitan"),
        "[training]",
        f"local_batch_size = {_local_batch(setting)}",
        f"global_batch_size = {setting.batch}",
    ]
    if setting.length:
        lines.append(f"seq_len = {setting.length}")
    if setting.precision == "mixed":
        lines.append('mixed_precision_param = "bfloat16"')
    if setting.precision == "bf16":
        lines.append('dtype = "bfloat16"')
    lines += [
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {shard}",
    ]
    if setting.zero:
        reshard = "always" if setting.zero == 3 and setting.regather else "never"
        lines.append(f'fsdp_reshard_after_forward = "{reshard}"')
    lines += [
        f"tensor_parallel_degree = {setting.tensor}",
        f"context_parallel_degree = {setting.context}",
        "pipeline_parallel_degree = 1",
        f"expert_parallel_degree = {setting.experts}",
        "",
        "[activation_checkpoint]",
        f'mode = "{"full" if setting.recompute else "none"}"',
    ]
    return "\n".join(lines) + "\n"


def _local_batch(setting: Setting) -> int:
    return max(1, setting.batch // setting.data)


def _comments(plan: Plan, recognised: Recognised, framework: str) -> Iterator[str]:
    setting = recognised.setting
    roles = ", ".join(f"{axis}: {role}" for axis, role in setting.roles.items()) or "one rank"
    yield f"# {plan.graph.name} on {plan.mesh}, {framework}. {roles}."
    if recognised.exact:
        yield f"# The plan is this setting: {recognised.found_seconds:.6g} s a step."
    else:
        share = recognised.loss_seconds / recognised.found_seconds if recognised.found_seconds else 0.0
        yield (
            f"# The nearest setting: {recognised.setting_seconds:.6g} s a step, the plan "
            f"{recognised.found_seconds:.6g} s ({share:+.1%} for the setting)."
        )
        first = "; ".join(f"{item.place} is {item.layout}" for item in recognised.departures[:2])
        yield f"# The plan departs from it in {len(recognised.departures)} places: {first}."
    if not recognised.fits:
        yield "# The setting does not fit the memory limit of the plan."
    yield from (f"# {note}" for note in notes(plan, setting, framework))


def notes(plan: Plan, setting: Setting, framework: str) -> list[str]:
    """What the framework does otherwise than the setting says."""
    found = []
    axes = list(setting.roles)
    inner = [axis for axis, role in setting.roles.items() if role.startswith("tensor")]
    if inner and axes[-1] != inner[0]:
        found.append(
            f"{framework} makes neighbouring ranks tensor parallel; in the plan {inner[0]} is not the last axis."
        )
    if framework == "TorchTitan":
        if setting.tensor > 1 and not setting.sequence:
            found.append("TorchTitan's tensor parallelism is always with sequence parallelism; the plan's is without.")
        if setting.zero in (1, 2):
            found.append("TorchTitan shards parameters too; kept after forward they are gathered once a step, as here.")
        if setting.precision == "f32":
            found.append(
                "The plan is in float32; TorchTitan computes in bfloat16 unless mixed_precision_param says so."
            )
    if setting.zero == 3 and not setting.regather and framework == "Megatron-LM":
        found.append("The plan keeps gathered parameters for backward; Megatron-FSDP gathers them again.")
    if setting.batch % setting.data:
        found.append(f"The batch of {setting.batch} does not divide by {setting.data} data-parallel ranks.")
    return found
