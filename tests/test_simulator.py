"""The simulator of pipelines: against a plain simulator of all ranks, against closed forms, and its own accounts."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pipeline_twin import Twin
from random_pipelines import name_for, pipelines

from sbp.errors import PipelineError
from sbp.planner.pipeline import COMPUTE, P2P, PHASES, Pipeline, Segment, Task, chain, uniform_pipeline
from sbp.planner.schedule import Credits, Schedule, credits_named, schedule_named
from sbp.planner.simulator import fire, simulate


def assert_equals_twin(step, twin):
    """Every rank of a stage did, to the bit, what the stage's representative did."""
    assert twin.finished
    positions = {}
    for at, (stage, action) in enumerate(step.runs):
        positions[stage, action] = at
    where = {(int(run), int(task)): at for at, (run, task) in enumerate(zip(step.events.run, step.events.task))}
    seen = 0
    for rank, program in twin.program.items():
        for run in program:
            number = positions[rank[0], run.action]
            for item in [*run.tasks, *([] if run.send is None else [run.send])]:
                event = where[number, -1 if item.number is None else item.number]
                assert (item.start, item.stop) == (step.events.start[event], step.events.stop[event])
                assert step.streams[step.events.stream[event]] == item.stream
                assert step.events.stage[event] == rank[0]
                seen += 1
        for at, stream in enumerate(step.streams):
            assert twin.busy[rank, stream] == step.busy_seconds[rank[0], at]
            assert twin.exposed[rank, stream] == step.exposed_seconds[rank[0], at]
        always = step.pipeline.resident_bytes[rank[0]] if step.pipeline.resident_bytes else 0
        times, held = step.memory[rank[0]]
        assert [(0.0, always), *((time, size + always) for time, size in twin.samples[rank])] == list(zip(times, held))
        assert max([0, *(size for _, size in twin.samples[rank])]) + always == step.peak_bytes[rank[0]]
    assert seen == len(step.events) * len(twin.coordinates)


@given(pipelines(), st.sampled_from(["gpipe", "1f1b", "interleaved"]))
def test_one_rank_per_stage_equals_the_plain_simulator(pipeline, name):
    name = name_for(name, pipeline)
    step = simulate(pipeline, name)
    assert_equals_twin(step, Twin(pipeline, step.schedule))


@given(
    pipelines(),
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.sampled_from([{"tp": 2}, {"dp": 3}, {"tp": 2, "dp": 2}, {"dp": 2, "cp": 2}]),
)
def test_one_rank_per_stage_stands_for_all(pipeline, name, mesh):
    """Against the full expansion: every rank with its own streams, collectives as meetings of their groups."""
    name = name_for(name, pipeline)
    step = simulate(pipeline, name)
    assert_equals_twin(step, Twin(pipeline, step.schedule, mesh))


