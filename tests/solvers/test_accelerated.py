"""The accelerated solver's parts: its bound on the spectrum, and the kernel (on a GPU, or interpreted) against a reference."""

from __future__ import annotations

import math

import pytest
import torch

from lrrn.qp import Status
from lrrn.solvers import accelerated, conjugate_gradients, half_precision, loop, solve
from lrrn.solvers.base import recompute
from lrrn.solvers.half_precision import fits_in_rows, fits_on_chip, largest_by_squaring
from oracles import random_input, random_network
from tolerances import rounding, two_solves


@pytest.mark.parametrize("n", [1, 3, 40])
@pytest.mark.parametrize("times", [0, 3, 8])
def test_powers_bound_the_largest_eigenvalue(n, times):
    generator = torch.Generator().manual_seed(n)
    root = torch.randn(n, n, dtype=torch.float64, generator=generator)
    for scale in (1e-20, 1.0, 1e20):
        a = scale * root @ root.mT
        exact = float(torch.linalg.eigvalsh(a)[-1])
        bound = float(largest_by_squaring(a, times))
        assert exact * (1 - 1e-12) <= bound <= exact * n ** (1 / 2 ** (times + 1)) * (1 + 1e-12)
        below = float(largest_by_squaring(a, times, from_below=True))
        assert times == 0 or exact * n ** (-1 / 2**times) * (1 - 1e-12) <= below <= exact * (1 + 1e-12)
    assert float(largest_by_squaring(torch.zeros(n, n), times)) < 1e-30


def test_an_eigenvalue_that_occurs_often_is_found_from_below():
    values = torch.cat([torch.full((900,), 1.0), torch.linspace(0.0, 0.95, 100)])
    basis, _ = torch.linalg.qr(torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)))
    a = (basis * values) @ basis.mT
    assert float(largest_by_squaring(a, 8, from_below=True)) == pytest.approx(1.0, abs=1e-5)
    assert float(largest_by_squaring(a, 8)) > 1.01


def problem(sizes, n, dtype, device, **options):
    options.setdefault("output_constraint", "box")
    net = random_network(sizes, dtype=dtype, device=device, **options)
    return net.energy_snapshot(dtype).free(random_input(n, sizes[0], dtype=dtype, device=device))


@pytest.fixture
def on_chip(device):
    """Skip unless kernels run."""
    if not fits_on_chip(problem((4, 3), 1, torch.float32, device)):
        pytest.skip("the kernels need Triton, and a CUDA device or TRITON_INTERPRET=1")
    return device


@pytest.fixture
def in_rows(on_chip, monkeypatch):
    """Let the kernel for wide networks take narrow ones too."""
    monkeypatch.setattr(half_precision, "ON_CHIP", 0)
    return on_chip


@pytest.fixture
def without_kernels(monkeypatch):
    """Leave the CPU to torch, where kernels could be interpreted too."""
    monkeypatch.setattr(half_precision, "has_kernels", lambda t: False)


def agrees_with_newton(sizes, n, device):
    for dtype, tol, near in ((torch.float32, 1e-5, 1e-4), (torch.float64, 1e-10, 1e-8)):
        qp = problem(sizes, n, dtype, device)
        found = solve(qp, solver="accelerated", tol=tol)
        exact = solve(problem(sizes, n, torch.float64, device), solver="newton", tol=1e-12)
        assert found.converged.all()
        torch.testing.assert_close(found.z.double(), exact.z, rtol=0, atol=near * float(exact.z.abs().max()))


@pytest.mark.parametrize("n", [1, 16, 17, 33])
@pytest.mark.parametrize("sizes", [(5, 3), (6, 16, 3), (9, 20, 17, 4)])
def test_tiles_of_any_size_are_filled(on_chip, n, sizes):
    agrees_with_newton(sizes, n, on_chip)


