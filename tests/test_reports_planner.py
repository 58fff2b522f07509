"""Reports of users of other systems: memory that a plan needs, searches that repeat and are exact, pins that clash.

Each test names its report.
"""

import dataclasses
import itertools
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import networkx
import numpy
import pytest

import sbp
from sbp import nn
from sbp.errors import InfeasibleError, SbpError
from sbp.graph import Initial
from sbp.mesh import Mesh
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.optim import Adam
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.memory import live_at
from sbp.planner.problem import ProblemBuilder, evaluate
from sbp.planner.solver import Limits, Status, solve
from sbp.planner.styles import Styles, TensorParallel
from sbp.report.summary import to_json
from sbp.trace import GraphBuilder
from sbp.training import training_step

RNG = numpy.random.default_rng


def machine(devices, preset="a100-80g"):
    return Cluster.preset(preset, nodes=1, devices_per_node=devices)


def built(function, **types):
    builder = GraphBuilder("net")
    with builder:
        made = function(*(builder.source(name, kind) for name, kind in types.items()))
    return builder.finish([made])


class Net(nn.Module):
    """4 -> 8 -> 4, 76 parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, targets):
        return nn.MSELoss()(self.down(ops.relu(self.up(x))), targets)

    def example_inputs(self, batch, sequence=None):
        kind = TensorType((batch, 4), "f32")
        return {"x": (kind, Initial()), "targets": (kind, Initial())}


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adam_plan():
    graph = training_step(Net(), 2, optimizer=Adam(), precision="f32")
    return auto_parallel(graph, machine(1), mesh=(1,))


def test_r099_memory_by_kind_adds_up(adam_plan):
    """76 parameters in f32 with Adam: 304 bytes, 608 of moments (and 8 of the step count), gradients of 304."""
    plan = adam_plan
    memory = plan.memory
    assert sum(plan.graph.values[name].type.elements for name in plan.graph.parameters) == 76
    assert memory.by_kind["parameter"] == 304 and memory.by_kind["optimizer"] == 608 + 8
    parameters = {plan.graph.values[name].shape for name in plan.graph.parameters}
    gradients = [
        plan.graph.values[name].type.bytes
        for node in plan.graph.nodes
        if node.op == "adam_update"
        for name in node.inputs[1:2]
    ]
    assert len(gradients) == 4 and sum(gradients) == 304 and (8, 4) in parameters
    assert sum(memory.by_kind.values()) == memory.peak_bytes
    rows = to_json(plan)["memory_bytes"]
    assert {kind: rows[kind] for kind in memory.by_kind} == dict(memory.by_kind) and rows["peak"] == memory.peak_bytes


def test_r100_whether_it_fits_and_what_fills_the_peak(adam_plan):
    plan = adam_plan
    needed = plan.memory.peak_bytes + plan.memory.reserved_bytes
    assert plan.memory.fits(80e9) and plan.memory.fits(needed) and not plan.memory.fits(needed - 1)
    live = plan.live_at_peak
    assert sum(register.bytes for register in live) == plan.memory.peak_bytes
    assert [register.bytes for register in live] == sorted((register.bytes for register in live), reverse=True)
    assert {register.value for register in live} >= {"up.weight", "down.weight", "up.weight.exp_avg"}
    assert "Peak" in str(plan) or "peak" in str(plan)


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_r100_the_live_registers_are_the_peak_on_meshes(shape):
    mesh = Mesh(shape)
    graph = training_step(Net(), 8, optimizer=Adam(), precision="mixed")
    plan = auto_parallel(graph, machine(mesh.size), mesh=mesh)
    assert sum(register.bytes for register in plan.live_at_peak) == plan.memory.peak_bytes


def test_r094_what_is_too_large_is_left_out_by_its_shape():
    """(1, 131072, 28672) in f16 is 7.5 GB: fits 10 GB only in two halves. Nothing of that size is ever made."""
    kind = TensorType((1, 131072, 28672), "f16")
    assert kind.bytes == 7516192768
    graph = built(lambda x: ops.relu(x), x=kind)
    tracemalloc.start()
    plan = auto_parallel(graph, machine(2), mesh=(2,), memory_limit=10 * 10**9)
    with pytest.raises(InfeasibleError, match="x|relu|bytes|GiB"):
        auto_parallel(graph, machine(1), mesh=(1,), memory_limit=10 * 10**9)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert plan.memory.peak_bytes == kind.bytes <= 10 * 10**9
    assert {register.bytes for register in plan.physical.registers} == {kind.bytes // 2}


@pytest.fixture(scope="module")
def tensor_parallel_plans():
    """A small GPT on 1 and on 4 tensor-parallel ranks with sequence splits, with and without recompute."""
    found = {}
    for ranks, again in itertools.product((1, 4), ("none", "full")):
        styles = None if ranks == 1 else lambda graph, mesh: Styles(graph, mesh, TensorParallel(sequence=True))
        found[ranks, again] = auto_parallel(
            sbp.build("gpt2", layers=3, heads=4, hidden=128, vocabulary=512, positions=128),
            machine(ranks), batch=8, mesh=(ranks,), recompute=again, restriction=styles,
            pins=None if ranks == 1 else {"h.?.add*": "S(1)"},  # a P -> S(1) after each row-parallel product
        )  # fmt: skip
    return found


def test_r097_recompute_together_with_a_tensor_split_holds_less_than_either(tensor_parallel_plans):
    peaks = {key: plan.memory.peak_bytes for key, plan in tensor_parallel_plans.items()}
    assert peaks[4, "full"] < peaks[4, "none"] < peaks[1, "none"]
    assert peaks[4, "full"] < peaks[1, "full"] < peaks[1, "none"]
    both = tensor_parallel_plans[4, "full"]
    assert {"all_gather", "reduce_scatter"} <= {step.kind for step in both.boxing}, "the split that is meant"


def test_r097_every_layout_of_a_value_is_held_once(tensor_parallel_plans):
    """At no time two copies of one value in one layout: what was gathered for the backward phase serves all readers."""
    plan = tensor_parallel_plans[4, "full"]
    physical = plan.physical
    gathered = False
    for at in range(len(physical.operations)):
        held = [(register.value, register.layout) for register in live_at(physical, at)]
        assert len(held) == len(set(held))
        gathered |= any(value.endswith(".again") for value, _ in held)
    assert gathered


def test_r097_what_backward_does_not_need_is_not_recomputed(tensor_parallel_plans):
    """The last product of a block ends on the residual stream; no gradient reads its result."""
    graph = tensor_parallel_plans[4, "full"].graph
    again = {node.name for node in graph.nodes if node.name.endswith(".again")}
    assert {"h.1.mlp.fc.linear.again", "h.1.attn.proj.linear.again"} <= again
    assert not {f"h.1.mlp.proj.{op}.again" for op in ("linear", "add")} & again
    read = {name for node in graph.nodes for name in node.inputs}
    for node in graph.nodes:
        if node.name in again:
            assert any(name in read for name in node.outputs), node.name


def test_r096_constants_are_planned_by_their_shape():
    """full((200000, 200000)) would be 160 GB."""
    tracemalloc.start()
    graph = built(lambda x: (ops.full(shape=(200000, 200000), value=1.0) * x).sum(), x=TensorType((200000, 1), "f32"))
    plan = auto_parallel(graph, machine(8), mesh=(8,))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100e6
    assert plan.layouts["full"].axes[0].axis in (0, 1)


# -- the same every time -----------------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, json
from sbp import Cluster, auto_parallel, build
cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=4)
for options in ({"mesh": (2, 2)}, {"mesh": (4,)}):  # the axes of (2, 2) are alike: many plans are equally good
    plan = auto_parallel(build("mlp", widths=(32, 64, 64, 32)), cluster, batch=64, **options)
    print(hashlib.sha256(json.dumps(plan.to_json()).encode()).hexdigest())
"""


