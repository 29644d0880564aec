"""Products by half-precision parts against float64, on a GPU or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lrrn.energy.derivatives import slope_gradients
from lrrn.linalg import split_products
from lrrn.linalg.split_products import halves, rows_times, shifted_gram, splits
from oracles import random_input, random_network


@pytest.fixture
def kernels(device, monkeypatch):
    """Let small matrices be split too; skip unless kernels run."""
    if not splits(torch.zeros(1, device=device)):
        pytest.skip("the kernels need Triton, and a CUDA device or TRITON_INTERPRET=1")
    monkeypatch.setattr(split_products, "LEAST", 1)
    monkeypatch.setattr(split_products, "MANY", 1)
    return device


def close(found, exact, sizes):
    """Whether a sum of products is wrong by no more than float32 sums usually are: some roundings of the size of its terms."""
    return bool(((found.double() - exact).abs() <= 4 * torch.finfo(torch.float32).eps * sizes).all())


@pytest.mark.parametrize("shape", [(1, 1), (33, 70), (70, 33)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_gram_matrix_is_that_of_float32_and_symmetric(kernels, shape, scale):
    w = scale * random_input(*shape, dtype=torch.float32, device=kernels)
    found, exact = shifted_gram(halves(w), 0.5, 0.25), w.double()
    eye = 0.5 * torch.eye(len(w), dtype=torch.float64, device=kernels)
    assert close(found, eye + 0.25 * exact @ exact.mT, eye + 0.25 * exact.abs() @ exact.abs().mT)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_any_size_are_multiplied_as_in_float32(kernels, transposed):
    w = random_input(40, 50, dtype=torch.float32, device=kernels)
    matrix, parts = (w.mT, halves(w).mT) if transposed else (w, halves(w))
    rows = random_input(9, matrix.shape[0], dtype=torch.float32, device=kernels)
    rows *= torch.logspace(-30, 30, 9, device=kernels)[:, None]  # far beyond half precision, above and below
    rows[4] = 0
    constant = random_input(1, matrix.shape[1], dtype=torch.float32, device=kernels)[0]
    exact, sizes = rows.double() @ matrix.double(), rows.double().abs() @ matrix.double().abs()
    assert close(rows_times(rows, parts), exact, sizes)
    added = rows_times(rows, parts, constant, -0.3)
    assert close(added, constant.double() - 0.3 * exact, constant.double().abs() + 0.3 * sizes)


def test_matrices_that_are_small_or_not_float32_are_not_split(device):
    assert halves(torch.ones((511, 600), device=device)) is None
    assert halves(torch.ones((600, 600), dtype=torch.float64, device=device)) is None
    assert (halves(torch.ones((512, 600), device=device)) is None) == (not splits(torch.ones(1, device=device)))


def test_energies_by_parts_are_those_without(kernels):
    x = random_input(4, 30, dtype=torch.float32, device=kernels)
    z, w = (random_input(4, 60, dtype=torch.float32, device=kernels, seed=seed) for seed in (1, 2))
    found = []
    for by_parts in (True, False):
        energy = random_network((30, 60, 4), (1.0, 0.0), dtype=torch.float32, device=kernels).energy_snapshot(torch.float32)
        energy = replace(energy, by_parts=by_parts)
        assert (energy._halves is not None) == by_parts
        qp = energy.free(x)
        found.append([energy.free_hessian.dense(), qp.q, energy.to_inputs(z), *slope_gradients(energy, x, z, w).flat()])
    for parts, whole in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5 * float(1 + whole.abs().max()))
