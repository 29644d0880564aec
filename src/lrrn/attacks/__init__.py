"""Adversarial attacks: perturbations that change a label, and empirical lower estimates of Lipschitz constants. No proofs."""

from lrrn.attacks.adapters import as_foolbox, as_image_model
from lrrn.attacks.estimates import LipschitzEstimate, empirical_lipschitz
from lrrn.attacks.perturbations import Attack, minimal_perturbation, pgd, strongest_perturbation

__all__ = [
    "Attack",
    "LipschitzEstimate",
    "as_foolbox",
    "as_image_model",
    "empirical_lipschitz",
    "minimal_perturbation",
    "pgd",
    "strongest_perturbation",
]
