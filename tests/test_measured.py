"""Plans priced with measured kernels, against the executor's own timeline."""

from collections import Counter
from statistics import fmean

import pytest

from sbp.errors import PlanError
from sbp.initial import draw_all
from sbp.models import build
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.pipeline import COMPUTE
from sbp.planner.simulator import simulate
from sbp.planner.stage_pipeline import pipeline_of
from sbp.planner.stages import cut
from sbp.planner.styles import DataParallel, Styles, TensorParallel
from sbp.planner.timing import predict_timeline
from sbp.runtime.actors import PipelineExecutor
from sbp.runtime.executor import Executor
from sbp.runtime.measured import kind_of, mean_seconds_of_actors, measured_seconds, with_measured


def plan_of(layers, hidden=64):
    """Megatron's layouts on 2 x 2 ranks: the same in every layer, so that depths differ in nothing else."""
    model = build("gpt2", layers=layers, heads=4, hidden=hidden, vocabulary=256, positions=64)
    return auto_parallel(
        model,
        Cluster.preset("cpu", nodes=1, devices_per_node=4),
        batch=4,
        sequence=64,
        precision="f32",
        mesh="dp=2,tp=2",
        restriction=lambda graph, mesh: Styles(graph, mesh, DataParallel(), TensorParallel()),
    )


def ready(plan):
    executor, arrays = Executor(plan.physical, share=False), draw_all(plan.graph, 0, "f32")
    names = plan.graph.state, plan.graph.inputs
    return executor, *(executor.place({name: arrays[name] for name in some}) for some in names)


@pytest.fixture(scope="module")
def seconds():
    return measured_seconds(*ready(plan_of(3)), steps=3)


def test_a_deeper_model_is_made_of_the_same_kinds(seconds):
    shallow, deep = plan_of(3).physical, plan_of(6).physical
    kinds = [{kind_of(operation, physical) for operation in physical.operations} for physical in (shallow, deep)]
    assert kinds[0] == kinds[1] == set(seconds)
    assert len(kinds[0]) < len(shallow.operations) < len(deep.operations)
    assert all(value > 0 for value in seconds.values())


def test_the_executor_runs_what_is_predicted_in_that_order(seconds):
    """Order exactly; time only roughly here, where other work may go on (benchmarks/executor_timeline.py measures)."""
    plan = plan_of(6)
    predicted = predict_timeline(with_measured(plan.physical, seconds), overlap=False)
    executor, state, feeds = ready(plan)
    runs = [executor.run(state, feeds, timed=True).timeline for _ in range(4)][1:]
    count = len(plan.physical.operations)
    order = sorted(range(count), key=lambda at: (predicted.start[at], predicted.stop[at]))
    for run in runs:
        assert order == sorted(range(count), key=lambda at: run[at])
    assert 1 / 4 < predicted.step_seconds / fmean(run[-1][1] for run in runs) < 4


def test_a_kind_that_was_not_measured_is_named(seconds):
    with pytest.raises(PlanError, match="no operation of its kind was measured"):
        with_measured(plan_of(3, hidden=32).physical, seconds)


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_actors_run_what_is_simulated_with_what_they_measured(name):
    """Kinds timed in 2 micro-batches price the simulated step of 6; its order and its work are those of the actors.

    Times are held against each other by benchmarks/executor_timeline.py --pipelines.
    """
    plan = plan_of(4)
    staged = cut(plan.physical, 2, weights_apart=name == "zero-bubble")
    arrays = draw_all(plan.graph, 0, "f32")

    def step(micro_batches):
        pipeline = PipelineExecutor(staged, micro_batches, name)
        state, feeds = (
            pipeline.place({value: arrays[value] for value in some}) for some in (plan.graph.state, plan.graph.inputs)
        )
        return pipeline.run(state, [feeds] * micro_batches, timed=True)

    measured = mean_seconds_of_actors(staged.physical, [step(2)])
    assert set(measured) == {kind_of(operation, staged.physical) for operation in staged.physical.operations}
    priced = cut(with_measured(plan.physical, measured), 2, first_layers=[2], weights_apart=name == "zero-bubble")
    predicted = simulate(pipeline_of(priced, 6, overlap=False), name)
    ran = step(6)
    assert ran.orders == predicted.schedule.orders
    assert predicted.streams[0] == COMPUTE and not predicted.busy_seconds[:, 1:].any()
    for stage, timeline in enumerate(ran.timelines):
        counts = Counter(at for at, _, _ in timeline)
        assert all(a[2] <= b[1] for a, b in zip(timeline, timeline[1:])), "a stage does one thing at a time"
        for at, (chunk, phase) in enumerate(staged.places):
            assert counts[at] == (staged.stage_of(chunk) == stage) * (1 if phase == "once" else 6)
        work = sum(measured[kind_of(staged.physical.operations[at], staged.physical)] * n for at, n in counts.items())
        assert predicted.busy_seconds[stage, 0] == pytest.approx(work)
