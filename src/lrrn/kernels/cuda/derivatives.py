"""Derivatives of one training step, in three kernels, in the notation of ``training_step.py``.

They need the activations only through their second moments S and sums t over the batch. The contrastive loss compares two
phases, and so does the derivative of a loss of the prediction, z + w / 2 and z - w / 2. ``point_ptr`` and ``change_ptr`` then
hold a point and a change, and S and t are those of the change and of the midpoint, which is the point plus the share
``middle`` of the change: this avoids cancellation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lrrn.kernels.cuda.training_step import product


@triton.jit
def activations(point_ptr, change_ptr, rows, units, n, dim, share, BALANCED: tl.constexpr):
    """Return a tile of activations; where two phases are compared, the point plus a share of the change, and the change."""
    inside = (rows[:, None] < n) & (units[None, :] < dim)
    place = rows[:, None].to(tl.int64) * dim + units[None, :]
    z = tl.load(point_ptr + place, mask=inside, other=0.0)
    change = z
    if BALANCED:
        change = tl.load(change_ptr + place, mask=inside, other=0.0)
        z += share * change
    return z, change


@triton.jit
def moments(
    flat_ptr, image_ptr, y_ptr, pick_ptr, push_ptr, loss_ptr, total_ptr, weight_ptr, point_ptr, change_ptr, s_ptr, t_ptr,
    n, dim, d_1, b_first_at, b_first_size, d_last, sign, middle,
    BALANCED: tl.constexpr, PREDICTS: tl.constexpr, ATTACKED: tl.constexpr,
    WIDTH: tl.constexpr, LAST: tl.constexpr, STRIP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the moments S and t over the batch, for one square tile of units per program.

    Programs (i, j, 0) write a tile of S to ``s_ptr`` and, with j = 0, parts of t of the hidden units, then of the sum of the
    mismatches of the first layer, to ``t_ptr``. Programs (i, j, 1), for the last layer, write those of the clamped phase, with
    outputs times units after S, and sums of outputs and of weights after t. ``t_ptr`` has rows of WIDTH: t, mismatches, t
    clamped, outputs, and the two sums of weights. ``total_ptr`` receives the weighted sum of losses.

    With ``PREDICTS``, ``y_ptr`` holds the derivatives of the losses in the scores, a row per sample of the batch, and the last
    layer has no other moments than theirs. With ``ATTACKED``, the products of the change and of p in ``push_ptr`` come last.
    """
    last = tl.program_id(2)
    leads = tl.program_id(1) == 0
    strip = tl.program_id(0) * STRIP + tl.arange(0, STRIP)
    others = tl.program_id(1) * STRIP + tl.arange(0, STRIP)
    outputs = tl.arange(0, LAST)
    s = tl.zeros((STRIP, STRIP), dtype=tl.float32)
    pushes = tl.zeros((STRIP, STRIP), dtype=tl.float32)
    cross = tl.zeros((LAST, STRIP), dtype=tl.float32)
    t = tl.zeros((STRIP,), dtype=tl.float32)
    mismatch = tl.zeros((STRIP,), dtype=tl.float32)
    sums = tl.zeros((LAST,), dtype=tl.float32)
    share = 0.0
    total = 0.0
    b = tl.load(flat_ptr + b_first_at + strip, mask=strip < b_first_size, other=0.0)[None, :]
    for start in range(0, n, TILE):
        rows = start + tl.arange(0, TILE)
        plain = tl.load(weight_ptr + rows, mask=rows < n, other=0.0)
        weight = sign * plain
        if last == 0:
            total += tl.sum(plain * tl.load(loss_ptr + rows, mask=rows < n, other=0.0))
            z, change = activations(point_ptr, change_ptr, rows, others, n, dim, middle, BALANCED)
            z_strip, strip_change = activations(point_ptr, change_ptr, rows, strip, n, dim, middle, BALANCED)
            strip_weighted = weight[:, None] * strip_change
            s += product(tl.trans(z_strip), weight[:, None] * change)
            t += tl.sum(strip_weighted, axis=0)
            if BALANCED:
                s += product(tl.trans(strip_weighted), z)
                mismatch += tl.sum(strip_weighted, axis=0)
            else:
                first = (rows[:, None] < n) & (strip[None, :] < d_1)
                image = tl.load(image_ptr + rows[:, None].to(tl.int64) * d_1 + strip[None, :], mask=first, other=0.0)
                mismatch += tl.sum(strip_weighted - tl.where(first, image + b, 0.0) * weight[:, None], axis=0)
                share += tl.sum(weight)
            if ATTACKED:
                first = (rows[:, None] < n) & (others[None, :] < d_1)
                push = tl.load(push_ptr + rows[:, None].to(tl.int64) * d_1 + others[None, :], mask=first, other=0.0)
                pushes += product(tl.trans(strip_weighted), push)
        else:
            # of a difference of two phases, the change leads from the free phase to the clamped one
            z, _ = activations(point_ptr, change_ptr, rows, others, n, dim, 2 * middle, BALANCED)
            z_strip, _ = activations(point_ptr, change_ptr, rows, strip, n, dim, 2 * middle, BALANCED)
            strip_weighted = weight[:, None] * z_strip
            given = (rows[:, None] < n) & (outputs[None, :] < d_last)
            picked = rows.to(tl.int64)
            if not PREDICTS:
                picked = tl.load(pick_ptr + rows, mask=rows < n, other=0)
                s += product(tl.trans(z_strip), weight[:, None] * z)
                t += tl.sum(strip_weighted, axis=0)
                share += tl.sum(weight)
            y = tl.load(y_ptr + picked[:, None] * d_last + outputs[None, :], mask=given, other=0.0)
            cross += product(tl.trans(y), strip_weighted)
            sums += tl.sum(y * weight[:, None], axis=0)
    tl.store(s_ptr + last * WIDTH * WIDTH + strip[:, None] * WIDTH + others[None, :], s)
    if (last == 0) & leads:
        tl.store(t_ptr + strip, t)
        tl.store(t_ptr + WIDTH + strip, mismatch)
        if tl.program_id(0) == 0:
            tl.store(t_ptr + 4 * WIDTH, share)
            tl.store(total_ptr, total)
    if (last == 1) & leads:
        tl.store(s_ptr + 2 * WIDTH * WIDTH + outputs[:, None] * WIDTH + strip[None, :], cross)
        tl.store(t_ptr + 2 * WIDTH + strip, t)
        if tl.program_id(0) == 0:
            tl.store(t_ptr + 3 * WIDTH + outputs, sums)
            tl.store(t_ptr + 4 * WIDTH + 1, share)
    if ATTACKED:
        if last == 0:
            tl.store(s_ptr + (2 * WIDTH + LAST) * WIDTH + strip[:, None] * WIDTH + others[None, :], pushes)


