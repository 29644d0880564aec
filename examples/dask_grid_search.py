"""Grid search on a Dask cluster: scikit-learn runs its fits through joblib, with Dask as the backend.

By default it starts a local cluster of two processes. ``--scheduler tcp://host:8786`` connects to a running cluster instead;
its workers need lrrn installed. Needs ``pip install 'lrrn[cluster]'``.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import joblib
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV

from lrrn import LRRNClassifier

GRID = {"gamma": [0.125, 1.0], "weight_decay": [0.0, 5e-5, 5e-4]}


def search(samples: int = 600, epochs: int = 5) -> GridSearchCV:
    """Fit every setting of the grid on three folds, on the active joblib backend."""
    X, y = load_digits(return_X_y=True)
    classifier = LRRNClassifier(hidden_sizes=(32,), epochs=epochs, random_state=0)
    return GridSearchCV(classifier, GRID, cv=3).fit(X[:samples] / 16, y[:samples])


def figures(found: GridSearchCV) -> dict[str, Any]:
    """Return the results of the search, ready for ``json.dump``."""
    return {"best": found.best_params_, "score": found.best_score_, "scores": found.cv_results_["mean_test_score"].tolist()}


def main() -> None:
    """Search on a cluster and print the results."""
    from dask.distributed import Client, LocalCluster

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", help="address of a cluster's scheduler; by default a local cluster is started")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    # one process per worker: fits in threads of one process would contend for the GIL
    cluster = options.scheduler or LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None)
    with Client(cluster) as client, joblib.parallel_config(backend="dask", wait_for_workers_timeout=60):
        found = search(options.samples, options.epochs)
        workers = len(client.scheduler_info()["workers"])
    if options.scheduler is None:
        cluster.close()
    print(json.dumps({**figures(found), "workers": workers}))


if __name__ == "__main__":
    main()
