"""Dense matrices of what certificates without a matrix use by products, and exact answers on small problems."""

from __future__ import annotations

import itertools

import numpy as np


def hessian(weights, beta, discounts):
    """H of the free phase with all layers unknown, and B with q = B x + ..., block by block from the definition."""
    sizes = [w.shape[0] for w in weights]
    ends = np.cumsum([0, *sizes])
    h = np.zeros((ends[-1], ends[-1]))
    for k, w in enumerate(weights):
        a, here = discounts[k], slice(ends[k], ends[k + 1])
        h[here, here] += a * (np.eye(sizes[k]) + beta[k] * w @ w.T)
        if k:
            below = slice(ends[k - 1], ends[k])
            h[below, below] += a * (w.T @ w + beta[k] * np.eye(sizes[k - 1]))
            h[here, below] -= a * (1 + beta[k]) * w
            h[below, here] -= a * (1 + beta[k]) * w.T
    b = np.zeros((ends[-1], weights[0].shape[1]))
    b[: sizes[0]] = discounts[0] * (1 + beta[0]) * weights[0]
    return h, b


def whole_form(h, b, lam):
    """The matrix of v^T Lam (H v - B u) + |u|^2 in (v, u)."""
    cross = -lam[:, None] * b / 2
    return np.block([[(lam[:, None] * h + h * lam) / 2, cross], [cross.T, np.eye(b.shape[1])]])


def best_shared_dual(h, b, lam, c, lead, low, high, slack):
    """Maximise (10) of docs/theory/local-radii.md by Clarabel; low and high are infinite where there is no bound."""
    import clarabel
    from scipy import sparse

    n, inverse = len(h), np.linalg.inv(whole_form(h, b, lam))
    below, above = np.isfinite(low), np.isfinite(high)
    eye = np.eye(n)
    # unknowns: sigma, the multipliers of the lower and of the upper ends, and r
    by_v = np.hstack([c[:, None], -eye[:, below], eye[:, above], h])
    by_u = np.hstack([np.zeros((b.shape[1], 1 + below.sum() + above.sum())), -b.T])
    linear = np.vstack([by_v, by_u])
    shift = np.concatenate([lam * slack, np.zeros(b.shape[1])])
    quadratic = linear.T @ inverse @ linear / 2
    gain = np.concatenate([[lead], -low[below], -high[above], slack]) - linear.T @ inverse @ shift / 2
    signs = -np.eye(1 + below.sum() + above.sum(), linear.shape[1])
    upper = np.hstack([np.zeros((n, signs.shape[0])), eye])[below]
    lower = -np.hstack([np.zeros((n, signs.shape[0])), eye])[above]
    right = np.concatenate([np.zeros(len(signs)), (lam * low)[below], (lam * high)[above]])
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
    constraints = sparse.csc_matrix(np.vstack([signs, upper, lower]))
    found = clarabel.DefaultSolver(
        sparse.csc_matrix(np.triu(quadratic)), -gain, constraints, right, [clarabel.NonnegativeConeT(len(right))], settings
    ).solve()
    assert found.status in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved), found.status
    x = np.array(found.x)
    return float(gain @ x - x @ quadratic @ x / 2 - shift @ inverse @ shift / 4)


def exact_distance(h, b, q, lo, hi, c, lead, z):
    """Length of the shortest u that brings c^T z(x + u) down by ``lead`` from c^T z, over every active set; inf if none does.

    z(x + u) minimises 1/2 z^T H z - (q + B u)^T z over the box.
    """
    import quadprog

    n, best = len(h), np.inf
    choices = [
        (["free"] if lo[i] < hi[i] else [])
        + (["lo"] if np.isfinite(lo[i]) else [])
        + (["hi"] if np.isfinite(hi[i]) and lo[i] < hi[i] else [])
        for i in range(n)
    ]
    for sides in itertools.product(*choices):
        free = np.array([s == "free" for s in sides])
        base = np.array([lo[i] if s == "lo" else hi[i] if s == "hi" else 0.0 for i, s in enumerate(sides)])
        slope = np.zeros((n, b.shape[1]))
        if free.any():
            inside = h[np.ix_(free, free)]
            base[free] = np.linalg.solve(inside, q[free] - h[np.ix_(free, ~free)] @ base[~free])
            slope[free] = np.linalg.solve(inside, b[free])
        gradient, tilt = h @ base - q, h @ slope - b
        rows, limits = [-(c @ slope)], [lead + c @ (base - z)]
        for i, side in enumerate(sides):
            if side == "free":
                ends = [(1.0, lo[i])] * bool(np.isfinite(lo[i])) + [(-1.0, hi[i])] * bool(np.isfinite(hi[i]))
                rows += [sign * slope[i] for sign, _ in ends]
                limits += [sign * (end - base[i]) for sign, end in ends]
            elif lo[i] < hi[i]:
                sign = 1.0 if side == "lo" else -1.0
                rows.append(sign * tilt[i])
                limits.append(-sign * gradient[i])
        try:
            u = quadprog.solve_qp(np.eye(b.shape[1]), np.zeros(b.shape[1]), np.array(rows).T, np.array(limits))[0]
        except ValueError:
            continue  # no such input has this active set
        best = min(best, float(np.linalg.norm(u)))
    return best
