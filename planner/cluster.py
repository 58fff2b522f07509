"""Clusters: the hardware that a plan is made for, as plain data in SI units.

`Cluster.preset("a100-80g", nodes=16)` or `Cluster.load("cluster.yaml")`; `sbp.planner.cluster_file` documents the file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sbp.errors import ClusterError
from sbp.fields import is_finite_number
from sbp.wording import nearest_known

PEAK_TYPES = ("f64", "f32", "tf32", "bf16", "f16", "fp8")
"""Element types that a device can state a peak for."""

MOST_MEMORY_BYTES = 1 << 60
"""More than any device has; in 64 bits, as sums over a node still are."""

TABLES = ("group_bandwidths", "gather_bandwidths", "all_reduce_bandwidths", "exchange_bandwidths")
"""Fields of a tier that hold bandwidths by group size."""

_STAND_INS = {
    "f64": (("f64", 1.0), ("f32", 0.5)),
    "f32": (("f32", 1.0), ("tf32", 1.0), ("bf16", 0.5), ("f16", 0.5)),
    "tf32": (("tf32", 1.0), ("f32", 1.0)),
    "bf16": (("bf16", 1.0), ("f16", 1.0), ("f32", 1.0)),
    "f16": (("f16", 1.0), ("bf16", 1.0), ("f32", 1.0)),
    "fp8": (("fp8", 1.0), ("bf16", 1.0), ("f16", 1.0), ("f32", 1.0)),
}


def _number(owner: str, field: str, value: Any, low: float = 0.0, high: float = math.inf, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] if `above`."""
    if not is_finite_number(value) or value > high or value < low or (above and value == low):
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        if high < math.inf:
            bounds += f" and at most {high:g}"
        raise ClusterError(f"{owner}: {field} must be a finite number {bounds}, got {value!r}.")
    return float(value)


def _whole(owner: str, field: str, value: Any, low: int = 1, high: int | None = None) -> int:
    wrong = isinstance(value, bool) or not isinstance(value, int) or value < low
    if wrong or (high is not None and value > high):
        bounds = f"of at least {low}" + ("" if high is None else f" and at most {high}")
        raise ClusterError(f"{owner}: {field} must be a whole number {bounds}, got {value!r}.")
    return value


def _pairs(owner: str, field: str, given: Any) -> list[tuple[Any, Any]]:
    """The pairs of a mapping, or of a list of pairs."""
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, (list, tuple)) or any(
        not isinstance(pair, (list, tuple)) or len(pair) != 2 or isinstance(pair[0], (list, dict)) for pair in pairs
    ):
        raise ClusterError(f"{owner}: {field} must be a mapping or a list of pairs, got {given!r}.")
    return [(key, value) for key, value in pairs]


