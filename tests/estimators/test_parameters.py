"""Values of parameters: those of the wrong type or range are refused before any work, numbers of NumPy are taken as numbers."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from lrrn import ConformalClassifier, LRRNClassifier, LRRNRegressor, certified_scorer
from lrrn.estimators import robust
from lrrn.learning import Settings
from small_estimators import blobs, classifier, curve, energy_model, regressor, weights

WRONG = [
    (dict(learning_rate="a"), "learning_rate must be positive; got 'a', which is not one number"),
    (dict(learning_rate=None), "learning_rate must be positive; got None"),
    (dict(weight_decay="a"), "weight_decay must be at least 0; got 'a'"),
    (dict(tol="a"), "tol must be a positive number, or None for the default; got 'a'"),
    (dict(max_condition="a"), "max_condition must be above 1 or None; got 'a'"),
    (dict(validation_fraction="a"), "validation_fraction must lie between 0 and 1; got 'a', which is not one number"),
    (dict(validation_fraction=math.nan), "validation_fraction must lie between 0 and 1; got nan"),
    (dict(batch_size=[3]), r"batch_size must be a positive integer; got \[3\], which is not one number"),
    (dict(epochs=np.bool_(True)), "epochs must be a positive integer; got"),
    (dict(image_shape=4), "image_shape must be .channels, height, width., all positive integers, or None; got 4"),
    (dict(beta="a"), "beta must be a number, or one for each layer; got 'a'"),
    (dict(beta=None), "beta must be a number, or one for each layer; got None"),
    (dict(beta=(1.0, "a")), "beta must be a number, or one for each layer; got 'a'"),
    (dict(gamma="a"), "gamma must be a positive number; got 'a'"),
    (dict(constraint=3), "constraint must be 'free', 'nonneg', 'box' or a pair .lo, hi.; got 3"),
    (dict(standardize=np.array([1, 2])), r"standardize must be False, True, 'common' or 'features'; got array\(\[1, 2\]\)"),
    (dict(device=3), "device must be 'auto', 'cpu', 'cuda', 'cuda:0', ... or a torch.device; got 3"),
    (dict(dtype=[1]), r"dtype must be a word, such as 'float32'; got \[1\]"),
    (dict(schedule=[1]), r"schedule must be a word, such as 'cosine'; got \[1\]"),
    (dict(callbacks=3), "callbacks must be a tuple of callables, also if there is only one; got 3"),
    (dict(callbacks=print), "callbacks must be a tuple of callables, also if there is only one; got <built-in"),
    (dict(callbacks=(3,)), r"callbacks must be a tuple of callables, also if there is only one; got \(3,\)"),
    (dict(verbose="a"), "verbose must be a number, 0 for silence; got 'a'"),
    (dict(flips="a"), "flips must be True or False; got 'a'"),
    (dict(resume=np.array([1, 2])), r"resume must be True or False; got array\(\[1, 2\]\)"),
    (dict(log=3), "log must be a path or None; got 3"),
    (dict(checkpoint=3), "checkpoint must be a path or None; got 3"),
    (dict(random_state="a"), "'a' cannot be used to seed"),
]
OF_CLASSIFIERS = [
    (dict(objective=[1]), r"objective must be a word, such as 'contrastive'; got \[1\]"),
    (dict(pretrain_learning_rate="a"), "pretrain_learning_rate must be positive; got 'a'"),
    (dict(confidence="a"), "confidence must be a finite number; got 'a'"),
    (dict(eps="a"), "eps must be None or a positive number"),
    (dict(class_weight={2: -1}), "class_weight of label 2 must be finite and at least 0, where 0 leaves the class out; got -1"),
    (dict(class_weight={"a": math.nan}), "class_weight of label 'a' must be finite and at least 0, .* got nan"),
    (dict(class_weight={0: math.inf}), "class_weight of label 0 must be finite and at least 0, .* got inf"),
    (
        dict(class_weight={0: "heavy"}),
        "class_weight of label 0 must be finite and at least 0, .* got 'heavy', which is not one",
    ),
    (dict(class_weight="heavy"), "class_weight must be None, 'balanced' or a dict from labels to weights; got 'heavy'"),
    (dict(class_weight=[1, 2]), r"class_weight must be None, 'balanced' or a dict from labels to weights; got \[1, 2\]"),
]


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
@pytest.mark.parametrize(("options", "message"), WRONG)
def test_values_of_a_wrong_type_are_refused_whatever_the_data(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options).check_parameters()


@pytest.mark.parametrize(("options", "message"), OF_CLASSIFIERS)
def test_values_of_a_classifier_that_are_refused_whatever_the_data(options, message):
    with pytest.raises(ValueError, match=message):
        classifier(**options).check_parameters()


@pytest.mark.parametrize("make", [classifier, regressor, energy_model])
def test_numbers_of_numpy_and_torch_are_numbers(make):
    X, y = blobs()
    plain = dict(learning_rate=0.0625, batch_size=16, epochs=2, beta=0.5, gamma=0.25, tol=2.0**-20, max_seconds=1000.0)
    types = dict(batch_size=np.int64, epochs=np.int32, beta=np.float64, gamma=torch.tensor, max_seconds=np.array)
    given = {name: types.get(name, np.float32)(value) for name, value in plain.items()}
    options = dict(early_stopping=True, optimizer="sgd")
    one = make(**{**plain, **options}).fit(X, y)
    two = make(**{**given, **options}, validation_fraction=np.array(0.1), device=torch.device("cpu")).fit(X, y)
    assert torch.equal(weights(one), weights(two))


def test_settings_are_numbers_that_json_knows():
    settings = Settings(
        seed=np.int64(3), batch_size=np.int64(5), learning_rate=np.float32(0.1), flips=np.True_, tol=np.array(0.5)
    )
    assert [type(value) for value in (settings.seed, settings.batch_size, settings.learning_rate)] == [int, int, float]
    assert json.loads(json.dumps(vars(settings))) == vars(settings)
    assert (settings.seed, settings.batch_size, settings.learning_rate) == (3, 5, float(np.float32(0.1)))
    for options, message in [
        (dict(seed="a"), "seed must be whole; got 'a', which is not one number"),
        (dict(seed=1.5), "seed must be whole; got 1.5"),
        (dict(batch_size=2.5), "batch_size must be positive and whole; got 2.5"),
        (dict(learning_rate=True), "learning_rate must be positive; got True"),
        (dict(max_unconverged=-1), "max_unconverged must be at least 0; got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            Settings(**options)


@pytest.mark.parametrize("make", [classifier, regressor])
def test_a_fit_with_numbers_of_numpy_writes_its_checkpoint(make, tmp_path):
    X, y = blobs()
    numbers = dict(batch_size=np.int64(16), epochs=np.int64(2), learning_rate=np.float32(0.1), shifts=np.int64(0))
    path = tmp_path / "run.ckpt"
    make(**numbers, checkpoint=path).fit(X, y)
    assert make(**numbers, checkpoint=path, resume=True).fit(X, y).n_iter_ == 2


def test_sizes_of_perturbations_that_are_no_number():
    X, y = blobs()
    model = classifier(epochs=1).fit(X, y)
    of_targets = regressor(epochs=1).fit(*curve())
    calls = [
        lambda size: model.energy_interval(X, size),
        lambda size: model.certified_score(X, y, size),
        lambda size: model.certificate(X).certified_accuracy(y, size),
        lambda size: of_targets.certificate(curve()[0], size),
        certified_scorer,
    ]
    for call in calls:
        for size in ("a", None, math.nan, -1):
            with pytest.raises(ValueError, match=f"eps must be at least 0; got .*{size}"):
                call(size)
    for call in (calls[0], calls[1], calls[2]):
        with pytest.raises(ValueError, match=r"eps must be at least 0; got \[0.1\], which is not one number"):
            call([0.1])
    with pytest.raises(ValueError, match="target_radius must be a radius above 0; got 'a'"):
        model.certified_radius(X, target_radius="a")
    with pytest.raises(ValueError, match="alpha must lie between 0 and 1; got 'a'"):
        ConformalClassifier(model, alpha="a").fit(X, y)
    with pytest.raises(ValueError, match="eps must be a finite size of at least 0; got 'a'"):
        ConformalClassifier(model).fit(X, y).predict_set(X, "a")
    np.testing.assert_array_equal(model.energy_interval(X, np.array(0.1)), model.energy_interval(X, 0.1))


# --- with eps, before the search ------------------------------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch):
    """Fail if data are compared with a linear model."""

    def work(*given):
        raise AssertionError("this is work")

    for name in ("logistic", "ridge"):
        monkeypatch.setattr(robust, name, work)


@pytest.mark.parametrize("kind", [LRRNClassifier, LRRNRegressor])
def test_eps_begins_no_search_for_a_run_that_would_fail(kind, no_work, tmp_path):
    X, y = blobs()  # six features, which are no square image
    broken = tmp_path / "broken.ckpt"
    broken.write_bytes(b"nothing")
    missing = tmp_path / "missing" / "x"
    for options, error, message in [
        (dict(checkpoint=missing), FileNotFoundError, "cannot write .*missing does not exist; make it first"),
        (dict(log=missing), FileNotFoundError, "cannot write .*missing does not exist; make it first"),
        (dict(log=tmp_path), OSError, "name a file, not a folder"),
        (dict(checkpoint=broken, resume=True, random_state=0), ValueError, "broken.ckpt is damaged"),
        (dict(callbacks=3), ValueError, "callbacks must be a tuple of callables"),
        (dict(verbose="a"), ValueError, "verbose must be a number"),
        (dict(shifts=1), ValueError, "6 features make no square image"),
        (dict(flips=True), ValueError, "6 features make no square image"),
    ]:
        with pytest.raises(error, match=message):
            kind(eps=0.1, **options).fit(X, y)
    with pytest.raises(AssertionError, match="this is work"):
        kind(eps=0.1, log=tmp_path / "log").fit(X, y)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_eps_says_at_once_which_optimizers_it_takes(optimizer, no_work):
    message = f"eps trains with AdamW's weight decay; got optimizer='{optimizer}': leave out optimizer, or also give"
    with pytest.raises(ValueError, match=message):
        LRRNClassifier(eps=0.1, optimizer=optimizer).check_parameters()
    LRRNClassifier(eps=0.1, optimizer="adamw").check_parameters()
    with pytest.raises(ValueError, match="unknown optimizer 'lbfgs'"):
        LRRNClassifier(eps=0.1, optimizer="lbfgs").check_parameters()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_advice_about_optimizers_is_true(optimizer):
    options = dict(eps=0.1, hidden_sizes=(4,), epochs=1, random_state=0)
    model = LRRNClassifier(optimizer=optimizer, decoupled_weight_decay=0, **options).fit(*blobs())
    assert "optimizer" not in model.chosen_ and model.n_iter_ == 1
    LRRNRegressor(optimizer=optimizer, **options).fit(*blobs())


@pytest.mark.parametrize("class_weight", [{"a": 4.0, "b": 1.0, "c": 1.0}, "balanced"])
def test_trials_of_eps_have_the_weights_of_the_classes_once(class_weight, monkeypatch):
    """Their labels are numbers, and the weights of their rows contain those of the classes."""
    X, y = blobs()
    X, y = X[15:], y[15:]
    y[:20] = 0
    seen, real = [], LRRNClassifier._train

    def noted(model, objective, data, *rest):
        seen.append((data.label, data.weight))
        real(model, objective, data, *rest)

    monkeypatch.setattr(LRRNClassifier, "_train", noted)
    LRRNClassifier(eps=0.1, class_weight=class_weight, epochs=1, random_state=0).fit(X, np.array(list("abc"))[y])
    counts = np.bincount(y)
    expected = 4.0 if class_weight != "balanced" else counts[1] / counts[0]
    assert len(seen) > 0
    for label, weight in seen:
        assert float(weight[label == 0][0] / weight[label == 1][0]) == pytest.approx(expected, rel=1e-5)