def test_units_on_a_bound_are_there_to_the_last_bit(on_chip):
    sizes, n = (30, 24, 20, 4), 500
    options = {"beta": (1.0, 1.0, 0.0), "output_constraint": "free"}
    qp = problem(sizes, n, torch.float32, on_chip, **options)
    exact = solve(problem(sizes, n, torch.float64, on_chip, **options), solver="newton", tol=1e-13)
    stepper, z = half_precision.Tiles(qp), torch.zeros_like(qp.q)
    stepper.advance(qp, z, z, 64, qp.scale)
    # what is held with a clear slope is held here too
    held = (exact.z == 0) & (exact.gradient > 1e-4)
    assert held.any() and (z[held] == 0).all()


@pytest.mark.parametrize("sizes", [(5, 3), (9, 20, 17, 4)])
def test_rows_of_any_width_are_solved(in_rows, sizes):
    agrees_with_newton(sizes, 3, in_rows)


def test_equations_of_any_width_are_solved(in_rows):
    net = random_network((9, 20, 17, 4), dtype=torch.float64, device=in_rows, output_constraint="box")
    energy = net.energy_snapshot(torch.float64)
    x = random_input(4, 9, dtype=torch.float64, device=in_rows)
    z = solve(energy.free(x), solver="newton", tol=1e-12).z
    v = random_input(4, energy.free(x).dim, dtype=torch.float64, device=in_rows)
    exact = solve(energy.adjoint(z, v), solver="newton", tol=1e-12).z
    found = solve(energy.adjoint(z, v), solver="accelerated", tol=1e-10)
    assert found.converged.all() and torch.equal(found.z == 0, exact == 0)
    torch.testing.assert_close(found.z, exact, rtol=0, atol=1e-8)


def equations(sizes, n, dtype, device="cpu", **options):
    """The adjoint of a random problem, and its solution by dense factorisations in float64."""
    qp = problem(sizes, n, dtype, device, **options)
    free = random_input(n, qp.dim, dtype=dtype, device=device) > 0
    reach = torch.full_like(qp.q, math.inf).masked_fill(~free, 0)
    h, q = qp.hessian.to(torch.float64).dense(), qp.q.to(torch.float64)
    exact = torch.zeros_like(q)
    for i, f in enumerate(free):
        exact[i, f] = torch.linalg.solve(h[f][:, f], q[i, f])
    return type(qp)(qp.hessian, qp.q, -reach, reach, linear=True), exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 33, 70])
@pytest.mark.parametrize("sizes", [(5, 3), (9, 20, 17, 4), (300, 200, 10)])
def test_equations_on_the_cpu_are_solved_by_conjugate_gradients(without_kernels, sizes, n, dtype):
    qp, exact = equations(sizes, n, dtype, scale=3.0)
    tol = 1e-4 if dtype == torch.float32 else 1e-9
    solution = solve(qp, solver="accelerated", tol=tol)
    assert solution.converged.all()
    smallest = torch.linalg.eigvalsh(qp.hessian.to(torch.float64).dense())[0]
    assert ((solution.z - exact).norm(dim=1) <= 1.1 * tol * qp.scale / smallest).all()
    assert (solution.z[qp.hi == 0] == 0).all()


def test_conjugate_gradients_take_no_more_steps_than_there_are_units(without_kernels):
    qp, _ = equations((40, 12, 3), 20, torch.float64, scale=3.0)
    spent = solve(qp, solver="accelerated", tol=1e-10).n_sweeps
    assert (spent > 3).all() and (spent <= qp.dim + 1).all()


def test_equations_whose_squares_overflow_are_solved(without_kernels):
    qp, exact = equations((9, 20, 17, 4), 5, torch.float32)
    qp = type(qp)(qp.hessian, qp.q * 1e30, qp.lo, qp.hi, linear=True)
    solution = solve(qp, solver="accelerated", tol=1e-5)
    smallest = torch.linalg.eigvalsh(qp.hessian.to(torch.float64).dense())[0]
    assert solution.converged.all()
    assert ((solution.z - 1e30 * exact).norm(dim=1) <= 1.1e-5 * qp.scale / smallest).all()


