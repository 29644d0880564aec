"""Overview of a model, shown before the user draws: structure, filters, held-out samples, curves and histograms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.estimators import LRRNClassifier
from lrrn.explore.session import DIGITS, Session
from lrrn.network import LRRN, Conv
from lrrn.persistence.reference import Reference
from lrrn.reports.evaluation import auroc
from lrrn.reports.images import filters_of

Array = NDArray[Any]
SHOWN_FILTERS = 100
"""Largest number of filters shown per layer; the others look similar."""
BINS, POINTS = 48, 101
NO_REFERENCE = (
    "This file holds nothing of held-out samples to compare with, so pixels are taken to go from 0 to 1. Models saved by "
    "lrrn train do; or name some data with --samples."
)


def describe(session: Session, name: str) -> dict[str, Any]:
    """Describe a model, under a name for the page, its filters and its reference, by JSON values."""
    model, net = session.model, session.model.network_
    classifier = isinstance(model, LRRNClassifier)
    return {
        "name": name,
        "kind": "classifier" if classifier else "energy model",
        "objective": model._use("objective") if classifier else "free energy",
        "classes": session.classes,
        "shape": list(session.image_shape[-2:]),
        "channels": session.image_shape[0] if len(session.image_shape) == 3 else 1,
        "sizes": list(net.sizes),
        "architecture": architecture(net),
        "layers": [
            {"maps": list(layer.out_shape) if layer.convolves else None, "shown": session.shown_channels(layer)}
            for layer in net.layers
        ],
        "beta": list(net.beta),
        "gamma": net.gamma,
        "constraints": [str(interval) for interval in net.intervals],
        "obstacles": session.obstacles(),
        "filters": filters(session),
        "samples": samples(session),
        "slow": session.slow,
        "gallery": None if session.gallery is None else session.gallery.described(),
        "reference": NO_REFERENCE if session.reference is None else compared(session.reference),
    }


def filters(session: Session) -> list[dict[str, Any]]:
    """Return the filters of every layer, see :class:`~lrrn.reports.images.Filters`, as integers from -100 to 100."""
    net, shown = session.model.network_, []
    for layer in range(len(net.layers)):
        found = filters_of(net, session.image_shape, layer, SHOWN_FILTERS)
        rows = found.images.reshape(len(found.images), -1).astype(np.float64)
        largest = np.abs(rows).max(axis=1, keepdims=True)
        scaled = np.rint(100 * rows / np.where(largest > 0, largest, 1.0)).astype(int)
        shape = list(found.images.shape[-2:])
        shown.append({"kind": found.kind, "units": found.n, "shape": shape, "images": scaled.tolist()})
    return shown


def architecture(net: LRRN) -> str:
    """Return the sizes of the layers in one line; convolutions by their kernels."""
    if net.is_dense:
        return "-".join(map(str, net.sizes))
    first, *rest = net.architecture
    parts = ["x".join(map(str, first)) if isinstance(first, tuple) else str(first)]
    for size in rest:
        if not isinstance(size, Conv):
            parts.append(str(size))
            continue
        more = [("stride", size.stride, 1), ("padding", size.padding, 0), ("pool", size.pool, 1)]
        told = [f"{name} {value}" for name, value, usual in more if value != usual]
        parts.append(", ".join([f"{size.channels} kernels of {size.kernel}x{size.kernel}", *told]))
    return " - ".join(parts)


def samples(session: Session) -> list[dict[str, Any]]:
    """Return the held-out samples that the user can pick, each with its label as a class index or None."""
    reference = session.reference
    if reference is None:
        return []
    images = (reference.samples.astype(np.float64) - session.low) / (session.high - session.low)
    pixels = np.round(images, DIGITS).clip(0.0, 1.0).tolist()
    labels = [int(label) if label >= 0 else None for label in reference.labels]
    gallery = session.gallery
    numbers = [None] * len(labels) if gallery is None else gallery.places(reference.samples)
    facts = [{} if gallery is None or number is None else gallery.facts(number) for number in numbers]
    return [{"pixels": image, "label": label} | more for image, label, more in zip(pixels, labels, facts, strict=True)]


def compared(reference: Reference) -> dict[str, Any]:
    """Return the certified-accuracy curve and the histograms of energies."""
    known = np.concatenate(list(reference.energies.values()))
    top = max(float(np.quantile(known, 0.98)), float(np.max(reference.energies["samples"])))
    edges = np.linspace(min(0.0, float(known.min())), top if top > 0 else 1.0, BINS + 1)
    shares = {
        # values beyond the last bin are counted in it
        kind: (np.histogram(np.minimum(values, edges[-1]), edges)[0] / len(values)).round(5).tolist()
        for kind, values in reference.energies.items()
    }
    own = reference.energies["samples"]
    return {
        "source": reference.source,
        "score": reference.score,
        "n": len(own) if reference.radii is None else len(reference.radii),
        "curve": None if reference.radii is None else _curve(reference.radii, reference.score),
        "energies": {"edges": edges.round(6).tolist(), "shares": shares},
        "auroc": {kind: auroc(own, values) for kind, values in reference.energies.items() if kind != "samples"},
    }


def _curve(radii: Array, score: float | None) -> dict[str, Any]:
    """Return certified accuracy over the norm of the perturbation, and the median radius."""
    largest = float(radii.max(initial=0.0))
    grid = np.linspace(0.0, largest * 1.02 if largest > 0 else 1.0, POINTS)
    # at norm 0 it is the clean accuracy: correct samples count even without a certificate
    shares = [float(np.mean(radii > size)) if size > 0 or score is None else score for size in grid]
    return {"norms": grid.round(6).tolist(), "shares": shares, "median": float(np.median(radii))}
