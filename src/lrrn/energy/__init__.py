"""The lifted energy of a network, the QPs of its phases, and its derivatives."""

from lrrn.energy.lifted import LiftedEnergy

__all__ = ["LiftedEnergy"]
