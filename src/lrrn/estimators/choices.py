"""What a classifier chooses from its data before training, for parameters that are None."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lrrn.estimators import noise, robust
from lrrn.estimators.robust import Array, Linear
from lrrn.runtime import ranks


def choose(model: Any, features: Array, label: Array, weight: Array | None, seed: int) -> Linear | None:
    """Set ``chosen_`` of a classifier; return a linear model if that takes the place of a trained network.

    Parameters
    ----------
    model : LRRNClassifier
        With its scaling already fitted.
    features, label, weight
        Unscaled features, numbers of classes, weights of the rows. Rows of weight zero are left out.
    seed : int
        For the choice of held-out rows.
    """
    keep = np.arange(len(label)) if weight is None else np.flatnonzero(weight > 0)

    def scaled(rows: Array) -> Array:
        return np.asarray(model.scaling.apply(features[rows], torch.float64, torch.device("cpu")).numpy())

    if model.eps is not None:
        return robust.choose_classifier(model, scaled(keep), label[keep], None if weight is None else weight[keep], seed)
    undecided = model.decoupled_weight_decay is None and model.optimizer in (None, "adamw")
    if undecided and model._use("objective") == "contrastive" and len(keep) > 0:
        some = noise.sample(keep)
        # ranks may round differently, and must train alike
        found = ranks.current().on_main(lambda: noise.decay(noise.label_noise(scaled(some), label[some]), len(keep)))
        if found > 0:
            chosen = {"optimizer": "adamw", "decoupled_weight_decay": found}
            model.chosen_ = {name: value for name, value in chosen.items() if getattr(model, name) is None}
    return None
