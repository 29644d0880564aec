"""One thread policy: limits nest and are restored, answers do not depend on threads, forked children work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_info, threadpool_limits

import lrrn
from lrrn import LRRNClassifier, LRRNRegressor
from lrrn.runtime import threads
from lrrn.runtime.lazy import lazy
from oracles import random_input, random_network


@pytest.fixture(autouse=True)
def two_torch_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_limits_are_set_and_restored():
    assert threads.workers() == 2
    with lrrn.blas_threads(1):
        assert torch.get_num_threads() == 1 and threads.workers() == 2
        with lrrn.blas_threads(1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2 and threads.workers() == 2


def test_limits_are_restored_after_an_error():
    with pytest.raises(RuntimeError, match="inside"), lrrn.blas_threads(1):
        raise RuntimeError("inside")
    assert torch.get_num_threads() == 2


def test_threads_that_hold_the_limit_do_not_disturb_each_other():
    inside, leave = threading.Event(), threading.Event()
    seen = []

    def hold():
        torch.set_num_threads(2)
        with lrrn.blas_threads(1):
            inside.set()
            leave.wait()
            seen.append((torch.get_num_threads(), threads.workers()))
        seen.append((torch.get_num_threads(), threads.workers()))

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    with lrrn.blas_threads(1):
        assert (torch.get_num_threads(), threads.workers()) == (1, 2)
    assert (torch.get_num_threads(), threads.workers()) == (2, 2)
    leave.set()
    thread.join()
    assert seen == [(1, 2), (2, 2)]


def test_every_row_is_visited_once_whatever_the_parts():
    for n_rows in (1, 7, 64, 1001):
        seen = [0] * n_rows

        def work(start, stop, seen=seen):
            for i in range(start, stop):
                seen[i] += 1

        threads.over_rows(work, n_rows, min_rows=4)
        assert seen == [1] * n_rows


def test_an_error_in_a_part_reaches_the_caller():
    def work(start, stop):
        if start > 0:
            raise ValueError("from a worker")

    with pytest.raises(ValueError, match="from a worker"):
        threads.over_rows(work, 100, min_rows=1)


def test_answers_do_not_depend_on_the_number_of_threads():
    net = random_network((20, 30, 30, 5), dtype=torch.float32)
    x = random_input(5000, 20, dtype=torch.float32)
    two = net.infer(x).activations
    assert threads._pool is not None  # so many rows are worth a second thread
    torch.set_num_threads(1)
    one = net.infer(x).activations
    assert all(torch.equal(a, b) for a, b in zip(one[:-1], two[:-1], strict=True))


def test_concurrent_inference_gives_the_serial_answer():
    net = random_network((20, 30, 30, 5))
    inputs = [random_input(100, 20, seed=k) for k in range(8)]
    serial = [net.infer(x).output for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        concurrent = list(pool.map(lambda x: net.infer(x).output, inputs * 4))
    assert all(torch.equal(a, b) for a, b in zip(serial * 4, concurrent, strict=True))


def side_by_side(work, arguments) -> list:
    """Call ``work`` on every argument, each in a thread of its own, all let go at the same moment."""
    gate = threading.Barrier(len(arguments))

    def begin(argument):
        gate.wait()
        return work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(begin, arguments))


DIGITS, LABELS = load_digits(return_X_y=True)
X = DIGITS / 16
QUICK = dict(epochs=1, device="cpu", random_state=0)


@pytest.mark.parametrize("objective", ["contrastive", "margin", "class_energy"])
def test_eight_threads_get_the_serial_labels_scores_radii_and_energies(objective):
    classifier = LRRNClassifier(hidden_sizes=(30, 20), objective=objective, **QUICK).fit(X[:600], LABELS[:600])

    def answers(rows):
        radii = [classifier.certified_radius(rows)] if objective == "class_energy" else []
        radii = radii or [classifier.certified_radius(rows, method) for method in ("paper", "spectral")]
        return [classifier.predict(rows), classifier.decision_function(rows), classifier.energy(rows), *radii]

    parts = [X[k::8] for k in range(8)]
    serial = [answers(part) for part in parts]
    for _ in range(2):
        classifier.network_._frozen = None  # what the serial calls left to be reused
        for ours, theirs in zip(serial, side_by_side(answers, parts), strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_eight_threads_get_the_serial_radii_of_the_default_method_and_intervals():
    classifier = LRRNClassifier(hidden_sizes=(6,), **QUICK).fit(X[:300], LABELS[:300] % 3)
    regressor = LRRNRegressor(hidden_sizes=(6,), **QUICK).fit(X[:300], LABELS[:300])

    def answers(rows):
        return [
            classifier.certified_radius(rows),
            *regressor.predict_interval(rows, 0.01),
            *regressor.energy_interval(rows, 0.1),
        ]

    parts = [X[k::100] for k in range(8)]
    serial = [answers(part) for part in parts]
    classifier.network_._frozen = regressor.network_._frozen = None
    for ours, theirs in zip(serial, side_by_side(answers, parts), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def in_a_thread_of_its_own(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.fixture
def two_blas_threads():
    """Set by a thread that is gone then: threadpoolctl lets no other one change a limit while it lives."""
    limit = in_a_thread_of_its_own(lambda: threadpool_limits(2, user_api="blas"))
    yield
    in_a_thread_of_its_own(limit.restore_original_limits)


def limits() -> list[int]:
    return [entry["num_threads"] for entry in threadpool_info() if entry["user_api"] == "blas"]


def test_the_first_to_leave_does_not_lift_the_limit_and_the_last_does(two_blas_threads):
    """NumPy's BLAS has one number for the whole process."""
    inside, leave = threading.Event(), threading.Event()

    def first():
        with threads.one_thread():
            inside.set()
            leave.wait()

    assert 2 in (before := limits())
    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with threads.one_thread():
        leave.set()
        thread.join()
        assert set(limits()) == {1}
    assert limits() == before


