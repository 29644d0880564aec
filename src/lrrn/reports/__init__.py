"""Reports on a fitted model, as tables and pages: accuracy, certified accuracy, attacks, out-of-distribution AUROC."""
