"""Compute figures from a row's folder: clean, certified and attacked accuracy, and whether they are consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.studies.record.contenders import EPS, LOCAL, SHARED
from lrrn.studies.record.stages import ATTACK, AUTOATTACK, RIGHT, is_trained, kept, training_facts

Array = NDArray[Any]
BEST = "best"
"""Method name for the largest of all certified radii of an image."""
GRID = np.arange(0, 61) / 20
"""Perturbation sizes of the points of curves."""


def figures(folder: Path) -> dict[str, Any] | None:
    """Return all figures of a row, or None if it is not yet trained and certified.

    A method that is not finished counts for the images it has. "best" is the largest available radius of each image.
    """
    if not is_trained(folder):
        return None
    facts = training_facts(folder)
    right, n = kept(folder, RIGHT)[0], facts["tests"]
    stages = {method: kept(folder, f"radii-{method}") for method in (*facts["methods"], SHARED, LOCAL)}
    radii = {method: values for method, (values, _) in stages.items() if len(values)}
    if len(right) < n or not any(len(values) == n for values in radii.values()):
        return None
    radii[BEST] = np.max([np.pad(values, (0, n - len(values))) for values in radii.values()], axis=0)
    result: dict[str, Any] = {
        **facts,
        "images": n,
        "accuracy": float(right.mean()),
        "radii": {method: _certified(values, right) for method, values in radii.items()},
        "curve": {"eps": GRID.tolist(), "certified": [float((right & (radii[BEST] > eps)).mean()) for eps in GRID]},
        "seconds of certifying": {method: about["seconds"] for method, (values, about) in stages.items() if len(values)},
        "device of certifying": sorted({about["device"] for values, about in stages.values() if len(values)}),
    }
    attacked = _attacked(folder, right, radii)
    return result if attacked is None else {**result, "attacks": attacked}


def _certified(radius: Array, right: Array) -> dict[str, Any]:
    """Return figures of a method on the images it was applied to, counted from the first."""
    right = right[: len(radius)]
    return {
        "images": len(radius),
        "accuracy": float(right.mean()),
        # of the predicted label, correct or not, as in the paper
        "median": float(np.median(radius)),
        "median, 0 where wrong": float(np.median(np.where(right, radius, 0.0))),
        "certified": {f"{eps:g}": float((right & (radius > eps)).mean()) for eps in EPS},
    }


def _attacked(folder: Path, right: Array, radii: dict[str, Array]) -> dict[str, Any] | None:
    """Return figures of attacks on the first images, the certified accuracy on the same images, and contradictions."""
    ours, about = kept(folder, ATTACK)
    theirs, about_theirs = kept(folder, AUTOATTACK)
    if not len(ours):
        return None
    distance = ours.copy()
    both = min(len(ours), len(theirs))
    distance[:both] = np.minimum(distance[:both], theirs[:both])
    result: dict[str, Any] = {
        "images": len(ours),
        "accuracy": float(right[: len(ours)].mean()),
        "attacked": _shares(distance),
        "median distance": _finite(float(np.median(distance))),
        "by our attacks": _shares(ours),
        "AutoAttack": {"images": len(theirs), "attacked": _shares(theirs)} if len(theirs) else None,
        "seconds": {"ours": about["seconds"], "AutoAttack": about_theirs["seconds"]},
        "certified": {},
        "attacks inside a radius": {},
        "attacked below certified": [],
    }
    for method, values in radii.items():
        # compare every method on the images that both it and the attacks covered
        m = min(len(values), len(distance))
        radius, found, good = values[:m], distance[:m], right[:m]
        result["certified"][method] = {**_certified(radius, good), "attacked on these": _shares(found)}
        result["attacks inside a radius"][method] = int((good & (found < radius)).sum())
        result["attacked below certified"] += [
            f"{method} at {eps:g}" for eps in EPS if (found > eps).sum() < (good & (radius > eps)).sum()
        ]
    return result


def _shares(distance: Array) -> dict[str, float]:
    return {f"{eps:g}": float((distance > eps).mean()) for eps in EPS}


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def disagreements(result: dict[str, Any]) -> list[str]:
    """Return contradictions between attacks and certificates of a row: none, unless there is a bug."""
    attacks = result.get("attacks")
    if attacks is None:
        return []
    inside = {method: n for method, n in attacks["attacks inside a radius"].items() if n}
    return [f"{n} attacks inside a radius ({method})" for method, n in inside.items()] + [
        f"attacked below certified accuracy ({where})" for where in attacks["attacked below certified"]
    ]
