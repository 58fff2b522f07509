"""Frameworks: how a training framework runs the kernels of a step, as named traits (`frameworks.yaml`).

What a plan does is the same under every framework; how fast it goes is not: pointwise kernels are fused or not,
attention stores its scores or not, gradients are reduced beside the backward pass or after it, and the host that
launches kernels may be slower than the device. These traits are a framework's, never a single run's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from sbp.errors import ClusterError
from sbp.wording import nearest_known

ATTENTION = ("stored", "fused")
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}

REDUCTION = ("after", "without-pipeline", "overlapped")


@dataclass(frozen=True, slots=True)
class Framework:
    """The traits of a framework.

    Parameters
    ----------
    source
        Where they are from.
    fused_pointwise
        Pointwise operators in a row are one kernel.
    attention
        "stored": products, softmax and dropout over scores in memory; "fused": none of them is stored.
    attention_efficiency
        Part of the device's ceiling that its fused attention reaches: older kernels do less.
    attention_dropout
        Whether attention drops probabilities (a pass over stored scores).
    softmax_batches
        The fused softmax takes batch * heads only in multiples of this; else several kernels pass over the scores.
    gradient_bytes
        Bytes per element in which gradients of micro-batches are added up.
    reduction_bytes
        Bytes per element of a gradient on its way to the other replicas.
    fused_accumulation
        The product that makes a weight's gradient adds it up itself.
    reduction
        Gradients are reduced "after" the last micro-batch, "overlapped" with its backward pass, or overlapped
        "without-pipeline" only.
    reduces_every_micro_batch
        Shared gradients (ZeRO-2 and 3) are reduced in every micro-batch, not once per step.
    overlapped_transfers
        Stages send and receive beside their kernels.
    tensor_overlap
        Part of the tensor-parallel communication that hides behind products.
    balances_embeddings
        Layers are cut so that the embedding and the head count as one layer each, where that comes out even.
    vocabulary_multiple
        The vocabulary is padded to a multiple of this on every tensor-parallel rank.
    pointwise_traffic
        Bytes moved by kernels other than products, as a multiple of what the operators need.
    loss_traffic
        The same for the operators of the loss.
    exposed_sharding
        Part of the gathers and reductions of sharded parameters that does not hide behind kernels; above 1 where they
        are so small that links are used badly.
    forward_host_us, backward_host_us
        Host time per kernel in each phase, in microseconds: a layer takes the longer of host and device.
    micro_batch_host_us
        Host time per micro-batch besides.
    blocking_us
        Gap after each kernel where every launch waits for the one before.
    """

    name: str
    source: str
    fused_pointwise: bool = True
    attention: str = "fused"
    attention_efficiency: float = 1.0
    attention_dropout: bool = False
    softmax_batches: int = 1
    gradient_bytes: int = 4
    reduction_bytes: int = 4
    fused_accumulation: bool = False
    reduction: str = "overlapped"
    reduces_every_micro_batch: bool = False
    overlapped_transfers: bool = False
    tensor_overlap: float = 0.0
    balances_embeddings: bool = False
    vocabulary_multiple: int = 1
    pointwise_traffic: float = 1.0
    loss_traffic: float = 2.5
    exposed_sharding: float = 0.3
    forward_host_us: float = 20.0
    backward_host_us: float = 12.0
    micro_batch_host_us: float = 400.0
    blocking_us: float = 0.0

    def __post_init__(self) -> None:
        owner = f"framework {self.name}"
        for name, known in (("attention", ATTENTION), ("reduction", REDUCTION)):
            if getattr(self, name) not in known:
                raise ClusterError(f"{owner}: {name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        for field in fields(self):
            value = getattr(self, field.name)
            kind = str(field.type)
            good = isinstance(value, _TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))
            if good and kind in ("int", "float"):
                good = math.isfinite(value) and value >= 0
            if not good:
                expected = {"str": "a text", "bool": "true or false"}.get(kind, "a finite number of at least 0")
                raise ClusterError(f"{owner}: {field.name} must be {expected}, got {value!r}.")

    @classmethod
    def named(cls, name: str) -> Framework:
        """One of `frameworks()`.

        Raises
        ------
        ClusterError
            No framework has this name; the message says which have.
        """
        known = _read()
        if name not in known:
            raise ClusterError(f"no framework is called {name!r}; {nearest_known(name, known)}.")
        return known[name]


def frameworks() -> tuple[str, ...]:
    """The names of the frameworks whose traits come with the package, sorted."""
    return tuple(_read())


@lru_cache(maxsize=1)
def _read() -> Mapping[str, Framework]:
    import yaml

    path = Path(__file__).parent / "frameworks.yaml"
    data: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: Framework(name, **data[name]) for name in sorted(data)}
