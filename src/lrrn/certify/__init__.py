"""Certificates: radii within which a label stands, intervals an output cannot leave; and attacks on them."""

from lrrn.certify.adapters import as_foolbox, as_image_model
from lrrn.certify.attacks import Attack, minimal_perturbation, pgd, strongest_perturbation
from lrrn.certify.energies import certified_auroc, certify_energies, decision_radius, energy_interval
from lrrn.certify.estimates import LipschitzEstimate, empirical_lipschitz
from lrrn.certify.intervals import output_interval
from lrrn.certify.radius import Certificate, certify

__all__ = [
    "Attack",
    "Certificate",
    "LipschitzEstimate",
    "as_foolbox",
    "as_image_model",
    "certified_auroc",
    "certify",
    "certify_energies",
    "decision_radius",
    "empirical_lipschitz",
    "energy_interval",
    "minimal_perturbation",
    "output_interval",
    "pgd",
    "strongest_perturbation",
]
