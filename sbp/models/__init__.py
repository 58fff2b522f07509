"""Published models as descriptions: building one allocates nothing, so every size can be planned anywhere."""

from sbp.models.bert import Bert, BertConfig
from sbp.models.dlrm import DLRM, DLRMConfig
from sbp.models.gpt import GPT, GPTConfig
from sbp.models.llama import Llama, LlamaConfig
from sbp.models.mlp import MLP, MLPConfig
from sbp.models.presets import (
    PRESETS,
    TINY,
    build,
    called,
    config_named,
    is_preset,
    names,
    preset_sizes,
    presets,
    size_text,
)
from sbp.models.resnet import ResNet, ResNetConfig
from sbp.models.vit import ViT, ViTConfig

__all__ = [
    "Bert",
    "BertConfig",
    "DLRM",
    "DLRMConfig",
    "GPT",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "MLP",
    "MLPConfig",
    "PRESETS",
    "ResNet",
    "ResNetConfig",
    "TINY",
    "ViT",
    "ViTConfig",
    "build",
    "called",
    "config_named",
    "is_preset",
    "names",
    "preset_sizes",
    "presets",
    "size_text",
]
