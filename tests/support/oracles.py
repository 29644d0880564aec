"""Independent answers: NumPy float64, written from the definitions, sharing no code with the package."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import mpmath
import numpy as np
import torch

import lrrn
from lrrn.bounds.outputs import pair_constants


@dataclass
class PlainNetwork:
    """Parameters of a network as NumPy arrays."""

    weights: list[np.ndarray]
    b: list[np.ndarray]
    c: list[np.ndarray]
    beta: tuple[float, ...]
    gamma: float
    lo: list[float]
    hi: list[float]

    @classmethod
    def of(cls, net: lrrn.LRRN) -> PlainNetwork:
        def arrays(group, sizes):
            return [np.zeros(s) if p is None else p.detach().double().cpu().numpy() for p, s in zip(group, sizes, strict=True)]

        return cls(
            [w.detach().double().cpu().numpy() for w in net.W],
            arrays(net.b, net.sizes[1:]),
            arrays(net.c, net.sizes[:-1]),
            net.beta,
            net.gamma,
            [i.lo for i in net.intervals],
            [i.hi for i in net.intervals],
        )

    @property
    def sizes(self) -> list[int]:
        return [self.weights[0].shape[1], *(w.shape[0] for w in self.weights)]

    def energy(self, x: np.ndarray, z: list[np.ndarray]) -> float:
        """The discounted energy of the paper for one sample, term by term."""
        layers = [x, *z]
        total = 0.0
        for k, w in enumerate(self.weights):
            regression = layers[k + 1] - w @ layers[k] - self.b[k]
            reconstruction = w.T @ layers[k + 1] - layers[k] - self.c[k]
            total += self.gamma**k * (regression @ regression + self.beta[k] * (reconstruction @ reconstruction))
        return total / 2

    def gradient(self, x: np.ndarray, z: list[np.ndarray]) -> np.ndarray:
        """dE/dz of a batch from the definition of E, without forming H; layers side by side."""
        layers, total = [x, *z], [np.zeros_like(layer) for layer in (x, *z)]
        for k, w in enumerate(self.weights):
            regression = layers[k + 1] - layers[k] @ w.T - self.b[k]
            reconstruction = layers[k + 1] @ w - layers[k] - self.c[k]
            total[k + 1] += self.gamma**k * (regression + self.beta[k] * reconstruction @ w.T)
            total[k] -= self.gamma**k * (regression @ w + self.beta[k] * reconstruction)
        return np.concatenate(total[1:], axis=1)


@dataclass
class PlainQP:
    """minimise 1/2 z^T H z - q^T z + constant over lo <= z <= hi, for one sample."""

    h: np.ndarray
    q: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    constant: float

    def value(self, z: np.ndarray) -> float:
        return 0.5 * z @ self.h @ z - self.q @ z + self.constant


def quadratic_of(function, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Read H, q and the constant off a quadratic function by evaluating it at 0, e_i and e_i + e_j."""
    basis = np.eye(n)
    constant = function(np.zeros(n))
    single = np.array([function(e) for e in basis])
    h = np.empty((n, n), dtype=single.dtype)
    for i in range(n):
        for j in range(i + 1):
            h[i, j] = h[j, i] = function(basis[i] + basis[j]) - single[i] - single[j] + constant
    q = np.diag(h) / 2 - (single - constant)
    return h, q, constant


def full_qp(net: PlainNetwork, x: np.ndarray, y: np.ndarray | None = None) -> PlainQP:
    """The inference problem of one sample over every layer, or over all but the output if ``y`` is given."""
    sizes = net.sizes[1:] if y is None else net.sizes[1:-1]
    ends = np.cumsum([0, *sizes])

    def function(flat: np.ndarray) -> float:
        z = [flat[ends[k] : ends[k + 1]] for k in range(len(sizes))]
        return net.energy(x, z if y is None else [*z, y])

    h, q, constant = quadratic_of(function, int(ends[-1]))
    lo = np.repeat(net.lo[: len(sizes)], sizes)
    hi = np.repeat(net.hi[: len(sizes)], sizes)
    return PlainQP(h, q, lo, hi, constant)


