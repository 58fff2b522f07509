"""PyTorch models in small, with random weights from their configuration: Hugging Face's classes and plain modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BATCH, SEQUENCE, VOCABULARY = 8, 16, 64


@dataclass(frozen=True)
class Example:
    """A model, what its forward takes, and its loss where it returns none itself."""

    module: nn.Module
    inputs: Any
    loss: Callable[..., torch.Tensor] | None = None
    targets: Any = ()


def tokens(*shape: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, shape or (BATCH, SEQUENCE))


# -- Hugging Face ------------------------------------------------------------------------------------------------------

_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_PADDING = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _hugging_face(kind: str, config: Any, **inputs: Any) -> Example:
    import transformers

    torch.manual_seed(0)
    return Example(getattr(transformers, kind)(config), inputs)


def _language_model(kind: str, config_kind: str, **sizes: Any) -> Example:
    import transformers

    config = getattr(transformers, config_kind)(**sizes)
    return _hugging_face(kind, config, input_ids=tokens(), labels=tokens())


def gpt2() -> Example:
    return _language_model(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **_PADDING,
    )  # fmt: skip


def gpt_neox() -> Example:
    return _language_model("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DECODER, **_PADDING)


def llama() -> Example:
    return _language_model(
        "LlamaForCausalLM", "LlamaConfig", **_DECODER, num_key_value_heads=2, **_PADDING,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    )  # fmt: skip


def qwen2() -> Example:
    return _language_model("Qwen2ForCausalLM", "Qwen2Config", **_DECODER, num_key_value_heads=2, **_PADDING)


def qwen3() -> Example:
    return _language_model("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, num_key_value_heads=2, head_dim=8, **_PADDING)


def mistral() -> Example:
    return _language_model(
        "MistralForCausalLM", "MistralConfig", **_DECODER, num_key_value_heads=2, sliding_window=6, **_PADDING
    )


def mixtral() -> Example:
    return _language_model(
        "MixtralForCausalLM", "MixtralConfig", **_DECODER, num_key_value_heads=2, num_local_experts=4, **_PADDING
    )


def gemma2() -> Example:
    return _language_model(
        "Gemma2ForCausalLM", "Gemma2Config", **_DECODER, num_key_value_heads=2, head_dim=8, sliding_window=6,
        query_pre_attn_scalar=8, **_PADDING,
    )  # fmt: skip


def phi3() -> Example:
    return _language_model("Phi3ForCausalLM", "Phi3Config", **_DECODER, num_key_value_heads=2, **_PADDING)


def mamba() -> Example:
    return _language_model(
        "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2,
        time_step_rank=4, **_PADDING,
    )  # fmt: skip


def bert() -> Example:
    import transformers

    config = transformers.BertConfig(**_DECODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[1, 10:] = 0
    return _hugging_face("BertForMaskedLM", config, input_ids=tokens(), attention_mask=mask, labels=tokens())


def t5() -> Example:
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _hugging_face("T5ForConditionalGeneration", config, input_ids=tokens(), labels=tokens(BATCH, 12))


def vit() -> Example:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    images = torch.randn(BATCH, 3, 16, 16)
    return _hugging_face("ViTForImageClassification", config, pixel_values=images, labels=tokens(BATCH, below=10))


def clip() -> Example:
    import transformers

    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "vocab_size": VOCABULARY, "max_position_embeddings": SEQUENCE, "projection_dim": 16,
            "eos_token_id": VOCABULARY - 1, "bos_token_id": 1, "pad_token_id": 0}  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 16, "patch_size": 4, "projection_dim": 16}  # fmt: skip
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    ids = tokens(below=VOCABULARY - 1)
    ids[:, -1] = VOCABULARY - 1
    return _hugging_face(
        "CLIPModel", config, input_ids=ids, pixel_values=torch.randn(BATCH, 3, 16, 16),
        attention_mask=torch.ones(BATCH, SEQUENCE, dtype=torch.long), return_loss=True,
    )  # fmt: skip


def whisper() -> Example:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, dropout=0.0, decoder_start_token_id=1, **_PADDING,
    )  # fmt: skip
    features = torch.randn(BATCH, 8, 32)
    return _hugging_face("WhisperForConditionalGeneration", config, input_features=features, labels=tokens(BATCH, 12))


# -- plain modules -----------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions (He et al. 2015, arXiv:1512.03385), as torchvision has it."""

    def __init__(self, channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """torchvision's ResNet with bottlenecks; `layers` (3, 4, 6, 3) and width 64 is ResNet-50."""

    def __init__(self, layers=(3, 4, 6, 3), width=64, classes=1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = width
        for number, count in enumerate(layers):
            blocks = []
            for index in range(count):
                blocks.append(Bottleneck(channels, width << number, 2 if number and not index else 1))
                channels = 4 * (width << number)
            setattr(self, f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def resnet() -> Example:
    torch.manual_seed(0)
    model = ResNet((1, 1, 1, 1), 4, 10)
    return Example(model, torch.randn(BATCH, 3, 32, 32), F.cross_entropy, tokens(BATCH, below=10))


def _double(channels: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015, arXiv:1505.04597): pooling down, transposed convolutions up, skips between."""

    def __init__(self, channels=3, width=64, classes=2, depth=4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.first = _double(channels, width)
        self.down = nn.ModuleList(_double(a, b) for a, b in zip(widths, widths[1:]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:]))
        self.join = nn.ModuleList(_double(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, join in zip(reversed(self.up), reversed(self.join)):
            x = join(torch.cat([kept.pop(), up(x)], dim=1))
        return self.last(x)


def unet() -> Example:
    torch.manual_seed(0)
    return Example(
        UNet(width=4, depth=2), torch.randn(BATCH, 3, 16, 16), F.cross_entropy, tokens(BATCH, 16, 16, below=2)
    )


class DLRM(nn.Module):
    """Embeddings of categories, their products with each other and with dense features (Naumov et al. 2019)."""

    def __init__(self, tables=(50,) * 4, dimension=8, dense=13, bottom=(32,), top=(32,)) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dimension) for rows in tables)
        self.bottom = _layers((dense, *bottom, dimension))
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = _layers((dimension + pairs, *top, 1))
        places = torch.tril_indices(len(tables) + 1, len(tables) + 1, -1)
        self.register_buffer("rows", places[0])
        self.register_buffer("columns", places[1])

    def forward(self, dense, categories):
        x = self.bottom(dense)
        features = torch.stack([x, *(table(categories[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.rows, self.columns]], dim=1)).squeeze(-1)


def _layers(widths) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in zip(widths, widths[1:]):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def dlrm() -> Example:
    torch.manual_seed(0)
    clicks = torch.randint(0, 2, (BATCH,)).float()
    inputs = (torch.randn(BATCH, 13), tokens(BATCH, 4, below=50))
    return Example(DLRM(), inputs, F.binary_cross_entropy_with_logits, clicks)


class Block(nn.Module):
    """nanoGPT's transformer block (Karpathy), its attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_out = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """A GPT as nanoGPT writes it, its head tied to the token embedding; gives (logits, loss)."""

    def __init__(self, vocabulary=VOCABULARY, width=32, heads=4, layers=2, positions=SEQUENCE) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits (batch, sequence, vocabulary)."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def nano_gpt() -> Example:
    torch.manual_seed(0)
    return Example(NanoGPT(), tokens(), token_loss, tokens())


HUGGING_FACE: dict[str, Callable[[], Example]] = {
    "GPT-2": gpt2, "GPT-NeoX": gpt_neox, "Llama-3": llama, "Qwen-2": qwen2, "Qwen-3": qwen3, "Mistral": mistral,
    "Mixtral": mixtral, "Gemma-2": gemma2, "Phi-3": phi3, "BERT": bert, "T5": t5, "ViT": vit, "CLIP": clip,
    "Whisper": whisper, "Mamba": mamba,
}  # fmt: skip
PLAIN: dict[str, Callable[[], Example]] = {"ResNet-50": resnet, "U-Net": unet, "DLRM": dlrm, "nanoGPT": nano_gpt}


# -- comparison with eager PyTorch -------------------------------------------------------------------------------------


def arguments_of(example: Example) -> tuple[tuple, dict]:
    """Positional and keyword arguments of the module's forward."""
    if isinstance(example.inputs, dict):
        return (), example.inputs
    return (example.inputs if isinstance(example.inputs, tuple) else (example.inputs,)), {}


def state_of(imported: Any, **inputs: Any) -> dict[str, Any]:
    """State and inputs of an imported graph: what the module holds, then what is given, the rest as it starts."""
    from sbp.initial import draw_all

    return {**draw_all(imported.graph), **imported.state_arrays(), **inputs}


def feeds_of(example: Example, imported: Any) -> dict[str, Any]:
    """The graph's inputs and state, holding what the example and its module hold."""
    positional, keyword = arguments_of(example)
    feeds = state_of(imported)
    for name, place in imported.inputs.items():
        found = example.targets if isinstance(place, tuple) else (keyword if isinstance(place, str) else positional)
        feeds[name] = (found if isinstance(found, torch.Tensor) else found[place]).numpy()
    return feeds


def errors_against_eager(example: Example, imported: Any) -> tuple[float, float]:
    """Largest differences of the loss, and of gradients and running statistics, relative to the largest element.

    The graph runs in float64, PyTorch in the module's own float32. It was imported with SGD of rate 1, so that a
    parameter's old value less its new one is its gradient. Gradients that are zero but for rounding are measured
    against a hundredth of the largest one.
    """
    import copy

    from sbp.interpreter import evaluate

    feeds = feeds_of(example, imported)
    found = evaluate(imported.graph, feeds)
    module = copy.deepcopy(example.module).train()
    positional, keyword = arguments_of(example)
    output = module(*positional, **keyword)
    loss = output.loss if example.loss is None else example.loss(output, example.targets)
    loss.backward()
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    expected = {name: item.grad for name, item in parameters.items() if item.grad is not None}
    assert set(expected) == {name for name in imported.graph.updates if name in parameters}
    usual = max(float(gradient.abs().max()) for gradient in expected.values())
    worst = 0.0
    for name, gradient in expected.items():
        difference = abs(feeds[name] - found[name] - gradient.numpy()).max()
        worst = max(worst, difference / max(float(gradient.abs().max()), 1e-2 * usual))
    for name in set(imported.graph.updates) & set(buffers):
        difference = abs(found[name] - buffers[name].numpy()).max()
        worst = max(worst, difference / max(float(buffers[name].abs().max()), 1e-6))
    value = float(loss.detach())
    return abs(float(found[imported.outputs["loss"]]) - value) / abs(value), worst
