"""The paper's claims (Høier and Zach, 2020) on linear layers and PCA. Oracles: NumPy and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize

from claims import energies, network, orthogonal, with_singular_values
from lrrn import LRRN
from lrrn.learning import Batch, FreeEnergy


def minimise_free_energy(net: LRRN, x: torch.Tensor) -> float:
    """Train by SciPy's BFGS on the free energy; return the mean energy reached."""

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.no_grad():
            net.W[0].copy_(torch.as_tensor(flat).reshape(net.W[0].shape))
        loss = FreeEnergy()(net, Batch(x)).mean()
        return loss.item(), torch.autograd.grad(loss, net.W[0])[0].numpy().ravel()

    result = optimize.minimize(objective, net.W[0].detach().numpy().ravel(), jac=True, method="BFGS", options=dict(gtol=1e-9))
    return objective(result.x)[0]


@pytest.mark.parametrize("beta", [1.0, 0.3, 4.0])
def test_one_linear_layer_is_an_eigen_decomposition_of_the_scatter_matrix(beta):
    """Section 4.1, G_1 = 0: the least mean energy is beta / 2 times the trailing eigenvalues, on the leading eigenspace.

    2 E(x) = beta |x|^2 - sum_i (beta - left_over(s_i)) (v_i x)^2, and the brackets are at most beta, so no W does better
    (Ky Fan). Only the subspace is found: rotating the units changes no energy.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 6)) @ with_singular_values([3.0, 2.5, 2.0, 1.0, 0.7, 0.4], 6)
    values, vectors = np.linalg.eigh(x.T @ x / len(x))
    least, leading = beta / 2 * values[:3].sum(), vectors[:, 3:] @ vectors[:, 3:].T
    net = network([0.3 * rng.normal(size=(3, 6))], (beta,))
    assert minimise_free_energy(net, torch.as_tensor(x)) == pytest.approx(least, rel=1e-9)
    w = net.W[0].detach().numpy()
    np.testing.assert_allclose(w @ w.T, np.eye(3), atol=1e-4)
    np.testing.assert_allclose(w.T @ w, leading, atol=1e-4)
    turned = network([orthogonal(3, 3) @ w], (beta,))
    np.testing.assert_allclose(energies(turned, x), energies(net, x), rtol=1e-9, atol=1e-12)
    for scale in (0.1, 0.5, 2.0):
        assert energies(network([scale * rng.normal(size=(3, 6))], (beta,)), x).mean() > least * (1 + 1e-6)


def test_data_in_a_subspace_of_the_layers_dimension_gives_orthonormal_weights_and_zero_energy():
    """Section 4.1: W_0 W_0^T = I, and E = 0 at *every* point of the subspace; outside, beta / 2 times the squared distance."""
    rng = np.random.default_rng(1)
    basis = orthogonal(3, 8)
    net = network([0.3 * rng.normal(size=(3, 8))], (1.0,))
    assert minimise_free_energy(net, torch.as_tensor(rng.normal(size=(40, 3)) @ basis)) < 1e-12
    w = net.W[0].detach().numpy()
    np.testing.assert_allclose(w @ w.T, np.eye(3), atol=1e-5)
    unseen = 10 * rng.normal(size=(100, 3)) @ basis
    assert energies(net, unseen).max() < 1e-7
    away = rng.normal(size=(100, 8))
    away -= away @ basis.T @ basis
    np.testing.assert_allclose(energies(net, unseen + away), (away**2).sum(1) / 2, rtol=1e-3)


def test_orthonormal_weights_need_a_layer_no_wider_than_the_subspace():
    """The same claim without dim(z_1) = r: a spare unit that looks away from the data may be of any size."""
    basis = orthogonal(4, 8)
    w = basis * np.array([[1.0], [1.0], [1.0], [5.0]])
    points = np.random.default_rng(2).normal(size=(20, 3)) @ basis[:3]
    assert energies(network([w], (1.0,)), points).max() < 1e-24
    # and with dim(z_1) < r no weights reach zero: the least mean energy is half the eigenvalue that is left out
    net = network([0.3 * w[:2]], (1.0,))
    assert minimise_free_energy(net, torch.as_tensor(points)) == pytest.approx(
        np.linalg.eigvalsh(points.T @ points / len(points))[-3] / 2, rel=1e-6
    )
