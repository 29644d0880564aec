"""Radii of many samples at once: proven whatever the solver returns, and as large as they can be."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lrrn
from local_problems import BY_HAND, CONSTRAINTS, solved
from lrrn.attacks import minimal_perturbation
from lrrn.bounds.multiplier import MultiplierProblem
from lrrn.certificates.complementarity import LocalProblem, Sample
from lrrn.certificates.matrix_free import form_of
from lrrn.certificates.nearest import Largest
from lrrn.certificates.shared import SharedForm, shared_duals
from oracles import random_input, random_network

shared_module, radius_module = (sys.modules[f"lrrn.certificates.{name}"] for name in ("shared", "radius"))


def case(constraint="nonneg", sizes=(6, 7, 5, 3), n=12, seed=2):
    """A network's dual for the label of most samples, these samples, and their label, nearest rivals and leads."""
    net, x = random_network(sizes, constraint=constraint, scale=1.5, seed=seed), random_input(n, sizes[0], seed=seed + 1)
    form, (z, g), y = (
        SharedForm(LocalProblem(net.energy_snapshot(torch.float64))),
        solved(net, x),
        net.infer(x, tol=1e-10).output,
    )
    label = int(y.argmax(-1).mode().values)
    rows = (y.argmax(-1) == label).nonzero().squeeze(1)
    others = y[rows].index_fill(1, torch.tensor([label]), -math.inf)
    lead, rival = (y[rows, label] - others.amax(1)), others.argmax(1)
    sample = form.problem.sample(z[rows], g[rows], torch.full((len(rows),), 1e-12, dtype=torch.float64))
    return form.dual, sample, (torch.full_like(rival, label), rival, lead)


