"""Labels of least clamped energy: constants against differences of energies, radii against closed forms and attacks."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear, minimize
from sklearn.datasets import load_digits

import lrrn
from lrrn.attacks import minimal_perturbation
from lrrn.certificates import certify_energies, class_energies
from lrrn.certificates.class_energies import ClampedEnergies, curvature, difference_constants
from oracles import PlainNetwork, full_qp, random_input, random_network
from random_certificates import CASES, make


def energies(net, x, tol=1e-11):
    """Energies clamped to every label, of shape (n, labels), by a solve to a small tolerance."""
    targets = torch.eye(net.sizes[-1], dtype=torch.float64)
    return torch.stack([net.infer(x, y.expand(len(x), -1), solver="newton", tol=tol).energy for y in targets], 1)


def differences(net, x):
    table = energies(net, x)
    return table[:, None, :] - table[:, :, None]


class LabelScores(torch.nn.Module):
    """Minus the energies clamped to the labels, with their exact gradients: those at fixed activations."""

    def __init__(self, net):
        super().__init__()
        self.net, self.energy = net, net.energy_snapshot(torch.float64)

    def forward(self, x):
        targets = torch.eye(self.net.sizes[-1], dtype=torch.float64)
        solved = [self.net.infer(x.detach(), y.expand(len(x), -1)).activations for y in targets]
        return -torch.stack([self.energy.value(x, [z.detach() for z in activations]) for activations in solved], 1)


# --- constants ------------------------------------------------------------------------------------------------------------


@given(case=CASES, far=st.sampled_from([1e-3, 0.3, 10.0]))
@settings(max_examples=40)
def test_differences_of_energies_are_nowhere_steeper_than_their_constants(case, far):
    assume(case["output"] != (-0.6, 0.7))  # targets are unit vectors
    net = make(case)
    x = random_input(10, net.sizes[0], seed=case["seed"])
    step = far * random_input(10, net.sizes[0], seed=case["seed"] + 1)
    before, after = differences(net, x), differences(net, x + step)
    slack = 1e-9 * (1 + before.abs() + after.abs() + energies(net, x + step).amax())
    limit = difference_constants(net.energy_snapshot(torch.float64)) * step.norm(dim=1)[:, None, None]
    assert ((after - before).abs() <= limit + slack).all()


@given(case=CASES)
@settings(max_examples=12)
def test_differences_of_energies_lie_above_a_parabola_with_their_gradient(case):
    assume(case["output"] != (-0.6, 0.7))
    net = make(case)
    x = random_input(6, net.sizes[0], seed=case["seed"])
    clamped, growth = ClampedEnergies.of(net, x, 1e-11, 1000), curvature(net.energy_snapshot(torch.float64))
    best = clamped.energy.argmin(1)
    slopes = clamped.slopes(best)

    def lead(inputs):
        table = energies(net, inputs)
        return table - table.gather(1, best[:, None])

    # the gradient by central differences, one input at a time
    h = 1e-5
    unit = torch.eye(net.sizes[0], dtype=torch.float64)
    gradient = torch.stack([(lead(x + h * e) - lead(x - h * e)) / (2 * h) for e in unit], -1)
    size = 1 + energies(net, x).amax()
    assert ((gradient.norm(dim=-1) - slopes).abs() <= 1e-8 * size + growth * h * math.sqrt(len(unit))).all()
    here = lead(x)
    for far in (0.01, 0.3, 5.0):
        for rival in range(net.sizes[-1]):
            down = -gradient[:, rival] / gradient[:, rival].norm(dim=1, keepdim=True).clamp(min=1e-12)
            for step in (far * down, far * torch.nn.functional.normalize(random_input(6, net.sizes[0], seed=rival), dim=1)):
                length = step.norm(dim=1, keepdim=True)
                floor = here - slopes * length - growth / 2 * length.square()
                assert (lead(x + step) >= floor - 1e-8 * (size + energies(net, x + step).amax())).all()


def test_constants_of_convolutions_are_those_of_their_matrices():
    generator = torch.Generator().manual_seed(0)
    layers = ((1, 7, 7), lrrn.Conv(3, 3, stride=2), lrrn.Conv(4, 2, pool=2), 4)
    net = lrrn.LRRN(layers, beta=(1.0, 0.5, 0.0), gamma=0.5, generator=generator, dtype=torch.float64)
    energy = net.energy_snapshot(torch.float64)
    constants, dense = difference_constants(energy), difference_constants(energy.unfolded)
    # the norms of convolutions may be slightly loose, and their smallest singular values are not used
    assert (constants >= dense * (1 - 1e-9)).all() and (constants <= 1.5 * dense + 1e-9).all()
    x, step = random_input(10, 49), random_input(10, 49, seed=1)
    moved = (differences(net, x + step) - differences(net, x)).abs()
    assert (moved <= constants * step.norm(dim=1)[:, None, None] + 1e-9).all()
    assert (certify_energies(net, x).radius > 0).any()


# --- radii ----------------------------------------------------------------------------------------------------------------


def one_unit(beta, last_beta, gamma=1e-3):
    """One input, one free hidden unit at the steepest weight, two labels: the difference of energies is affine in x."""
    net = lrrn.LRRN((1, 1, 2), beta=(beta, last_beta), gamma=gamma, constraint="free", dtype=torch.float64)
    with torch.no_grad():
        net.W[0].fill_(1 / math.sqrt(beta))
        net.W[1].copy_(torch.tensor([[0.7], [-0.4]]))
        for p, value in ((net.b[0], 0.1), (net.c[0], -0.2), (net.b[1], 0.3), (net.c[1], 0.05)):
            p.fill_(value)
    return net


def boundary_of_one_unit(net, x):
    """Distance from x to the one input at which both labels have the same energy, from three values of each energy."""
    plain = PlainNetwork.of(net)

    def lead(at):
        values = []
        for y in np.eye(2):
            qp = full_qp(plain, np.array([at]), y)
            values.append(qp.value(np.linalg.solve(qp.h, qp.q)))
        return values[1] - values[0]

    slope = lead(1.0) - lead(0.0)
    assert lead(2.0) - lead(1.0) == pytest.approx(slope, rel=1e-9)
    return abs(lead(x) / slope)


@pytest.mark.parametrize("last_beta", [0.0, 1.0])
@pytest.mark.parametrize("beta", [0.3, 1.0, 3.0])
def test_the_radius_of_one_unit_is_the_distance_to_the_boundary(beta, last_beta):
    net = one_unit(beta, last_beta)
    for x in (-3.0, 0.2, 0.9, 8.0):
        radius = float(certify_energies(net, torch.tensor([[x]]), guarantee="exact").radius)
        exact = boundary_of_one_unit(net, x)
        assert 0.99 * exact <= radius <= exact * (1 + 1e-9)


def test_without_hidden_layers_the_radius_is_the_distance_to_the_boundary():
    net, x = random_network((6, 4), beta=(0.7,)), random_input(20, 6)
    w, b, c = (p[0].detach() for p in (net.W, net.b, net.c))
    table = torch.stack(
        [0.5 * ((y - x @ w.mT - b).square().sum(1) + 0.7 * (w.mT @ y - x - c).square().sum(1)) for y in torch.eye(4).double()],
        1,
    )
    best = table.argmin(1)
    distance = (table - table.gather(1, best[:, None])) / (1.7 * (w[best][:, None] - w).norm(dim=-1))
    expected = distance.scatter(1, best[:, None], math.inf).amin(1)
    torch.testing.assert_close(certify_energies(net, x).radius, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("gamma", [0.2, 1.0])
def test_a_radius_from_a_loose_solve_holds_for_the_exact_energies(gamma):
    some = 0
    for seed in range(6):
        net, x = random_network((6, 8, 8, 3), gamma=gamma, seed=seed), random_input(20, 6, seed=seed)
        exact = energies(net, x)
        for tol in (0.1, 0.01):
            certificate = certify_energies(net, x, tol=tol, guarantee="exact")
            label, certain = certificate.prediction, certificate.radius > 0
            assert torch.equal(exact.argmin(1)[certain], label[certain])
            at = x.clone().requires_grad_()
            scores = LabelScores(net)(at)
            for rival in range(3):
                (down,) = torch.autograd.grad(
                    (scores[:, rival] - scores.gather(1, label[:, None])[:, 0]).sum(), at, retain_graph=True
                )
                step = torch.nn.functional.normalize(down, dim=1) * 0.999999 * certificate.radius[:, None]
                assert torch.equal(energies(net, x + step).argmin(1)[certain], label[certain])
            some += int(certain.sum())
    assert some > 30


@pytest.mark.parametrize("tol", [1e-2, 3e-3])
def test_the_radius_allows_for_what_the_next_solve_may_leave(tol):
    """It may stop at a residual of tol max(1, |q|), with an energy that is too large by residual^2 / (2 H)."""
    net = one_unit(1.0, 0.0)
    h = float(net.energy_snapshot(torch.float64).clamped_hessian.dense())
    exceeded = 0
    for x in (-6.0, -3.0, 2.0, 3.0, 4.0):
        x = torch.tensor([[x]], dtype=torch.float64)
        for guarantee in ("deployed", "exact"):
            certificate = certify_energies(net, x, guarantee=guarantee, tol=tol)
            label, radius = int(certificate.prediction), float(certificate.radius)
            own = torch.eye(2, dtype=torch.float64)[[label]]
            for there in (x + 0.999999 * radius, x - 0.999999 * radius):
                scale = max(1.0, float(net.energy_snapshot(torch.float64).clamped(there, own).q.abs()))
                exact = energies(net, there)[0]
                kept = float(exact[1 - label]) > float(exact[label]) + (tol * scale) ** 2 / (2 * h)
                assert kept or guarantee == "exact" or radius == 0
                exceeded += guarantee == "exact" and not kept
        assert radius > 0
    assert exceeded >= 3


class LeastSquares:
    """The clamped energies as bounded least squares, by SciPy's active-set method: half of |A z + B x + r|^2 at its least."""

    def __init__(self, net):
        self.plain = PlainNetwork.of(net)
        sizes = self.plain.sizes[1:-1]
        self.ends, self.bounds = np.cumsum([0, *sizes]), (self.plain.lo[0], self.plain.hi[0])
        dim, d = int(self.ends[-1]), self.plain.sizes[0]
        self.targets = np.eye(self.plain.sizes[-1])
        self.constants = [self.residuals(np.zeros(d), np.zeros(dim), y) for y in self.targets]
        first = self.constants[0]
        self.a = np.stack([self.residuals(np.zeros(d), e, self.targets[0]) - first for e in np.eye(dim)], 1)
        self.b = np.stack([self.residuals(e, np.zeros(dim), self.targets[0]) - first for e in np.eye(d)], 1)

    def residuals(self, x, flat, y):
        net, z = self.plain, [x, *np.split(flat, self.ends[1:-1]), y]
        parts = []
        for k, w in enumerate(net.weights):
            parts.append(net.gamma ** (k / 2) * (z[k + 1] - w @ z[k] - net.b[k]))
            parts.append(net.gamma ** (k / 2) * net.beta[k] ** 0.5 * (w.T @ z[k + 1] - z[k] - net.c[k]))
        return np.concatenate(parts)

    def energies(self, x):
        """The energies of all labels, and their gradients in x."""
        values, gradients = [], []
        for constant in self.constants:
            shift = constant + self.b @ x
            r = self.a @ lsq_linear(self.a, -shift, self.bounds, method="bvls", tol=1e-14).x + shift
            values.append(0.5 * r @ r)
            gradients.append(r @ self.b)
        return np.array(values), np.array(gradients)


