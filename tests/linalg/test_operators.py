"""Linear operators against their matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from convolutions import GEOMETRIES, layer_shape, matrix_of
from lrrn.linalg import operators
from lrrn.linalg.layer_shape import LayerShape
from lrrn.linalg.operator_hessian import hessian_of
from lrrn.linalg.operators import Conv2d, Dense, Pooled
from tolerances import UNIT, rounding

POOLED_DENSE = LayerShape((2, 5, 4), (3,), (3, 8), pool=2)
LAYERS = [*(layer_shape(*geometry) for geometry in GEOMETRIES), POOLED_DENSE, LayerShape((6,), (4,), (4, 6))]


def weight_of(layer, dtype=torch.float64, seed=0):
    return torch.randn(layer.weight_shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rows(n, width, seed, dtype=torch.float64):
    return torch.randn((n, width), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(params=[False, True], ids=["convolutions", "patches"])
def patches(request, monkeypatch):
    """Compute convolutions on the CPU as on a GPU too."""
    if request.param:
        monkeypatch.setattr(operators, "by_patches", lambda x: True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_products_are_those_of_the_matrix(layer, dtype, device, patches):
    weight = weight_of(layer, dtype)
    operator = layer.operator(weight.to(device))
    matrix = matrix_of(layer, weight.double())
    x, y = rows(4, layer.columns, 1, dtype), rows(4, layer.rows, 2, dtype)
    assert operator.shape == tuple(matrix.shape) == (layer.rows, layer.columns)
    for mine, theirs, size in (
        (operator.apply(x.to(device)), x.double() @ matrix.mT, x.double().abs() @ matrix.abs().mT),
        (operator.adjoint(y.to(device)), y.double() @ matrix, y.double().abs() @ matrix.abs()),
    ):
        assert ((mine.cpu().double() - theirs).abs() <= rounding(1.0, operator.terms + 4, dtype) * size + 1e-300).all()
    above = rows(4, layer.rows, 3, dtype)
    for constant, given in ((above, x), (above[0], x), (above[0], x[0])):
        theirs = constant.double() + 0.5 * (given.double() @ matrix.mT)
        size = constant.double().abs() + given.double().abs() @ matrix.abs().mT
        mine = operator.added(constant.to(device), given.to(device), 0.5).cpu().double()
        assert mine.shape == theirs.shape
        assert ((mine - theirs).abs() <= rounding(1.0, operator.terms + 6, dtype) * size).all()
    single = operator.adjoint_added(x[0].to(device), y[0].to(device), -2.0)
    assert torch.allclose(single, x[0].to(device) - 2 * operator.adjoint(y[:1].to(device))[0], atol=1e-4)
    nothing = operator.adjoint(operator.apply(x[:0].to(device)))
    assert nothing.shape == (0, layer.columns)
    assert torch.allclose(operator.dense().cpu().double(), matrix.to(dtype).double(), rtol=UNIT[dtype], atol=0)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_derivative_in_the_weight(layer, patches):
    weight = weight_of(layer).requires_grad_()
    x, y = rows(3, layer.columns, 1), rows(3, layer.rows, 2)
    (by_autograd,) = torch.autograd.grad((matrix_of(layer, weight) @ x.mT * y.mT).sum(), weight)
    operator = layer.operator(weight)
    assert torch.allclose(operator.outer(y, x), by_autograd)
    (of_matrix,) = torch.autograd.grad((operator.dense() @ x.mT * y.mT).sum(), weight)
    assert torch.allclose(of_matrix, by_autograd)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_norms_sizes_and_sums_of_squares(layer):
    weight = weight_of(layer)
    operator, matrix = layer.operator(weight), matrix_of(layer, weight)
    by_row, by_column = operator.squares()
    assert torch.allclose(by_row, matrix.square().sum(1)) and torch.allclose(by_column, matrix.square().sum(0))
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert exact <= operator.norm() <= 1.05 * exact
    assert float(torch.linalg.matrix_norm(matrix.abs(), 2)) <= operator.size
    if layer.pool == 1:
        assert int((matrix != 0).sum(1).max()) <= operator.terms and int((matrix != 0).sum(0).max()) <= operator.terms


def test_pooling_has_norm_one():
    pooled = Pooled(Dense(torch.eye(8, dtype=torch.float64)), (2, 5, 4), 2)
    assert torch.allclose(pooled.dense() @ pooled.dense().mT, torch.eye(8, dtype=torch.float64))


def test_a_convolution_is_the_one_of_torch():
    layer = torch.nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False, dtype=torch.float64)
    x = torch.rand(2, 3, 7, 8, dtype=torch.float64)
    operator = Conv2d(layer.weight.detach(), (3, 7, 8), 2, 1)
    assert torch.equal(operator.apply(x.flatten(1)).view(2, *operator.out_shape), layer(x).detach())


def stack(norm=1.0):
    """Two convolutions and a dense layer, one after the other, and their matrices."""
    layers = [layer_shape((1, 6, 6), 3, 3, 1, 0, 1), layer_shape((3, 4, 4), 2, 2, 1, 0, 2), LayerShape((2,), (3,), (3, 2))]
    weights = [norm * weight_of(layer, seed=k) for k, layer in enumerate(layers)]
    return [layer.operator(w) for layer, w in zip(layers, weights, strict=True)], [
        matrix_of(layer, w).numpy() for layer, w in zip(layers, weights, strict=True)
    ]


def assembled(matrices, discounts, beta, m, closed):
    """H from v^T H v, term by term, in NumPy: a Jacobian of all differences, weighted."""
    sizes = [matrix.shape[0] for matrix in matrices[:m]]
    edges = np.cumsum([0, *sizes])
    h = np.zeros((edges[-1], edges[-1]))
    for k in range(m + closed):
        up, down = np.zeros((matrices[k].shape[0], edges[-1])), np.zeros((matrices[k].shape[1], edges[-1]))
        if k < m:
            up[:, edges[k] : edges[k + 1]] = np.eye(sizes[k])
            down[:, edges[k] : edges[k + 1]] = matrices[k].T
        if k > 0:
            up[:, edges[k - 1] : edges[k]] -= matrices[k]
            down[:, edges[k - 1] : edges[k]] -= np.eye(sizes[k - 1])
        h += discounts[k] * (up.T @ up + beta[k] * down.T @ down)
    return h


@pytest.mark.parametrize("beta", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.0), (0.5, 0.0, 0.3), (2.0, 3.0, 0.0)])
@pytest.mark.parametrize(("m", "closed"), [(1, False), (1, True), (2, False), (2, True), (3, False)])
@pytest.mark.parametrize("norm", [0.2, 1.0, 5.0])
def test_a_hessian_by_products(m, closed, beta, norm):
    operators, matrices = stack(norm)
    discounts = (1.0, 0.5, 0.25)
    h = hessian_of(operators, discounts, beta, m, closed)
    exact = assembled(matrices, discounts, beta, m, closed)
    v = rows(5, h.dim, 4)
    error = np.linalg.norm(h.matmul(v).numpy() - v.numpy() @ exact, axis=1)
    assert (error <= h.rounding * np.linalg.norm(v.numpy(), axis=1)).all()
    assert h.rounding < 1e-9 * max(1.0, np.linalg.norm(exact, 2))
    assert np.allclose(h.diagonal.numpy(), exact.diagonal())
    assert np.linalg.norm(np.abs(exact), 2) <= h.size
    eigenvalues = np.linalg.eigvalsh(exact)
    assert 0 < h.smallest_eigenvalue() <= eigenvalues[0] * (1 + 1e-12)
    assert 0.8 * eigenvalues[-1] <= float(h.estimate_largest()) <= eigenvalues[-1] * (1 + 1e-9)
    assert h.estimate_condition() >= 0.8 * eigenvalues[-1] / eigenvalues[0]


def test_the_smallest_eigenvalue_of_one_layer_is_its_discount():
    operators, _ = stack()
    assert hessian_of(operators, (1.0, 0.5, 0.25), (1.0, 1.0, 0.0), 1, False).smallest_eigenvalue() == pytest.approx(1.0)


def test_the_bound_on_the_smallest_eigenvalue_is_nearly_tight_where_layers_are_isometries():
    unit = np.eye(3)
    operators = [Dense(torch.eye(3, dtype=torch.float64))] * 3
    discounts, beta = (1.0, 1e3, 1e3), (1e-3, 1.0, 1.0)
    exact = np.linalg.eigvalsh(assembled([unit] * 3, discounts, beta, 3, False))[0]
    # the three layers move together, and only the first is held: 1 / 3 of its discount
    assert 0.98 * exact <= hessian_of(operators, discounts, beta, 3, False).smallest_eigenvalue() <= exact


def test_large_tables_of_places_are_not_kept(monkeypatch):
    layer = layer_shape((2, 9, 7), 3, 4, 3, 1, 1)
    operators._kept_places.cache_clear()
    monkeypatch.setattr(operators, "KEPT_ENTRIES", layer.rows * layer.columns - 1)
    layer.operator(weight_of(layer)).dense()
    assert operators._kept_places.cache_info().currsize == 0


@pytest.fixture
def half_convolutions():
    """Let torch convolve float32 images on the CPU in bfloat16."""
    if not hasattr(torch.backends.mkldnn, "conv"):
        pytest.skip("this torch always convolves in full precision")
    before, torch.backends.mkldnn.conv.fp32_precision = torch.backends.mkldnn.conv.fp32_precision, "bf16"
    yield
    torch.backends.mkldnn.conv.fp32_precision = before


def test_convolutions_are_products_in_full_precision_where_torch_may_convolve_with_less(half_convolutions, monkeypatch):
    layer = layer_shape((8, 6, 5), 2, 3, 2, 1, 1)
    operator = layer.operator(weight_of(layer, torch.float32))
    refuse = lambda *_, **__: pytest.fail("this may round to bfloat16")  # noqa: E731
    monkeypatch.setattr(operators.functional, "conv2d", refuse)
    monkeypatch.setattr(operators.functional, "conv_transpose2d", refuse)
    monkeypatch.setattr(operators, "conv2d_weight", refuse)
    y = operator.apply(rows(3, layer.columns, 1, torch.float32))
    operator.outer(y, operator.adjoint(y))
