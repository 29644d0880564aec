"""Radii without a matrix: the form is positive definite, its products are right, and what is proven holds."""

from __future__ import annotations

import math
import sys
import warnings
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

import lrrn
from block_forms import best_shared_dual, exact_distance, hessian, whole_form
from local_problems import BY_HAND, CONSTRAINTS, solved
from lrrn.attacks import minimal_perturbation
from lrrn.certificates import block_multipliers as blocks
from lrrn.certificates import matrix_free_dual
from lrrn.certificates.block_multipliers import Layers, block_multipliers, form_floor, hessian_floor
from lrrn.certificates.matrix_free import MatrixFreeForm, form_of
from lrrn.linalg.operators import Conv2d, Dense, Pooled
from oracles import PlainNetwork, PlainQP, exhaustive, full_qp, random_input, random_network

module, radius_module = (sys.modules[f"lrrn.certificates.{name}"] for name in ("matrix_free", "radius"))
INF = math.inf
DEPTHS = [(6, 7, 3), (6, 7, 5, 3), (5, 6, 4, 5, 3)]


@pytest.fixture
def narrow(monkeypatch):
    """Let small networks take the way of wide ones."""
    monkeypatch.setattr(module, "WIDE", 0)
    monkeypatch.setattr(module, "WIDE_DEEP", 0)


def rescaled(net, norm):
    """The network with hidden weights of a given norm."""
    with torch.no_grad():
        for w in list(net.W)[:-1]:
            w.mul_(norm / torch.linalg.matrix_norm(w, 2))
    return net


def matrices(rng, depth, norm, gamma, beta=1.0):
    sizes = rng.integers(2, 8, depth + 1)
    weights = [rng.standard_normal((sizes[k + 1], sizes[k])) for k in range(depth)]
    weights = [w * norm / np.linalg.norm(w, 2) for w in weights]
    beta = (beta,) * depth if np.isscalar(beta) else beta
    return weights, beta, tuple(gamma**k for k in range(depth))


