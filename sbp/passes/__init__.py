"""Passes over the logical graph: functions from one graph to another."""

from sbp.passes.precision import PRECISIONS, Precision, with_precision
from sbp.passes.recompute import block_of, with_recompute
from sbp.passes.replay import copy_node, replay

__all__ = ["PRECISIONS", "Precision", "block_of", "copy_node", "replay", "with_precision", "with_recompute"]
