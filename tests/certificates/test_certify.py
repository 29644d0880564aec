"""Certificates must hold: perturbations inside a radius, found by looking hard for one, never change the label."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning

import lrrn
from lrrn import certificates
from lrrn.attacks import empirical_lipschitz, minimal_perturbation, pgd, strongest_perturbation
from lrrn.bounds.outputs import linear_response, single_constants
from lrrn.certificates.radius import METHODS
from oracles import pair_bounds, random_input, random_network
from random_certificates import CASES, make, worst_within


@given(case=CASES)
@settings(max_examples=25)
def test_no_perturbation_inside_the_radius_changes_the_label(case):
    net = make(case)
    x = random_input(12, net.sizes[0], seed=case["seed"])
    for method in ("spectral", "auto"):
        certificate = lrrn.certify(net, x, method)
        reach = certificate.radius.clamp(max=1e6)
        certain = certificate.radius > 0
        assert not (worst_within(net, x, certificate.prediction, reach) & certain).any()


@given(case=CASES)
@settings(max_examples=8)
def test_methods_are_ordered(case):
    net = make(case)
    x = random_input(20, net.sizes[0], seed=case["seed"])
    radii = {method: lrrn.certify(net, x, method).radius for method in METHODS if method != "local"}
    slack = 1e-9 * (1 + radii["paper"])
    assert (radii["pairwise"] >= radii["paper"] - slack).all() and (radii["spectral"] >= radii["pairwise"] - slack).all()
    assert (radii["auto"] >= radii["spectral"] - slack).all() and (radii["multiplier"] >= radii["spectral"] - slack).all()
    exact = lrrn.certify(net, x, guarantee="exact").radius
    assert (exact >= radii["auto"] - slack).all()


def test_the_default_is_the_dual_where_the_sizes_of_the_network_allow(monkeypatch):
    """A choice by sizes, without a search for pairs of outputs, and at least as good as that search."""
    x = random_input(30, 6, seed=5)
    net = random_network((6, 9, 7, 3), scale=1.5, seed=4)
    today = lrrn.certify(net, x, "multiplier", seconds=0.5).radius
    with monkeypatch.context() as patch:
        patch.setattr("lrrn.bounds.multiplier.MultiplierProblem.rows", None)
        found = lrrn.certify(copy.deepcopy(net), x)
    assert found.method == "shared" and (found.radius >= today * (1 - 1e-9)).all()
    assert float((found.radius / today)[today > 0].median()) > 1.1
    alone = lrrn.certify(net, x[:1])
    assert alone.method == "shared" and float(alone.radius) == pytest.approx(float(found.radius[0]), rel=1e-3)
    assert lrrn.certify(copy.deepcopy(net).float(), x).method == "shared"
    assert not worst_within(net, x, found.prediction, found.radius)[found.radius > 0].any()
    # with a budget for the constants, the dual starts from the multiplier bound
    assert (lrrn.certify(net, x, seconds=0.5).radius >= found.radius * (1 - 1e-3)).all()


def test_where_units_have_two_bounds_the_default_is_the_larger_of_both():
    net, x = random_network((6, 8, 3), constraint="box", scale=3.0, seed=0), random_input(40, 6, seed=1)
    found, today = lrrn.certify(net, x), lrrn.certify(net, x, "multiplier")
    assert found.method == "shared" and (found.radius >= today.radius * (1 - 1e-3)).all()


@pytest.mark.parametrize(("limit", "most", "beta"), [("SEARCHED", 15, (1, 0, 0)), ("WIDE_UNITS", 15, 1.0), ("OUTPUTS", 2, 1.0)])
def test_beyond_its_sizes_the_default_is_the_multiplier_bound(monkeypatch, limit, most, beta):
    """The first size is that of networks in which one multiplier per layer is not admissible."""
    net, x = random_network((6, 9, 7, 3), beta=beta, scale=1.5, seed=4), random_input(30, 6, seed=5)
    monkeypatch.setattr("lrrn.certificates.radius.SEARCHED", 15)
    monkeypatch.setattr(f"lrrn.certificates.radius.{limit}", most)
    found = lrrn.certify(net, x, seconds=0.5)
    assert found.method == "multiplier"
    assert torch.equal(found.radius, lrrn.certify(net, x, "multiplier", seconds=0.5).radius)
    assert lrrn.certify(random_network((6, 3), seed=1), x).method == "spectral"
    assert lrrn.certify(net, x, "local").method == "local"


@given(case=CASES)
@settings(max_examples=25)
def test_constants_bound_the_slopes_of_outputs_and_differences(case):
    net = make(case)
    x = (2 * random_input(30, net.sizes[0], seed=case["seed"])).requires_grad_()
    y = net(x)
    rows = torch.stack([torch.autograd.grad(y[:, j].sum(), x, retain_graph=True)[0] for j in range(net.sizes[-1])], 1)
    single = single_constants(net.energy_snapshot(torch.float64)).rho
    assert (rows.norm(dim=-1) <= single * (1 + 1e-7)).all()
    differences = (rows[:, :, None] - rows[:, None]).norm(dim=-1)
    for method in ("paper", "pairwise", "spectral", "auto"):
        assert (differences <= pair_bounds(net, method) * (1 + 1e-7) + 1e-12).all()


def test_the_papers_radius_is_its_formula():
    net = random_network((6, 5, 4), beta=(1.0, 0.0))
    x = random_input(10, 6)
    certificate = lrrn.certify(net, x, "paper", guarantee="exact", tol=1e-12)
    rho = float(torch.linalg.matrix_norm(net.W[-1].detach(), ord=2))
    torch.testing.assert_close(certificate.radius, certificate.margin / (2**0.5 * rho), rtol=1e-5, atol=1e-9)


def test_pairwise_radius_of_a_free_output_by_hand():
    net = random_network((6, 5, 4), beta=(1.0, 0.0))
    x = random_input(10, 6)
    certificate = lrrn.certify(net, x, "pairwise", guarantee="exact", tol=1e-12)
    y, w = net.infer(x, tol=1e-12).output, net.W[-1].detach()
    for i in range(10):
        best = int(y[i].argmax())
        rivals = [j for j in range(4) if j != best]
        expected = min(float((y[i, best] - y[i, j]) / (w[best] - w[j]).norm()) for j in rivals)
        assert float(certificate.radius[i]) == pytest.approx(expected, rel=1e-6)
        assert int(certificate.prediction[i]) == best


def test_a_linear_classifier_gets_its_exact_radius():
    """One layer, beta 0: the distance to the nearest decision boundary is known exactly."""
    net = random_network((6, 4), beta=(0.0,))
    x = random_input(10, 6)
    certificate = lrrn.certify(net, x)
    y, w = (x @ net.W[0].mT + net.b[0]).detach(), net.W[0].detach()
    for i in range(10):
        best = int(y[i].argmax())
        exact = min(float((y[i, best] - y[i, j]) / (w[best] - w[j]).norm()) for j in range(4) if j != best)
        assert exact * (1 - 1e-9) <= float(certificate.radius[i]) <= exact


def test_a_loose_solver_shrinks_the_radius_and_it_stays_sound():
    net = random_network((8, 10, 10, 4), scale=2.0)
    x = random_input(40, 8)
    tight = lrrn.certify(net, x, tol=1e-12)
    for tol in (1e-2, 1e-3, 1e-4):
        loose = lrrn.certify(net, x, tol=tol)
        assert (loose.radius <= tight.radius).all() and (loose.radius < tight.radius).any()
        exact = lrrn.certify(net, x, tol=tol, guarantee="exact")
        assert (exact.radius <= tight.radius + 2 * exact.error_bound).all()
        same = loose.prediction == tight.prediction
        assert (loose.radius[~same] == 0).all()


def test_an_unconverged_sample_gets_radius_zero_and_a_word_why():
    net = random_network((8, 10, 10, 4), scale=3.0)
    with pytest.warns(ConvergenceWarning, match="stopped at max_sweeps"):
        certificate = lrrn.certify(net, random_input(5, 8), solver="coordinate_descent", tol=1e-12, max_sweeps=1)
    assert (certificate.radius == 0).all()


def test_no_radius_without_a_proven_eigenvalue():
    net = random_network((10, 8, 8, 8, 3), beta=0.0, scale=2000.0, output_constraint="box")
    assert (lrrn.certify(net, random_input(3, 10), tol=1e-3).radius == 0).all()


def test_certified_accuracy():
    net = random_network((6, 5, 4), beta=(1.0, 0.0))
    x = random_input(50, 6)
    certificate = lrrn.certify(net, x)
    y = certificate.prediction.clone()
    y[::5] = (y[::5] + 1) % 4
    assert certificate.certified_accuracy(y, 0.0) == pytest.approx(0.8)
    eps = float(certificate.radius.median())
    right = certificate.prediction == y
    assert certificate.certified_accuracy(y, eps) == pytest.approx(float((right & (certificate.radius > eps)).double().mean()))
    assert certificate.certified_accuracy(y, 1e9) == 0.0
    with pytest.raises(ValueError, match="eps must be at least 0; got -1"):
        certificate.certified_accuracy(y, -1)


def test_bad_requests():
    net, x = random_network((6, 5, 4)), random_input(2, 6)
    with pytest.raises(ValueError, match="unknown method 'exact'"):
        lrrn.certify(net, x, "exact")
    with pytest.raises(ValueError, match="unknown guarantee 'maybe'"):
        lrrn.certify(net, x, guarantee="maybe")
    with pytest.raises(ValueError, match="this network has one"):
        lrrn.certify(random_network((6, 5, 1)), x)
    with pytest.raises(ValueError, match="eps must be at least 0"):
        lrrn.output_interval(net, x, -0.1)


@given(case=CASES, eps=st.sampled_from([0.0, 0.01, 0.3]))
@settings(max_examples=20)
def test_outputs_stay_in_their_intervals(case, eps):
    net = make(case)
    x = random_input(10, net.sizes[0], seed=case["seed"])
    lower, upper = lrrn.output_interval(net, x, eps)
    generator = torch.Generator().manual_seed(case["seed"])
    for _ in range(20):
        delta = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        y = net.infer(x + eps * delta / delta.norm(dim=1, keepdim=True)).output
        assert (lower <= y).all() and (y <= upper).all()
    allowed = net.intervals[-1]
    assert (lower >= allowed.lo).all() and (upper <= allowed.hi).all()


def test_linear_response_error_is_bounded():
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1e3, 1e6):
        w = scale * torch.randn(4, 6, dtype=torch.float64, generator=generator)
        rows, slack = linear_response(w, 0.7)
        u, s, v = torch.linalg.svd(w, full_matrices=False)
        exact = u @ torch.diag(1.7 * s / (1 + 0.7 * s * s)) @ v
        assert float((rows - exact).norm()) <= slack


def test_float32_networks_are_certified_for_their_exact_weights():
    net = random_network((8, 10, 4), dtype=torch.float32)
    x = random_input(20, 8, dtype=torch.float32)
    double = copy.deepcopy(net).double()
    torch.testing.assert_close(lrrn.certify(net, x).radius, lrrn.certify(double, x.double()).radius, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(20))
def test_the_error_bound_covers_every_output_that_may_be_second(seed):
    """Runners-up that nearly tie, read off very different rows, at a loose solve: which is second in truth is not known."""
    net = random_network((8, 6, 4), gamma=0.3, scale=1.5, seed=seed)
    x = random_input(8, 8, seed=seed)
    exact = net.infer(x, tol=1e-12).output
    with torch.no_grad():
        # the second output is the first less a constant; at the first sample the others nearly tie with it
        net.W[-1][1], net.b[-1][1] = net.W[-1][0], net.b[-1][0] - 1.0
        net.b[-1][2:] += exact[0, 0] - 1.0 - exact[0, 2:]
    exact = net.infer(x, tol=1e-12).output.topk(2).values
    truth = exact[:, 0] - exact[:, 1]
    for tol in (0.3, 0.03):
        certificate = lrrn.certify(net, x, "spectral", tol=tol)
        assert ((certificate.margin - truth).abs() <= certificate.error_bound + 1e-9).all()


@pytest.mark.parametrize("n_outputs", [2, 3, 10, 40])
def test_equal_outputs_have_one_label_everywhere(n_outputs):
    net, x = random_network((5, 4, n_outputs)), random_input(6, 5)
    with torch.no_grad():
        net.W[-1].zero_()
        net.b[-1].fill_(0.5)
        net.b[-1][0] = 0.0  # the first of the largest is the second
    for method in ("spectral", "shared"):
        certificate = lrrn.certify(net, x, method)
        assert (certificate.prediction == 1).all() or n_outputs == 2
        assert torch.equal(certificate.prediction, net(x).argmax(1))
        assert torch.equal(certificate.prediction, net.infer(x).output.argmax(1))
        assert n_outputs == 2 or (not certificate.margin.any() and not certificate.radius.any())


def rotation() -> lrrn.LRRN:
    """H is the identity and W_0 a rotation: z_1 = q = W_0 x + b_0 moves exactly as far as x, and is off by its residual."""
    net = random_network((6, 6, 4), beta=0.0, constraint="free")
    with torch.no_grad():
        net.W[0].copy_(torch.linalg.qr(net.W[0])[0])
    return net


@pytest.mark.parametrize("tol", [1e-2, 1e-4])
def test_the_radius_allows_for_what_the_next_solve_may_leave(tol):
    """It may stop at a residual of tol max(1, |q|), and |q| grows as fast as the input moves."""
    net, x = rotation(), random_input(12, 6)
    certificate = lrrn.certify(net, x, tol=tol)
    q = (x @ net.W[0].mT + net.b[0]).detach()
    w, y = net.W[1].detach(), (q @ net.W[1].mT + net.b[1]).detach()
    assert (q.norm(dim=1) > 1).all()
    for i in range(12):
        best = int(y[i].argmax())
        leads = [float((y[i, best] - y[i, j]) / (w[best] - w[j]).norm()) for j in range(4) if j != best]
        expected = (min(leads) - tol * float(q[i].norm())) / (1 + tol)
        assert float(certificate.radius[i]) == pytest.approx(max(expected, 0.0), rel=1e-6)
    assert (certificate.radius > 0).sum() >= 6


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_the_interval_allows_for_what_the_next_solve_may_leave(eps):
    net, x, tol = rotation(), random_input(12, 6), 1e-2
    lower, upper = lrrn.output_interval(net, x, eps, tol=tol)
    q = (x @ net.W[0].mT + net.b[0]).detach()
    y, lengths = (q @ net.W[1].mT + net.b[1]).detach(), net.W[1].detach().norm(dim=1)
    reach = lengths * (eps + tol * (q.norm(dim=1, keepdim=True) + eps))
    torch.testing.assert_close(upper - y, reach, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(y - lower, reach, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("tol", [1e-1, 1e-2])
def test_a_radius_from_a_loose_solve_is_no_larger_than_the_exact_minimiser_allows(tol):
    larger = 0
    for seed in range(10):
        net, x = random_network((8, 10, 10, 4), scale=2.0, seed=seed), random_input(40, 8, seed=seed)
        y = net.infer(x, solver="newton", tol=1e-12).output
        certificate = lrrn.certify(net, x, "spectral", guarantee="exact", solver="coordinate_descent", tol=tol)
        best = certificate.prediction
        leads = y.gather(1, best[:, None]) - y
        allowed = (leads / pair_bounds(net, "spectral")[best]).scatter(1, best[:, None], torch.inf).amin(-1)
        assert (certificate.radius <= allowed.clamp(min=0) * (1 + 1e-9)).all()
        top = net.infer(x, solver="coordinate_descent", tol=tol).output.topk(2).values
        exact = y.topk(2).values
        larger += int(((top[:, 0] - top[:, 1]) > (exact[:, 0] - exact[:, 1])).sum())
    assert larger > 50  # the loose solves do overstate many a lead


@pytest.mark.parametrize("method", ["auto", "spectral"])
def test_no_radius_without_convergence_however_small_the_error(method):
    """After 30 sweeps the error is small enough for radii; only the tolerance asked for says whether they count."""
    net, x = random_network((8, 10, 10, 4), seed=1), random_input(20, 8)
    options = dict(method=method, solver="coordinate_descent", max_sweeps=30)
    assert (lrrn.certify(net, x, tol=1e-4, **options).radius > 0).sum() > 5
    with pytest.warns(ConvergenceWarning, match="did not converge"):
        certificate = lrrn.certify(net, x, tol=1e-30, **options)
    assert (certificate.radius == 0).all() and float(certificate.error_bound.max()) < 1e-3


def test_a_clipped_output_stands_still_while_its_equal_moves():
    """Two equal rows, one output held at its end: the difference moves as fast as the other one alone."""
    net = random_network((6, 6, 2), beta=0.0, gamma=1e-3, constraint="free", output_constraint=(-50.0, 50.0))
    with torch.no_grad():
        net.W[0].copy_(torch.linalg.qr(net.W[0])[0])
        net.W[1][1] = net.W[1][0]
        net.b[1].copy_(torch.tensor([0.0, 100.0]))
    x = random_input(5, 6).requires_grad_()
    y = net(x)
    assert (y[:, 1] == 50).all() and (y[:, 0].abs() < 50).all()
    (slope,) = torch.autograd.grad((y[:, 1] - y[:, 0]).sum(), x)
    length = float(net.W[1][0].detach().norm())
    torch.testing.assert_close(slope.norm(dim=1), torch.full((5,), length, dtype=torch.float64), rtol=1e-2, atol=0)
    for method in ("paper", "pairwise", "spectral"):
        assert (slope.norm(dim=1) <= pair_bounds(net, method)[0, 1] * (1 + 1e-7)).all()


@pytest.fixture
def of_images():
    """A convolutional network by products, and four images of it."""
    net = lrrn.LRRN(((1, 6, 6), lrrn.Conv(3, 3), 3), generator=torch.Generator().manual_seed(0)).double()
    return net, random_input(4, 36, seed=1).reshape(4, 1, 6, 6)


@pytest.mark.parametrize(
    "certificate",
    [
        lambda net, x: lrrn.certify(net, x).radius,
        lambda net, x: torch.cat(lrrn.output_interval(net, x, 0.1)),
        lambda net, x: torch.cat(certificates.energy_interval(net, x, 0.1)),
        lambda net, x: certificates.decision_radius(net, x, 1.0),
        lambda net, x: certificates.certify_energies(net, x).radius,
        lambda net, x: pgd(net, x, net(x).argmax(-1), 0.2).x,
        lambda net, x: minimal_perturbation(net, x, net(x).argmax(-1)).distance,
        lambda net, x: strongest_perturbation(net, x, net(x).argmax(-1), 0.2),
        lambda net, x: torch.tensor(empirical_lipschitz(net, x).value),
    ],
)
def test_images_are_taken_as_vectors_are(of_images, certificate):
    net, images = of_images
    assert torch.equal(certificate(net, images), certificate(net, images.flatten(1)))


def test_what_is_not_a_network_is_named():
    X, y = load_iris(return_X_y=True)
    model = lrrn.LRRNClassifier(hidden_sizes=(4,), epochs=1).fit(X, y)
    for certificate in (lrrn.certify, certificates.certify_energies, lambda net, x: lrrn.output_interval(net, x, 0.1)):
        with pytest.raises(TypeError, match=r"must be an lrrn.LRRN; got LRRNClassifier; use its method certificate\(X\)"):
            certificate(model, torch.zeros(1, 4))
    with pytest.raises(TypeError, match="got LRRNClassifier; attack its network_"):
        pgd(model, torch.zeros(1, 4), torch.tensor([0]), 0.1)
    with pytest.raises(TypeError, match=r"x must be a torch.Tensor; got list"):
        lrrn.certify(model.network_, [[0.0] * 4])


@pytest.mark.parametrize("shape", [(4, 1), (1,), (5,)])
def test_labels_of_another_shape_are_no_accuracy(shape):
    certificate = lrrn.certify(random_network((3, 4, 2)), random_input(4, 3))
    with pytest.raises(ValueError, match="y must hold 4 indices of outputs"):
        certificate.certified_accuracy(torch.zeros(shape, dtype=torch.int64), 0.1)


def test_labels_between_indices_are_no_accuracy():
    certificate = lrrn.certify(random_network((3, 4, 2)), random_input(4, 3))
    with pytest.raises(ValueError, match=r"whole numbers; got torch.float64"):
        certificate.certified_accuracy(torch.full((4,), 0.5, dtype=torch.float64), 0.1)
