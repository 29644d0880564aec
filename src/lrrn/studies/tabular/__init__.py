"""Real tables, cross-validated: our estimators beside scikit-learn's, with certified accuracy, intervals, time and memory."""
