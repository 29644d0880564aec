"""The compiled training step against the general one, which the oracles hold; and how the trainer uses it."""

import numpy as np
import pytest
import torch

from lrrn import LRRN
from lrrn.kernels.constants import ACCEPTED, LANES
from lrrn.kernels.cpu.coordinate_descent import EPS_SINGLE, RUNNING
from lrrn.learning import ClassEnergy, Contrastive, Data, FreeEnergy, Margin, SemiSupervised, Settings, Trainer
from lrrn.learning.flat import FlatParameters
from lrrn.learning.monitor import SolveCounts
from lrrn.learning.objectives import Batch, total, total_gradients
from lrrn.learning.steps import base
from lrrn.learning.steps.base import PART_ROWS, PART_WORK, edges_of, parts_of
from lrrn.learning.steps.compiled_cpu import CompiledCpu, free_tolerance
from lrrn.network.policy import SolvePolicy
from lrrn.qp import kkt_residual
from tolerances import rounding
from varied_networks import NETWORKS, network


@pytest.fixture(autouse=True)
def split_small_networks(monkeypatch):
    """Split batches by their rows alone: these networks have little work per row."""
    monkeypatch.setattr(base, "PART_WORK", 1)


def batch_of(net, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((n, net.sizes[0]), generator=generator, dtype=net.W[0].dtype)
    label = torch.randint(0, net.sizes[-1], (n,), generator=generator)
    return Batch(x, torch.nn.functional.one_hot(label, net.sizes[-1]).to(x), label)


def taken(step, batch, weight, counts, rows=None):
    """Take a compiled step on a batch, each sample counted with its weight."""
    batch.policy = SolvePolicy(observer=counts)
    return step.gradients(batch, weight, 1, rows)


@pytest.mark.parametrize("objective", [Contrastive(), FreeEnergy(), ClassEnergy()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("n", [1, 3, 100, 520])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_derivatives_are_those_of_the_general_path(name, n, objective):
    net = network(name)
    weight = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    expected_batch = batch_of(net, n)
    expected_batch.policy = SolvePolicy(tol=1e-13)
    terms = objective.terms(net, expected_batch)
    expected = torch.cat([g.reshape(-1) for g in total_gradients(terms, weight)])
    loss = float(torch.dot(total(terms, n), weight))
    flat, counts, batch = FlatParameters(net), SolveCounts(), batch_of(net, n)
    with flat.attached():
        step = CompiledCpu(net, objective, flat, 1e-12)
        result = taken(step, batch, weight, counts)
        while result is None:  # tighter than 32 sweeps reach: go on from there
            result = taken(step, batch, weight, counts)
    assert result == pytest.approx(loss, rel=1e-9, abs=1e-11)
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-9, atol=1e-9)
    if batch.activations is not None:
        torch.testing.assert_close(batch.activations, expected_batch.activations, rtol=0, atol=1e-9)
    assert counts.samples == n * sum(sign != 0 for sign in objective.signs)


@pytest.mark.parametrize("general", [False, True], ids=["compiled", "general"])
@pytest.mark.parametrize("name", ["paper", "deep, betas apart", "output an unknown"])
def test_halves_of_a_batch_add_up_to_the_whole_within_rounding(name, general):
    """Ranks add up parts of a gradient. The phases nearly agree: summed one by one, float32 would lose a rounding of each.

    Products over other numbers of rows, and so solves, may differ in their last bits, as BLAS decides.
    """
    net = network(name, torch.float32)
    whole, flat = batch_of(net, 400), FlatParameters(net)
    with torch.no_grad():
        # targets close to the outputs, as in the later epochs
        output = net.infer(whole.x).output
    whole.target = (output + 0.01 * (whole.target - output)).clamp(-1, 1)

    def gradient(rows):
        batch, weight = Batch(whole.x[rows], whole.target[rows]), torch.full((len(whole.x[rows]),), 1 / 400)
        if general:
            found = total_gradients(Contrastive().terms(net, batch), weight)
            torch.cat([part.reshape(-1) for part in found], out=flat.gradient)
        else:
            assert taken(step, batch, weight, SolveCounts()) is not None
        return flat.gradient.double()

    with flat.attached():
        step = CompiledCpu(net, Contrastive(), flat, 4e-6)
        at_once, parts = gradient(slice(None)), gradient(slice(0, 230)) + gradient(slice(230, 400))
        one_phase = total_gradients(FreeEnergy().terms(net, whole), torch.full((400,), 1 / 400))
        one_phase = float(torch.cat([part.reshape(-1) for part in one_phase]).double().norm())
    assert float((at_once - parts).norm()) <= rounding(one_phase, 1, torch.float32) / 100


def test_float32_agrees_to_float32():
    narrow = network("paper", torch.float32)
    given, gradients = batch_of(narrow, 20), []
    for dtype in (torch.float32, torch.float64):
        net = narrow.to(dtype)
        flat = FlatParameters(net)
        with flat.attached():
            step = CompiledCpu(net, Contrastive(), flat, 1e-6)
            batch = Batch(given.x.to(dtype), given.target.to(dtype))
            assert taken(step, batch, torch.full((20,), 0.05, dtype=dtype), SolveCounts()) is not None
        gradients.append(flat.gradient.double())
    # a few times the tolerance: in float32 the free phase stops earlier
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=4e-6)


@pytest.mark.parametrize("name", ["paper", "deep, betas apart", "output an unknown"])
def test_what_the_free_phase_leaves_does_not_count_in_the_difference(name):
    """The free phase stops early. The gradient is nearly as exact as if it did not, also where the phases differ by little."""
    net, tol = network(name), 4e-8
    batch, weight = batch_of(net, 200), torch.full((200,), 1 / 200, dtype=torch.float64)
    output = net.infer(batch.x).output.detach()
    batch.target = (output + 0.01 * (batch.target - output)).clamp(-1, 1)
    assert free_tolerance(tol, torch.float64) == 25 * tol
    flat, found, losses = FlatParameters(net), [], []
    with flat.attached():
        for aim in (1e-13, tol):
            step = CompiledCpu(net, Contrastive(), flat, aim)
            loss, fresh = None, Batch(batch.x, batch.target)
            while loss is None:
                loss = taken(step, fresh, weight, SolveCounts())
            found.append(flat.gradient.clone())
            losses.append(loss)
    batch.policy = SolvePolicy(tol=tol)
    general = torch.cat([g.reshape(-1) for g in total_gradients(Contrastive().terms(net, batch), weight)])
    assert (found[1] - found[0]).norm() <= 2 * (general - found[0]).norm()
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_residuals_hold_without_being_computed_anew():
    """The float32 step trusts gradients that it updated in its sweeps; in float64 the residual of its result is the same."""
    net, tol = LRRN((100, 160, 160, 10), generator=torch.Generator().manual_seed(0), dtype=torch.float32), 2e-6
    assert tol >= RUNNING * EPS_SINGLE
    flat, batch = FlatParameters(net), batch_of(net, 64)
    with flat.attached():
        assert taken(CompiledCpu(net, FreeEnergy(), flat, tol), batch, torch.full((64,), 1 / 64), SolveCounts()) is not None
    qp = net.energy_snapshot(torch.float64).free(batch.x.double())
    z = batch.activations.double()
    residual = kkt_residual(z, z @ qp.hessian.dense() - qp.q, qp.lo, qp.hi).norm(dim=1)
    assert (residual <= ACCEPTED * tol * qp.q.norm(dim=1).clamp_min(1)).all()


@pytest.mark.parametrize("size", [100, 250, 600])
def test_bits_do_not_depend_on_the_number_of_threads(size):
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            net = network("paper", torch.float32)
            batch = batch_of(net, 1200)
            Trainer(net, Contrastive(), Settings(batch_size=size, epochs=2, learning_rate=0.1)).fit(
                Data(batch.x, batch.target, batch.label)
            )
        finally:
            torch.set_num_threads(before)
        results.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("n", [1, 10, 95, 96, 100, 192, 250, 384, 401, 1000, 60_000])
def test_parts_of_a_batch_cover_it_once_and_are_of_like_size(n):
    parts = parts_of(n, 128 * 128)
    edges = edges_of(n, parts)
    assert parts in (1, 2, 4, 8) and len(edges) == parts + 1 and (edges[0], edges[-1]) == (0, n)
    sizes = np.diff(edges)
    assert parts == 1 or (sizes.min() >= PART_ROWS - LANES // 2 and sizes.max() - sizes.min() <= 2 * LANES)
    assert not np.any(sizes[1:] % LANES)


def test_a_batch_is_split_where_every_part_has_enough_work(monkeypatch):
    monkeypatch.setattr(base, "PART_WORK", PART_WORK)
    assert [parts_of(1000, work) for work in (1, PART_WORK // 512, PART_WORK // 256, PART_WORK)] == [1, 1, 2, 8]


@pytest.mark.parametrize("objective", [Contrastive(), FreeEnergy(), ClassEnergy()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("n", [7, 120])
def test_picked_rows_are_those_of_a_batch_of_them(n, objective):
    net = network("paper")
    everything, rows = batch_of(net, 300), torch.randperm(300, generator=torch.Generator().manual_seed(1))[:n]
    weight, flat, found = torch.full((n,), 1 / n, dtype=torch.float64), FlatParameters(net), []
    with flat.attached():
        step = CompiledCpu(net, objective, flat, 1e-10)
        for batch, pick in ((everything, rows), (Batch(everything.x[rows], everything.target[rows]), None)):
            loss = taken(step, batch, weight, SolveCounts(), pick)
            assert loss is not None
            found.append((loss, flat.gradient.clone()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_slow_batches_go_the_general_way_and_training_is_the_same(monkeypatch):
    """Large weights need more sweeps than the compiled step allows itself."""
    results, calls, terms = [], [], Contrastive.terms
    monkeypatch.setattr(Contrastive, "terms", lambda *given: calls.append(1) or terms(*given))
    for solver in ("auto", "newton"):  # Newton's method never takes the compiled step
        net = network("paper")
        net.solver = solver
        with torch.no_grad():
            net.W[1].mul_(30)
        batch = batch_of(net, 40)
        trainer = Trainer(net, Contrastive(), Settings(batch_size=10, epochs=2, learning_rate=1e-3, tol=1e-10))
        history = trainer.fit(Data(batch.x, batch.target, batch.label))
        assert sum(record["unconverged"] for record in history) == 0
        results.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
        assert calls  # the general way was taken
        calls.clear()
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_who_takes_the_compiled_step():
    net = network("paper")
    assert CompiledCpu.applies(net, Contrastive(), Settings())
    assert not CompiledCpu.applies(net, SemiSupervised(), Settings())
    assert not CompiledCpu.applies(net, Margin(), Settings())
    assert not CompiledCpu.applies(LRRN(sizes=(4, 2)), FreeEnergy(), Settings())
    assert not CompiledCpu.applies(net.to(torch.bfloat16), Contrastive(), Settings())


def test_a_reused_start_gives_the_same_derivatives_in_fewer_sweeps():
    net = network("paper")
    flat, weight = FlatParameters(net), torch.full((20,), 0.05, dtype=torch.float64)
    first, again, cold, warm = batch_of(net, 20), batch_of(net, 20), SolveCounts(), SolveCounts()
    with flat.attached():
        step = CompiledCpu(net, Contrastive(), flat, 1e-9)
        taken(step, first, weight, cold)
        expected = flat.gradient.clone()
        again.start = first.activations
        taken(step, again, weight, warm)
    torch.testing.assert_close(flat.gradient, expected, rtol=1e-6, atol=1e-7)
    assert warm.sweeps < cold.sweeps


@pytest.mark.parametrize("objective", [Contrastive(), Margin(), SemiSupervised()], ids=lambda o: type(o).__name__)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_frozen_parameters_stay_and_the_network_owns_its_memory_afterwards(optimizer, objective):
    net = network("paper")
    net.W[1].requires_grad_(False)
    net.b[0].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    decay = {"decoupled_weight_decay": 0.1} if optimizer == "adamw" else {}
    batch = batch_of(net, 20)
    Trainer(net, objective, Settings(optimizer=optimizer, learning_rate=0.01, epochs=1, **decay)).fit(
        Data(batch.x, batch.target, batch.label)
    )
    for name, p in net.named_parameters():
        if name != "c.2":  # beta is 0 there, so nothing depends on it
            assert torch.equal(p, before[name]) == (not p.requires_grad), name
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
        assert p.grad is None


def test_a_target_is_needed():
    net = network("paper")
    flat = FlatParameters(net)
    with flat.attached(), pytest.raises(ValueError, match="needs targets"):
        CompiledCpu(net, Contrastive(), flat, 1e-6).gradients(Batch(batch_of(net, 3).x), None, 3, None)


def test_gradient_by_finite_differences():
    """Independent of the general path: differences of the loss itself."""
    net = network("deep, betas apart")
    flat, weight = FlatParameters(net), torch.full((6,), 1 / 6, dtype=torch.float64)

    def loss():
        batch = batch_of(net, 6)
        result = taken(step, batch, weight, SolveCounts())
        while result is None:
            result = taken(step, batch, weight, SolveCounts())
        return result

    with flat.attached():
        step = CompiledCpu(net, Contrastive(), flat, 1e-12)
        loss()
        gradient = flat.gradient.clone()
        for i in np.random.default_rng(0).choice(len(gradient), 25, replace=False):
            value, h = float(flat.vector[i]), 1e-5
            ends = []
            for shift in (h, -h):
                flat.vector[i] = value + shift
                ends.append(loss())
            flat.vector[i] = value
            assert (ends[0] - ends[1]) / (2 * h) == pytest.approx(float(gradient[i]), abs=1e-7)


@pytest.mark.parametrize("path", ["compiled", "general"])
def test_the_default_tolerance_keeps_a_small_contrast_above_the_error_of_the_solves(path):
    """Wide inputs make q large and so a relative tolerance loose; targets near the prediction make the contrast small."""
    generator = torch.Generator().manual_seed(0)
    net = LRRN((784, 64, 64, 10), generator=generator)
    x = torch.rand(10, 784, generator=generator) * (torch.rand(10, 784, generator=generator) < 0.2)
    target = net(x).detach() + 0.05 * torch.randn(10, 10, generator=generator)
    exact = LRRN((784, 64, 64, 10), generator=generator, dtype=torch.float64, tol=1e-12)
    exact.load_state_dict(net.state_dict())
    terms = Contrastive().terms(exact, Batch(x.double(), target.double(), policy=exact.policy))
    expected = torch.cat([g.reshape(-1) for g in total_gradients(terms, torch.full((10,), 0.1, dtype=torch.float64))])
    net.solver = "auto" if path == "compiled" else "accelerated"
    before = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).double()
    Trainer(net, Contrastive(), Settings(batch_size=10, epochs=1, learning_rate=1.0)).fit(Data(x, target))
    step = before - torch.cat([p.detach().reshape(-1) for p in net.parameters()]).double()
    assert float((step - expected).norm() / expected.norm()) < 0.05
