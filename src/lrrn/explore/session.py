"""Computations of the explorer: functions of a fitted model and one image, independent of the web server.

Images are passed and returned as lists of values in [0, 1], row by row: grey values, or red, then green, then blue ones. Radii
and norms are in the default norm of the model.
"""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrrn.attacks import minimal_perturbation, strongest_perturbation
from lrrn.certificates.radius import certify_solution
from lrrn.estimators import LRRNClassifier, LRRNEnergyModel
from lrrn.explore.gallery import Gallery
from lrrn.linalg.layer_shape import LayerShape
from lrrn.network.solution import Solution, top_two
from lrrn.persistence.reference import ImageShape, Reference
from lrrn.qp import DEFAULT_TOL, row_norms
from lrrn.runtime.threads import blas_threads

Array = NDArray[Any]
Explorable = LRRNClassifier | LRRNEnergyModel

INSIDE, OUTSIDE = 0.9, 0.99
"""Energy quantiles of held-out samples: an input is in-distribution up to the first, out-of-distribution beyond the second."""
LEAST = 25
"""Smallest number of energies whose quantiles are compared with."""
NORMS = 41
"""Number of norms at which an attack is shown, including 0."""
BRIEF_NORMS, BEYOND = 9, 1.6
"""The same in large convolutional networks, and the largest norm in units of the nearest attack's, which is among them."""
BRIEF = {"steps": 10, "rivals": 2, "refine_steps": 5}
"""Effort of the search for the nearest attack in large convolutional networks: tens of seconds on two cores."""
DIGITS = 6
"""Digits of the pixels of an image that is chosen: their rounding must not show in its radius."""
LOCAL_UNITS = 400
"""Largest number of unknowns for local radii. Larger networks take too long per sample for interactive use."""
SHOWN_UNITS = 4096
"""Largest number of activations of a convolution to send, in whole channels; the others are only counted."""
BUDGET = 1.0
"""Time budget in seconds for the constants that local radii start from; the final radii do not depend on them."""


