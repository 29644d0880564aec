"""Networks with convolutions against dense networks that are the same map."""

from __future__ import annotations

import copy

import pytest
import torch

import lrrn
from convolutions import ARCHITECTURES, dense_twin, images, network
from lrrn.network.layers import Conv

NAMES = list(ARCHITECTURES)
CERTIFIED = ["one", "pooled", "two", "then dense", "bounded"]


@pytest.fixture(params=[False, True], ids=["products", "matrices"])
def unfolded(request):
    return request.param


@pytest.mark.parametrize("name", NAMES)
def test_activations_energies_and_error_bounds(name, monkeypatch, unfolded):
    net = network(name, monkeypatch, unfolded)
    twin, x = dense_twin(net), images(net, 7)
    mine, theirs = net.infer(x, tol=1e-9), twin.infer(x.flatten(1), tol=1e-12)
    assert mine.converged.all() and mine.solvers == (("coordinate_descent",) if unfolded else ("accelerated",))
    gap = torch.cat(mine.activations, 1) - torch.cat(theirs.activations, 1)
    unknown = sum(net.energy_snapshot(torch.float64).free_sizes)
    assert (gap[:, :unknown].norm(dim=1) <= mine.error_bound + theirs.error_bound).all()
    assert mine.error_bound.max() < 1e-6
    assert torch.allclose(mine.energy, theirs.energy)
    loose = net.infer(x, tol=1e-2)
    far = torch.cat(loose.activations, 1)[:, :unknown] - torch.cat(theirs.activations, 1)[:, :unknown]
    assert (far.norm(dim=1) <= loose.error_bound + theirs.error_bound).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_clamped_phase(name, monkeypatch, unfolded):
    net = network(name, monkeypatch, unfolded)
    twin, x = dense_twin(net), images(net, 5)
    y = torch.rand((5, net.sizes[-1]), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mine, theirs = net.infer(x, y, tol=1e-10), twin.infer(x.flatten(1), y, tol=1e-12)
    assert mine.converged.all() and torch.allclose(mine.energy, theirs.energy)
    gap = torch.cat(mine.activations, 1) - torch.cat(theirs.activations, 1)
    assert (gap.norm(dim=1) <= mine.error_bound + theirs.error_bound).all()


def shared_gradients(net, twin):
    """Add up the derivatives of a twin over the places where the network's weights stand."""
    found = []
    for k, layer in enumerate(net.layers):
        weight = net.W[k].detach().requires_grad_()
        found.append(torch.autograd.grad((layer.operator(weight).dense() * twin.W[k].grad).sum(), weight)[0])
    for mine, theirs in ((net.b, twin.b), (net.c, twin.c)):
        found += [t.grad.view(len(m), -1).sum(1) for m, t in zip(mine, theirs, strict=True) if m is not None]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_implicit_gradients(name, monkeypatch, unfolded):
    net = network(name, monkeypatch, unfolded)
    twin, x = dense_twin(net), images(net, 6)
    derivatives = []
    for each in (net, twin):
        inputs = (x if each is net else x.flatten(1)).clone().requires_grad_()
        each(inputs).sin().sum().backward()
        for p in each.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        derivatives.append(inputs.grad.flatten(1))
    assert torch.allclose(*derivatives, atol=1e-8)
    for mine, theirs in zip(net.parameters(), shared_gradients(net, twin), strict=True):
        assert torch.allclose(mine.grad, theirs, atol=1e-7)


@pytest.mark.parametrize("name", ["two", "then dense"])
def test_energies_are_differentiable(name, monkeypatch, unfolded):
    net = network(name, monkeypatch, unfolded)
    twin, x = dense_twin(net), images(net, 4)
    for each in (net, twin):
        each.energy(x.flatten(1)).sum().backward()
        for p in each.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    for mine, theirs in zip(net.parameters(), shared_gradients(net, twin), strict=True):
        assert torch.allclose(mine.grad, theirs, atol=1e-5)


@pytest.mark.parametrize("name", CERTIFIED)
@pytest.mark.parametrize("method", ["paper", "pairwise", "spectral", "multiplier", "auto"])
def test_certificates(name, method, monkeypatch, unfolded):
    net = network(name, monkeypatch, unfolded)
    twin, x = dense_twin(net), images(net, 12).flatten(1)
    seconds = 0.1 if method == "multiplier" else None
    mine, theirs = (lrrn.certify(each, x, method, seconds=seconds) for each in (net, twin))
    assert torch.equal(mine.prediction, theirs.prediction) and mine.method == (method if method != "auto" else "shared")
    # proven norms of a convolution are within 5 %, and errors of solves make a difference far below
    assert (mine.radius >= 0.9 * theirs.radius - 1e-4).all()
    assert (mine.radius <= 1.01 * theirs.radius + 1e-4).all()
    assert bool((mine.radius > 0).any())


@pytest.mark.parametrize("method", ["paper", "spectral", "multiplier", "auto"])
def test_lipschitz_constants(method, monkeypatch, unfolded):
    net = network("two", monkeypatch, unfolded)
    mine, theirs = (float(each.lipschitz(method, seconds=0.2)) for each in (net, dense_twin(net)))
    assert theirs * (1 - 1e-6) <= mine <= 1.1 * theirs


def test_attacks_agree_with_the_dense_twin(monkeypatch, unfolded):
    from lrrn.attacks import minimal_perturbation

    net = network("one", monkeypatch, unfolded)
    x = images(net, 6).flatten(1)
    certificate = lrrn.certify(net, x)
    found = minimal_perturbation(net, x, certificate.prediction)
    assert found.success.all() and (found.distance > certificate.radius).all()
    theirs = minimal_perturbation(dense_twin(net), x, certificate.prediction)
    assert torch.allclose(found.distance, theirs.distance, rtol=0.2)


def test_energy_intervals_and_reconstructions(monkeypatch, unfolded):
    from lrrn.certificates import energy_interval

    net = network("energy", monkeypatch, unfolded)
    twin, x = dense_twin(net), images(net, 5).flatten(1)
    lower, upper = energy_interval(net, x, 0.1)
    moved = net.infer(x + 0.1 * torch.nn.functional.normalize(torch.ones_like(x), dim=1)).energy
    assert ((lower <= moved) & (moved <= upper)).all()
    z = net.infer(x).activations[-1]
    energies = [each.energy_snapshot(torch.float64) for each in (net, twin)]
    assert torch.allclose(energies[0].reconstruct(z, 2), energies[1].reconstruct(z, 2))


def test_torch_func(monkeypatch, unfolded):
    net = network("one", monkeypatch, unfolded)
    x = images(net, 3).flatten(1)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: net(row[None])[0]))(x)
    one = torch.autograd.functional.jacobian(lambda row: net(row[None])[0], x[0])
    assert torch.allclose(jacobian[0], one, atol=1e-7)


