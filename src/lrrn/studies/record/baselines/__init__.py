"""Baseline classifiers of the record. Each is trained with its own recipe and certified by its own theory."""

from lrrn.studies.record.baselines.model import Baseline, load, save
from lrrn.studies.record.baselines.prototypes import NearestPrototypes
from lrrn.studies.record.baselines.sorting import SortNetwork

__all__ = ["Baseline", "NearestPrototypes", "SortNetwork", "load", "save"]
