"""Solver settings of a network are checked when it is made, not when it first solves or is loaded."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lrrn import LRRN
from lrrn.solvers import SOLVERS


@pytest.mark.parametrize("solver", ["auto", *SOLVERS])
def test_settings_that_are_taken(solver):
    net = LRRN((4, 3, 2), solver=solver, tol=np.float32(0.25), max_sweeps=np.int64(50))
    assert (net.solver, net.tol, net.max_sweeps) == (solver, 0.25, 50)
    assert type(net.tol) is float and type(net.max_sweeps) is int
    assert LRRN((4, 3, 2), solver=solver).tol is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (dict(solver="bla"), "unknown solver 'bla'; use 'auto' or one of reference, "),
        (dict(solver=None), "unknown solver None"),
        (dict(max_sweeps=50.0), r"max_sweeps must be an integer of at least 1; got 50\.0"),
        (dict(max_sweeps=np.float64(50)), "max_sweeps must be an integer of at least 1; got"),
        (dict(max_sweeps=0), "max_sweeps must be an integer of at least 1; got 0"),
        (dict(max_sweeps=True), "max_sweeps must be an integer of at least 1; got True"),
        (dict(max_sweeps="50"), "max_sweeps must be an integer of at least 1; got '50'"),
        (dict(tol=0), "tol must be a positive number, or None for the default; got 0"),
        (dict(tol=math.nan), "tol must be a positive number, or None for the default; got nan"),
        (dict(tol=math.inf), "tol must be a positive number, or None for the default; got inf"),
        (dict(tol="1e-4"), "tol must be a positive number, or None for the default; got '1e-4'"),
    ],
)
def test_settings_that_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        LRRN((4, 3, 2), **setting)
