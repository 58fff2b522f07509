"""What is replayed: a model, how it is spread over a cluster, and the framework that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from sbp.errors import PipelineError, PlanError
from sbp.models.bert import BertConfig
from sbp.models.gpt import GPTConfig
from sbp.models.llama import LlamaConfig
from sbp.planner.cluster import Cluster
from sbp.planner.frameworks import Framework
from sbp.planner.schedule import chunks_named

ModelConfig = GPTConfig | LlamaConfig | BertConfig

RECOMPUTE = ("none", "selective", "full")
MOST, MOST_RANKS, MOST_SEGMENTS = 1 << 40, 1 << 18, 1 << 20
"""The largest size of a model or batch, the most ranks, and the most segments that are simulated: beyond these a typing
mistake is likelier than a run, and would take hours."""

PRECISIONS = ("mixed", "f32", "fp8")
"""mixed: 16-bit products, f32 optimizer state. fp8: the products of layers in fp8 besides."""


@dataclass(frozen=True)
class Configuration:
    """One training step of a published or planned run.

    Parameters
    ----------
    model
        Sizes; layers are those of the whole model.
    cluster
        Resized to the ranks in use by `for_ranks`.
    sequence
        Tokens of a sequence.
    tp, pp, dp, cp
        Ranks along each axis: tensor parallel, pipeline stages, data parallel replicas, and context parallel, of which
        each holds a part of every sequence.
    micro_batch, global_batch
        Sequences of one micro-batch on one replica, and of one step on all.
    schedule
        "1f1b", "gpipe", "interleaved:v" with v chunks per stage, or "zero-bubble" (see `sbp.planner.schedule`).
    recompute
        "none"; "selective": attention is run again in the backward phase; "full": every layer is.
    sequence_parallel
        The residual stream is split along the sequence over the tensor-parallel ranks.
    zero
        What replicas share: 0 nothing, 1 the optimizer state, 2 gradients too, 3 parameters too.

    Raises
    ------
    PlanError
        Sizes that do not divide, or values that are not known; the message says what would do.
    """

    model: ModelConfig
    cluster: Cluster
    framework: Framework
    sequence: int
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = False
    zero: int = 0
    precision: str = "mixed"

    def __post_init__(self) -> None:
        for name in ("sequence", "tp", "pp", "dp", "cp", "micro_batch", "global_batch"):
            _check_whole(name, getattr(self, name))
        for name in ("layers", "heads", "hidden", "vocabulary", "positions"):
            _check_whole(name, getattr(self.model, name))
        _check_whole("kv_heads", getattr(self.model, "kv_heads", self.model.heads))
        _check_whole("feed-forward width", self.feed_forward)
        self._check_choices()
        self._check_sizes()
        self._check_work()

    def _check_choices(self) -> None:
        for name, known in (("recompute", RECOMPUTE), ("precision", PRECISIONS), ("zero", (0, 1, 2, 3))):
            if getattr(self, name) not in known:
                raise PlanError(
                    f"replay: {name} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}."
                )
        try:
            chunks_named(self.schedule)
        except PipelineError as error:
            raise PlanError(f"replay: {error}") from None

    def _check_sizes(self) -> None:
        model = self.model
        if self.ranks != self.cluster.size:
            raise PlanError(
                f"replay: tp {self.tp} x pp {self.pp} x dp {self.dp} x cp {self.cp} = {self.ranks} ranks, but "
                f"{self.cluster} has {self.cluster.size}; the two must be equal."
            )
        if self.global_batch % (self.micro_batch * self.dp):
            raise PlanError(
                f"replay: a global batch of {self.global_batch} cannot be cut into micro-batches of {self.micro_batch} "
                f"on {self.dp} replicas; it must be a multiple of {self.micro_batch * self.dp}."
            )
        if model.layers < self.pp * self.chunks:
            raise PlanError(
                f"replay: {model.layers} layers cannot be cut into {self.pp} stages of {self.chunks} chunks; each "
                "chunk needs at least one layer."
            )
        if self.chunks > 1 and model.layers % (self.pp * self.chunks) and not self.counts_embeddings:
            raise PlanError(
                f"replay: {model.layers} layers do not divide into {self.pp} stages x {self.chunks} chunks."
            )
        if model.hidden % model.heads:
            raise PlanError(f"replay: a hidden size of {model.hidden} does not divide into {model.heads} heads.")
        if self.chunks > 1 and self.micro_batches % self.pp:
            raise PlanError(
                f"replay: the interleaved schedule takes micro-batches in groups of {self.pp} (the stages), but there "
                f"are {self.micro_batches}."
            )
        heads = min(model.heads, getattr(model, "kv_heads", model.heads))
        for name, size in (
            ("heads", model.heads),
            ("key/value heads", heads),
            ("feed-forward width", self.feed_forward),
        ):
            if size % self.tp:
                raise PlanError(f"replay: tp {self.tp} does not divide the {size} {name} of the model.")
        parts = self.cp * (self.tp if self.sequence_parallel else 1)
        if self.sequence % parts:
            raise PlanError(f"replay: a sequence of {self.sequence} does not divide into {parts} parts (tp and cp).")

    def _check_work(self) -> None:
        """That it can be simulated in seconds."""
        if self.ranks > MOST_RANKS:
            raise PlanError(f"replay: {self.ranks} ranks are more than the {MOST_RANKS} that are replayed.")
        segments = self.micro_batches * self.pp * self.chunks * (3 if self.schedule == "zero-bubble" else 2)
        if segments > MOST_SEGMENTS:
            raise PlanError(
                f"replay: {self.micro_batches} micro-batches on {self.pp} stages of {self.chunks} chunks are "
                f"{segments} segments, more than the {MOST_SEGMENTS} that are simulated; use a smaller global batch, "
                "larger micro-batches or more replicas."
            )

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters: they reduce gradients, and share what `zero` says."""
        return self.dp * self.cp

    @property
    def chunks(self) -> int:
        """Chunks per stage."""
        return chunks_named(self.schedule) or (2 if self.schedule == "interleaved" else 1)

    @property
    def micro_batches(self) -> int:
        """Of one replica in one step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward layer."""
        model = self.model
        return model.feed_forward if isinstance(model, GPTConfig) else model.intermediate

    @cached_property
    def padded_model(self) -> ModelConfig:
        """The model with the vocabulary that every rank holds an equal part of, and positions for the sequence."""
        unit = self.framework.vocabulary_multiple * self.tp
        vocabulary = -(-self.model.vocabulary // unit) * unit
        return replace(self.model, vocabulary=vocabulary, positions=max(self.model.positions, self.sequence))

    @property
    def counts_embeddings(self) -> bool:
        """Whether the embedding and the head take the place of a layer each."""
        layers, count = self.model.layers, self.pp * self.chunks
        return self.framework.balances_embeddings and count > 1 and layers % count != 0 and (layers + 2) % count == 0

    @cached_property
    def layers_of_chunk(self) -> tuple[int, ...]:
        """Layers of chunk 0, 1, ... (chunk c lives on stage c % pp)."""
        layers, count = self.model.layers, self.pp * self.chunks
        if self.counts_embeddings:
            each = (layers + 2) // count
            return (each - 1, *[each] * (count - 2), each - 1)
        return tuple(layers // count + (at < layers % count) for at in range(count))


def _check_whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
        raise PlanError(f"replay: {name} must be a whole number from 1 to {MOST}, got {value!r}.")


def for_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with just so many ranks: full nodes, or a part of one.

    Raises
    ------
    PlanError
        More than a node, but not full nodes.
    """
    per_node = cluster.devices_per_node
    if ranks <= per_node:
        return cluster.with_nodes(1).with_devices_per_node(ranks)
    if ranks % per_node:
        raise PlanError(f"replay: {ranks} ranks do not fill nodes of {per_node} devices; give --devices-per-node.")
    return cluster.with_nodes(ranks // per_node)
