"""AutoAttack (Croce and Hein, 2020) in the Euclidean norm, composed of torchattacks' implementations.

The four attacks are torchattacks', in AutoAttack's order and with its published numbers of steps and queries; torchattacks' own
ensemble takes a tenth of the steps. Each attack gets the images that earlier attacks, at this and at smaller perturbation
sizes, did not break. A success counts only if the classifier's own prediction is wrong there.

Images are float32, since FAB converts to it and cannot mix it with float64. Models compute in float64, or, as
:func:`lrrn.attacks.as_image_model` says, in float32; predictions, which decide, are in float64. torchattacks keeps images in
[0, 1]. To attack without that limit, the interval [-eps, 1 + eps], which no perturbation of norm eps leaves, is mapped to
[0, 1].
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Array = NDArray[Any]
logger = logging.getLogger("lrrn.attacks")

BATCH = {"cpu": 250, "cuda": 500}
"""Images per batch, by device."""
SLACK = 1e-5
"""Tolerance, relative to eps, for the growth of a perturbation by rounding to float32."""


def parts(model: nn.Module, n_classes: int, eps: float, steps: int = 100, queries: int = 5000, seed: int = 0) -> dict[str, Any]:
    """Return torchattacks' attacks by AutoAttack's names; ``steps`` are those of APGD and FAB, ``queries`` those of Square."""
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
    clip: bool = True,
    **effort: int,
) -> dict[str, Any]:
    """Attack the images whose known distance is above eps, and lower in place the distances of those broken.

    Parameters
    ----------
    model : nn.Module
        From images of shape (n, *image) to scores, as returned by :func:`lrrn.attacks.as_image_model`.
    predict : callable
        From rows of X to labels. It decides whether an attack has succeeded.
    X : array of shape (n, n_features)
    y, labels : arrays of shape (n,)
        True labels as ``predict`` returns them, and as indices of scores.
    distances : float array of shape (n,)
        Distances of the nearest successful attacks so far, ``inf`` where there is none.
    eps : float
        Size of the perturbations.
    image : (int, int, int)
        Channels, height and width.
    clip : bool, default=True
        Whether attacked images stay in [0, 1].
    **effort : int
        Steps, queries and seed, as in :func:`parts`.

    Returns
    -------
    dict
        For each attack, the number of images attacked and broken, the seconds taken and, if it raised, the error.
    """
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    images = torch.from_numpy(np.asarray(X, dtype=np.float32)).reshape(-1, *image).to(device)
    n_classes = model(images[:1]).shape[-1]
    if n_classes < 4:
        raise ValueError(f"the targeted loss of AutoAttack needs at least 4 classes; got {n_classes}")
    numbers = torch.from_numpy(np.asarray(labels)).to(device)
    beyond = 0.0 if clip else eps
    target = model if clip else _Widened(model, beyond)
    images = (images + beyond) / (1 + 2 * beyond)
    done: dict[str, Any] = {}
    for name, attack in parts(target, n_classes, eps / (1 + 2 * beyond), **effort).items():
        start = time.perf_counter()
        left = np.flatnonzero(distances > eps * (1 + SLACK))
        done[name] = {"attacked": len(left)}
        size = BATCH[device.type]
        for rows in np.split(left, range(size, len(left), size)) if len(left) else []:
            try:
                moved = attack(images[rows], numbers[rows])
            except Exception as error:  # the result records the failure and holds for the other attacks
                done[name]["failed"] = f"{type(error).__name__}: {error}"
                logger.warning("%s failed at eps %g and does not count: %s", name, eps, done[name]["failed"])
                break
            moved = moved.detach().double().flatten(1).cpu().numpy() * (1 + 2 * beyond) - beyond
            norms = np.linalg.norm(moved - X[rows], axis=1)
            distances[rows] = np.minimum(distances[rows], np.where(predict(moved) != y[rows], norms, np.inf))
        done[name]["broken"] = int((distances[left] <= eps * (1 + SLACK)).sum())
        done[name]["seconds"] = time.perf_counter() - start
        logger.info("eps %g, %s: %s", eps, name, done[name])
    return done


@final
class _Widened(nn.Module):
    """A model of images with pixels in [-beyond, 1 + beyond], on images whose pixels were mapped to [0, 1]."""

    def __init__(self, model: nn.Module, beyond: float) -> None:
        super().__init__()
        self.model, self.beyond = model, beyond

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x * (1 + 2 * self.beyond) - self.beyond)
