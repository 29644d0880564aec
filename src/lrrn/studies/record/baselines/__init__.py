"""Classifiers that the record is held against: each learns by its own recipe and certifies what its theory allows."""

from lrrn.studies.record.baselines.model import Baseline, load, save
from lrrn.studies.record.baselines.prototypes import NearestPrototypes
from lrrn.studies.record.baselines.sorting import SortNetwork

__all__ = ["Baseline", "NearestPrototypes", "SortNetwork", "load", "save"]
