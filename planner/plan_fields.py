"""The fields of a plan file (`Plan.save`), schema 1, each with what it says.

Names of nodes and values stand where the paths below have `*`, list items where they have `[]`. Layouts are written as
`(S(0), B)`, one SBP per mesh axis; times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "format": "'sbp-plan': what the file is",
        "schema": "version of this list; a reader of another one refuses the file",
        "model": "how the graph was made; {} for a graph of one's own, which verify then cannot scale down",
        "model.name": "preset or class that the model is called after",
        "model.family": "class of the configuration, such as GPTConfig",
        "model.config": "its sizes, by the names that --size takes",
        "model.batch": "global batch size",
        "model.sequence": "sequence length; null for the model's own",
        "model.training": "true for a training step, false for inference",
        "model.optimizer": "kind and settings of the optimizer; null for the default, AdamW",
        "model.precision": "mixed, bf16, f32 or f64",
        "model.recompute": "whether layers run again in the backward phase",
        "cluster": "the hardware in SI units, as `Cluster.to_json` writes it (see sbp.planner.cluster)",
        "mesh": "the arrangement of the ranks, row-major",
        "mesh.shape": "size of each axis",
        "mesh.names": "name of each axis",
        "status": "what the solver proved on this mesh: optimal or feasible",
        "reason": "what proved it, or why it is not proven",
        "objective_seconds": "compute and collectives added up; computed anew on reading, and compared",
        "lower_bound_seconds": "no plan on this mesh takes less",
        "memory_limit_bytes": "per device, as the search was given it; null for none",
        "pins": "layouts that were asked for",
        "pins.*": "glob of values -> layout",
        "tried": "the meshes that were tried, in order",
        "tried[].mesh": "as mesh",
        "tried[].objective_seconds": "its best plan; null where none was found",
        "tried[].lower_bound_seconds": "its bound; null where nothing is known",
        "tried[].outcome": "its status, or why it has no plan",
        "sources": "layouts in which inputs and state are stored",
        "sources.*": "input or state value -> layout",
        "signatures": "what every node takes and makes",
        "signatures.*": "node -> layouts of its inputs, and layouts of its outputs",
        "outputs": "layouts in which the graph's outputs leave",
        "outputs.*": "output value -> layout",
        "kept": "layouts of forward values that are kept for the backward phase beside the one they are made in",
        "kept.*": "value -> layout",
        "graph": "the program in global shapes",
        "graph.schema": "version of the graph's part",
        "graph.name": "name of the graph",
        "graph.values": "inputs and state; what nodes make follows from the nodes",
        "graph.values[].name": "name of the value",
        "graph.values[].shape": "global shape",
        "graph.values[].dtype": "element type",
        "graph.values[].kind": "input, parameter, buffer, optimizer",
        "graph.values[].initial": "how it is filled at the start: a kind and its numbers",
        "graph.nodes": "the operations in program order",
        "graph.nodes[].name": "name of the node",
        "graph.nodes[].op": "operator",
        "graph.nodes[].inputs": "values that it reads",
        "graph.nodes[].outputs": "values that it makes",
        "graph.nodes[].attributes": "settings of the operator",
        "graph.nodes[].module": "module that it comes from",
        "graph.nodes[].phase": "forward, backward or optimizer",
        "graph.outputs": "values that the step returns",
        "graph.updates": "state value -> the value that it has in the next step",
        "arena": "where every register lies in a rank's memory; only where it was asked for (--offsets)",
    }
)
"""Path -> what the field says. Below `cluster`, `model.config` and `arena` the parts speak for themselves."""


def describe() -> str:
    """All fields as text, a line each."""
    width = max(map(len, FIELDS))
    return "\n".join(f"{path.ljust(width)}  {says}" for path, says in FIELDS.items())