@triton.jit
def first_layer(
    flat_ptr, x_ptr, pick_ptr, image_ptr, weight_ptr, point_ptr, change_ptr, s_ptr, t_ptr, out_ptr,
    n, dim, d_0, d_1, b_at, b_size, c_at, c_size, own, reach, sign,
    BALANCED: tl.constexpr, ATTACKED: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr, FIRST: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the derivatives in W_0, b_0 and c_0, one strip of columns of W_0 per program.

    With ``ATTACKED``, the inputs are x + W_0^T p.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    units = tl.arange(0, FIRST)
    there = units < d_1
    total = tl.zeros((FIRST, COLUMNS), dtype=tl.float32)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    b = tl.load(flat_ptr + b_at + units, mask=units < b_size, other=0.0)[None, :]
    for start in range(0, n, TILE):
        rows = start + tl.arange(0, TILE)
        inside = (rows[:, None] < n) & (columns[None, :] < d_0)
        picked = tl.load(pick_ptr + rows, mask=rows < n, other=0)
        x = tl.load(x_ptr + picked[:, None] * d_0 + columns[None, :], mask=inside, other=0.0)
        place = rows[:, None].to(tl.int64) * dim + units[None, :]
        first = (rows[:, None] < n) & there[None, :]
        weight = sign * tl.load(weight_ptr + rows, mask=rows < n, other=0.0)[:, None]
        if BALANCED:
            pull = (own + reach) * tl.load(change_ptr + place, mask=first, other=0.0)
        else:
            z = tl.load(point_ptr + place, mask=first, other=0.0)
            image = tl.load(image_ptr + rows[:, None].to(tl.int64) * d_1 + units[None, :], mask=first, other=0.0)
            pull = tl.where(first, (own + reach) * z - own * (image + b), 0.0)
            sums += tl.sum(x * weight, axis=0)
        total -= product(tl.trans(pull * weight), x)
    square = units[:, None] * WIDTH + units[None, :]
    s = tl.load(s_ptr + square, mask=there[:, None] & there[None, :], other=0.0)
    t = tl.load(t_ptr + units, mask=there, other=0.0)
    place = units[:, None] * d_0 + columns[None, :]
    kept = there[:, None] & (columns[None, :] < d_0)
    w = tl.load(flat_ptr + place, mask=kept, other=0.0)
    c = tl.load(flat_ptr + c_at + columns, mask=columns < c_size, other=0.0)
    s *= reach
    if ATTACKED:
        pushes = s_ptr + (2 * WIDTH + LAST) * WIDTH
        s -= (own + reach) * tl.load(pushes + square, mask=there[:, None] & there[None, :], other=0.0)
    total += product(s, w) - reach * t[:, None] * c[None, :]
    tl.store(out_ptr + place, total, mask=kept)
    share = tl.load(t_ptr + 4 * WIDTH)
    slopes = reach * (sums + c * share - tl.sum(w * t[:, None], axis=0))
    tl.store(out_ptr + c_at + columns, slopes, mask=columns < c_size)
    mismatch = tl.load(t_ptr + WIDTH + units, mask=there, other=0.0)
    if tl.program_id(0) == 0:
        tl.store(out_ptr + b_at + units, -own * mismatch, mask=units < b_size)


@triton.jit
def later_layers(
    flat_ptr, s_ptr, t_ptr, plan_ptr, factor_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write the derivatives in W_k, b_k and c_k for k >= 1: program (k - 1, i, j) writes a square tile of W_k.

    A row of ``plan_ptr`` holds the offsets of W, b and c, the lengths of b and c, the widths above and below, and the offsets
    of S of above and below, of below, of above, of t of above, of below, and of the sum of weights. A row of ``factor_ptr``
    holds a_k and a_k beta_k.
    """
    plan = plan_ptr + tl.program_id(0) * 13
    w_at, b_at, c_at = tl.load(plan), tl.load(plan + 1), tl.load(plan + 2)
    b_size, c_size = tl.load(plan + 3), tl.load(plan + 4)
    d, d_in = tl.load(plan + 5), tl.load(plan + 6)
    own = tl.load(factor_ptr + tl.program_id(0) * 2)
    reach = tl.load(factor_ptr + tl.program_id(0) * 2 + 1)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    units = tl.arange(0, BLOCK)
    up, low = rows < d, columns < d_in
    # the tile's rows of W and columns of the moments below, its rows of the moments above and columns of W
    left = tl.load(
        flat_ptr + w_at + rows[:, None] * d_in + units[None, :], mask=up[:, None] & (units[None, :] < d_in), other=0.0
    )
    below = tl.load(
        s_ptr + tl.load(plan + 8) + units[:, None] * WIDTH + columns[None, :],
        mask=(units[:, None] < d_in) & low[None, :], other=0.0,
    )  # fmt: skip
    above = tl.load(
        s_ptr + tl.load(plan + 9) + rows[:, None] * WIDTH + units[None, :], mask=up[:, None] & (units[None, :] < d), other=0.0
    )
    right = tl.load(
        flat_ptr + w_at + units[:, None] * d_in + columns[None, :], mask=(units[:, None] < d) & low[None, :], other=0.0
    )
    inside = up[:, None] & low[None, :]
    across = tl.load(s_ptr + tl.load(plan + 7) + rows[:, None] * WIDTH + columns[None, :], mask=inside, other=0.0)
    b = tl.load(flat_ptr + b_at + rows, mask=rows < b_size, other=0.0)
    c = tl.load(flat_ptr + c_at + columns, mask=columns < c_size, other=0.0)
    t_above = t_ptr + tl.load(plan + 10)
    t_below = t_ptr + tl.load(plan + 11)
    t_up = tl.load(t_above + rows, mask=up, other=0.0)
    t_low = tl.load(t_below + columns, mask=low, other=0.0)
    slopes = own * (b[:, None] * t_low[None, :] - across) - reach * (across + t_up[:, None] * c[None, :])
    slopes += product(own * left, below) + product(reach * above, right)
    tl.store(out_ptr + w_at + rows[:, None] * d_in + columns[None, :], slopes, mask=inside)
    share = tl.load(t_ptr + tl.load(plan + 12))
    if tl.program_id(2) == 0:
        image = tl.sum(left * tl.load(t_below + units, mask=units < d_in, other=0.0)[None, :], axis=1)
        tl.store(out_ptr + b_at + rows, own * (image + b * share - t_up), mask=rows < b_size)
    if tl.program_id(1) == 0:
        back = tl.sum(right * tl.load(t_above + units, mask=units < d, other=0.0)[:, None], axis=0)
        tl.store(out_ptr + c_at + columns, reach * (t_low + c * share - back), mask=columns < c_size)
