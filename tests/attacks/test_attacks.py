"""Attacks must find what is there, in closed form where that is known, and never anything inside a certificate."""

from __future__ import annotations

import builtins
import copy
import math
import pickle
from importlib import import_module

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from sklearn.exceptions import NotFittedError

import lrrn
from convolutions import network as convolutional
from lrrn.attacks import (
    LipschitzEstimate,
    as_foolbox,
    as_image_model,
    autoattack,
    empirical_lipschitz,
    minimal_perturbation,
    pgd,
    strongest_perturbation,
)
from lrrn.attacks.adapters import Scores
from lrrn.attacks.slopes import Slopes, jacobian
from lrrn.certificates.radius import METHODS
from lrrn.reports import audit
from oracles import random_input, random_network
from random_certificates import CASES, make


def consistent(net, x, label, attack, eps=math.inf):
    """What is reported is what the network says at the inputs that came back."""
    moved = (attack.x - x).norm(dim=1)
    predicted = net.infer(attack.x).output.argmax(-1)
    assert (predicted[attack.success] != label[attack.success]).all() and (moved[attack.success] <= eps).all()
    torch.testing.assert_close(attack.distance[attack.success], moved[attack.success], rtol=1e-12, atol=0)
    assert (attack.distance[~attack.success] == math.inf).all()
    assert torch.equal(attack.x[~attack.success], x[~attack.success])


@pytest.fixture(scope="module")
def linear():
    """A linear classifier, inputs, labels, and the distance to the nearest boundary, min_j m_ij / |w_i - w_j|."""
    net = random_network((8, 5), beta=(0.0,))
    x = random_input(40, 8)
    w, b = net.W[0].detach(), net.b[0].detach()
    y = x @ w.mT + b
    label = y.argmax(-1)
    gaps = (w[label][:, None] - w).norm(dim=-1)
    distance = ((y.gather(1, label[:, None]) - y) / gaps).scatter(1, label[:, None], math.inf).amin(1)
    return net, x, label, distance


def test_minimal_perturbation_of_a_linear_classifier(linear):
    net, x, label, exact = linear
    found = minimal_perturbation(net, x, label)
    consistent(net, x, label, found)
    assert found.success.all() and (found.distance >= exact * (1 - 1e-9)).all() and (found.distance <= 1.01 * exact).all()


def test_pgd_on_a_linear_classifier_succeeds_just_above_the_distance_and_fails_just_below(linear):
    net, x, label, exact = linear
    above = pgd(net, x, label, 1.001 * exact)
    consistent(net, x, label, above, 1.001 * exact)
    assert above.success.all()
    below = pgd(net, x, label, 0.999 * exact)
    assert not below.success.any() and (below.distance == math.inf).all() and torch.equal(below.x, x)


def test_any_module_is_attacked_and_a_linear_one_at_its_distances(linear):
    net, x, label, exact = linear
    module = torch.nn.Linear(*net.W[0].shape[::-1], dtype=torch.float64).requires_grad_(False)
    module.weight.copy_(net.W[0])
    module.bias.zero_() if net.b[0] is None else module.bias.copy_(net.b[0])
    found = minimal_perturbation(module, x, label)
    assert found.success.all() and (module(found.x).argmax(-1) != label).all()
    torch.testing.assert_close(found.distance, exact, rtol=1e-4, atol=0)
    assert (found.distance >= exact * (1 - 1e-9)).all()
    assert pgd(module, x, label, 1.001 * exact).success.all() and not pgd(module, x, label, 0.999 * exact).success.any()
    with pytest.raises(ValueError, match="this network has one"):
        pgd(torch.nn.Linear(x.shape[1], 1, dtype=torch.float64), x, label, 1.0)


