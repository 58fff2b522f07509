"""Reports of users of other systems: what a pipeline holds at a time, and how long it takes. Each names its report."""

import numpy
import pytest

from sbp import nn
from sbp.errors import PipelineError
from sbp.graph import Initial
from sbp.initial import draw
from sbp.interpreter import evaluate
from sbp.models import build
from sbp.operator import TensorType
from sbp.optim import SGD
from sbp.passes.recompute import block_of
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.planner.physical import Compute
from sbp.planner.pipeline import COMPUTE, Pipeline, Segment, Task, uniform_pipeline
from sbp.planner.schedule import credits_named, schedule_named
from sbp.planner.simulator import simulate
from sbp.planner.stages import cut
from sbp.runtime.actors import PipelineExecutor
from sbp.training import training_step


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
    """GPipe all of them on every stage; zero-bubble what 1F1B does; interleaving no less than that."""
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


# -- plans in stages ---------------------------------------------------------------------------------------------------

TWO = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)


def layers_by_stage(staged):
    """The numbered layers of each stage, from the nodes that run forward there."""
    found = [set() for _ in range(staged.stages)]
    for operation, (chunk, phase) in zip(staged.physical.operations, staged.places):
        layer = block_of(operation.module) if isinstance(operation, Compute) else None
        if layer is not None and phase == "forward":
            found[staged.stage_of(chunk)].add(layer)
    return [len(layers) for layers in found]


@pytest.mark.parametrize(("layers", "stages"), [(46, 4), (47, 4), (7, 3), (5, 5)])
def test_r153_layers_need_not_be_divisible_by_stages(layers, stages):
    """46 equal layers on 4 stages: 11 or 12 each, all of them once."""
    model = build("mlp", widths=(2048,) * (layers + 1))  # beside such layers the loss takes no time
    graph = training_step(model, 4096, optimizer=SGD(lr=0.1), precision="f32")
    plan = auto_parallel(graph, Cluster.preset("a100-80g", nodes=1, devices_per_node=1), mesh=(1,))
    sizes = layers_by_stage(cut(plan.physical, stages))
    assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1
    with pytest.raises(PipelineError, match=f"the plan has {layers} layers .* do not make {layers + 1} chunks"):
        cut(plan.physical, layers + 1)


@pytest.mark.parametrize("stored", ["S(0)", "B"])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_r043_a_tied_weight_on_the_first_and_the_last_stage_stays_one(stored, order):
    """3 SGD steps: one stage updates with the sum of both stages' gradients, taken once after all micro-batches.

    What both stages read in the next step is the unsharded run's, to round-off.
    """
    model = build("tiny-gpt2", layers=2)
    micro, count = training_step(model, 2, optimizer=SGD(lr=0.5), precision="f64"), 3
    plan = auto_parallel(micro, TWO, mesh=(2,), pins={"wte.weight": stored})
    staged = cut(plan.physical, 2)
    assert staged.copies["wte.weight"] == (0, 1) and staged.homes["wte.weight"] in (0, 1)
    sums = [
        at for at, operation in enumerate(plan.physical.operations)
        if isinstance(operation, Compute) and operation.op == "add" and staged.places[at][1] == "once"
    ]  # fmt: skip
    if stored == "B":  # where the gradient is scattered at once, the sum is taken before, for every micro-batch
        assert len(sums) == 1, "one sum over the two stages"
        crossing = [move for move in staged.transfers if move.target[1] == "once" and move.source[0] != move.target[0]]
        assert len(crossing) == 1 and plan.physical.registers[crossing[0].register].type.shape == (61, 16)
    whole = training_step(model, 2 * count, optimizer=SGD(lr=0.5), precision="f64")
    pipeline = PipelineExecutor(staged, count, order, floating="f64")
    expected = {name: draw(whole.values[name], 0, "f64") for name in whole.state}
    state = pipeline.place(expected)
    for step in range(3):
        arrays = {name: draw(whole.values[name], step + 1) for name in whole.inputs}
        feeds = [
            pipeline.place({name: array[2 * at : 2 * at + 2] for name, array in arrays.items()}) for at in range(count)
        ]
        made = evaluate(whole, {**expected, **arrays})
        expected = {**expected, **{name: made[name] for name in whole.updates}}
        state = pipeline.run(state, feeds).state
        found = pipeline.collect_state(state)
        for name, array in expected.items():
            numpy.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-12, err_msg=f"{name}, step {step}")
        local = state["wte.weight"]
        if stored == "B":
            assert local[0].tobytes() == local[1].tobytes()


class TwoDropouts(nn.Module):
    """Two layers of equal shapes, each with a dropout; the loss weighs every element by its place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Dropout(0.5)) for _ in range(2))

    def forward(self, x, targets):
        for layer in self.layers:
            x = layer(x)
        return nn.MSELoss()(x, targets)

    def example_inputs(self, batch, sequence=None):
        kind = TensorType((batch, 8), "f32")
        return {"x": (kind, Initial("normal", (0.0, 1.0))), "targets": (kind, Initial("normal", (0.0, 1.0)))}


def test_r049_dropout_is_not_cut_into_stages_unnoticed():
    """Layers have seeds of their own; but the step count that masks derive from moves on with every forward run.

    Until a pipeline moves it on once per step, such a program is refused: masks would differ from micro-batch to
    micro-batch in another way than in the run without stages.
    """
    graph = training_step(TwoDropouts(), 4, optimizer=SGD(lr=0.1), precision="f64")
    masks = [node for node in graph.nodes if node.op.startswith("dropout") and node.phase == "forward"]
    assert len({str(sorted(node.attributes.items())) for node in masks}) == len(masks) == 2
    plan = auto_parallel(graph, TWO, mesh=(2,), pins={"x": "S(0)"})
    with pytest.raises(PipelineError, match="state random.step is updated in the forward phase, for every micro-batch"):
        cut(plan.physical, 2)
