"""Passes over the logical graph: functions from one graph to another."""

from sbp.passes.precision import PRECISIONS, Precision, with_precision
from sbp.passes.replay import copy_node, replay

__all__ = ["PRECISIONS", "Precision", "copy_node", "replay", "with_precision"]
