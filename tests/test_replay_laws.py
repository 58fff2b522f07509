"""What every prediction must obey, whatever the sizes: laws of time and memory over random small configurations."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.models.gpt import GPTConfig
from sbp.planner.cluster import Cluster
from sbp.planner.cost import AnalyticCostModel
from sbp.planner.frameworks import Framework, frameworks
from sbp.planner.replay import Configuration, for_ranks, predict
from sbp.planner.replay.step import StepBuilder

TOLERANCE = 1 + 1e-9


def resized(run, **changes):
    """The configuration with changes, on a cluster of as many ranks as it then has."""
    axes = {name: changes.get(name, getattr(run, name)) for name in ("tp", "pp", "dp", "cp")}
    ranks = axes["tp"] * axes["pp"] * axes["dp"] * axes["cp"]
    return replace(run, cluster=for_ranks(run.cluster, ranks), **changes)


@st.composite
def runs(draw, framework=None, presets=("a100-80g", "h100", "v100-32g"), **fixed):
    """A GPT of few sizes, so that most draws share their programs, on up to 64 ranks under any framework."""
    chosen = {
        "tp": draw(st.sampled_from((1, 2, 4))),
        "pp": draw(st.sampled_from((1, 2, 4))),
        "dp": draw(st.sampled_from((1, 2, 4))),
        "micro_batch": draw(st.sampled_from((1, 2))),
        "zero": draw(st.integers(0, 3)),
        "recompute": draw(st.sampled_from(("none", "selective", "full"))),
        **fixed,
    }
    model = GPTConfig(8, 16, draw(st.sampled_from((1024, 4096))), 50304, 1024, dropout=0.1)
    cluster = Cluster.preset(draw(st.sampled_from(presets)))
    cluster = for_ranks(cluster.with_devices_per_node(8), chosen["tp"] * chosen["pp"] * chosen["dp"])
    micro_batches = 4 * draw(st.integers(1, 3))
    batch = micro_batches * chosen["micro_batch"] * chosen["dp"]
    traits = Framework.named(framework or draw(st.sampled_from(frameworks())))
    return Configuration(model, cluster, traits, 1024, global_batch=batch, **chosen)


few = settings(max_examples=25, deadline=None)


@few
@given(runs())
def test_more_micro_batches_take_longer_but_each_less(run):
    """Twice the micro-batches: the pipeline fills once and the optimizer runs once, so less than twice the time."""
    less, more = predict(run), predict(replace(run, global_batch=2 * run.global_batch))
    assert less.step_seconds < more.step_seconds <= 2 * less.step_seconds * TOLERANCE
    assert less.peak_bytes <= more.peak_bytes * TOLERANCE


@few
@given(runs(presets=("a100-80g", "h100"), zero=0))
def test_more_replicas_with_the_same_work_each_are_not_faster(run):
    """Behind switches, that is: of V100s, which have none, four have more links between them than two."""
    twice = resized(run, dp=2 * run.dp, global_batch=2 * run.global_batch)
    assert predict(run).step_seconds <= predict(twice).step_seconds * TOLERANCE


@few
@given(runs(recompute="none"))
def test_recompute_saves_memory_for_time(run):
    none, selective, full = (predict(replace(run, recompute=kind)) for kind in ("none", "selective", "full"))
    assert full.peak_bytes <= none.peak_bytes * TOLERANCE and selective.peak_bytes <= none.peak_bytes * TOLERANCE
    assert none.step_seconds <= selective.step_seconds * TOLERANCE
    assert selective.step_seconds <= full.step_seconds * TOLERANCE
    assert none.hfu == none.mfu and none.model_flops < selective.hardware_flops < full.hardware_flops


def test_recompute_hides_one_collective_behind_a_kernel_not_two():
    """Gathered parameters and reduced gradients that outlast the kernels: more kernels do not shorten the step."""
    cluster = for_ranks(Cluster.preset("v100-32g").with_devices_per_node(8), 16)
    run = Configuration(GPTConfig(8, 16, 1024, 50304, 1024, dropout=0.1), cluster, Framework.named("megascale"), 1024,
                        tp=4, dp=4, global_batch=16, zero=3)  # fmt: skip
    steps = [predict(replace(run, recompute=kind)).step_seconds for kind in ("none", "selective", "full")]
    assert steps == sorted(steps)


@few
@given(runs(framework="megascale", dp=4))
def test_gradients_reduced_once_per_step_are_not_reduced_in_every_micro_batch(run):
    """With parameters shared, too: what crosses the replicas beyond the gathers does not grow with micro-batches."""
    builder = StepBuilder.of(replace(run, zero=3), AnalyticCostModel(run.cluster))
    assert builder.sharding_seconds("backward", 0.0) == builder.sharding_seconds("forward", 0.0) > 0.0
    often = replace(run.framework, reduces_every_micro_batch=True)
    builder = StepBuilder.of(replace(run, zero=3, framework=often), AnalyticCostModel(run.cluster))
    assert builder.sharding_seconds("backward", 0.0) > builder.sharding_seconds("forward", 0.0)
    assert all(task.name != "gradient reduction" for task in builder.after(0).tasks)


@few
@given(runs(dp=4))
def test_sharing_more_never_takes_more_memory(run):
    none, state, gradients, parameters = (predict(replace(run, zero=level)).memory for level in range(4))
    for a, b, c, d in zip(none, state, gradients, parameters):
        assert a.total >= b.total >= c.total
        # Parameters are gathered layer by layer, which takes room; what is stored only shrinks.
        assert c.weights + c.gradients + c.optimizer >= d.weights + d.gradients + d.optimizer


@few
@given(runs(tp=1, zero=0))
def test_what_has_one_rank_does_not_communicate(run):
    assert predict(run).step.breakdown_seconds.get("tp", 0.0) == 0.0
    if run.dp == 1:
        assert predict(run).step.breakdown_seconds.get("dp", 0.0) == 0.0
    if run.pp == 1:
        assert predict(run).step.bubble_fraction <= 1e-9


@few
@given(runs(pp=4))
def test_interleaved_stages_wait_less(run):
    plain, interleaved = (predict(replace(run, schedule=name)) for name in ("1f1b", "interleaved:2"))
    assert interleaved.step.bubble_fraction < plain.step.bubble_fraction
    assert all(a.activations <= b.activations * TOLERANCE for a, b in zip(plain.memory, interleaved.memory))
