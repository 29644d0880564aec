"""Compute figures from a row's folder: clean, certified and attacked accuracy, and whether they are consistent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lrrn.studies.record.contenders import BRANCHED, LOCAL, SHARED
from lrrn.studies.record.data import curve_of, sizes_of
from lrrn.studies.record.stages import (
    ATTACK,
    AUTOATTACK,
    BY_ATTACK,
    PUBLISHED,
    RIGHT,
    UNCLIPPED,
    is_trained,
    kept,
    training_facts,
)

OURS, CLIPPED, FREE, SECONDS = BY_ATTACK
Array = NDArray[Any]
Sizes = Mapping[str, float]
"""Perturbation sizes by their names in tables."""
BEST = "best"
"""Method name for the largest of all certified radii of an image."""
BRANCHES = "branches of an image and a pair, at most"
"""Name of the limit of branch and bound in results; several, separated by commas, if the stage was resumed with another."""


def figures(folder: Path) -> dict[str, Any] | None:
    """Return all figures of a row, or None if it is not yet trained and certified.

    A method that is not finished counts for the images it has. "best" is the largest available radius of each image.
    """
    if not is_trained(folder):
        return None
    facts = training_facts(folder)
    data = facts["row"].partition("-")[0]
    sizes, grid = sizes_of(data), curve_of(data)
    right, n = kept(folder, RIGHT)[0], facts["tests"]
    stages = {method: kept(folder, f"radii-{method}") for method in (*facts["methods"], SHARED, BRANCHED, LOCAL)}
    radii = {method: values for method, (values, _) in stages.items() if len(values)}
    if len(right) < n or not any(len(values) == n for values in radii.values()):
        return None
    radii[BEST] = np.max([np.pad(values, (0, n - len(values))) for values in radii.values()], axis=0)
    result: dict[str, Any] = {
        **facts,
        "images": n,
        "accuracy": float(right.mean()),
        "radii": {method: _certified(values, right, sizes) for method, values in radii.items()},
        "curve": {"eps": grid.tolist(), "certified": [float((right & (radii[BEST] > eps)).mean()) for eps in grid]},
        "seconds of certifying": {method: about["seconds"] for method, (values, about) in stages.items() if len(values)},
        "device of certifying": sorted({about["device"] for values, about in stages.values() if len(values)}),
    }
    if BRANCHED in radii:
        result[BRANCHES] = stages[BRANCHED][1]["branches"]
    attacked = _attacked(folder, right, radii, sizes)
    return result if attacked is None else {**result, "attacks": attacked}


def _certified(radius: Array, right: Array, sizes: Sizes) -> dict[str, Any]:
    """Return figures of a method on the images it was applied to, counted from the first."""
    right = right[: len(radius)]
    return {
        "images": len(radius),
        "accuracy": float(right.mean()),
        # of the predicted label, correct or not, as in the paper
        "median": float(np.median(radius)),
        "median, 0 where wrong": float(np.median(np.where(right, radius, 0.0))),
        "certified": {size: float((right & (radius > eps)).mean()) for size, eps in sizes.items()},
    }


def _attacked(folder: Path, right: Array, radii: dict[str, Array], sizes: Sizes) -> dict[str, Any] | None:
    """Return figures of attacks on the first images, the certified accuracy on the same images, and contradictions."""
    distance, by_attack = _found(folder, sizes)
    if not len(distance):
        return None
    n_theirs = (by_attack[CLIPPED] or {"images": 0})["images"]
    result: dict[str, Any] = {
        "images": len(distance),
        "accuracy": float(right[: len(distance)].mean()),
        "attacked": _shares(distance, sizes),
        "median distance": _finite(float(np.median(distance))),
        **{name: by_attack[name] for name in BY_ATTACK},
        "certified": {},
        "certified on AutoAttack's": _certified(radii[BEST][:n_theirs], right, sizes) if n_theirs else None,
        "attacks inside a radius": {},
        "attacked below certified": [],
    }
    for method, values in radii.items():
        # compare every method on the images that both it and the attacks covered
        m = min(len(values), len(distance))
        radius, found, good = values[:m], distance[:m], right[:m]
        result["certified"][method] = {**_certified(radius, good, sizes), "attacked on these": _shares(found, sizes)}
        result["attacks inside a radius"][method] = int((good & (found < radius)).sum())
        result["attacked below certified"] += [
            f"{method} at {size}" for size, eps in sizes.items() if (found > eps).sum() < (good & (radius > eps)).sum()
        ]
    return result


def _found(folder: Path, sizes: Sizes) -> tuple[Array, dict[str, Any]]:
    """Return the distances of the nearest attacks, and the figures of each attack.

    If our attacks did not run here, those that were published with the weights count.
    """
    ours, about = kept(folder, ATTACK)
    figures: dict[str, Any] = dict.fromkeys(BY_ATTACK)
    if len(ours):
        figures |= {OURS: _shares(ours, sizes), SECONDS: {"ours": about["seconds"], "AutoAttack": 0.0}}
    else:
        ours, figures = kept(folder, PUBLISHED)
    distance, spent = ours.copy(), 0.0
    for name, file in ((CLIPPED, AUTOATTACK), (FREE, UNCLIPPED)):
        theirs, about = kept(folder, file)
        both = min(len(ours), len(theirs))
        if both:
            distance[:both] = np.minimum(distance[:both], theirs[:both])
            figures[name] = {"images": both, "attacked": _shares(theirs[:both], sizes)}
            spent += about["seconds"]
            figures[SECONDS] = {**figures[SECONDS], "AutoAttack": spent}
    return distance, figures


def _shares(distance: Array, sizes: Sizes) -> dict[str, float]:
    return {size: float((distance > eps).mean()) for size, eps in sizes.items()}


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
