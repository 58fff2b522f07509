"""Arenas: nothing that lives at once overlaps, the bound is one, and the executor gives the same bits out of one."""

import itertools
import random
import sys
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import mlp, random_plan
from random_graphs import random_graph

from sbp.dtype import SIZES
from sbp.errors import InfeasibleError, PlanError, TimeLimitError
from sbp.initial import draw_all
from sbp.mesh import Mesh
from sbp.models import TINY, build
from sbp.passes.recompute import with_recompute
from sbp.planner.arena import ALIGNMENT, arena_of, pack
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.buffers import buffers_of, register_bytes
from sbp.planner.cluster import Cluster
from sbp.planner.packing import place
from sbp.planner.plan import Plan
from sbp.runtime.executor import Executor
from sbp.training import training_step

ITEMS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(1, 8)), max_size=14)


def arrays(items):
    sizes, starts, lengths = (numpy.array(column, dtype=numpy.int64) for column in zip(*items))
    return sizes, starts, starts + lengths


def overlaps(sizes, starts, stops, offsets):
    """Pairs of items that share a byte at some time."""
    live = [number for number in range(len(sizes)) if sizes[number]]
    return [
        (a, b)
        for a, b in itertools.combinations(live, 2)
        if starts[a] < stops[b]
        and starts[b] < stops[a]
        and offsets[a] < offsets[b] + sizes[b]
        and offsets[b] < offsets[a] + sizes[a]
    ]


def place_plainly(sizes, starts, stops, order, best):
    """The twin of `packing.place`."""
    offsets, put = [0] * len(sizes), []
    for number in order:
        if not sizes[number]:
            continue
        beside = [m for m in put if starts[m] < stops[number] and stops[m] > starts[number]]
        gaps, free = [], 0
        for other in sorted(beside, key=lambda m: offsets[m]):
            if offsets[other] - free >= sizes[number]:
                gaps.append((offsets[other] - free, free))
            free = max(free, offsets[other] + sizes[other])
        offsets[number] = (min(gaps)[1] if best else gaps[0][1]) if gaps else free
        put.append(number)
    return offsets, max((offsets[n] + sizes[n] for n in put), default=0)


@settings(max_examples=200, deadline=None)
@given(ITEMS.filter(bool), st.booleans(), st.randoms(use_true_random=False))
def test_placing_equals_the_plain_twin(items, best, generator):
    sizes, starts, stops = arrays(items)
    order = list(range(len(items)))
    generator.shuffle(order)
    offsets = numpy.zeros(len(items), dtype=numpy.int64)
    top = place(sizes, starts, stops, numpy.array(order, dtype=numpy.int64), best, offsets, 1 << 60)
    expected, height = place_plainly(sizes.tolist(), starts.tolist(), stops.tolist(), order, best)
    assert top == height and offsets.tolist() == expected


