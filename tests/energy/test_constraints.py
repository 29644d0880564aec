from __future__ import annotations

import math

import pytest
import torch

from lrrn.energy.constraints import BOX, FREE, NONNEG, Interval, bounds, interval


def test_names_pairs_and_intervals():
    assert interval("free") == FREE == Interval(-math.inf, math.inf) and FREE.is_free
    assert interval("nonneg") == NONNEG == interval((0, math.inf)) and not NONNEG.is_free
    assert interval("box") == BOX == interval([-1, 1]) == interval(BOX)
    assert str(interval((0, 2.5))) == "[0, 2.5]" and str(interval((-1.0, 1.0))) == "box"
    assert interval((3, 3)).lo == 3.0


@pytest.mark.parametrize("bad", [(1, 0), (math.nan, 1), (math.inf, math.inf), (-math.inf, -math.inf)], ids=str)
def test_empty_sets_are_refused(bad):
    with pytest.raises(ValueError, match="two numbers lo <= hi"):
        interval(bad)


def test_bounds_are_stacked_layer_by_layer():
    lo, hi = bounds([NONNEG, BOX], [2, 1], torch.zeros(0, dtype=torch.float64))
    assert lo.tolist() == [[0, 0, -1]] and hi.tolist() == [[math.inf, math.inf, 1]] and lo.dtype == torch.float64
    assert bounds([], [], torch.zeros(0))[0].shape == (1, 0)
