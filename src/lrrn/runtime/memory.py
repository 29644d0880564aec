"""Memory: how many samples are processed at once."""

from __future__ import annotations

import torch

NUMBERS = {"cpu": 2**22, "cuda": 2**26}
"""Numbers of inputs and activations that the samples of a chunk may have together; on a GPU at most."""
BYTES_A_NUMBER = 2048
"""Memory of a GPU for each of these numbers: certificates hold many vectors of the size of all units at once."""
SLOW = 8
"""Chunks of work that takes seconds per sample are smaller by this factor, so that they end, and are saved, sooner."""


def rows_at_once(sizes: tuple[int, ...], device: torch.device, slow: bool = False) -> int:
    """Return the number of samples in a chunk.

    It depends on the network and, for a GPU, on its memory, never on how much of it is free: chunks decide the last bits of
    results, so that a resumed run must have those of the run that it resumes.

    Parameters
    ----------
    sizes : tuple of int
        Widths of the input and of all layers of the network.
    device : torch.device
        Where it computes.
    slow : bool, default=False
        Whether a sample takes seconds on a CPU.
    """
    numbers = NUMBERS.get(device.type, NUMBERS["cpu"])
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory // BYTES_A_NUMBER
        numbers = min(numbers, max(NUMBERS["cpu"], 1 << (room.bit_length() - 1)))
    return max(1, numbers // (sum(sizes) * (SLOW if slow else 1)))
