"""Measures the machine it runs on and describes it as a cluster: what `sbp profile` does.

Every measurement is made on all ranks at once, so a device of the cluster file is what one rank has of the machine
while the others work: of ranks that take turns in one process, each has an n-th part of a core.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy

from sbp.comm.inprocess import InProcessCommunicator
from sbp.comm.interface import Communicator
from sbp.cuda.interface import Backend
from sbp.cuda.numpy_backend import NumpyBackend
from sbp.dtype import SIZES
from sbp.errors import ClusterError
from sbp.layout import chunk
from sbp.mesh import Mesh
from sbp.operator import REGISTRY
from sbp.planner.cluster import PEAK_TYPES, Cluster, Device, Tier
from sbp.planner.collective import PASSES, placements
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.fitting import Sample, fit_relative, fit_tier
from sbp.runtime.operator_times import WORKLOADS, OperatorTime, fit_operators, operator_times
from sbp.runtime.stopwatch import Stopwatch
from sbp.runtime.threads import matrix_threads

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Parameters
    ----------
    seconds
        For each measurement.
    products, copy_bytes, payloads
        (m, k, n) of matrix products, the size of copied arrays, and bytes per rank of collectives.
    workloads, repeats
        Models whose operators are measured, and for how many steps each; none leaves the operators out.
    """

    seconds: float
    products: tuple[tuple[int, int, int], ...]
    copy_bytes: int
    payloads: tuple[int, ...]
    workloads: tuple[Any, ...]
    repeats: int


QUICK = Effort(
    0.02,
    ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 64, 256), (384, 384, 384)),
    1 << 24,
    tuple(1 << power for power in (12, 14, 16, 18, 20)),
    WORKLOADS[:4],
    15,
)
FULL = Effort(
    0.2,
    ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 64, 256), (512, 512, 512), (2048, 128, 512),
     (128, 2048, 512), (1024, 1024, 1024), (1536, 1536, 1536)),
    1 << 26,
    tuple(1 << power for power in range(12, 25, 2)),
    WORKLOADS,
    31,
)  # fmt: skip
GPU = Effort(
    0.1,
    ((1024, 1024, 1024), (2048, 2048, 2048), (8192, 1024, 4096), (2048, 8192, 1024), (4096, 4096, 4096),
     (8192, 8192, 8192)),
    1 << 30,
    tuple(1 << power for power in range(12, 29, 2)),
    (),
    0,
)  # fmt: skip
"""For GPUs, quick or not. Their operators are not measured: kernels there follow `sbp.planner.kernels`."""

_TYPES = {"numpy": ("f32", "f64"), "cupy": ("f32", "f16", "f64")}
"""Element types whose matrix products are measured; NumPy has no fast ones for the others."""


@dataclass(frozen=True, slots=True)
class Product:
    """A measured matrix product (m, k) x (k, n) on every rank, its time and what the cluster file makes of it."""

    dtype: str
    m: int
    k: int
    n: int
    seconds: float
    predicted: float


@dataclass(frozen=True, slots=True)
class Transport:
    """A measured collective of all groups of so many ranks, its time and what the cluster file makes of it."""

    kind: str
    members: int
    nodes: int
    bytes: int
    seconds: float
    predicted: float


@dataclass(frozen=True)
class Profile:
    """The cluster, and the measurements that it was made from."""

    cluster: Cluster
    products: tuple[Product, ...]
    operators: tuple[OperatorTime, ...]
    transports: tuple[Transport, ...]
    seconds: float


