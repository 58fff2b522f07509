"""Plans cut into stages and run by actors: the numbers of the whole program, in the order of the schedule."""

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import random_plan, replicated_plan

from sbp.errors import PipelineError, PlanError
from sbp.interpreter import evaluate
from sbp.mesh import Mesh
from sbp.models import build
from sbp.passes.recompute import with_recompute
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.pipeline import COMPUTE, uniform_pipeline
from sbp.planner.schedule import Credits, Schedule, credits_named, schedule_named
from sbp.planner.simulator import simulate
from sbp.planner.stage_pipeline import pipeline_of, stage_peaks
from sbp.planner.stages import cut
from sbp.planner.styles import DataParallel, FullyShardedDataParallel, Styles, TensorParallel
from sbp.planner.trace import save_trace
from sbp.runtime import actors
from sbp.runtime.actors import DeadlockError, PipelineExecutor
from sbp.runtime.verify import drawn_warm
from sbp.training import training_step

SHAPES = {"gpt": ("tiny-gpt2", {"layers": 4}), "mlp": ("mlp", {"widths": (6, 9, 10, 11, 5)})}
MICRO = 2
"""Samples in a micro-batch."""


def model(name):
    preset, sizes = SHAPES[name]
    return build(preset, **sizes)


def micro_graph(name):
    return training_step(model(name), MICRO, precision="f64")


def assert_equals_whole(name, staged, graph, micro_batches, order, **options):
    """Losses, and the state after the optimizer, against one step of the unsharded program on the whole batch."""
    whole = training_step(model(name), MICRO * micro_batches, precision="f64")
    arrays = drawn_warm(whole, 3)
    expected = evaluate(whole, arrays)
    pipeline = PipelineExecutor(staged, micro_batches, order, floating="f64", **options)
    state = pipeline.place({value: arrays[value] for value in graph.state})
    parts = [slice(at * MICRO, (at + 1) * MICRO) for at in range(micro_batches)]
    feeds = [pipeline.place({value: arrays[value][part] for value in graph.inputs}) for part in parts]
    step = pipeline.run(state, feeds)
    (loss,) = graph.outputs
    losses = pipeline.collect_outputs(step.outputs)[loss]
    assert len(losses) == micro_batches
    assert numpy.mean(losses) == pytest.approx(float(expected[loss]), rel=1e-12)
    found = pipeline.collect_state(step.state)
    assert set(found) == set(graph.state)
    for value in graph.updates:
        scale = numpy.abs(expected[value]).max() or 1.0
        assert numpy.abs(found[value] - expected[value]).max() <= 1e-10 * scale, value
        assert not numpy.array_equal(found[value], arrays[value]) or numpy.array_equal(expected[value], arrays[value])
    return step


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_data_parallel_pipeline_equals_the_whole_program(name, stages, micro_batches):
    graph = micro_graph(name)
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = auto_parallel(
        graph, cluster, mesh=Mesh((2,), ("dp",)), time_limit=20,
        restriction=lambda graph, mesh: Styles(graph, mesh, DataParallel()),
    )  # fmt: skip
    staged = cut(plan.physical, stages)
    step = assert_equals_whole(name, staged, graph, micro_batches, "1f1b")
    pipeline = pipeline_of(staged, micro_batches)
    simulated = simulate(pipeline, "1f1b")
    assert step.orders == simulated.schedule.orders == schedule_named("1f1b", stages, 1, micro_batches).orders
    assert step.in_flight == tuple(min(stages - stage, micro_batches) for stage in range(stages))


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_every_layout(order):
    """Tensor-parallel, sharded and arbitrary layouts on two mesh axes, with tied weights on both ends."""
    graph = micro_graph("gpt")
    for seed in range(2):
        staged = cut(random_plan(graph, Mesh((2, 2), ("dp", "tp")), seed), 2)
        assert_equals_whole("gpt", staged, graph, 3, order)


