"""Nothing rests on what the processor or its BLAS decide: symmetric Hessians, proofs that trust sums and products alone."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

import lrrn
from lrrn import bounds
from lrrn.linalg import blocks, verified
from lrrn.linalg.blocks import BlockCholesky, BlockTridiagonal
from lrrn.linalg.operators import Dense
from matrices import second_difference
from oracles import pair_bounds, random_input, random_network


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 5), (5, 3), (66, 785), (513, 300), (300, 1031)])
def test_hessians_are_symmetric_to_the_last_bit(shape, dtype):
    rows, columns = shape
    net = random_network((columns, rows, rows // 2 + 1, 3), beta=(0.7, 0.3, 0.1), dtype=dtype, output_constraint="box")
    energy = net.energy_snapshot(dtype)
    for block in (*energy.free_hessian.diag, *energy.clamped_hessian.diag):
        assert torch.equal(block, block.mT)
    w = net.W[0].detach()
    product, size = blocks.gram(w), w.double().abs() @ w.double().abs().mT
    assert torch.equal(product, product.mT)
    exact = w.double() @ w.double().mT
    assert bool(((product.double() - exact).abs() <= (columns + 2) * torch.finfo(dtype).eps * size).all())


def test_a_block_and_its_transpose_have_one_mean():
    block = torch.randn(7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = blocks.symmetrised(block)
    assert torch.equal(mean, mean.mT) and torch.equal(mean, (block + block.mT) / 2)


@pytest.mark.parametrize("sizes", [(7,), (5, 2, 9, 1), (300, 290)], ids=str)
def test_what_a_factor_leaves_is_bounded(sizes, device):
    """The bound is above the residual as computed with 30 digits' worth of care, and not by much."""
    h = second_difference(sizes)
    h = BlockTridiagonal(tuple(b.to(device) for b in h.diag), tuple(b.to(device) for b in h.sub))
    factor = h.cholesky()
    for push in (0.0, 1e-6):
        moved = BlockCholesky(tuple(f + push * torch.tril(torch.ones_like(f)) for f in factor.lower), factor.below, factor.ok)
        n = h.dim
        dense = torch.zeros(n, n, dtype=torch.float64)
        ends = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
        for k, block in enumerate(moved.lower):
            dense[ends[k] : ends[k + 1], ends[k] : ends[k + 1]] = block.cpu()
        for k, block in enumerate(moved.below):
            dense[ends[k + 1] : ends[k + 2], ends[k] : ends[k + 1]] = block.cpu()
        true = float(torch.linalg.matrix_norm(h.dense().cpu() - dense @ dense.mT))
        rounding = 4 * (n + 4) * verified.EPS * (float(dense.square().sum()) + h.frobenius())
        assert true * (1 - 1e-12) - rounding <= moved.defect(h) <= true * (1 + 1e-9) + rounding


def test_a_proof_does_not_trust_the_factorisation(monkeypatch):
    """As with triangular solves by inverted blocks, the factor is off by more than the theorem on Cholesky's allows for."""
    h = second_difference((6, 5))
    assert verified.is_positive_definite(h)
    honest = BlockTridiagonal.cholesky

    def sloppy(self):
        factor = honest(self)
        return BlockCholesky(tuple(f * (1 + 1e-6) for f in factor.lower), factor.below, factor.ok)

    monkeypatch.setattr(BlockTridiagonal, "cholesky", sloppy)
    assert not verified.is_positive_definite(h)
    assert verified.smallest_eigenvalue(h) == 0.0
    # a claim that runs through for a matrix that is not positive definite
    monkeypatch.setattr(
        BlockTridiagonal,
        "cholesky",
        lambda self: BlockCholesky(tuple(torch.eye(len(b), dtype=b.dtype) for b in self.diag), self.sub, torch.tensor(True)),
    )
    assert not verified.is_positive_definite(h.negated())


@pytest.mark.parametrize("scale", [1e-155, 1e-160, 1e-163, 1e-200])
def test_norms_and_constants_are_bounds_where_squares_underflow(scale):
    w = scale * torch.tensor([[0.3, 0.4, -1.0], [1.2, 0.7, 0.1]], dtype=torch.float64)
    with mpmath.workdps(400):
        singular = mpmath.svd_r(mpmath.matrix(w.tolist()), compute_uv=False)
        lowest, highest = bounds.singular_range(Dense(w))
        assert lowest <= min(singular) and highest >= max(singular)
        net = random_network((4, 3, 2))
        with torch.no_grad():
            net.W[1].copy_(w)
        distance = mpmath.sqrt(sum((mpmath.mpf(float(a)) - mpmath.mpf(float(b))) ** 2 for a, b in zip(w[0], w[1], strict=True)))
        features = bounds.spectral([Dense(net.W[0])], (1.0,))
        assert float(pair_bounds(net, "spectral")[0, 1]) >= min(distance * float(features), math.sqrt(2) * max(singular)) * (
            1 - 1e-9
        )


def test_a_product_of_constants_does_not_underflow_to_zero():
    assert bounds.LipschitzBound((1e-200, 1e-200), "paper") > 0
    assert bounds.LipschitzBound((1e-120, 1e-120, 1e-120, 1e100), "paper") >= 1e-260  # although the first three underflow
    assert bounds.LipschitzBound((1e-200, 0.0), "paper") == 0


def test_what_differs_between_machines_is_shown():
    from lrrn.cli.info import gather

    shown = gather(device="cpu")["arithmetic"]
    assert shown["torch kernels"] == torch.backends.cpu.get_cpu_capability() and shown["threads"] >= 1
    assert {"processor", "torch BLAS", "NumPy and SciPy BLAS", "compiled kernels for", "environment"} <= {*shown}


def test_the_matrix_of_settings_covers_what_varies():
    """Every variable of the table is one that ``lrrn info`` shows, so that a failure can be told from the report."""
    from lrrn.cli.info import ARITHMETIC, VARIABLES
    from portable import NUMERICAL, QUICK, QUICK_SETTINGS, SETTINGS

    assert {name for setting in SETTINGS for name in setting.variables} <= {*ARITHMETIC, *VARIABLES}
    variables = {item for setting in SETTINGS for item in setting.variables.items()}
    assert all({*setting.variables.items()} <= variables for setting in QUICK_SETTINGS) and {*QUICK} <= {*NUMERICAL}


def test_radii_do_not_depend_on_the_number_of_threads_by_more_than_rounding():
    net, x = random_network((40, 30, 20, 4), scale=1.5), random_input(12, 40)
    radii = []
    for n in (1, 2, 8):
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        radii.append(lrrn.certify(random_network((40, 30, 20, 4), scale=1.5), x, "spectral").radius)
        torch.set_num_threads(before)
    assert net.infer(x).converged.all()
    for other in radii[1:]:
        torch.testing.assert_close(other, radii[0], rtol=1e-5, atol=1e-9)