def test_r101_r107_r108_every_process_finds_the_same_plan():
    """Fresh processes with other hash seeds: ties are broken, and nothing depends on the order of sets."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OPENBLAS_NUM_THREADS": "1"}
    found = set()
    for seed in ("0", "1", "7", "1234"):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(run.stdout)
    assert len(found) == 1 and len(next(iter(found)).split()) == 2


# -- exact, bounded, in time -------------------------------------------------------------------------------------------


def _problem(count, sizes, edges, rng, limit=None):
    builder = ProblemBuilder("reports")
    for size in sizes[:count]:
        node = builder.add_node(rng.integers(0, 20, size))
        builder.add_usage(node, 0, 1, rng.integers(0, 5, size))
    for first, second in edges:
        builder.add_edge(first, second, rng.integers(0, 20, (sizes[first], sizes[second])))
    return builder.build(limit)


def test_r106_every_shape_of_graph_on_up_to_five_nodes_equals_enumeration():
    """All sets of edges between up to 4 nodes, all graphs of 5; 1 to 4 strategies, without and with a limit."""
    rng = RNG(0)
    count = 0
    for nodes in (1, 2, 3, 4, 5):
        pairs = list(itertools.combinations(range(nodes), 2))
        shapes = [[pair for bit, pair in enumerate(pairs) if number >> bit & 1] for number in range(2 ** len(pairs))]
        if nodes == 5:  # up to the names of the nodes: 34 of 1024
            shapes = [list(graph.edges) for graph in networkx.graph_atlas_g() if len(graph) == 5]
        for edges in shapes:
            sizes = [int(size) for size in rng.integers(1, 5, nodes)]
            problem = _problem(nodes, sizes, edges, rng, None if count % 2 else 2 * nodes)
            outcomes = [evaluate(problem, choice) for choice in itertools.product(*map(range, sizes))]
            best = min((outcome.cost for outcome in outcomes if outcome.feasible), default=None)
            found = solve(problem, Limits(10.0, 1))
            if best is None:
                assert found.status is Status.INFEASIBLE
            else:
                assert found.status is Status.OPTIMAL and found.objective == found.lower_bound == best
            count += 1
    assert count == 1 + 2 + 8 + 64 + 34


@pytest.mark.parametrize("seed", range(3))
def test_r103_the_status_does_not_depend_on_the_number_of_workers(seed):
    rng = RNG(seed)
    chain = _problem(30, [4] * 30, [(at, at + 1) for at in range(29)], rng)
    ends = [solve(chain, Limits(20.0, threads)) for threads in (1, 8)]
    assert [end.status for end in ends] == [Status.OPTIMAL] * 2
    assert ends[0].objective == ends[1].objective
    assert evaluate(chain, ends[0].choice).cost == evaluate(chain, ends[1].choice).cost == ends[0].objective
    peak = evaluate(chain, ends[0].choice).peak
    tight = [solve(chain.with_limit(peak - 1), Limits(20.0, threads)) for threads in (1, 8)]
    assert tight[0].status is tight[1].status and tight[0].objective == tight[1].objective


@pytest.mark.parametrize("nodes", [5, 40])
def test_r103_without_time_nothing_is_called_infeasible(nodes):
    """Forbidden strategies that no reduction had the time to remove once summed up beyond 64 bits: a false proof."""
    from sbp.planner.problem import FORBIDDEN_INTEGER
    from sbp.planner.solver.core import reduced
    from sbp.planner.solver.reducer import FORBIDDEN_COST
    from sbp.planner.solver.scale import scaled

    rng = RNG(7)
    builder = ProblemBuilder("no time")
    for _ in range(nodes):
        costs = rng.integers(1, 1000, 5)
        costs[3:] = FORBIDDEN_INTEGER
        node = builder.add_node(costs)
        builder.add_usage(node, 0, 1, rng.integers(1, 5, 5))
    for first in range(nodes):
        for second in range(first + 1, min(first + 4, nodes)):
            builder.add_edge(first, second, rng.integers(0, 1000, (5, 5)))
    problem = builder.build(3 * nodes)
    core = reduced(scaled(problem), out_of_time=lambda: True).core
    forbidden = core.costs.copy()
    last = core.node_offsets[1:] - 1
    forbidden[last] = FORBIDDEN_COST  # as a reduction leaves behind what it has ruled out
    worst = dataclasses.replace(core, costs=forbidden).worst_cost()
    allowed = [int(costs[:-1].max()) for costs in numpy.split(core.costs, core.node_offsets[1:-1])]
    tables = numpy.split(core.table_values, core.table_offsets[1:-1])
    assert worst == core.constant + sum(allowed) + sum(int(table.max()) for table in tables)
    for seconds in (1e-9, 1e-3, 0.02, 5.0):
        assert solve(problem, Limits(seconds, 1)).status is not Status.INFEASIBLE


def test_r104_a_limit_that_is_too_short_still_gives_a_bounded_choice():
    """200 nodes in 0.05 s: a choice no worse than the greedy one, with a bound and the gap between them."""
    rng = RNG(4)
    nodes, size = 200, 6
    edges = sorted({tuple(sorted(rng.choice(nodes, 2, replace=False).tolist())) for _ in range(500)})
    problem = _problem(nodes, [size] * nodes, edges, rng)
    greedy = numpy.zeros(nodes, int)
    into = {node: [] for node in range(nodes)}
    for edge, (first, second) in enumerate(edges):
        into[second].append((edge, first))
    for node in range(nodes):
        cost = problem.node_costs(node).astype(float)
        for edge, first in into[node]:
            cost = cost + problem.table(edge).reshape(size, size)[greedy[first]]
        greedy[node] = int(cost.argmin())
    found = solve(problem, Limits(0.05, 1))
    assert found.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert evaluate(problem, found.choice).cost == found.objective <= evaluate(problem, greedy).cost
    assert found.lower_bound <= found.objective
    assert found.gap == pytest.approx((found.objective - found.lower_bound) / found.objective)
    if found.status is Status.FEASIBLE:
        assert found.gap > 0
        assert not found.statistics["reproducible"], "the clock decided when to stop, and it says so"
    small = _problem(8, [3] * 8, [(at, at + 1) for at in range(7)], rng)
    assert solve(small, Limits(20.0, 1)).statistics["reproducible"]


def test_r112_axes_are_planned_together():
    """A small batch and large weights on (2, 4): splitting the batch along both axes is not the best there is."""
    graph = built(lambda x, w: x @ w, x=TensorType((8, 4096), "f32"), w=TensorType((4096, 16384), "f32"))
    cluster = machine(8)
    together = auto_parallel(graph, cluster, mesh=(2, 4))
    one_by_one = auto_parallel(graph, cluster, mesh=(2, 4), pins={"matmul": "S(0), S(0)"})
    mixed = auto_parallel(graph, cluster, mesh=(2, 4), pins={"matmul": "S(0), S(1)"})
    assert together.status is Status.OPTIMAL
    assert together.objective_seconds <= mixed.objective_seconds < one_by_one.objective_seconds


def test_r113_only_the_pins_that_clash_are_named():
    """Two outputs of one split cannot be split along different dimensions; 50 other pins have nothing to do with it."""

    def program(x, *others):
        first, second = ops.split(x, sizes=(4, 4), axis=2)
        total = ops.neg(first) + second
        for other in others:
            total = total + ops.neg(other).sum()
        return total

    kind = TensorType((8, 8, 8), "f32")
    graph = built(program, x=kind, **{f"other{at}": TensorType((8,), "f32") for at in range(50)})
    harmless = {f"other{at}": "S(0)" if at % 2 else "B" for at in range(50)}
    clashing = {"split:0": "S(0)", "split:1": "S(1)"}
    auto_parallel(graph, machine(2), mesh=(2,), pins={**harmless, "split:0": "S(0)"})
    with pytest.raises(SbpError) as error:
        auto_parallel(graph, machine(2), mesh=(2,), pins={**dict(list(harmless.items())[:25]), **clashing, **harmless})
    message = str(error.value)
    assert "'split:0': (S(0))" in message and "'split:1': (S(1))" in message and "other" not in message


# -- starting from a plan ----------------------------------------------------------------------------------------------


def net_step(batch):
    return training_step(Net(), batch, optimizer=Adam(), precision="f32")


@pytest.fixture(scope="module")
def poor():
    """A plan that nobody would choose: everything split along the features."""
    pins = {"x": "S(1)", "up.weight": "S(0)", "down.weight": "S(0)", "relu": "S(1)"}
    return auto_parallel(net_step(8), machine(2), mesh=(2,), pins=pins)


def test_r165_a_search_starts_from_a_plan(poor):
    """The result costs no more than the hint, and what was proven without it still is."""
    free = auto_parallel(net_step(8), machine(2), mesh=(2,))
    assert free.objective_seconds < poor.objective_seconds
    for hint in (poor, free):
        found = auto_parallel(net_step(8), machine(2), mesh=(2,), hint=hint)
        assert found.objective_seconds == pytest.approx(free.objective_seconds, rel=1e-12)
        assert found.status is Status.OPTIMAL and found.lower_bound_seconds == free.lower_bound_seconds
        assert found.verify().passed


def test_r165_without_time_the_hint_is_the_result(poor, monkeypatch):
    """A search that finds nothing in time, or nothing better, leaves the hint's decisions, with what was proven."""
    from sbp.errors import TimeLimitError
    from sbp.planner import auto_parallel as module

    def too_late(*arguments, **options):
        raise TimeLimitError("no plan was found within the time limit")

    with monkeypatch.context() as patch:
        patch.setattr(module, "search", too_late)
        found = auto_parallel(net_step(8), machine(2), hint=poor)
    assert found.decisions == poor.decisions and found.mesh == poor.mesh
    assert found.objective_seconds == poor.objective_seconds
    assert found.status is Status.FEASIBLE and found.lower_bound_seconds == 0.0 and found.reason == "the hint"

    real = module.search

    def worse(*arguments, **options):
        outcome = real(*arguments, **options)
        return dataclasses.replace(outcome, objective_seconds=1e9, status=Status.FEASIBLE)

    monkeypatch.setattr(module, "search", worse)
    found = auto_parallel(net_step(8), machine(2), mesh=(2,), hint=poor)
    assert found.decisions == poor.decisions and 0 < found.lower_bound_seconds <= found.objective_seconds
    assert found.status is Status.FEASIBLE and found.reason.startswith("the hint")