@pytest.mark.parametrize("style", [TensorParallel(), FullyShardedDataParallel()], ids=["tensor", "sharded"])
def test_other_styles(style):
    graph = micro_graph("gpt")
    cluster = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
    plan = auto_parallel(
        graph, cluster, mesh=(2,), time_limit=20, restriction=lambda graph, mesh: Styles(graph, mesh, style)
    )
    assert_equals_whole("gpt", cut(plan.physical, 2), graph, 4, "1f1b")


@pytest.mark.parametrize("micro_batches", [4, 8])
def test_interleaved(micro_batches):
    graph = micro_graph("gpt")
    staged = cut(replicated_plan(graph, Mesh((2,))), 2, 2)
    step = assert_equals_whole("gpt", staged, graph, micro_batches, "interleaved:2")
    schedule = schedule_named("interleaved:2", 2, 2, micro_batches)
    assert step.orders == schedule.orders == simulate(pipeline_of(staged, micro_batches), schedule).schedule.orders


@pytest.mark.parametrize("name, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_credits(name, chunks):
    """The order arises from registers and buffers; what is in flight never exceeds the credits."""
    graph = micro_graph("gpt")
    staged = cut(replicated_plan(graph, Mesh((1,))), 2, chunks)
    credits = credits_named(name, 2, chunks, 6)
    step = assert_equals_whole("gpt", staged, graph, 6, credits)
    assert all(most <= found["backward"] for most, found in zip(step.in_flight, credits.buffers))
    assert step.in_flight[-1] >= 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name, stages, micro_batches", [("gpt", 2, 4), ("gpt", 4, 8), ("mlp", 4, 6), ("gpt", 1, 3)])
def test_zero_bubble(name, stages, micro_batches, recompute):
    """Weight gradients in segments of their own: the numbers of the whole program, in the order of the simulator."""
    graph = with_recompute(micro_graph(name)) if recompute else micro_graph(name)
    staged = cut(replicated_plan(graph, Mesh((2,))), stages, weights_apart=True)
    schedule = schedule_named("zero-bubble", stages, 1, micro_batches)
    step = assert_equals_whole(name, staged, graph, micro_batches, "zero-bubble")
    assert step.orders == schedule.orders == simulate(pipeline_of(staged, micro_batches), schedule).schedule.orders
    assert step.in_flight == schedule.in_flight("weight")


@pytest.mark.parametrize("order", ["gpipe", "1f1b", "interleaved"])
def test_weights_apart_in_other_orders(order):
    graph = micro_graph("gpt")
    chunks = 2 if order == "interleaved" else 1
    for seed in range(2):
        staged = cut(random_plan(graph, Mesh((2, 2), ("dp", "tp")), seed), 2, chunks, weights_apart=True)
        assert_equals_whole("gpt", staged, graph, 4, order)


def test_zero_bubble_by_credits():
    graph = micro_graph("gpt")
    staged = cut(replicated_plan(graph, Mesh((1,))), 2, weights_apart=True)
    credits = credits_named("zero-bubble", 2, 1, 6)
    step = assert_equals_whole("gpt", staged, graph, 6, credits)
    assert all(most <= found["weight"] for most, found in zip(step.in_flight, credits.buffers))


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_put_off_are_gradients_of_parameters(name):
    """Weight segments hold every linear layer's weight gradient and no input gradient, in every chunk."""
    staged = cut(replicated_plan(micro_graph(name), Mesh((1,))), 4, weights_apart=True)
    places = {}
    for operation, place in zip(staged.physical.operations, staged.places):
        if place[1] in ("backward", "weight"):
            places.setdefault(operation.op, set()).add(place)
    assert {(chunk, "weight") for chunk in range(4)} == places["linear_weight_gradient"]
    through = [op for op in places if op in ("matmul", "attention_backward", "gelu_backward", "relu_backward")]
    assert {phase for op in through for _, phase in places[op]} == {"backward"} and "matmul" in through
    for transfer in staged.transfers:
        assert "weight" not in (transfer.source[1], transfer.target[1]) or transfer.target[1] == "once"


def test_recompute():
    graph = with_recompute(micro_graph("gpt"))
    staged = cut(random_plan(graph, Mesh((2,)), 5), 2)
    assert_equals_whole("gpt", staged, graph, 4, "1f1b")
    free = cut(replicated_plan(micro_graph("gpt"), Mesh((1,))), 2)
    again = cut(replicated_plan(graph, Mesh((1,))), 2)
    schedule = schedule_named("1f1b", 2, 1, 4)
    kept, less = (stage_peaks(pipeline_of(staged, 4), schedule)[0].peak_bytes for staged in (free, again))
    assert less < kept


def test_steps_follow_each_other():
    """Three steps in a row, each with other batches, as one program trained on them."""
    graph = micro_graph("gpt")
    whole = training_step(model("gpt"), 4 * MICRO, precision="f64")
    staged = cut(replicated_plan(graph, Mesh((2,))), 2)
    pipeline = PipelineExecutor(staged, 4, "1f1b", floating="f64")
    arrays = drawn_warm(whole, 0)
    state = pipeline.place({value: arrays[value] for value in graph.state})
    for seed in range(3):
        batch = {value: drawn_warm(whole, seed)[value] for value in whole.inputs}
        parts = [{v: a[i * MICRO : (i + 1) * MICRO] for v, a in batch.items()} for i in range(4)]
        state = pipeline.run(state, [pipeline.place(part) for part in parts]).state
        arrays.update({v: a for v, a in evaluate(whole, arrays | batch).items() if v in whole.updates})
    for value, array in pipeline.collect_state(state).items():
        numpy.testing.assert_allclose(array, arrays[value], rtol=1e-8, atol=1e-11, err_msg=value)


# -- the cut -----------------------------------------------------------------------------------------------------------


def test_what_is_sent():
    """Between neighbours one activation and its gradient; of the tied embedding the sum of its gradient, once."""
    graph = micro_graph("gpt")
    staged = cut(replicated_plan(graph, Mesh((1,))), 4)
    registers = staged.physical.registers
    between = [(t.source, t.target) for t in staged.transfers if t.target[1] != "once"]
    assert sorted(between) == sorted(
        [((c, "forward"), (c + 1, "forward")) for c in range(3)]
        + [((c + 1, "backward"), (c, "backward")) for c in range(3)]
    )
    hidden = (MICRO, 12, 16)
    assert all(registers[t.register].type.shape == hidden for t in staged.transfers if t.target[1] != "once")
    once = {registers[t.register].value: t for t in staged.transfers if t.target[1] == "once"}
    tied = once.pop("lm_head.linear_weight_gradient")
    assert tied.source == (3, "backward") and tied.target == (0, "once")
    assert set(once) == {"shift"}  # the count of steps
    assert staged.copies["wte.weight"] == (0, 3) and staged.homes["wte.weight"] == 0
    assert all(
        len(chunks) == 1 for value, chunks in staged.copies.items() if value not in ("wte.weight", "optimizer.step")
    )


def test_weights_are_cast_where_they_are_read():
    """In mixed precision nothing but activations is sent either, and every backward node is with its forward node."""
    graph = training_step(model("gpt"), MICRO)
    staged = cut(replicated_plan(graph, Mesh((2,))), 4)
    registers = staged.physical.registers
    sent = [registers[t.register] for t in staged.transfers if t.target[1] != "once"]
    assert [register.type.shape for register in sent] == [(MICRO, 12, 16)] * 6
    casts = [
        place for operation, place in zip(staged.physical.operations, staged.places)
        if getattr(operation, "node", "") == "wte.cast"
    ]  # fmt: skip
    assert casts == [(0, "forward"), (3, "forward")]
    chunks = {}
    for operation, (chunk, phase) in zip(staged.physical.operations, staged.places):
        if phase != "once" and getattr(operation, "module", ""):
            chunks.setdefault(operation.module, set()).add(chunk)
    assert all(len(found) == 1 for module, found in chunks.items() if module != "wte")
    assert_equals_whole("gpt", staged, micro_graph("gpt"), 3, "1f1b")


def test_layers_are_dealt_out_by_their_time():
    """The cut is the best of all cuts, by enumeration."""
    from itertools import combinations

    from sbp.planner.places import shortest_cut

    generator = numpy.random.default_rng(0)
    for _ in range(50):
        weights = generator.integers(1, 9, 7).astype(float).tolist()
        for count in (1, 2, 3, 7):
            starts = shortest_cut(weights, count)
            heaviest = max(sum(weights[a:b]) for a, b in zip(starts, [*starts[1:], 7]))
            every = ([0, *rest] for rest in combinations(range(1, 7), count - 1))
            assert heaviest == min(max(sum(weights[a:b]) for a, b in zip(s, [*s[1:], 7])) for s in every)
    assert shortest_cut([0.0] * 4, 2) == [0, 2]


def test_first_layers_are_as_asked():
    staged = cut(replicated_plan(micro_graph("gpt"), Mesh((1,))), 2, first_layers=[1])
    modules = {op.module for op, place in zip(staged.physical.operations, staged.places) if place == (0, "forward")}
    assert any(module.startswith("h.0") for module in modules) and not any(m.startswith("h.1") for m in modules)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda plan: cut(plan, 5), "4 layers .* do not make 5 chunks"),
        (lambda plan: cut(plan, 2, first_layers=[4]), "must ascend"),
        (lambda plan: cut(plan, 3, first_layers=[2, 1]), "must ascend"),
        (lambda plan: cut(plan, 0), "stages must be a whole number of at least 1, got 0"),
        (lambda plan: cut(plan, "2"), "stages must be a whole number of at least 1, got '2'"),
        (lambda plan: cut(plan, 2, first_layers=1), "first_layers must be a list"),
        (lambda plan: cut(plan, 2, first_layers=[1.5]), "a number in first_layers must be a whole number"),
        (lambda plan: PipelineExecutor(cut(plan, 2), 4, None), "name of a schedule, a Schedule or Credits"),
        (lambda plan: PipelineExecutor(cut(plan, 2), 4, buffers=["a", 1]), "each of 2 stages"),
        (lambda plan: simulate(pipeline_of(cut(plan, 2), 4), 5), "name of a schedule or a Schedule, got 5"),
        (lambda plan: save_trace(simulate(pipeline_of(cut(plan, 2), 4), "1f1b"), 5), "path of the trace file"),
        (lambda plan: PipelineExecutor(cut(plan, 2), 4, schedule_named("1f1b", 2, 1, 8)), "runs 4"),
        (lambda plan: PipelineExecutor(cut(plan, 2), 4, "zero-bubble"), "weight gradients are part"),
        (lambda plan: PipelineExecutor(cut(plan, 2), 4, buffers=[1]), "each of 2 stages"),
    ],
)
def test_impossible(make, message):
    plan = replicated_plan(micro_graph("gpt"), Mesh((1,)))
    with pytest.raises((PipelineError, PlanError), match=message):
        make(plan)


