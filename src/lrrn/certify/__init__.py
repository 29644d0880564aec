"""Certificates: radii within which a label stands, intervals an output cannot leave."""

from lrrn.certify.intervals import output_interval
from lrrn.certify.radius import Certificate, certify

__all__ = ["Certificate", "certify", "output_interval"]
