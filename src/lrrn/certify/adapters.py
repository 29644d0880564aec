"""Other people's attacks on our networks: what they see is an ordinary torch module."""

from __future__ import annotations

import warnings
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from lrrn.network import LRRN


class FittedClassifier(Protocol):
    """What an adapter needs to know of :class:`lrrn.LRRNClassifier`."""

    network_: LRRN
    offset_in_: Any
    scale_in_: float
    objective: str


@final
class Scores(nn.Module):
    """Inputs of any shape, flattened and scaled as the model was trained, to outputs; solved in float64.

    Parameters
    ----------
    model : LRRN or LRRNClassifier
        A network, or a fitted classifier whose prediction is its network's largest output.
    """

    offset: Tensor

    def __init__(self, model: LRRN | FittedClassifier) -> None:
        super().__init__()
        if isinstance(model, LRRN):
            self.net, offset, self.scale = model, torch.zeros(()), 1.0
        else:
            if model.objective == "class_energy":
                raise ValueError("objective 'class_energy' predicts by energies, not by the outputs this adapter shows")
            self.net, offset, self.scale = model.network_, torch.as_tensor(model.offset_in_), model.scale_in_
        self.register_buffer("offset", offset.to(device=self.net.W[0].device, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, of shape (n, d_L), in the dtype of ``x``."""
        flat = x.reshape(len(x), -1).to(torch.float64)
        return self.net((flat - self.offset) / self.scale).to(x.dtype)


def as_foolbox(model: LRRN | FittedClassifier, bounds: tuple[float, float]) -> Any:
    """Show a network or a fitted classifier to foolbox.

    Parameters
    ----------
    model : LRRN or LRRNClassifier
        Perturbations are in the units of the classifier's X, whatever scaling it learnt.
    bounds : (lo, hi)
        The interval inputs live in; foolbox's attacks stay inside.

    Returns
    -------
    foolbox.PyTorchModel
        For inputs of shape (n, d_0) or images with as many pixels.
    """
    try:
        with warnings.catch_warnings():
            # foolbox 3.3 imports from a place that SciPy has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            import foolbox
    except ImportError as error:
        raise ImportError("as_foolbox needs foolbox, which is not installed; use pip install 'lrrn[attacks]'") from error
    scores = Scores(model).eval()
    # without a device foolbox would move the network to the one it likes best
    return foolbox.PyTorchModel(scores, bounds=bounds, device=scores.net.W[0].device)