def test_running_statistics_are_refused():
    graph = training_step(build("tiny-resnet"), 2, precision="f64")
    with pytest.raises(PipelineError, match="updated in the forward phase"):
        cut(replicated_plan(graph, Mesh((1,))), 2)


# -- deadlock and errors -----------------------------------------------------------------------------------------------


def run(staged, graph, micro_batches, order, **options):
    arrays = drawn_warm(graph, 0)
    pipeline = PipelineExecutor(staged, micro_batches, order, floating="f64", **options)
    state = pipeline.place({value: arrays[value] for value in graph.state})
    feeds = pipeline.place({value: arrays[value] for value in graph.inputs})
    return pipeline.run(state, [feeds] * micro_batches)


def test_too_few_buffers_stand_still_with_names():
    graph = micro_graph("mlp")
    staged = cut(replicated_plan(graph, Mesh((1,))), 2)
    with pytest.raises(DeadlockError, match="stage 0: forward of chunk 0, micro-batch 2 needs a free buffer, all 2"):
        run(staged, graph, 4, "gpipe", buffers=[2, 4])


def test_orders_that_wait_for_each_other_stand_still_with_names():
    graph = micro_graph("mlp")
    staged = cut(replicated_plan(graph, Mesh((1,))), 2)
    first = [("forward", 0, 0), ("backward", 0, 0), ("forward", 0, 1), ("backward", 0, 1)]
    second = [("forward", 1, 1), ("backward", 1, 1), ("forward", 1, 0), ("backward", 1, 0)]
    schedule = Schedule("crossed", 2, 1, 2, (tuple(first), tuple(second)))
    with pytest.raises(
        DeadlockError, match="stage 0: backward .* from chunk 1; stage 1: forward of chunk 1, micro-batch 1"
    ):
        run(staged, graph, 2, schedule)


