"""Schedules: every segment once, no stage waits forever, what is in flight is bounded; and what names are refused."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sbp.errors import PipelineError
from sbp.planner.pipeline import COMPUTE, PHASES, Pipeline, Segment, Task, uniform_pipeline
from sbp.planner.schedule import SCHEDULES, TRAINING, Credits, Schedule, credits_named, schedule_named
from sbp.planner.simulator import fire, simulate

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 20))
PHASE_SETS = st.sampled_from([PHASES[:1], TRAINING, PHASES])


def run(orders, stages, chunks):
    """The actions in an order in which they can run; it is short if stages wait for each other."""
    done, at = [], [0] * stages
    ready = set()
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                phase, chunk, micro_batch = order[at[stage]]
                needs = set()
                if phase == "forward" and chunk:
                    needs = {("forward", chunk - 1, micro_batch)}
                if phase == "backward":
                    needs = {("forward", chunk, micro_batch)}
                    if chunk + 1 < stages * chunks:
                        needs.add(("backward", chunk + 1, micro_batch))
                if phase == "weight":
                    needs = {("backward", chunk, micro_batch)}
                if not needs <= ready:
                    break
                ready.add(order[at[stage]])
                done.append(order[at[stage]])
                at[stage] += 1
                moved = True
    return done


@given(SIZES, st.sampled_from(SCHEDULES), PHASE_SETS)
def test_every_segment_runs_once_and_nobody_waits_forever(sizes, name, phases):
    stages, chunks, micro_batches = sizes
    if name in ("1f1b", "zero-bubble"):
        chunks = 1
    schedule = schedule_named(name, stages, chunks, micro_batches, phases=phases)
    phases = PHASES if name == "zero-bubble" else phases
    expected = {(f, c, m) for f in phases for c in range(stages * chunks) for m in range(micro_batches)}
    done = run(schedule.orders, stages, chunks)
    assert len(done) == len(expected) and set(done) == expected
    for stage, order in enumerate(schedule.orders):
        assert {chunk % stages for _, chunk, _ in order} == {stage}
        for chunk in range(stage, stages * chunks, stages):
            for phase in phases:  # micro-batches of a chunk in their order, so that the last one is the last
                assert [m for f, c, m in order if (f, c) == (phase, chunk)] == list(range(micro_batches))
    assert schedule.phases == phases


@given(SIZES, PHASE_SETS)
def test_what_is_in_flight_is_bounded(sizes, phases):
    stages, chunks, m = sizes
    assume(phases != PHASES[:1])
    one = schedule_named("1f1b", stages, None, m, phases=phases)
    assert one.in_flight() == tuple(min(stages - stage, m) for stage in range(stages))
    assert schedule_named("gpipe", stages, chunks, m).in_flight() == (chunks * m,) * stages
    zero = schedule_named("zero-bubble", stages, None, m)
    assert zero.in_flight() == one.in_flight()
    assert max(zero.in_flight("weight")) == min(stages, m)
    assume(chunks > 1 and m % stages == 0)
    many = schedule_named(f"interleaved:{chunks}", stages, None, m)
    warm = [2 * (stages - stage - 1) + (chunks - 1) * stages + 1 for stage in range(stages)]
    assert many.in_flight() == tuple(min(count, chunks * m) for count in warm)


@given(SIZES, st.sampled_from(SCHEDULES), PHASE_SETS)
def test_buffers_are_what_the_closed_form_has_in_flight(sizes, name, phases):
    stages, chunks, m = sizes
    chunks = chunks if name in ("gpipe", "interleaved") else 1
    schedule = schedule_named(name, stages, chunks, m, phases=phases)
    credits = credits_named(name, stages, chunks, m, phases=phases)
    assert set(credits.priority) == set(schedule.phases)
    for phase in credits.buffers[0]:
        given_, needed = [buffers[phase] for buffers in credits.buffers], schedule.in_flight(phase)
        assert all(count >= most for count, most in zip(given_, needed))
        if name in ("gpipe", "1f1b") or (name, phase) == ("zero-bubble", "backward"):
            assert given_ == list(needed)


TIMES = st.integers(1, 12)


@given(SIZES, TIMES, TIMES, st.data())
def test_1f1b_arises_from_credits(sizes, forward, backward, data):
    """Stage s of p has p - s buffers between forward and backward, and prefers backward: nothing else is said.

    Whatever the times, if stages are alike and transfers keep up with them.
    """
    stages, _, m = sizes
    sends = data.draw(st.integers(0, min(forward, backward)))
    pipeline = uniform_pipeline(stages, m, forward, backward, sends_seconds=sends)
    queue = [{phase: tuple((s, k) for k in range(m)) for phase in TRAINING} for s in range(stages)]
    buffers = tuple({"backward": min(stages - stage, m)} for stage in range(stages))
    actors = Credits("1f1b", stages, 1, m, ("backward", "forward"), tuple(queue), buffers)
    assert actors == credits_named("1f1b", stages, None, m)
    assert fire(pipeline, actors) == schedule_named("1f1b", stages, None, m)


@given(SIZES, TIMES, TIMES)
def test_gpipe_arises_from_credits(sizes, forward, backward):
    stages, _, m = sizes
    pipeline = uniform_pipeline(stages, m, forward, backward)
    assert fire(pipeline, credits_named("gpipe", stages, 1, m)) == schedule_named("gpipe", stages, 1, m)


@given(SIZES, TIMES)
def test_zero_bubble_arises_from_credits(sizes, seconds):
    stages, _, m = sizes
    assume(m >= stages)
    pipeline = uniform_pipeline(stages, m, seconds, seconds, weight_seconds=seconds)
    assert fire(pipeline, credits_named("zero-bubble", stages, 1, m)) == schedule_named("zero-bubble", stages, 1, m)


@given(SIZES, TIMES, TIMES)
def test_interleaved_by_credits_takes_as_long(sizes, forward, backward):
    """Actors run what is there, so two backwards may follow each other where the closed form waits for a forward."""
    stages, chunks, m = sizes
    assume(chunks > 1 and m % stages == 0)
    pipeline = uniform_pipeline(stages, m, forward, backward, chunks=chunks)
    credits = credits_named("interleaved", stages, chunks, m)
    assert simulate(pipeline, credits).step_seconds == simulate(pipeline, "interleaved").step_seconds


@given(SIZES, st.data())
def test_credits_keep_their_bound_on_uneven_stages(sizes, data):
    stages, _, m = sizes
    times = st.floats(0.1, 5.0)
    kinds = {
        (stage, phase): Segment(phase, (Task(phase, COMPUTE, data.draw(times)),), 1, data.draw(times) / 10)
        for stage in range(stages)
        for phase in TRAINING
    }
    fired = fire(Pipeline(stages, 1, m, kinds), credits_named("1f1b", stages, None, m))
    assert all(found <= stages - stage for stage, found in enumerate(fired.in_flight()))
    assert len(run(fired.orders, stages, 1)) == 2 * stages * m


def test_known_orders():
    def short(schedule, stage):
        return " ".join(f"{phase[0].upper()}{chunk}.{m}" for phase, chunk, m in schedule.orders[stage])

    one = schedule_named("1f1b", 3, None, 4)
    assert short(one, 0) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert short(one, 2) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"
    many = schedule_named("interleaved:2", 2, None, 2)
    assert short(many, 0) == "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1"
    assert short(many, 1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1"
    zero = schedule_named("zero-bubble", 2, None, 3)
    assert short(zero, 0) == "F0.0 F0.1 B0.0 W0.0 F0.2 B0.1 W0.1 B0.2 W0.2"
    assert short(zero, 1) == "F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2"
    assert short(schedule_named("1f1b", 1, None, 2, phases=PHASES), 0) == "F0.0 B0.0 W0.0 F0.1 B0.1 W0.1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1bb", 2, None, 2), "did you mean 1f1b"),
        (("chimera", 2, None, 2), "known are gpipe, 1f1b, interleaved, zero-bubble"),
        (("1f1b:2", 2, None, 2), "only interleaved takes a number"),
        (("interleaved:two", 2, None, 2), "only interleaved takes a number"),
        (("interleaved:2", 2, 3, 2), "for 2 chunks per stage, but there are 3"),
        (("1f1b", 2, 2, 2), "use interleaved:2"),
        (("1f1b", 0, None, 2), "stages must be a whole number of at least 1, got 0"),
        (("1f1b", 2, None, True), "micro_batches must be a whole number"),
        (("gpipe", 2, None, 2, ("backward",)), "are not the first of forward, backward, weight"),
    ],
)
def test_names_and_numbers_that_do_not_fit(arguments, message):
    with pytest.raises(PipelineError, match=message):
        schedule_named(*arguments)
    with pytest.raises(PipelineError, match=message):
        credits_named(*arguments)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (((("forward", 0, 0),),), "1 orders for 2 stages"),
        (((("forward", 1, 0),), (("forward", 1, 0),)), "stage 0 cannot run forward of chunk 1, micro-batch 0"),
        (((("forward", 0, 0),) * 2, (("forward", 1, 0),)), "stage 0 runs forward of chunk 0, micro-batch 0 2 times"),
        (((("forward", 0, 0),), ()), "stage 1 never runs forward of chunk 1, micro-batch 0"),
    ],
)
def test_orders_that_are_none(orders, message):
    with pytest.raises(PipelineError, match=message):
        Schedule("mine", 2, 1, 1, orders)


def test_credits_that_are_none():
    right = credits_named("1f1b", 2, None, 1)
    with pytest.raises(PipelineError, match="gives 0 buffers to 'backward'"):
        Credits("mine", 2, 1, 1, right.priority, right.queues, ({"backward": 0}, {"backward": 1}))
    with pytest.raises(PipelineError, match="stage 0 has queues for backward, forward"):
        Credits("mine", 2, 1, 1, ("forward",), right.queues, right.buffers)
    with pytest.raises(PipelineError, match="for each of 2 stages"):
        Credits("mine", 2, 1, 1, right.priority, right.queues[:1], right.buffers)
