"""Every model family: published sizes, and numbers equal to the same model written in PyTorch."""

import math

import numpy
import pytest

from sbp import models, optim
from sbp.errors import GraphError
from sbp.initial import draw_all
from sbp.interpreter import evaluate
from sbp.training import inference, training_step

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "bert-base": 109_514_298,  # BertForMaskedLM
    "bert-large": 335_174_458,  # BertForMaskedLM
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "vit-b": 86_567_656,
    "vit-l": 304_326_632,
    "vit-h": 632_045_800,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "dlrm-kaggle": 540_677_217,
}


def test_parameter_counts_are_the_published_ones():
    found = models.presets()
    assert {name: found[name] for name in PUBLISHED} == PUBLISHED
    assert set(found) - set(PUBLISHED) == {"mlp", "dlrm"}
    # MLPerf's DLRM: 26 tables of width 128 (Criteo Terabyte, at most 40 million rows), and two small perceptrons.
    assert found["dlrm"] == 128 * 187_767_399 + 2_368_897


def test_bert_with_the_next_sentence_head_is_bert_for_pretraining():
    assert models.build("bert-large", next_sentence=True).count_parameters() == 336_226_108


def test_overrides_and_unknown_names():
    assert models.build("gpt2", layers=3).config.layers == 3
    assert models.build(models.TINY["vit"], classes=5).head.out_features == 5
    assert models.config_named("tiny-gpt2") == models.TINY["gpt2"]
    with pytest.raises(GraphError, match=r"no model 'gpt-2'; did you mean gpt2\?"):
        models.build("gpt-2")
    with pytest.raises(GraphError, match="GPTConfig has no size depth; it has layers, heads"):
        models.build("gpt2", depth=3)


