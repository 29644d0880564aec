"""Estimators under joblib's own backends: the results of a cluster are those of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import joblib
import pytest

from repository import ROOT

EXAMPLE = ROOT / "examples" / "dask_grid_search.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("dask_grid_search", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alone(example):
    return example.figures(example.search(150, 1))


def test_a_grid_search_on_a_dask_cluster_finds_what_one_process_finds(alone):
    pytest.importorskip("dask.distributed")
    command = [sys.executable, str(EXAMPLE), "--samples", "150", "--epochs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {**alone, "workers": 2}


def test_a_grid_search_in_threads_finds_what_one_process_finds(example, alone):
    with joblib.parallel_config(backend="threading", n_jobs=2):
        assert example.figures(example.search(150, 1)) == alone
