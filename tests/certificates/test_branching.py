"""Branch and bound on units: more is proven than without branches, and nothing that is not true."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

import lrrn
from block_forms import exact_distance, hessian
from local_problems import solved
from lrrn.attacks import minimal_perturbation
from lrrn.certificates import branching
from lrrn.certificates.branching import Branching
from lrrn.certificates.complementarity import Faces
from lrrn.certificates.matrix_free import MatrixFreeForm
from lrrn.certificates.shared import shared_duals
from lrrn.linalg.operators import Dense
from oracles import PlainQP, exhaustive, random_input, random_network

matrix_free = sys.modules["lrrn.certificates.matrix_free"]
INF = math.inf
KINDS = [(0.0, INF), (-INF, 0.3), (-0.2, 0.3), (-INF, INF), (0.1, 0.1), (0.0, INF)]
PAIR = torch.tensor([0]), torch.tensor([1])


@pytest.fixture
def thorough(monkeypatch):
    """Branch on everything."""
    monkeypatch.setattr(branching, "NEAR", 1e3)
    monkeypatch.setattr(branching, "FEW", 2048)


def problems(seed, depth, kinds):
    """A random form, and samples of it with the exact distances at which a lead is lost."""
    rng = np.random.default_rng(seed)
    width = 6 if depth == 1 else 3
    lo, hi = np.array([kinds[(seed + i) % len(kinds)] for i in range(width * depth)]).T
    norm, gamma = [0.3, 1.0, 2.5, 6.0][seed % 4], [0.125, 0.5, 1.0][seed % 3]
    weights = [rng.standard_normal((width, 4 if k == 0 else width)) for k in range(depth)]
    weights = [w * norm / np.linalg.norm(w, 2) for w in weights]
    beta, discounts = (1.0,) * depth, tuple(gamma**k for k in range(depth))
    rows = torch.from_numpy(rng.standard_normal((2, width)))
    bounds = [torch.from_numpy(t)[None] for t in (lo, hi)]
    form = MatrixFreeForm([Dense(torch.from_numpy(w)) for w in weights], beta, discounts, *bounds, Dense(rows))
    h, b = hessian(weights, beta, discounts)
    c = form.slopes(*PAIR)[0][0].numpy()
    found = []
    for lead in (0.05, 0.3, 1.0):
        q = rng.standard_normal(width * depth)
        z = exhaustive(PlainQP(h, q, np.where(lo == hi, lo - 1e-13, lo), hi, 0.0)).clip(lo, hi)
        sample = form.sample(torch.from_numpy(z)[None], torch.from_numpy(h @ z - q)[None], torch.full((1,), 1e-11).double())
        exact = exact_distance(h, b, q, lo, hi, c, lead, z)
        found.append((sample, torch.tensor([lead], dtype=torch.float64), exact))
    return form, found


@pytest.mark.parametrize("depth, seed", [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)])
def test_all_branches_together_reach_the_exact_distance(depth, seed, thorough):
    """With the state of every unit known, nothing is relaxed."""
    form, found = problems(seed, depth, KINDS[:1])
    for sample, lead, exact in found:
        goal = min(2 * exact**2, 100.0)
        without = float(form.proven(sample, *PAIR, lead, goal))
        square = float(Branching(form, INF).proven(sample, *PAIR, lead, goal))
        assert without <= square <= exact**2 * (1 + 1e-9)
        if exact < 10:
            assert math.sqrt(square) > 0.95 * exact


@pytest.mark.parametrize("depth, seed", [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 0), (2, 4)])
def test_no_more_is_proven_than_is_true_for_units_of_every_kind(depth, seed, thorough):
    form, found = problems(seed, depth, KINDS)
    for sample, lead, exact in found:
        square = Branching(form, INF).proven(sample, *PAIR, lead, min(2 * exact**2, 100.0))
        assert float(square) <= exact**2 * (1 + 1e-9)


def by_matrices(seed, sizes, constraint="nonneg"):
    """The same of a network's duals by matrices: samples, what is asked of them, and exact distances."""
    net, x = random_network(sizes, constraint=constraint, scale=1.5, seed=seed), random_input(3, sizes[0], seed=seed + 1)
    energy, (z, g) = net.energy_snapshot(torch.float64), solved(net, x)
    y, dual = net.infer(x, tol=1e-12).output, shared_duals(energy)[0]
    (lead, rival), label = _runners_up(y), y.argmax(1)
    n, first, rows = z.shape[1], net.W[0].detach().numpy(), net.W[-1].detach()
    lo, hi = (bound[0, :n].numpy() for bound in energy.box)
    h, b, q = energy.free_hessian.dense().numpy(), np.zeros((n, sizes[0])), energy.free(x).q.numpy()
    b[: len(first)] = 2 * first  # 1 + beta_0
    c = np.zeros((len(x), n))
    c[:, -rows.shape[1] :] = (rows[label] - rows[rival]).numpy()
    found = []
    for i in range(len(x)):
        sample = dual.problem.sample(z[i : i + 1], g[i : i + 1], torch.full((1,), 1e-11, dtype=torch.float64))
        exact = exact_distance(h, b, q[i], lo, hi, c[i], float(lead[i]), z[i].numpy())
        found.append((sample, (label[i : i + 1], rival[i : i + 1], lead[i : i + 1]), exact))
    return dual, found