@pytest.mark.parametrize(
    ("name", "size", "value"),
    [
        ("gpt2", "layers", 0), ("gpt2", "layers", -1), ("gpt2", "layers", 1.5), ("gpt2", "layers", True),
        ("gpt2", "positions", 0), ("gpt2", "intermediate", 0), ("gpt2", "eps", -1.0), ("gpt2", "eps", math.nan),
        ("gpt2", "activation", 3), ("llama-3-8b", "kv_heads", 0), ("llama-3-8b", "theta", "x"),
        ("bert-base", "token_types", 0), ("bert-base", "next_sentence", 1), ("vit-b", "patch", 0),
        ("resnet-50", "blocks", (3, 0)), ("resnet-50", "blocks", ()), ("dlrm", "tables", 4), ("dlrm", "lookups", 0),
        ("mlp", "widths", (8, -1)), ("mlp", "classification", "no"),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has(name, size, value):
    """Refused where the configuration is made, with its name; a GPT of no layers used to be planned."""
    with pytest.raises(GraphError, match=rf"Config: {size} must be .*, got "):
        models.build(name, **{size: value})


@pytest.mark.parametrize("name", models.PRESETS)
def test_scaled_configurations_keep_the_structure(name):
    config = models.PRESETS[name]
    whole, small = config.build(), config.scaled().build()
    assert [label for label, _ in whole.named_parameters()] == [label for label, _ in small.named_parameters()]
    assert small.count_parameters() < 60_000_000
    assert config.scaled().scaled() == config.scaled()


@pytest.mark.parametrize(
    "name, sequence", [("gpt2", 512), ("bert-base", None), ("resnet-50", None), ("vit-l", None), ("dlrm", None)]
)
def test_graphs_of_scaled_configurations_have_the_same_nodes(name, sequence):
    config = models.PRESETS[name]
    whole, small = training_step(config.build(), 2, sequence), training_step(config.scaled().build(), 2)
    assert [(n.name, n.op, n.module) for n in whole.nodes] == [(n.name, n.op, n.module) for n in small.nodes]


# -- the same models in PyTorch, with sbp's parameter names ------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # tiny tensors; more threads only wait for each other
    F = torch.nn.functional

    def attend(q, k, v, causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def fused(p, name, x, heads, causal=False):
        """Self-attention whose fused rows are (heads, 3, size)."""
        b, s, e = x.shape
        y = F.linear(x, p[f"{name}.qkv.weight"], p[f"{name}.qkv.bias"]).view(b, s, heads, 3, e // heads)
        q, k, v = y.permute(3, 0, 2, 1, 4)
        y = attend(q, k, v, causal).transpose(1, 2).reshape(b, s, e)
        return F.linear(y, p[f"{name}.proj.weight"], p[f"{name}.proj.bias"])

    def norm(p, name, x, eps):
        return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)

    def perceptron(p, name, x, approximate):
        y = F.gelu(F.linear(x, p[f"{name}.fc.weight"], p[f"{name}.fc.bias"]), approximate=approximate)
        return F.linear(y, p[f"{name}.proj.weight"], p[f"{name}.proj.bias"])

    def mlp(c, p, x):
        count = len(c.widths) - 1
        for i in range(count):
            x = F.linear(x if i == 0 else F.relu(x), p[f"layers.{i}.weight"], p[f"layers.{i}.bias"])
        return x

    def gpt(c, p, tokens):
        x = F.embedding(tokens, p["wte.weight"]) + p["wpe.weight"][: tokens.shape[1]]
        for i in range(c.layers):
            x = x + fused(p, f"h.{i}.attn", norm(p, f"h.{i}.ln_1", x, c.eps), c.heads, causal=True)
            x = x + perceptron(p, f"h.{i}.mlp", norm(p, f"h.{i}.ln_2", x, c.eps), "tanh")
        return norm(p, "ln_f", x, c.eps) @ p["wte.weight"].T

    def rotate(x, theta):
        s, d = x.shape[-2:]
        angle = torch.outer(torch.arange(s, dtype=x.dtype), theta ** (-torch.arange(0, d, 2, dtype=x.dtype) / d))
        turn = torch.polar(torch.ones_like(angle), angle)
        y = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat([y.real, y.imag], dim=-1)

    def llama(c, p, tokens):
        def rms(name, x):
            return F.rms_norm(x, x.shape[-1:], p[f"{name}.weight"], c.eps)

        x = F.embedding(tokens, p["embed_tokens.weight"])
        b, s, e = x.shape
        for i in range(c.layers):
            at = f"layers.{i}."
            y = rms(at + "input_layernorm", x)
            q, k, v = (
                F.linear(y, p[f"{at}self_attn.{label}_proj.weight"]).view(b, s, -1, e // c.heads).transpose(1, 2)
                for label in "qkv"
            )
            k, v = (item.repeat_interleave(c.heads // c.kv_heads, dim=1) for item in (rotate(k, c.theta), v))
            y = attend(rotate(q, c.theta), k, v, causal=True).transpose(1, 2).reshape(b, s, e)
            x = x + F.linear(y, p[at + "self_attn.o_proj.weight"])
            y = rms(at + "post_attention_layernorm", x)
            gate, up = (F.linear(y, p[f"{at}mlp.{label}_proj.weight"]) for label in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, p[at + "mlp.down_proj.weight"])
        return F.linear(rms("norm", x), p["lm_head.weight"])

    def bert(c, p, tokens, token_types):
        words = p["embeddings.word_embeddings.weight"]
        x = F.embedding(tokens, words) + F.embedding(token_types, p["embeddings.token_type_embeddings.weight"])
        x = norm(p, "embeddings.LayerNorm", x + p["embeddings.position_embeddings.weight"][: x.shape[1]], c.eps)
        for i in range(c.layers):
            x = norm(p, f"layer.{i}.ln_1", x + fused(p, f"layer.{i}.attn", x, c.heads), c.eps)
            x = norm(p, f"layer.{i}.ln_2", x + perceptron(p, f"layer.{i}.mlp", x, "none"), c.eps)
        y = F.gelu(F.linear(x, p["predictions.dense.weight"], p["predictions.dense.bias"]))
        logits = F.linear(norm(p, "predictions.LayerNorm", y, c.eps), words, p["predictions.decoder.bias"])
        pooled = torch.tanh(F.linear(x[:, 0], p["pooler.dense.weight"], p["pooler.dense.bias"]))
        return logits, F.linear(pooled, p["seq_relationship.weight"], p["seq_relationship.bias"])

    def vit(c, p, images):
        x = F.conv2d(images, p["conv_proj.weight"], p["conv_proj.bias"], stride=c.patch).flatten(2).transpose(1, 2)
        x = torch.cat([p["class_token"].expand(len(x), 1, -1), x], dim=1) + p["pos_embedding"]
        for i in range(c.layers):
            x = x + fused(p, f"layers.{i}.attn", norm(p, f"layers.{i}.ln_1", x, c.eps), c.heads)
            x = x + perceptron(p, f"layers.{i}.mlp", norm(p, f"layers.{i}.ln_2", x, c.eps), "none")
        return F.linear(norm(p, "ln", x, c.eps)[:, 0], p["head.weight"], p["head.bias"])

    def resnet(c, p, images, training=True):
        def batch_norm(name, x):
            running = p[f"{name}.running_mean"], p[f"{name}.running_var"]  # changed in place
            return F.batch_norm(x, *running, p[f"{name}.weight"], p[f"{name}.bias"], training)

        def conv(name, x, stride=1):
            weight = p[f"{name}.weight"]
            return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

        x = F.max_pool2d(F.relu(batch_norm("bn1", conv("conv1", images, 2))), 3, 2, 1)
        for stage, count in enumerate(c.blocks):
            for i in range(count):
                at, stride = f"layer{stage + 1}.{i}.", 2 if stage and not i else 1
                y = F.relu(batch_norm(at + "bn1", conv(at + "conv1", x)))
                y = F.relu(batch_norm(at + "bn2", conv(at + "conv2", y, stride)))
                y = batch_norm(at + "bn3", conv(at + "conv3", y))
                if at + "downsample.0.weight" in p:
                    x = batch_norm(at + "downsample.1", conv(at + "downsample.0", x, stride))
                x = F.relu(x + y)
        return F.linear(x.mean((2, 3)), p["fc.weight"], p["fc.bias"])

    def dlrm(c, p, dense, **ids):
        def layers(name, x, count, last_is_linear):
            for i in range(count):
                x = F.linear(x, p[f"{name}.{2 * i}.weight"], p[f"{name}.{2 * i}.bias"])
                x = x if last_is_linear and i == count - 1 else F.relu(x)
            return x

        x = layers("bottom", dense, len(c.bottom) - 1, False)
        rows = [x] + [F.embedding(ids[f"ids_{i}"], p[f"tables.{i}.weight"]).sum(1) for i in range(len(c.tables))]
        stacked = torch.stack(rows, dim=1)
        below = torch.tril_indices(len(rows), len(rows), -1)
        products = (stacked @ stacked.transpose(1, 2))[:, below[0], below[1]]
        return layers("top", torch.cat([x, products], dim=1), len(c.top), True)[:, 0]

    forward = {"mlp": mlp, "gpt2": gpt, "llama-3": llama, "bert": bert, "vit": vit, "resnet": resnet, "dlrm": dlrm}

    def loss(name, config, p, inputs):
        inputs = dict(inputs)
        targets, sentences = inputs.pop("targets"), inputs.pop("sentence_targets", None)
        logits = forward[name](config, p, **inputs)
        if name == "dlrm":
            return F.binary_cross_entropy_with_logits(logits, targets)
        if name == "bert":
            return F.cross_entropy(logits[0].flatten(0, 1), targets.flatten()) + F.cross_entropy(logits[1], sentences)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    return torch, forward, loss


def start(graph, seed=11):
    """Start values in float64; biases and norms are moved off their zeros and ones, which would hide mistakes."""
    feeds = draw_all(graph, seed, "f64")
    random = numpy.random.default_rng(seed)
    for name in graph.parameters:
        feeds[name] = feeds[name] + 0.1 * random.normal(size=feeds[name].shape)
    if "targets" in feeds and "token_types" in feeds:  # BERT: most tokens are not masked
        feeds["targets"] = numpy.where(random.random(feeds["targets"].shape) < 0.7, -100, feeds["targets"])
    return feeds


def tensors(torch, graph, feeds):
    state = {n: torch.tensor(feeds[n]) for n in graph.state if graph.values[n].kind != "optimizer"}
    for name in graph.parameters:
        state[name].requires_grad_()
    return state, {n: torch.tensor(feeds[n]) for n in graph.inputs}


OPTIMIZERS = {
    "mlp": (optim.SGD(lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01), "SGD"),
    "gpt2": (optim.AdamW(lr=0.01, weight_decay=0.1), "AdamW"),
    "llama-3": (optim.AdamW(lr=0.01, betas=(0.8, 0.95)), "AdamW"),
    "bert": (optim.Adam(lr=0.01, weight_decay=0.1), "Adam"),
    "vit": (optim.AdamW(), "AdamW"),
    "resnet": (optim.SGD(lr=0.1, momentum=0.9, nesterov=True), "SGD"),
    "dlrm": (optim.SGD(lr=0.1), "SGD"),
}


@pytest.mark.parametrize("name", models.TINY)
def test_three_training_steps_equal_pytorch(reference, name):
    """Loss, parameters (so gradients), optimizer state and running statistics after each step, in float64."""
    torch, _, loss_of = reference
    config = models.TINY[name]
    ours, kind = OPTIMIZERS[name]
    graph = training_step(config.build(), batch=3, sequence=7, optimizer=ours, precision="f64")
    feeds = start(graph)
    state, inputs = tensors(torch, graph, feeds)
    arguments = dict(vars(ours))
    theirs = getattr(torch.optim, kind)([state[n] for n in graph.parameters], **arguments)
    for _ in range(3):
        found = evaluate(graph, feeds)
        theirs.zero_grad()
        expected = loss_of(name, config, state, inputs)
        expected.backward()
        theirs.step()
        numpy.testing.assert_allclose(found[graph.outputs[0]], expected.item(), rtol=1e-10)
        assert math.isfinite(expected.item())
        for label in graph.updates:
            owner, _, part = label.rpartition(".")
            if owner in state:
                moment = theirs.state[state[owner]][part].detach().numpy()
                numpy.testing.assert_allclose(found[label], moment, rtol=1e-7, atol=1e-11, err_msg=label)
            elif label in state:
                numpy.testing.assert_allclose(
                    found[label], state[label].detach().numpy(), rtol=1e-7, atol=1e-8, err_msg=label
                )
        feeds.update((label, found[label]) for label in graph.updates)


@pytest.mark.parametrize("name", models.TINY)
def test_logits_in_inference_mode_equal_pytorch(reference, name):
    torch, forward, _ = reference
    config = models.TINY[name]
    graph = inference(config.build(), batch=3, sequence=7, precision="f64")
    assert not any(label.endswith("targets") for label in graph.inputs) and not graph.updates
    feeds = start(graph)
    state, inputs = tensors(torch, graph, feeds)
    found = evaluate(graph, feeds)
    extra = {"training": False} if name == "resnet" else {}
    expected = forward[name](config, state, **inputs, **extra)
    expected = expected if isinstance(expected, tuple) else (expected,)
    assert len(graph.outputs) == len(expected)
    for label, array in zip(graph.outputs, expected):
        numpy.testing.assert_allclose(found[label], array.detach().numpy(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["gpt2", "llama-3", "resnet"])
def test_float32_agrees_with_pytorch_to_its_precision(reference, name):
    torch, _, loss_of = reference
    config = models.TINY[name]
    graph = training_step(config.build(), batch=3, sequence=7, precision="f32")
    feeds = {n: a.astype("float32") if a.dtype == "float64" else a for n, a in start(graph).items()}
    state, inputs = tensors(torch, graph, feeds)
    found = evaluate(graph, feeds, floating=None)[graph.outputs[0]]
    assert found.dtype == numpy.float32
    numpy.testing.assert_allclose(found, loss_of(name, config, state, inputs).item(), rtol=3e-6)
