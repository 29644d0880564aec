"""What a fitted model is good for, as tables and pages: accuracy, certified accuracy, attacks, out-of-distribution AUROC."""
