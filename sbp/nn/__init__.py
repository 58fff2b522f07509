"""Modules with PyTorch's names and argument order, which describe a program instead of running it."""

from sbp.nn.activation import GELU, Dropout, ReLU, Sigmoid, SiLU, Softmax, Tanh
from sbp.nn.attention import GroupedQueryAttention, MultiheadAttention, SelfAttention, merge_heads, split_heads
from sbp.nn.convolution import AdaptiveAvgPool2d, AvgPool2d, Conv2d, MaxPool2d
from sbp.nn.linear import Embedding, Flatten, Linear
from sbp.nn.loss import BCEWithLogitsLoss, CrossEntropyLoss, MSELoss, in_full_precision
from sbp.nn.module import Module, ModuleList, Parameter, Sequential
from sbp.nn.normalization import BatchNorm2d, GroupNorm, LayerNorm, RMSNorm

__all__ = [
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "GELU",
    "GroupNorm",
    "GroupedQueryAttention",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "SelfAttention",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "in_full_precision",
    "merge_heads",
    "split_heads",
]
