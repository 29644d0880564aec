"""Hessians and solves of one training step, in four kernels.

The hidden units of all layers are concatenated: W is the matrix of all weights between them, M = I - W, and diag(a) and
diag(e) hold, unit by unit, a_k of the layer below and a_k beta_k of the layer above. Then the Hessian is

    H = M^T diag(a) M + M diag(e) M^T + a_0 beta_0 W_0 W_0^T,

and index tables encode the depth. ``WIDTH`` is the number of hidden units, ``FIRST`` that of the first layer and ``LAST`` that
of the outputs, all padded to powers of two. ``pick_ptr`` holds the row indices of the batch in ``x_ptr`` and ``y_ptr``; other
arrays have one row per sample of the batch. :mod:`lrrn.kernels.cuda.derivatives` has the other three kernels of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lrrn.kernels.cuda.on_chip import halve, kkt_norm, refine, slope


@triton.jit
def product(a, b):
    """Return a product of float32 matrices in full float32 precision, up to the last bits."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def project(
    flat_ptr, x_ptr, pick_ptr, image_ptr, gram_ptr, back_ptr, size_ptr, n, d_0, d_1, c_at, c_size, span,
    FIRST: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Multiply the inputs, W_0 itself and c_0 by W_0^T, in tiles of rows; and sum (x + c_0)^2 for each input.

    Program (i, j) processes ``span`` columns and writes part j of every result; the parts are stored consecutively.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    inputs = tl.cdiv(n, TILE)
    weights = tl.cdiv(d_1, TILE)
    # one of the three: inputs, rows of W_0, c_0
    source, target, count, first = x_ptr, image_ptr, n, tile * TILE
    if tile >= inputs:
        source, target, count, first = flat_ptr, gram_ptr, d_1, (tile - inputs) * TILE
    if tile >= inputs + weights:
        source, target, count, first = flat_ptr + c_at, back_ptr, 1, 0
    rows = first + tl.arange(0, TILE)
    lines = rows.to(tl.int64)
    if tile < inputs:
        lines = tl.load(pick_ptr + rows, mask=rows < n, other=0)
    units = tl.arange(0, FIRST)
    total = tl.zeros((TILE, FIRST), dtype=tl.float32)
    size = tl.zeros((TILE,), dtype=tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, d_0), CHUNK):
        columns = start + tl.arange(0, CHUNK)
        inside = (rows[:, None] < count) & (columns[None, :] < d_0)
        if tile >= inputs + weights:
            inside = (rows[:, None] < count) & (columns[None, :] < c_size)
        some = tl.load(source + lines[:, None] * d_0 + columns[None, :], mask=inside, other=0.0)
        there = (units[None, :] < d_1) & (columns[:, None] < d_0)
        weight = tl.load(flat_ptr + units[None, :] * d_0 + columns[:, None], mask=there, other=0.0)
        total += product(some, weight)
        offset = tl.load(flat_ptr + c_at + columns, mask=columns < c_size, other=0.0)
        moved = tl.where(inside, some + offset[None, :], 0.0)
        size += tl.sum(moved * moved, axis=1)
    kept = (rows[:, None] < count) & (units[None, :] < d_1)
    tl.store(target + (part * count + rows[:, None]).to(tl.int64) * d_1 + units[None, :], total, mask=kept)
    if tile < inputs:
        tl.store(size_ptr + part * n + rows, size, mask=rows < n)


@triton.jit
def add_parts(ptr, place, stride, mask, PARTS: tl.constexpr):
    """Return the sum of the parts written by :func:`project`, ``stride`` entries apart."""
    total = tl.load(ptr + place, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * stride + place, mask=mask, other=0.0)
    return total


@triton.jit
def coupling(flat_ptr, map_ptr, rows, columns, WIDTH: tl.constexpr):
    """Return some rows and columns of M = I - W."""
    place = tl.load(map_ptr + rows[:, None] * WIDTH + columns[None, :])
    weights = tl.load(flat_ptr + place, mask=place >= 0, other=0.0)
    return tl.where(rows[:, None] == columns[None, :], 1.0, 0.0) - weights