def test_wide_equations_go_to_conjugate_gradients_on_the_cpu_and_bounds_never(without_kernels):
    wide, narrow = (random_network((20, units, 3)).energy_snapshot(torch.float64) for units in (1024, 1023))
    x, v = random_input(2, 20), random_input(2, 1024)

    def used(energy, units):
        return solve(energy.adjoint(torch.ones_like(v[:, :units]), v[:, :units])).solvers

    assert used(wide, 1024) == ("accelerated",) and used(narrow, 1023) == ("coordinate_descent",)
    assert solve(wide.free(x)).solvers == ("coordinate_descent",)


@pytest.mark.parametrize("kind", [half_precision.Rows, half_precision.Equations])
def test_momentum_outlives_a_round(in_rows, kind):
    outlives_a_round(kind, in_rows)


def test_directions_on_the_cpu_outlive_a_round():
    outlives_a_round(conjugate_gradients.Conjugate, "cpu")


def outlives_a_round(kind, device):
    net = random_network((9, 24, 20, 4), beta=(1.0, 1.0, 0.0), device=device, scale=3.0)  # condition about 50
    energy = net.energy_snapshot(torch.float64)
    qp = energy.free(random_input(4, 9, dtype=torch.float64, device=device))
    if kind is not half_precision.Rows:
        z = solve(qp, solver="newton", tol=1e-12).z
        qp = energy.adjoint(z, random_input(4, qp.dim, dtype=torch.float64, device=device))

    def rounds(begin_anew):
        z, stepper = torch.zeros_like(qp.q), kind(qp)
        for count in range(1, 200):
            g, residual = stepper.check(qp, z)
            if bool((residual <= 1e-8 * qp.scale).all()):
                return count
            stepper = kind(qp) if begin_anew else stepper
            stepper.advance(qp, z, g, 8, 1e-8 * qp.scale)
        return count

    assert rounds(False) < 0.8 * rounds(True)