def test_fewer_credits_only_take_longer():
    """One buffer everywhere still runs: the stages take turns."""
    graph = micro_graph("mlp")
    staged = cut(replicated_plan(graph, Mesh((1,))), 2)
    credits = credits_named("1f1b", 2, 1, 4)
    narrow = Credits("narrow", 2, 1, 4, credits.priority, credits.queues, ({"backward": 1}, {"backward": 1}))
    step = assert_equals_whole("mlp", staged, graph, 4, narrow)
    assert step.in_flight == (1, 1)


def test_a_failed_stage_stops_the_others():
    graph = micro_graph("mlp")
    staged = cut(replicated_plan(graph, Mesh((1,))), 2)
    pipeline = PipelineExecutor(staged, 4, floating="f64")
    at = staged.segments[1, "backward"][0]

    def broken(table):
        raise ValueError("no such kernel")

    pipeline._runs[at] = broken
    arrays = drawn_warm(graph, 0)
    state = pipeline.place({value: arrays[value] for value in graph.state})
    feeds = pipeline.place({value: arrays[value] for value in graph.inputs})
    with pytest.raises(ValueError, match="no such kernel"):
        pipeline.run(state, [feeds] * 4)


# -- memory of schedules -----------------------------------------------------------------------------------------------


def one_after_another(pipeline):
    """The same pipeline with a second for every task, all on the compute stream, so that program order is time."""

    def paced(segment):
        return replace(segment, tasks=tuple(replace(task, seconds=1.0, stream=COMPUTE) for task in segment.tasks))

    segments = {key: paced(segment) for key, segment in pipeline.segments.items()}
    return replace(pipeline, segments=segments, after=tuple(map(paced, pipeline.after)))


