"""scikit-learn's own conformance checks."""

from __future__ import annotations

from sklearn.utils.estimator_checks import parametrize_with_checks

from lrrn import LRRNClassifier, LRRNEnergyModel, LRRNRegressor

STOCHASTIC = "batches are drawn at random, so a sample of weight two is not the same as the sample twice (as in SGDClassifier)"
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": STOCHASTIC,
}


@parametrize_with_checks(
    [LRRNClassifier(epochs=30, device="cpu"), LRRNRegressor(epochs=30, device="cpu"), LRRNEnergyModel(epochs=10, device="cpu")],
    expected_failed_checks=lambda estimator: {} if isinstance(estimator, LRRNEnergyModel) else EXPECTED,
)
def test_conforms_to_scikit_learn(estimator, check):
    check(estimator)
