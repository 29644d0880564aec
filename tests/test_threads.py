"""One thread policy: limits nest and are restored, answers do not depend on threads, forked children work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import lrrn
from lrrn import threads
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


FORK = """
import os, torch
from lrrn import threads
from oracles import random_input, random_network
threads.workers = lambda: 2
net, x = random_network((20, 30, 30, 5)), random_input(5000, 20)
expected = net.infer(x).output
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(net.infer(x).output, expected) else 1)
print(os.waitpid(child, 0)[1], threads._pool is not None)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_can_infer_after_the_parent_has():
    # torch's own OpenMP threads do not survive a fork, so the parent has just one; ours are made anew in the child
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert done.stdout.split() == ["0", "True"]


def test_importing_the_package_compiles_nothing_and_is_light():
    code = "import sys, lrrn; print(sorted({'numba', 'sklearn', 'typer', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