def test_the_strongest_perturbation_of_a_linear_classifier_is_the_closed_form_inside_and_beyond_the_boundary(linear):
    """Within a ball of radius eps the lead of j over i is at most lead_j + eps |w_j - w_i|, along w_j - w_i."""
    net, x, label, exact = linear
    w, y = net.W[0].detach(), net.infer(x).output
    for share in (0.0, 0.5, 3.0):
        eps = share * exact
        most = (y - y.gather(1, label[:, None]) + eps[:, None] * (w - w[label][:, None]).norm(dim=-1)).scatter(
            1, label[:, None], -math.inf
        )
        found = strongest_perturbation(net, x, label, eps, rivals=4)
        assert ((found - x).norm(dim=1) <= eps).all()
        z = net.infer(found).output
        reached = (z - z.gather(1, label[:, None])).scatter(1, label[:, None], -math.inf).amax(1)
        torch.testing.assert_close(reached, most.amax(1), rtol=1e-8, atol=1e-8)


def test_the_strongest_perturbation_stays_in_the_box_and_changes_no_certified_label():
    net = random_network((8, 7, 5))
    x = random_input(30, 8).sigmoid()
    certificate = lrrn.certify(net, x, "multiplier")
    label = certificate.prediction
    found = strongest_perturbation(net, x, label, 0.999 * certificate.radius)
    assert (net.infer(found).output.argmax(-1) == label).all()
    # and where pgd finds a change of label, so does it
    reach = 1.05 * minimal_perturbation(net, x, label).distance
    pressed = strongest_perturbation(net, x, label, reach, rivals=4)
    assert (net.infer(pressed).output.argmax(-1) != label).double().mean() > 0.9
    clipped = strongest_perturbation(net, x, label, 2 * reach, clip=(0.0, 1.0))
    assert (clipped >= 0).all() and (clipped <= 1).all() and ((clipped - x).norm(dim=1) <= 2 * reach).all()
    with pytest.raises(ValueError, match="rivals must be at least 1"):
        strongest_perturbation(net, x, label, 1.0, rivals=0)


def test_ascents_that_do_not_start_at_x_succeed_too(linear):
    """Every restart alone must reach boundaries that are well inside the ball."""
    net, x, label, exact = linear
    for seed in (0, 1):
        assert pgd(net, x, label, 3 * exact, restarts=2, steps=20, seed=seed).success.all()


def test_binary_classifier_and_single_sample():
    net = random_network((4, 6, 2))
    x = random_input(1, 4)
    label = net.infer(x).output.argmax(-1)
    found = minimal_perturbation(net, x, label)
    assert found.success.all()
    assert pgd(net, x, label, 1.01 * float(found.distance)).success.all()


def test_minimal_perturbation_is_near_the_best_of_a_dense_search_in_the_plane():
    """Two inputs, one hidden layer: look along 2,000 directions."""
    net = random_network((2, 8, 3), scale=2.0, seed=3)
    x = random_input(6, 2)
    label = net.infer(x).output.argmax(-1)
    found = minimal_perturbation(net, x, label)
    consistent(net, x, label, found)
    angle = torch.linspace(0, 2 * math.pi, 2001, dtype=torch.float64)[:-1]
    rays = torch.stack([angle.cos(), angle.sin()], 1)
    lengths = torch.logspace(-2, 1.5, 250, dtype=torch.float64)
    for i in range(len(x)):
        grid = x[i] + rays[:, None] * lengths[:, None]
        changed = (net.infer(grid.reshape(-1, 2)).output.argmax(-1) != label[i]).reshape(len(rays), -1)
        nearest = float(lengths[changed.any(0)].min()) if changed.any() else math.inf
        # neighbouring lengths differ by 3.3 %
        assert float(found.distance[i]) <= 1.05 * nearest


def test_misclassified_samples_have_distance_zero(linear):
    net, x, label, _ = linear
    wrong = (label + 1) % 5
    for found in (pgd(net, x, wrong, 0.0), minimal_perturbation(net, x, wrong)):
        assert found.success.all() and (found.distance == 0).all() and torch.equal(found.x, x)


def test_nothing_is_found_where_there_is_nothing():
    net = random_network((4, 3), beta=(0.0,))
    with torch.no_grad():
        net.W[0].zero_()
        net.b[0].copy_(torch.tensor([1.0, 0.0, 0.0]))
    x, label = random_input(3, 4), torch.zeros(3, dtype=torch.int64)
    for found in (pgd(net, x, label, 10.0), minimal_perturbation(net, x, label)):
        assert not found.success.any() and (found.distance == math.inf).all() and torch.equal(found.x, x)