def least(form, by_v, by_u):
    """The least value of the form plus linear terms, by a dense solve."""
    m, r = form.half.shape
    matrix = torch.eye(m + r, dtype=torch.float64)
    matrix[:m, :m] = form.top_left
    matrix[m:, :m], matrix[:m, m:] = -form.half.mT, -form.half
    linear = torch.cat([by_v, by_u], 1)
    return -(linear * torch.linalg.solve(matrix, linear.mT).mT).sum(1) / 4


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_a_proven_value_is_just_below_that_of_the_lagrangian(constraint):
    dual, sample, (label, rival, lead) = case(constraint)
    terms, problem = dual.terms(sample, label, rival, lead), dual.problem
    of_v, of_w = terms.slopes(sample)
    by_v = terms.sigma[:, None] * (problem.c[label] - problem.c[rival]) + of_v + of_w @ problem.h
    by_u = terms.sigma[:, None] * (problem.d[label] - problem.d[rival]) - of_w @ problem.root
    exactly = least(dual.form, by_v, by_u) + terms.constant(sample, lead)
    proven = dual.proven(sample, label, rival, lead)
    assert (proven < exactly).all()
    torch.testing.assert_close(proven, exactly, rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_the_solution_is_the_best_of_its_kind(constraint):
    """No other multipliers with the same products do better: moved ones do not, and those of a closer solve hardly."""
    dual, sample, question = case(constraint)
    best, generator = dual.proven(sample, *question), torch.Generator().manual_seed(0)
    terms = dual.terms(sample, *question)
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            scale, names = terms.floor.mean() + 1e-3, ("sigma", "floor", "sign", "ceiling")
            shapes = {name: getattr(terms, name).shape for name in names}
            noise = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
            moved = replace(
                terms,
                sigma=terms.sigma * (1 + size * (noise["sigma"] - 0.5)),
                floor=(terms.floor + scale * size * (noise["floor"] - 0.5)).clamp(min=0),
                ceiling=torch.where(dual.problem.two_sided, (terms.ceiling + scale * size * noise["ceiling"]), 0.0),
                sign=torch.where(dual.problem.two_sided, 0.0, (terms.sign + scale * size * (noise["sign"] - 0.5)).clamp(min=0)),
            )
            assert (dual.proven_by(sample, *question, moved)[0] <= best * (1 + 1e-4) + 1e-9).all()


@pytest.mark.parametrize("constraint", ["nonneg", "box", (-math.inf, 0.2)])
def test_whatever_a_solver_returns_multipliers_are_not_negative_and_the_proof_is_one(constraint, monkeypatch):
    dual, sample, question = case(constraint)
    best, generator = dual.proven(sample, *question), torch.Generator().manual_seed(1)

    def careless(label, rival, lead, q, lo, hi, goal):
        noise = torch.randn((len(q), q.shape[1] + 1), generator=generator, dtype=torch.float64)
        return 3 * noise[:, 0], 3 * noise[:, 1:]

    monkeypatch.setattr(dual.solver, "maximised", careless)
    for _ in range(20):
        terms = dual.terms(sample, *question)
        assert all(bool((value >= 0).all()) for value in vars(terms).values())
        assert torch.allclose(terms.lam, dual.form.lam)
        assert (dual.proven(sample, *question) <= best * (1 + 1e-4) + 1e-9).all()


def test_where_a_solver_fails_the_global_radius_stands(monkeypatch):
    net, x = random_network((6, 7, 5, 3), scale=1.5, seed=2), random_input(12, 6, seed=3)
    wide = lrrn.certify(net, x, "multiplier").radius
    solver = type(shared_duals(net.energy_snapshot(torch.float64))[0].solver)
    nothing = lambda _, label, rival, lead, q, *rest: (lead * math.nan, q * math.nan)  # noqa: E731
    monkeypatch.setattr(solver, "maximised", nothing)
    assert bool((wide > 0).any()) and torch.equal(lrrn.certify(net, x, "shared").radius, wide)


@pytest.mark.parametrize("share", [0.0, 1e-6, 0.1, 0.9])
def test_a_lower_bound_holds_for_every_form_within_the_error(share):
    form, generator = case()[0].form, torch.Generator().manual_seed(2)
    m, r = form.half.shape
    by_v, by_u = (torch.randn(5, k, generator=generator, dtype=torch.float64) for k in (m, r))
    matrix = torch.eye(m + r, dtype=torch.float64)
    matrix[:m, :m] = form.top_left
    matrix[m:, :m], matrix[:m, m:] = -form.half.mT, -form.half
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    assert 0.99 * smallest < form.floor <= smallest
    error, linear = share * form.floor, torch.cat([by_v, by_u], 1)
    # the worst of them has as much less of |v|^2, of |u|^2 and of one
    worst = matrix - error * torch.eye(m + r, dtype=torch.float64)
    exactly = -(linear * torch.linalg.solve(worst, linear.mT).mT).sum(1) / 4 - error
    bound, *_ = form.lower_bound(by_v, by_u, torch.full((5,), error, dtype=torch.float64))
    assert (bound <= exactly).all()
    if share < 1e-3:
        torch.testing.assert_close(bound, exactly, rtol=1e-4, atol=1e-6)
    assert (form.lower_bound(by_v, by_u, torch.full((5,), 1.01 * smallest, dtype=torch.float64))[0] == -math.inf).all()


def one_unit(low, slack, c, high=math.inf, error=0.0):
    """The dual of a single unit with v = clip((u - slack) / 2, -low, high), and a sample whose lead of one changes by c v."""
    t = lambda value: torch.tensor([value], dtype=torch.float64)  # noqa: E731
    problem = SimpleNamespace(
        h=2 * t([1.0]),
        root=t([1.0]),
        gram=t([1.0]),
        lam=t(1.0),
        c=torch.tensor([[c], [0.0]], dtype=torch.float64),
        d=torch.zeros(2, 1, dtype=torch.float64),
        errors=(error, 0.0, 0.0, 0.0),
        two_sided=torch.tensor([high < math.inf]),
    )
    sample = Sample(*(t([value]) for value in (low, high, slack)), *torch.zeros(3, 1, dtype=torch.float64))
    return SharedForm(problem).dual, sample


@pytest.mark.parametrize(("low", "slack", "c", "high", "nearest"), BY_HAND)
def test_one_unit_by_hand(low, slack, c, high, nearest):
    question = torch.tensor([0]), torch.tensor([1]), torch.ones(1, dtype=torch.float64)
    dual, sample = one_unit(low, slack, c, high)
    assert nearest**2 * (1 - 3e-2) <= float(dual.proven(sample, *question)) <= nearest**2
    unsure, sample = one_unit(low, slack, c, high, error=1.5)  # H is known to 1.5 only
    assert not float(unsure.proven(sample, *question)) > 0


def test_errors_of_the_data_are_inside_a_proof():
    dual, sample, question = case()
    before, lead = dual.proven(sample, *question), question[-1]
    for name in ("low_error", "slack_error"):
        for error, share in ((1e-9, 1 - 1e-4), (1e-3, 1.0)):
            worse = dual.proven(replace(sample, **{name: torch.full_like(lead, error)}), *question)
            assert (worse < before).all() and ((worse > share * before).all() or error > 1e-6)
    assert not (dual.proven(replace(sample, slack_error=torch.full_like(lead, 10.0)), *question) > 0).any()


def test_an_inexact_answer_at_the_sample_is_no_obstacle():
    net, x = random_network((6, 9, 7, 3), scale=1.5, seed=4), random_input(20, 6, seed=5)
    tight, loose = (lrrn.certify(net, x, "shared", tol=tol) for tol in (1e-10, 1e-3))
    attack = minimal_perturbation(net, x, tight.prediction, seed=0)
    same = loose.prediction == tight.prediction
    assert (loose.radius[same] <= attack.distance[same]).all()
    assert float(loose.radius[same].median()) > 0


def test_samples_do_not_depend_on_each_other(monkeypatch):
    net, x = random_network((6, 9, 7, 4), scale=1.5, seed=6), random_input(30, 6, seed=7)
    together = lrrn.certify(net, x, "shared").radius
    alone = torch.cat([lrrn.certify(net, row[None], "shared").radius for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-9)
    monkeypatch.setattr(shared_module, "ROWS", 3)
    torch.testing.assert_close(together, lrrn.certify(net, x, "shared").radius, rtol=1e-3, atol=1e-9)


def test_where_one_size_counts_nothing_beyond_it_is_looked_for():
    net, x = random_network((6, 9, 7, 3), scale=1.5, seed=8), random_input(40, 6, seed=9)
    shared, wide = (lrrn.certify(net, x, method).radius for method in ("shared", "multiplier"))
    eps = float(shared.sort().values[19:21].mean())
    decided = lrrn.certify(net, x, "shared", target_radius=eps).radius
    assert torch.equal(decided > eps, shared > eps)
    above = wide >= eps
    assert bool(above.any()) and torch.equal(decided[above], wide[above])


def test_in_small_networks_the_better_of_two_families_of_multipliers_counts_for_every_pair(monkeypatch):
    """Those per unit, found by a search, and one per layer; each alone is worse for some sample."""
    net, x = random_network((6, 9, 7, 4), scale=1.5, seed=6), random_input(40, 6, seed=7)
    both = lrrn.certify(net, x, "shared").radius
    duals = shared_duals(net.energy_snapshot(torch.float64))
    assert len(duals) == 2
    per_layer = duals[0].form.lam / form_of(net.energy_snapshot(torch.float64)).lam
    torch.testing.assert_close(per_layer, per_layer.mean().expand_as(per_layer), rtol=1e-12, atol=0)
    alone = []
    for dual in duals:
        monkeypatch.setattr(radius_module, "shared_duals", lambda _, dual=dual: (dual,))
        alone.append(lrrn.certify(net, x, "shared").radius)
        assert (both >= alone[-1] * (1 - 1e-4)).all() and (both > alone[-1] * 1.01).any()
    assert (both <= minimal_perturbation(net, x, lrrn.certify(net, x).prediction, seed=0).distance).all()


def test_beyond_small_networks_multipliers_of_units_are_not_searched_for(monkeypatch):
    monkeypatch.setattr(shared_module, "SEARCHED", 15)
    monkeypatch.setattr(radius_module, "SEARCHED", 15)
    refuse = lambda *_, **__: pytest.fail("this searches for multipliers")  # noqa: E731
    monkeypatch.setattr(MultiplierProblem, "searched", refuse)
    net, x = random_network((6, 9, 7, 4), scale=1.5, seed=6), random_input(20, 6, seed=7)
    certificate = lrrn.certify(net, x)
    assert certificate.method == "shared" and not certificate.by_products
    assert len(shared_duals(net.energy_snapshot(torch.float64))) == 1
    spectral = lrrn.certify(net, x, "spectral").radius
    assert (certificate.radius >= spectral).all() and (certificate.radius > spectral * 1.1).any()


def test_the_largest_bound_counts_and_later_duals_see_only_what_is_left():
    asked = []

    class Known:
        n_outputs = 3

        def __init__(self, values):
            self.values = torch.tensor(values, dtype=torch.float64)

        def drift(self, sample, label, rival):
            return torch.zeros(len(label))

        def proven(self, sample, label, rival, lead, goal):
            asked.append(label.tolist())
            return self.values[label]

    sample = case(n=40)[1]
    sample, label = sample.take(torch.arange(4)), torch.arange(4)
    largest = Largest([Known([1.0, 5.0, math.nan, -math.inf]), Known([2.0, 9.0, 3.0, math.nan])])
    found = largest.proven(sample, label, label, torch.ones(4, dtype=torch.float64), 4.0)
    assert found.tolist() == [2.0, 5.0, 3.0, -math.inf] and asked == [[0, 1, 2, 3], [0, 2, 3]]


def test_networks_without_hidden_units_and_hopeless_ones():
    linear, x = random_network((6, 3), seed=1), random_input(5, 6, seed=2)
    assert torch.equal(lrrn.certify(linear, x, "shared").radius, lrrn.certify(linear, x, "spectral").radius)
    hopeless = random_network((10, 8, 8, 3), scale=1e9, seed=0)
    assert (lrrn.certify(hopeless, random_input(2, 10), "shared", tol=1e-3).radius == 0).all()
