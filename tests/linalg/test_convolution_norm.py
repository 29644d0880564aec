"""Oracle: singular values of the operator's matrix, column by column from torch's conv2d; closed forms; 60 digits."""

from __future__ import annotations

import math
from fractions import Fraction
from unittest.mock import patch

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv2d

from lrrn.linalg import convolution_norms as module
from lrrn.linalg.convolution_norms import convolution_norm

KINDS = ["random", "oriented", "smooth"]


def kernels(kind, shape, seed=0):
    """Random kernels; waves under a Gaussian window, as training finds them; or positive ones, whose norm is at frequency 0."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "random":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "smooth":
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    angle, pitch, phase = 3 * torch.rand((3, *shape[:2], 1, 1), generator=generator, dtype=torch.float64)
    y, x = (torch.linspace(-1, 1, k, dtype=torch.float64) if k > 1 else torch.zeros(1, dtype=torch.float64) for k in shape[2:])
    wave = torch.cos(2 * pitch * (angle.cos() * y[:, None] + angle.sin() * x) + 2 * phase)
    return wave * torch.exp(-2 * (y[:, None] ** 2 + x**2))


def true_norm(weight, in_shape, stride, padding):
    n = math.prod(in_shape)
    columns = conv2d(torch.eye(n, dtype=torch.float64).reshape(n, *in_shape), weight.double(), stride=stride, padding=padding)
    return float(np.linalg.norm(columns.reshape(n, -1).numpy(), 2))


def power_iteration(weight, in_shape, stride, padding, steps=200):
    """A lower estimate of the norm, by the operator and its transposed derivative."""
    x = torch.randn(1, *in_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(steps):
        x = (x / x.norm()).requires_grad_()
        y = conv2d(x, weight, stride=stride, padding=padding)
        (x,) = torch.autograd.grad(y, x, y.detach())
    return float(y.detach().norm())


def by_frequency(*arguments, crowded=module.CROWDED_LIMIT):
    with patch.multiple(module, EXACT_LIMIT=-1, CROWDED_LIMIT=crowded):
        return convolution_norm(*arguments)


SHAPES = {
    "odd sizes": ((3, 2, 3, 3), (2, 9, 7), 1, 1),
    "a stride that does not divide": ((2, 3, 4, 4), (3, 11, 13), 3, 0),
    "more padding than the kernel is wide": ((4, 2, 3, 3), (2, 8, 9), 2, 5),
    "one channel": ((1, 1, 5, 5), (1, 16, 15), 1, 2),
    "pointwise": ((5, 3, 1, 1), (3, 6, 5), 1, 0),
    "the kernel is the image": ((5, 2, 6, 6), (2, 6, 6), 1, 0),
    "the kernel exceeds the image": ((3, 2, 9, 9), (2, 5, 6), 1, 3),
    "a stride that exceeds the kernel": ((3, 2, 2, 2), (2, 17, 11), 4, 1),
    "more units than inputs": ((24, 1, 4, 4), (1, 14, 14), 2, 0),
    "fewer units than inputs": ((2, 12, 4, 4), (12, 12, 10), 2, 1),
    "many rows": ((2, 2, 3, 3), (2, 30, 5), 1, 1),
    "a kernel that is not square": ((3, 2, 2, 5), (2, 10, 12), 2, 1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "in_shape", "stride", "padding"), SHAPES.values(), ids=SHAPES)
def test_both_bounds_are_above_the_norm_and_close(kind, shape, in_shape, stride, padding):
    arguments = kernels(kind, shape), in_shape, stride, padding
    true = true_norm(*arguments)
    assert true < convolution_norm(*arguments) <= 1.05 * true
    assert true < by_frequency(*arguments) <= 1.15 * true


@given(
    channels=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    kernel=st.integers(1, 6),
    stride=st.integers(1, 5),
    padding=st.integers(0, 5),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=200)
def test_bounds_hold_for_any_shape(channels, size, kernel, stride, padding, kind, seed):
    assume(min(size) + 2 * padding >= kernel)
    arguments = kernels(kind, (*channels, kernel, kernel), seed), (channels[1], *size), stride, padding
    true = true_norm(*arguments)
    if true == 0:
        assert convolution_norm(*arguments) == 0
        return
    assert true < convolution_norm(*arguments) <= 1.05 * true
    for crowded in (0, module.CROWDED_LIMIT):
        assert true < by_frequency(*arguments, crowded=crowded)
    assert true < convolution_norm(*arguments, nearly_orthogonal=True)


def orthogonal_kernels(channels, seed):
    """2 x 2 kernels of an isometry, [P, I - P] along one axis after [Q, I - Q] along the other, with projections P and Q."""
    generator = torch.Generator().manual_seed(seed)
    halves = torch.linalg.qr(torch.randn(2, channels, channels, generator=generator, dtype=torch.float64)).Q[
        ..., : channels // 2
    ]
    first, second = halves @ halves.mT
    eye = torch.eye(channels, dtype=torch.float64)
    taps = [[(a @ b) for b in (second, eye - second)] for a in (first, eye - first)]
    return torch.stack([torch.stack(row, -1) for row in taps], -2)


@pytest.mark.parametrize(("in_shape", "padding"), [((6, 9, 7), 1), ((6, 3, 4), 1), ((6, 8, 8), 0)])
def test_kernels_of_isometries_are_bounded_tightly(in_shape, padding):
    weight = orthogonal_kernels(6, seed=3)
    true = true_norm(weight, in_shape, 1, padding)
    # an isometry with this padding, and a part of one without
    assert true == pytest.approx(1.0, abs=1e-9)
    assert true < convolution_norm(weight, in_shape, 1, padding, nearly_orthogonal=True) <= 1 + 1e-4
    # with a stride: kernels of norm one on every second place, all of whose rows are orthogonal
    kernel = torch.linalg.qr(torch.randn(24, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q.mT
    kernel = kernel.reshape(5, 6, 2, 2)
    true = true_norm(kernel, in_shape, 2, padding)
    assert true < convolution_norm(kernel, in_shape, 2, padding, nearly_orthogonal=True) <= 1 + 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "in_shape", "stride", "padding"),
    [
        ((88, 20, 4, 4), (20, 16, 16), 2, 0),
        ((24, 3, 5, 5), (3, 41, 39), 1, 2),
        ((64, 3, 7, 7), (3, 64, 64), 2, 3),
        ((8, 1, 9, 9), (1, 70, 66), 1, 12),
        ((9, 16, 1, 1), (16, 23, 21), 1, 0),
        ((20, 24, 2, 2), (24, 50, 47), 3, 1),
        ((70, 65, 5, 5), (65, 8, 8), 1, 2),
        ((300, 80, 5, 5), (80, 8, 8), 1, 0),
    ],
    ids=str,
)
def test_more_than_4096_inputs_and_units(kind, shape, in_shape, stride, padding):
    arguments = kernels(kind, shape), in_shape, stride, padding
    lower = power_iteration(*arguments, steps=60)
    assert lower < convolution_norm(*arguments) <= 1.15 * lower


def test_taps_that_only_read_padding_do_not_count():
    weight, shape = kernels("random", (3, 2, 9, 9)), ((2, 5, 5), 1, 3)
    loud = weight.clone()
    loud[..., 0, :] = loud[..., -1] = 1e6
    assert true_norm(weight, *shape) < 1e3
    assert true_norm(loud, *shape) < convolution_norm(loud, *shape) < 1e3
    assert true_norm(loud, *shape) < by_frequency(loud, *shape, crowded=0) < 1e3


@pytest.mark.parametrize("n", [2, 5, 100])
def test_closed_form(n):
    """Sums of two neighbours of n have the singular values 2 cos(pi j / 2 n); of four on a grid, the products."""
    arguments = torch.ones(1, 1, 2, 2), (1, n, n), 1, 0
    true = 4 * math.cos(math.pi / (2 * n)) ** 2
    assert true < convolution_norm(*arguments) <= 1.001 * true
    # a twist by half a step puts the frequency 0, where the kernel is largest, between two frequencies
    assert true < by_frequency(*arguments, crowded=0) <= 1.001 * true


def test_frequencies_of_every_sign_are_covered():
    """A kernel of alternating signs along one axis, or both, is largest at the highest frequencies."""
    stripes = torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)
    for kernel in (stripes.mT @ stripes, stripes.mT @ stripes.abs(), stripes.abs().mT @ stripes):
        arguments = kernel[None, None], (1, 9, 8), 1, 1
        assert true_norm(*arguments) < by_frequency(*arguments, crowded=0)


@pytest.mark.parametrize("route", [convolution_norm, by_frequency])
@pytest.mark.parametrize("exponent", [-1070, -1000, -500, 500, 1015])
def test_weights_of_any_size(route, exponent):
    weight = kernels("random", (3, 2, 3, 3))
    tiny = torch.from_numpy(np.ldexp(weight.numpy(), exponent))
    # what the scaled weights are as stored, and their norm without overflow
    stored = torch.from_numpy(np.ldexp(tiny.numpy(), -exponent))
    with mpmath.workdps(60):
        true = mpmath.mpf(true_norm(stored, (2, 6, 6), 1, 1)) * mpmath.mpf(2) ** exponent
        bound = mpmath.mpf(route(tiny, (2, 6, 6), 1, 1))
        assert true * (1 - mpmath.mpf(1e-12)) < bound <= 1.15 * true + mpmath.mpf(2) ** -1070


@pytest.mark.parametrize("route", [convolution_norm, by_frequency])
def test_weights_of_sizes_far_apart(route):
    weight = torch.tensor([1e-300, 3e200], dtype=torch.float64)[:, None, None, None] * torch.ones(2, 1, 1, 1)
    assert 3e200 < route(weight, (1, 3, 3), 1, 0) <= 3.01e200
    assert route(torch.full((2, 2, 2, 2), 1.5e308, dtype=torch.float64), (2, 4, 4), 1, 0) == math.inf


def test_values_that_are_not_numbers_and_zeros():
    weight = kernels("random", (3, 2, 3, 3))
    assert convolution_norm(torch.zeros(3, 2, 3, 3), (2, 5, 5), 1, 1) == 0.0
    assert convolution_norm(weight, (2, 1, 1), 1, 0) == 0.0
    for value in (math.nan, math.inf):
        weight[1, 0, 2, 2] = value
        assert convolution_norm(weight, (2, 5, 5), 1, 1) == math.inf
        # torch multiplies the padding by it
        assert convolution_norm(weight, (2, 1, 1), 1, 1) == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_float_types_are_taken_at_their_exact_values(dtype, device):
    weight = kernels("random", (3, 2, 3, 3)).to(device, dtype).requires_grad_()
    assert convolution_norm(weight, (2, 6, 6), 1, 1) == convolution_norm(weight.double(), (2, 6, 6), 1, 1)


@pytest.mark.parametrize("n", [1, 2, 3, 34, 130])
def test_roots_of_unity_are_correctly_rounded(n):
    with mpmath.workdps(60):
        for j, root in enumerate(module._roots(n).tolist()):
            exact = mpmath.expjpi(mpmath.mpf(2 * j) / n)
            assert abs(mpmath.mpf(root.real) - exact.real) <= mpmath.mpf(2) ** -54
            assert abs(mpmath.mpf(root.imag) - exact.imag) <= mpmath.mpf(2) ** -54


@pytest.mark.parametrize("of_units", [False, True])
def test_rounding_of_the_gram_matrix_is_within_its_bound(of_units):
    weight, n = kernels("random", (2, 1, 3, 3)), 30
    rows, columns = (module._reads(size, 3, 1, 1) for size in (6, 5))
    h, error = module._squared(weight, rows, columns, of_units)
    # in the module's order, rows first
    matrix = conv2d(torch.eye(n, dtype=torch.float64).reshape(n, 1, 6, 5), weight, padding=1).permute(0, 2, 1, 3).reshape(n, -1)
    exact = np.array([[Fraction(value) for value in row] for row in matrix.tolist()])
    exact = exact.T @ exact if of_units else exact @ exact.T
    worst = sum((Fraction(value) - exact[i, j]) ** 2 for i, row in enumerate(h.dense().tolist()) for j, value in enumerate(row))
    assert 0 < math.sqrt(worst) <= error <= 1e-11


def test_rounding_of_the_transform_is_within_its_bound():
    blocks = kernels("random", (5, 3, 4, 1)).flatten(2)
    taps, sizes, twist = torch.tensor([[0, 0], [0, 1], [1, 0], [2, 3], [7, 6]]), (8, 7), (1, 0)
    phases = module._phases(sizes, twist, taps, (module._roots(16), module._roots(14)))
    numbers = [(2 * j + 1, 2 * k) for j in range(8) for k in range(7) if 2 * j + 1 <= 8]
    assert len(numbers) == len(phases)
    worst = mpmath.mpf(0)
    with mpmath.workdps(60):
        for i, (j, k) in enumerate(numbers):
            left = mpmath.matrix((torch.tensordot(phases[i].real.contiguous(), blocks, 1)).tolist())
            left += mpmath.mpc(0, 1) * mpmath.matrix((torch.tensordot(phases[i].imag.contiguous(), blocks, 1)).tolist())
            for (y, x), block in zip(taps.tolist(), blocks.tolist(), strict=True):
                left -= mpmath.expjpi(mpmath.mpf(j * y) / 8 + mpmath.mpf(k * x) / 7) * mpmath.matrix(block)
            worst = max(worst, mpmath.mnorm(left, "f"))
    assert 0 < worst <= module._transform_error(blocks) <= 1e-13


def test_rounding_of_the_squares_is_within_its_bound():
    blocks = kernels("random", (4, 3, 5, 1)).flatten(2)
    phases = module._phases(
        (4, 5), (1, 0), torch.tensor([[0, 0], [0, 1], [1, 0], [2, 3]]), (module._roots(8), module._roots(10))
    )
    squares, error = module._hermitian_squares(phases, blocks)
    assert torch.equal(squares, squares.mT)
    real, imaginary = (torch.tensordot(part.contiguous(), blocks, 1) for part in (phases.real, phases.imag))
    worst = mpmath.mpf(0)
    with mpmath.workdps(60):
        for i in range(len(phases)):
            matrix = mpmath.matrix(real[i].tolist()) + mpmath.mpc(0, 1) * mpmath.matrix(imaginary[i].tolist())
            exact = matrix * matrix.H
            stored = mpmath.matrix((squares[i, :3, :3] + 1j * squares[i, 3:, :3]).tolist())
            worst = max(worst, mpmath.mnorm(exact - stored, "f"))
    assert 0 < worst <= error <= 1e-12


def test_a_wrong_estimate_is_not_believed():
    arguments = kernels("oriented", (3, 2, 3, 3)), (2, 9, 8), 1, 1
    true = true_norm(*arguments)
    with patch.object(module, "_estimates", lambda phases, blocks: torch.full((len(phases),), 0.1, dtype=torch.float64)):
        assert true < by_frequency(*arguments, crowded=0)
        assert true < convolution_norm(*arguments, nearly_orthogonal=True)


def test_a_wrong_factor_is_not_believed():
    """Its residual is part of the bound."""
    arguments = kernels("oriented", (3, 2, 3, 3)), (2, 9, 8), 1, 1
    true = true_norm(*arguments)

    def careless(h):
        return torch.eye(h.shape[-1], dtype=h.dtype).expand(h.shape), torch.zeros(len(h), dtype=torch.int32)

    with (
        patch.object(module, "_estimates", lambda phases, blocks: torch.full((len(phases),), 0.1, dtype=torch.float64)),
        patch.object(torch.linalg, "cholesky_ex", careless),
    ):
        assert true < by_frequency(*arguments, crowded=0)


def test_residual_of_a_large_factor_is_computed_panel_by_panel():
    n = module.PANEL + 30
    h = torch.eye(n, dtype=torch.float64)[None].clone()
    h[:, -20:, -20:] *= -1
    assert module._excess(h, 1.001) < 1e-9
    with patch.object(torch.linalg, "cholesky_ex", lambda h: (torch.zeros_like(h), torch.zeros(1, dtype=torch.int32))):
        # the residual is all of shift I - h, most of it in the last panel
        assert module._excess(h, 1.001) >= float(torch.linalg.matrix_norm(1.001 * torch.eye(n) - h))
    assert module._excess(h, 0.999) == math.inf
