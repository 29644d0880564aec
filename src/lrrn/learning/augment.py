"""Data augmentation: small random shifts of images at every step, a function of seed, step and sample only, on all devices."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def image_side(n_features: int) -> int:
    """Return the side length of a square image with this number of features; raise if there is none."""
    side = math.isqrt(n_features)
    if side * side != n_features:
        raise ValueError(f"shifts need samples that are square images; {n_features} features make none. Use shifts=0")
    return side


def shifted(x: Tensor, rows: Tensor, moment: int | Tensor, seed: int, reach: int) -> Tensor:
    """Return images shifted by up to ``reach`` pixels vertically and horizontally, padded with zeros.

    ``x`` has shape (n, side * side), ``rows`` are the indices of the samples, and ``moment`` is the index of the step.
    """
    side, span = image_side(x.shape[1]), 2 * reach + 1
    noise = _mixed(_mixed(rows + moment * 0x5851F42D) + seed)
    down, right = noise % span - reach, noise // span % span - reach  # (n,)
    pixels = torch.arange(side, device=x.device)
    y_from, x_from = pixels - down[:, None], pixels - right[:, None]  # (n, side)
    inside = ((y_from >= 0) & (y_from < side))[:, :, None] & ((x_from >= 0) & (x_from < side))[:, None, :]
    source = y_from.clamp(0, side - 1)[:, :, None] * side + x_from.clamp(0, side - 1)[:, None, :]
    return x.gather(1, source.flatten(1)) * inside.flatten(1)


def _mixed(key: Tensor) -> Tensor:
    """Hash 32-bit integers (two rounds of multiply and xor-shift). They are held in int64, so that all devices agree."""
    key = key & 0xFFFFFFFF
    key = ((key ^ (key >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    key = ((key ^ (key >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return key ^ (key >> 16)
