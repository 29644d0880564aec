"""Certificates: proven radii within which a label does not change, and proven intervals of outputs and energies."""

from lrrn.certificates.class_energies import certify_energies
from lrrn.certificates.energies import certified_auroc, decision_radius, energy_interval
from lrrn.certificates.intervals import output_interval
from lrrn.certificates.radius import Certificate, certify

__all__ = [
    "Certificate",
    "certified_auroc",
    "certify",
    "certify_energies",
    "decision_radius",
    "energy_interval",
    "output_interval",
]