def kkt_norm(qp: PlainQP, z: np.ndarray) -> float:
    """Distance of -gradient from the normal cone of the box at z; infinite outside the box."""
    if np.any(z < qp.lo) or np.any(z > qp.hi):
        return np.inf
    total = 0.0
    for i, g in enumerate(qp.h @ z - qp.q):
        at_lo, at_hi = z[i] == qp.lo[i], z[i] == qp.hi[i]
        if at_lo and at_hi:
            continue
        violation = min(g, 0.0) if at_lo else max(g, 0.0) if at_hi else g
        total += violation**2
    return float(np.sqrt(total))


def exhaustive(qp: PlainQP) -> np.ndarray:
    """Try every active set; the feasible candidate of least value is the minimiser."""
    n = len(qp.q)
    choices = [
        ["free"] + (["lo"] if np.isfinite(qp.lo[i]) else []) + (["hi"] if np.isfinite(qp.hi[i]) else []) for i in range(n)
    ]
    best, best_value = None, np.inf
    for sides in itertools.product(*choices):
        z = np.array([qp.lo[i] if s == "lo" else qp.hi[i] if s == "hi" else 0.0 for i, s in enumerate(sides)])
        free = np.array([s == "free" for s in sides])
        if free.any():
            z[free] = np.linalg.solve(qp.h[np.ix_(free, free)], qp.q[free] - qp.h[np.ix_(free, ~free)] @ z[~free])
        if np.all(z >= qp.lo - 1e-12) and np.all(z <= qp.hi + 1e-12) and qp.value(z) < best_value:
            best, best_value = z, qp.value(z)
    assert best is not None
    return best