@settings(max_examples=150, deadline=None)
@given(ITEMS, st.sampled_from([1, 8, 512]))
def test_nothing_overlaps_and_the_bound_holds(items, alignment):
    sizes, starts, stops = arrays(items) if items else ([], [], [])
    packing = pack(sizes, starts, stops, alignment=alignment, effort=20_000)
    assert not overlaps(sizes, starts, stops, packing.offsets)
    assert all(offset % alignment == 0 for offset in packing.offsets)
    rounded = [-(-size // alignment) * alignment for size in sizes]
    at_once = [sum(s for s, a, b in zip(rounded, starts, stops) if a <= t < b) for t in range(21)]
    assert packing.lower_bound_bytes == max(at_once) <= packing.size_bytes
    assert packing.size_bytes >= max((o + s for o, s in zip(packing.offsets, rounded)), default=0)
    again = pack(sizes, starts, stops, alignment=alignment, effort=20_000)
    assert again.offsets.tolist() == packing.offsets.tolist()


def best_by_enumeration(sizes, starts, stops):
    """The smallest arena: first fit of some order reaches it, so all orders are tried."""
    orders = itertools.permutations(range(len(sizes)))
    return min(place_plainly(sizes, starts, stops, order, False)[1] for order in orders)


def test_optimum_of_small_problems():
    """The constraint solver's arena is the optimum by enumeration; the heuristics are never below it."""
    pytest.importorskip("ortools")
    above = 0
    for seed in range(25):
        generator = random.Random(seed)
        items = [(generator.randint(1, 9), generator.randint(0, 6), generator.randint(1, 5)) for _ in range(6)]
        sizes, starts, stops = (list(map(int, column)) for column in arrays(items))
        least = best_by_enumeration(sizes, starts, stops)
        quick = pack(sizes, starts, stops, alignment=1, effort=0)
        exact = pack(sizes, starts, stops, alignment=1, exact=True)
        assert exact.size_bytes == least <= quick.size_bytes
        assert not overlaps(sizes, starts, stops, exact.offsets)
        above += quick.size_bytes > least
    assert above <= 3


def test_improving_helps():
    """On random problems moving what lies on top to the front gains beside the best of the orders."""
    gained = 0
    for seed in range(20):
        generator = random.Random(seed)
        items = [(generator.randint(1, 1000), generator.randint(0, 60), generator.randint(1, 30)) for _ in range(80)]
        sizes, starts, stops = arrays(items)
        before = pack(sizes, starts, stops, alignment=1, effort=0)
        after = pack(sizes, starts, stops, alignment=1, effort=10_000_000)
        assert after.lower_bound_bytes <= after.size_bytes <= before.size_bytes
        assert not overlaps(sizes, starts, stops, after.offsets)
        gained += after.size_bytes < before.size_bytes
    assert gained >= 8


@pytest.mark.parametrize(
    "items, alignment, message",
    [([(-1, 0, 1)], 1, "size of at least 0"), ([(1, 2, 0)], 1, "a stop after it"), ([(1, 0, 1)], 0, "at least 1 byte")],
)
def test_impossible_items(items, alignment, message):
    sizes, starts, stops = arrays(items)
    with pytest.raises(PlanError, match=message):
        pack(sizes, starts, stops, alignment=alignment)


# -- plans -------------------------------------------------------------------------------------------------------------


def assert_sound(physical, arena):
    """By the buffers' own lifetimes: what lives at once is apart, on every rank, and within the arena."""
    buffers = buffers_of(physical).buffers
    spans = [(b.start, b.stop, b.registers[0]) for b in buffers]
    for rank in range(physical.mesh.size):
        sizes = [register_bytes(physical.registers[n], physical.mesh, rank) for _, _, n in spans]
        offsets = [arena.register_offsets[n] for _, _, n in spans]
        starts, stops = [a for a, _, _ in spans], [b for _, b, _ in spans]
        for at, offset in arena.workspace_offsets.items():
            starts.append(at)
            stops.append(at + 1)
            sizes.append(physical.operations[at].workspace)
            offsets.append(offset)
        assert not overlaps(sizes, starts, stops, offsets)
        assert max(o + s for o, s in zip(offsets, sizes)) <= arena.size_bytes
    assert all(offset % arena.alignment == 0 for offset in arena.register_offsets)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)], ids=str)
def test_arenas_of_random_plans(shape):
    for seed in range(3):
        graph = mlp(5, (7, 4, 3))
        physical = random_plan(graph, Mesh(shape), seed)
        for alignment in (8, 512):
            assert_sound(physical, arena_of(physical, alignment=alignment))


def steps(graph, physical, count, **options):
    """The outputs and the state of some steps in a row, as bytes."""
    executor = Executor(physical, **options)
    arrays = draw_all(graph, 0, options.get("floating"))
    state = executor.place({name: arrays[name] for name in graph.state})
    found = []
    for step in range(count):
        drawn = draw_all(graph, step, options.get("floating"))
        feeds = executor.place({name: drawn[name] for name in graph.inputs})
        with numpy.errstate(all="ignore"):  # exponentials of exponentials; what they make has bits all the same
            outputs, state = executor.step(state, feeds)
        found.append([array.tobytes() for local in outputs.values() for _, array in sorted(local.items())])
        found.append([array.tobytes() for name in graph.state for _, array in sorted(state[name].items())])
    return found


