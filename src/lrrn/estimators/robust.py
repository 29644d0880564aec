"""What ``eps`` decides: parameters of the estimators, from the data and the size of perturbations to withstand.

Logistic and ridge regression are networks of this family without hidden layers. They set the scale of the loss or of the output
weights, and they are the alternative: a network with hidden units must compare well with them on held-out rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]
Fit = Callable[[dict[str, Any], Array], Callable[[Array], Array]]
"""From parameters and training rows to a function from held-out rows to one score per row, the larger the better."""

HIDDEN = (64,)
BATCH = 64
DECAY = 0.1
STRENGTHS = tuple(10.0 ** (k / 2) for k in range(-8, 3))
"""Values of C, the inverse strength of regularisation, tried for logistic regression: from 1e-4 to 10."""
SOFTEST = 4.0
"""Largest temperature, in units of the spread of the data, of the more strongly regularised network."""
SIZES = np.linspace(0, 2, 9)
"""Sizes of perturbations, in units of ``eps``, over which certified accuracies on held-out rows are averaged.

The average depends less on which rows are held out than the certified accuracy at ``eps`` alone, which is used from ``LARGE``
rows on.
"""
ALPHA = 1.0
"""Strength of regularisation of ridge regression."""
FOLDS = 5
LARGE = 2000
"""Number of rows from which one split is used in place of cross-validation, and the most rows that it holds out."""
HELD_OUT = 300
"""The most rows of a fold on which networks are scored."""


@final
@dataclass(frozen=True)
class Linear:
    """A linear model: outputs are ``weight @ x + bias``."""

    weight: Array  # (outputs, features)
    bias: Array  # (outputs,)

    def certified(self, x: Array, label: Array, eps: float | Array) -> Array:
        """Return whether each sample is classified correctly, at a distance of more than ``eps`` from the decision boundary.

        For an array of sizes, the result has a row for each.
        """
        scores = x @ self.weight.T + self.bias
        lead = np.take_along_axis(scores, label[:, None], axis=1) - scores
        slope = np.linalg.norm(self.weight[:, None] - self.weight[None], axis=2)[label]
        others = np.arange(len(self.weight)) != label[:, None]
        return np.all((lead > np.multiply.outer(eps, slope)) | ~others, axis=-1)

    def share(self, x: Array, label: Array, sizes: Array) -> Array:
        """Return at which share of these sizes each sample is classified correctly and certified."""
        return np.asarray(self.certified(x, label, sizes).mean(axis=0))


def sizes(rows: int, eps: float) -> Array:
    """Return the sizes over which certified accuracies are averaged."""
    return eps * (SIZES if rows < LARGE else np.ones(1))


def epochs(rows: int) -> int:
    """Return the number of epochs: between 200 and 600 steps, and at least twenty epochs."""
    steps = max(min(rows, 600), 200)
    return max(20, math.ceil(steps * BATCH / max(rows, 1)))


def logistic(x: Array, label: Array, weight: Array | None, *strengths: float) -> Iterator[Linear]:
    """Fit logistic regressions, each from the solution of the one before; their weights have mean zero over the classes."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=300, warm_start=True)
    for strength in strengths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it need not converge to be an alternative
            model.set_params(C=strength).fit(x, label, sample_weight=weight)
        coef, intercept = model.coef_, model.intercept_
        if len(coef) == 1:
            coef, intercept = np.concatenate([-coef, coef]) / 2, np.concatenate([-intercept, intercept]) / 2
        yield Linear(coef - coef.mean(axis=0), intercept - intercept.mean())


def ridge(x: Array, target: Array, weight: Array | None) -> Linear:
    """Fit ridge regression to targets of shape (rows, outputs)."""
    from sklearn.linear_model import Ridge

    model = Ridge(alpha=ALPHA).fit(x, target, sample_weight=weight)
    return Linear(np.reshape(model.coef_, (target.shape[1], -1)), np.full(target.shape[1], model.intercept_))


def margin_parameters(x: Array, linear: Linear, eps: float, most: float = 1.0) -> dict[str, Any]:
    """Return parameters of the margin objective for adversarial training at ``eps``.

    Output weights have rows of norm one, so the temperature has the unit of x. It is the one of logistic regression, whose rows
    have another norm, plus ``eps``, and at most ``most`` times the spread of the data: where a linear model explains nothing,
    its own is infinite.
    """
    norm = math.sqrt(np.square(linear.weight).sum(axis=1).mean())
    spread = math.sqrt(x.var(axis=0).sum())
    softness = min(1 / norm if norm > 0 else math.inf, most * spread if spread > 0 else 1.0) + eps
    return {
        "objective": "margin",
        "margin": 0.0,
        "temperature": softness,
        "adversarial_eps": eps,
        "optimizer": "adamw",
        "decoupled_weight_decay": DECAY,
        "hidden_sizes": HIDDEN,
        "batch_size": BATCH,
        "epochs": epochs(len(x)),
    }