@final
class Session:
    """A fitted model that answers queries about one image at a time; held-out samples, to compare with, are optional."""

    def __init__(
        self, model: Explorable, image_shape: ImageShape, reference: Reference | None, gallery: Gallery | None = None
    ) -> None:
        self.model, self.image_shape, self.reference, self.gallery = model, image_shape, reference, gallery
        self.low, self.high = (0.0, 1.0) if reference is None else (reference.low, reference.high)
        self._net = model.network_
        self._energy = self._net.energy_snapshot(torch.float64)

    @property
    def n_pixels(self) -> int:
        """Number of values of an image: its pixels, times three in colour."""
        return math.prod(self.image_shape)

    @property
    def classes(self) -> list[str]:
        """The labels as text; none for an energy model."""
        return [str(label) for label in self.model.classes_] if isinstance(self.model, LRRNClassifier) else []

    @property
    def slow(self) -> bool:
        """Whether a proof and an attack take seconds each, so that the page waits until they are asked for."""
        by_outputs = isinstance(self.model, LRRNClassifier) and self.model.objective != "class_energy"
        return by_outputs and not self._energy.has_matrices

    def obstacles(self) -> dict[str, str | None]:
        """For each optional part of the page, the reason why the model does not support it; None where it does."""
        if isinstance(self.model, LRRNEnergyModel):
            reason = "An energy model has no labels: it separates in-distribution from out-of-distribution inputs."
            return {"scores": reason, "attack": reason, "clamp": reason, "local": reason}
        by_energy = self.model.objective == "class_energy"
        attack = (
            "This classifier predicts the label of least energy; the attacks follow network outputs." if by_energy else None
        )
        local = None
        if by_energy:
            local = "Labels of least energy have one certificate, made of those energies."
        elif not self._energy.has_matrices:
            local = (
                "A local radius needs a matrix of the size of all hidden units, and this network with convolutions has "
                f"{sum(self._energy.free_sizes):,}. The radius shown is proven all the same, by method spectral, and on "
                "request by method shared."
            )
        elif sum(self._energy.free_sizes) > LOCAL_UNITS:
            local = f"With more than {LOCAL_UNITS} hidden units a local radius takes too long to wait for."
        clamp = "Energy gaps of all labels take seconds in a network of this size." if self.slow else None
        return {"scores": None, "attack": attack, "clamp": clamp, "local": local}

    def analyse(self, pixels: Array) -> dict[str, Any]:
        """Predict, certify, rate the energy of and reconstruct an image: everything fast enough to update while drawing."""
        X = self._features(pixels)
        with blas_threads(1):
            x = self._seen(X)
            free = self._infer(x)
            answer: dict[str, Any] = {
                "solve": self._told(x, free),
                "energy": self._weighed(float(free.energy[0])),
                "activations": self._activations(free),
                "active": [int(np.count_nonzero(_plain(z[0]))) for z in free.activations],
                "reconstructions": self._reconstructed(free),
            }
            if isinstance(self.model, LRRNClassifier):
                by_energy = self.model.objective == "class_energy"
                clamped = None if self.slow else self._clamped_energies(x)
                scores = -clamped if by_energy and clamped is not None else free.output[0]
                best, second = top_two(scores)
                answer |= {
                    "scores": _plain(scores),
                    "prediction": int(best),
                    "margin": float(scores[best] - scores[second]),
                    "radius": float(self.model.certified_radius(X)[0]) if by_energy else self._followed(x, free),
                    "gaps": None if clamped is None else _plain(clamped - free.energy[0], 6),
                }
            else:
                answer["radius"] = float(self.model.certified_radius(X)[0])
        return answer

    def tighten(self, pixels: Array) -> dict[str, Any]:
        """Certify the label of an image by the tightest method, which takes a fraction of a second."""
        self._check("local")
        model = self.model
        assert isinstance(model, LRRNClassifier)
        X = self._features(pixels)
        # the looser radius is proven too, and the page has already shown it
        radius = max(float(model.certified_radius(X, method, BUDGET)[0]) for method in ("spectral", "local"))
        return {"radius": radius}

    def prove(self, pixels: Array) -> dict[str, Any]:
        """Certify the label of an image by method "shared", which takes seconds in a large convolutional network."""
        if not self.slow or not isinstance(self.model, LRRNClassifier):
            raise ValueError("This model's radii are proven without a request.")
        return {"radius": float(self.model.certified_radius(self._features(pixels), "shared")[0])}

    def image(self, index: int) -> dict[str, Any]:
        """Return an image of the gallery by its number: pixels, label and what was published about it."""
        if self.gallery is None:
            raise ValueError("There are no images to choose from by number; name some data with --samples.")
        n = len(self.gallery.X)
        if not 0 <= index < n:
            raise ValueError(f"{self.gallery.name} has images from 0 to {n - 1}; got {index}")
        pixels = (self.gallery.X[index].astype(np.float64) - self.low) / (self.high - self.low)
        label = None
        if self.gallery.y is not None and isinstance(self.model, LRRNClassifier):
            label = next(iter(np.flatnonzero(self.model.classes_ == self.gallery.y[index]).tolist()), None)
        return {"pixels": _plain(pixels.clip(0.0, 1.0), DIGITS), "label": label, **self.gallery.facts(index)}

    def clamp(self, pixels: Array, label: int) -> dict[str, Any]:
        """Clamp the output to a label; return the clamped energy and its effect on the layers below."""
        self._check("clamp")
        if not 0 <= label < len(self.classes):
            raise ValueError(f"label should be a number from 0 to {len(self.classes) - 1}; got {label}")
        with blas_threads(1):
            x = self._seen(self._features(pixels))
            free = self._infer(x)
            target = x.new_zeros((1, len(self.classes)))
            target[0, label] = 1
            clamped = self._infer(x, target)
        return {
            "label": label,
            "gap": float(clamped.energy[0] - free.energy[0]),
            "energy": float(clamped.energy[0]),
            "activations": self._activations(clamped),
            "reconstructions": self._reconstructed(clamped),
            "free": self._reconstructed(free),
        }

    def attack(self, pixels: Array, keep: bool) -> dict[str, Any]:
        """Attack an image at norms from 0 to well beyond the nearest change of label that is found.

        With ``keep``, grey values stay within the range of the data; the certificate does not require this.
        """
        self._check("attack")
        model, net = self.model, self._net
        X = self._features(pixels)
        box = (self._seen(np.full_like(X, self.low))[0], self._seen(np.full_like(X, self.high))[0]) if keep else None
        with blas_threads(1):
            x = self._seen(X)
            label = self._infer(x).output.argmax(-1)
            nearest = minimal_perturbation(net, x, label, clip=box, **(BRIEF if self.slow else {}))
            distance = float(nearest.distance[0])
            n = BRIEF_NORMS if self.slow else NORMS
            # where no change of label was found: the distance of the image from one with all pixels at the lower end
            reach = BEYOND * distance if math.isfinite(distance) else float(row_norms(self._seen(X - X + self.low) - x)[0])
            norms = torch.linspace(0.0, reach or 1.0, n, dtype=torch.float64, device=x.device)
            if self.slow:
                found, outputs = self._along(x, nearest.x, norms, distance, box)
            else:
                found = strongest_perturbation(net, x.expand(n, -1), label.expand(n), norms, clip=box)
                found, outputs = self._monotone(x, found, norms, label, nearest.x, distance)
        frames = (found.cpu().numpy() * model.scale_in_ + model.offset_in_ - self.low) / (self.high - self.low)
        return {
            "label": int(label[0]),
            "norms": _plain(norms * model._unit(), 6),
            "images": [_plain(frame) for frame in frames],
            "scores": [_plain(row) for row in outputs],
            "predictions": outputs.argmax(1).tolist(),
            "distance": distance * model._unit() if math.isfinite(distance) else None,
            "along": self.slow,
        }

    def _along(
        self, x: Tensor, nearest: Tensor, norms: Tensor, distance: float, box: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return the nearest attack at growing strength, the attack itself included, and the network's outputs there."""
        share = norms[:, None] / distance if math.isfinite(distance) else torch.zeros_like(norms)[:, None]
        found = x + share * (nearest - x)
        found[(share[:, 0] - 1).abs() < 1e-9] = nearest[0]
        if box is not None:
            found = found.clamp(*box)
        return found, self._infer(found).output

    def _monotone(
        self, x: Tensor, found: Tensor, norms: Tensor, label: Tensor, nearest: Tensor, distance: float
    ) -> tuple[Tensor, Tensor]:
        """For every norm, take the best attack of at most that norm; return its inputs and the network's outputs there."""
        candidates = torch.cat([found, nearest])
        sizes = row_norms(candidates - x)
        outputs = self._infer(candidates).output
        rest = outputs.clone()
        rest[:, label] = -math.inf
        lead = rest.amax(1) - outputs[:, label[0]]
        if not math.isfinite(distance):
            lead[-1] = -math.inf
        allowed = sizes <= norms[:, None] * (1 + 1e-12)
        best = torch.where(allowed, lead, -math.inf).argmax(1)
        return candidates[best], outputs[best]

    def _check(self, part: str) -> None:
        reason = self.obstacles()[part]
        if reason is not None:
            raise ValueError(reason)

    def _features(self, pixels: Array) -> Array:
        """Return an image as the row of features that the model was trained on."""
        return np.asarray(self.low + (self.high - self.low) * pixels, dtype=np.float64)[None]

    def _seen(self, X: Array) -> Tensor:
        """Return features as the network's input, after preprocessing."""
        return torch.as_tensor((X - self.model.offset_in_) / self.model.scale_in_).to(self._net.W[0].device)

    def _infer(self, x: Tensor, y: Tensor | None = None) -> Solution:
        # the page shows when a solve does not converge; a warning in the server's terminal would go unnoticed
        return self._net.infer(x, y, max_sweeps=self.model.max_sweeps, on_failure="ignore")

    def _followed(self, x: Tensor, free: Solution) -> float:
        """Return a radius that is fast enough to update while drawing, from an existing solution."""
        certificate = certify_solution(self._net, x, free, "spectral", "deployed", None, DEFAULT_TOL[torch.float64])
        return float(self.model.scaling.radius(certificate.radius, x)[0])

    def _clamped_energies(self, x: Tensor) -> Tensor:
        n = len(self.classes)
        return self._infer(x.expand(n, -1), torch.eye(n, dtype=x.dtype, device=x.device)).energy

    def _activations(self, solution: Solution) -> list[list[float]]:
        """Return the activations of every layer; of a convolution with many units, those of the first channels."""
        return [
            _plain(z[0, : self.shown_channels(layer) * math.prod(layer.out_shape[1:])])
            for layer, z in zip(self._net.layers, solution.activations, strict=True)
        ]

    @staticmethod
    def shown_channels(layer: LayerShape) -> int:
        """Return the number of channels of a layer whose activations are sent; all units of a layer that is no convolution."""
        channels, *sides = layer.out_shape
        return min(channels, max(1, SHOWN_UNITS // math.prod(sides))) if sides else channels

    def _reconstructed(self, solution: Solution) -> list[list[float] | None]:
        """Return the image reconstructed from each layer's activations alone; None where a layer has no reconstruction term."""
        images: list[list[float] | None] = []
        for layer, z in enumerate(solution.activations, 1):
            if any(beta == 0 for beta in self._energy.beta[:layer]):
                images.append(None)
                continue
            X = self._energy.reconstruct(z, layer).cpu().numpy()[0] * self.model.scale_in_ + self.model.offset_in_
            images.append(_plain((X - self.low) / (self.high - self.low)))
        return images

    def _told(self, x: Tensor, solution: Solution) -> dict[str, Any]:
        allowed = DEFAULT_TOL[torch.float64] * max(1.0, float(row_norms(self._energy.free(x).q)[0]))
        return {
            "sweeps": int(solution.n_sweeps[0]),
            "residual": float(solution.residual[0]),
            "allowed": allowed,
            "error": _finite(float(solution.error_bound[0])),
            "converged": bool(solution.converged[0]),
            "solver": ", then ".join(solution.solvers) or "closed form",
        }

    def _weighed(self, energy: float) -> dict[str, Any]:
        """Compare an energy with those of held-out samples, or with the threshold of an energy model."""
        weighed: dict[str, Any] = {"value": energy, "share": None, "verdict": None, "threshold": None}
        known = np.zeros(0) if self.reference is None else np.sort(self.reference.energies["samples"])
        if len(known) >= LEAST:
            share = float(np.searchsorted(known, energy) / len(known))
            verdict = "in-distribution" if share <= INSIDE else "unusual" if share <= OUTSIDE else "out-of-distribution"
            weighed |= {"share": share, "verdict": verdict}
        if isinstance(self.model, LRRNEnergyModel):
            threshold = -self.model.offset_
            weighed |= {"threshold": threshold, "verdict": "out-of-distribution" if energy > threshold else "in-distribution"}
        return weighed


def _plain(values: Any, digits: int = 4) -> list[float]:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return np.round(array.astype(np.float64), digits).tolist()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
