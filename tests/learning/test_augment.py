"""Shifts and flips of images against a direct construction; they depend on seed, step and sample, and on nothing else."""

from __future__ import annotations

import pytest
import torch

from lrrn.learning.augment import flipped, shape_of_images, shifted


def moved(image, down, right):
    """Shift by slicing: rows and columns that leave are lost, zeros come in."""
    side = len(image)
    out = torch.zeros_like(image)
    rows, columns = (slice(max(s, 0), side + min(s, 0)) for s in (down, right))
    from_rows, from_columns = (slice(max(-s, 0), side + min(-s, 0)) for s in (down, right))
    out[rows, columns] = image[from_rows, from_columns]
    return out


def test_every_result_is_one_of_the_shifts_and_all_of_them_occur(device):
    images = torch.rand(400, 5, 5, device=device) + 0.1
    result = shifted(images.flatten(1), torch.arange(400, device=device), 7, 3, 1).view(-1, 5, 5)
    seen = set()
    for image, found in zip(images, result, strict=True):
        matches = [(d, r) for d in (-1, 0, 1) for r in (-1, 0, 1) if torch.equal(moved(image, d, r), found)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert len(seen) == 9


def test_shifts_depend_on_sample_step_and_seed_only(device):
    x = torch.rand(1, 36, device=device).expand(50, -1).contiguous()
    rows = torch.arange(50, device=device)
    one = shifted(x, rows, 4, 0, 2)
    assert torch.equal(one, shifted(x, rows, torch.tensor(4, device=device), 0, 2))
    assert torch.equal(one[10:20], shifted(x[10:20], rows[10:20], 4, 0, 2))
    assert not torch.equal(one, shifted(x, rows, 5, 0, 2))
    assert not torch.equal(one, shifted(x, rows, 4, 1, 2))
    assert torch.equal(one.cpu(), shifted(x.cpu(), rows.cpu(), 4, 0, 2))


@pytest.mark.parametrize("shape", [(1, 5, 5), (1, 4, 7), (3, 6, 2), (2, 3, 1)])
def test_a_flip_is_the_mirrored_image_and_half_of_them_are(shape, device):
    images = torch.rand(2000, *shape, device=device)
    rows = torch.arange(2000, device=device)
    found = flipped(images.flatten(1), rows, 5, 2, shape).view(images.shape)
    mirrored = images[..., list(range(shape[2]))[::-1]]
    same, turned = ((found == other).flatten(1).all(1) for other in (images, mirrored))
    assert (same | turned).all()
    # six standard deviations of 2,000 fair coins
    assert shape[2] == 1 or abs(int(turned.sum()) - 1000) < 6 * 500**0.5
    square = torch.rand(9, 16, device=device)
    assert torch.equal(flipped(square, rows[:9], 5, 2), flipped(square, rows[:9], 5, 2, (1, 4, 4)))


def test_flips_depend_on_sample_step_and_seed_and_not_on_the_shift(device):
    x = torch.rand(1, 36, device=device).expand(4000, -1).contiguous()
    rows = torch.arange(4000, device=device)
    one = flipped(x, rows, 4, 0)
    assert torch.equal(one, flipped(x, rows, torch.tensor(4, device=device), 0))
    assert torch.equal(one[10:20], flipped(x[10:20], rows[10:20], 4, 0))
    assert not torch.equal(one, flipped(x, rows, 5, 0)) and not torch.equal(one, flipped(x, rows, 4, 1))
    assert torch.equal(one.cpu(), flipped(x.cpu(), rows.cpu(), 4, 0))
    turned = (one != x).any(1)
    again = (flipped(x, rows, 5, 0) != x).any(1)
    assert abs(int((turned == again).sum()) - 2000) < 6 * 1000**0.5
    # among the images of every shift, about half are flipped
    moved = shifted(x, rows, 4, 0, 1)
    _, shift = torch.unique(moved, dim=0, return_inverse=True)
    for k in range(9):
        some = turned[shift == k]
        assert len(some) > 300 and abs(int(some.sum()) - len(some) / 2) < 6 * (len(some) / 4) ** 0.5


def test_what_is_no_square_image_is_refused():
    with pytest.raises(ValueError, match="12 features make no square image"):
        shape_of_images(12)