@pytest.mark.parametrize("name", TINY)
def test_same_bits_out_of_an_arena(name):
    graph = with_recompute(training_step(build(f"tiny-{name}"), 5))
    physical = random_plan(graph, Mesh((3,)), 1)
    assert steps(graph, physical, 2) == steps(graph, physical, 2, arena=True)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(1,), (3,), (2, 2)]), st.integers(1, 7), st.sampled_from([None, "f64"]))
def test_same_bits_for_any_plan(seed, shape, batch, floating):
    for graph in (mlp(batch, (5, 3, 4)), random_graph(seed, 6, views=True)):
        physical = random_plan(graph, Mesh(shape), seed)
        plain = steps(graph, physical, 2, floating=floating)
        assert plain == steps(graph, physical, 2, floating=floating, arena=True)


def test_executor_allocates_what_the_plan_says():
    graph = training_step(build("tiny-mlp"), 4, precision="f32")
    physical = random_plan(graph, Mesh((2,)), 0)
    executor = Executor(physical, arena=True)
    arena = arena_of(physical)
    assert executor._arena.arena.register_offsets == arena.register_offsets
    assert {rank: memory.nbytes for rank, memory in executor._arena.memory.items()} == dict.fromkeys(
        range(2), arena.size_bytes
    )


def test_nothing_can_be_kept_out_of_an_arena():
    graph = mlp()
    with pytest.raises(PlanError, match="cannot be kept"):
        Executor(random_plan(graph, Mesh((2,)), 0), keep=[1], arena=True)


def test_plan_files_carry_offsets_on_demand(tmp_path):
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = auto_parallel(build("tiny-mlp"), cluster, batch=4, mesh=(2,), time_limit=20)
    plain, full = tmp_path / "plain.json", tmp_path / "full.json"
    plan.save(plain)
    plan.save(full, offsets=True)
    assert "arena" not in plan.to_json()
    again = Plan.load(full)
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == plain.read_bytes()
    stated = plan.to_json(offsets=True)["arena"]
    assert [item["offset"] for item in stated["registers"]] == list(plan.arena.register_offsets)
    assert stated["size_bytes"] == plan.arena.size_bytes >= stated["lower_bound_bytes"]


# -- limits ------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 1.1), st.sampled_from([(2,), (4,)]))
def test_a_feasible_plan_never_exceeds_the_limit(seed, fraction, shape):
    """Everything is computed again from the finished plan: its peak and its arena, holes included, on every rank."""
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=shape[0])
    graph = random_graph(seed, 6, views=True)
    free = auto_parallel(graph, cluster, mesh=shape, time_limit=20)
    limit = max(int(fraction * max(free.memory.peak_bytes, free.arena.size_bytes)), 1)
    try:
        plan = auto_parallel(graph, cluster, mesh=shape, memory_limit=limit, time_limit=20)
    except (InfeasibleError, TimeLimitError) as error:
        assert "memory" in str(error) or "bytes" in str(error) or "limit" in str(error)
        return
    assert plan.memory.peak_bytes <= limit and plan.arena.size_bytes <= limit
    assert arena_of(plan.physical, within=limit).size_bytes <= limit
    assert_sound(plan.physical, plan.arena)
    for rank in range(shape[0]):
        held = numpy.zeros(len(plan.physical.operations) + 1, dtype=numpy.int64)
        for buffer in buffers_of(plan.physical).buffers:
            size = register_bytes(plan.physical.registers[buffer.registers[0]], plan.mesh, rank, SIZES)
            held[buffer.start : buffer.stop] += size
        for at, operation in enumerate(plan.physical.operations):
            held[at] += operation.workspace
        assert held.max() <= limit


@pytest.mark.parametrize("width, expected", [(2, 8), (40, 32), (2000, 512)])
def test_alignment_fits_the_plan(width, expected):
    """Rounding up may cost a thousandth; where it costs more, the alignment is as large as does not."""
    physical = random_plan(mlp(8, (width, width, width), optimizer=False), Mesh((1,)), 0)
    arena = arena_of(physical)
    assert arena.alignment == expected
    finer, coarser = (arena_of(physical, alignment=alignment) for alignment in (1, 2 * expected))
    if expected > 1:
        assert arena.lower_bound_bytes <= 1.001 * finer.lower_bound_bytes
    if expected < ALIGNMENT:
        assert coarser.lower_bound_bytes > 1.001 * finer.lower_bound_bytes
