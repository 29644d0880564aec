"""The exact distance to a change of label in a tiny network, by quadratic programmes over all sets of active units."""

from __future__ import annotations

import itertools

import numpy as np

from oracles import PlainNetwork, quadratic_of


def programme(net: PlainNetwork) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """H, B and q(0) of the hidden units of a network with a linear read-out, from the energy term by term."""
    inner = PlainNetwork(net.weights[:-1], net.b[:-1], net.c[:-1], net.beta[:-1], net.gamma, net.lo[:-1], net.hi[:-1])
    ends = np.cumsum(inner.sizes[1:])[:-1]

    def linear(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        h, q, _ = quadratic_of(lambda z: inner.energy(x, np.split(z, ends)), sum(inner.sizes[1:]))
        return h, q

    n = inner.sizes[0]
    h, q = linear(np.zeros(n))
    return h, np.stack([linear(unit)[1] - q for unit in np.eye(n)], 1), q


def distance(net: PlainNetwork, x: np.ndarray, label: int) -> float:
    """The least norm of a perturbation after which another output is not below the label; hidden units are at least 0."""
    import quadprog

    h, by_input, q = programme(net)
    q = q + by_input @ x
    n, last = len(h), net.weights[-1]
    nearest = np.inf
    for active in itertools.product((False, True), repeat=n):
        on = np.array(active)
        # activations, and slacks of the other units, are affine in the perturbation: start + slope u
        start, slope = np.zeros(n), np.zeros_like(by_input)
        if on.any():
            start[on] = np.linalg.solve(h[np.ix_(on, on)], q[on])
            slope[on] = np.linalg.solve(h[np.ix_(on, on)], by_input[on])
        least = np.where(on, start, h @ start - q)
        rate = np.where(on[:, None], slope, h @ slope - by_input)
        hidden, moved = start[-last.shape[1] :], slope[-last.shape[1] :]
        for j in set(range(len(last))) - {label}:
            row = last[label] - last[j]
            lead = row @ hidden + net.b[-1][label] - net.b[-1][j]
            normals, offsets = np.vstack([rate, -row @ moved]), np.append(-least, lead)
            try:
                found = quadprog.solve_qp(np.eye(len(x)), np.zeros(len(x)), normals.T, offsets)[0]
            except ValueError:  # no perturbation leads there
                continue
            nearest = min(nearest, float(np.linalg.norm(found)))
    return nearest
