"""scikit-learn estimators: classifier, regressor, energy model."""

from lrrn.estimators.certificate import RegressionCertificate, SampleCertificate
from lrrn.estimators.classifier import LRRNClassifier
from lrrn.estimators.conformal import ConformalClassifier, ConformalRegressor
from lrrn.estimators.energy_model import LRRNEnergyModel
from lrrn.estimators.pipeline import certified_scorer, certify_pipeline
from lrrn.estimators.regressor import LRRNRegressor

__all__ = [
    "ConformalClassifier",
    "ConformalRegressor",
    "LRRNClassifier",
    "LRRNEnergyModel",
    "LRRNRegressor",
    "RegressionCertificate",
    "SampleCertificate",
    "certified_scorer",
    "certify_pipeline",
]
