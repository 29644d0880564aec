"""Small estimators, data for them, and perturbations that look for what would refute a certificate."""

from __future__ import annotations

import numpy as np
import torch

from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor

SMALL = dict(hidden_sizes=(8, 6), epochs=6, batch_size=16, device="cpu", random_state=0)


def classifier(**options) -> LRRNClassifier:
    return LRRNClassifier(**{**SMALL, "learning_rate": 0.02, **options})


def regressor(**options) -> LRRNRegressor:
    return LRRNRegressor(**{**SMALL, "learning_rate": 0.02, **options})


def energy_model(**options) -> LRRNEnergyModel:
    return LRRNEnergyModel(**{**SMALL, "learning_rate": 0.02, **options})


def blobs(n: int = 90, k: int = 3, noise: float = 0.5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = np.arange(n) % k
    return rng.normal(size=(k, 6))[y] + noise * rng.normal(size=(n, 6)), y


def curve(n: int = 80, n_targets: int = 1, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = 3 * rng.normal(size=(n, 5)) + 7
    y = 10 * np.abs(X @ rng.normal(size=(5, n_targets))) - 4
    return X, y[:, 0] if n_targets == 1 else y


def weights(model) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in getattr(model, "network_", model).parameters()])


def as_seen(model, X: np.ndarray) -> torch.Tensor:
    """What the network sees: features centred, and divided by the root of their mean variance."""
    if model.standardize:
        X = (X - model.offset_in_) / model.scale_in_
    return torch.as_tensor(X)


def moves(model, X: np.ndarray, reach: np.ndarray, lead) -> list[np.ndarray]:
    """Perturbations of norm ``reach``: random ones, and some that climb each of the functions ``lead`` makes of the output."""
    rng = np.random.default_rng(0)
    found = [rng.normal(size=X.shape) for _ in range(10)]
    found = [d / np.linalg.norm(d, axis=1, keepdims=True) * reach[:, None] for d in found]
    for j in range(model.network_.sizes[-1]):
        for sign in (1.0, -1.0):
            delta = np.zeros_like(X)
            for _ in range(3):
                x = as_seen(model, X + delta).requires_grad_()
                (slope,) = torch.autograd.grad(sign * lead(model.network_(x), j).sum(), x)
                delta = slope.numpy() / slope.norm(dim=1, keepdim=True).clamp(min=1e-12).numpy() * reach[:, None]
                found.append(delta)
    return found


def some_without_weight(n: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(n) % 4.0
