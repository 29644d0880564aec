"""Write the certificates of a saved classifier for the independent checker, with the digest of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrrn.certificates.written import written_certificates
from lrrn.estimators import LRRNClassifier
from lrrn.persistence.shipped import digest, located


def written_proof(path: Path, model: Any, X: NDArray[Any]) -> dict[str, Any]:
    """Return certificates of samples for ``checker/check_certificate.py``.

    Parameters
    ----------
    path : Path
        File or name of the model, whose digest the proof states.
    model : LRRNClassifier
        The model of that file. Its label is the network's largest output, and its inputs are those of the network.
    X : array of shape (n_samples, n_features)

    Returns
    -------
    dict
        As of :func:`lrrn.certificates.written.written_certificates`, with the weights.
    """
    if not isinstance(model, LRRNClassifier) or model.objective == "class_energy":
        raise ValueError(f"{path} is not a classifier by the network's outputs, whose certificates can be written out")
    if model.scaling.changes:
        raise ValueError(f"{path} standardizes its inputs; certificates are written for models trained with standardize=False")
    file = located(path)
    proof = written_certificates(model.network_, torch.as_tensor(np.asarray(X, dtype=np.float64)))
    weights = {"file": file.name, "sha256": digest(file)}
    classes = np.asarray(model.classes_).tolist()
    return {"weights": weights, "classes": classes, **proof}
