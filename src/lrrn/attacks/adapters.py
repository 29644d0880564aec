"""Adapters for attacks of other libraries, to which a network is an ordinary torch module."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, Protocol, final

import torch
from sklearn.exceptions import NotFittedError
from torch import Tensor, nn

from lrrn.attacks.slopes import Slopes
from lrrn.network import LRRN
from lrrn.network.checks import check_input


class FittedClassifier(Protocol):
    """The part of :class:`lrrn.LRRNClassifier` that an adapter uses."""

    network_: LRRN
    offset_in_: Any
    scale_in_: Any
    objective: str


@final
class Scores(nn.Module):
    """Module from inputs to outputs, differentiable once. Inputs are flattened and scaled as in training.

    Solves are in float64, or in networks of at least 512 units and on a GPU in float32.

    Parameters
    ----------
    model : LRRN or LRRNClassifier
        A network, or a fitted classifier whose prediction is its network's largest output. The network is copied: attacks leave
        no gradients in the original, and later training of the original has no effect here.
    shape : tuple of int, optional
        Shape of one input. By default any shape with the right number of entries.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, model: LRRN | FittedClassifier, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        if isinstance(model, LRRN):
            net, offset, scale = model, torch.zeros(()), torch.ones(())
        else:
            _check_fitted(model)
            if model.objective == "class_energy":
                raise ValueError("objective 'class_energy' predicts by energies, not by the outputs this adapter shows")
            net, offset, scale = model.network_, torch.as_tensor(model.offset_in_), torch.as_tensor(model.scale_in_)
        if net.sizes[-1] < 2:
            raise ValueError("an attack changes which output is largest, and this network has one")
        self.net = copy.deepcopy(net).requires_grad_(False)
        self._slopes: Slopes | None = None
        self.shape = None if shape is None else tuple(shape)
        self.register_buffer("offset", offset.to(device=net.W[0].device, dtype=torch.float64))
        self.register_buffer("scale", scale.to(device=net.W[0].device, dtype=torch.float64))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, of shape (n, d_L), in the dtype of ``x``."""
        if self.shape is not None and tuple(x.shape[1:]) != self.shape:
            raise ValueError(f"images must have shape (n, {', '.join(map(str, self.shape))}); got {tuple(x.shape)}")
        flat = x.reshape(len(x), -1).to(torch.float64)
        check_input(flat, self.net.sizes[0], self.net.image_shape)
        if self._slopes is None or self._slopes.device != self.offset.device:
            self._slopes = Slopes(self.net)  # what depends on the weights alone is computed once
        scores: Tensor = _Scores.apply((flat - self.offset) / self.scale, self._slopes)
        return scores.to(x.dtype)


def _check_fitted(model: Any) -> None:
    if hasattr(model, "network_"):
        return
    kind = type(model).__name__
    if hasattr(model, "fit"):
        raise NotFittedError(f"this {kind} is not fitted yet; call fit first")
    raise TypeError(f"model must be an lrrn.LRRN or a fitted LRRNClassifier; got {kind}")


@final
class _Scores(torch.autograd.Function):
    """Outputs, with gradients by one adjoint solve."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slopes: Slopes) -> Tensor:
        z, y = slopes.outputs(x.detach())
        ctx.slopes = slopes
        ctx.save_for_backward(z)
        return y

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (z,) = ctx.saved_tensors
        return ctx.slopes.gradient(ctx.slopes.coefficients(z, slopes[0])), None


def as_image_model(model: LRRN | FittedClassifier, shape: tuple[int, int, int]) -> Scores:
    """Wrap a network or a fitted classifier as a torch module that classifies images, for torchattacks and similar libraries.

    Parameters
    ----------
    model : LRRN or LRRNClassifier
        Perturbations are in the units of the classifier's X, before any scaling by ``standardize``.
    shape : (channels, height, width)
        Shape of one image; (1, height, width) for greyscale.

    Returns
    -------
    Scores
        A module from images of shape (n, channels, height, width) to outputs of shape (n, n_classes), in eval mode, on the
        device of the model. Outputs have the dtype of the images. Gradients are by implicit differentiation. Solves are in
        float64, or in networks of at least 512 units and on a GPU in float32.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape must be (channels, height, width), all at least 1; got {shape}")
    scores = Scores(model, shape)
    if math.prod(shape) != scores.net.sizes[0]:
        raise ValueError(f"shape {shape} has {math.prod(shape)} numbers, and the network has {scores.net.sizes[0]} inputs")
    return scores


def as_foolbox(model: LRRN | FittedClassifier, bounds: tuple[float, float]) -> Any:
    """Wrap a network or a fitted classifier for foolbox.

    Parameters
    ----------
    model : LRRN or LRRNClassifier
        Perturbations are in the units of the classifier's X, before any scaling by ``standardize``.
    bounds : (lo, hi)
        Interval of the inputs; foolbox's attacks stay inside.

    Returns
    -------
    foolbox.PyTorchModel
        For inputs of shape (n, d_0), or images with d_0 pixels.
    """
    try:
        with warnings.catch_warnings():
            # foolbox 3.3 imports from a deprecated module of SciPy
            warnings.simplefilter("ignore", DeprecationWarning)
            import foolbox
    except ImportError as error:
        raise ImportError("as_foolbox needs foolbox, which is not installed; use pip install 'lrrn[attacks]'") from error
    scores = Scores(model)
    # without a device, foolbox would move the network to its default device
    return foolbox.PyTorchModel(scores, bounds=bounds, device=scores.net.W[0].device)