@pytest.fixture
def flat():
    """A network and inputs at which every hidden unit is off and every slope zero; the label changes further out."""
    net = random_network((2, 2, 2), beta=(0.0, 0.0), bias_scale=0.0)
    with torch.no_grad():
        net.W[0].copy_(torch.eye(2))
        net.b[0].fill_(-1.0)
        net.W[1].copy_(torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
        net.b[1].copy_(torch.tensor([0.5, 0.0]))
    return net, torch.zeros(20, 2, dtype=torch.float64), torch.zeros(20, dtype=torch.int64)


def test_where_nothing_slopes_random_starts_find_a_way(flat):
    net, x, label = flat
    found = minimal_perturbation(net, x, label)
    consistent(net, x, label, found)
    assert found.success.double().mean() > 0.75
    assert not pgd(net, x, label, 8.0, restarts=1).success.any() and pgd(net, x, label, 8.0, restarts=4).success.any()


@given(case=CASES)
@settings(max_examples=30)
def test_no_attack_succeeds_inside_a_certified_radius(case):
    net = make(case)
    x = random_input(12, net.sizes[0], seed=case["seed"])
    certificate = lrrn.certify(net, x, "spectral")
    found = minimal_perturbation(net, x, certificate.prediction, steps=15, refine_steps=8, seed=case["seed"])
    consistent(net, x, certificate.prediction, found)
    assert (found.distance >= certificate.radius).all()
    reach = (certificate.radius * (1 - 1e-9)).clamp(max=1e6)
    tried = pgd(net, x, certificate.prediction, reach, steps=15, restarts=2, seed=case["seed"])
    assert not (tried.success & (certificate.radius > 0)).any()


@pytest.mark.parametrize(
    ("sizes", "beta", "constraint", "output"),
    [
        ((5, 4, 3), (1.0, 0.0), "nonneg", "free"),
        ((3, 6, 4), (0.4, 0.5), "box", "free"),
        ((5, 4, 6, 3), (3.0, 1.0, 1.0), "nonneg", "nonneg"),
        ((4, 5, 4, 3), (0.0, 1.0, 0.0), "free", (-0.6, 0.7)),
    ],
)
def test_every_method_stands_up_to_the_attacks(sizes, beta, constraint, output):
    net = random_network(sizes, beta=beta, constraint=constraint, output_constraint=output, scale=1.5)
    x = random_input(15, sizes[0])
    label = net.infer(x).output.argmax(-1)
    found = minimal_perturbation(net, x, label)
    estimate = empirical_lipschitz(net, x)
    for method in METHODS:
        assert (found.distance >= lrrn.certify(net, x, method).radius).all(), method
    for method in ("auto", "paper", "spectral", "multiplier"):
        assert estimate <= net.lipschitz(method) * (1 + 1e-5), method


@pytest.mark.parametrize("objective", ["contrastive", "margin"])
def test_no_attack_on_a_trained_network_succeeds_inside_a_certified_radius(objective):
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    model = lrrn.LRRNClassifier(
        (20, 24), objective=objective, beta=(1.0, 0.5, 0.0), epochs=6, random_state=0, standardize=objective == "margin"
    ).fit(X, y)
    result = audit.attack("m", model, X[:60], y[:60], method="spectral", steps=20)
    assert len(result.refuted) == 0 and np.isfinite(result.distances).all()
    assert (result.distances[~result.right] == 0).all()
    for size in (0.0, *result.eps):
        assert result.certified(size) <= result.attacked(size) <= result.clean
    # in the units of X: the audit's distance is that of a real input of the classifier
    scaled = torch.as_tensor((X[:60] - model.offset_in_) / model.scale_in_)
    label = torch.as_tensor(np.searchsorted(model.classes_, model.predict(X[:60])))
    own = minimal_perturbation(model.network_, scaled, label).distance.numpy() * model.scale_in_
    right = result.right
    assert (result.distances[right] <= own[right] * (1 + 1e-6)).all()
    assert np.median(result.distances[right] / own[right]) > 0.9


def test_an_attack_inside_a_radius_would_be_reported():
    right = np.array([True, True, False])
    result = audit.Audit("m", (0.1,), "auto", "deployed", right, np.array([0.5, 0.5, 9.0]), np.array([0.4, 0.5, 0.0]))
    assert result.refuted.tolist() == [0]


@given(case=CASES)
@settings(max_examples=30)
def test_empirical_constants_stay_below_proven_ones(case):
    net = make(case)
    x = random_input(10, net.sizes[0], seed=case["seed"])
    estimate = empirical_lipschitz(net, x, steps=6, seed=case["seed"])
    for method in ("spectral", "paper"):
        # the slopes are solved to 1e-6 at worst
        assert 0 <= estimate.quotient <= estimate <= net.lipschitz(method) * (1 + 1e-5)


def test_empirical_constant_of_a_linear_network_is_its_norm():
    net = random_network((7, 4), beta=(0.0,))
    exact = float(torch.linalg.matrix_norm(net.W[0].detach(), ord=2))
    estimate = empirical_lipschitz(net, random_input(3, 7))
    assert float(estimate) == pytest.approx(exact, rel=1e-9) and estimate.quotient == pytest.approx(exact, rel=1e-2)
    assert float(estimate) <= net.lipschitz("spectral")


def test_empirical_constant_grows_with_the_search():
    net = random_network((4, 8, 8, 3), scale=2.0)
    x = random_input(5, 4)
    few, many = (empirical_lipschitz(net, x, steps=steps) for steps in (0, 15))
    assert many > few
    at_found = empirical_lipschitz(net, many.x[None], steps=0)
    assert float(at_found) == pytest.approx(float(many), rel=1e-6) or many.quotient == float(many)


def test_an_estimate_is_no_bound():
    estimate = empirical_lipschitz(random_network((4, 3)), random_input(2, 4), steps=2)
    assert isinstance(estimate, LipschitzEstimate) and not isinstance(estimate, lrrn.LipschitzBound)
    assert not issubclass(LipschitzEstimate, lrrn.LipschitzBound) and "estimate" in LipschitzEstimate.__doc__
    for same in (copy.deepcopy(estimate), pickle.loads(pickle.dumps(estimate))):
        assert type(same) is LipschitzEstimate and same == estimate and same.quotient == estimate.quotient
        assert torch.equal(same.x, estimate.x)
    assert repr(estimate).startswith("LipschitzEstimate(") and estimate.value == float(estimate)


@given(case=CASES)
@settings(max_examples=30)
def test_slopes_are_the_gradients_of_the_network(case):
    net = make(case)
    x = random_input(5, net.sizes[0], seed=case["seed"]).requires_grad_()
    y = net(x)
    rows = torch.stack([torch.autograd.grad(y[:, j].sum(), x, retain_graph=True)[0] for j in range(net.sizes[-1])], 1)
    slopes = Slopes(net)
    with torch.no_grad():
        z, outputs = slopes.outputs(x)
        table = jacobian(slopes, z)
        norm, direction = slopes.spectral(table)
    scale = 1 + float(rows.abs().max())
    torch.testing.assert_close(outputs, y.detach(), rtol=1e-5, atol=1e-5 * scale)
    torch.testing.assert_close(slopes.gradient(table), rows, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(slopes.lengths(table), rows.norm(dim=-1), rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(norm, torch.linalg.matrix_norm(rows, ord=2), rtol=0, atol=1e-5 * scale)
    stretched = (rows @ direction[:, :, None])[..., 0].norm(dim=-1)
    torch.testing.assert_close(stretched, norm, rtol=0, atol=1e-5 * scale)


def test_the_same_seed_gives_the_same_bits_and_another_one_other_starts(flat):
    one, two, other = (pgd(*flat, 8.0, restarts=4, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(one.x, two.x) and torch.equal(one.success, two.success)
    assert not torch.equal(one.x, other.x)
    net, x = random_network((6, 8, 4), scale=2.0), random_input(20, 6)
    label = net.infer(x).output.argmax(-1)
    assert torch.equal(minimal_perturbation(net, x, label).x, minimal_perturbation(net, x, label).x)
    assert empirical_lipschitz(net, x, seed=1) == empirical_lipschitz(net, x, seed=1)


def test_clipped_attacks_stay_in_the_box():
    net = random_network((6, 8, 4), scale=2.0)
    x = random_input(30, 6).clamp(-1, 1)
    label = net.infer(x).output.argmax(-1)
    anywhere = minimal_perturbation(net, x, label)
    high = torch.full((6,), 1.2, dtype=torch.float64)
    for clip in ((-1.2, 1.2), (-high, high)):
        for found in (pgd(net, x, label, 1.0, clip=clip), minimal_perturbation(net, x, label, clip=clip)):
            consistent(net, x, label, found)
            assert (found.x.abs() <= 1.2 + 1e-15).all() and found.success.any()
    assert (anywhere.x.abs() > 1.2).any()
    with pytest.raises(ValueError, match="row 0 of x lies outside of clip"):
        pgd(net, x + 5, label, 1.0, clip=(-1.0, 1.0))


def test_many_samples_are_attacked_in_chunks(monkeypatch):
    net = random_network((6, 8, 4), scale=2.0)
    x = random_input(20, 6)
    label = net.infer(x).output.argmax(-1)
    whole = minimal_perturbation(net, x, label)
    monkeypatch.setattr(import_module("lrrn.attacks.walker"), "CHUNK_NUMBERS", 7 * 4 * 12)
    parts = minimal_perturbation(net, x, label)
    consistent(net, x, label, parts)
    torch.testing.assert_close(whole.distance, parts.distance, rtol=1e-3, atol=1e-6)


def test_bad_requests():
    net, x, label = random_network((6, 5, 4)), random_input(2, 6), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="eps must be finite and at least 0"):
        pgd(net, x, label, -1.0)
    with pytest.raises(ValueError, match="steps and restarts must be at least 1; got 0 and 3"):
        pgd(net, x, label, 1.0, steps=0)
    with pytest.raises(ValueError, match="steps and rivals must be at least 1"):
        minimal_perturbation(net, x, label, rivals=0)
    with pytest.raises(ValueError, match="from 0 to 3; got 0 to 4"):
        pgd(net, x, torch.tensor([0, 4]), 1.0)
    with pytest.raises(ValueError, match="label must hold 2 output numbers"):
        pgd(net, x, torch.zeros(2), 1.0)
    with pytest.raises(ValueError, match="this network has one"):
        pgd(random_network((6, 5, 1)), x, label, 1.0)
    with pytest.raises(ValueError, match="x must have shape"):
        pgd(net, x[:, :5], label, 1.0)
    with pytest.raises(ValueError, match="steps must be at least 0"):
        empirical_lipschitz(net, x, steps=-1)
    with pytest.raises(ValueError, match="x is empty"):
        empirical_lipschitz(net, x[:0])
    with pytest.raises(ValueError, match="x must have shape"):
        empirical_lipschitz(net, x[:, :5])


def test_what_is_no_network_or_no_tensor_is_named():
    net, x, label = random_network((6, 5, 4)), random_input(2, 6), torch.zeros(2, dtype=torch.int64)
    for attack in (
        lambda net, x: pgd(net, x, label, 1.0),
        lambda net, x: minimal_perturbation(net, x, label),
        lambda net, x: strongest_perturbation(net, x, label, 1.0),
        empirical_lipschitz,
    ):
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor; got ndarray\. Use torch\.as_tensor\(x\)"):
            attack(net, x.numpy())
        with pytest.raises(TypeError, match=r"net must be an lrrn\.LRRN.*; got LRRNClassifier; (attack|give) its network_"):
            attack(lrrn.LRRNClassifier(epochs=1, device="cpu").fit(x.numpy(), [0, 1]), x)
        with pytest.raises(ValueError, match="x has a non-finite value"):
            attack(net, x * math.nan)
    with pytest.raises(TypeError, match=r"net must be an lrrn\.LRRN; got Linear"):
        empirical_lipschitz(torch.nn.Linear(6, 4).double(), x)
    module = torch.nn.Linear(6, 4).double()
    with pytest.raises(ValueError, match=r"x must have shape \(n_samples, n_features\); got \(2, 1, 6\)"):
        pgd(module, x[:, None], label, 1.0)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor; got list"):
        pgd(module, x.tolist(), label, 1.0)


def test_sizes_and_ends_of_another_length_are_refused():
    net, x, label = random_network((6, 5, 4)), random_input(2, 6), torch.zeros(2, dtype=torch.int64)
    for eps in (torch.ones(3), torch.ones(2, 1)):
        with pytest.raises(ValueError, match="eps must be a number, or 2 of them, one for each row of x; got shape"):
            pgd(net, x, label, eps)
    for clip in ((-torch.ones(5), 1.0), (-9.0, torch.ones(1, 2, 3))):
        with pytest.raises(ValueError, match="an end of clip must be a number, or 6 of them, one for each feature of x; got"):
            pgd(net, x, label, 1.0, clip=clip)


def test_inputs_of_any_dtype_are_attacked():
    net, label = random_network((6, 8, 4), scale=2.0), torch.zeros(5, dtype=torch.int64)
    whole = torch.arange(30).reshape(5, 6) % 4 - 2
    assert torch.equal(pgd(net, whole, label, 1.0).x, pgd(net, whole.double(), label, 1.0).x)


def test_ends_of_clip_may_be_images(monkeypatch):
    net = convolutional("one", monkeypatch)
    shape = net.image_shape
    images = random_input(4, math.prod(shape)).clamp(-1, 1).reshape(4, *shape)
    label = net.infer(images).output.argmax(-1)
    ends = 1.0 + torch.arange(math.prod(shape), dtype=torch.float64) / math.prod(shape)
    flat, shaped = (pgd(net, images, label, 5.0, clip=(-high, high)) for high in (ends, ends.reshape(shape)))
    assert torch.equal(flat.x, shaped.x) and (flat.x.abs() <= ends + 1e-15).all()


# foolbox 3.3 imports from a place that SciPy has deprecated
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_foolbox_sees_an_ordinary_module_and_does_not_get_inside_a_radius(linear):
    foolbox = pytest.importorskip("foolbox")
    net, x, label, exact = linear
    model = as_foolbox(net, (-100.0, 100.0))
    _, clipped, _ = foolbox.attacks.L2DeepFoolAttack(overshoot=1e-4)(model, x, label, epsilons=None)
    distance = (clipped - x).norm(dim=1)
    changed = net.infer(clipped).output.argmax(-1) != label
    assert changed.any() and (distance[changed] >= exact[changed] * (1 - 1e-9)).all()
    images = x.float().reshape(-1, 1, 2, 4)
    torch.testing.assert_close(model(images).double(), net(x), rtol=1e-5, atol=1e-5)
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_a_search_in_float32_is_confirmed_in_float64(linear, monkeypatch):
    """What wide networks get, on a linear one whose distances are known, and on one with hidden units."""
    net, x = random_network((8, 12, 5)), random_input(20, 8)
    label = net.infer(x).output.argmax(-1)
    exact = minimal_perturbation(net, x, label).distance
    conv = convolutional("one", monkeypatch)
    models = ((net, x, Slopes(net)), (conv, random_input(4, conv.sizes[0]), Slopes(conv)))
    monkeypatch.setattr(import_module("lrrn.attacks.slopes"), "WIDE", 0)
    for model, at, slopes in models:
        v, low = random_input(len(at), model.sizes[-1], seed=1), Slopes(model)
        (z, y), (z_32, y_32) = (each.outputs(at) for each in (slopes, low))
        assert (z.dtype, z_32.dtype, y_32.dtype) == (torch.float64, torch.float32, torch.float64)
        torch.testing.assert_close(y_32, y, rtol=1e-3, atol=1e-3)
        theirs, mine = slopes.gradient(slopes.coefficients(z, v)), low.gradient(low.coefficients(z_32, v))
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)
    for model, at, right, distance, less in ((net, x, label, exact, 0.98), (*linear, 1 - 1e-9)):
        attack = minimal_perturbation(model, at, right)
        consistent(model, at, right, attack)
        assert attack.success.all()
        assert (attack.distance >= less * distance).all() and (attack.distance <= 1.02 * distance).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_image_model_is_the_network_on_flat_images(dtype):
    net = random_network((12, 6, 4))
    model = as_image_model(net, (1, 3, 4))
    images = random_input(5, 12, dtype=dtype).reshape(5, 1, 3, 4)
    scores = model(images)
    assert scores.dtype == dtype and not model.training
    torch.testing.assert_close(scores, net.infer(images.flatten(1).double(), tol=1e-11).output.to(dtype), rtol=1e-6, atol=1e-9)
    assert next(model.parameters()).device == net.W[0].device


def test_gradients_flow_to_the_images_and_not_into_the_network(linear):
    net, x, _, _ = linear
    images = x.reshape(-1, 1, 2, 4).clone().requires_grad_()
    as_image_model(net, (1, 2, 4))(images)[:, 3].sum().backward()
    torch.testing.assert_close(images.grad.flatten(1), net.W[0].detach()[3].expand_as(x))
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_an_image_model_keeps_the_network_it_was_given():
    net, x = random_network((4, 3)), random_input(2, 4)
    model, before = as_image_model(net, (1, 2, 2)), net(x).detach()
    with torch.no_grad():
        net.W[0].mul_(2.0)
    assert torch.equal(model(x.reshape(-1, 1, 2, 2)), before)


def test_an_image_model_refuses_what_does_not_fit():
    net = random_network((12, 6, 4))
    with pytest.raises(ValueError, match="has 9 numbers, and the network has 12 inputs"):
        as_image_model(net, (1, 3, 3))
    for shape in ((3, 4), (-1, -3, 4)):
        with pytest.raises(ValueError, match=r"must be \(channels, height, width\)"):
            as_image_model(net, shape)
    with pytest.raises(NotFittedError, match="this LRRNClassifier is not fitted yet; call fit first"):
        as_image_model(lrrn.LRRNClassifier(), (1, 3, 4))
    with pytest.raises(TypeError, match=r"must be an lrrn\.LRRN or a fitted LRRNClassifier; got Linear"):
        as_image_model(torch.nn.Linear(12, 4), (1, 3, 4))
    with pytest.raises(ValueError, match="this network has one"):
        as_image_model(random_network((12, 6, 1)), (1, 3, 4))
    model = as_image_model(net, [1, 3, 4])
    for shape in ((2, 12), (2, 1, 4, 3), (2, 3, 4), (1, 3, 4)):
        with pytest.raises(ValueError, match=r"must have shape \(n, 1, 3, 4\)"):
            model(torch.zeros(shape))


@pytest.fixture(scope="module")
def torchattacks():
    return pytest.importorskip("torchattacks", reason="torchattacks is in the benchmark environment only")


@pytest.mark.parametrize("part", ["APGD-CE", "APGD-T", "FAB-T", "Square"])
def test_torchattacks_finds_the_boundaries_of_a_linear_classifier_and_nothing_nearer(torchattacks, part):
    net = random_network((36, 5), beta=(0.0,), bias_scale=0.0)
    x = (0.5 + 0.1 * random_input(40, 36)).float().double()
    w = net.W[0].detach()
    y = x @ w.mT
    label = y.argmax(-1)
    gaps = (w[label][:, None] - w).norm(dim=-1)
    exact = ((y.gather(1, label[:, None]) - y) / gaps).scatter(1, label[:, None], math.inf).amin(1)
    eps = float(exact.median())
    attack = autoattack.parts(as_image_model(net, (1, 6, 6)), 5, eps, steps=30, queries=300, seed=0)[part]
    moved = attack(x.float().reshape(-1, 1, 6, 6), label).detach().double().flatten(1)
    changed = net.infer(moved).output.argmax(-1) != label
    size = (moved - x).norm(dim=1)
    assert (size[changed] >= exact[changed] * (1 - 1e-6)).all() and (size[changed] <= eps * (1 + autoattack.SLACK)).all()
    # the targeted ones try every boundary; the others climb one loss, which may lead past a nearer one
    within = changed[exact < 0.95 * eps]
    assert within.all() if part in ("APGD-T", "FAB-T") else within.any()


def test_autoattack_counts_what_the_classifier_confirms(torchattacks):
    X = np.clip(0.5 + 0.2 * random_input(60, 36).numpy(), 0.0, 1.0).astype(np.float32)
    y = np.array(list("abcde"))[(X @ random_input(36, 5).numpy()).argmax(1)]
    model = lrrn.LRRNClassifier((8,), epochs=20, standardize=True, random_state=0).fit(X, y)
    right = model.predict(X) == y

    def run():
        distances = np.where(right, np.inf, 0.0)
        scores, labels = as_image_model(model, (1, 6, 6)), np.searchsorted(model.classes_, y)
        given = scores, model.predict, X, y, labels, distances
        return distances, [autoattack.autoattack(*given, eps, (1, 6, 6), steps=20, queries=50) for eps in (0.1, 0.3)]

    distances, done = run()
    broken = np.isfinite(distances) & right
    assert broken.any() and not any("failed" in part for parts in done for part in parts.values())
    assert sum(part["broken"] for parts in done for part in parts.values()) == broken.sum()
    assert (distances[right] >= model.certified_radius(X[right])).all()
    assert (distances[broken] <= 0.3 * (1 + autoattack.SLACK)).all()
    assert np.array_equal(distances, run()[0])
    few = as_image_model(random_network((36, 3), beta=(0.0,)), (1, 6, 6))
    with pytest.raises(ValueError, match="at least 4 classes"):
        autoattack.autoattack(few, model.predict, X, y, np.zeros(60, int), distances, 0.1, (1, 6, 6))


def test_autoattack_without_the_limit_of_pixels_finds_nearer_boundaries(torchattacks):
    net = random_network((36, 5), beta=(0.0,), bias_scale=0.0)
    x = (random_input(30, 36) > 0).double()  # all pixels at 0 or 1
    w = net.W[0].detach()
    y = x @ w.mT
    label = y.argmax(-1)
    gaps = (w[label][:, None] - w).norm(dim=-1)
    exact = ((y.gather(1, label[:, None]) - y) / gaps).scatter(1, label[:, None], math.inf).amin(1).numpy()
    eps, X, found = float(np.median(exact)), x.numpy(), {}
    for clip in (True, False):
        found[clip] = np.full(len(X), np.inf)
        given = as_image_model(net, (1, 6, 6)), lambda moved: net.infer(torch.from_numpy(moved)).output.argmax(-1).numpy()
        options = {"clip": clip, "steps": 30, "queries": 100}
        autoattack.autoattack(*given, X, label.numpy(), label.numpy(), found[clip], eps, (1, 6, 6), **options)
    broken = np.isfinite(found[False])
    assert broken[exact < 0.95 * eps].all() and np.isfinite(found[True]).sum() < broken.sum()
    assert (found[False][broken] >= exact[broken] * (1 - 1e-6)).all()
    assert (found[False][broken] <= eps * (1 + autoattack.SLACK)).all()


@pytest.mark.parametrize("standardize", [True, "features"])
def test_the_adapter_scales_as_the_classifier_does(standardize):
    X = 100 + 50 * random_input(60, 4).numpy() * [1, 2, 0.1, 3]
    y = (X.sum(axis=1) > 400).astype(int)
    model = lrrn.LRRNClassifier((5,), epochs=2, standardize=standardize, random_state=0).fit(X, y)
    scores = Scores(model)(torch.as_tensor(X)).detach()
    np.testing.assert_allclose((scores[:, 1] - scores[:, 0]).numpy(), model.decision_function(X), rtol=1e-4, atol=1e-5)
    assert np.array_equal(model.classes_[scores.argmax(-1).numpy()], model.predict(X))
    model.objective = "class_energy"
    with pytest.raises(ValueError, match="class_energy"):
        Scores(model)


def test_without_foolbox_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "foolbox":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"pip install 'lrrn\[attacks\]'"):
        as_foolbox(random_network((4, 3)), (0.0, 1.0))
