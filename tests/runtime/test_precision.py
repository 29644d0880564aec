"""Products that a residual or a certificate rests on are in full precision, whatever torch is allowed to do elsewhere."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lrrn.learning import Contrastive, Data, Settings, Trainer
from lrrn.linalg import products
from lrrn.runtime import precision
from lrrn.runtime.precision import _allowed, in_full_precision
from oracles import random_input, random_network

PRODUCTS = ("aten.mm.", "aten.addmm", "aten.bmm.", "aten.mv.", "aten.addmv", "aten.mkldnn_linear.")


def by_name():
    torch.set_float32_matmul_precision("high")


def by_switch():
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "tf32"


def by_default():
    torch.backends.fp32_precision = "tf32"


@pytest.fixture(autouse=True, params=[by_name, by_switch, by_default])
def allowed(request):
    """Allow less precision for the length of a test, in one of torch's ways."""
    if request.param is not by_name and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has one way only")
    switches = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [switch.fp32_precision for switch in switches] if hasattr(torch.backends, "fp32_precision") else []
    request.param()
    yield
    assert not is_full()
    torch.set_float32_matmul_precision("highest")
    for switch, setting in zip(switches, before, strict=False):
        switch.fp32_precision = setting


def is_full() -> bool:
    return all(setting in ("none", "ieee", "highest") for setting in _allowed())


class Products(TorchDispatchMode):
    """Notes in which precision each product is computed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function).startswith(PRODUCTS):
            self.seen.append(is_full())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("solver", ["accelerated", "newton"])
def test_a_prediction_is_made_in_full_precision_and_its_gradient_as_allowed(solver, device):
    net = random_network((20, 12, 9, 4), dtype=torch.float32, device=device)
    net.solver = solver
    x = random_input(7, 20, dtype=torch.float32, device=device)
    with Products() as forward:
        y = net(x)
    assert len(forward.seen) > 3 and all(forward.seen)
    with Products() as backward:
        y.square().sum().backward()
    assert not all(backward.seen) and any(backward.seen)  # products with the adjoint, and its solve


def test_energies_are_computed_in_full_precision(device):
    net = random_network((20, 12, 9, 4), dtype=torch.float32, device=device)
    x = random_input(7, 20, dtype=torch.float32, device=device)
    with torch.no_grad(), Products() as products:
        net.energy(x, net.infer(x).activations)
        net.infer(x)
    assert products.seen and all(products.seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_what_is_allowed_changes_no_bit_of_a_prediction_on_a_device():
    net = random_network((784, 300, 10), dtype=torch.float32, device="cuda")
    x = random_input(50, 784, dtype=torch.float32, device="cuda")
    some = net.infer(x)
    full = in_full_precision(net.infer)(x)
    assert torch.equal(some.output, full.output) and torch.equal(some.residual, full.residual)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_training_may_use_less_and_learns_the_same():
    losses = []
    for decorate in (in_full_precision, lambda fit: fit):
        net = random_network((64, 200, 10), dtype=torch.float32, device="cuda")
        x = random_input(512, 64, dtype=torch.float32, device="cuda")
        y = torch.nn.functional.one_hot(torch.arange(512, device="cuda") % 10, 10).float()
        trainer = Trainer(net, Contrastive(), Settings(optimizer="adam", learning_rate=1e-3, batch_size=64, epochs=4))
        losses.append([record["loss"] for record in decorate(trainer.fit)(Data(x, y))])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_the_last_thread_to_leave_restores_what_was_allowed():
    inside, leave = threading.Event(), threading.Event()

    @in_full_precision
    def other():
        inside.set()
        leave.wait(10)

    thread = threading.Thread(target=other)

    @in_full_precision
    def first():
        thread.start()
        assert inside.wait(10)

    first()
    # the first has left, and the second is still there
    assert is_full()
    assert in_full_precision(is_full)()
    assert is_full()
    leave.set()
    thread.join(10)
    assert not is_full()


def test_an_error_restores_what_was_allowed():
    @in_full_precision
    def fails():
        assert is_full()
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        fails()


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
def test_products_with_a_fixed_matrix_are_in_full_precision(monkeypatch, library):
    if library == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch is without oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: library == "oneDNN")
    with Products() as found:
        products.RightFactor(torch.ones(30, 20))(torch.ones(4, 30))
    assert found.seen and all(found.seen)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_waits_for_no_thread_of_its_parent():
    """A thread is inside and another one is about to enter, with the lock, while the main thread forks."""

    @in_full_precision
    def forked() -> int:
        with precision._guard._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # rather than to wait for ever
                os._exit(0 if not is_full() and in_full_precision(is_full)() and not is_full() else 1)
        return os.waitpid(child, 0)[1]

    assert forked() == 0
