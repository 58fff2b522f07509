"""Replay: a given configuration of a given framework becomes a pinned plan, whose pipeline is simulated.

`predict(Configuration(...)) -> Prediction`; `validation(rows_of(paths))` does so for published runs.
"""

from sbp.planner.replay.configuration import Configuration, for_ranks
from sbp.planner.replay.prediction import Prediction, predict

__all__ = ["Configuration", "Prediction", "for_ranks", "predict"]
