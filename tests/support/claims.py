"""Networks with given weights, and closed forms, for the paper's claims."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from lrrn import LRRN
from oracles import PlainNetwork

CONSTRAINTS = ["free", "nonneg", "box", (-0.3, 0.5)]
CASES = st.fixed_dictionaries(
    dict(
        seed=st.integers(0, 10_000),
        sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple),
        gamma=st.sampled_from([0.1, 1.0, 2.0]),
        scale=st.sampled_from([0.5, 1.0, 4.0]),
        constraint=st.sampled_from(CONSTRAINTS),
        output_constraint=st.sampled_from(CONSTRAINTS),
    )
)


def network(weights, beta, gamma=1.0, constraint="free", output="free", b=None, c=None) -> LRRN:
    """A float64 network with the given weights, and biases of zero unless given."""
    sizes = (weights[0].shape[1], *(w.shape[0] for w in weights))
    net = LRRN(sizes, beta=beta, gamma=gamma, constraint=constraint, output_constraint=output, dtype=torch.float64)
    with torch.no_grad():
        for group, values in ((net.W, weights), (net.b, b), (net.c, c)):
            for parameter, value in zip(group, values, strict=True) if values is not None else ():
                parameter.copy_(torch.as_tensor(value))
    return net


def solved(net: LRRN, x, y=None):
    return net.infer(torch.as_tensor(x), y, solver="newton", tol=1e-10)


def energies(net: LRRN, x, y=None) -> np.ndarray:
    return solved(net, x, y).energy.numpy()


def orthogonal(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Orthonormal rows, or columns where there are more rows."""
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(max(rows, columns), min(rows, columns))))
    return q if rows >= columns else q.T


def with_singular_values(values, columns: int, seed: int = 0) -> np.ndarray:
    return orthogonal(len(values), len(values), seed) @ np.diag(values) @ orthogonal(len(values), columns, seed + 1)


def left_over(beta: float, s):
    """2 E of one linear layer at a unit vector along a singular direction.

    s^2 + beta - (1 + beta)^2 s^2 / (1 + beta s^2), and the numerator is a square.
    """
    return beta * (1 - s**2) ** 2 / (1 + beta * s**2)


def mismatches(net: PlainNetwork) -> tuple[np.ndarray, np.ndarray]:
    """R and r with 2 E(z; x) = |R (x, z) - r|^2."""
    ends = np.cumsum([0, *net.sizes])
    pieces, shifts = [], []
    for k, w in enumerate(net.weights):
        rows = np.zeros((w.shape[0] + w.shape[1], ends[-1]))
        below, above = slice(ends[k], ends[k + 1]), slice(ends[k + 1], ends[k + 2])
        rows[: w.shape[0], below], rows[: w.shape[0], above] = -w, np.eye(w.shape[0])
        rows[w.shape[0] :, below], rows[w.shape[0] :, above] = -np.eye(w.shape[1]), w.T
        weight = np.sqrt(net.gamma**k * np.repeat([1.0, net.beta[k]], w.shape))
        pieces.append(weight[:, None] * rows)
        shifts.append(weight * np.concatenate([net.b[k], net.c[k]]))
    return np.vstack(pieces), np.concatenate(shifts)


def joint_hessian(weights, beta, gamma) -> np.ndarray:
    """Second derivatives of E in (x, z) together."""
    b, c = ([np.zeros(w.shape[axis]) for w in weights] for axis in (0, 1))
    r = mismatches(PlainNetwork(weights, b, c, beta, gamma, [], []))[0]
    return r.T @ r
