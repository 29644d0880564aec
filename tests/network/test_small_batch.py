"""The compiled passes of small batches against the general ones, which oracles and finite differences hold."""

import copy
import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch

import lrrn.network.small_batch
from lrrn import LRRN
from lrrn.learning.monitor import SolveCounts
from lrrn.network.policy import SolvePolicy, Tolerances
from lrrn.network.small_batch import SmallBatch, fit, structure_of
from lrrn.runtime.threads import holds_one_thread, one_thread
from varied_networks import NETWORKS, network


@pytest.fixture(autouse=True)
def held():
    with one_thread():
        yield


@pytest.fixture
def compact_calls(monkeypatch):
    """Count how often the compiled passes gave the answer."""
    calls = {"minimise": 0, "adjoint": 0}

    def counted(name):
        real = getattr(SmallBatch, name)

        def method(self, *rest):
            found = real(self, *rest)
            calls[name] += found is not None and getattr(found, "converged", True)
            return found

        monkeypatch.setattr(SmallBatch, name, method)

    for name in calls:
        counted(name)
    return calls


def both_ways(net, x, start=None, v=None, predict=False):
    """Return minimiser or prediction, derivatives in x and derivatives in the parameters: compiled, and the general way."""
    found = []
    for compiled in (True, False):
        given = x.clone().requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(lrrn.network.implicit, "fit", lambda *given: None)
            z = net(given) if predict else net.minimise(given, start)
        found.append((z.detach(), *torch.autograd.grad((z * (1 if v is None else v)).sum(), [given, *net.flat_parameters()])))
    return found