@pytest.mark.parametrize("by_parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("linear", [False, True], ids=["bounds", "equations"])
def test_rows_are_judged_as_by_torch(in_rows, dtype, linear, by_parts):
    qp = problem((9, 20, 17, 4), 6, dtype, in_rows)
    z = (qp.lo + random_input(6, qp.dim, dtype=dtype, device=in_rows).abs()).clamp(qp.lo, qp.hi)
    z[:, ::3] = qp.lo.expand(6, -1)[:, ::3]
    z[1, 1::3] = qp.hi.expand(6, -1)[1, 1::3].clamp(max=1)
    if linear:
        free = z > qp.lo
        reach = torch.full_like(z, math.inf).masked_fill(~free, 0)
        qp = type(qp)(qp.hessian, qp.q, -reach, reach, linear=True)
        z = z * free
    if dtype == torch.float64:
        qp.q[2] *= 1e200  # its square overflows
    qp.q[3, 2] = math.inf
    qp.q[4, 0] = math.nan  # a unit on a bound, or fixed
    stepper = (half_precision.Equations if linear else half_precision.Rows)(qp)
    stepper.by_parts = by_parts
    (g, residual), (expected_g, expected) = stepper.check(qp, z), recompute(qp, z)
    close = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(g, expected_g, equal_nan=True, **close)
    finite = [0, 1, 2, 5]
    assert expected[finite].isfinite().all() and residual.dtype == torch.float64
    torch.testing.assert_close(residual[finite], expected[finite], rtol=1e-4, atol=1e-6)
    assert torch.equal(residual.isfinite(), expected.isfinite())


def test_steps_of_a_device_are_those_of_the_compiled_pass():
    qp = problem((9, 20, 17, 4), 6, torch.float64, "cpu", output_constraint="box")
    found = []
    for take in (accelerated._Momentum._compiled, accelerated._Momentum._on_device):
        stepper, z = accelerated._Momentum(qp), torch.zeros_like(qp.q).clamp_(qp.lo, qp.hi)
        ahead = take(stepper, qp, z, z.clone(), 40)
        found.append((z, ahead, stepper._t))
    for compiled, plain in zip(*found, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-9, atol=1e-9)
    assert bool((found[0][0] != 0).any()) and float(found[0][2].max()) > 2


@pytest.mark.parametrize("most_on_chip", [256, 0])
def test_the_kernel_leaves_what_is_not_finite_alone(on_chip, most_on_chip, monkeypatch):
    monkeypatch.setattr(half_precision, "ON_CHIP", most_on_chip)
    qp = problem((6, 8, 3), 5, torch.float32, on_chip)
    spoiled = qp.q.clone()
    spoiled[2, 1] = math.inf
    bad = type(qp)(qp.hessian, spoiled, qp.lo, qp.hi)
    found, clean = (solve(p, solver="accelerated") for p in (bad, qp))
    others = [0, 1, 3, 4]
    assert not bool(found.converged[2]) and found.converged[others].all()
    # the solves that are left to advance together differ, and with them the rounding of products over their rows
    smallest = float(torch.linalg.eigvalsh(qp.hessian.to(torch.float64).dense())[0])
    noise = rounding(qp.hessian.frobenius() * float(clean.z.norm()) + float(qp.q.norm()), qp.dim, torch.float32)
    residuals = ((solution.residual[others] + noise).cpu() for solution in (found, clean))
    apart = torch.linalg.vector_norm((found.z - clean.z)[others].double(), dim=1).cpu()
    assert (apart.numpy() <= two_solves(*residuals, smallest)).all() and found.z.isfinite().all()


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN)")  # NumPy's, where Triton interprets
@pytest.mark.parametrize("kind", [half_precision.Rows, half_precision.Equations])
def test_a_correction_that_is_not_finite_is_not_added(in_rows, kind):
    drops_what_is_not_finite(kind, in_rows)


def test_a_correction_on_the_cpu_that_is_not_finite_is_not_added():
    drops_what_is_not_finite(conjugate_gradients.Conjugate, "cpu")


def drops_what_is_not_finite(kind, device):
    net = random_network((9, 20, 17, 4), dtype=torch.float64, device=device)
    energy = net.energy_snapshot(torch.float64)
    qp = energy.free(random_input(3, 9, dtype=torch.float64, device=device))
    if kind is not half_precision.Rows:
        qp = energy.adjoint(torch.ones_like(qp.q), qp.q)
    stepper, z = kind(qp), torch.zeros_like(qp.q).clamp_(qp.lo, qp.hi)
    g, _ = stepper.check(qp, z)
    stepper.advance(qp, z, g, 4, 1e-8 * qp.scale)
    g, _ = stepper.check(qp, z)
    g[1, 3] = -math.inf
    before = z.clone()
    stepper.advance(qp, z, g, 4, 1e-8 * qp.scale)
    moved = (z != before).any(1)
    assert torch.equal(z[1], before[1]) and bool(moved[0]) and bool(moved[2])
    # nothing is kept from that round either, and the next one gets on
    for _ in range(20):
        g, residual = stepper.check(qp, z)
        stepper.advance(qp, z, g, 8, 1e-8 * qp.scale)
    assert bool((residual <= 1e-6 * qp.scale).all())


def test_wide_problems_take_the_kernel_for_rows_and_wider_ones_none(device, monkeypatch):
    available = fits_on_chip(problem((4, 3), 1, torch.float32, device))
    monkeypatch.setattr(half_precision, "ON_CHIP", 3)
    monkeypatch.setattr(half_precision, "IN_ROWS", 5)
    small, wide, wider = (problem((4, units), 1, torch.float32, device) for units in (3, 5, 6))
    assert fits_on_chip(small) == fits_in_rows(wide) == available
    assert not fits_on_chip(wide) and not fits_in_rows(wider)


