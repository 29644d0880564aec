"""The training objectives of a classifier by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lrrn.learning import ClassEnergy, Contrastive, CrossEntropy, Margin, Objective, SemiSupervised, SquaredError

PARAMETERS: dict[str, tuple[Callable[..., Objective], tuple[str, ...]]] = {
    "contrastive": (Contrastive, ()),
    "margin": (Margin, ("margin", "temperature", "adversarial_eps")),
    "cross_entropy": (CrossEntropy, ()),
    "squared_error": (SquaredError, ()),
    "class_energy": (ClassEnergy, ()),
    "semi_supervised": (SemiSupervised, ("free_energy_weight", "self_training", "confidence")),
}
"""What makes an objective, and the parameters of the classifier that it takes."""
OBJECTIVES = tuple(PARAMETERS)


def made(name: Any, value_of: Callable[[str], Any]) -> Objective:
    """Return the objective of this name, with the values of parameters that ``value_of`` has."""
    if name not in PARAMETERS:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(PARAMETERS)}")
    kind, parameters = PARAMETERS[name]
    return kind(*map(value_of, parameters))


def check_belongs(name: str, given: dict[str, Any]) -> None:
    """Raise ValueError for a parameter of the margin objective that was given for another one, which has no use for it."""
    ignored = [key for key in PARAMETERS["margin"][1] if given[key] is not None]
    if ignored and name != "margin":
        listed = ", ".join(f"{key}={given[key]!r}" for key in ignored)
        raise ValueError(f"{listed} needs objective 'margin'; got {name!r}: leave it out, or set objective='margin'")


def check_probabilities(model: Any) -> None:
    """Raise an AttributeError if the scores of a classifier are no logarithms of probabilities."""
    objective = model._use("objective")
    if objective not in ("margin", "cross_entropy"):
        raise AttributeError(
            f"predict_proba needs a classifier with objective 'margin' or 'cross_entropy'; this one has {objective!r}, "
            "whose scores are no logarithms of probabilities. See decision_function for the scores"
        )