@pytest.mark.parametrize("api", [None, "blas"])
def test_one_thread_holds_inside_a_limit_of_the_caller(api):
    """threadpoolctl lets only the thread that set a limit first set another, and says nothing to the rest."""
    with threadpool_limits(2, user_api=api):
        before = limits()
        assert 2 in before
        with threads.one_thread():
            assert set(limits()) == {1}
        assert limits() == before
        with threads.one_thread():
            assert set(limits()) == {1}
    with threadpool_limits(1, user_api=api):
        assert set(limits()) == {1}


def test_fits_side_by_side_give_the_serial_weights_and_leave_limits_as_they_were(two_blas_threads):
    def fit(epochs):
        # of different lengths, so that they leave in another order than they came
        return LRRNClassifier(hidden_sizes=(8,), **{**QUICK, "epochs": epochs}).fit(X[:200], LABELS[:200]).decision_function(X)

    assert 2 in (before := limits())
    serial = [fit(epochs) for epochs in (4, 1, 3, 2)]
    concurrent = side_by_side(fit, [4, 1, 3, 2])
    assert limits() == before
    assert all(np.array_equal(a, b) for a, b in zip(serial, concurrent, strict=True))


def test_a_thread_that_begins_while_a_limit_is_held_does_not_keep_it():
    """torch gives new threads the number that was set last, by whichever thread."""

    def hold(_):
        with lrrn.blas_threads(1):
            return threads.workers()

    with lrrn.blas_threads(1):
        assert side_by_side(hold, range(4)) == [2] * 4
    assert torch.get_num_threads() == 2
    assert side_by_side(lambda _: torch.get_num_threads(), range(2)) == [2, 2]


# --- processes ------------------------------------------------------------------------------------------------------------

CHILDREN = """
import multiprocessing, os, signal, sys, threading
import numpy as np, torch
from sklearn.datasets import load_digits
from lrrn import LRRNClassifier

X, y = load_digits(return_X_y=True)
X = X / 16

def answers(classifier):
    net, x = classifier.network_, torch.as_tensor(X[:20], dtype=torch.float32).requires_grad_()
    net(x).sum().backward()
    fresh = LRRNClassifier(hidden_sizes=(8,), epochs=1, random_state=0).fit(X[:100], y[:100])
    radii = classifier.certified_radius(X[:50], "spectral")
    return [classifier.decision_function(X), radii, x.grad.numpy(), fresh.decision_function(X[:50])]

def same(ours, theirs):
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))

def forked(classifier, expected):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # rather than to wait for ever
        ok = False
        try:
            ok = same(answers(classifier), expected)
        finally:
            os._exit(0 if ok else 1)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("a forked child failed")
    return True

if __name__ == "__main__":
    torch.set_num_threads(2)
    classifier = LRRNClassifier(hidden_sizes=(100, 80), epochs=1, random_state=0).fit(X, y)
    torch.rand(1500, 1500) @ torch.rand(1500, 1500)  # OpenMP's threads are there now, and will not be in a child
    expected = answers(classifier)
    print("fork", forked(classifier, expected))
    stop = threading.Event()
    busy = [threading.Thread(target=lambda: [classifier.predict(X[:300]) for _ in iter(stop.is_set, True)]) for _ in range(2)]
    for thread in busy:
        thread.start()
    print("fork among busy threads", all(forked(classifier, expected) for _ in range(2)))
    stop.set()
    for thread in busy:
        thread.join()
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(method, "pool", all(same(expected, theirs) for theirs in pool.map(answers, [classifier] * 2)))
    print("threads here", torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_children_get_the_same_answers_however_they_are_started(tmp_path):
    """A forked child has none of the parent's threads, and waiting for them would be for ever."""
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    expected = ["fork True", "fork among busy threads True", "fork pool True", "spawn pool True", "threads here 2"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_property_that_is_computed_while_forking_can_be_computed_in_the_child():
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        def __init__(self, waits):
            self.waits = waits

        @lazy
        def value(self):
            if self.waits:
                begun.set()
                go_on.wait(60)
            return 7

    busy = threading.Thread(target=lambda: Slow(True).value)
    busy.start()
    begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # rather than to wait for ever
        os._exit(0 if Slow(False).value == 7 else 1)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    busy.join()
    assert status == 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_limit_held_while_forking_is_not_restored_in_the_child():
    """The thread that held it in the parent goes on holding it there; the child has one thread, and keeps it."""
    with lrrn.blas_threads(1):
        child = os.fork()
        if child == 0:
            ok = threads._held.torch_holders == 0
            os._exit(0 if ok and torch.get_num_threads() == 1 and threads.workers() == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert threads.workers() == 2
    assert torch.get_num_threads() == 2


def test_importing_the_package_compiles_nothing_and_is_light():
    code = "import sys, lrrn; assert 'torch' not in sys.modules; from lrrn import LRRN, certify; "
    code += "print(sorted({'numba', 'sklearn', 'typer', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
