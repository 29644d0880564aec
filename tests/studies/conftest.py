"""Data that the tests of studies share."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from lrrn import datasets


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Small files in place of MNIST; there are no others."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    place = folder / "MNIST" / "raw"
    place.mkdir(parents=True)
    for split, n in (("train", 72), ("test", 20)):
        labels = np.arange(n) % 10
        pictures = np.clip(rng.normal(20 * labels[:, None, None], 40, (n, 28, 28)), 0, 255)
        for stem, array in zip(datasets.FILES[split], (pictures, labels), strict=True):
            head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (place / stem).write_bytes(head + array.astype(np.uint8).tobytes())
    return folder