def _runners_up(y):
    best = y.max(1)
    second = y.scatter(1, best.indices[:, None], -INF).max(1)
    return best.values - second.values, second.indices


@pytest.mark.parametrize("sizes", [(4, 6, 3), (4, 3, 3, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_all_branches_by_matrices_reach_the_exact_distance_too(seed, sizes, thorough):
    dual, found = by_matrices(seed, sizes)
    gained = 0
    for sample, question, exact in found:
        goal = torch.tensor([min(2 * exact**2, 100.0)], dtype=torch.float64)
        without = float(dual.proven(sample, *question, goal))
        square = float(Branching(dual, INF).proven(sample, *question, goal))
        assert without <= square <= exact**2 * (1 + 1e-9)
        assert exact >= 10 or math.sqrt(square) > 0.95 * exact
        gained += square > 1.001 * without
    assert gained


@pytest.mark.parametrize("constraint", ["box", (-INF, 0.2), (0.0, 0.5)])
def test_by_matrices_no_more_is_proven_than_is_true(constraint, thorough):
    for seed in range(3):
        dual, found = by_matrices(seed, (4, 3, 3, 3), constraint)
        for sample, question, exact in found:
            square = Branching(dual, INF).proven(sample, *question, min(2 * exact**2, 100.0))
            assert float(square) <= exact**2 * (1 + 1e-9)


@pytest.mark.parametrize("constraint", ["nonneg", "box"])
def test_by_matrices_only_equations_have_multipliers_of_either_sign(constraint, monkeypatch):
    """Whatever the solver returns, a multiplier of a unit that no branch assumes anything of is not negative."""
    dual, ((sample, question, _), *_) = by_matrices(0, (4, 3, 3, 3), constraint)
    generator, assumed = torch.Generator().manual_seed(0), torch.arange(6)[None]
    faces = Faces((assumed == 1) & dual.splits, (assumed == 0) & dual.splits)
    noise = lambda _, rival, lead, q, *rest: (lead, 9 * torch.randn(q.shape, generator=generator).double())  # noqa: E731
    monkeypatch.setattr(dual.solver, "maximised", noise)
    seen = torch.zeros(2, dtype=torch.bool)
    for _ in range(20):
        terms = dual.terms(sample, *question, INF, faces)
        assert (terms.floor[~faces.inactive] >= 0).all() and (terms.sign[~faces.active] >= 0).all()
        assert (terms.sign[:, ~dual.splits] == 0).all()
        seen |= torch.stack([(terms.floor < 0).any(), (terms.sign < 0).any()])
    assert seen.all() == (constraint == "nonneg")


@pytest.mark.parametrize("assumed", ["active", "inactive"])
def test_a_branch_holds_where_its_unit_is_as_assumed(assumed):
    """One unit at rest, v = 0 and w + slack = 0 there: every perturbation down makes it inactive, every one up active."""
    t = lambda value: torch.tensor([[value]], dtype=torch.float64)  # noqa: E731
    form = MatrixFreeForm([Dense(t(1.0))], (1.0,), (1.0,), t(0.0), t(INF), Dense(torch.tensor([[1.0], [0.0]]).double()))
    # z = 0.5 with H = 2 and B = 2: z' = max(0.5 + u, 0), so a lead of 0.25 is lost at u = -0.25, where the unit is active
    sample = form.sample(t(0.5), t(0.0), torch.zeros(1, dtype=torch.float64))
    yes, no = torch.tensor([[True]]), torch.tensor([[False]])
    faces = Faces(yes, no) if assumed == "inactive" else Faces(no, yes)
    lead, (c, c_error) = torch.tensor([0.25], dtype=torch.float64), form.slopes(*PAIR)
    terms = form.terms(sample, c, lead, 1e6, faces)
    square = float(form.lower_bound(sample, c, c_error, lead, terms)[0])
    exact = 0.25 if assumed == "active" else 0.5
    assert 0.98 * exact**2 <= square <= exact**2


def test_the_number_of_branches_is_limited_and_more_of_them_prove_no_less(monkeypatch, thorough):
    form, found = problems(3, 1, KINDS[:1])
    counts = []
    plain = MatrixFreeForm.terms

    def counted(self, sample, *rest):
        counts.append(len(sample.low))
        return plain(self, sample, *rest)

    monkeypatch.setattr(MatrixFreeForm, "terms", counted)
    for sample, lead, exact in found:
        squares = []
        for leaves in (1, 3, 7, 15):
            counts.clear()
            squares.append(float(Branching(form, INF, leaves).proven(sample, *PAIR, lead, min(2 * exact**2, 100.0))))
            assert sum(counts) <= max(leaves, 1)
        assert squares == sorted(squares)
        assert squares[-1] <= exact**2 * (1 + 1e-9)


def test_a_target_out_of_reach_is_not_sought():
    form, found = problems(2, 2, KINDS[:1])
    sample, lead, _ = found[0]
    root = form.proven(sample, *PAIR, lead, 1e6)
    near, far = root * branching.NEAR**2 * 0.999, root * branching.NEAR**2 * 1.001
    assert float(Branching(form, 1.0).proven(sample, *PAIR, lead, far)) == float(form.proven(sample, *PAIR, lead, far))
    assert float(Branching(form, 1.0).proven(sample, *PAIR, lead, near)) > float(root)


@pytest.mark.parametrize("products", [True, False])
def test_branched_radii_are_no_smaller_and_no_attack_is_inside(monkeypatch, products, thorough):
    if products:
        monkeypatch.setattr(matrix_free, "WIDE", 0)
    net, x = random_network((6, 8, 4), seed=3), random_input(8, 6, seed=4)
    shared, branched = (lrrn.certify(net, x, method) for method in ("shared", "branched"))
    assert branched.method == "branched"
    assert (branched.radius >= shared.radius * (1 - 1e-9)).all()
    assert (branched.radius > shared.radius * 1.001).any()
    attack = minimal_perturbation(net, x, branched.prediction)
    assert attack.success.any()
    assert (attack.distance >= branched.radius).all()
    target = float(shared.radius.median()) * 1.02
    aimed = lrrn.certify(net, x, "branched", target_radius=target).radius
    assert (aimed >= torch.minimum(branched.radius, torch.tensor(target)) * 0.999).all()


def test_the_number_of_branches_is_an_option_of_the_certificate(monkeypatch, thorough):
    monkeypatch.setattr(matrix_free, "WIDE", 0)
    net, x = random_network((6, 8, 4), seed=3), random_input(8, 6, seed=4)
    one, many, usual = (lrrn.certify(net, x, "branched", branches=n).radius for n in (1, 2048, None))
    # one branch is the whole problem
    assert torch.allclose(one, lrrn.certify(net, x, "shared").radius, rtol=1e-6)
    assert (many >= one * (1 - 1e-9)).all() and (many > one * 1.001).any() and torch.equal(many, usual)
    with pytest.raises(ValueError, match="branches must be at least 1; got 0"):
        lrrn.certify(net, x, "branched", branches=0)


def test_memory_is_bounded_whatever_the_number_of_branches(monkeypatch, thorough):
    form, found = problems(3, 1, KINDS[:1])
    monkeypatch.setattr(MatrixFreeForm, "rows", 2)
    sizes, plain = [], MatrixFreeForm.lower_bound

    def counted(self, sample, *rest):
        sizes.append(len(sample.low))
        return plain(self, sample, *rest)

    sample, lead, exact = found[0]
    whole = float(Branching(form, INF).proven(sample, *PAIR, lead, min(2 * exact**2, 100.0)))
    monkeypatch.setattr(MatrixFreeForm, "lower_bound", counted)
    assert float(Branching(form, INF).proven(sample, *PAIR, lead, min(2 * exact**2, 100.0))) == pytest.approx(whole, rel=1e-9)
    assert max(sizes) == 2 and len(sizes) > 2


def test_samples_do_not_depend_on_their_batch(monkeypatch, thorough):
    monkeypatch.setattr(matrix_free, "WIDE", 0)
    net, x = random_network((6, 8, 4), seed=5), random_input(3, 6, seed=6)
    together = lrrn.certify(net, x, "branched").radius
    alone = torch.cat([lrrn.certify(net, one[None], "branched").radius for one in x])
    assert torch.allclose(together, alone, rtol=1e-4)


def test_samples_that_prove_nothing_are_not_branched(monkeypatch, thorough):
    """A target far beyond the bound is not sought, and a bound of minus infinity has none below it."""
    form, ((sample, lead, _), *_) = problems(0, 1, KINDS)
    calls = []

    def bounds(self, sample, rows, *rest):
        calls.append(len(rows))
        return torch.full((len(rows),), -INF, dtype=torch.float64), torch.zeros(len(rows), dtype=torch.int64)

    monkeypatch.setattr(Branching, "_bounds", bounds)
    assert Branching(form, 5.0, 64).proven(sample, *PAIR, lead, 25.0).tolist() == [-INF]
    assert calls == [1]
