"""Reports of users of other systems: tied weights, losses and norms over ranks, masks of layers, writing into tensors.

Each test names its report.
"""

import math
from itertools import product

import numpy
import pytest

import sbp
from sbp import nn
from sbp.errors import GraphError, RuleError
from sbp.graph import Initial
from sbp.interpreter import evaluate
from sbp.operator import TensorType
from sbp.ops import library as ops
from sbp.optim import SGD
from sbp.planner.auto_parallel import auto_parallel
from sbp.planner.cluster import Cluster
from sbp.runtime.executor import Executor
from sbp.runtime.train import train, train_unsharded
from sbp.training import training_step

RNG = numpy.random.default_rng
TWO = Cluster.preset("a100-80g", nodes=1, devices_per_node=2)
IDS, WEIGHTS = numpy.array([0, 3, 4, 6]), RNG(1).standard_normal((4, 8))


class Tied(nn.Module):
    """E (8, 4) looked up and used as the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, weights):
        return ops.sum(self.head(self.embed(ids)) * weights)

    def example_inputs(self, batch, sequence=None):
        return {
            "ids": (TensorType((4,), "i64"), Initial("integers", (0, 8))),
            "weights": (TensorType((4, 8), "f64"), Initial("normal", (0.0, 1.0))),
        }


def tied_step():
    return training_step(Tied(), 4, optimizer=SGD(lr=0.5), precision="f64")


def tied_after(table, steps):
    """The table after SGD steps, its gradient the sum of both uses."""
    losses = []
    for _ in range(steps):
        looked_up = table[IDS]
        losses.append((looked_up @ table.T * WEIGHTS).sum())
        gradient = WEIGHTS.T @ looked_up
        numpy.add.at(gradient, IDS, WEIGHTS @ table)
        table = table - 0.5 * gradient
    return losses, table


@pytest.mark.parametrize("stored", ["S(0)", "S(1)", "B", None])
def test_r040_a_tied_weight_is_one_value_and_stays_one(stored):
    graph = tied_step()
    assert [str(graph.values[name]) for name in graph.parameters] == ["embed.weight: f64[8,4]"]
    plan = auto_parallel(graph, TWO, mesh=(2,), pins={"embed.weight": stored} if stored else None)
    table = RNG(0).standard_normal((8, 4)) * 0.1
    batches = [{"ids": IDS, "weights": WEIGHTS}] * 3
    run = train(graph, plan.physical, batches, 3, state={"embed.weight": table})
    losses, expected = tied_after(table, 3)
    numpy.testing.assert_allclose(run.losses, losses, rtol=1e-12)
    numpy.testing.assert_allclose(run.state["embed.weight"], expected, rtol=1e-12)
    executor = Executor(plan.physical)
    local = executor.place({"embed.weight": table})
    _, after = executor.step(local, executor.place(batches[0]))
    if stored == "B":  # collect compares to round-off; replicas of the updated table are the same bits
        assert after["embed.weight"][0].tobytes() == after["embed.weight"][1].tobytes()


def test_r044_a_tied_weight_is_sharded_once():
    plan = auto_parallel(tied_step(), TWO, mesh=(2,), pins={"embed.weight": "S(0)"})
    stored = [register for register in plan.physical.registers if register.kind == "parameter"]
    assert [register.value for register in stored] == ["embed.weight"]
    local = Executor(plan.physical).place({"embed.weight": numpy.zeros((8, 4))})["embed.weight"]
    assert [local[rank].shape for rank in range(2)] == [(4, 4), (4, 4)]


# -- losses ------------------------------------------------------------------------------------------------------------


def token_mean(logits, labels):
    return ops.cross_entropy(logits, labels, ignore_index=-100)


def _plain(logits, labels):
    wide = logits - logits.max(-1, keepdims=True)
    losses = numpy.log(numpy.exp(wide).sum(-1)) - numpy.take_along_axis(wide, labels.clip(0)[..., None], -1)[..., 0]
    return losses[labels != -100].mean()


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "S(2)", "B"])
def test_r080_r083_the_mean_is_over_tokens_not_over_shards(layout):
    """Two samples of (sum, tokens) = (5, 5) and (7, 1): 12 / 6 = 2, where a mean of means is 4.

    Ranks take the place of micro-batches: accumulation over micro-batches is not planned yet.
    """
    per_token = numpy.array([[1.0, 1, 1, 1, 1], [7, 0, 0, 0, 0]])
    kept = numpy.array([[1.0, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    if layout != "S(2)":
        x, mask = sbp.from_numpy(per_token, layout, 2), sbp.from_numpy(kept, layout, 2)
        assert (ops.sum(x * mask) / ops.sum(mask)).item() == 2.0
    logits = RNG(0).standard_normal((2, 5, 6))
    labels = numpy.where(kept > 0, RNG(1).integers(0, 6, (2, 5)), -100)
    found = token_mean(sbp.from_numpy(logits, layout, 2), sbp.from_numpy(labels, None, 2))
    assert found.item() == pytest.approx(_plain(logits, labels), rel=1e-12)


class TokenLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)

    def forward(self, x, labels):
        return nn.CrossEntropyLoss()(self.head(x), labels)

    def example_inputs(self, batch, sequence=None):
        return {
            "x": (TensorType((4, 3), "f32"), Initial()),
            "labels": (TensorType((4,), "i64"), Initial("integers", (0, 5))),
        }


@pytest.mark.parametrize("labels", [[1, 2, 4, -100], [1, -100, -100, -100], [0, 1, 2, 3]])
def test_r083_gradients_of_unequal_shards_are_those_of_one_batch(labels):
    """The first rank has 2 tokens (1 in the second case), the other 1 (none): every gradient counts each token once."""
    graph = training_step(TokenLoss(), 4, optimizer=SGD(lr=1.0), precision="f64")
    plan = auto_parallel(graph, TWO, mesh=(2,), pins={"x": "S(0)", "labels": "S(0)", "head.linear*": "S(0)"})
    batch = {"x": RNG(0).standard_normal((4, 3)), "labels": numpy.array(labels)}
    weight = {"head.weight": RNG(1).standard_normal((5, 3))}
    sharded = train(graph, plan.physical, [batch], 1, state=weight)
    whole = train_unsharded(graph, [batch], 1, state=weight)
    assert sharded.losses[0] == pytest.approx(whole.losses[0], rel=1e-12)
    numpy.testing.assert_allclose(sharded.state["head.weight"], whole.state["head.weight"], rtol=1e-12)
    logits = batch["x"] @ weight["head.weight"].T
    share = numpy.exp(logits - logits.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    kept = batch["labels"] != -100
    share[kept, batch["labels"][kept]] -= 1
    gradient = (share * kept[:, None]).T @ batch["x"] / kept.sum()
    numpy.testing.assert_allclose(sharded.state["head.weight"], weight["head.weight"] - gradient, rtol=1e-10)


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "expected"), [(math.inf, 7.0), (2, math.sqrt(58)), (1, 10.0), (3, 370 ** (1 / 3))])
@pytest.mark.parametrize("layout", ["S(0)", "B", "P"])
def test_r086_norms_of_any_order_over_shards(order, expected, layout):
    """Gradients 3 and -7 on different ranks, and as two tensors."""
    together = sbp.from_numpy(numpy.array([3.0, -7.0]), layout, 2)
    assert ops.norm(together, order=order).item() == pytest.approx(expected, rel=1e-12)
    apart = [sbp.from_numpy(numpy.array([value]), layout, 2) for value in (3.0, -7.0)]
    assert ops.global_norm(apart, order=order).item() == pytest.approx(expected, rel=1e-12)
    clipped, found = ops.clip_by_global_norm(apart, 1.0, order=order)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    assert ops.global_norm(clipped, order=order).item() == pytest.approx(1.0, rel=1e-5)


def test_r086_orders_of_norms():
    array = RNG(0).standard_normal((4, 5))
    for order, axis in product((1, 2, 3, math.inf), (0, 1)):
        expected = numpy.linalg.norm(array, order, axis)
        numpy.testing.assert_allclose(ops.norm(array, axis=axis, order=order), expected, rtol=1e-12)
    with pytest.raises(RuleError, match="above 0"):
        ops.norm(array, order=0)


# -- masks -------------------------------------------------------------------------------------------------------------


class TwoDropouts(nn.Module):
    def __init__(self, seed=None):
        super().__init__()
        self.first, self.second = nn.Dropout(0.5, seed), nn.Dropout(0.5, seed)

    def forward(self, x):
        return {"first": self.first(x), "second": self.second(x)}

    def example_inputs(self, batch, sequence=None):
        return {"x": (TensorType((8, 16), "f64"), Initial("ones", ()))}


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "B"])
def test_r049_every_layer_has_a_mask_of_its_own(layout):
    """Of equal shapes, at one step; and the masks are those of one device. (Stages are not planned yet.)"""
    from sbp.training import trace

    graph = trace(TwoDropouts().train(), 8)
    plan = auto_parallel(graph, TWO, mesh=(2,), pins={"x": layout, "*.dropout": layout})
    executor = Executor(plan.physical)
    state, x = {"random.step": numpy.zeros((), "i8")}, numpy.ones((8, 16))
    masks = []
    local = executor.place(state)
    for step in range(2):
        outputs, local = executor.step(local, executor.place({"x": x}))
        sharded = executor.collect_outputs(outputs)
        whole = evaluate(graph, {"x": x, "random.step": numpy.int64(step)})
        for name in graph.outputs:
            numpy.testing.assert_array_equal(sharded[name], whole[name])
            masks.append(tuple((sharded[name] != 0).ravel()))
    assert len(set(masks)) == 4  # two layers, two steps


# -- writing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "B", "P"])
def test_r068_writing_into_a_slice_is_refused_or_done_never_lost(layout):
    x = sbp.ones((8, 8), layout, 2)
    with pytest.raises(GraphError, match=r"cannot be written into; write x = x.updated"):
        x[:2] = 0
    assert x.sum().item() == 64
    assert x.updated(slice(None, 2), 0).sum().item() == 48


def test_r069_a_sum_and_a_split_are_added_by_boxing():
    a, b = RNG(0).standard_normal((4, 6)), RNG(1).standard_normal((4, 6))
    x, y = sbp.from_numpy(a, "P", 2), sbp.from_numpy(b, "S(0)", 2)
    for first, second in ((x, y), (y, x)):
        found = first + second
        numpy.testing.assert_allclose(found.numpy(), a + b, rtol=1e-12)
        assert len(found.history) == 1 and found.history[0].what in ("add, input x", "add, input y")
    x += y
    numpy.testing.assert_allclose(x.numpy(), a + b, rtol=1e-12)
    assert str(x.layout) == "(S(0))"


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "B"])
def test_r074_a_write_outside_of_the_tensor_is_refused(layout):
    """Systems that move the start to fit drop the write on some shards; here it is an error, as reading outside is."""
    x = sbp.from_numpy(numpy.arange(4.0).reshape(2, 2), layout, 2)
    with pytest.raises(RuleError, match="index 2 is outside dimension 1"):
        x.updated((slice(None), 2), 99.0)
    column = sbp.from_numpy(numpy.full((2, 1), 99.0), None, 2)
    with pytest.raises(RuleError):
        ops.slice_scatter(x, column, axis=1, start=2)
    assert x.updated((slice(None), 1), 99.0).numpy().tolist() == [[0, 99], [2, 99]]
    assert ops.slice_scatter(x, column, axis=1, start=1).numpy().tolist() == [[0, 99], [2, 99]]


def test_r034_parts_in_bf16_are_added_in_f32():
    """256 + 1 + 1 + 1 is 256 in a running bf16 sum; a plan that records the type of a reduction is still to come."""
    parts = [numpy.array([value], "f4") for value in (256, 1, 1, 1)]
    x = ops.cast(sbp.from_local(parts, "P", 4), dtype="bf16")
    assert str(x) == "bf16[1] (P) on mesh(x=4)"
    assert x.item() == 259.0 and x.to_layout("S(0)").item() == 259.0