def test_float32_agrees_with_float64(monkeypatch, unfolded):
    net = network("two", monkeypatch, unfolded, dtype=torch.float32)
    wide = copy.deepcopy(net).double()
    x = images(net, 5)
    mine, theirs = net.infer(x), wide.infer(x.double(), tol=1e-12)
    assert mine.converged.all()
    gap = torch.cat(mine.activations[:2], 1).double() - torch.cat(theirs.activations[:2], 1)
    assert (gap.norm(dim=1) <= mine.error_bound + theirs.error_bound).all()


def test_images_and_vectors_are_the_same_input(monkeypatch):
    net = network("one", monkeypatch)
    x = images(net, 4)
    assert torch.equal(net(x), net(x.flatten(1))) and net(x).shape == (4, 5)
    assert net(x.view(2, 2, *net.image_shape)).shape == (2, 2, 5)
    assert torch.equal(net.energy(x), net.energy(x.flatten(1)))


def test_shapes_and_names_of_parameters():
    net = lrrn.LRRN(((3, 32, 32), Conv(16, kernel=8, stride=4, pool=2), 10))
    assert net.sizes == (3072, 784, 10) and net.image_shape == (3, 32, 32) and not net.is_dense
    assert [tuple(w.shape) for w in net.W] == [(16, 3, 8, 8), (10, 144)]
    assert [tuple(b.shape) for b in net.b] == [(16,), (10,)] and [tuple(c.shape) for c in net.c] == [(3,), (784,)]
    assert "Conv(channels=16, kernel=8, stride=4, padding=0, pool=2)" in repr(net)
    assert lrrn.LRRN(((1, 2, 3), 4, 2)).is_dense


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((1, 8, 8), Conv(4, 9), 2), "a kernel of 9 x 9 is larger than its images of 8 x 8"),
        (((1, 8, 8), Conv(4, 5, pool=2), Conv(4, 3), 2), "a kernel of 3 x 3 is larger than its images of 2 x 2"),
        (((1, 8, 8), 16, Conv(4, 3), 2), "its input is a vector of 16 numbers"),
        ((64, Conv(4, 3), 2), "its input is a vector of 64 numbers"),
        (((1, 8), Conv(4, 3), 2), "(channels, height, width)"),
        (((1, 8, 0), Conv(4, 3), 2), "(channels, height, width)"),
        (((1, 8, 8), Conv(4, 3, pool=2)), "pooling acts in front of the next layer"),
        (((1, 8, 8), Conv(4, 3, pool=7), 2), "windows of 7 x 7 do not fit into maps of 6 x 6"),
        (((1, 8, 8), "conv", 2), "lrrn.Conv(channels, kernel)"),
    ],
)
def test_bad_architectures_are_refused_with_the_reason(sizes, message):
    with pytest.raises(ValueError) as error:
        lrrn.LRRN(sizes)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 3), "channels of a convolution must be an integer of at least 1; got 0"),
        ((4, 2.5), "kernel of a convolution must be an integer"),
        ((4, 3, 0), "stride of a convolution must be an integer of at least 1"),
        ((4, 3, 1, -1), "padding of a convolution must be an integer of at least 0"),
        ((4, 3, 1, 3), "padding of a convolution must be smaller than its kernel"),
        ((4, 3, 1, 0, True), "pool of a convolution must be an integer"),
    ],
)
def test_bad_convolutions_are_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        Conv(*arguments)
    assert message in str(error.value)