@pytest.mark.parametrize("seed", [0, 2, 3])
@pytest.mark.parametrize("gamma", [0.2, 1.0])
def test_no_radius_exceeds_what_an_independent_solver_finds(seed, gamma):
    """The nearest change of the label by sequential quadratic programming, from several starts for every rival."""
    net, x = random_network((3, 4, 4, 3), gamma=gamma, scale=2.0, seed=seed), random_input(3, 3, seed=seed)
    certificate, plain = certify_energies(net, x), LeastSquares(net)
    rng, ratios = np.random.default_rng(seed), []
    for here, label, radius in zip(x.numpy(), certificate.prediction.tolist(), certificate.radius.tolist(), strict=True):
        assert plain.energies(here)[0].argmin() == label
        nearest = math.inf
        for rival in {0, 1, 2} - {label}:

            def lead(d, part, here=here, label=label, rival=rival):
                found = plain.energies(here + d)[part]
                return 100 * (found[label] - found[rival])

            condition = {"type": "ineq", "fun": partial(lead, part=0), "jac": partial(lead, part=1)}
            for start in rng.normal(size=(3, 3)):
                found = minimize(lambda d: d @ d, start, jac=lambda d: 2 * d, method="SLSQP", constraints=condition).x
                if plain.energies(here + 1.0001 * found)[0].argmin() != label:
                    nearest = min(nearest, 1.0001 * float(np.linalg.norm(found)))
        assert radius < nearest
        ratios.append(radius / nearest)
    assert max(ratios) > 0.1


