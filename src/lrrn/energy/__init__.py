"""From weights to QPs: the lifted energy, its phases and its derivatives."""

from lrrn.energy.lifted import LiftedEnergy

__all__ = ["LiftedEnergy"]
