"""Classifiers that the record is held against: each learns by its own recipe and certifies what its theory allows."""

from lrrn.paper.baselines.model import Baseline, load, save
from lrrn.paper.baselines.prototypes import NearestPrototypes
from lrrn.paper.baselines.sorting import SortNetwork

__all__ = ["Baseline", "NearestPrototypes", "SortNetwork", "load", "save"]