def profile(
    ranks: int = 4,
    *,
    backend: Backend | None = None,
    communicator: Communicator | None = None,
    quick: bool = False,
    effort: Effort | None = None,
    name: str = "profiled",
    say: Say | None = None,
) -> Profile:
    """Measure this machine.

    Parameters
    ----------
    ranks
        Number of ranks in this process; with a communicator its own number counts.
    backend, communicator
        As for `Executor`; default NumPy ranks in this process.
    quick
        Some seconds in place of a minute or two; sizes are smaller, so bandwidths of large tensors are less sure.
    effort
        What to measure, in place of the usual.
    name
        Of the cluster.
    say
        Called with a line before each part.

    Raises
    ------
    ClusterError
        Fewer than one rank, or ranks that lie unevenly over hosts.
    """
    start = time.perf_counter()
    if ranks < 1:
        raise ClusterError(f"ranks must be at least 1, got {ranks}.")
    made: Backend = NumpyBackend() if backend is None else backend
    speaks: Communicator = InProcessCommunicator(ranks, made.xp) if communicator is None else communicator
    tell = say or (lambda line: None)
    if effort is None:
        effort = GPU if made.name == "cupy" else QUICK if quick else FULL
    with matrix_threads(1):
        watch = Stopwatch(made, speaks, effort.seconds)
        tell("matrix products")
        rates = _products(watch, effort)
        tell("memory and kernel starts")
        device = _device(watch, effort, rates)
        per_node = _ranks_per_node(speaks)
        cluster = Cluster(name, device, speaks.size // per_node, per_node, _tiers(speaks.size, per_node))
        if cluster.size > 1:
            cluster, samples = _fit_links(watch, effort, cluster, tell)
        else:
            samples = []
        times: tuple[OperatorTime, ...] = ()
        if effort.workloads:
            tell("operators, in training steps of small models")
            times = operator_times(made, speaks, effort.workloads, effort.repeats)
            cluster = replace(cluster, device=replace(device, operators=fit_operators(device, times)))
    model = AnalyticCostModel(cluster)
    products = tuple(Product(*row, _predicted(model, *row[:4])) for row in rates)
    transports = tuple(
        Transport(kind, members, nodes, payload, sample.seconds, model.collective_seconds(kind, mesh, axis, payload))
        for (kind, mesh, axis, members, nodes, payload), sample in samples
    )
    return Profile(cluster, products, times, transports, time.perf_counter() - start)


# -- device ------------------------------------------------------------------------------------------------------------


def _products(watch: Stopwatch, effort: Effort) -> list[tuple[str, int, int, int, float]]:
    backend = watch.backend
    kernel = backend.kernel("matmul", REGISTRY["matmul"].kernel)
    found = []
    for dtype in _TYPES.get(backend.name, ("f32",)):
        for m, k, n in effort.products:
            pairs = [
                (backend.random((m, k), dtype, rank), backend.random((k, n), dtype, rank + 1))
                for rank in watch.communicator.ranks
            ]
            found.append((dtype, m, k, n, watch.seconds(partial(_multiply, backend.xp, kernel, pairs))))
    return found


def _multiply(xp: Any, kernel: Callable[..., Any], pairs: Sequence[tuple[Any, Any]]) -> None:
    for pair in pairs:
        kernel(xp, *pair)


def _predicted(model: AnalyticCostModel, dtype: str, m: int, k: int, n: int) -> float:
    moved = SIZES[dtype] * (m * k + k * n + m * n)
    return model.compute_seconds("matmul", 2.0 * m * k * n, moved, dtype)


def _device(watch: Stopwatch, effort: Effort, rates: Sequence[tuple[str, int, int, int, float]]) -> Device:
    backend, ranks = watch.backend, watch.communicator.ranks
    xp = backend.xp
    size = effort.copy_bytes
    large = [backend.random((size // 4,), "f32", rank) for rank in ranks]
    copies = [xp.empty_like(array) for array in large]
    copying = watch.seconds(lambda: [xp.copyto(target, array) for target, array in zip(copies, large)])
    small = [backend.random((1,), "f32", rank) for rank in ranks]
    add = backend.kernel("add", REGISTRY["add"].kernel)
    launch = watch.seconds(lambda: [add(xp, array, array) for array in small])
    peaks, ceilings = {}, []
    for dtype in dict.fromkeys(row[0] for row in rates):
        rows = [row for row in rates if row[0] == dtype]
        flops = numpy.array([2.0 * m * k * n for _, m, k, n, _ in rows])
        seconds = numpy.array([row[4] for row in rows])
        peaks[dtype] = float((flops / seconds).max())
        # The largest products decide; small ones are mostly start.
        large_ones = flops >= flops.max() / 64
        columns = {"rate": flops[large_ones] / peaks[dtype]}
        slower = fit_relative(columns, seconds[large_ones], numpy.minimum(launch, 0.5 * seconds[large_ones]))["rate"]
        ceilings.append(min(1.0, 1.0 / max(slower, 1e-9)))
    if "bf16" not in peaks and backend.name == "numpy":
        peaks["bf16"] = peaks["f32"]  # held in float32
    described = _describe(backend, len(ranks), watch.communicator)
    return Device(
        described.name,
        tuple((dtype, peaks[dtype]) for dtype in PEAK_TYPES if dtype in peaks),
        described.memory,
        2 * size / copying,
        matmul_ceiling=float(numpy.median(ceilings)),
        launch_seconds=launch,
        multiprocessors=described.multiprocessors,
    )


@dataclass(frozen=True, slots=True)
class _Described:
    name: str
    memory: int
    multiprocessors: int | None


def _describe(backend: Backend, local: int, communicator: Communicator) -> _Described:
    """What a rank's device is called, and its part of the memory."""
    cuda = getattr(backend.xp, "cuda", None)
    if cuda is not None:
        properties = cuda.runtime.getDeviceProperties(cuda.runtime.getDevice())
        label = properties["name"]
        label = label.decode() if isinstance(label, bytes) else str(label)
        return _Described(label, int(cuda.runtime.memGetInfo()[1]) // local, int(properties["multiProcessorCount"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    share = local if local > 1 else _ranks_per_node(communicator)
    return _Described(f"{platform.machine() or 'host'} {backend.name}", memory // share, None)


# -- links -------------------------------------------------------------------------------------------------------------


def _ranks_per_node(communicator: Communicator) -> int:
    """How many consecutive ranks share a host."""
    if len(communicator.ranks) == communicator.size:
        return communicator.size
    host = numpy.zeros(256, numpy.uint8)
    text = platform.node().encode()[:256]
    host[: len(text)] = numpy.frombuffer(text, numpy.uint8)
    everyone = (tuple(range(communicator.size)),)
    mine = dict.fromkeys(communicator.ranks, host[None])
    gathered = communicator.all_gather(mine, everyone, 0, ((1,) * communicator.size,))
    hosts = [bytes(row) for row in numpy.asarray(gathered[communicator.ranks[0]])]
    per_node = hosts.count(hosts[0])
    blocks = [hosts[at : at + per_node] for at in range(0, len(hosts), per_node)]
    if len(hosts) % per_node or any(len(set(block)) > 1 for block in blocks) or len(set(hosts)) != len(blocks):
        raise ClusterError(
            "the ranks lie unevenly over their hosts; start equally many on each, those of a host one after another."
        )
    return per_node


def _tiers(size: int, per_node: int) -> tuple[Tier, ...]:
    """Links that are still to be measured."""
    found = [Tier("memory", per_node, 0.0, 1e9)] if per_node > 1 else []
    if size > per_node:
        found.append(Tier("network", None, 0.0, 1e9))
    return tuple(found)


def _fit_links(
    watch: Stopwatch, effort: Effort, cluster: Cluster, tell: Say
) -> tuple[Cluster, list[tuple[tuple[str, Mesh, int, int, int, int], Sample]]]:
    """The cluster with fitted tiers, innermost first, and the samples."""
    kept = []
    for at, tier in enumerate(cluster.tiers):
        across = at > 0 or cluster.devices_per_node == 1
        samples = []
        for mesh, axis in _meshes(cluster, across):
            members = mesh.shape[axis]
            tell(f"collectives of {members} ranks over {tier.name}")
            group = placements(cluster, mesh.groups(axis))[0]
            nodes = len({cluster.node(rank) for rank in mesh.groups(axis)[0]})
            for kind in PASSES:
                for payload in effort.payloads:
                    seconds = watch.seconds(_collective(watch, kind, mesh, axis, payload))
                    samples.append(Sample(kind, group, payload, seconds))
                    kept.append(((kind, mesh, axis, members, nodes, payload), samples[-1]))
        fitted = fit_tier(tier, samples, ("group", "gather", "all_reduce", "exchange"))
        cluster = replace(cluster, tiers=(*cluster.tiers[:at], fitted, *cluster.tiers[at + 1 :]))
    return cluster, kept


def _meshes(cluster: Cluster, across: bool) -> list[tuple[Mesh, int]]:
    """Meshes of all ranks, and the axis whose groups meet inside nodes, or across them."""
    inside, size = cluster.devices_per_node, cluster.size
    if across:
        nodes = cluster.nodes
        sizes = [parts for parts in range(2, nodes + 1) if nodes % parts == 0]
        found = [(Mesh((nodes // parts, parts, inside)), 1) for parts in sizes]
        return found if inside == 1 else [*found, (Mesh((size,)), 0)]
    return [(Mesh((size // parts, parts)), 1) for parts in range(2, inside + 1) if inside % parts == 0]


def _collective(watch: Stopwatch, kind: str, mesh: Mesh, axis: int, payload: int) -> Callable[[], object]:
    """A call with `payload` bytes per rank, the larger of the local arrays before and after."""
    communicator, backend, groups = watch.communicator, watch.backend, mesh.groups(axis)
    members = mesh.shape[axis]
    width = 16
    rows = max(members, payload // (4 * width))
    length = len(groups)
    places = {rank: group.index(rank) for group in groups for rank in group}
    parts = tuple(chunk(rows, members, at)[1] for at in range(members))
    columns = tuple(chunk(width, members, at)[1] for at in range(members))

    def arrays(shape: Callable[[int], tuple[int, int]]) -> dict[int, Any]:
        return {rank: backend.random(shape(places[rank]), "f32", rank) for rank in communicator.ranks}

    if kind == "all_reduce":
        whole = arrays(lambda at: (rows, width))
        return lambda: communicator.all_reduce(whole, groups, "sum")
    if kind == "reduce_scatter":
        whole = arrays(lambda at: (rows, width))
        return lambda: communicator.reduce_scatter(whole, groups, 0, (parts,) * length, "sum")
    if kind == "all_gather":
        shards = arrays(lambda at: (parts[at], width))
        return lambda: communicator.all_gather(shards, groups, 0, (parts,) * length)
    # S(1) -> S(0): every rank has all rows of its columns, and gets all columns of its rows.
    shards = arrays(lambda at: (rows * members, columns[at]))
    tall = tuple(chunk(rows * members, members, at)[1] for at in range(members))
    return lambda: communicator.all_to_all(shards, groups, 1, (columns,) * length, 0, (tall,) * length)