def test_r165_the_solver_begins_with_the_hint(poor, monkeypatch):
    """Handed on as a choice of the problem, whose cost is the plan's."""
    from sbp.planner import search as module

    real, starts = module.solve, []

    def watched(problem, limits, **options):
        if "start" in options:
            starts.append(evaluate(problem, options["start"]()).cost)
        return real(problem, limits, **options)

    monkeypatch.setattr(module, "solve", watched)
    auto_parallel(net_step(8), machine(2), mesh=(2,), hint=poor)
    assert starts[0] == pytest.approx(poor.objective_seconds, rel=1e-9)


def test_r165_hints_for_other_sizes_machines_and_meshes(poor, tmp_path, capsys):
    larger = auto_parallel(net_step(16), machine(2, "h100"), hint=poor)
    assert larger.objective_seconds <= auto_parallel(net_step(16), machine(2, "h100")).objective_seconds * (1 + 1e-9)
    product = built(lambda x, w: x @ w, x=TensorType((64, 256), "f32"), w=TensorType((256, 512), "f32"))
    cube = auto_parallel(product, machine(8), mesh=(2, 2, 2))  # no mesh of three axes is tried by itself
    found = auto_parallel(product, machine(8), hint=cube)
    assert found.objective_seconds <= cube.objective_seconds
    assert [tried.mesh.shape for tried in found.tried][0] == (2, 2, 2)

    notes = []
    graph = built(lambda x: ops.relu(x), x=TensorType((1024, 1024), "f32"))
    whole = auto_parallel(graph, machine(2), mesh=(2,), pins={"x": "B", "relu": "B"})
    tight = whole.memory.peak_bytes * 3 // 4
    small = auto_parallel(graph, machine(2), mesh=(2,), memory_limit=tight, hint=whole, progress=notes.append)
    assert small.memory.peak_bytes <= tight and any("the hint needs" in note for note in notes)