def classifier_parameters(
    x: Array, label: Array, weight: Array | None, eps: float, seed: int, fit: Fit | None
) -> tuple[dict[str, Any], Linear | None]:
    """Return the parameters of a classifier, and the linear model if that is the better one.

    Parameters
    ----------
    x, label, weight
        Scaled features, numbers of classes, weights of the rows.
    eps : float
        Size of perturbations of ``x``.
    seed : int
        For the choice of held-out rows.
    fit : callable or None
        Trains a network and scores rows as :meth:`Linear.share` does. None: no comparison, keep the hidden units.
    """
    if fit is None or np.bincount(label).min() < FOLDS:
        return margin_parameters(x, next(logistic(x, label, weight, 1.0)), eps), None
    splits = list(_splits(len(x), seed, label))
    fits = [logistic(x[train], label[train], None if weight is None else weight[train], *STRENGTHS) for train, _ in splits]
    usual = STRENGTHS.index(1.0)
    paths = [list(islice(path, usual + 1)) for path in fits]
    shares = _shares(x, label, sizes(len(x), eps), splits, paths)
    if shares[-2:].max() == shares.max():
        # weaker regularisation takes longest to fit, so it is not tried if the last two were worse than an earlier one
        paths = [[*path, *more] for path, more in zip(paths, fits, strict=True)]
        shares = _shares(x, label, sizes(len(x), eps), splits, paths)
    best = int(shares.argmax())  # of equals, the first
    whole = list(logistic(x, label, weight, *STRENGTHS[: max(best, usual) + 1]))
    # the last network is regularised like the best linear model, so it is kept unless it is worse; the other must be better,
    # and is given up as soon as it is behind
    for k, most, last in ((usual, 1.0, False), (best, SOFTEST, True))[best == usual :]:
        chosen = margin_parameters(x, whole[k], eps, most)
        gains: list[Array] = []
        for (train, held), path in zip(splits, paths, strict=True):
            parameters = {**margin_parameters(x[train], path[k], eps, most), "epochs": math.ceil(chosen["epochs"] / 2)}
            some = held[:HELD_OUT]
            gains.append(fit(parameters, train)(some) - path[best].share(x[some], label[some], sizes(len(x), eps)))
            if _settled(np.concatenate(gains), 2.0 if last else 0.0):
                break
        found = np.concatenate(gains)
        if found.sum() >= (0.0 if last else math.sqrt(np.square(found).sum())):
            return chosen, None
    return {**chosen, "hidden_sizes": (), "temperature": 1.0}, whole[best]


def regressor_parameters(
    x: Array, target: Array, weight: Array | None, seed: int, fit: Fit | None
) -> tuple[dict[str, Any], Linear | None]:
    """Return the parameters of a regressor, and the linear model if that is the better one.

    One hidden layer with beta = 1 is 1-Lipschitz, so the norm of the output weights bounds the Lipschitz constant. It is kept
    below that of ridge regression.

    Parameters
    ----------
    x, target, weight, seed
        As in :func:`classifier_parameters`; scaled targets of shape (rows, outputs).
    fit : callable or None
        Trains a network and scores rows by minus the squared error. None: no comparison, keep the hidden units.
    """

    def parameters(linear: Linear, rows: int) -> dict[str, Any]:
        bound = tuple((0.999 * np.linalg.norm(linear.weight, axis=1)).tolist())
        return {"hidden_sizes": HIDDEN, "batch_size": BATCH, "epochs": epochs(rows), "max_output_norm": bound}

    whole = ridge(x, target, weight)
    chosen = parameters(whole, len(x))
    if fit is None or len(x) < 2 * FOLDS:
        return chosen, None
    gains: list[Array] = []
    for train, held in _splits(len(x), seed, None):
        linear, some = ridge(x[train], target[train], None if weight is None else weight[train]), held[:HELD_OUT]
        error = np.square(x[some] @ linear.weight.T + linear.bias - target[some]).sum(axis=1)
        gains.append(fit(parameters(linear, len(train)), train)(some) + error)
        if _settled(np.concatenate(gains)):
            break
    if _better(np.concatenate(gains), 2.0):
        return chosen, None
    # a little smaller, so that the proven half-width with its rounding is at most that of ridge regression
    return {**chosen, "hidden_sizes": ()}, Linear(whole.weight * (1 - 1e-6), whole.bias)


