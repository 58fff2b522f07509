"""Cluster files: YAML with the unit in every key, read strictly, so that an error names the file and the line.

::

    name: a100-80g
    nodes: 1
    devices_per_node: 8
    device:
      name: A100-80G-SXM
      peak_tflops: {f32: 19.5, tf32: 156, f16: 312, bf16: 312}   # dense; f64, f32, tf32, bf16, f16, fp8
      memory_gib: 79.25
      reserved_memory_gib: 2.8         # optional: the framework's context
      memory_bandwidth_gb_per_s: 2039
      matmul_ceiling: 0.87             # optional: fraction of the peak that large products reach
      launch_us: 4                     # optional: time to start a kernel
      sustained: 0.95                  # optional: part of that ceiling which a long run keeps (power limit)
      memory_ceiling: 0.92             # optional: fraction of the memory bandwidth that kernels reach
      multiprocessors: 108             # optional: for the tiles and waves of matrix products
      fused_attention_ceiling: 0.32    # optional: fraction of the peak that attention without stored scores reaches
      overlap_slowdown: 0.189          # optional: kernels take so much longer while data moves
      operators: {gelu: [12, 0.8]}     # optional: us to start the operator's kernel, and GB/s that it reads and writes
    tiers:                             # innermost first
      - name: nvlink
        span: node                     # node, all, or a number of consecutive ranks
        latency_us: 30
        bandwidth_gb_per_s: 300        # per device, one direction
        efficiency: 0.8                # optional: what large collectives reach of it
        hop_us: 3                      # optional: per doubling of the group and pass
        ramp_ns_per_sqrt_byte: 12      # optional: the square-root term
        measured_gb_per_s: {2: 22.5}   # optional: by group size, where links are no switch
        all_reduce_gb_per_s: {8: 480}  # optional: all-reduce that the switch sums, by group size
        gather_gb_per_s: {8: 200}      # optional: all-gather, where faster than what also adds up, by group size
        exchange_gb_per_s: {8: 200}    # optional: all-to-all (2: and sends) where slower than rings, by group size
        links: 8                       # optional: links of that bandwidth per block of the tier inside, such as
                                       # network cards per node, shared by its devices; without it one per device

A GB is 1e9 bytes, a GiB 2**30. Numbers are read as exact decimals, so that a saved cluster loads to an equal one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import yaml

from sbp.errors import ClusterError
from sbp.planner.cluster import PEAK_TYPES, Cluster, Device, Tier
from sbp.wording import nearest_known

_EXACT = Context(prec=1000, traps=[])
"""Enough digits for every float64 as a decimal; what overflows becomes infinite and is rejected."""


@dataclass(frozen=True, slots=True)
class _Key:
    """One key of the file: the field it sets, and what it takes: text, span, whole, number, or a table of numbers or of
    operators.

    `unit` is what one unit of the file is in the field's unit.
    """

    field: str
    takes: str
    unit: Decimal = Decimal(1)
    required: bool = True
    above: bool = False
    high: Decimal | None = None


_GIGA, _MICRO, _NANO, _GIB = Decimal(10) ** 9, Decimal(10) ** -6, Decimal(10) ** -9, Decimal(2**30)
_ONE = Decimal(1)

_CLUSTER_KEYS = {
    "name": _Key("name", "text"),
    "nodes": _Key("nodes", "whole"),
    "devices_per_node": _Key("devices_per_node", "whole"),
    "device": _Key("device", "mapping"),
    "tiers": _Key("tiers", "list"),
}
_DEVICE_KEYS = {
    "name": _Key("name", "text"),
    "peak_tflops": _Key("peak_flops_per_second", "peaks", Decimal(10) ** 12, above=True),
    "memory_gib": _Key("memory_bytes", "bytes", _GIB, above=True),
    "reserved_memory_gib": _Key("reserved_memory_bytes", "bytes", _GIB, required=False),
    "memory_bandwidth_gb_per_s": _Key("memory_bandwidth_bytes_per_second", "number", _GIGA, above=True),
    "matmul_ceiling": _Key("matmul_ceiling", "number", required=False, above=True, high=_ONE),
    "launch_us": _Key("launch_seconds", "number", _MICRO, required=False),
    "sustained": _Key("sustained", "number", required=False, above=True, high=_ONE),
    "memory_ceiling": _Key("memory_ceiling", "number", required=False, above=True, high=_ONE),
    "multiprocessors": _Key("multiprocessors", "whole", required=False),
    "fused_attention_ceiling": _Key("fused_attention_ceiling", "number", required=False, above=True, high=_ONE),
    "overlap_slowdown": _Key("overlap_slowdown", "number", required=False),
    "operators": _Key("operators", "operators", required=False),
}
_OPERATOR = (_Key("seconds", "number", _MICRO), _Key("rate", "number", _GIGA, above=True))
"""What stands in the file for each operator."""

_TIER_KEYS = {
    "name": _Key("name", "text"),
    "span": _Key("span", "span"),
    "latency_us": _Key("latency_seconds", "number", _MICRO),
    "bandwidth_gb_per_s": _Key("bandwidth_bytes_per_second", "number", _GIGA, above=True),
    "efficiency": _Key("efficiency", "number", required=False, above=True, high=_ONE),
    "hop_us": _Key("hop_seconds", "number", _MICRO, required=False),
    "ramp_ns_per_sqrt_byte": _Key("ramp_seconds_per_sqrt_byte", "number", _NANO, required=False),
    "measured_gb_per_s": _Key("group_bandwidths", "sizes", _GIGA, required=False, above=True),
    "all_reduce_gb_per_s": _Key("all_reduce_bandwidths", "sizes", _GIGA, required=False, above=True),
    "gather_gb_per_s": _Key("gather_bandwidths", "sizes", _GIGA, required=False, above=True),
    "exchange_gb_per_s": _Key("exchange_bandwidths", "sizes", _GIGA, required=False, above=True),
    "links": _Key("links", "whole", required=False),
}


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file.

    Raises
    ------
    ClusterError
        The file cannot be read, is no YAML, or has an unknown, repeated, missing or ill-typed key, or a number that is
        not finite or out of range. The message begins with `file:line`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(
            f"cannot read the cluster file {path}: {error.strerror or error}; give the path of a YAML file."
        ) from None
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path}: is not UTF-8 text (byte {error.start}); a cluster file is YAML.") from None
    return parse_cluster(text, str(path))


def parse_cluster(text: str, source: str = "<text>") -> Cluster:
    """A cluster from the text of its file; `source` is what errors call it."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ClusterError(f"{source}:{line}: is not YAML: {error.problem or error.context}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ClusterError(f"{source}: is not YAML: {reason}.") from None
    return _Reader(source).cluster(root)