def spread(scalars, weights):
    return np.concatenate([np.full(len(w), s) for s, w in zip(scalars, weights, strict=True)])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("norm", [0.3, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("gamma", [0.125, 0.5, 1.0, 2.0])
def test_smallest_eigenvalues_are_bounded_from_below(depth, norm, gamma):
    rng = np.random.default_rng(depth)
    for betas in ([1.0] * depth, rng.choice([0.3, 1.0, 3.0], depth), [0.0, *[1.0] * (depth - 1)], [*[1.0] * (depth - 1), 0.0]):
        weights, beta, discounts = matrices(rng, depth, norm, gamma, tuple(map(float, betas)))
        layers = Layers(discounts, beta, (norm * (1 + 1e-12),) * depth)
        scalars = block_multipliers(layers)
        h, b = hessian(weights, beta, discounts)
        smallest = np.linalg.eigvalsh(whole_form(h, b, spread(scalars, weights)))[0]
        assert 0 < form_floor(layers, scalars) <= smallest
        assert 0 < hessian_floor(layers) <= np.linalg.eigvalsh(h)[0]
        if depth == 1:
            assert form_floor(layers, scalars) > 0.1 * smallest


def test_the_form_is_lost_just_above_the_largest_multipliers():
    """Operators whose singular vectors match, with all singular values, reach the bound of the recursion."""
    for gamma, norm in ((0.125, 0.5), (0.5, 2.0), (1.0, 6.0)):
        layers = Layers((1.0, gamma), (1.0, 1.0), (norm, norm))
        first, last = block_multipliers(layers)
        gap = (last - first) / blocks.SHARE_DEEP
        for factor, definite in ((0.999, True), (1.02, False)):
            lam = np.array([first, first + factor * gap])
            # operators with one singular value each: forms of three unknowns
            pairs = [(s, t) for s in np.linspace(0, norm, 25) for t in np.linspace(0, norm, 60)]
            ones = [([np.array([[s]]), np.array([[t]])], (1.0, 1.0), (1.0, gamma)) for s, t in pairs]
            least = np.linalg.eigvalsh(np.stack([whole_form(*hessian(*one), lam) for one in ones])).min()
            assert (least > 0) == definite


@pytest.mark.parametrize("beta", [0.3, 1.0, 3.0])
def test_one_layer_in_closed_form(beta):
    simple = 4 * beta / (1 + beta) ** 2
    for norm in (0.2, 0.5, 20.0):
        largest = 4 * (1 + beta * norm**2) / ((1 + beta) ** 2 * norm**2)
        (found,) = block_multipliers(Layers((1.0,), (beta,), (norm,)))
        expected = simple if 0.97 * largest < 1.1 * simple else 0.97 * largest
        assert found == pytest.approx(expected, rel=1e-9)
    layers = Layers((1.0,), (1.0,), (3.0,))
    assert form_floor(layers, (1.0,)) == pytest.approx(1 / (2 + 3.0**2), rel=1e-6)  # trace and determinant of 2 x 2 forms
    assert form_floor(layers, (1.2,)) == 0.0  # not definite: 1.2 > 1 + 1 / 9


def operators_of(kind, rng):
    """Two layers: of matrices, of convolutions, or with pooling between them; and a read-out."""
    tensor = lambda *shape: torch.from_numpy(rng.standard_normal(shape)) / math.sqrt(shape[-1] + 2)  # noqa: E731
    if kind == "dense":
        return [Dense(tensor(7, 5)), Dense(tensor(4, 7))], Dense(tensor(3, 4))
    first = Conv2d(tensor(3, 2, 3, 3) / 2, (2, 6, 5), 1, 1)
    if kind == "conv":
        return [first, Conv2d(tensor(2, 3, 2, 2), (3, 6, 5), 2, 0)], Dense(tensor(3, 12))
    return [first], Pooled(Dense(tensor(3, 18)), (3, 6, 5), 2)


@pytest.mark.parametrize("kind", ["dense", "conv", "pooled"])
def test_products_are_those_of_the_matrices(kind):
    rng = np.random.default_rng(3)
    operators, read_out = operators_of(kind, rng)
    beta, discounts = (0.7, 1.3)[: len(operators)], (1.0, 0.5)[: len(operators)]
    weights = [operator.dense().numpy() for operator in operators]
    h, b = hessian(weights, beta, discounts)
    dim = len(h)
    bounds = torch.zeros(1, dim, dtype=torch.float64), torch.full((1, dim), INF, dtype=torch.float64)
    form = MatrixFreeForm(operators, beta, discounts, *bounds, read_out)
    u, v = (torch.from_numpy(rng.standard_normal((4, n))) for n in (b.shape[1], dim))
    w, back = form.pulls.at_rest(v)
    close = lambda a, b: np.testing.assert_allclose(a.numpy(), b, rtol=1e-12, atol=1e-12)  # noqa: E731
    close(w, v.numpy() @ h), close(back, v.numpy() @ b)
    close(form.pulls.of_v(u, v), v.numpy() @ h - u.numpy() @ b.T)
    lam = spread(form.scalars, weights)
    s = (lam[:, None] * h + h * lam) / 2 - (lam[:, None] * b) @ (lam[:, None] * b).T / 4
    close(form._exact_solver._bent(v), 2 * v.numpy() @ s)
    close(1 / form._exact_solver.inverse_diagonal, 2 * np.diag(s))
    label, rival = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
    rows = read_out.dense().numpy()
    c, error = form.slopes(label, rival)
    close(c[:, : dim - rows.shape[1]], 0 * c[:, : dim - rows.shape[1]].numpy())
    assert 0 < error < 1e-12
    close(c[:, dim - rows.shape[1] :], rows[label] - rows[rival])
    p, r = torch.from_numpy(rng.standard_normal((2, 4, dim)))
    answer = form._exact_solver.response(p, r, steps=400)
    whole, linear = whole_form(h, b, lam), np.concatenate([p.numpy() + r.numpy() @ h, -r.numpy() @ b], 1)
    exact = -np.linalg.solve(whole, linear.T).T / 2
    np.testing.assert_allclose(answer.v.numpy(), exact[:, :dim], rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(answer.w.numpy(), exact[:, :dim] @ h - exact[:, dim:] @ b.T, rtol=1e-7, atol=1e-7)


def case(constraint="nonneg", sizes=(6, 7, 5, 3), n=10, gamma=0.5, norm=1.5, beta=1.0, seed=2):
    """A network's form, samples, and label, nearest rival and lead of each."""
    net = rescaled(random_network(sizes, beta=beta, constraint=constraint, gamma=gamma, seed=seed), norm)
    x = random_input(n, sizes[0], seed=seed + 1)
    form, (z, g), y = form_of(net.energy_snapshot(torch.float64)), solved(net, x), net.infer(x, tol=1e-10).output
    label = y.argmax(-1)
    others = y.scatter(1, label[:, None], -INF)
    sample = form.sample(z, g, torch.full((n,), 1e-13, dtype=torch.float64))
    return form, sample, (label, others.argmax(1), y.amax(1) - others.amax(1))


def dense_of(form):
    weights = [operator.dense().numpy() for operator in form.pulls.operators]
    h, b = hessian(weights, form.pulls.beta, form.pulls.discounts)
    return h, b, form.lam.numpy()


def lagrangian(form, sample, c, lead, terms):
    """The least value of the Lagrangian, by a dense solve, from its definition (6)."""
    h, b, lam = dense_of(form)
    low, high, slack = (t.numpy() for t in (sample.low, sample.room, sample.slack))
    t = {name: getattr(terms, name).numpy() for name in ("sigma", "low", "high", "floor", "ceiling", "sign")}
    of_w = t["low"] * low - t["high"] * high - t["sign"]
    of_v = (t["low"] + t["high"]) * slack - t["floor"] + t["ceiling"]
    linear = np.concatenate([t["sigma"][:, None] * c.numpy() + of_v + of_w @ h, -of_w @ b], 1)
    least = -(linear * np.linalg.solve(whole_form(h, b, lam), linear.T).T).sum(1) / 4
    constant = t["sigma"] * lead.numpy() + (of_w * slack - t["floor"] * low - t["ceiling"] * high).sum(1)
    return torch.from_numpy(least + constant)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_proven_value_is_just_below_that_of_the_lagrangian(constraint):
    form, sample, (label, rival, lead) = case(constraint)
    c, _ = form.slopes(label, rival)
    terms = form.terms(sample, c, lead)
    exactly = lagrangian(form, sample, c, lead, terms)
    proven = form.proven(sample, label, rival, lead)
    assert (proven < exactly).all()
    torch.testing.assert_close(proven, exactly, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("sizes", "inputs"), [*((sizes, matrix_free_dual.INPUTS) for sizes in DEPTHS), (DEPTHS[0], 0)])
@pytest.mark.parametrize("constraint", ["nonneg", "box", "free", (-0.3, 0.4), (-INF, 0.2)])
def test_the_dual_is_maximised(constraint, sizes, inputs, monkeypatch):
    monkeypatch.setattr(matrix_free_dual, "INPUTS", inputs)
    for gamma, norm in ((1.0, 0.5), (0.5, 2.0), (0.125, 6.0)):
        form, sample, (label, rival, lead) = case(constraint, sizes, n=4, gamma=gamma, norm=norm)
        h, b, lam = dense_of(form)
        c, _ = form.slopes(label, rival)
        low = torch.where(form.below, sample.low, INF)
        proven = form.proven(sample, label, rival, lead)
        best = [
            best_shared_dual(h, b, lam, *(t[k].numpy() for t in (c, lead, low, sample.high, sample.slack)))
            for k in range(len(lead))
        ]
        best = torch.tensor(best, dtype=torch.float64)
        assert (proven <= best * (1 + 1e-6) + 1e-12).all()
        assert form.solver.splits == (len(sizes) == 3 and inputs > 0)
        least, typical = (0.9995, 0.9999) if form.solver.splits else (0.99, 0.999)
        assert (proven >= least * best).all() and float((proven / best).median()) > typical


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_whatever_a_solver_returns_multipliers_have_their_signs_and_the_proof_is_one(constraint, monkeypatch):
    form, sample, (label, rival, lead) = case(constraint)
    best, generator = form.proven(sample, label, rival, lead), torch.Generator().manual_seed(1)
    c, _ = form.slopes(label, rival)

    def careless(c, lead, *rest):
        noise = torch.randn((len(c), 2 * c.shape[1] + 1), generator=generator, dtype=torch.float64)
        return (3 * noise[:, 0], *(3 * noise[:, 1:]).chunk(2, 1))

    monkeypatch.setattr(form.solver, "maximised", careless)
    for _ in range(20):
        terms = form.terms(sample, c, lead)
        signed = [terms.sigma, terms.low, terms.high, terms.floor, terms.ceiling]
        assert all(bool((value >= 0).all()) for value in signed)
        assert (terms.floor[:, ~form.below] == 0).all() and (terms.ceiling[:, ~form.above] == 0).all()
        lower_only = form.below & ~form.above
        assert (terms.sign[:, lower_only] >= 0).all() and (terms.sign[:, form.upper] <= 0).all()
        assert (terms.sign[:, form.two_sided] == 0).all()
        assert torch.allclose(terms.lam, form.lam)
        # where a unit has no lower end, no product with it may be used, except for free units with the distance zero
        assert (terms.low[:, form.upper] == 0).all() and (sample.low[:, form.free] == 0).all()
        assert (form.proven(sample, label, rival, lead) <= best * (1 + 1e-3) + 1e-9).all()


@pytest.mark.parametrize("name", ["low_error", "slack_error"])
def test_a_proof_holds_for_every_sample_within_the_errors(name):
    form, sample, (label, rival, lead) = case(("nonneg", "box"))
    c, c_error = form.slopes(label, rival)
    terms, generator = form.terms(sample, c, lead), torch.Generator().manual_seed(4)
    for size in (1e-9, 1e-5, 1e-3):
        unsure = replace(sample, **{name: torch.full_like(lead, size)})
        proven = form.lower_bound(unsure, c, c_error, lead, terms)[0]
        assert (proven < form.lower_bound(sample, c, c_error, lead, terms)[0]).all()
        for _ in range(20):
            push = torch.randn(sample.low.shape, generator=generator, dtype=torch.float64)
            push *= size / push.norm(dim=1, keepdim=True)
            moved = (
                replace(sample, slack=sample.slack + push) if name == "slack_error" else replace(sample, low=sample.low + push)
            )
            assert (lagrangian(form, moved, c, lead, terms) >= proven).all()
    assert not (form.lower_bound(replace(sample, **{name: torch.full_like(lead, 10.0)}), c, c_error, lead, terms)[0] > 0).any()


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_a_proof_charges_what_conjugate_gradients_leave(monkeypatch, steps):
    form, sample, (label, rival, lead) = case()
    c, c_error = form.slopes(label, rival)
    terms = form.terms(sample, c, lead)
    whole = form.lower_bound(sample, c, c_error, lead, terms)[0]
    monkeypatch.setattr(module, "FINAL", steps)
    early = form.lower_bound(sample, c, c_error, lead, terms)[0]
    assert (early < whole).all() and (early <= lagrangian(form, sample, c, lead, terms)).all()


@pytest.mark.parametrize(("low", "slack", "c", "high", "nearest"), BY_HAND)
def test_one_unit_by_hand(low, slack, c, high, nearest):
    """v = clip((2 u - slack) / 2, -low, high), and a lead of one changes by c v."""
    t = lambda value: torch.tensor([[value]], dtype=torch.float64)  # noqa: E731
    form = MatrixFreeForm([Dense(t(1.0))], (1.0,), (1.0,), t(-low), t(high), Dense(torch.tensor([[c], [0.0]]).double()))
    sample = form.sample(t(0.0), t(slack), torch.zeros(1, dtype=torch.float64))
    square = float(form.proven(sample, torch.tensor([0]), torch.tensor([1]), torch.ones(1, dtype=torch.float64)))
    exact = (nearest / 2) ** 2
    assert 0.9 * exact <= square <= exact


def truth(form, q, c, lead, z):
    h, b, _ = dense_of(form)
    return exact_distance(h, b, q, form.lo.numpy(), form.hi.numpy(), c, lead, z)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_is_proven_than_is_true_for_units_of_every_kind(depth, seed):
    """Bounded below, above, on both sides, free and fixed units in one layer, against every active set."""
    rng = np.random.default_rng(seed)
    kinds = [(0.0, INF), (-INF, 0.3), (-0.2, 0.3), (-INF, INF), (0.1, 0.1), (0.0, INF)]
    width = 6 if depth == 1 else 3
    lo, hi = np.array([kinds[(seed + i) % 6] for i in range(width * depth)]).T
    norm, gamma = [0.3, 1.0, 2.5, 6.0][seed % 4], [0.125, 0.5, 1.0][seed % 3]
    weights = [rng.standard_normal((width, 4 if k == 0 else width)) for k in range(depth)]
    weights = [w * norm / np.linalg.norm(w, 2) for w in weights]
    beta, discounts = (1.0,) * depth, tuple(gamma**k for k in range(depth))
    rows = torch.from_numpy(rng.standard_normal((2, width)))
    bounds = [torch.from_numpy(t)[None] for t in (lo, hi)]
    form = MatrixFreeForm([Dense(torch.from_numpy(w)) for w in weights], beta, discounts, *bounds, Dense(rows))
    h, _ = hessian(weights, beta, discounts)
    c, _ = form.slopes(torch.tensor([0]), torch.tensor([1]))
    ratios = []
    for _ in range(5):
        q = rng.standard_normal(width * depth)
        z = exhaustive(PlainQP(h, q, np.where(lo == hi, lo - 1e-13, lo), hi, 0.0)).clip(lo, hi)
        sample = form.sample(torch.from_numpy(z)[None], torch.from_numpy(h @ z - q)[None], torch.full((1,), 1e-11).double())
        for lead in (0.05, 0.3):
            square = form.proven(sample, torch.tensor([0]), torch.tensor([1]), torch.tensor([lead], dtype=torch.float64), 1e6)
            exact = truth(form, q, c[0].numpy(), lead, z)
            assert float(square) <= exact**2 * (1 + 1e-9)
            if math.isfinite(exact):
                ratios.append(math.sqrt(max(float(square), 0.0)) / exact)
    assert not ratios or np.median(ratios) > (0.95 if depth == 1 else 0.3)


@pytest.mark.parametrize("guarantee", ["exact", "deployed"])
@pytest.mark.parametrize("sizes", [(4, 6, 3), (4, 4, 3, 3)])
def test_radii_are_at_most_the_exact_distances(narrow, guarantee, sizes):
    ratios = []
    for seed, (gamma, norm) in enumerate(((0.125, 6.0), (0.5, 0.3), (0.5, 1.5), (1.0, 3.0))):
        net = rescaled(random_network(sizes, gamma=gamma, seed=seed), norm)
        x = random_input(5, 4, seed=seed)
        certificate, spectral = (lrrn.certify(net, x, m, guarantee=guarantee, tol=1e-9) for m in ("shared", "spectral"))
        assert (certificate.radius >= spectral.radius * (1 - 1e-3)).all()
        plain = PlainNetwork.of(net)
        h, b = hessian(plain.weights[:-1], plain.beta[:-1], [gamma**k for k in range(len(sizes) - 2)])
        n, w = len(h), plain.weights[-1]
        for k in range(len(x)):
            qp = full_qp(replace(plain, weights=plain.weights[:-1]), x[k].numpy())
            z = exhaustive(qp)
            label, distance = int(certificate.prediction[k]), INF
            y = w @ z[-w.shape[1] :] + plain.b[-1]
            assert label == y.argmax()
            for rival in range(len(w)):
                if rival != label:
                    c = np.zeros(n)
                    c[-w.shape[1] :] = w[label] - w[rival]
                    distance = min(distance, exact_distance(h, b, qp.q, qp.lo, qp.hi, c, y[label] - y[rival], z))
            assert float(certificate.radius[k]) <= distance * (1 + 1e-9)
            if math.isfinite(distance):
                ratios.append(float(certificate.radius[k]) / distance)
    assert np.median(ratios) > (0.97 if len(sizes) == 3 else 0.4)


@pytest.mark.parametrize("sizes", DEPTHS)
@pytest.mark.parametrize("constraint", CONSTRAINTS[:5])
def test_no_attack_gets_inside_a_radius(narrow, constraint, sizes):
    for seed, (gamma, norm, beta) in enumerate(((0.125, 3.0, 1.0), (1.0, 0.7, 0.5), (0.5, 1.5, 2.0))):
        net = rescaled(random_network(sizes, beta=beta, gamma=gamma, constraint=constraint, seed=seed), norm)
        x = random_input(8, sizes[0], seed=seed)
        shared, spectral = (lrrn.certify(net, x, method) for method in ("shared", "spectral"))
        assert shared.method == "shared" and (shared.radius >= spectral.radius * (1 - 1e-2)).all()
        assert (shared.radius <= minimal_perturbation(net, x, shared.prediction, seed=0).distance).all()


@pytest.mark.parametrize(("beta", "output"), [((1.0, 0.5), "free"), ((1.0, 0.0), "box"), ((1.0, 1.0), (-0.6, 0.7))])
def test_outputs_that_are_unknowns_take_part(narrow, beta, output):
    net, x = random_network((6, 7, 3), beta=beta, output_constraint=output, seed=3), random_input(12, 6, seed=4)
    shared = lrrn.certify(net, x, "shared")
    assert form_of(net.energy_snapshot(torch.float64)).n_outputs == 3
    assert (shared.radius <= minimal_perturbation(net, x, shared.prediction, seed=0).distance).all()
    assert float((shared.radius / lrrn.certify(net, x, "spectral").radius).median()) > 1


def test_convolutions_prove_what_their_matrices_prove():
    rng = np.random.default_rng(5)
    for kind in ("conv", "pooled"):
        operators, read_out = operators_of(kind, rng)
        n, dim = len(operators), sum(operator.shape[0] for operator in operators)
        lo, hi = torch.zeros(1, dim, dtype=torch.float64), torch.full((1, dim), INF, dtype=torch.float64)
        small, large = (
            MatrixFreeForm(made, (1.0,) * n, (1.0, 0.5)[:n], lo, hi, last)
            for made, last in ((operators, read_out), ([Dense(o.dense()) for o in operators], Dense(read_out.dense())))
        )
        small.layers = large.layers
        vars(small).update(scalars=large.scalars, lam=large.lam, floor=large.floor)
        z = torch.from_numpy(rng.standard_normal((5, dim))).clamp(min=0)
        g = torch.where(z > 0, 0.0, torch.from_numpy(rng.random((5, dim))))
        label, rival = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([1, 2, 0, 2, 0])
        lead = torch.full((5,), 0.7, dtype=torch.float64)
        values = [form.proven(form.sample(z, g, torch.zeros(5).double()), label, rival, lead) for form in (small, large)]
        torch.testing.assert_close(*values, rtol=1e-3, atol=1e-9)
        assert (values[0] > 0).all()


def test_wide_networks_are_certified_without_a_factorisation(monkeypatch):
    net, x = rescaled(random_network((12, 300, 4), seed=1), 3.0), random_input(6, 12, seed=2)
    refuse = lambda *_, **__: pytest.fail("this needs a matrix of the size of the units")  # noqa: E731
    for name in ("local_problem", "shared_duals"):
        monkeypatch.setattr(radius_module, name, refuse)
    certificate = lrrn.certify(net, x)
    energy = net.energy_snapshot(torch.float64)
    assert certificate.method == "shared" and "free_mu" not in vars(energy)
    assert torch.equal(certificate.radius, lrrn.certify(net, x, "shared").radius)
    spectral = lrrn.certify(net, x, "spectral").radius
    assert (certificate.radius >= spectral * (1 - 1e-6)).all() and float((certificate.radius / spectral).median()) > 1.1
    assert (certificate.radius <= minimal_perturbation(net, x, certificate.prediction, seed=0).distance).all()
    assert form_of(energy).mu == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("sizes", "beta", "taken"),
    [
        ((5, 256, 3), 1.0, False),
        ((5, 257, 3), 1.0, True),
        ((5, 257, 3), (0.0, 0.0), False),
        ((5, 1200, 848, 3), 1.0, False),
        ((5, 1200, 849, 3), 1.0, True),
        ((5, 3), 1.0, False),
    ],
)
def test_the_way_depends_on_the_structure_alone(sizes, beta, taken):
    assert module.takes_operators(lrrn.LRRN(sizes, beta=beta).energy_snapshot(torch.float64)) == taken


def test_both_ways_find_similar_radii(monkeypatch):
    """One hidden layer: no less without a matrix; two layers: less, since matrices allow multipliers of single units too."""
    for sizes, typical, least in (((8, 12, 4), 0.99, 0.9), ((8, 10, 9, 4), 0.85, 0.7)):
        for gamma, norm in ((0.5, 0.5), (0.125, 2.0), (1.0, 6.0)):
            net, x = rescaled(random_network(sizes, gamma=gamma, seed=0), norm), random_input(20, 8)
            by_matrices = lrrn.certify(net, x, "shared")
            with monkeypatch.context() as patch:
                patch.setattr(module, "WIDE", 0)
                patch.setattr(module, "WIDE_DEEP", 0)
                by_products = lrrn.certify(net, x, "shared")
                assert not lrrn.certify(net, x, "spectral").by_products
            assert by_products.by_products and not by_matrices.by_products
            ratio = (by_products.radius / by_matrices.radius)[by_matrices.radius > 0]
            assert float(ratio.median()) > typical and float(ratio.min()) > least


def test_samples_do_not_depend_on_each_other(narrow, monkeypatch):
    net, x = rescaled(random_network((6, 9, 7, 4), seed=6), 1.5), random_input(5, 6, seed=7)
    together = lrrn.certify(net, x, "shared").radius
    alone = torch.cat([lrrn.certify(net, row[None], "shared").radius for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-9)
    monkeypatch.setattr(module, "CHUNK", 1)
    assert form_of(net.energy_snapshot(torch.float64)).rows == 1
    torch.testing.assert_close(together, lrrn.certify(net, x, "shared").radius, rtol=1e-3, atol=1e-9)


def test_where_a_solver_fails_the_global_radius_stands(narrow, monkeypatch):
    net, x = rescaled(random_network((6, 7, 3), seed=2), 1.5), random_input(12, 6, seed=3)
    form = form_of(net.energy_snapshot(torch.float64))
    monkeypatch.setattr(form.solver, "maximised", lambda c, lead, *_: (lead * math.nan, c * math.nan, c * math.nan))
    spectral, found = (lrrn.certify(net, x, method).radius for method in ("spectral", "shared"))
    assert bool((spectral > 0).any())
    torch.testing.assert_close(found, spectral, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("norm", [1e19, 1e25])
def test_where_float32_overflows_the_global_radius_stands(narrow, norm):
    net, x = rescaled(random_network((6, 7, 3), seed=2), norm), random_input(12, 6, seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        spectral, found = (lrrn.certify(net, x, method).radius for method in ("spectral", "shared"))
    assert (found >= spectral * (1 - 1e-9)).all() and found.isfinite().all()


def test_where_one_size_counts_nothing_beyond_it_is_looked_for(narrow):
    net, x = rescaled(random_network((6, 9, 7, 3), seed=8), 1.5), random_input(40, 6, seed=9)
    whole = lrrn.certify(net, x, "shared").radius
    eps = float(whole.sort().values[19:21].mean())
    decided = lrrn.certify(net, x, "shared", target_radius=eps).radius
    assert torch.equal(decided > eps, whole > eps) and (decided <= whole * (1 + 1e-3)).all()


def test_ties_zero_weights_and_samples_without_an_answer(narrow):
    net, x = random_network((6, 7, 3), seed=1), random_input(4, 6, seed=2)
    with torch.no_grad():
        net.W[1][2], net.b[1][2] = net.W[1][0], net.b[1][0]
    tied = lrrn.certify(net, x, "shared")
    assert bool((tied.prediction == 0).any()) and (tied.radius[tied.prediction == 0] == 0).all()
    with torch.no_grad():
        net.W[0].zero_()
    assert (lrrn.certify(net, x, "shared").radius >= 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert (lrrn.certify(random_network((6, 7, 3), seed=1), x, "shared", max_sweeps=1, tol=1e-12).radius == 0).all()
    for size in (1e-200, 1e-30, 1e9, 1e200):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            net = random_network((6, 7, 5, 3), seed=1)
            net.W[0].mul_(size)
            radius = lrrn.certify(net, x, "shared", tol=1e-3).radius
            assert not radius.isnan().any() and (radius >= 0).all()
            assert (radius <= minimal_perturbation(net, x, net.infer(x).output.argmax(-1), seed=0).distance).all()


def test_bounds_are_given_up_where_beta_is_out_of_proportion():
    """Two layers with sigma = 1 move together: v^T H v = 1 at |v|^2 = 2, if the first operator has a null space."""
    for beta in (1e4, 1e8, 1e12, 1e16, 1e18, 1e30):
        assert hessian_floor(Layers((1.0, 10.0), (1.0, beta), (1.0, 1.2))) <= 0.5
    assert hessian_floor(Layers((1.0, 10.0), (1.0, 1e18), (1.0, 1.2))) == 0.0
    assert form_floor(Layers((1.0,), (1.0,), (1e200,)), (1.0,)) == 0.0


def test_radii_in_inference_mode_are_the_same():
    net = random_network((8, 300, 3), beta=(1.0, 0.0), scale=2.0)
    x = random_input(6, 8)
    with torch.inference_mode():
        radius = lrrn.certify(net, x, "shared").radius
    assert torch.equal(radius, lrrn.certify(net, x, "shared").radius) and (radius > 0).all()


@pytest.mark.parametrize("seed", range(40))
def test_what_a_first_layer_leaves_is_rounded_down(seed):
    """Linear in the squared singular value, of which both ends count: which is less may be a matter of rounding."""
    rng = np.random.default_rng(seed)
    beta, norm = float(rng.uniform(0.01, 1e3)), float(10 ** rng.uniform(0, 7))
    lam = blocks.without_norms(beta)
    a, b, m, top = Fraction(1), Fraction(beta), Fraction(lam), Fraction(norm * norm)
    exact = min(a * m * (1 + b * x) - (a * (1 + b) * m / 2) ** 2 * x for x in (Fraction(0), top))
    assert Fraction(Layers((1.0,), (beta,), (norm,)).rest(0, 1.0, 0.0, lam)) <= exact


def test_huge_weights_of_reconstruction_certify_nothing_instead_of_overflowing(narrow):
    net = random_network((3, 6, 2), beta=(1e300, 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert (lrrn.certify(net, random_input(2, 3), "shared").radius == 0).all()


def test_what_a_layer_leaves_is_rounded_down_where_one_multiplier_is_tiny():
    """The minimum is then lost to rounding in the singular value that it is at; a case found by random search."""
    beta, norm, kept = 38836838.9359486, 45687098.03730684, 569.1923550255582
    below, above = 2.1686005938459267e-25, 5.8623960271567345e-05
    with mpmath.workdps(60):
        b, k, low, high = map(mpmath.mpf, (beta, kept, below, above))
        firm, pull, slope = k + low * b, ((1 + b) * (high + low) / 2) ** 2, high * b
        x = (mpmath.sqrt(pull * firm / slope) - firm) / low
        exact = high * (1 + b * x) - pull * x / (firm + low * x)
        assert 0 < x < mpmath.mpf(norm) ** 2 and exact < 0
        assert Layers((1.0,), (beta,), (norm,)).rest(0, kept, below, above) <= exact


def test_nothing_is_prepared_where_nothing_is_open(narrow, monkeypatch):
    net, x = random_network((6, 9, 3)), random_input(4, 6)
    monkeypatch.setattr(matrix_free_dual.MatrixFreeSolver, "prepare", lambda _: pytest.fail("there is nothing to do"))
    lrrn.certify(net, x[:0], "shared")
    lrrn.certify(net, x, "shared", target_radius=1e-9)