@given(pipelines(), st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
def test_actors_fire_as_in_the_plain_simulator(pipeline, name):
    """Credits: the order in which segments fire, and that playing this order takes exactly as long."""
    name = name_for(name, pipeline)
    assume(name != "zero-bubble" or pipeline.phases == PHASES)
    sizes = pipeline.stages, pipeline.chunks, pipeline.micro_batches
    credits = credits_named(name, *sizes, phases=pipeline.phases)
    twin = Twin(pipeline, credits)
    fired = fire(pipeline, credits)
    assert twin.finished
    assert fired.orders == tuple(map(tuple, twin.orders))
    waiting = credits.buffers
    for phase in waiting[0]:
        assert all(n <= buffers[phase] for n, buffers in zip(fired.in_flight(phase), waiting))
    if not any(task.early for segment in pipeline.all_segments() for task in segment.tasks):
        step = simulate(pipeline, credits)
        assert step.schedule == fired
        assert step.step_seconds == max((item.stop for item in twin._items()), default=0.0)


# -- closed forms ------------------------------------------------------------------------------------------------------

STAGES, MICRO_BATCHES = st.integers(1, 9), st.integers(1, 40)
WHOLE = st.integers(1, 50)  # whole seconds, so that sums are exact


@given(STAGES, MICRO_BATCHES, WHOLE, WHOLE, st.sampled_from(["1f1b", "gpipe"]))
def test_the_bubble_of_1f1b_and_gpipe(stages, micro_batches, forward, backward, name):
    """(p - 1) / m of the ideal time; Narayanan et al. 2021b, section 2.2.1."""
    step = simulate(uniform_pipeline(stages, micro_batches, forward, backward), name)
    assert step.bubble_fraction == (stages - 1) / micro_batches
    assert step.step_seconds == (micro_batches + stages - 1) * (forward + backward)


@given(STAGES, st.integers(1, 6), st.integers(2, 4), WHOLE, WHOLE)
def test_the_bubble_of_interleaved_schedules(stages, groups, chunks, forward, backward):
    """(p - 1) / (m v), where m is a multiple of p; Narayanan et al. 2021b, section 2.2.2."""
    micro_batches = groups * stages
    step = simulate(uniform_pipeline(stages, micro_batches, forward, backward, chunks=chunks), "interleaved")
    assert step.bubble_fraction == pytest.approx((stages - 1) / (micro_batches * chunks), abs=1e-15)


@given(STAGES, MICRO_BATCHES, st.integers(2, 4), WHOLE, WHOLE)
def test_a_remainder_of_micro_batches_costs_an_interleaved_schedule_nothing_more(stages, m, chunks, forward, backward):
    assume(m >= stages)
    step = simulate(uniform_pipeline(stages, m, forward, backward, chunks=chunks), "interleaved")
    assert step.bubble_fraction == pytest.approx((stages - 1) / (m * chunks), abs=1e-15)


@given(STAGES, st.integers(0, 30), WHOLE)
def test_the_bubble_of_zero_bubble(stages, more, seconds):
    """ZB-H1: (p - 1)(F + B - W), a third of 1F1B's where the three are alike; Qi et al. 2024, section 2.3, table 2."""
    m = stages + more
    step = simulate(uniform_pipeline(stages, m, seconds, seconds, weight_seconds=seconds), "zero-bubble")
    assert step.step_seconds == (3 * m + stages - 1) * seconds
    assert step.peak_bytes == (stages,) * stages  # no more than the first stage of 1F1B holds
    joint = simulate(uniform_pipeline(stages, m, seconds, 2 * seconds), "1f1b")
    assert step.bubble_fraction == pytest.approx(joint.bubble_fraction / 3, abs=1e-15)
    assert joint.peak_bytes[0] == step.peak_bytes[0]


@given(st.integers(2, 8), MICRO_BATCHES, WHOLE, WHOLE, WHOLE)
def test_zero_bubble_is_shorter_than_1f1b(stages, micro_batches, forward, backward, weight):
    assume(micro_batches >= stages and backward >= weight and forward >= weight)
    split = simulate(uniform_pipeline(stages, micro_batches, forward, backward, weight_seconds=weight), "zero-bubble")
    joint = simulate(uniform_pipeline(stages, micro_batches, forward, backward + weight), "1f1b")
    assert split.step_seconds < joint.step_seconds


def test_activations_in_flight():
    step = simulate(uniform_pipeline(4, 8, 1, 2), "1f1b")
    assert step.peak_bytes == (4, 3, 2, 1)
    assert step.schedule.in_flight() == (4, 3, 2, 1)
    assert simulate(uniform_pipeline(4, 8, 1, 2), "gpipe").peak_bytes == (8, 8, 8, 8)
    # Megatron's interleaved warm-up: 2 (p - s - 1) + (v - 1) p, and the one that is run next.
    assert simulate(uniform_pipeline(4, 8, 1, 2, chunks=2), "interleaved").peak_bytes == (11, 9, 7, 5)


@given(STAGES, MICRO_BATCHES, WHOLE, st.data())
def test_the_time_of_1f1b_with_transfers_that_hide(stages, micro_batches, seconds, data):
    """Transfers delay the first micro-batch on its way down and the last on its way up, no other."""
    sends = data.draw(st.integers(0, seconds))
    assume(micro_batches >= 2 * stages)
    step = simulate(uniform_pipeline(stages, micro_batches, seconds, seconds, sends_seconds=sends), "gpipe")
    assert step.step_seconds == 2 * (micro_batches + stages - 1) * seconds + 2 * (stages - 1) * sends


# -- streams, links, meetings by hand ----------------------------------------------------------------------------------


def single(tasks, **options):
    """One stage that runs one segment."""
    return Pipeline(1, 1, 1, {(0, "forward"): Segment("forward", tuple(tasks))}, **options)


def test_streams_overlap_and_what_is_left_is_exposed():
    step = simulate(
        single(
            [
                Task("a", COMPUTE, 2.0),
                Task("b", "tp", 3.0, (0,)),
                Task("c", COMPUTE, 1.0),
                Task("d", COMPUTE, 1.0, (1,)),
            ]
        ),
        "gpipe",
    )
    assert list(step.events.start) == [0.0, 2.0, 2.0, 5.0]
    assert step.step_seconds == 6.0 and step.compute_only_seconds == 4.0
    assert step.breakdown_seconds == {COMPUTE: 4.0, "tp": 2.0, "bubble": 0.0}
    assert step.exposed_communication_seconds == 2.0
    assert [step.event_name(at) for at in step.critical_path] == ["a", "b", "d"]
    assert list(step.events.slack) == [0.0, 0.0, 2.0, 0.0]
    assert step.path_seconds() == {COMPUTE: 3.0, "tp": 3.0}


def test_two_collectives_on_one_link_share_its_speed():
    moves = [Task("a", "tp", 2.0), Task("b", "dp", 4.0)]
    apart = simulate(single(moves), "gpipe")
    assert list(apart.events.stop) == [2.0, 4.0]
    shared = simulate(single(moves, links={"tp": "nic", "dp": "nic"}), "gpipe")
    assert list(shared.events.stop) == [4.0, 6.0]  # at half speed while both run: 2 of a and 2 of b in 4 seconds
    assert shared.exposed_seconds.tolist() == [[0.0, 4.0, 2.0]]


def test_kernels_beside_communication_are_slower():
    step = simulate(single([Task("a", "tp", 3.0), Task("b", COMPUTE, 4.0)], compute_slowdown=0.5), "gpipe")
    assert step.step_seconds == 3.0 + (4.0 - 3.0 / 1.5)
    assert step.exposed_communication_seconds == step.step_seconds - 4.0


def test_what_a_stage_sends_and_receives_passes_in_both_directions_at_once():
    """Links are duplex: out and in do not disturb each other, two that arrive at one stage do."""
    forward = Segment("forward", (Task("f", COMPUTE, 1.0),), 8, 4.0)
    pipeline = Pipeline(2, 1, 2, {(0, "forward"): forward, (1, "forward"): forward})
    step = simulate(pipeline, "gpipe")
    sends = step.events.task < 0
    assert list(step.events.start[sends]) == [1.0, 5.0]  # one stream, one after the other
    assert step.step_seconds == 10.0
    busy = {(0, "forward"): forward, (1, "forward"): Segment("forward", (Task("r", "dp", 20.0, early=True),))}
    beside = simulate(Pipeline(2, 1, 1, busy, links={"dp": "nic", P2P: "nic"}), "gpipe")
    assert beside.events.stop[beside.events.task < 0][0] == 9.0  # half speed, because the receiver's link is busy


def test_a_blocking_sender_waits():
    forward = Segment("forward", (Task("f", COMPUTE, 1.0),), 8, 4.0)
    segments = {(0, "forward"): forward, (1, "forward"): forward}
    step = simulate(Pipeline(2, 1, 2, segments, blocking_sends=True), "gpipe")
    first = (step.events.stage == 0) & (step.events.task >= 0)
    assert list(step.events.start[first]) == [0.0, 5.0]
    assert step.exposed_seconds[0].tolist() == [0.0, 8.0]


def test_late_and_early_tasks():
    """A gradient reduction beside the next backward pass, a parameter gathered one segment ahead."""
    forward = Segment("forward", (Task("gather", "dp", 1.0, early=True), Task("f", COMPUTE, 2.0, (0,))))
    backward = Segment("backward", (Task("b", COMPUTE, 2.0), Task("reduce", "dp", 3.0, (0,), late=True)))
    after = (Segment("after", (Task("update", COMPUTE, 1.0),)),)
    step = simulate(Pipeline(1, 1, 2, {(0, "forward"): forward, (0, "backward"): backward}, after=after), "gpipe")
    start = {(step.runs[run][1], step.event_name(at)): step.events.start[at] for at, run in enumerate(step.events.run)}
    assert start[("forward", 0, 0), "gather"] == 0.0 and start[("forward", 0, 0), "f"] == 1.0
    assert start[("forward", 0, 1), "gather"] == 1.0 and start[("forward", 0, 1), "f"] == 3.0  # gathered beside f
    assert start[("backward", 0, 1), "b"] == 7.0  # not after the reduction of the first, which lasts until 10
    assert start[("backward", 0, 1), "reduce"] == 10.0
    assert start[("after", -1, 0), "update"] == 13.0


def test_a_collective_of_several_stages_waits_for_all_and_lasts_as_long_as_the_longest():
    after = tuple(Segment("after", (Task("tied", "pp", seconds, meets="embedding"),)) for seconds in (1.0, 3.0))
    segments = {(stage, "forward"): Segment("forward", chain([1.0 + stage])) for stage in range(2)}
    step = simulate(Pipeline(2, 1, 1, segments, after=after), "gpipe")
    tied = step.events.stream == step.streams.index("pp")
    assert list(step.events.start[tied]) == [3.0, 3.0] and list(step.events.stop[tied]) == [6.0, 6.0]
    assert step.exposed_seconds[:, 1].tolist() == [3.0, 3.0]


def test_memory_counts_resident_bytes_and_what_tasks_hold():
    made = [Task("a", COMPUTE, 1.0, (), 10), Task("b", COMPUTE, 1.0, (0,), 5, 15), Task("c", COMPUTE, 1.0, (1,), 1, 1)]
    step = simulate(single(made, resident_bytes=(100,)), "gpipe")
    times, held = step.memory[0]
    assert list(zip(times, held)) == [(0.0, 100), (0.0, 110), (1.0, 115), (2.0, 101), (3.0, 100)]
    assert step.peak_bytes == (115,)


# -- its own accounts --------------------------------------------------------------------------------------------------


@given(pipelines(), st.sampled_from(["gpipe", "1f1b", "interleaved"]))
def test_the_critical_path_and_slack(pipeline, name):
    step = simulate(pipeline, name_for(name, pipeline))
    events, path = step.events, step.critical_path
    if not len(events):
        assert step.step_seconds == 0.0 and not len(path)
        return
    assert events.start[path[0]] == 0.0 and events.stop[path[-1]] == step.step_seconds
    assert np.array_equal(events.start[path[1:]], events.stop[path[:-1]])
    assert events.slack[path] == pytest.approx(0.0, abs=1e-9)
    assert sum(step.path_seconds().values()) == pytest.approx(step.step_seconds)
    assert (events.slack >= 0).all() and (events.stop + events.slack <= step.step_seconds + 1e-9).all()
    assert sum(step.breakdown_seconds.values()) == pytest.approx(step.step_seconds)
    assert step.busy_seconds.sum() == pytest.approx((events.stop - events.start).sum())


@given(pipelines(), st.sampled_from(["gpipe", "1f1b", "interleaved"]), st.data())
def test_using_up_slack_changes_nothing(pipeline, name, data):
    """A task that lasts longer by its slack does not lengthen the step; on the critical path it does, by all of it.

    Where nothing disturbs anything: slower kernels and shared links change times elsewhere too.
    """
    plain = {"links": {}, "compute_slowdown": 0.0, "first": {}, "last": {}}
    fields = {key: getattr(pipeline, key) for key in pipeline.__dataclass_fields__}
    segments = {key: Segment(s.phase, s.tasks) for key, s in pipeline.segments.items()}  # two arrivals share a link
    once = {"micro_batches": 1, "segments": segments}
    pipeline = Pipeline(**{**fields, **plain, **once})
    name = name_for(name, pipeline)
    step = simulate(pipeline, name)
    real = np.flatnonzero(step.events.task >= 0)
    assume(len(real))
    event = int(data.draw(st.sampled_from(list(real))))
    run, number = int(step.events.run[event]), int(step.events.task[event])
    stage, (phase, chunk, _) = step.runs[run]
    segment = step.segment(run)
    assume(not segment.tasks[number].meets)
    for extra in (step.events.slack[event], step.events.slack[event] + 1.0):
        changed = list(segment.tasks)
        task = changed[number]
        changed[number] = Task(
            task.name, task.stream, task.seconds + extra, task.inputs, 0, 0, task.early, task.late, task.meets
        )
        longer = Segment(phase, tuple(changed))
        now = {key: getattr(pipeline, key) for key in pipeline.__dataclass_fields__}
        if chunk >= 0:
            now["segments"] = {**pipeline.segments, (chunk, phase): longer}
        else:
            now[phase] = tuple(longer if at == stage else s for at, s in enumerate(getattr(pipeline, phase)))
        found = simulate(Pipeline(**now), step.schedule).step_seconds
        expected = step.step_seconds + max(0.0, extra - step.events.slack[event])
        assert found == pytest.approx(expected, abs=1e-9)


@given(pipelines(), st.sampled_from(["gpipe", "1f1b"]))
def test_the_same_input_gives_the_same_output(pipeline, name):
    name = name_for(name, pipeline)
    one, two = simulate(pipeline, name), simulate(pipeline, name)
    assert one.step_seconds == two.step_seconds
    for field in ("start", "stop", "slack", "task"):
        assert np.array_equal(getattr(one.events, field), getattr(two.events, field))
    assert np.array_equal(one.critical_path, two.critical_path)


# -- what cannot be simulated ------------------------------------------------------------------------------------------


def test_schedules_that_do_not_fit_are_refused():
    pipeline = uniform_pipeline(2, 4, 1, 2)
    with pytest.raises(PipelineError, match="for 4 stages of 1 chunks with 4 micro-batches; the pipeline has 2"):
        simulate(pipeline, schedule_named("1f1b", 4, None, 4))
    with pytest.raises(PipelineError, match="zero-bubble needs weight segments"):
        simulate(pipeline, "zero-bubble")
    with pytest.raises(PipelineError, match="runs forward; the pipeline has forward, backward"):
        simulate(pipeline, schedule_named("gpipe", 2, None, 4, phases=("forward",)))


def test_orders_that_wait_for_each_other_are_named():
    orders = (
        (("forward", 0, 0), ("backward", 0, 0), ("forward", 0, 1), ("backward", 0, 1)),
        (("forward", 1, 1), ("backward", 1, 1), ("forward", 1, 0), ("backward", 1, 0)),
    )
    with pytest.raises(
        PipelineError, match=r"wait for each other \(stage 0 for backward of chunk 0, micro-batch 0; .*1"
    ):
        simulate(uniform_pipeline(2, 2, 1, 2), Schedule("mine", 2, 1, 2, orders))


def test_credits_that_never_let_a_stage_fire_are_named():
    """A backward of its first chunk needs the forward of its second, for which there is no buffer."""
    right = credits_named("interleaved", 1, 2, 1)
    wrong = Credits("mine", 1, 2, 1, right.priority, right.queues, ({"backward": 1},))
    assert simulate(uniform_pipeline(1, 1, 1, 2, chunks=2), right).step_seconds == 6.0
    with pytest.raises(PipelineError, match="give them more buffers"):
        fire(uniform_pipeline(1, 1, 1, 2, chunks=2), wrong)