def test_bad_images_are_refused(monkeypatch):
    net = network("one", monkeypatch)
    with pytest.raises(ValueError, match=r"\(n_samples, 84\) or \(n_samples, 2, 7, 6\); got \(3, 2, 6, 7\)"):
        net.infer(torch.zeros(3, 2, 6, 7))
    with pytest.raises(ValueError, match="non-finite"):
        net(torch.full((1, 2, 7, 6), torch.nan))


def test_what_needs_a_matrix_says_so(monkeypatch):
    from lrrn.energy import lifted

    net = network("one", monkeypatch)
    monkeypatch.setattr(lifted, "UNFOLDED_UNITS", 10)
    x = images(net, 2).flatten(1)
    for method in ("multiplier", "local"):
        with pytest.raises(ValueError, match=r"matrices of the size of all hidden units.*at most 10 are possible"):
            lrrn.certify(net, x, method)
    for solver in ("coordinate_descent", "newton", "reference"):
        with pytest.raises(ValueError, match="needs the entries of the Hessian"):
            net.infer(x, solver=solver)
    assert net.lipschitz().method == "spectral"


@pytest.mark.parametrize("pool", [2, 3])
def test_the_error_bound_of_a_float32_solve_is_about_the_network_of_the_parameters(pool):
    """A window of three divides weights by three, which rounds: its matrix is not what the parameters say."""
    found = 0.0
    for seed in (*range(20), 269, 302):
        generator = torch.Generator().manual_seed(seed)
        sizes = ((1, pool, pool), Conv(1, 1, pool=pool), 1, 2)
        net = lrrn.LRRN(sizes, gamma=1.0, constraint=[(1.0, 1.0), "free"], generator=generator)
        with torch.no_grad():
            net.W[1].mul_(8)
            for bias in [*net.b, *net.c]:
                bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)))
        x = torch.randn(1, pool * pool, generator=torch.Generator().manual_seed(seed))
        near, exact = net.infer(x, tol=4e-6), net.infer(x.double(), tol=1e-11)
        gap = torch.cat(near.activations[:2], -1).double() - torch.cat(exact.activations[:2], -1)
        found = max(found, float((gap.norm() - exact.error_bound) / near.error_bound))
    assert found <= 1
