"""Data augmentation: random shifts and flips of images at every step, functions of seed, step and sample, on all devices."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def shape_of_images(n_features: int, given: tuple[int, int, int] | None = None) -> tuple[int, int, int]:
    """Return the shape of images: the one given, or that of a square one with this number of features; raise if none is."""
    side = math.isqrt(n_features)
    if given is None and side * side != n_features:
        raise ValueError(
            f"shifts and flips need samples that are images; {n_features} features make no square image. "
            "Give image_shape, or shifts=0 and flips=False"
        )
    return (1, side, side) if given is None else given


def shifted(
    x: Tensor, rows: Tensor, moment: int | Tensor, seed: int, reach: int, given: tuple[int, int, int] | None = None
) -> Tensor:
    """Return images shifted by up to ``reach`` pixels vertically and horizontally, padded with zeros.

    ``x`` has shape (n, channels * height * width), ``rows`` are the indices of the samples, and ``moment`` is the index of the
    step. All channels of an image move together. Without a given shape, images are square and have one channel.
    """
    (channels, height, width), span = shape_of_images(x.shape[1], given), 2 * reach + 1
    noise = _noise(rows, moment, seed)
    down, right = noise % span - reach, noise // span % span - reach  # (n,)
    y_from = torch.arange(height, device=x.device) - down[:, None]  # (n, height)
    x_from = torch.arange(width, device=x.device) - right[:, None]  # (n, width)
    inside = ((y_from >= 0) & (y_from < height))[:, :, None] & ((x_from >= 0) & (x_from < width))[:, None, :]
    source = y_from.clamp(0, height - 1)[:, :, None] * width + x_from.clamp(0, width - 1)[:, None, :]
    if channels == 1:
        return x.gather(1, source.flatten(1)) * inside.flatten(1)
    source, inside = (part.flatten(1)[:, None].expand(-1, channels, -1) for part in (source, inside))
    return (x.view(len(x), channels, -1).gather(2, source) * inside).flatten(1)


def flipped(x: Tensor, rows: Tensor, moment: int | Tensor, seed: int, given: tuple[int, int, int] | None = None) -> Tensor:
    """Return images of which about half, chosen independently of their shifts, are mirrored left to right.

    Arguments are as in :func:`shifted`.
    """
    channels, height, width = shape_of_images(x.shape[1], given)
    # a further round: the remainders of the noise itself are the shifts
    chosen = _mixed(_noise(rows, moment, seed) + 0x9E3779B9) & 1 == 1  # (n,)
    mirrored = x.view(len(x), channels * height, width).flip(-1).flatten(1)
    return torch.where(chosen[:, None], mirrored, x)


def _noise(rows: Tensor, moment: int | Tensor, seed: int) -> Tensor:
    """Return a random 32-bit integer for each sample."""
    return _mixed(_mixed(rows + moment * 0x5851F42D) + seed)


def _mixed(key: Tensor) -> Tensor:
    """Hash 32-bit integers (two rounds of multiply and xor-shift). They are held in int64, so that all devices agree."""
    key = key & 0xFFFFFFFF
    key = ((key ^ (key >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    key = ((key ^ (key >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return key ^ (key >> 16)
