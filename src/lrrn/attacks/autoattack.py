"""AutoAttack (Croce and Hein, 2020) in the Euclidean norm, made of torchattacks' parts.

The four attacks are torchattacks', in AutoAttack's order and with its published numbers of steps and queries; torchattacks' own
bundle takes a tenth of the steps. Each is given what the ones before it, at this size and at smaller ones, have left. A success
counts if the classifier's own prediction is wrong there.

Images are float32: FAB converts to it and cannot mix it with float64. The models compute in float64 all the same, so gradients
lose their last digits only. Attacks keep images in [0, 1].
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]
logger = logging.getLogger("lrrn.attacks")

BATCH = 250
"""Images attacked at once."""
SLACK = 1e-5
"""By how much, relative to eps, rounding to float32 may enlarge a perturbation."""


def parts(model: nn.Module, n_classes: int, eps: float, steps: int, queries: int, seed: int) -> dict[str, Any]:
    """Return torchattacks' attacks by AutoAttack's names."""
    try:
        import torchattacks
    except ImportError as error:
        raise ImportError("AutoAttack needs torchattacks, which is not installed; make .venv-bench/.bench has it") from error
    common = {"norm": "L2", "eps": eps, "n_restarts": 1, "seed": seed}
    return {
        "APGD-CE": torchattacks.APGD(model, steps=steps, loss="ce", **common),
        "APGD-T": torchattacks.APGDT(model, steps=steps, n_classes=n_classes, **common),
        "FAB-T": torchattacks.FAB(model, steps=steps, n_classes=n_classes, multi_targeted=True, **common),
        "Square": torchattacks.Square(model, n_queries=queries, **common),
    }


def autoattack(
    model: nn.Module,
    predict: Callable[[Array], Array],
    X: Array,
    y: Array,
    labels: Array,
    distances: Array,
    eps: float,
    image: tuple[int, int, int] = (1, 28, 28),
    steps: int = 100,
    queries: int = 5000,
    seed: int = 0,
) -> dict[str, Any]:
    """Attack the images with a distance above eps, lower in place the distances of those broken, and say what each part did.

    Parameters
    ----------
    model : nn.Module
        From images of shape (n, *image) to scores, as :func:`lrrn.attacks.as_image_model` makes it.
    predict : callable
        From rows of X to labels: what decides whether an attack has succeeded.
    X : array of shape (n, n_features)
    y, labels : arrays of shape (n,)
        Right labels as ``predict`` gives them, and as numbers of scores.
    distances : float array of shape (n,)
        Of the nearest attacks known so far, ``inf`` where there is none.
    eps : float
        Size of the perturbations.
    image : (int, int, int)
        Channels, height and width.
    steps, queries : int
        Of APGD and FAB, and of Square.
    seed : int

    Returns
    -------
    dict
        For each part how many images it attacked and broke, its seconds, and why it failed if it did.
    """
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    n_classes = model(torch.from_numpy(np.asarray(X[:1], dtype=np.float32)).reshape(-1, *image).to(device)).shape[-1]
    if n_classes < 4:
        raise ValueError(f"the targeted loss of AutoAttack needs at least 4 classes; got {n_classes}")
    images = torch.from_numpy(np.asarray(X, dtype=np.float32)).reshape(-1, *image).to(device)
    numbers = torch.from_numpy(np.asarray(labels)).to(device)
    done: dict[str, Any] = {}
    for name, attack in parts(model, n_classes, eps, steps, queries, seed).items():
        start = time.perf_counter()
        left = np.flatnonzero(distances > eps * (1 + SLACK))
        done[name] = {"attacked": len(left)}
        for rows in np.split(left, range(BATCH, len(left), BATCH)) if len(left) else []:
            try:
                moved = attack(images[rows], numbers[rows])
            except Exception as error:  # the figures are then those of the other parts, and the result says so
                done[name]["failed"] = f"{type(error).__name__}: {error}"
                break
            moved = moved.detach().double().flatten(1).cpu().numpy()
            norms = np.linalg.norm(moved - X[rows], axis=1)
            distances[rows] = np.minimum(distances[rows], np.where(predict(moved) != y[rows], norms, np.inf))
        done[name]["broken"] = int((distances[left] <= eps * (1 + SLACK)).sum())
        done[name]["seconds"] = time.perf_counter() - start
        logger.info("eps %g, %s: %s", eps, name, done[name])
    return done