def test_the_kernel_reports_the_residual_of_its_answer(on_chip):
    qp = problem((9, 20, 17, 4), 33, torch.float32, on_chip)
    stepper = half_precision.Tiles(qp)
    z = torch.zeros_like(qp.q).clamp_(qp.lo, qp.hi)
    stepper.advance(qp, z, z, 4, qp.scale)
    g, residual = stepper.check(qp, z)
    exact = problem((9, 20, 17, 4), 33, torch.float64, on_chip)
    torch.testing.assert_close(g.double(), exact.gradient(z.double()), rtol=0, atol=2e-5)
    torch.testing.assert_close(residual, exact.residual(z.double()), rtol=1e-3, atol=2e-5)
    assert float(residual.max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(5, 3), (6, 16, 3), (9, 20, 17, 4)])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_what_the_kernel_reads_is_the_hessian_and_its_spectrum(on_chip, dtype, sizes, scale):
    h = problem(sizes, 1, dtype, on_chip).hessian
    h = type(h)(tuple(scale * block for block in h.diag), tuple(scale * block for block in h.sub))
    unit, high, low, move, (inverse, momentum) = half_precision.halves_and_rates(h)
    dense = h.dense().double()
    exact = dense.diagonal().rsqrt()
    torch.testing.assert_close(unit.double(), exact, rtol=1e-6, atol=0)
    a = torch.eye(len(high), dtype=torch.float64, device=dense.device)
    a[: h.dim, : h.dim] = dense * exact[:, None] * exact
    torch.testing.assert_close(high.double() + low.double(), a, rtol=0, atol=2e-7)
    torch.testing.assert_close(move.double(), torch.eye(len(a), device=a.device) - a * inverse, rtol=0, atol=6e-4)
    eigenvalues = torch.linalg.eigvalsh(a)
    largest, smallest = float(1 / inverse), float((1 - momentum) / (1 + momentum)) ** 2 / float(inverse)
    excess = len(a) ** (1 / 2 ** (half_precision.UP + 1))
    assert float(eigenvalues[-1]) <= largest <= 1.01 * excess * float(eigenvalues[-1])
    assert abs(smallest - float(eigenvalues[0])) <= 6e-3 * largest


@pytest.mark.parametrize("scale", [2.0, 4.0, 8.0])  # conditions from 30 to 170
def test_the_smallest_eigenvalue_is_found_within_a_third(on_chip, scale):
    options = {"beta": (1.0, 1.0, 0.0), "output_constraint": "free", "scale": scale}
    h = problem((9, 60, 40, 4), 1, torch.float32, on_chip, **options).hessian
    _, high, low, _, (inverse, momentum) = half_precision.halves_and_rates(h)
    exact = float(torch.linalg.eigvalsh(high.double() + low.double())[0])
    found = float((1 - momentum) / (1 + momentum)) ** 2 / float(inverse)
    assert exact / 1.3 <= found <= exact * 1.3


@pytest.mark.parametrize("scale", [4.0, 12.0])  # conditions of 50 and 450
def test_momentum_of_wide_solves_is_what_their_condition_asks_for(in_rows, scale):
    options = {"beta": (1.0, 0.0), "output_constraint": "free", "scale": scale}
    qp = problem((30, 150, 4), 4, torch.float32, in_rows, **options)
    values = torch.linalg.eigvalsh(qp.hessian.dense().double())
    root = math.sqrt(float(values[0] / values[-1]))
    momentum = float(half_precision.most_momentum(qp.hessian))
    # the root of a condition number that is wrong by a factor of 1.5
    assert (1 - 1.23 * root) / (1 + 1.23 * root) <= momentum <= (1 - root / 1.23) / (1 + root / 1.23)
    assert solve(qp, solver="accelerated", tol=1e-6).converged.all()


