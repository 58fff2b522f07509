"""Hugging Face models trained in PyTorch under exported plans, beside single-process PyTorch.

`python benchmarks/torch_export.py [--steps 20] [--only Llama]` plans a small Llama and a small GPT-2 on every mesh,
trains them under torchrun with gloo on the CPU, and prints per plan

* the largest relative difference of the losses from those of the module trained in one process (float32: sums of a
  split dimension are made in another order; the tolerance is 1e-4 after 20 steps of AdamW);
* collectives by kind: number and bytes that the plan has, that the export's report says, and that PyTorch sees in one
  forward, backward and optimizer step (CommDebugMode counts; bytes are the larger of a call's input and output);
* why these differ: what the report says is seen; it differs from the plan by what it lists below (gathers at other
  places, layouts that the optimizer does not follow) and by uneven shards, which travel padded to equal ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "c10d.allreduce_": "all_reduce", "c10d._allgather_base_": "all_gather",
    "c10d._reduce_scatter_base_": "reduce_scatter", "c10d.alltoall_base_": "all_to_all",
}  # fmt: skip
BATCH, SEQUENCE = 16, 32
TOLERANCE = 1e-4


def models() -> dict[str, Any]:
    """Name -> function that builds it, with random weights from its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 251, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
    llama = LlamaConfig(
        **sizes, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    gpt2 = GPT2Config(
        **sizes, n_embd=64, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    return {"Llama": lambda: LlamaForCausalLM(llama), "GPT-2": lambda: GPT2LMHeadModel(gpt2)}


def build(name: str) -> Any:
    """The model, always with the same weights."""
    import torch

    torch.manual_seed(0)
    return models()[name]().train()


def batch(step: int) -> dict[str, Any]:
    """Tokens of a step; there are five batches, so that 20 steps learn something."""
    import torch

    generator = torch.Generator().manual_seed(step % 5)
    tokens = torch.randint(0, 251, (BATCH, SEQUENCE), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def plans(processes: int, only: Sequence[str] = ()) -> dict[str, Any]:
    """Name -> model and plan, free on every mesh and in ways that frameworks have; `only` is part of wanted names."""
    from sbp import Cluster, auto_parallel
    from sbp.frontend.torch import import_module
    from sbp.mesh import Mesh
    from sbp.planner.styles import DataParallel, FullyShardedDataParallel, ShardedOptimizer, Styles, TensorParallel

    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=processes)
    line, grid = Mesh((processes,), ("dp",)), Mesh((processes // 2, 2), ("dp", "tp"))
    ways: list[tuple[str, Mesh, tuple[Any, ...]]] = [("found", line, ()), ("found", grid, ())]
    ways += [("ZeRO-1", line, (ShardedOptimizer(),)), ("ZeRO-3", line, (FullyShardedDataParallel(),))]
    ways += [("ZeRO-3 x tensor", grid, (FullyShardedDataParallel(), TensorParallel(sequence=True)))]
    ways += [("data x tensor", grid, (DataParallel(), TensorParallel(sequence=True)))]
    found = {}
    wanted = [(name, way, mesh, styles) for name in models() for way, mesh, styles in ways]
    wanted = [item for item in wanted if not only or any(text in f"{item[0]}, {item[1]}, {item[2]}" for text in only)]
    for name in dict.fromkeys(item[0] for item in wanted):
        graph = import_module(build(name), batch(0), optimizer="adamw").graph
        for way, mesh, styles in [item[1:] for item in wanted if item[0] == name]:
            restriction = (lambda g, m, styles=styles: Styles(g, m, *styles)) if styles else None
            plan = auto_parallel(graph, cluster, mesh=mesh, time_limit=20, restriction=restriction)
            found[f"{name}, {way}, {plan.mesh}"] = (name, plan)
    return found


def train(module: Any, steps: int) -> list[float]:
    """Losses of steps of AdamW."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        made = module(**batch(step))
        loss = made if isinstance(made, torch.Tensor) else made.loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def seen(module: Any) -> dict[str, Any]:
    """What PyTorch sees of collectives in one step: kind -> [number, bytes], the numbers by CommDebugMode."""
    import torch
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    sent = dict.fromkeys(KINDS.values(), 0)

    class Bytes(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kind = KINDS.get(str(function._overloadpacket)) if hasattr(function, "_overloadpacket") else None
            if kind:
                tensors = [item for item in tree_flatten(args)[0] if isinstance(item, torch.Tensor)]
                sent[kind] += max(tensor.numel() * tensor.element_size() for tensor in tensors)
            return function(*args, **(kwargs or {}))

    with Bytes(), CommDebugMode() as mode:
        train(module, 1)
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    unknown = set(counts) - set(KINDS)
    assert not unknown, f"collectives of another kind: {unknown}"
    return {kind: [counts.get(op, 0), sent[kind]] for op, kind in KINDS.items()}


def worker(folder: Path, steps: int) -> None:
    """One process of torchrun; the first writes the results."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from sbp import Plan

    dist.init_process_group("gloo")
    results = []
    for number, (name, model) in enumerate(json.loads((folder / "cases.json").read_text())):
        plan = Plan.load(folder / f"{number}.json")
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
        module = plan.to_torch(build(model), mesh)
        losses = train(module, steps)
        report = module.sbp.report
        said = {kind: asdict(counts) for kind, counts in report.counts().items()}
        results.append({"name": name, "losses": losses, "said": said, "seen": seen(module), "report": str(report)})
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def run(steps: int, processes: int, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Everything, as data; `expected` are the losses of single-process PyTorch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), plans(processes, only)
        for number, (_, plan) in enumerate(found.values()):
            plan.save(folder / f"{number}.json")
        (folder / "cases.json").write_text(json.dumps([(name, model) for name, (model, _) in found.items()]))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [__file__, "--worker", place, "--steps", str(steps)]
        subprocess.run(command, env=environment, check=True, timeout=600)
        results = json.loads((folder / "results.json").read_text())
    expected = {name: train(build(name), steps) for name in dict.fromkeys(model for model, _ in found.values())}
    for result, (model, plan) in zip(results, found.values()):
        result["expected"], result["gap"] = expected[model], plan.gap
    return results


def difference(result: dict[str, Any]) -> float:
    """The largest relative difference of the losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(result["losses"], result["expected"]))


def show(results: list[dict[str, Any]]) -> None:
    """The table."""
    for result in results:
        worst = difference(result)
        verdict = "ok" if worst < TOLERANCE else "DIFFERENT"
        print(f"\n{result['name']} (gap {result['gap']:.1%})")
        print(
            f"  loss {result['expected'][0]:.4f} -> {result['expected'][-1]:.4f} in {len(result['losses'])} steps; "
            f"largest relative difference {worst:.1e}: {verdict}"
        )
        for kind in KINDS.values():
            said, saw = result["said"].get(kind), result["seen"][kind]
            if said or any(saw):
                numbers = [*(said or dict.fromkeys(range(4), 0)).values(), *saw]
                line = "  {:<15}planned {:>3} ({:>9,} B)  said {:>3} ({:>9,} B)  seen {:>3} ({:>9,} B)"
                print(line.format(kind, *numbers))
        print("\n".join(line for line in result["report"].splitlines()[1:] if "called" not in line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument(
        "--only", nargs="*", default=(), help="Only plans whose names contain one of these, such as 'Llama, found'."
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.steps)
        return
    results = run(given.steps, given.processes, given.only)
    show(results)
    wrong = [result["name"] for result in results if difference(result) >= TOLERANCE]
    sys.exit(f"losses differ: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
