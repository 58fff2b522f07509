"""Colours of SBPs and of kinds, the same in HTML and in figures."""

from __future__ import annotations

from sbp.layout import SBP, Broadcast, Split

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_SPLITS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#5b5ea6", "#117733")
_BROADCAST = "#9a9a9a"
_PARTIAL = "#d55e00"

KINDS = {
    "parameter": "#0072b2",
    "optimizer": "#56b4e9",
    "buffer": "#5b5ea6",
    "input": "#117733",
    "activation": "#009e73",
    "gradient": "#cc79a7",
    "boxing": "#d55e00",
    "workspace": "#e69f00",
}

PHASES = {"forward": "#0072b2", "backward": "#009e73", "optimizer": "#56b4e9", "local": "#9a9a9a"}

COLLECTIVES = {
    "all_reduce": "#d55e00",
    "all_gather": "#e69f00",
    "reduce_scatter": "#cc79a7",
    "all_to_all": "#f0e442",
}


def sbp_colour(sbp: SBP) -> str:
    """Splits by their dimension, B grey, P orange."""
    if isinstance(sbp, Split):
        return _SPLITS[sbp.axis % len(_SPLITS)]
    return _BROADCAST if isinstance(sbp, Broadcast) else _PARTIAL