def _name(owner: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ClusterError(f"{owner}: name must be a text that is not empty, got {value!r}.")
    return value


def _operators(owner: str, given: Any) -> tuple[tuple[str, float, float], ...]:
    """(operator, seconds, bytes/s), sorted."""
    rows = list(given) if isinstance(given, (list, tuple)) else None
    if rows is None or any(not isinstance(row, (list, tuple)) or len(row) != 3 for row in rows):
        raise ClusterError(f"{owner}: operators must be a list of (operator, seconds, bytes/s), got {given!r}.")
    found = {
        _name(f"{owner}: an operator", name): (
            _number(owner, f"seconds of operator {name}", seconds),
            _number(owner, f"bytes/s of operator {name}", rate, above=True),
        )
        for name, seconds, rate in rows
    }
    if len(found) != len(rows):
        raise ClusterError(f"{owner}: operators gives one of them twice.")
    return tuple((name, *found[name]) for name in sorted(found))


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's processor.

    Parameters
    ----------
    peak_flops_per_second
        FLOP/s by element type (`PEAK_TYPES`, dense), given as a mapping or pairs, kept as sorted pairs.
    memory_bytes
        Memory of one device, all of it; `reserved_memory_bytes` of that goes to the framework's context.
    matmul_ceiling
        Fraction of the peak that large matrix products were measured to reach.
    launch_seconds
        Time to start one kernel.
    sustained
        Part of that ceiling that a long run keeps: clocks fall where the power limit is reached.
    memory_ceiling
        Fraction of the memory bandwidth that kernels reach.
    multiprocessors
        How many parts of the device work on tiles of a matrix product at a time; None where that is not known, and
        products are then not cut into waves (see `sbp.planner.kernels`).
    fused_attention_ceiling
        Fraction of the peak that attention without stored scores reaches.
    overlap_slowdown
        While data moves, kernels take (1 + overlap_slowdown) times as long: both use the device's memory and cores. On
        A100, H100, MI250 and MI210 it was 0.189 on average and up to 0.4 (Lee et al. 2025, arXiv 2507.03114).
    operators
        (operator, seconds, bytes/s) as `sbp profile` measures them: its kernel takes so many seconds to start, and
        then the time of its FLOP plus that of its bytes at this rate.
    """

    name: str
    peak_flops_per_second: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    matmul_ceiling: float = 0.8
    launch_seconds: float = 4e-6
    reserved_memory_bytes: int = 0
    sustained: float = 1.0
    memory_ceiling: float = 1.0
    multiprocessors: int | None = None
    fused_attention_ceiling: float = 0.3
    operators: tuple[tuple[str, float, float], ...] = ()
    overlap_slowdown: float = 0.0

    def __post_init__(self) -> None:
        owner = f"device {_name('device', self.name)}"
        peaks = dict(_pairs(owner, "peak_flops_per_second", self.peak_flops_per_second))
        if not peaks:
            raise ClusterError(f"{owner}: peak_flops_per_second needs at least one of {', '.join(PEAK_TYPES)}.")
        for dtype in peaks:
            if dtype not in PEAK_TYPES:
                raise ClusterError(f"{owner}: no peak can be given for {dtype!r}; known are {', '.join(PEAK_TYPES)}.")
        checked = {d: _number(owner, f"peak of {d}", peaks[d], above=True) for d in PEAK_TYPES if d in peaks}
        set_ = object.__setattr__
        set_(self, "peak_flops_per_second", tuple(checked.items()))
        _whole(owner, "memory_bytes", self.memory_bytes, high=MOST_MEMORY_BYTES)
        _whole(owner, "reserved_memory_bytes", self.reserved_memory_bytes, 0)
        if self.reserved_memory_bytes >= self.memory_bytes:
            raise ClusterError(
                f"{owner}: reserved_memory_bytes {self.reserved_memory_bytes} leaves nothing of the device's "
                f"{self.memory_bytes} bytes; state a smaller reserve."
            )
        bandwidth = _number(owner, "memory bandwidth", self.memory_bandwidth_bytes_per_second, above=True)
        set_(self, "memory_bandwidth_bytes_per_second", bandwidth)
        for field in ("matmul_ceiling", "sustained", "memory_ceiling", "fused_attention_ceiling"):
            set_(self, field, _number(owner, field, getattr(self, field), high=1.0, above=True))
        if self.multiprocessors is not None:
            _whole(owner, "multiprocessors", self.multiprocessors)
        for field in ("launch_seconds", "overlap_slowdown"):
            set_(self, field, _number(owner, field, getattr(self, field)))
        set_(self, "operators", _operators(owner, self.operators))

    @property
    def usable_memory_bytes(self) -> int:
        """What a plan may fill: memory less the reserve."""
        return self.memory_bytes - self.reserved_memory_bytes

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s in an element type.

        A type without its own figure takes a stand-in: bf16 and f16 each other's, f64 half of f32, integers f32's.
        """
        known = dict(self.peak_flops_per_second)
        for stand_in, factor in _STAND_INS.get(dtype, _STAND_INS["f32"]):
            if stand_in in known:
                return known[stand_in] * factor
        return min(known.values())


@dataclass(frozen=True, slots=True)
class Tier:
    """One kind of link, between neighbours of the same block of ranks.

    Parameters
    ----------
    span
        How many consecutive ranks it connects (8 in a node of 8); None: all ranks of the cluster.
    latency_seconds
        Time of a collective over this tier that moves nothing, for a group of one block; launch included.
    bandwidth_bytes_per_second
        Per device (per link, where `links` counts them), one direction, as stated by the vendor.
    efficiency
        Fraction of the bandwidth that large collectives reach.
    hop_seconds
        Further latency per doubling of the group and pass (an all-reduce makes two passes).
    ramp_seconds_per_sqrt_byte
        Weight g of the square-root term: messages of middling size fill the links badly.
    group_bandwidths
        (members, bytes/s) measured by group size, where the topology is no switch; replaces bandwidth * efficiency
        for groups of at least so many members.
    all_reduce_bandwidths
        (members, bytes/s): bus bandwidth of an all-reduce where it beats a reduce-scatter and an all-gather, because
        the switch itself sums (NVLS); for groups of at least so many members.
    gather_bandwidths
        (members, bytes/s) of an all-gather by group size, where adding up, not the link, holds the others back.
    exchange_bandwidths
        (members, bytes/s) measured by group size, where all-to-all and sends, which use fewer channels than rings, do
        not reach the bandwidth of the other collectives.
    links
        How many links of that bandwidth each block of the tier inside has (network cards of a node), shared by its
        ranks; None: one per rank.
    """

    name: str
    span: int | None
    latency_seconds: float
    bandwidth_bytes_per_second: float
    efficiency: float = 0.8
    hop_seconds: float = 0.0
    ramp_seconds_per_sqrt_byte: float = 0.0
    group_bandwidths: tuple[tuple[int, float], ...] = ()
    all_reduce_bandwidths: tuple[tuple[int, float], ...] = ()
    gather_bandwidths: tuple[tuple[int, float], ...] = ()
    exchange_bandwidths: tuple[tuple[int, float], ...] = ()
    links: int | None = None

    def __post_init__(self) -> None:
        owner = f"tier {_name('tier', self.name)}"
        set_ = object.__setattr__
        for field in ("span", "links"):
            if getattr(self, field) is not None:
                _whole(owner, field, getattr(self, field))
        for field in ("latency_seconds", "hop_seconds", "ramp_seconds_per_sqrt_byte"):
            set_(self, field, _number(owner, field, getattr(self, field)))
        bandwidth = _number(owner, "bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, above=True)
        set_(self, "bandwidth_bytes_per_second", bandwidth)
        set_(self, "efficiency", _number(owner, "efficiency", self.efficiency, high=1.0, above=True))
        for field in TABLES:
            pairs = _pairs(owner, field, getattr(self, field))
            table = tuple(sorted((_whole(owner, field, k, 2), _number(owner, field, b, above=True)) for k, b in pairs))
            if len({k for k, _ in table}) != len(table):
                raise ClusterError(f"{owner}: {field} gives a group size twice.")
            set_(self, field, table)
        for members, rate in self.all_reduce_bandwidths:
            # Otherwise an all-reduce would be cheaper than the reduce-scatter that is one half of it.
            if rate > 2 * self.bandwidth(members) * (1 + 1e-9):
                raise ClusterError(
                    f"{owner}: all_reduce_bandwidths of {members} members is {rate:g} bytes/s, more than twice the "
                    f"{self.bandwidth(members):g} bytes/s of its other collectives; correct one of the two."
                )

    def bandwidth(self, members: int, all_reduce: bool = False) -> float:
        """Bus bandwidth in bytes/s per device that a large collective of `members` reaches."""
        found = _for_size(self.group_bandwidths, members, self.bandwidth_bytes_per_second * self.efficiency)
        if all_reduce:
            both = 2 / (1 / found + 1 / self.gather_bandwidth(members))
            return max(both, min(_for_size(self.all_reduce_bandwidths, members, 0.0), 2 * found))
        return found

    def gather_bandwidth(self, members: int) -> float:
        """What a large all-gather of `members` reaches, in bytes/s per device."""
        return _for_size(self.gather_bandwidths, members, self.bandwidth(members))

    def exchange_bandwidth(self, members: int) -> float:
        """What a rank sends in bytes/s in a large all-to-all of `members`, or to one other rank (2 members)."""
        return _for_size(self.exchange_bandwidths, members, self.bandwidth(members))


def _for_size(table: tuple[tuple[int, float], ...], members: int, default: float) -> float:
    """The bandwidth of the largest group size up to `members` in a table."""
    rates = [rate for size, rate in table if size <= members]
    return rates[-1] if rates else default


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` x `devices_per_node` equal devices; rank r sits in node r // devices_per_node.

    `tiers` go from the innermost to the outermost, their spans grow and each divides the next.

    Raises
    ------
    ClusterError
        A number that is not finite, negative or of the wrong type; tiers that do not connect all ranks.
    """

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    tiers: tuple[Tier, ...]

    def __post_init__(self) -> None:
        owner = f"cluster {_name('cluster', self.name)}"
        object.__setattr__(self, "tiers", tuple(self.tiers))
        if not isinstance(self.device, Device) or not all(isinstance(tier, Tier) for tier in self.tiers):
            raise ClusterError(f"{owner}: device must be a Device and tiers a tuple of Tier.")
        _whole(owner, "nodes", self.nodes)
        _whole(owner, "devices_per_node", self.devices_per_node)
        if len({tier.name for tier in self.tiers}) != len(self.tiers):
            raise ClusterError(f"{owner}: two tiers have the same name; rename one.")
        previous = 1
        for at, tier in enumerate(self.tiers):
            if tier.span is None:
                if at + 1 < len(self.tiers):
                    raise ClusterError(f"{owner}: only the last tier can span all ranks, but {tier.name} is not last.")
            elif tier.span % previous or (at and tier.span == previous):
                raise ClusterError(
                    f"{owner}: tier {tier.name} spans {tier.span} ranks, which is not a larger multiple of the "
                    f"{previous} of the tier inside it; list tiers from the innermost to the outermost."
                )
            elif tier.span % self.devices_per_node and self.devices_per_node % tier.span:
                raise ClusterError(
                    f"{owner}: tier {tier.name} spans {tier.span} ranks, which is neither a part nor a multiple of the "
                    f"{self.devices_per_node} devices of a node; correct one of the two."
                )
            else:
                previous = tier.span
        if self.size > 1 and not (self.tiers and self.span(self.tiers[-1]) >= self.size):
            reached = self.span(self.tiers[-1]) if self.tiers else 1
            raise ClusterError(
                f"{owner}: its tiers connect {reached} of {self.size} ranks; add a tier whose span is `all`."
            )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.devices_per_node

    def span(self, tier: Tier) -> int:
        """How many consecutive ranks a tier connects here."""
        return self.size if tier.span is None else tier.span

    def node(self, rank: int) -> int:
        """The node that a rank sits in."""
        return rank // self.devices_per_node

    def with_nodes(self, nodes: int) -> Cluster:
        """The same cluster with another number of nodes."""
        return replace(self, nodes=nodes)

    def with_devices_per_node(self, devices_per_node: int) -> Cluster:
        """The same cluster with another number of devices in each node; the tier of a node follows it."""
        _whole(f"cluster {self.name}", "devices_per_node", devices_per_node)
        tiers = (
            replace(tier, span=devices_per_node) if tier.span == self.devices_per_node else tier for tier in self.tiers
        )
        return replace(self, devices_per_node=devices_per_node, tiers=tuple(tiers))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """A cluster from its YAML file (`sbp.planner.cluster_file` documents the keys).

        Raises
        ------
        ClusterError
            The file is missing or malformed; the message names file and line.
        """
        from sbp.planner.cluster_file import load_cluster

        return load_cluster(path)

    def save(self, path: str | Path) -> None:
        """Write the YAML file that `load` reads back to an equal cluster."""
        from sbp.planner.cluster_file import dump_cluster

        try:
            Path(path).write_text(dump_cluster(self), encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"cannot write the cluster file {path}: {error.strerror or error}.") from None

    @classmethod
    def preset(cls, name: str, nodes: int | None = None, devices_per_node: int | None = None) -> Cluster:
        """One of `presets()`, with its own number of nodes (1) and devices per node unless given.

        Examples
        --------
        >>> Cluster.preset("a100-80g", nodes=16).size
        128
        """
        folder = _preset_folder()
        if name not in presets():
            raise ClusterError(f"no cluster preset is called {name!r}; {nearest_known(name, presets())}.")
        return cls.load(folder / f"{name}.yaml")._resized(nodes, devices_per_node)

    @classmethod
    def resolve(
        cls, name_or_path: str | Path | Cluster, nodes: int | None = None, devices_per_node: int | None = None
    ) -> Cluster:
        """A cluster from a preset's name, a file's path, or itself."""
        if isinstance(name_or_path, Cluster):
            return name_or_path._resized(nodes, devices_per_node)
        text = str(name_or_path)
        if text in presets():
            return cls.preset(text, nodes, devices_per_node)
        if Path(text).suffix in (".yaml", ".yml", ".json") or "/" in text or Path(text).exists():
            return cls.load(text)._resized(nodes, devices_per_node)
        raise ClusterError(
            f"{text!r} is neither a cluster preset nor a file; {nearest_known(text, presets())}, "
            "or give the path of a YAML file."
        )

    def _resized(self, nodes: int | None, devices_per_node: int | None) -> Cluster:
        cluster = self if devices_per_node is None else self.with_devices_per_node(devices_per_node)
        return cluster if nodes is None else cluster.with_nodes(nodes)

    def to_json(self) -> dict[str, Any]:
        """Plain data in SI units, for plan files."""
        device = dataclasses.asdict(self.device) | {"peak_flops_per_second": dict(self.device.peak_flops_per_second)}
        tiers = [
            dataclasses.asdict(tier) | {field: [list(pair) for pair in getattr(tier, field)] for field in TABLES}
            for tier in self.tiers
        ]
        return {
            "name": self.name,
            "device": device,
            "nodes": self.nodes,
            "devices_per_node": self.devices_per_node,
            "tiers": tiers,
        }

    @classmethod
    def from_json(cls, data: Any) -> Cluster:
        """The cluster that `to_json` described.

        Raises
        ------
        ClusterError
            A key is unknown or missing, or a value is not what it must be.
        """
        fields = _fields_of(cls, data, "cluster")
        device = Device(**_fields_of(Device, fields["device"], "cluster.device"))
        if not isinstance(fields["tiers"], (list, tuple)):
            raise ClusterError(f"cluster.tiers: a list of tiers is expected, got {fields['tiers']!r}.")
        tiers = []
        for at, item in enumerate(fields["tiers"]):
            given = _fields_of(Tier, item, f"cluster.tiers[{at}]")
            for field in TABLES:
                pairs = given.get(field, ())
                if not isinstance(pairs, (list, tuple)) or any(
                    not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in pairs
                ):
                    raise ClusterError(f"cluster.tiers[{at}].{field}: a list of pairs is expected, got {pairs!r}.")
                given[field] = tuple(map(tuple, pairs))
            tiers.append(Tier(**given))
        return cls(fields["name"], device, fields["nodes"], fields["devices_per_node"], tuple(tiers))

    def __str__(self) -> str:
        return f"{self.name} ({self.nodes} x {self.devices_per_node} {self.device.name})"


def presets() -> tuple[str, ...]:
    """The names of the clusters that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _preset_folder().glob("*.yaml")))


def _preset_folder() -> Path:
    return Path(__file__).parent / "presets"


def _fields_of(kind: type, data: Any, place: str) -> dict[str, Any]:
    """The keys of a JSON object, checked against a dataclass's fields."""
    if not isinstance(data, Mapping):
        raise ClusterError(f"{place}: an object is expected, got {data!r}.")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise ClusterError(f"{place}: unknown key {key!r}; {nearest_known(str(key), fields)}.")
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING:
            raise ClusterError(f"{place}: the key {name!r} is missing.")
    return dict(data)
