"""Small files in the format of CIFAR-10's binary version, and their digests in place of the published ones."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from lrrn.datasets import cifar


def write_cifar(root: Path, n: int = 20, seed: int = 0) -> Path:
    """Write files of ``n`` images each: noise whose mean colour tells the class. Return their folder."""
    folder = root / cifar.FOLDER
    folder.mkdir(parents=True)
    chance = np.random.default_rng(seed)
    for file in cifar.MD5:
        labels = np.arange(n, dtype=np.uint8) % 10
        shade = np.stack([20 * labels, 100 + 10 * labels, 200 - 15 * labels], 1)[:, :, None]
        pixels = (shade + chance.integers(0, 30, (n, 3, 1024))).astype(np.uint8)
        (folder / file).write_bytes(np.concatenate([labels[:, None], pixels.reshape(n, -1)], 1).tobytes())
    return folder


def publish_cifar(monkeypatch, folder: Path) -> Path:
    """Make the digests of the files in a folder the expected ones."""
    for file in cifar.MD5:
        monkeypatch.setitem(cifar.MD5, file, hashlib.md5((folder / file).read_bytes()).hexdigest())
    return folder
