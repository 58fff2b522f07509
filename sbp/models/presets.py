"""Models by name, in their published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
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


def names() -> tuple[str, ...]:
    """Every name that stands for a model: published ones, then `tiny-NAME`."""
    return (*PRESETS, *(f"tiny-{name}" for name in TINY))


def is_preset(name: str) -> bool:
    """Whether the name stands for a model."""
    return name in names()


def config_named(name: str) -> Config:
    """The configuration of a preset (`"gpt2"`), of a tiny one (`"tiny-gpt2"`); unknown names raise `GraphError`."""
    if name in PRESETS:
        return PRESETS[name]
    if is_preset(name):
        return TINY[name.removeprefix("tiny-")]
    near = get_close_matches(name, names())
    hint = f"did you mean {near[0]}? Known" if near else "known"
    raise GraphError(f"there is no model {name!r}; {hint} are {', '.join(names())}.")


def preset_sizes(name: str) -> dict[str, Any]:
    """Size -> value of a preset's configuration, the names that `build` and `--size` replace."""
    return asdict(config_named(name))


def size_text(name: str, value: Any) -> str:
    """`layers=12`, `widths=8x16x4` as `--size` reads them; long tuples are summed up: `tables=26x(3..10131227)`."""
    if isinstance(value, (tuple, list)):
        long = len(value) > 6
        return f"{name}={len(value)}x({min(value)}..{max(value)})" if long else f"{name}={'x'.join(map(str, value))}"
    return f"{name}={value}"


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
    module: Module = replace(config, **overrides).build()
    return called(module, model) if isinstance(model, str) else module


def called(module: Module, name: str) -> Module:
    """The module, which plans and reports call so in place of its class."""
    module._preset = name
    return module


@lru_cache(maxsize=1)
def _counted() -> dict[str, int]:
    return {name: config.build().count_parameters() for name, config in PRESETS.items()}


def presets() -> dict[str, int]:
    """Names of all published models with their parameter counts."""
    return dict(_counted())
