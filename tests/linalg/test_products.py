"""Float32 products by either library inside torch, against float64."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from lrrn.linalg import products
from lrrn.linalg.products import RightFactor
from oracles import random_input
from tolerances import UNIT


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request, monkeypatch):
    """Multiply by this library whatever the processor."""
    if request.param == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch is without oneDNN")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param == "oneDNN")


@pytest.mark.parametrize("shape", [(0, 5, 7), (1, 1, 1), (3, 70, 33), (130, 33, 70)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_are_rounded_as_in_float32(library, shape, transposed):
    n, k, m = shape
    matrix = random_input(m, k, dtype=torch.float32).mT if transposed else random_input(k, m, dtype=torch.float32)
    every_second = random_input(2 * n, k, dtype=torch.float32)[::2]
    exact, size = every_second.double() @ matrix.double(), every_second.double().abs() @ matrix.double().abs()
    # the rounding of k products and sums, in any order
    slack = (k + 1) * UNIT[torch.float32] * size
    multiply, out = RightFactor(matrix), torch.full((n, m), torch.nan)
    assert ((multiply(every_second).double() - exact).abs() <= slack).all()
    assert multiply(every_second, out=out) is out and torch.equal(out, multiply(every_second))


def test_what_is_not_finite_stays_so(library):
    rows = torch.ones(3, 40)
    rows[1, 7], rows[2, 7] = torch.nan, torch.inf
    found = RightFactor(torch.ones(40, 20))(rows)
    assert (found[0] == 40).all() and found[1].isnan().all() and found[2].isinf().all()


def test_factors_can_be_copied(library):
    multiply, rows = RightFactor(random_input(30, 40, dtype=torch.float32)), random_input(20, 30, dtype=torch.float32)
    for clone in (pickle.loads(pickle.dumps(multiply)), copy.deepcopy(multiply)):
        assert torch.equal(clone(rows), multiply(rows))


def test_float64_is_left_to_torch(library):
    rows, matrix = random_input(20, 30), random_input(30, 40)
    assert torch.equal(RightFactor(matrix)(rows), rows @ matrix)


@pytest.mark.parametrize(
    ("vendor", "kernels", "expected"),
    [
        ("AuthenticAMD", "AVX512", True),
        ("AuthenticAMD", "AVX2", False),
        ("GenuineIntel", "AVX512", False),
        ("", "AVX512", False),
    ],
)
def test_facts_of_the_processor_choose_the_library(monkeypatch, vendor, kernels, expected):
    monkeypatch.setattr(products, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert products.onednn_is_faster.__wrapped__() is expected