def test_a_lead_is_positive_up_to_its_first_zero():
    """The lead falls at a rate that grows from the slope up to the steepest, and errors are a polynomial of degree two."""
    generator = torch.Generator().manual_seed(0)
    lead, slope, steepest, *errors = (torch.rand((200, 1), generator=generator, dtype=torch.float64) for _ in range(6))
    for growth in (1e-3, 0.3, 10.0):
        for scale in (0.0, 0.3):
            constant, linear, square = (scale * error for error in errors)
            radius = class_energies._first_zero(lead, slope, growth, steepest, (constant, linear, square))
            # the integral of the rate, by the midpoint rule
            t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 * radius
            fall = torch.minimum(slope + growth * t, steepest).mean(1, keepdim=True) * radius
            left = lead - fall - constant - linear * radius - square * radius.square()
            assert (radius[lead <= constant] == 0).all()
            torch.testing.assert_close(left[lead > constant], torch.zeros_like(left[lead > constant]), rtol=0, atol=1e-7)


def test_a_batch_in_parts(monkeypatch):
    net, x = random_network((8, 10, 10, 4), scale=2.0), random_input(20, 8)
    whole = certify_energies(net, x)
    monkeypatch.setattr(class_energies, "NUMBERS", 3 * 8 * 4)
    parts = certify_energies(net, x)
    assert torch.equal(parts.prediction, whole.prediction)
    for name in ("margin", "radius", "error_bound"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-5, atol=1e-6)


