"""Choice of devices and dtypes."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor


def choose_device(name: str) -> torch.device:
    """Convert "auto", "cpu", "cuda" or "cuda:0", "cuda:1", ... to an existing device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda") and not name.startswith("cuda:"):
        raise ValueError(f"unknown device {name!r}; use 'auto', 'cpu' or 'cuda'")
    if name != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for and no CUDA device is available; use 'cpu' or 'auto'")
    if name.startswith("cuda:") and name[5:] not in map(str, range(torch.cuda.device_count())):
        raise ValueError(
            f"there is no device {name!r}; CUDA devices go from 'cuda:0' to 'cuda:{torch.cuda.device_count() - 1}'"
        )
    return torch.device(name)


def open_connections() -> None:
    """Give each of up to 32 CUDA streams its own connection, so that they do not serialise; call it before CUDA starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def has_kernels(t: Tensor) -> bool:
    """Whether Triton kernels can run on the device of a tensor: they need Triton, and CUDA unless Triton is interpreted."""
    return find_spec("triton") is not None and (t.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def to_dtype(name: str) -> torch.dtype:
    """Convert "float32" or "float64" to a torch dtype."""
    known = {"float32": torch.float32, "float64": torch.float64}
    if name not in known:
        raise ValueError(f"unknown dtype {name!r}; use one of {', '.join(known)}")
    return known[name]