@pytest.mark.parametrize("n", [1, 7, 37])
@pytest.mark.parametrize("name", NETWORKS)
def test_minimiser_and_derivatives_are_those_of_the_general_way(name, n, compact_calls):
    net = network(name)
    x = torch.rand((n, net.sizes[0]), dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    v = torch.randn((n, sum(net.energy_now().free_sizes)), dtype=torch.float64, generator=torch.Generator().manual_seed(n + 1))
    compact, general = both_ways(net, x, v=v)
    assert compact_calls == {"minimise": 1, "adjoint": 1}
    for ours, expected in zip(compact, general, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_float32_is_as_good_as_its_tolerance(compact_calls):
    net, x = network("deep, betas apart", torch.float32), torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    compact, _ = both_ways(net, x)
    assert compact_calls == {"minimise": 1, "adjoint": 1} and all(part.dtype == torch.float32 for part in compact)
    _, exact = both_ways(copy.deepcopy(net).double(), x.double())
    for ours, expected in zip(compact, exact, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("size", [1e-150, 1e150])
def test_derivatives_keep_their_digits_whatever_their_size(size, compact_calls):
    net, x = network("paper"), torch.rand(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    v = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    v[2] = 0  # a sample that does not matter
    plain, large = both_ways(net, x, v=v)[1], both_ways(net, x, v=size * v)[0]
    assert compact_calls["adjoint"] == 2
    for ours, expected in zip(large[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours / size, expected, rtol=1e-9, atol=1e-12)
    assert bool((large[1][2] == 0).all())


def test_a_warm_start_takes_fewer_sweeps_and_is_made_feasible():
    net, x = network("zero not feasible"), torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = []
    z = net.minimise(x).detach()
    for start in (None, z, torch.full_like(z, -50.0)):
        counted = SolveCounts()
        torch.testing.assert_close(net.minimise(x, start, policy=SolvePolicy(observer=counted)), z, rtol=0, atol=1e-9)
        assert counted.samples == 6 and counted.missed == 0
        counts.append(counted.sweeps)
    assert counts[1] == 6 < counts[0] and counts[2] > counts[1]  # one look each


def test_what_takes_too_long_goes_on_the_general_way(monkeypatch, compact_calls):
    net, x = network("paper"), torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = both_ways(net, x)[1]
    monkeypatch.setattr(lrrn.network.small_batch, "SWEEPS", 2)
    compact_calls.update(minimise=0, adjoint=0)
    ours = both_ways(net, x)[0]
    assert compact_calls == {"minimise": 0, "adjoint": 0}
    for part, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-9, atol=1e-9)


def test_an_adjoint_that_takes_too_long_goes_the_general_way(monkeypatch):
    net, x = network("paper"), torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = both_ways(net, x)[1]
    monkeypatch.setattr(SmallBatch, "adjoint", lambda *given: None)
    for part, right in zip(both_ways(net, x)[0], expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", [1, 7, 37])
@pytest.mark.parametrize("name", NETWORKS)
def test_prediction_and_derivatives_are_those_of_the_general_way(name, n, compact_calls):
    net, generator = network(name), torch.Generator().manual_seed(n)
    x = torch.rand(n, 12, dtype=torch.float64, generator=generator)
    direction = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    ours, expected = both_ways(net, x, v=direction, predict=True)
    assert compact_calls == {"minimise": 1, "adjoint": 1}
    for part, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["paper", "output an unknown", "no biases", "two layers"])
@pytest.mark.parametrize("slow", ["both", "adjoint"])
def test_a_prediction_that_takes_too_long_goes_on_the_general_way(name, slow, monkeypatch, compact_calls):
    net, x = network(name), torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    direction = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = both_ways(net, x, v=direction, predict=True)[1]
    if slow == "both":
        monkeypatch.setattr(lrrn.network.small_batch, "SWEEPS", 2)
    else:
        monkeypatch.setattr(SmallBatch, "adjoint", lambda *given: None)
    compact_calls.update(minimise=0, adjoint=0)
    ours = both_ways(net, x, v=direction, predict=True)[0]
    assert compact_calls == {"minimise": int(slow == "adjoint"), "adjoint": 0}
    for part, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(part, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tol", [1e-3, 1e-6, 1e-9, 1e-12])
def test_what_float32_sweeps_leave_meets_the_tolerance_in_float64(tol):
    net, x = network("deep, betas apart"), torch.rand(20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    energy = net.energy_now()
    found = SmallBatch(
        structure_of(energy), torch.cat([p.detach().flatten() for p in net.flat_parameters()]), x, Tolerances(tol, tol)
    ).minimise(None)
    qp = energy.free(x)
    assert found.converged and bool((qp.residual(found.solution.z) <= tol * qp.scale * (1 + 1e-3)).all())
    torch.testing.assert_close(found.solution.residual, qp.residual(found.solution.z), rtol=1e-6, atol=1e-13)


def test_a_hessian_beyond_float32_goes_the_general_way(compact_calls):
    net, x = network("paper"), torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.W[0].mul_(1e12)
    ours, expected = both_ways(net, x, predict=True)
    assert compact_calls["minimise"] == 0
    for part, right in zip(ours, expected, strict=True):
        assert torch.equal(part, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 5), (3, 40), (4, 16), (5, 3), (9, 33), (64, 784), (66, 785), (513, 300)])
def test_products_with_their_own_transpose(shape, dtype):
    w = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(shape[0]))
    out = torch.full((shape[0], shape[0]), torch.nan, dtype=dtype)
    lrrn.network.small_batch.gram(w, out)
    exact, size = w.double() @ w.double().mT, w.double().abs() @ w.double().abs().mT
    # the rounding of an inner product, whatever the order of its sum
    assert bool(((out.double() - exact).abs() <= shape[1] * torch.finfo(dtype).eps * size).all())
    assert torch.equal(out, out.mT)


def test_a_residual_above_the_tolerance_is_not_converged():
    net, x = network("paper"), torch.rand(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    energy = net.energy_now()
    found = SmallBatch(
        structure_of(energy), torch.cat([p.detach().flatten() for p in net.flat_parameters()]), x, Tolerances(1e-9, 1e-9)
    ).minimise(None)
    assert found.converged and bool((found.solution.residual <= 1e-9 * found.scale).all())
    # aiming lower than rounding allows is no failure; missing what must be reached is one
    assert (
        SmallBatch(
            structure_of(energy), torch.cat([p.detach().flatten() for p in net.flat_parameters()]), x, Tolerances(1e-20, 1e-20)
        )
        .minimise(None)
        .converged
        is False
    )
    assert Tolerances(1e-6, 1e-13).limit == pytest.approx(3e-13) and Tolerances(1e-6, 1e-6).limit == 1e-6
    qp = energy.free(x)
    torch.testing.assert_close(found.solution.residual, qp.residual(found.solution.z), rtol=1e-3, atol=1e-15)
    torch.testing.assert_close(found.solution.gradient, qp.gradient(found.solution.z), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.scale, qp.scale)


def test_who_is_asked():
    net, x = network("paper"), torch.zeros(4, 12, dtype=torch.float64)
    energy = net.energy_now()
    assert fit(net.policy, energy, x) is fit(SolvePolicy(tol=1e-4), energy, x) is structure_of(energy)
    assert net.policy.tolerances(x.dtype) == Tolerances(1e-6, 1e-13)
    assert SolvePolicy(tol=1e-4).tolerances(x.dtype) == Tolerances(1e-4, 1e-4)
    assert not fit(net.policy, energy, x[:0]) and not fit(net.policy, energy, torch.zeros(2**15, 12, dtype=torch.float64))
    wide = LRRN((12, 400, 3), dtype=torch.float64).energy_now()
    assert not fit(net.policy, wide, x)  # the general way works on corrections in float32
    assert not fit(net.policy, LRRN((12, 3), dtype=torch.float64).energy_now(), x)  # no unknowns
    for other in (SolvePolicy(solver="newton"), SolvePolicy(max_sweeps=5), SolvePolicy(fixed_sweeps=20)):
        assert fit(other, energy, x) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_blas_must_be_held_to_one_thread_and_is_not_in_a_forked_child():
    code = """
import os, torch
from lrrn.network.policy import SolvePolicy
from lrrn.network.small_batch import fit
from lrrn import LRRN
from lrrn.runtime.threads import one_thread
energy, x = LRRN((12, 9, 3), dtype=torch.float64).energy_now(), torch.zeros(4, 12, dtype=torch.float64)
assert not fit(SolvePolicy(), energy, x)
with one_thread():
    assert fit(SolvePolicy(), energy, x)
    child = os.fork()
    if child == 0:
        os._exit(int(fit(SolvePolicy(), energy, x) is not None))
    assert os.waitpid(child, 0)[1] == 0
assert not fit(SolvePolicy(), energy, x)
"""
    assert holds_one_thread()
    subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", code], check=True)


def test_overflow_is_told():
    net, x = network("paper"), torch.full((3, 12), 1e200, dtype=torch.float64)
    with torch.no_grad():
        net.W[0].mul_(1e200)
    with pytest.warns(match="did not converge"):
        net(x)


def test_changing_a_parameter_before_the_backward_pass_is_an_error():
    net, x = network("paper"), torch.rand(3, 12, dtype=torch.float64)
    loss = net(x).sum()
    with torch.no_grad():
        net.W[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("call", [LRRN.forward, LRRN.minimise], ids=["prediction", "minimiser"])
def test_nothing_is_kept_once_the_output_is_gone(call):
    net, x = network("paper"), torch.rand(3, 12, dtype=torch.float64)
    kept = []
    real = SmallBatch.minimise

    def watched(self, *rest):
        kept.append(weakref.ref(self))
        return real(self, *rest)

    gc.collect()
    gc.disable()
    try:
        SmallBatch.minimise = watched
        y = call(net, x)
        assert kept[0]() is not None
        del y
        assert kept[0]() is None  # by counting references alone
    finally:
        SmallBatch.minimise = real
        gc.enable()