@pytest.mark.parametrize(
    "name, stages, chunks", [("gpipe", 2, 1), ("1f1b", 4, 1), ("interleaved", 2, 2), ("zero-bubble", 4, 1)]
)
@pytest.mark.parametrize("recompute", [False, True])
def test_peaks_are_the_simulators(name, stages, chunks, recompute):
    graph = micro_graph("gpt")
    graph = with_recompute(graph) if recompute else graph
    for seed in (None, 1):
        physical = replicated_plan(graph, Mesh((2,))) if seed is None else random_plan(graph, Mesh((2,)), seed)
        apart = name == "zero-bubble"
        pipeline = one_after_another(pipeline_of(cut(physical, stages, chunks, weights_apart=apart), 8))
        schedule = schedule_named(name, stages, chunks, 8)
        peaks = stage_peaks(pipeline, schedule)
        assert tuple(peak.peak_bytes for peak in peaks) == simulate(pipeline, schedule).peak_bytes
        # Nothing of a micro-batch is left when its backward has ended.
        for chunk in range(stages * chunks):
            tasks = [t for phase in pipeline.phases for t in pipeline.segments[chunk, phase].tasks]
            assert sum(t.allocates for t in tasks) == sum(t.frees for t in tasks)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 8), (4, 3)])
def test_peaks_with_weight_gradients_apart(name, stages, micro_batches):
    """Three phases: what zero-bubble puts off keeps its activations; the simulator agrees."""
    pipeline = uniform_pipeline(stages, micro_batches, 1.0, 1.0, weight_seconds=1.0, activation_bytes=100)
    pipeline = replace(pipeline, resident_bytes=tuple(range(10, 10 + stages)))
    schedule = schedule_named(name, stages, 1, micro_batches, pipeline.phases)
    peaks = stage_peaks(pipeline, schedule)
    assert tuple(peak.peak_bytes for peak in peaks) == simulate(pipeline, schedule).peak_bytes
    assert [p.peak_bytes - p.resident_bytes for p in peaks] == [100 * p.in_flight for p in peaks]
    if name == "zero-bubble":
        assert {peak.in_flight for peak in peaks} == {min(stages, micro_batches)}


