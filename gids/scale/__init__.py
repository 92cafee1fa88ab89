"""A model of training on many ranks: what an epoch reads, sends and takes. Called by `gids scale`.

Counts are measured on the dataset by sampling in one process; bandwidths are given. See
docs/internals/scale.md.
"""

from gids.scale.curves import Curves, Setting, measure
from gids.scale.model import MODES, Prediction, Rates, Work, predict, predict_all

__all__ = ["MODES", "Curves", "Prediction", "Rates", "Setting", "Work", "measure", "predict", "predict_all"]