@triton.jit
def assemble(
    flat_ptr, gram_ptr, back_ptr, map_ptr, b_map_ptr, c_map_ptr, below_ptr, above_ptr, bias_ptr, constant_ptr, h_ptr,
    dim, d_1, v_at, d_last, d_before, reach, last,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the Hessians of both phases, one square tile of each per program; the first column also writes q at x = 0.

    ``reach`` is a_0 beta_0, ``last`` a of the last layer, ``constant_ptr`` receives the energy of hidden biases at z = 0. The
    first part of ``gram_ptr`` becomes the sum of all parts, W_0 W_0^T.
    """
    units = tl.arange(0, WIDTH)
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    below = tl.load(below_ptr + units)
    above = tl.load(above_ptr + units)
    into = coupling(flat_ptr, map_ptr, units, rows, WIDTH)
    out_of = coupling(flat_ptr, map_ptr, rows, units, WIDTH)
    h = product(tl.trans(into), below[:, None] * coupling(flat_ptr, map_ptr, units, columns, WIDTH))
    h += product(out_of * above[None, :], tl.trans(coupling(flat_ptr, map_ptr, columns, units, WIDTH)))
    first = (rows[:, None] < d_1) & (columns[None, :] < d_1)
    tile = rows[:, None] * d_1 + columns[None, :]
    gram = add_parts(gram_ptr, tile, d_1 * d_1, first, PARTS)
    # no other program reads this tile, so the sum can replace the first part
    tl.store(gram_ptr + tile, gram, mask=first)
    h += reach * gram
    place = h_ptr + rows[:, None] * WIDTH + columns[None, :]
    tl.store(place, h)
    left = output_weights(flat_ptr, v_at, d_last, d_before, dim, rows, LAST)
    right = output_weights(flat_ptr, v_at, d_last, d_before, dim, columns, LAST)
    tl.store(place + WIDTH * WIDTH, h + last * product(tl.trans(left), right))
    if tl.program_id(1) == 0:
        b_place = tl.load(b_map_ptr + units)
        c_place = tl.load(c_map_ptr + units)
        b = tl.load(flat_ptr + b_place, mask=b_place >= 0, other=0.0)
        c = tl.load(flat_ptr + c_place, mask=c_place >= 0, other=0.0)
        bias = tl.sum(into * (below * b)[:, None], axis=0) - tl.sum(out_of * (above * c)[None, :], axis=1)
        bias += reach * add_parts(back_ptr, rows, d_1, rows < d_1, PARTS)
        tl.store(bias_ptr + rows, bias)
        if tl.program_id(0) == 0:
            # the biases of the first layer are combined with the input elsewhere
            tl.store(constant_ptr, 0.5 * tl.sum(tl.where(units < d_1, 0.0, below * b * b) + above * c * c))


@triton.jit
def halve_phases(h_ptr, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, dim, up, down, WIDTH: tl.constexpr):
    """Convert the Hessian of each phase to the arrays of :func:`solve`, one program per phase; see :func:`halve`."""
    phase = tl.program_id(0)
    units = tl.arange(0, WIDTH)
    place = phase * WIDTH * WIDTH
    h = tl.load(h_ptr + place + units[:, None] * WIDTH + units[None, :])
    halve(
        h, unit_ptr + phase * WIDTH, high_ptr + place, low_ptr + place, move_ptr + place, rates_ptr + phase * 2, dim, up, down,
        WIDTH,
    )  # fmt: skip


@triton.jit
def output_weights(flat_ptr, v_at, d_last, d_before, dim, units, LAST: tl.constexpr):
    """Return the last layer's weights on some units, with LAST rows: zero except for the units of the last hidden layer."""
    outputs = tl.arange(0, LAST)
    first = dim - d_before
    there = (outputs[:, None] < d_last) & (units[None, :] >= first) & (units[None, :] < dim)
    return tl.load(flat_ptr + v_at + outputs[:, None] * d_before + units[None, :] - first, mask=there, other=0.0)


@triton.jit
def phase(
    z, q, floor, ceiling, inside, rows, n, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, counts_ptr, dim,
    tol, limit, rounds, steps, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Solve one phase of a tile, starting at ``z``; return the solution and 1/2 z^T H z - q^T z; count unconverged samples."""
    units = tl.arange(0, WIDTH)
    square = units[:, None] * WIDTH + units[None, :]
    unit = tl.load(unit_ptr + units, mask=units < dim, other=1.0)[None, :]
    scaled, lo, hi = q * unit, floor / unit, ceiling / unit
    z = refine(z / unit, scaled, lo, hi, high_ptr, low_ptr, move_ptr, rates_ptr, square, rounds, steps, WIDTH, TILE)
    out = tl.minimum(tl.maximum(z * unit, floor), ceiling)
    out = tl.where(z <= lo, floor, tl.where(z >= hi, ceiling, out))
    out = tl.where(inside, out, 0.0)
    g = slope(out / unit, scaled, high_ptr, low_ptr, square) / unit
    residual = kkt_norm(out, g, floor, ceiling, inside)
    relative = residual / tl.maximum(tl.sqrt(tl.sum(q * q, axis=1)), 1.0)
    one = tl.where(rows < n, 1, 0).to(tl.int64)
    tl.atomic_add(counts_ptr, tl.sum(one))
    tl.atomic_add(counts_ptr + 1, tl.sum(one) * rounds * steps)
    tl.atomic_add(counts_ptr + 2, tl.sum(tl.where(relative <= tol, 0, one)))
    tl.atomic_add(counts_ptr + 3, tl.sum(tl.where(relative <= limit, 0, one)))
    return out, 0.5 * tl.sum(tl.where(inside, out * (g - q), 0.0), axis=1)


@triton.jit
def free_phase(
    parts_ptr, start_ptr, bias_ptr, lo_ptr, hi_ptr, n, dim, d_1, pull,
    START: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Return a tile's rows and units, W_0 x, and its free phase: q, the bounds, where to start, and which entries exist.

    ``pull`` is a_0 (1 + beta_0), and ``parts_ptr`` is written by :func:`project` for the inputs.
    """
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    units = tl.arange(0, WIDTH)
    inside = (rows[:, None] < n) & (units[None, :] < dim)
    place = rows[:, None].to(tl.int64) * dim + units[None, :]
    first = (rows[:, None] < n) & (units[None, :] < d_1)
    image = add_parts(parts_ptr, rows[:, None].to(tl.int64) * d_1 + units[None, :], n * d_1, first, PARTS)
    q = tl.where(inside, tl.load(bias_ptr + units)[None, :] + pull * image, 0.0)
    floor = tl.load(lo_ptr + units, mask=units < dim, other=0.0)[None, :] + tl.zeros((TILE, WIDTH), dtype=tl.float32)
    ceiling = tl.load(hi_ptr + units, mask=units < dim, other=0.0)[None, :] + tl.zeros((TILE, WIDTH), dtype=tl.float32)
    z = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    if START:
        z = tl.load(start_ptr + place, mask=inside, other=0.0)
    return rows, units, image, q, floor, ceiling, tl.minimum(tl.maximum(z, floor), ceiling), inside, first, place


@triton.jit(do_not_specialize=["rounds", "steps"])  # a variant must not be compiled in a capture
def solve(
    flat_ptr, parts_ptr, size_ptr, image_ptr, y_ptr, pick_ptr, start_ptr, bias_ptr, constant_ptr, lo_ptr, hi_ptr,
    unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, point_ptr, change_ptr, loss_ptr, counts_ptr,
    n, dim, d_1, b_first_at, b_first_size, v_at, b_last_at, b_last_size, d_last, d_before, own, reach, last, tol, limit,
    rounds, steps,
    sign_free, sign_clamped, FREE: tl.constexpr, CLAMPED: tl.constexpr, START: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Solve the free phase, then the clamped phase warm-started from it, and write the losses.

    ``point_ptr`` receives the solution of the first phase that is solved, ``change_ptr`` that of the second minus it.
    ``parts_ptr`` and ``size_ptr`` are written by :func:`project` for the inputs; ``image_ptr`` receives the sum of the former.
    """
    rows, units, image, q, floor, ceiling, z, inside, first, place = free_phase(
        parts_ptr, start_ptr, bias_ptr, lo_ptr, hi_ptr, n, dim, d_1, own + reach, START, PARTS, WIDTH, TILE
    )
    tl.store(image_ptr + rows[:, None].to(tl.int64) * d_1 + units[None, :], image, mask=first)
    b = tl.load(flat_ptr + b_first_at + units, mask=units < b_first_size, other=0.0)[None, :]
    moved = tl.where(first, image + b, 0.0)
    size = add_parts(size_ptr, rows, n, rows < n, PARTS)
    constant = 0.5 * (own * tl.sum(moved * moved, axis=1) + reach * size)
    constant += tl.load(constant_ptr)
    loss = tl.zeros((TILE,), dtype=tl.float32)
    if FREE:
        z, value = phase(
            z, q, floor, ceiling, inside, rows, n, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, counts_ptr, dim,
            tol, limit, rounds, steps, WIDTH, TILE,
        )  # fmt: skip
        tl.store(point_ptr + place, z, mask=inside)
        loss += sign_free * (value + constant)
    if CLAMPED:
        outputs = tl.arange(0, LAST)
        given = (rows[:, None] < n) & (outputs[None, :] < d_last)
        picked = tl.load(pick_ptr + rows, mask=rows < n, other=0)
        y = tl.load(y_ptr + picked[:, None] * d_last + outputs[None, :], mask=given, other=0.0)
        offset = tl.load(flat_ptr + b_last_at + outputs, mask=outputs < b_last_size, other=0.0)
        pull = tl.where(given, y - offset[None, :], 0.0)
        q += last * product(pull, output_weights(flat_ptr, v_at, d_last, d_before, dim, units, LAST))
        clamped, value = phase(
            z, q, floor, ceiling, inside, rows, n, unit_ptr + WIDTH, high_ptr + WIDTH * WIDTH, low_ptr + WIDTH * WIDTH,
            move_ptr + WIDTH * WIDTH, rates_ptr + 2, counts_ptr, dim, tol, limit, rounds, steps, WIDTH, TILE,
        )  # fmt: skip
        if FREE:
            tl.store(change_ptr + place, clamped - z, mask=inside)
        else:
            tl.store(point_ptr + place, clamped, mask=inside)
        loss += sign_clamped * (value + constant + 0.5 * last * tl.sum(pull * pull, axis=1))
    tl.store(loss_ptr + rows, loss, mask=rows < n)


@triton.jit
def loss_of(scores, target, given, margin, temperature, wrong, SQUARED: tl.constexpr):
    """Return the losses of a tile of scores, T CE((y - m onehot) / T) or half the squared error, and their derivatives.

    Unless ``SQUARED``, targets are one-hot. With ``wrong``, log sum exp is over the wrong logits only: an attack increases it.
    """
    if SQUARED:
        slope = tl.where(given, scores - target, 0.0)
        loss = 0.5 * tl.sum(slope * slope, axis=1)
    else:
        logits = (scores - margin * target) / temperature
        right = tl.sum(tl.where(target != 0, target * logits, 0.0), axis=1)
        logits = tl.where(given & ((target <= 0) | (wrong == 0)), logits, -1e30)
        largest = tl.max(logits, axis=1)
        share = tl.exp(logits - largest[:, None])
        total = tl.sum(share, axis=1)
        loss = temperature * (tl.log(total) + largest - right)
        # of the right class, the share minus one is minus that of the others: without cancellation where the loss is small
        others = tl.sum(tl.where(target > 0, 0.0, share), axis=1)
        slope = tl.where(given, tl.where(target > 0, -others[:, None], share) / total[:, None], 0.0)
    return loss, slope


@triton.jit(do_not_specialize=["rounds", "steps"])  # a variant must not be compiled in a capture
def predict(
    flat_ptr, parts_ptr, gram_ptr, y_ptr, pick_ptr, start_ptr, bias_ptr, lo_ptr, hi_ptr, progress_ptr,
    unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, point_ptr, change_ptr, loss_ptr, slope_ptr, push_ptr, counts_ptr,
    n, dim, d_1, v_at, b_last_at, b_last_size, d_last, d_before, pull, tol, limit, rounds, steps,
    margin, margin_grows, temperature, temperature_grows, eps, eps_grows,
    PASSES: tl.constexpr, SQUARED: tl.constexpr, START: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, LAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Solve the free phase and its adjoint, and write the loss of the prediction and its derivatives in the scores.

    With two passes, the first is at the inputs, and the second at the inputs x + W_0^T p of an attack. ``push_ptr`` receives p;
    x itself is not needed. The solves of the second pass start from those of the first. ``point_ptr`` receives the solution of
    each pass, ``change_ptr`` minus the adjoint w of the last: E(z - w / 2) - E(z + w / 2) has the derivatives of the loss. A
    number of the loss at the share ``progress_ptr`` of training is what it begins with plus that share of what it ``grows`` by.
    """
    rows, units, _image, q, floor, ceiling, z, inside, first, place = free_phase(
        parts_ptr, start_ptr, bias_ptr, lo_ptr, hi_ptr, n, dim, d_1, pull, START, PARTS, WIDTH, TILE
    )
    progress = tl.load(progress_ptr).to(tl.float32)
    margin += margin_grows * progress
    temperature += temperature_grows * progress
    eps += eps_grows * progress
    outputs = tl.arange(0, LAST)
    given = (rows[:, None] < n) & (outputs[None, :] < d_last)
    picked = tl.load(pick_ptr + rows, mask=rows < n, other=0)
    target = tl.load(y_ptr + picked[:, None] * d_last + outputs[None, :], mask=given, other=0.0)
    offset = tl.load(flat_ptr + b_last_at + outputs, mask=outputs < b_last_size, other=0.0)[None, :]
    weights = output_weights(flat_ptr, v_at, d_last, d_before, dim, units, LAST)
    w = tl.zeros((TILE, WIDTH), dtype=tl.float32)
    for attempt in range(PASSES):
        attacks = attempt + 1 < PASSES
        z, _ = phase(
            z, q, floor, ceiling, inside, rows, n, unit_ptr, high_ptr, low_ptr, move_ptr, rates_ptr, counts_ptr, dim,
            tol, limit, rounds, steps, WIDTH, TILE,
        )  # fmt: skip
        tl.store(point_ptr + (attempt * n + rows)[:, None].to(tl.int64) * dim + units[None, :], z, mask=inside)
        scores = product(z, tl.trans(weights)) + offset
        loss, slopes = loss_of(scores, target, given, margin, temperature, attacks, SQUARED)
        tl.store(loss_ptr + rows, loss, mask=rows < n)
        tl.store(slope_ptr + rows[:, None] * d_last + outputs[None, :], slopes, mask=given)
        # the adjoint is linear in v, so solve it for unit vectors: tol is then relative to the gradient itself
        v = product(slopes, weights)
        size = tl.sqrt(tl.sum(v * v, axis=1))[:, None]
        held = (z <= floor) | (z >= ceiling) | (inside == 0)
        far = tl.where(held, 0.0, float("inf"))
        w, _ = phase(
            tl.where(held, 0.0, w), v / tl.where(size > 0, size, 1.0), -far, far, inside, rows, n, unit_ptr, high_ptr, low_ptr,
            move_ptr, rates_ptr, counts_ptr, dim, tol, limit, rounds, steps, WIDTH, TILE,
        )  # fmt: skip
        tl.store(change_ptr + place, -size * w, mask=inside)
        if PASSES > 1:
            if attacks:
                # the loss increases along W_0^T w_1, of norm (w_1^T G w_1)^1/2 with G = W_0 W_0^T
                square = (units[:, None] < d_1) & (units[None, :] < d_1)
                gram = tl.load(gram_ptr + units[:, None] * d_1 + units[None, :], mask=square, other=0.0)
                aim = tl.where(first, w, 0.0)
                moved = product(aim, gram)
                length = tl.sum(aim * moved, axis=1)
                step = tl.where(length > 0, eps / tl.sqrt(tl.where(length > 0, length, 1.0)), 0.0)[:, None]
                tl.store(push_ptr + rows[:, None] * d_1 + units[None, :], step * aim, mask=first)
                q += pull * step * moved