def one_layer(sizes, n, dtype, device, scale=1.0, constraint="nonneg"):
    """A problem whose Hessian is a I + b W W^T."""
    net = random_network(sizes, (1.0, 0.0), constraint=constraint, scale=scale, dtype=dtype, device=device)
    return net.energy_snapshot(dtype).free(random_input(n, sizes[0], dtype=dtype, device=device))


@pytest.mark.parametrize("sizes", [(9, 40, 4), (40, 9, 4)], ids=["wide", "narrow"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_rates_of_the_heavy_ball_are_those_of_the_condition_number(in_rows, sizes, scale):
    qp = one_layer(sizes, 1, torch.float64, in_rows, scale)
    unit, _, _, (inverse, step, momentum) = half_precision.half_and_rate(qp.hessian)
    values = torch.linalg.eigvalsh(qp.hessian.dense() * unit[:, None] * unit)
    excess = min(sizes[:2]) ** (1 / 2 ** (half_precision.UP + 1))
    # a power that underflows is taken for the smallest number
    floor = 1e-38 ** (1 / 2**half_precision.UP) * qp.dim**0.5
    assert float(values[-1]) <= 1 / float(inverse) <= 1.0101 * (excess * float(values[-1]) + floor)
    # Polyak: 4 / (sqrt(L) + sqrt(mu))^2 times L, and ((sqrt(L) - sqrt(mu)) / (sqrt(L) + sqrt(mu)))^2, with mu from below
    a, _, _ = qp.hessian.factor
    smallest = a * float(unit.min()) ** 2
    assert smallest <= float(values[0]) * (1 + 1e-9)
    large, small = float(inverse) ** -0.5, smallest**0.5
    assert float(step) == pytest.approx(4 * large**2 / (large + small) ** 2, rel=1e-5)
    assert float(momentum) == pytest.approx(((large - small) / (large + small)) ** 2, rel=1e-4, abs=1e-6)


def test_steps_of_the_heavy_ball_are_those_of_its_formula(in_rows):
    qp = one_layer((9, 40, 4), 5, torch.float64, in_rows, 3.0)
    unit, _, _, (inverse, step, momentum) = half_precision.half_and_rate(qp.hessian)
    stepper, z = half_precision.Rows(qp), torch.zeros_like(qp.q)
    here = last = z.clone()
    for sweeps in (5, 1, 4):  # momentum goes on from call to call
        stepper.advance(qp, z, qp.gradient(z), sweeps, qp.scale)
        for _ in range(sweeps):
            there = here - step * inverse * unit**2 * qp.gradient(here) + momentum * (here - last)
            here, last = qp.project(there), here
        torch.testing.assert_close(z, here, rtol=0, atol=3e-3 * float(here.abs().max()))
    held = (here == 0) & (qp.gradient(here) > 0.05)
    assert held.any() and (z[held] == 0).all() and (here > 0).any()


@pytest.mark.parametrize("constraint", ["nonneg", (-0.1, 0.1), "free"])
def test_the_heavy_ball_needs_fewer_steps(in_rows, constraint):
    qp = one_layer((30, 150, 4), 8, torch.float64, in_rows, 3.0, constraint)
    exact = solve(qp, solver="newton", tol=1e-12).z
    hessian = type(qp.hessian)(qp.hessian.diag, qp.hessian.sub)
    found = {}
    for name, h in (("heavy ball", qp.hessian), ("Nesterov", hessian)):
        other = type(qp)(h, qp.q, qp.lo, qp.hi, holds_zero=qp.holds_zero)
        solution = loop.solve_fixed(other, 36, tol=1e-6, aim=1e-6)
        found[name] = float((solution.z - exact).abs().max())
        assert torch.equal(solution.n_sweeps, torch.full_like(solution.n_sweeps, 36))
    assert found["heavy ball"] < 0.1 * found["Nesterov"]


@pytest.mark.parametrize(("aim", "by_parts"), [(1e-4, True), (4e-6, False)])
def test_residuals_of_tight_solves_are_not_computed_by_parts(aim, by_parts, monkeypatch):
    qp, begun, begin = one_layer((9, 40, 4), 3, torch.float32, "cpu"), [], accelerated.Accelerated.begin
    monkeypatch.setattr(accelerated.Accelerated, "begin", lambda *given: begun.append(begin(*given)) or begun[-1])
    loop.solve_fixed(qp, 16, tol=1e-4, aim=aim)
    solve(qp, solver="accelerated", tol=1e-4, aim=aim)
    assert [stepper.by_parts for stepper in begun] == [by_parts, by_parts]


def test_warm_starts_of_the_heavy_ball_take_fewer_steps(in_rows):
    qp = one_layer((9, 40, 4), 3, torch.float32, in_rows)
    near = solve(qp, solver="newton").z
    spent = loop.solve_fixed(qp, 16, tol=1e-4, aim=1e-4, start=near).n_sweeps
    assert (spent == 12).all()


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN)")  # NumPy's, where Triton interprets
def test_statuses_of_one_kernel_are_those_of_the_loop(in_rows):
    qp = one_layer((9, 40, 4), 4, torch.float32, in_rows)
    qp.q[1, 3], qp.q[2, 0] = math.inf, math.nan
    few, many = (loop.solve_fixed(qp, sweeps, tol=1e-4, aim=1e-4) for sweeps in (1, 64))
    spoiled, missed, fine = int(Status.NON_FINITE), int(Status.MAX_SWEEPS), int(Status.CONVERGED)
    assert few.status.tolist() == [missed, spoiled, spoiled, missed]
    assert many.status.tolist() == [fine, spoiled, spoiled, fine]


def test_momentum_is_limited_once_there_were_many_steps(in_rows, monkeypatch):
    qp = problem((9, 20, 17, 4), 5, torch.float64, in_rows)
    monkeypatch.setattr(half_precision, "most_momentum", lambda h: torch.zeros((), device=h.device))
    monkeypatch.setattr(half_precision, "LONGEST", 1)
    stepper, z = half_precision.Rows(qp), torch.zeros_like(qp.q).clamp_(qp.lo, qp.hi)
    stepper.advance(qp, z, qp.gradient(z), 1, qp.scale)  # one step has no momentum yet
    unit, _, _, (inverse, *_) = half_precision.half_and_rate(qp.hessian)
    plain = z.clone()
    for _ in range(6):
        plain = qp.project(plain - inverse * unit**2 * qp.gradient(plain))
    stepper.advance(qp, z, qp.gradient(z), 6, qp.scale)
    torch.testing.assert_close(z, plain, rtol=0, atol=2e-3 * float(plain.abs().max()))
    # and what it is without a limit is something else
    free, w = half_precision.Rows(qp), torch.zeros_like(qp.q).clamp_(qp.lo, qp.hi)
    free.advance(qp, w, qp.gradient(w), 7, qp.scale)
    assert float((w - plain).abs().max()) > 2e-2 * float(plain.abs().max())


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_units_of_wide_solves_are_those_of_layers_unless_a_few_are_far_larger(in_rows, scale):
    net = random_network((20, 60, 40, 4), dtype=torch.float64, device=in_rows, output_constraint="free")
    with torch.no_grad():
        net.W[0][:5] *= scale
    qp = net.energy_snapshot(torch.float64).free(random_input(4, 20, dtype=torch.float64, device=in_rows))
    unit, matrix, _, (inverse, *_) = half_precision.half_and_rate(qp.hessian)
    first, second = unit[:60], unit[60:]
    assert (second == second[0]).all() and bool((first == first[0]).all()) == (scale == 1.0)
    a = qp.hessian.dense() * unit[:, None] * unit
    torch.testing.assert_close(matrix.double(), a * inverse, rtol=0, atol=1e-3)
    values = torch.linalg.eigvalsh(a)
    assert float(values[-1]) <= float(1 / inverse) and float(values[-1] / values[0]) < 40
    assert solve(qp, solver="accelerated", tol=1e-8).converged.all()
