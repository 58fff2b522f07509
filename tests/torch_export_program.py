"""Run under torchrun: trains modules under exported plans; the first rank prints one line of JSON per case.

`torch_export_program.py FOLDER`: the folder's `cases.json` lists, per case, a name, a model of `torch_export_cases`,
the plan's file, and the steps. Modules and batches are made from seeds, so every process makes the same ones.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch_export_cases import MODELS, TorchImages, batch_for

from sbp import Plan

C10D = {
    "all_reduce": "c10d.allreduce_", "all_gather": "c10d._allgather_base_",
    "reduce_scatter": "c10d._reduce_scatter_base_", "all_to_all": "c10d.alltoall_base_",
}  # fmt: skip


def optimizer_for(module):
    if isinstance(module, TorchImages):
        return torch.optim.SGD(module.parameters(), lr=0.1)
    # A large eps, as without it Adam makes steps of the size of lr of gradients that are nothing but rounding.
    return torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-3)


def train(module, graph, steps):
    """Loss and norm of all gradients, step by step."""
    optimizer, seen = optimizer_for(module), []
    for step in range(steps):
        loss = module(**batch_for(graph, step // 2))  # the second step sees the first one's batch again
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        seen += [float(loss), float(whole(norm))]
        optimizer.step()
    return seen


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def counted(module, graph):
    """What CommDebugMode counts in one forward and backward: by kind, and anything else."""
    with CommDebugMode() as mode:
        module(**batch_for(graph, 0)).backward()
    module.zero_grad()
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    return {kind: counts.pop(name) for kind, name in C10D.items() if name in counts}, counts


def relative(found, expected):
    return float((found.double() - expected.double()).abs().max() / (1e-3 + expected.double().abs().max()))


def run(case, plan, device_mesh):
    module = MODELS[case["model"]].module()
    names = [key for key, _ in module.named_parameters()]
    made = plan.to_torch(module, device_mesh)
    counts, others = counted(module, plan.graph) if case["model"] != "images" else (None, {})
    seen = train(made, plan.graph, case["steps"])
    state = {key: whole(tensor) for key, tensor in module.state_dict().items()}
    shapes = all(
        parameter.to_local().shape
        == module.sbp.homes[key].layout.shard(parameter.shape, plan.mesh.shape, device_mesh.get_coordinate()).shape
        for key, parameter in module.named_parameters()
    )
    report = module.sbp.report
    result = {
        "name": case["name"], "seen": seen, "shapes": shapes, "returned": made is module, "counts": counts,
        "others": others, "names": names == [key for key, _ in module.named_parameters()],
        "said": {kind: counts.called for kind, counts in report.counts().items() if counts.called},
        "planned": {kind: counts.planned for kind, counts in report.counts().items() if counts.planned},
        "differences": len(report.differences), "on_host": list(report.on_host), "text": str(report),
    }  # fmt: skip
    if dist.get_rank() == 0:
        reference = MODELS[case["model"]].module()
        result["expected"] = train(reference, plan.graph, case["steps"])
        result["state"] = max(
            relative(state[key], tensor)
            for key, tensor in reference.state_dict().items()
            if not key.endswith("num_batches_tracked")
        )
    return result


def main(folder):
    dist.init_process_group("gloo")
    meshes = {}
    for case in json.loads((folder / "cases.json").read_text()):
        plan = Plan.load(folder / case["plan"])
        if plan.mesh not in meshes:
            meshes[plan.mesh] = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
        result = run(case, plan, meshes[plan.mesh])
        if dist.get_rank() == 0:
            print("CASE", json.dumps(result), flush=True)
    dist.barrier()  # nobody leaves while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