def test_radii_of_digits_are_more_than_half_of_what_an_attack_finds():
    X, y = load_digits(return_X_y=True)
    X = X / 16
    model = lrrn.LRRNClassifier(objective="class_energy", epochs=10, random_state=0, device="cpu").fit(X[:1200], y[:1200])
    assert model.score(X[1200:], y[1200:]) > 0.85
    certificate, x = model.certificate(X[1200:1240]), torch.as_tensor(X[1200:1240])
    label = torch.as_tensor(certificate.prediction.astype(int))
    attack = minimal_perturbation(LabelScores(model.network_), x, label, steps=15, rivals=2, refine_steps=0)
    distance = attack.distance.numpy()
    roots = ClampedEnergies.of(model.network_, x, 1e-6, 1000).roots
    lead = roots.lower - roots.upper.gather(1, label[:, None])
    by_roots = lead.scatter(1, label[:, None], math.inf).amin(1) / (2 * roots.lipschitz)
    radius, loose, found = (float(np.median(values)) for values in (certificate.radius, by_roots.numpy(), distance))
    print(f"median radius {radius:.4f}, by root energies {loose:.4f}; median distance of the attack {found:.4f}")
    assert attack.success.all() and (certificate.radius < distance).all()
    assert radius > 0.5 * found and loose < 0.1 * found
