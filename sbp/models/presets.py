"""Models by name, in their published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from sbp.errors import GraphError
from sbp.models.bert import BertConfig
from sbp.models.dlrm import CRITEO_KAGGLE, DLRMConfig
from sbp.models.gpt import GPTConfig
from sbp.models.llama import LlamaConfig
from sbp.models.mlp import MLPConfig
from sbp.models.resnet import ResNetConfig
from sbp.models.vit import ViTConfig
from sbp.nn.module import Module

Config = GPTConfig | LlamaConfig | BertConfig | ViTConfig | ResNetConfig | DLRMConfig | MLPConfig

PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "mlp": MLPConfig(),
        "gpt2": GPTConfig(),
        "gpt2-medium": GPTConfig(layers=24, heads=16, hidden=1024),
        "gpt2-large": GPTConfig(layers=36, heads=20, hidden=1280),
        "gpt2-xl": GPTConfig(layers=48, heads=25, hidden=1600),
        "gpt3-175b": GPTConfig(layers=96, heads=96, hidden=12288, positions=2048),
        "bert-base": BertConfig(layers=12, heads=12, hidden=768, intermediate=3072),
        "bert-large": BertConfig(),
        "llama-2-7b": LlamaConfig(kv_heads=32, intermediate=11008, vocabulary=32000, positions=4096, theta=10000.0),
        "llama-3-8b": LlamaConfig(),
        "llama-3-70b": LlamaConfig(layers=80, heads=64, hidden=8192, intermediate=28672),
        "llama-3-405b": LlamaConfig(layers=126, heads=128, hidden=16384, intermediate=53248),
        "vit-b": ViTConfig(layers=12, heads=12, hidden=768, intermediate=3072),
        "vit-l": ViTConfig(),
        "vit-h": ViTConfig(layers=32, hidden=1280, intermediate=5120, patch=14),
        "resnet-50": ResNetConfig(),
        "resnet-101": ResNetConfig(blocks=(3, 4, 23, 3)),
        "resnet-152": ResNetConfig(blocks=(3, 8, 36, 3)),
        "dlrm": DLRMConfig(),
        "dlrm-kaggle": DLRMConfig(tables=CRITEO_KAGGLE, width=16, bottom=(13, 512, 256, 64, 16), top=(512, 256, 1)),
    }
)
"""Published sizes; sources are named in the modules of the families."""

TINY: Mapping[str, Config] = MappingProxyType(
    {
        "mlp": MLPConfig((12, 16, 9, 7)),
        "gpt2": GPTConfig(layers=2, heads=4, hidden=16, vocabulary=61, positions=12, intermediate=24),
        "llama-3": LlamaConfig(
            layers=2, heads=4, kv_heads=2, hidden=16, intermediate=24, vocabulary=61, positions=12, theta=100.0
        ),
        "bert": BertConfig(
            layers=2, heads=4, hidden=16, intermediate=24, vocabulary=61, positions=12, next_sentence=True
        ),
        "vit": ViTConfig(layers=2, heads=4, hidden=16, intermediate=24, image=12, patch=4, classes=7),
        "resnet": ResNetConfig(blocks=(1, 2), width=4, image=16, classes=7),
        "dlrm": DLRMConfig(tables=(5, 11, 3), width=8, bottom=(6, 10, 8), top=(12, 1), lookups=2),
    }
)
"""One tiny configuration per family, for tests and demonstrations: they run in milliseconds on NumPy."""


def config_named(name: str) -> Config:
    """The configuration of a preset (`"gpt2"`), of a tiny one (`"tiny-gpt2"`); unknown names raise `GraphError`."""
    if name in PRESETS:
        return PRESETS[name]
    if name.startswith("tiny-") and name[5:] in TINY:
        return TINY[name[5:]]
    near = get_close_matches(name, PRESETS)
    hint = f"did you mean {near[0]}? Known" if near else "known"
    raise GraphError(f"there is no model {name!r}; {hint} are {', '.join(PRESETS)}.")


def build(model: str | Config, **overrides: Any) -> Module:
    """The module of a preset's name or a configuration, with some of its sizes replaced.

    >>> build("gpt2", layers=4, heads=4, hidden=256).count_parameters()
    16282112

    Raises
    ------
    GraphError
        An unknown name, or an override that the configuration does not have.
    """
    config = config_named(model) if isinstance(model, str) else model
    known = [item.name for item in fields(config)]
    unknown = [key for key in overrides if key not in known]
    if unknown:
        raise GraphError(f"{type(config).__name__} has no size {', '.join(unknown)}; it has {', '.join(known)}.")
    return replace(config, **overrides).build()


@lru_cache(maxsize=1)
def _counted() -> dict[str, int]:
    return {name: config.build().count_parameters() for name, config in PRESETS.items()}


def presets() -> dict[str, int]:
    """Names of all published models with their parameter counts."""
    return dict(_counted())
