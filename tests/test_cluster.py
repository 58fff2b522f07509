"""Clusters: presets, strict files with lines in their errors, exact round trips."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_clusters import DEVICE

from sbp.errors import ClusterError
from sbp.planner.cluster import Cluster, Device, Tier, presets
from sbp.planner.cluster_file import dump_cluster, parse_cluster

HARDWARE = Path(__file__).parents[2] / "shared" / "published_runs" / "hardware.csv"

FILE = """\
name: lab
nodes: 2
devices_per_node: 4
device:
  name: Chip
  peak_tflops: {f32: 10, bf16: 80.5}
  memory_gib: 16
  reserved_memory_gib: 1
  memory_bandwidth_gb_per_s: 900
  matmul_ceiling: 0.7
  launch_us: 3
tiers:
  - name: bus
    span: node
    latency_us: 10
    bandwidth_gb_per_s: 100
    measured_gb_per_s: {2: 40, 4: 90}
    all_reduce_gb_per_s: {4: 120}
  - name: net
    span: all
    latency_us: 20
    hop_us: 5
    bandwidth_gb_per_s: 12.5
    efficiency: 0.9
    ramp_ns_per_sqrt_byte: 2
"""


def lab(**changes) -> Cluster:
    tiers = (Tier("bus", 4, 1e-5, 1e11), Tier("net", None, 2e-5, 1.25e10))
    fields = {"name": "lab", "device": chip(), "nodes": 2, "devices_per_node": 4, "tiers": tiers} | changes
    return Cluster(**fields)


def chip(**changes) -> Device:
    fields = {
        "name": "Chip",
        "peak_flops_per_second": {"f32": 1e13, "bf16": 8e13},
        "memory_bytes": 2**34,
        "memory_bandwidth_bytes_per_second": 9e11,
    }
    return Device(**(fields | changes))


def test_units():
    cluster = parse_cluster(FILE)
    device, (bus, net) = cluster.device, cluster.tiers
    assert (cluster.name, cluster.nodes, cluster.devices_per_node, cluster.size) == ("lab", 2, 4, 8)
    assert device.peak_flops_per_second == (("f32", 1e13), ("bf16", 8.05e13))
    assert device.memory_bytes == 2**34 and device.usable_memory_bytes == 15 * 2**30
    assert device.memory_bandwidth_bytes_per_second == 9e11 and device.launch_seconds == 3e-6
    assert (bus.span, bus.latency_seconds, bus.bandwidth_bytes_per_second) == (4, 1e-5, 1e11)
    assert bus.group_bandwidths == ((2, 4e10), (4, 9e10)) and bus.all_reduce_bandwidths == ((4, 1.2e11),)
    assert (net.span, net.hop_seconds, net.efficiency, net.ramp_seconds_per_sqrt_byte) == (None, 5e-6, 0.9, 2e-9)
    assert cluster.span(net) == 8 and cluster.node(5) == 1


def test_bandwidth_of_a_group_is_the_measured_one_of_the_largest_size_that_it_reaches():
    bus = parse_cluster(FILE).tiers[0]
    assert [bus.bandwidth(members) for members in (2, 3, 4, 9)] == [4e10, 4e10, 9e10, 9e10]
    assert [bus.bandwidth(members, all_reduce=True) for members in (2, 3, 4, 9)] == [4e10, 4e10, 1.2e11, 1.2e11]
    assert Tier("net", None, 0.0, 1e10, efficiency=0.5).bandwidth(7, all_reduce=True) == 5e9


@pytest.mark.parametrize("name", presets())
def test_presets_are_sound(name):
    cluster = Cluster.preset(name, nodes=3)
    assert cluster.name == name and cluster.nodes == 3
    assert parse_cluster(dump_cluster(cluster)) == cluster
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert 0 < cluster.device.reserved_memory_bytes < cluster.device.memory_bytes / 2
    assert all(cluster.device.peak(dtype) > 0 for dtype in ("f64", "f32", "bf16", "f16", "i64", "bool"))


def test_preset_values():
    cluster = Cluster.preset("a100-80g", nodes=16)
    assert cluster.size == 128 and cluster.device.peak("bf16") == 3.12e14
    assert cluster.device.peak("f32") == 1.95e13 and cluster.device.peak("f64") == 0.975e13
    assert cluster.device.memory_bandwidth_bytes_per_second == 2.039e12
    assert Cluster.preset("v100-32g").device.peak("bf16") == Cluster.preset("v100-32g").device.peak("f16") == 1.25e14
    assert Cluster.preset("cpu", devices_per_node=2).size == 2
    gb200 = Cluster.preset("gb200", nodes=20)
    assert gb200.size == 80 and gb200.span(gb200.tiers[0]) == 72


def test_every_device_of_the_hardware_table_has_a_preset():
    if not HARDWARE.is_file():
        pytest.skip(f"the table of devices is not at {HARDWARE}")
    known = [Cluster.preset(name).device for name in presets()]
    with HARDWARE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 20
    for row in rows:
        # MI250X: the package's row, while the preset's device is one of its two halves.
        halves = 2 if row["gpu"].startswith("MI250X") else 1
        peak = float(row["bf16_TFLOPS_dense"] or row["fp16_TFLOPS_dense"]) / halves
        found = [
            device
            for device in known
            if device.peak("bf16") == pytest.approx(peak * 1e12)
            and device.memory_bandwidth_bytes_per_second == pytest.approx(float(row["mem_BW_GBps"]) / halves * 1e9)
            and device.memory_bytes == pytest.approx(float(row["mem_GB"]) / halves * 1e9, rel=0.08)
        ]
        assert found, row["gpu"]


def test_nodes_and_devices_per_node():
    cluster = lab()
    assert cluster.with_nodes(5).size == 20 and cluster.with_nodes(5).tiers == cluster.tiers
    small = cluster.with_devices_per_node(2)
    assert small.size == 4 and small.tiers[0].span == 2 and small.tiers[1].span is None
    assert Cluster.resolve(cluster) is cluster and Cluster.resolve(cluster, nodes=1).size == 4


def test_hashable_and_equal_however_peaks_are_given():
    assert hash(lab()) == hash(lab())
    assert chip() == chip(peak_flops_per_second=(("bf16", 8e13), ("f32", 1e13)))


def test_load_save_resolve(tmp_path):
    path = tmp_path / "lab.yaml"
    cluster = parse_cluster(FILE)
    cluster.save(path)
    assert Cluster.load(path) == Cluster.resolve(path) == Cluster.resolve(str(path)) == cluster
    assert Cluster.resolve(path, nodes=7).nodes == 7
    assert Cluster.resolve("a100-80g", nodes=2) == Cluster.preset("a100-80g", 2)


POSITIVE = st.floats(min_value=1e-6, max_value=1e16)


@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1).filter(
        str.strip
    ),
    peak=POSITIVE,
    memory=st.integers(2, 2**50),
    bandwidth=POSITIVE,
    ceiling=st.floats(min_value=1e-3, max_value=1),
    launch=st.floats(min_value=0, max_value=10),
    nodes=st.integers(1, 10**6),
    table=st.dictionaries(st.integers(2, 99), POSITIVE, max_size=3),
)
def test_files_and_json_round_trip_exactly(name, peak, memory, bandwidth, ceiling, launch, nodes, table):
    device = Device(name, {"f32": peak}, memory, bandwidth, ceiling, launch, memory // 2)
    tiers = (Tier("bus", 4, launch, bandwidth, ceiling, launch, launch, table), Tier("net", None, 0, bandwidth))
    cluster = Cluster(name, device, nodes, 4, tiers)
    assert parse_cluster(dump_cluster(cluster)) == cluster
    assert Cluster.from_json(cluster.to_json()) == cluster


BAD = [
    # (what is replaced, by what, line, words of the message)
    ("memory_gib: 16", "memroy_gib: 16", 7, "unknown key 'memroy_gib' in device; did you mean memory_gib?"),
    ("  launch_us: 3", "  colour: red", 11, "unknown key 'colour'"),
    ("nodes: 2", "nodes: two", 2, "nodes must be a whole number of at least 1, got 'two'"),
    ("nodes: 2", "nodes: 0", 2, "whole number of at least 1"),
    ("nodes: 2", "nodes: -2", 2, "whole number of at least 1"),
    ("nodes: 2", "nodes: 2.5", 2, "whole number of at least 1"),
    ("nodes: 2", "nodes: true", 2, "whole number of at least 1"),
    ("nodes: 2\n", "", 1, "the cluster lacks the key 'nodes'"),
    ("  memory_gib: 16\n", "", 5, "device lacks the key 'memory_gib'"),
    ("    latency_us: 10\n", "", 13, "tiers[0] lacks the key 'latency_us'"),
    ("latency_us: 20", "latency_us: .nan", 21, "tiers[1].latency_us must be a finite number of at least 0"),
    ("latency_us: 20", "latency_us: nan", 21, "finite number"),
    ("latency_us: 20", "latency_us: .inf", 21, "finite number"),
    ("latency_us: 20", "latency_us: -1", 21, "got '-1'"),
    ("latency_us: 20", "latency_us: '20'", 21, "finite number"),
    ("latency_us: 20", "latency_us: [20]", 21, "got a list"),
    ("latency_us: 20", "latency_us:", 21, "got nothing"),
    ("latency_us: 20", "latency_us: 1e999999", 21, "finite number"),
    ("bandwidth_gb_per_s: 12.5", "bandwidth_gb_per_s: 0", 23, "above 0"),
    ("efficiency: 0.9", "efficiency: 90", 24, "at most 1"),
    ("bf16: 80.5", "bf61: 80.5", 6, "unknown element type 'bf61' in device.peak_tflops; did you mean bf16?"),
    ("{f32: 10, bf16: 80.5}", "{}", 5, "at least one of"),
    ("{f32: 10, bf16: 80.5}", "80", 6, "device.peak_tflops must be a mapping"),
    ("reserved_memory_gib: 1", "reserved_memory_gib: 17", 5, "leaves nothing"),
    (
        "memory_gib: 16",
        "memory_gib: 1e30",
        5,
        "memory_bytes must be a whole number of at least 1 and at most 1152921504606846976",
    ),
    ("span: node", "span: rack", 14, "tiers[0].span must be node, all, or a whole number of ranks, got 'rack'"),
    ("span: node", "span: 3", 13, "neither a part nor a multiple"),
    ("span: all", "span: 4", 13, "not a larger multiple"),
    ("span: all", "span: 6", 13, "not a larger multiple"),
    ("span: node", "span: all", 13, "only the last tier can span all"),
    ("nodes: 2", "nodes: 2\nnodes: 3", 3, "the key 'nodes' twice"),
    ("name: net", "name: bus", 13, "same name"),
    ("name: lab", "name: ", 1, "name must be a text"),
    ("{4: 120}", "{4: 181}", 13, "more than twice"),
    ("{2: 40, 4: 90}", "{1: 40}", 17, "whole number of at least 2"),
    ("  name: Chip", "  name: [", 7, "is not YAML"),
    ("name: lab", "? [a]\n: 1\nname: lab", 1, "must be plain words"),
]


@pytest.mark.parametrize(("old", "new", "line", "words"), BAD, ids=[f"{b[1].strip()[:30]}@{b[2]}" for b in BAD])
def test_bad_files_are_named_by_line(tmp_path, old, new, line, words):
    assert FILE.count(old) >= 1
    text = FILE.replace(old, new, 1)
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        Cluster.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ") and words in message, message
    assert "\n" not in message and caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["", "# nothing", "just text", "- a", "42", "a: [", "\t", "a: &b\n  <<: *b", "a: *b", "{" * 500]
)
def test_text_that_is_no_cluster(text):
    with pytest.raises(ClusterError):
        parse_cluster(text, "x.yaml")


@given(st.text(max_size=60))
def test_any_text_gives_a_cluster_error(text):
    with pytest.raises(ClusterError):
        parse_cluster(text)


@given(st.data())
def test_any_damage_gives_a_cluster_or_an_error_with_the_file(data):
    lines = FILE.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    lines[at] = data.draw(
        st.sampled_from(["", lines[at][:-2], lines[at] + "9", "  " + lines[at], lines[at] * 2, "x: 1"])
    )
    try:
        parse_cluster("\n".join(lines), "lab.yaml")
    except ClusterError as error:
        assert str(error).startswith("lab.yaml")


def test_tiers_that_are_no_list():
    with pytest.raises(ClusterError, match="^lab.yaml:12: tiers must be a list, got '3'"):
        parse_cluster(FILE[: FILE.index("tiers:")] + "tiers: 3\n", "lab.yaml")


def test_unreadable_files(tmp_path):
    with pytest.raises(ClusterError, match="cannot read the cluster file .*missing.yaml"):
        Cluster.load(tmp_path / "missing.yaml")
    with pytest.raises(ClusterError, match="cannot read"):
        Cluster.load(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not UTF-8"):
        Cluster.load(binary)
    with pytest.raises(ClusterError, match="cannot write"):
        lab().save(tmp_path / "no" / "folder.yaml")


def test_unknown_presets():
    with pytest.raises(ClusterError, match="did you mean a100-80g"):
        Cluster.preset("a100_80g")
    for name in ("a100", "A100"):
        with pytest.raises(ClusterError, match=r"did you mean a100-40g or a100-80g or a100-80g-pcie\?"):
            Cluster.preset(name)
    with pytest.raises(ClusterError, match="did you mean h100.*path of a YAML file"):
        Cluster.resolve("H100")
    with pytest.raises(ClusterError, match="nodes must be a whole number"):
        Cluster.preset("h100", nodes=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: chip(peak_flops_per_second={}),
        lambda: chip(peak_flops_per_second={"int4": 1e12}),
        lambda: chip(peak_flops_per_second={"f32": math.inf}),
        lambda: chip(peak_flops_per_second={"f32": "fast"}),
        lambda: chip(memory_bytes=1.5),
        lambda: chip(memory_bytes=0),
        lambda: chip(memory_bandwidth_bytes_per_second=math.nan),
        lambda: chip(matmul_ceiling=0.0),
        lambda: chip(matmul_ceiling=1.01),
        lambda: chip(launch_seconds=-1e-6),
        lambda: chip(name=""),
        lambda: Tier("bus", 0, 0.0, 1e9),
        lambda: Tier("bus", None, -1.0, 1e9),
        lambda: Tier("bus", None, 0.0, 0.0),
        lambda: Tier("bus", None, 0.0, 1e9, group_bandwidths=((2, 1e9), (2, 2e9))),
        lambda: lab(nodes=True),
        lambda: lab(devices_per_node=0),
        lambda: lab(tiers=()),
        lambda: lab(tiers=(Tier("bus", 4, 0.0, 1e9),)),
        lambda: lab(device="chip"),
    ],
)
def test_bad_values_in_python(make):
    with pytest.raises(ClusterError):
        make()


def test_one_device_needs_no_tier():
    assert lab(nodes=1, devices_per_node=1, tiers=()).size == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data.pop("device"), "'device' is missing"),
        (lambda data: data["device"].pop("memory_bytes"), "'memory_bytes' is missing"),
        (lambda data: data["tiers"][0].update(spam=1), "unknown key 'spam'"),
        (lambda data: data["tiers"][1].update(group_bandwidths=[3]), "list of pairs"),
        (lambda data: data.update(tiers=4), "list of tiers"),
        (lambda data: data.update(device=[]), "object is expected"),
        (lambda data: data.update(nodes="2"), "whole number"),
    ],
)
def test_bad_json(damage, words):
    data = lab().to_json()
    damage(data)
    with pytest.raises(ClusterError, match=words):
        Cluster.from_json(data)


def run(*arguments):
    from click.testing import CliRunner

    from sbp.cli.clusters import clusters

    return CliRunner().invoke(clusters, arguments)


def test_command_lists_presets():
    shown = run()
    assert shown.exit_code == 0 and all(name in shown.stdout for name in presets()) and not shown.stderr
    data = json.loads(run("--json").stdout)
    assert [Cluster.from_json(item).name for item in data] == list(presets())


def test_command_shows_a_file_that_loads():
    shown = run("a100-80g", "--nodes", "16")
    assert parse_cluster(shown.stdout) == Cluster.preset("a100-80g", nodes=16)
    assert Cluster.from_json(json.loads(run("cpu", "--devices-per-node", "2", "--json").stdout)).size == 2


def test_command_errors():
    assert isinstance(run("h1000").exception, ClusterError)
    assert run("--nodes", "2").exit_code == 2
    assert run("h100", "--nodes", "0").exit_code == 2


# What `sbp profile` measures


def test_measured_operators_and_links_survive_files():
    device = replace(DEVICE, operators=(("relu", 3.25e-6, 1.5e9), ("gelu", 1.1e-5, 8.3e8)))
    tier = Tier(
        "bus", None, 1e-5, 1e9, gather_bandwidths={2: 3e9}, exchange_bandwidths=((4, 2e9), (2, 1e9)), links=3
    )  # fmt: skip
    cluster = Cluster("lab", device, 1, 4, (tier,))
    assert [row[0] for row in device.operators] == ["gelu", "relu"]
    assert tier.exchange_bandwidths == ((2, 1e9), (4, 2e9))
    assert parse_cluster(dump_cluster(cluster)) == cluster
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ("{gelu: 3}", r"device\.operators\.gelu must be a list of two numbers, us and GB/s, got '3'"),
        ("{gelu: [1, 0]}", r"device\.operators\.gelu must be a finite number above 0"),
        ("{gelu: [-1, 2]}", r"device\.operators\.gelu must be a finite number of at least 0"),
        ("{gelu: [1, 2], gelu: [1, 2]}", "has the key 'gelu' twice"),
    ],
)
def test_damaged_operators(operators, message):
    text = dump_cluster(Cluster.preset("cpu")).replace("launch_us", f"operators: {operators}\n  launch_us")
    with pytest.raises(ClusterError, match=message):
        parse_cluster(text)


def test_operators_given_in_python():
    device = Cluster.preset("cpu").device
    for bad in (5, [("gelu", 1.0)], [("gelu", -1.0, 1.0)], [("gelu", 1.0, 0.0)], [("", 1.0, 1.0)], [("a", 1, 1)] * 2):
        with pytest.raises(ClusterError):
            replace(device, operators=bad)