def test_in_flight_activations():
    """Four stages, eight micro-batches: 4, 3, 2, 1 in flight, and memory that grows with exactly that."""
    graph = micro_graph("gpt")
    pipeline = pipeline_of(cut(replicated_plan(graph, Mesh((1,))), 4), 8)
    peaks = stage_peaks(pipeline, schedule_named("1f1b", 4, 1, 8))
    assert tuple(peak.in_flight for peak in peaks) == (4, 3, 2, 1)
    everything = stage_peaks(pipeline, schedule_named("gpipe", 4, 1, 8))
    for chunk in (1, 2):
        forward = pipeline.segments[chunk, "forward"].tasks
        saved = sum(task.allocates - task.frees for task in forward)
        fewer = peaks[chunk].in_flight
        assert everything[chunk].peak_bytes - peaks[chunk].peak_bytes == (8 - fewer) * saved > 0


@pytest.mark.parametrize(
    "name, stages, chunks, recompute",
    [
        ("gpipe", 2, 1, False),
        ("1f1b", 4, 1, False),
        ("1f1b", 2, 1, True),
        ("interleaved", 2, 2, False),
        ("zero-bubble", 4, 1, False),
        ("zero-bubble", 2, 1, True),
    ],
)
def test_peaks_are_what_actors_hold(name, stages, chunks, recompute, monkeypatch):
    """Every stage's tables, state and sums are counted, memory by memory, after every operation."""
    graph = micro_graph("gpt")
    graph = with_recompute(graph) if recompute else graph
    staged = cut(random_plan(graph, Mesh((1,)), 4), stages, chunks, weights_apart=name == "zero-bubble")
    schedule = schedule_named(name, stages, chunks, 4)
    pipeline = PipelineExecutor(staged, 4, schedule, floating="f64")
    at_work = threading.local()
    most = [0] * stages

    class Counted(actors._Stage):
        def fire(self, action):
            at_work.stage = self
            super().fire(action)
            at_work.stage = None

    def counted(run):
        def inner(table):
            run(table)
            stage = getattr(at_work, "stage", None)
            if stage is not None:
                held = {}
                for local in (*stage.state.values(), *stage.sums.values(), *sum(stage.tables.values(), [])):
                    for array in (local or {}).values():
                        owner = array if array.base is None else array.base
                        held[id(owner)] = owner.nbytes
                most[stage.stage] = max(most[stage.stage], sum(held.values()))

        return inner

    monkeypatch.setattr(actors, "_Stage", Counted)
    pipeline._runs = [counted(run) for run in pipeline._runs]
    arrays = drawn_warm(graph, 0)
    state = pipeline.place({value: arrays[value] for value in graph.state})
    pipeline.run(state, [pipeline.place({value: arrays[value] for value in graph.inputs}) for _ in range(4)])
    without_workspace = replace(
        staged,
        physical=replace(
            staged.physical, operations=tuple(replace(op, workspace=0) for op in staged.physical.operations)
        ),
    )
    expected = replace(pipeline_of(without_workspace, 4), after=())
    assert most == [peak.peak_bytes for peak in stage_peaks(expected, schedule)]
