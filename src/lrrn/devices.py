"""Where to compute."""

from __future__ import annotations

import os

import torch


def choose_device(name: str) -> torch.device:
    """Turn "auto", "cpu" or "cuda" into a device that exists."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise ValueError(f"unknown device {name!r}; use 'auto', 'cpu' or 'cuda'")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for and no CUDA device is available; use 'cpu' or 'auto'")
    return torch.device(name)


def open_connections() -> None:
    """Let CUDA, if it has not begun yet, open a connection for each of many streams: those that share one wait for another."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
