"""Proofs only: radii within which a label stands, and intervals that an output or an energy cannot leave."""

from lrrn.certificates.energies import certified_auroc, certify_energies, decision_radius, energy_interval
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
