"""PyTorch models imported and planned: `python benchmarks/torch_suite.py [MODEL ...]` prints a table.

Each model of `tests/torch_models.py` is built in small with random weights, imported, and compared with eager PyTorch
(loss and all gradients in float32 against the graph in float64); a plan of it on a few ranks, with the batch split, is
verified by running it. Then the model in its published size, on the meta device, is imported as a training step in
mixed precision, without dropout inside attention, and planned on meshes (8,), (2, 8) and (8, 8) of A100s. Seconds are
wall time, one number per mesh, as are gaps.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.nn.functional as F
import torch_models as models

from sbp.errors import SbpError
from sbp.frontend.model import TorchModel
from sbp.frontend.torch import Imported, import_module
from sbp.optim import SGD
from sbp.planner.auto_parallel import auto_parallel

MESHES = ((1, (8,)), (2, (2, 8)), (8, (8, 8)))
BATCH, LENGTH = 64, 2048


def _language(kind: str, config: Any, sequence: int) -> models.Example:
    import transformers

    ids = torch.zeros(BATCH, sequence, dtype=torch.long)
    return models.Example(getattr(transformers, kind)(config), {"input_ids": ids, "labels": ids.clone()})


def _hugging_face(name: str) -> models.Example:
    """The published sizes, which are mostly the configurations' defaults."""
    import transformers as t

    images = torch.zeros(BATCH, 3, 224, 224)
    if name == "ViT":
        return models.Example(t.ViTForImageClassification(t.ViTConfig(num_labels=1000)),
                              {"pixel_values": images, "labels": torch.zeros(BATCH, dtype=torch.long)})  # fmt: skip
    if name == "CLIP":
        ids = torch.zeros(BATCH, 77, dtype=torch.long)
        return models.Example(t.CLIPModel(t.CLIPConfig()), {"input_ids": ids, "pixel_values": images,
                                                            "return_loss": True})  # fmt: skip
    if name == "Whisper":
        config = t.WhisperConfig(d_model=1024, encoder_layers=24, decoder_layers=24, encoder_attention_heads=16,
                                 decoder_attention_heads=16, encoder_ffn_dim=4096, decoder_ffn_dim=4096)  # fmt: skip
        return models.Example(t.WhisperForConditionalGeneration(config), {
            "input_features": torch.zeros(BATCH, 80, 3000), "labels": torch.zeros(BATCH, 448, dtype=torch.long)
        })  # fmt: skip
    if name == "BERT":
        config = t.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                              attention_probs_dropout_prob=0.0)  # fmt: skip
        return _language("BertForMaskedLM", config, 512)
    if name == "T5":
        config = t.T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, decoder_start_token_id=0)
        return _language("T5ForConditionalGeneration", config, 512)
    if name == "Mamba":
        # Without the fused scan every step of the sequence is operators of its own, so the sequence stays short.
        return _language("MambaForCausalLM", t.MambaConfig(hidden_size=768, num_hidden_layers=4), 16)
    llama = t.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    made: dict[str, Callable[[], models.Example]] = {
        "GPT-2": lambda: _language("GPT2LMHeadModel", t.GPT2Config(
            n_embd=1600, n_layer=48, n_head=25, attn_pdrop=0.0), 1024),
        "GPT-NeoX": lambda: _language("GPTNeoXForCausalLM", t.GPTNeoXConfig(num_hidden_layers=44), LENGTH),
        "Llama-3": lambda: _language("LlamaForCausalLM", llama, LENGTH),
        "Qwen-2": lambda: _language("Qwen2ForCausalLM", t.Qwen2Config(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4), LENGTH),
        "Qwen-3": lambda: _language("Qwen3ForCausalLM", t.Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8), LENGTH),
        "Mistral": lambda: _language("MistralForCausalLM", t.MistralConfig(), LENGTH),
        "Mixtral": lambda: _language("MixtralForCausalLM", t.MixtralConfig(), LENGTH),
        "Gemma-2": lambda: _language("Gemma2ForCausalLM", t.Gemma2Config(num_hidden_layers=42, hidden_size=3584,
            intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8), LENGTH),
        "Phi-3": lambda: _language("Phi3ForCausalLM", t.Phi3Config(), LENGTH),
    }  # fmt: skip
    return made[name]()