def choose_classifier(model: Any, x: Array, label: Array, weight: Array | None, seed: int) -> Linear | None:
    """Set ``chosen_`` of a classifier from its data and ``eps``; return the linear model if that is the better one."""
    eps = float(model.eps) / model._unit()

    def fit(parameters: dict[str, Any], train: Array) -> Callable[[Array], Array]:
        trial = _trained(model, parameters, seed, x[train], label[train], None if weight is None else weight[train])

        def score(held: Array) -> Array:
            found = trial.certificate(x[held])
            certified = (found.prediction == label[held]) & (found.radius > sizes(len(x), eps)[:, None])
            return np.asarray(certified.mean(axis=0))

        return score

    compare = fit if _may_be_linear(model) else None
    return _keep(model, *classifier_parameters(x, label, weight, eps, seed, compare))


def choose_regressor(model: Any, x: Array, target: Array, weight: Array | None, seed: int) -> Linear | None:
    """Set ``chosen_`` of a regressor from its data; return the linear model if that is the better one."""

    def fit(parameters: dict[str, Any], train: Array) -> Callable[[Array], Array]:
        trial = _trained(model, parameters, seed, x[train], target[train], None if weight is None else weight[train])
        return lambda held: -np.square(trial.predict(x[held]).reshape(target[held].shape) - target[held]).sum(axis=1)

    compare = fit if _may_be_linear(model) else None
    return _keep(model, *regressor_parameters(x, target, weight, seed, compare))


def use_linear(model: Any, linear: Linear) -> None:
    """Use a linear model as an estimator's network, which has no hidden layers."""
    with torch.no_grad():
        model.network_.W[0].copy_(torch.as_tensor(linear.weight))
        model.network_.b[0].copy_(torch.as_tensor(linear.bias))
    model._set_history([])


def _may_be_linear(model: Any) -> bool:
    """Whether the parameters leave the choice of hidden layers open: neither their sizes nor one beta for each is given."""
    return model.hidden_sizes is None and isinstance(model.beta, Real)


def _trained(model: Any, chosen: dict[str, Any], seed: int, *data: Array | None) -> Any:
    """Fit an estimator like ``model`` with chosen parameters to scaled features; it takes from the same budget of time."""
    given = {name: value for name, value in model.get_params(deep=False).items() if value is not None}
    plain: dict[str, Any] = {
        "eps": None,
        "standardize": False,
        "early_stopping": False,
        "checkpoint": None,
        "resume": False,
        "log": None,
    }
    plain |= {"callbacks": (), "verbose": 0, "random_state": seed, "max_seconds": model._budget.left}
    if "class_weight" in given:
        plain["class_weight"] = None  # the weights of the rows contain it, and labels are numbers of classes here
    trial = type(model)(**{**chosen, **given, **plain})
    trial.check_parameters()
    return trial._fit(*data, trial=True)


def _keep(model: Any, parameters: dict[str, Any], linear: Linear | None) -> Linear | None:
    model.chosen_ = {name: value for name, value in parameters.items() if getattr(model, name) is None}
    return linear


def _splits(n: int, seed: int, label: Array | None) -> Iterator[tuple[Array, Array]]:
    """Yield training and held-out rows: of cross-validation, or of one split if there are many rows."""
    from sklearn.model_selection import KFold, ShuffleSplit, StratifiedKFold, StratifiedShuffleSplit

    one, several = (ShuffleSplit, KFold) if label is None else (StratifiedShuffleSplit, StratifiedKFold)
    split = (
        one(1, test_size=min(0.2, LARGE / n), random_state=seed)
        if n >= LARGE
        else several(FOLDS, shuffle=True, random_state=seed)
    )
    yield from split.split(np.zeros((n, 1)), label)


def _shares(x: Array, label: Array, at: Array, splits: list[tuple[Array, Array]], paths: list[list[Linear]]) -> Array:
    """Return the certified accuracies on held-out rows, averaged over these sizes, by ``STRENGTHS``."""
    shares = [[model.share(x[held], label[held], at) for model in path] for path, (_, held) in zip(paths, splits, strict=True)]
    return np.asarray(np.concatenate(shares, axis=1).mean(axis=1))


def _better(gains: Array, errors: float = 1.0) -> bool:
    """Whether the sum of differences is more than this many standard errors above zero: in doubt, the simpler model."""
    return bool(gains.sum() > errors * math.sqrt(np.square(gains).sum()))


def _settled(gains: Array, below: float = 2.0) -> bool:
    """Whether more folds would hardly change the choice: two standard errors above zero, or this many below."""
    return _better(gains, 2.0) or _better(-gains, below)
