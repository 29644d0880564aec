"""The compiled gradient of a loss of the prediction against autograd, which finite differences hold; and what it passes on."""

import pytest
import torch
from torch.nn import functional

from lrrn import LRRN, LRRNClassifier
from lrrn.learning import CrossEntropy, Margin, SquaredError
from lrrn.learning.flat import FlatParameters
from lrrn.learning.monitor import SolveCounts
from lrrn.learning.objectives import Batch
from lrrn.learning.steps.autograd import Autograd
from lrrn.learning.steps.direct_prediction import DirectPrediction
from lrrn.learning.steps.prediction import CompiledPrediction
from lrrn.network import small_batch
from lrrn.network.policy import SolvePolicy
from lrrn.runtime.threads import one_thread
from varied_networks import NETWORKS, network

OBJECTIVES = [Margin(0.3, 0.2), Margin(0.1, (1.0, 0.3), 0.25), CrossEntropy(), SquaredError()]


def batch_of(net, n, policy):
    generator = torch.Generator().manual_seed(n)
    x = torch.rand((n, net.sizes[0]), generator=generator, dtype=net.W[0].dtype)
    label = torch.randint(0, net.sizes[-1], (n,), generator=generator)
    x, label = x.to(net.W[0].device), label.to(net.W[0].device)
    return Batch(x, functional.one_hot(label, net.sizes[-1]).to(x), label, progress=0.5, policy=policy)


def gradients(kind, net, objective, n, policy, weight):
    flat = FlatParameters(net)
    batch = batch_of(net, n, policy)
    with flat.attached(), one_thread():
        loss = kind(net, objective, flat, 1e-12).gradients(batch, weight, 2 * n, None)
        return loss, flat.gradient.clone(), batch


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["margin", "adversarial", "cross-entropy", "squared error"])
@pytest.mark.parametrize("n", [1, 30])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_derivatives_are_those_of_autograd(name, n, objective):
    net = network(name)
    weight = None if n == 1 else torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    policy, counts = SolvePolicy(aim=1e-12), SolveCounts()
    expected_loss, expected, general = gradients(Autograd, net, objective, n, policy, weight)
    loss, found, batch = gradients(CompiledPrediction, net, objective, n, SolvePolicy(aim=1e-12, observer=counts), weight)
    if loss is None:
        pytest.skip("needs more sweeps than the compiled passes take")
    assert loss == pytest.approx(float(expected_loss), rel=1e-9, abs=1e-11)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(batch.activations, general.activations, rtol=0, atol=1e-9)
    assert counts.samples == n * (4 if getattr(objective, "adversarial_eps", 0) else 2)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["margin", "adversarial", "cross-entropy", "squared error"])
@pytest.mark.parametrize("name", NETWORKS)
def test_derivatives_written_to_their_places_are_those_of_autograd(name, objective, device):
    net, n = network(name).to(device), 7
    weight = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device)
    policy = SolvePolicy(aim=1e-12)
    expected_loss, expected, general = gradients(Autograd, net, objective, n, policy, weight)
    loss, found, batch = gradients(DirectPrediction, net, objective, n, policy, weight)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(batch.activations, general.activations, rtol=0, atol=1e-9)


@pytest.mark.parametrize("objective", OBJECTIVES[:2], ids=["margin", "adversarial"])
@pytest.mark.parametrize("name", ["paper", "zero not feasible"])
def test_large_batches_are_split_for_any_number_of_threads(name, objective, monkeypatch):
    net, n = network(name), 230
    weight = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    _, expected, general = gradients(Autograd, net, objective, n, SolvePolicy(aim=1e-12), weight)
    monkeypatch.setattr(small_batch, "THREAD_WORK", 150 * small_batch.structure_of(net.energy_now()).plan[3])
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            counts = SolveCounts()
            policy = SolvePolicy(aim=1e-12, observer=counts)
            _, slope, batch = gradients(CompiledPrediction, net, objective, n, policy, weight)
            found.append(slope)
            assert counts.samples == n * (4 if objective.adversarial_eps else 2)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[0], expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(batch.activations, general.activations, rtol=0, atol=1e-9)
    assert torch.equal(*found)


def test_batches_that_do_not_converge_are_passed_on_with_their_last_iterate():
    net = network("paper")
    policy = SolvePolicy(tol=1e-20, observer=SolveCounts())
    loss, _, batch = gradients(CompiledPrediction, net, Margin(), 5, policy, None)
    assert loss is None
    torch.testing.assert_close(batch.start, net.minimise(batch.x), rtol=0, atol=1e-6)


def test_only_small_batches_on_one_thread_with_targets_are_taken():
    net, flat = network("paper"), None
    for n, changes in ((100_000, {}), (5, {"target": None}), (5, {"policy": SolvePolicy(solver="newton")})):
        flat, batch = FlatParameters(net), batch_of(net, n, SolvePolicy(observer=SolveCounts()))
        for name, value in changes.items():
            setattr(batch, name, value)
        with flat.attached(), one_thread():
            assert CompiledPrediction(net, CrossEntropy(), flat, 1e-6).gradients(batch, None, n, None) is None


def test_a_network_without_unknowns_is_left_to_autograd():
    net = LRRN((4, 2), beta=(0.0,), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat, batch = FlatParameters(net), batch_of(net, 5, SolvePolicy(observer=SolveCounts()))
    with flat.attached(), one_thread():
        assert CompiledPrediction(net, CrossEntropy(), flat, 1e-6).gradients(batch, None, 5, None) is None


@pytest.mark.parametrize("objective", ["margin", "cross_entropy", "squared_error"])
def test_estimators_train_by_it_and_say_so(objective):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((90, 5), generator=generator).numpy()
    y = (x[:, 0] + x[:, 1] ** 2 > 0.5).astype(int)
    given = {"adversarial_eps": 0.1} if objective == "margin" else {}
    model = LRRNClassifier((8, 8), objective, epochs=3, device="cpu", random_state=0, **given).fit(x, y)
    assert {record["backend"] for record in model.history_} == {"compiled prediction"}