class _Reader:
    """Turns YAML nodes, which know their lines, into a cluster."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, node: yaml.Node, message: str) -> ClusterError:
        return ClusterError(f"{self.source}:{node.start_mark.line + 1}: {message}")

    def cluster(self, root: yaml.Node | None) -> Cluster:
        if root is None:
            raise ClusterError(f"{self.source}:1: is empty; a cluster file needs {', '.join(_CLUSTER_KEYS)}.")
        found = self.mapping(root, "the cluster", _CLUSTER_KEYS)
        fields = {name: self.value(node, name, _CLUSTER_KEYS[name]) for name, node in found.items()}
        device_nodes = self.mapping(found["device"], "device", _DEVICE_KEYS)
        device = self.build(Device, found["device"], device_nodes, "device", _DEVICE_KEYS)
        tiers = []
        for at, item in enumerate(fields["tiers"]):
            place = f"tiers[{at}]"
            nodes = self.mapping(item, place, _TIER_KEYS)
            tiers.append(self.build(Tier, item, nodes, place, _TIER_KEYS, fields["devices_per_node"]))
        try:
            return Cluster(fields["name"], device, fields["nodes"], fields["devices_per_node"], tuple(tiers))
        except ClusterError as error:
            raise self.fail(found["tiers"], str(error)) from None

    def build(
        self,
        kind: Callable[..., Any],
        owner: yaml.Node,
        nodes: dict[str, yaml.Node],
        place: str,
        keys: dict[str, _Key],
        per_node: int = 0,
    ) -> Any:
        fields = {
            keys[name].field: self.value(node, f"{place}.{name}", keys[name], per_node) for name, node in nodes.items()
        }
        try:
            return kind(**fields)
        except ClusterError as error:
            raise self.fail(owner, str(error)) from None

    def mapping(self, node: yaml.Node, place: str, keys: dict[str, _Key]) -> dict[str, yaml.Node]:
        """The children of a mapping by key, all of them known, none missing."""
        found = self.children(node, place)
        for name, (key, _) in found.items():
            if name not in keys:
                raise self.fail(key, f"unknown key {name!r} in {place}; {nearest_known(name, keys)}.")
        missing = [name for name, key in keys.items() if key.required and name not in found]
        if missing:
            raise self.fail(node, f"{place} lacks the key {', '.join(map(repr, missing))}; add it.")
        return {name: value for name, (_, value) in found.items()}

    def children(self, node: yaml.Node, place: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self.fail(node, f"{place} must be a mapping of keys to values, got {_shown(node)}.")
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.fail(key, f"the keys of {place} must be plain words, got {_shown(key)}.")
            if key.value in found:
                raise self.fail(key, f"{place} has the key {key.value!r} twice; remove one.")
            found[key.value] = (key, value)
        return found

    def value(self, node: yaml.Node, place: str, key: _Key, per_node: int = 0) -> Any:
        """What a node says, in the field's unit."""
        if key.takes == "mapping":
            return None
        if key.takes == "list":
            if not isinstance(node, yaml.SequenceNode):
                raise self.fail(node, f"{place} must be a list, got {_shown(node)}.")
            return node.value
        if key.takes == "text":
            if not isinstance(node, yaml.ScalarNode) or not node.value.strip() or node.tag.endswith(":null"):
                raise self.fail(node, f"{place} must be a text, got {_shown(node)}.")
            return node.value
        if key.takes == "span":
            words: dict[str, int | None] = {"node": per_node, "all": None}
            if isinstance(node, yaml.ScalarNode) and node.value in words:
                return words[node.value]
            return self.whole(node, place, "node, all, or a whole number of ranks")
        if key.takes == "whole":
            return self.whole(node, place, "a whole number of at least 1")
        if key.takes == "bytes":
            return int(self.number(node, place, key).to_integral_value())
        if key.takes == "peaks":
            table = self.children(node, place)
            for name, (name_node, _) in table.items():
                if name not in PEAK_TYPES:
                    raise self.fail(
                        name_node, f"unknown element type {name!r} in {place}; {nearest_known(name, PEAK_TYPES)}."
                    )
            return {name: float(self.number(value, f"{place}.{name}", key)) for name, (_, value) in table.items()}
        if key.takes == "operators":
            return [
                (name, *(float(self.number(item, f"{place}.{name}", unit)) for item, unit in zip(pair, _OPERATOR)))
                for name, pair in (
                    (name, self.pair(node, f"{place}.{name}")) for name, (_, node) in self.children(node, place).items()
                )
            ]
        if key.takes == "sizes":
            return {
                self.whole(size, f"a group size in {place}", "a whole number of at least 2", 2): float(
                    self.number(value, f"{place}.{size.value}", key)
                )
                for size, value in self.children(node, place).values()
            }
        return float(self.number(node, place, key))

    def pair(self, node: yaml.Node, place: str) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode) or len(node.value) != 2:
            raise self.fail(node, f"{place} must be a list of two numbers, us and GB/s, got {_shown(node)}.")
        return node.value

    def whole(self, node: yaml.Node, place: str, expected: str, low: int = 1) -> int:
        text = node.value if isinstance(node, yaml.ScalarNode) else ""
        if not text.isdecimal() or len(text) > 12 or int(text) < low:
            raise self.fail(node, f"{place} must be {expected}, got {_shown(node)}.")
        return int(text)

    def number(self, node: yaml.Node, place: str, key: _Key) -> Decimal:
        bounds = "above 0" if key.above else "of at least 0"
        if key.high is not None:
            bounds += f" and at most {key.high}"
        wrong = self.fail(node, f"{place} must be a finite number {bounds}, got {_shown(node)}.")
        if not isinstance(node, yaml.ScalarNode) or node.style in ("'", '"'):
            raise wrong
        try:
            number = Decimal(node.value.replace("_", ""))
        except InvalidOperation:
            raise wrong from None
        if (
            not number.is_finite()
            or number < 0
            or (key.above and number == 0)
            or (key.high is not None and number > key.high)
        ):
            raise wrong
        scaled = _EXACT.multiply(number, key.unit)
        if not math.isfinite(float(scaled)):
            raise wrong
        return scaled


