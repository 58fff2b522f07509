"""Reports of users of other systems: what a pipeline holds at a time, and how long it takes. Each names its report."""

import pytest

from sbp.planner.pipeline import COMPUTE, Pipeline, Segment, Task, uniform_pipeline
from sbp.planner.schedule import credits_named, schedule_named
from sbp.planner.simulator import simulate


@pytest.mark.parametrize(
    ("stages", "micro_batches", "expected"),
    [(4, 8, [4, 3, 2, 1]), (4, 2, [2, 2, 2, 1]), (4, 1, [1, 1, 1, 1]), (3, 3, [3, 2, 1]), (1, 5, [1])],
)
def test_r093_a_stage_holds_the_activations_of_all_micro_batches_in_flight(stages, micro_batches, expected):
    """1F1B with one unit of saved activation per micro-batch: by the orders, by the credits, and as simulated."""
    assert list(schedule_named("1f1b", stages, 1, micro_batches).in_flight()) == expected
    credits = credits_named("1f1b", stages, 1, micro_batches)
    assert [buffers["backward"] for buffers in credits.buffers] == expected
    pipeline = uniform_pipeline(stages, micro_batches, 1.0, 2.0)
    for schedule in ("1f1b", credits):
        assert list(simulate(pipeline, schedule).peak_bytes) == expected


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_r093_other_schedules_hold_what_they_hold(micro_batches):
    """GPipe all of them on every stage; zero-bubble what 1F1B does; interleaving more on the first stages, never less."""
    pipeline = uniform_pipeline(4, micro_batches, 1.0, 2.0)
    assert simulate(pipeline, "gpipe").peak_bytes == (micro_batches,) * 4
    thirds = uniform_pipeline(4, micro_batches, 1.0, 1.0, weight_seconds=1.0)
    zero_bubble = schedule_named("zero-bubble", 4, 1, micro_batches)
    assert list(zero_bubble.in_flight()) == [min(micro_batches, 4 - stage) for stage in range(4)]
    assert max(simulate(thirds, "zero-bubble").peak_bytes) <= min(micro_batches, 4)
    if micro_batches % 4 == 0:
        halves = uniform_pipeline(4, micro_batches, 0.5, 1.0, chunks=2)
        held = simulate(halves, "interleaved:2").peak_bytes
        plain = simulate(pipeline, "1f1b").peak_bytes
        assert all(chunks >= 2 * whole for chunks, whole in zip(held, plain))  # a chunk's activations are half as many


def unequal(times, micro_batches):
    """A pipeline of forward segments of unequal stages."""
    segments = {
        (stage, "forward"): Segment("forward", (Task("forward", COMPUTE, seconds),))
        for stage, seconds in enumerate(times)
    }
    return Pipeline(len(times), 1, micro_batches, segments)


@pytest.mark.parametrize("times", [(3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 3.0), (2.0,), (1.0, 2.0, 2.5, 0.5)])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_r110_a_pipeline_takes_the_sum_of_its_stages_and_the_slowest_again(times, micro_batches):
    """Stage times (3, 1, 1) and 4 micro-batches: 5 + 3 x 3 = 14, wherever the slow one is; not 4 x 3."""
    found = simulate(unequal(times, micro_batches), "gpipe")
    assert found.step_seconds == pytest.approx(sum(times) + (micro_batches - 1) * max(times), rel=1e-12)
    idle = found.step_seconds - found.busy_seconds[:, 0]
    assert idle.tolist() == pytest.approx([found.step_seconds - micro_batches * time for time in times])
    assert found.bubble_seconds.tolist() == pytest.approx(idle.tolist())
