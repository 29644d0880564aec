"""Accuracy on scikit-learn's digits: contrastive, margin, and semi-supervised with 100 labels, five seeds each.

Splits are train_test_split(test_size=0.25, stratify=y, random_state=seed). The hyper-parameters are the estimator's defaults or
were chosen with --select. It never uses the test quarter: it holds out a fifth of each training part and scores on that. The
hyper-parameters are the same for all seeds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from lrrn import LRRNClassifier

N_LABELS = 100
SETTINGS: dict[str, dict[str, object]] = {
    "contrastive": {},
    "margin": {"objective": "margin"},
    "supervised, 100 labels": {"epochs": 200},
    "semi-supervised, 100 labels": {"objective": "semi_supervised"},
}
CANDIDATES: dict[str, list[dict[str, object]]] = {
    "contrastive": [{}, {"learning_rate": 0.002}, {"learning_rate": 0.008}],
    "margin": [
        {"objective": "margin"},
        {"objective": "margin", "margin": 0.5},
        {"objective": "margin", "temperature": 0.25},
        {"objective": "margin", "margin": 0.5, "temperature": 0.25},
    ],
    "supervised, 100 labels": [{}, {"epochs": 200}, {"epochs": 200, "learning_rate": 0.002}],
    "semi-supervised, 100 labels": [
        {"objective": "semi_supervised", "self_training": 0.0},
        {"objective": "semi_supervised", "self_training": 0.0, "free_energy_weight": 0.1},
        {"objective": "semi_supervised"},
        {"objective": "semi_supervised", "confidence": 0.4},
        {"objective": "semi_supervised", "free_energy_weight": 0.001},
        {"objective": "semi_supervised", "free_energy_weight": 0.01},
    ],
}


def accuracy(name: str, settings: dict[str, object], X, y, X_test, y_test, seed: int) -> float:
    labels = y
    if "100 labels" in name:
        known, _ = train_test_split(np.arange(len(y)), train_size=N_LABELS, stratify=y, random_state=seed)
        if name.startswith("semi"):
            labels = np.full(len(y), -1)
            labels[known] = y[known]
        else:
            X, labels = X[known], y[known]
    return LRRNClassifier(random_state=seed, **settings).fit(X, labels).score(X_test, y_test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", action="store_true", help="score the candidate settings inside the training part")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    X, y = load_digits(return_X_y=True)
    X = X / 16
    report = {}
    for name, settings in SETTINGS.items():
        for candidate in CANDIDATES[name] if options.select else [settings]:
            start, scores = time.perf_counter(), []
            for seed in range(5):
                X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.25, stratify=y, random_state=seed)
                if options.select:
                    X_train, X_test, y_train, y_test = train_test_split(
                        X_train, y_train, test_size=0.2, stratify=y_train, random_state=seed
                    )
                scores.append(accuracy(name, candidate, X_train, y_train, X_test, y_test, seed))
            seconds = (time.perf_counter() - start) / len(scores)
            label = f"{name} {candidate or ''}".strip()
            report[label] = {"accuracy": scores, "mean": float(np.mean(scores)), "seconds": seconds}
            print(f"{np.mean(scores):.2%}  {' '.join(f'{s:.2%}' for s in scores)}  {seconds:5.1f} s a fit  {label}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