def test_r165_hints_that_contradict(poor):
    from sbp.errors import PlanError

    with pytest.raises(PlanError, match=r"the hint cannot be a start.*up.weight than the pin 'up.weight'"):
        auto_parallel(net_step(8), machine(2), mesh=(2,), hint=poor, pins={"up.weight": "B"})
    with pytest.raises(PlanError, match=r"the hint is a plan on mesh\(x=2\), the search is on mesh\(x=4\)"):
        auto_parallel(net_step(8), machine(4), mesh=(4,), hint=poor)
    with pytest.raises(SbpError, match="4"):
        auto_parallel(net_step(8), machine(4), hint=poor)
    with pytest.raises(PlanError):
        auto_parallel("tiny-gpt2", machine(2), mesh=(2,), hint=poor)


def test_r165_the_command_takes_a_hint(tmp_path, capsys):
    from sbp.cli.main import run

    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    common = ["plan", "tiny-mlp", "--cluster", "cpu", "--mesh", "4", "--batch", "8", "--json"]
    assert run([*common, "--pin", "layers.0.weight=S(0)", "--out", first]) == 0
    assert run([*common, "--hint", first, "--out", second]) == 0
    capsys.readouterr()
    from sbp.planner.plan import Plan

    assert Plan.load(second).objective_seconds <= Plan.load(first).objective_seconds
    assert run([*common, "--hint", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
