"""Mechanisms that a defect could break without any other test noticing."""

from __future__ import annotations

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import lrrn
from lrrn.certificates.outputs import pair_constants
from lrrn.learning import CrossEntropy, Data, Settings, Trainer
from oracles import random_input, random_network


def test_every_epoch_sees_all_samples_in_an_order_of_its_own():
    seen = []

    class Recorder:
        def __call__(self, net, batch):
            seen.append(batch.label.tolist())
            return CrossEntropy()(net, batch)

    n = 30
    net, x = random_network((5, 4, n), dtype=torch.float32), random_input(n, 5, dtype=torch.float32)
    Trainer(net, Recorder(), Settings(epochs=4, batch_size=8, learning_rate=1e-6)).fit(Data(x, None, torch.arange(n)))
    assert [len(batch) for batch in seen] == [8, 8, 8, 6] * 4
    epochs = [[row for batch in seen[4 * i : 4 * i + 4] for row in batch] for i in range(4)]
    assert all(sorted(order) == list(range(n)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 4 and list(range(n)) not in epochs


# --- certificates of a network whose errors are known in closed form ------------------------------------------------------


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
        allowed = (leads / pair_constants(net, "spectral").rho[best]).scatter(1, best[:, None], torch.inf).amin(-1)
        assert (certificate.radius <= allowed.clamp(min=0) * (1 + 1e-9)).all()
        top = net.infer(x, solver="coordinate_descent", tol=tol).output.topk(2).values
        exact = y.topk(2).values
        larger += int(((top[:, 0] - top[:, 1]) > (exact[:, 0] - exact[:, 1])).sum())
    assert larger > 50  # the loose solves do overstate many a lead


def test_no_radius_without_convergence_however_small_the_error():
    """After 30 sweeps the error is small enough for radii; only the tolerance asked for says whether they count."""
    net, x = random_network((8, 10, 10, 4), seed=1), random_input(20, 8)
    options = dict(solver="coordinate_descent", max_sweeps=30)
    assert (lrrn.certify(net, x, tol=1e-4, **options).radius > 0).sum() > 10
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
        assert (slope.norm(dim=1) <= pair_constants(net, method).rho[0, 1] * (1 + 1e-7)).all()