def _shown(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return repr(node.value) if node.value else "nothing"


def dump_cluster(cluster: Cluster) -> str:
    """The file of a cluster; `parse_cluster` reads it back to an equal one."""
    lines = [
        f"name: {_quoted(cluster.name)}",
        f"nodes: {cluster.nodes}",
        f"devices_per_node: {cluster.devices_per_node}",
        "device:",
        *(f"  {line}" for line in _lines(cluster.device, _DEVICE_KEYS, cluster)),
        "tiers:" if cluster.tiers else "tiers: []",
    ]
    for tier in cluster.tiers:
        first, *rest = _lines(tier, _TIER_KEYS, cluster)
        lines += [f"  - {first}", *(f"    {line}" for line in rest)]
    return "\n".join(lines) + "\n"


def _lines(owner: Device | Tier, keys: dict[str, _Key], cluster: Cluster) -> list[str]:
    """One line per key whose value is not absent or an empty table."""
    lines = []
    for name, key in keys.items():
        value = getattr(owner, key.field)
        if key.takes in ("peaks", "sizes"):
            if value:
                lines.append(f"{name}: {{{', '.join(f'{k}: {_in_unit(v, key.unit)}' for k, v in value)}}}")
        elif key.takes == "operators":
            shown = (f"{n}: [{_in_unit(s, _MICRO)}, {_in_unit(r, _GIGA)}]" for n, s, r in value)
            lines += [f"{name}: {{{', '.join(shown)}}}"] if value else []
        elif key.takes == "whole":
            if value is not None:
                lines.append(f"{name}: {value}")
        elif key.takes == "text":
            lines.append(f"{name}: {_quoted(value)}")
        elif key.takes == "span":
            word = "all" if value is None else "node" if value == cluster.devices_per_node else value
            lines.append(f"{name}: {word}")
        elif key.takes == "bytes":
            # Reading rounds to whole bytes, which ten digits after the point always tell apart.
            shown = (_trimmed(_EXACT.divide(value, key.unit), digits) for digits in range(11))
            lines.append(f"{name}: {next(text for text in shown if _bytes(Decimal(text), key) == value)}")
        else:
            lines.append(f"{name}: {_in_unit(value, key.unit)}")
    return lines


def _in_unit(value: float, unit: Decimal) -> str:
    """A number in the file's unit, exactly: the shortest decimal of the float, shifted."""
    return _trimmed(_EXACT.divide(Decimal(repr(value)), unit))


def _bytes(number: Decimal, key: _Key) -> int:
    return int(_EXACT.multiply(number, key.unit).to_integral_value())


def _trimmed(number: Decimal, digits: int | None = None) -> str:
    text = f"{number:f}" if digits is None else f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _quoted(text: str) -> str:
    """Plain where YAML reads it back as the same text, else in double quotes."""
    if _plain(text):
        return text
    return yaml.safe_dump(text, width=10**6, allow_unicode=True, default_style='"').strip()


def _plain(text: str) -> bool:
    try:
        return yaml.safe_load(f"name: {text}") == {"name": text}
    except yaml.YAMLError:
        return False