def _plain(name: str) -> models.Example:
    if name == "ResNet-50":
        classes = torch.zeros(BATCH, dtype=torch.long)
        return models.Example(models.ResNet(), torch.zeros(BATCH, 3, 224, 224), F.cross_entropy, classes)
    if name == "U-Net":
        mask = torch.zeros(BATCH, 256, 256, dtype=torch.long)
        return models.Example(models.UNet(), torch.zeros(BATCH, 3, 256, 256), F.cross_entropy, mask)
    if name == "DLRM":
        module = models.DLRM((1_000_000,) * 26, 128, 13, (512, 256), (1024, 1024, 512, 256))
        inputs = torch.zeros(65536, 13), torch.zeros(65536, 26, dtype=torch.long)
        return models.Example(module, inputs, F.binary_cross_entropy_with_logits, torch.zeros(65536))
    ids = torch.zeros(BATCH, 1024, dtype=torch.long)
    return models.Example(models.NanoGPT(50304, 768, 12, 12, 1024), ids, models.token_loss, ids.clone())


def _imported(example: models.Example, **options: Any) -> Imported:
    return import_module(example.module, example.inputs, loss=example.loss, targets=example.targets, **options)


def small(name: str) -> tuple[float, str]:
    """Largest relative error against eager PyTorch, and whether a plan on 4 ranks computes the same."""
    example = {**models.PLAIN, **models.HUGGING_FACE}[name]()
    imported = _imported(example, optimizer=SGD(lr=1.0))
    error = max(models.errors_against_eager(example, imported))
    split = next(iter(imported.inputs))
    try:
        plan = auto_parallel(imported.graph, "cpu", nodes=1, mesh=(2, 2), pins={split: "S(0), B"}, time_limit=20)
        feeds = models.feeds_of(example, imported)
        found = plan.verify(feeds={key: feeds[key] for key in imported.graph.sources}, rtol=1e-6)
    except SbpError as problem:
        return error, f"{type(problem).__name__}: {problem}"
    return error, "yes" if found.passed else f"no: {found.first_wrong}"


def large(name: str) -> list[str]:
    """Operators, import seconds, unknown operators, plan seconds and gap of the published size."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = _plain(name) if name in models.PLAIN else _hugging_face(name)
    model = TorchModel(example.module, example.inputs, example.loss, example.targets, {"on_unknown": "replicate"})
    started = time.monotonic()
    imported = model.step(None, None, True, None, "mixed")  # kept by the model, so that plans do not import again
    seconds = time.monotonic() - started
    plans, gaps, statuses = [], [], []
    for nodes, mesh in MESHES:
        started = time.monotonic()
        try:
            plan = auto_parallel(model, "a100-80g", precision="mixed", nodes=nodes, mesh=mesh, time_limit=30)
            gaps.append(plan.gap)
            statuses.append(f"{plan.gap:.1%}")
        except SbpError as problem:
            statuses.append(type(problem).__name__.removesuffix("Error").lower())
        plans.append(f"{time.monotonic() - started:.1f}")
    return [
        str(len(imported.graph.nodes)),
        f"{seconds:.1f}",
        str(len(imported.replicated)),
        " ".join(plans),
        " ".join(statuses),
    ]


def main(arguments: list[str]) -> None:
    """Print the table, a line per model as it is done."""
    names = [*models.HUGGING_FACE, *models.PLAIN]
    unknown = set(arguments) - set(names)
    if unknown:
        sys.exit(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    columns = ("model", "operators", "import s", "unknown", "plan s", "gap", "error, small", "verified, small")
    table = Table(*columns)
    for name in names:
        if arguments and name not in arguments:
            continue
        error, verified = small(name)
        row = [name, *large(name), f"{error:.1e}", verified]
        table.add_row(*row)
        print(" | ".join(row), file=sys.stderr, flush=True)
    Console(width=150).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