def exact(net: PlainNetwork, x: np.ndarray, guess: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
    """The minimiser in mpmath's working precision, on the face of ``guess``, with the KKT conditions checked there."""

    def precise(a: np.ndarray) -> np.ndarray:
        return np.vectorize(mpmath.mpf, otypes=[object])(a)

    exactly = replace(
        net,
        weights=[precise(w) for w in net.weights],
        b=[precise(b) for b in net.b],
        c=[precise(c) for c in net.c],
        beta=tuple(mpmath.mpf(b) for b in net.beta),
        gamma=mpmath.mpf(net.gamma),
    )
    qp = full_qp(exactly, precise(x), None if y is None else precise(y))
    at_lo, at_hi = guess <= qp.lo, guess >= qp.hi
    z = precise(np.where(at_lo, qp.lo, np.where(at_hi, qp.hi, 0.0)))
    free = ~(at_lo | at_hi)
    if free.any():
        rhs = qp.q[free] - qp.h[np.ix_(free, ~free)] @ z[~free]
        z[free] = list(mpmath.lu_solve(mpmath.matrix(qp.h[np.ix_(free, free)].tolist()), mpmath.matrix(rhs.tolist())))
    gradient = qp.h @ z - qp.q
    assert np.all(gradient[at_lo & ~at_hi] >= 0) and np.all(gradient[at_hi & ~at_lo] <= 0)
    assert np.all(z >= qp.lo) and np.all(z <= qp.hi)
    return z


def by_quadprog(qp: PlainQP) -> np.ndarray:
    """Goldfarb-Idnani's dual active-set method, an independent solver."""
    import quadprog

    n = len(qp.q)
    finite_lo, finite_hi = np.isfinite(qp.lo), np.isfinite(qp.hi)
    constraints = np.hstack([np.eye(n)[:, finite_lo], -np.eye(n)[:, finite_hi]])
    limits = np.concatenate([qp.lo[finite_lo], -qp.hi[finite_hi]])
    if constraints.shape[1] == 0:
        return np.linalg.solve(qp.h, qp.q)
    return quadprog.solve_qp(qp.h, qp.q, constraints, limits)[0]


def by_osqp(qp: PlainQP) -> np.ndarray:
    """An operator-splitting method, an independent solver."""
    import osqp
    from scipy import sparse

    problem = osqp.OSQP()
    problem.setup(
        sparse.csc_matrix(np.triu(qp.h)),
        -qp.q,
        sparse.identity(len(qp.q), format="csc"),
        qp.lo,
        qp.hi,
        eps_abs=1e-10,
        eps_rel=1e-10,
        max_iter=200_000,
        polishing=True,
        verbose=False,
    )
    return problem.solve(raise_error=True).x


def best_dual(
    h: np.ndarray,
    root: np.ndarray,
    c: np.ndarray,
    d: np.ndarray,
    lead: float,
    low: np.ndarray,
    high: np.ndarray,
    slack: np.ndarray,
) -> float:
    """Maximise the dual of docs/theory/local-radii.md, (6), over all multipliers, as a semidefinite programme by Clarabel.

    The largest t for which |u|^2 + sum theta_k f_k(v, u) - t is a nonnegative form of (v, u, 1), with f_k <= 0 the conditions;
    infinite if there is no largest one.
    """
    import clarabel
    from scipy import sparse

    m, r = root.shape
    n = m + r + 1
    one = np.eye(n)[-1]
    at_low = np.hstack([np.eye(m), np.zeros((m, r)), low[:, None]])  # v + low
    under = np.hstack([-np.eye(m), np.zeros((m, r)), np.where(np.isfinite(high), high, 0.0)[:, None]])  # high - v
    force = np.hstack([h, -root, slack[:, None]])  # w + slack

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (np.outer(a, b) + np.outer(b, a)) / 2

    two = np.isfinite(high)
    forms = [product(np.concatenate([c, d, [lead]]), one)]
    for i in range(m):
        forms += [product(at_low[i], force[i]), -product(at_low[i], one)]
        forms += [-product(under[i], force[i]), -product(under[i], one)] if two[i] else [-product(force[i], one)]
    start = np.zeros((n, n))
    start[m : m + r, m : m + r] = np.eye(r)
    upper = [(i, j) for j in range(n) for i in range(j + 1)]

    def stacked_upper(a: np.ndarray) -> np.ndarray:
        return np.array([a[i, j] * (1 if i == j else np.sqrt(2)) for i, j in upper])

    k = len(forms)
    columns = np.stack([-stacked_upper(form) for form in (*forms, -np.outer(one, one))], 1)
    constraints = sparse.csc_matrix(np.vstack([np.eye(k, k + 1) * -1, columns]))
    right = np.concatenate([np.zeros(k), stacked_upper(start)])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    cones = [clarabel.NonnegativeConeT(k), clarabel.PSDTriangleConeT(n)]
    objective = np.append(np.zeros(k), -1.0)
    found = clarabel.DefaultSolver(sparse.csc_matrix((k + 1, k + 1)), objective, constraints, right, cones, settings).solve()
    if found.status == clarabel.SolverStatus.DualInfeasible:
        return np.inf
    assert found.status in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved), found.status
    return float(found.x[-1])


def pair_bounds(net: lrrn.LRRN, method: str) -> torch.Tensor:
    """The table of proven constants of all differences of two outputs."""
    return pair_constants(net.energy_snapshot(torch.float64), method).rho


def random_network(
    sizes: tuple[int, ...],
    beta: float | tuple[float, ...] = 1.0,
    gamma: float = 0.5,
    constraint="nonneg",
    output_constraint="free",
    seed: int = 0,
    scale: float = 1.0,
    bias_scale: float = 0.3,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    **options,
) -> lrrn.LRRN:
    """A network with random weights and biases."""
    generator = torch.Generator().manual_seed(seed)
    net = lrrn.LRRN(
        sizes,
        beta=beta,
        gamma=gamma,
        constraint=constraint,
        output_constraint=output_constraint,
        generator=generator,
        dtype=dtype,
        device=device,
        **options,
    )
    with torch.no_grad():
        for w in net.W:
            w.mul_(scale)
        for group in (net.b, net.c):
            for p in group:
                if p is not None:
                    p.copy_(bias_scale * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return net


def random_input(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype=dtype, device=device)


def stacked(solution: lrrn.Solution) -> np.ndarray:
    """All activations of a solution side by side, in float64."""
    return torch.cat([z.double() for z in solution.activations], dim=-1).cpu().numpy()
