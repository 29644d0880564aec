"""One training step of an energy objective as a single compiled call: arrays in, arrays out.

The same mathematics as :mod:`lrrn.energy` and :mod:`lrrn.derivatives`, whose results the tests hold it to; at small batches the
cost of a step is that of calling forty small operations, and here there is one call. Parameters and derivatives are flat
vectors (all W, then all b, then all c).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from lrrn.solvers._cd_numba import descend, fill_panels, invert_diagonal, residuals

LANES = 16


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _matrix(flat: Any, at: int, rows: int, columns: int) -> Any:
    return flat[at : at + rows * columns].reshape((rows, columns))


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _pack(
    flat: Any,
    w_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    gram: Any,
    blocks: int,
    closed: bool,
    panels: Any,
    inverse_diagonal: Any,
) -> None:
    """Write the first ``blocks`` blocks of H as panels; if ``closed``, one more layer presses on the last of them.

    ``gram`` is W_0 W_0^T, the largest of the products.
    """
    at, unit = 0, 0
    below = np.empty((sizes[1], 0), flat.dtype)
    for k in range(blocks):
        d = sizes[k + 1]
        block = np.zeros((d, d), flat.dtype)
        if ab[k] != 0:
            if k == 0:
                block += gram
            else:
                w = _matrix(flat, w_at[k], d, sizes[k])
                np.dot(w, w.T, block)
            block *= ab[k]
        for j in range(d):
            block[j, j] += a[k]
        above = np.empty((0, d), flat.dtype)
        if k + 1 < blocks or closed:
            w = _matrix(flat, w_at[k + 1], sizes[k + 2], d)
            block += a[k + 1] * np.dot(w.T, w)
            for j in range(d):
                block[j, j] += ab[k + 1]
            if k + 1 < blocks:
                above = w * -both[k + 1]
        at = fill_panels(panels, at, below, block, above)
        unit = invert_diagonal(inverse_diagonal, unit, block)
        below = above


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _linear(
    flat: Any, w_at: Any, b_at: Any, c_at: Any, sizes: Any, a: Any, ab: Any, both: Any, blocks: int, x: Any, out: Any
) -> None:
    """Write q of the free phase over its first ``blocks`` blocks."""
    start = 0
    for k in range(blocks):
        d = sizes[k + 1]
        term = np.zeros(d, flat.dtype)
        if b_at[k] >= 0:
            term += a[k] * flat[b_at[k] : b_at[k] + d]
        if c_at[k] >= 0 and ab[k] != 0:
            w = _matrix(flat, w_at[k], d, sizes[k])
            term += ab[k] * np.dot(w, flat[c_at[k] : c_at[k] + sizes[k]])
        if k + 1 < blocks:
            _press(flat, w_at, b_at, c_at, sizes, a, ab, both, k + 1, term)
        if k == 0:
            image = np.dot(x, _matrix(flat, w_at[0], d, sizes[0]).T)
            factor = both[0]
            for i in range(x.shape[0]):
                for j in range(d):
                    out[i, j] = factor * image[i, j] + term[j]
        else:
            for i in range(x.shape[0]):
                for j in range(d):
                    out[i, start + j] = term[j]
        start += d


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _press(flat: Any, w_at: Any, b_at: Any, c_at: Any, sizes: Any, a: Any, ab: Any, both: Any, k: int, term: Any) -> None:
    """Add what the biases of layer ``k`` contribute to the linear term of the block below it."""
    if b_at[k] >= 0:
        w = _matrix(flat, w_at[k], sizes[k + 1], sizes[k])
        term -= a[k] * np.dot(flat[b_at[k] : b_at[k] + sizes[k + 1]], w)
    if c_at[k] >= 0 and ab[k] != 0:
        term -= ab[k] * flat[c_at[k] : c_at[k] + sizes[k]]


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _solve(
    panels: Any,
    layout: Any,
    inverse_diagonal: Any,
    place: Any,
    lo: Any,
    hi: Any,
    q: Any,
    tol: float,
    max_sweeps: int,
    cold: bool,
    z: Any,
    g: Any,
    sweeps: Any,
) -> bool:
    """Solve one phase from ``z`` on and leave the gradient in ``g``; return whether every sample converged."""
    n, dim = z.shape
    norms = np.empty(n, np.float64)
    used = np.zeros(n, np.int64)
    must = np.empty(n, np.float64)
    threshold = np.empty(n, np.float64)
    for i in range(n):
        square = 0.0
        for j in range(dim):
            square += np.float64(q[i, j]) * np.float64(q[i, j])
        must[i] = tol * max(1.0, np.sqrt(square))
        threshold[i] = (0.9 * must[i]) ** 2
    if cold:
        for i in range(n):
            for j in range(dim):
                g[i, j] = -q[i, j]
    else:
        residuals(panels, layout, inverse_diagonal, place, LANES, lo, hi, q, z, g, norms)
    descend(panels, layout, inverse_diagonal, place, LANES, lo, hi, threshold, max_sweeps, z, g, used)
    residuals(panels, layout, inverse_diagonal, place, LANES, lo, hi, q, z, g, norms)
    sweeps[0] += used.sum()
    for i in range(n):
        if not norms[i] <= must[i]:
            return False
    return True


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _clamp(
    flat: Any, w_at: Any, b_at: Any, sizes: Any, a: Any, ab: Any, both: Any, last: int, eliminated: bool, y: Any, q: Any
) -> None:
    """Turn q of the free phase, over the hidden blocks, into that of the clamped phase."""
    d, width = sizes[last], sizes[last + 1]
    start = q.shape[1] - d
    w = _matrix(flat, w_at[last], width, d)
    push = np.dot(y, w)
    constant = np.zeros(d, flat.dtype)
    if eliminated and b_at[last] >= 0:
        # the bias of an eliminated output is not in q yet
        constant -= a[last] * np.dot(flat[b_at[last] : b_at[last] + width], w)
    for i in range(q.shape[0]):
        for j in range(d):
            q[i, start + j] += both[last] * push[i, j] + constant[j]


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _block(out: Any, row: int, z: Any, start: int) -> None:
    """Copy a block of stacked activations into the rows of ``out`` from ``row`` on."""
    for i in range(z.shape[0]):
        for j in range(out.shape[1]):
            out[row + i, j] = z[i, start + j]


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _first_gradients(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    x: Any,
    z: Any,
    signs: Any,
    weight: Any,
    out: Any,
) -> None:
    """Write the derivatives of layer 0; ``z`` stacks the phases' first blocks, each with its sign."""
    n, d, d_in = x.shape[0], sizes[1], sizes[0]
    phases = signs.shape[0]
    w = _matrix(flat, w_at[0], d, d_in)
    push = np.zeros((n, d), flat.dtype)
    weighted = np.empty((phases * n, d), flat.dtype)
    total_sign = signs.sum()
    for p in range(phases):
        for i in range(n):
            factor = signs[p] * weight[i]
            for j in range(d):
                value = factor * z[p * n + i, j]
                weighted[p * n + i, j] = value
                push[i, j] += value
    total = np.zeros(d, flat.dtype)
    for i in range(n):
        for j in range(d):
            total[j] += push[i, j]
    factors = push * -both[0]
    d_b = -a[0] * total
    if total_sign != 0:
        image = np.dot(x, w.T)
        for i in range(n):
            for j in range(d):
                value = image[i, j]
                if b_at[0] >= 0:
                    value += flat[b_at[0] + j]
                value *= a[0] * total_sign * weight[i]
                factors[i, j] += value
                d_b[j] += value
    if b_at[0] >= 0:
        out[b_at[0] : b_at[0] + d] = d_b
    d_w = _matrix(out, w_at[0], d, d_in)
    scale = ab[0]
    if scale == 0:
        np.dot(factors.T, x, d_w)
        return
    weighted *= scale
    c = np.zeros(d_in, flat.dtype)
    if c_at[0] >= 0:
        c[:] = flat[c_at[0] : c_at[0] + d_in]
        d_c = out[c_at[0] : c_at[0] + d_in]
        d_c[:] = np.dot(total, w)
        d_c *= -scale
        if total_sign != 0:
            d_c += (scale * total_sign) * (np.dot(weight, x) + weight.sum() * c)
    if phases * n < d:
        # few samples: z^T (z W_0 - c) by way of the reconstructions, in one product with -R^T x
        back = np.dot(z, w)
        rows, columns = np.empty(((phases + 1) * n, d), flat.dtype), np.empty(((phases + 1) * n, d_in), flat.dtype)
        rows[:n], columns[:n] = factors, x
        rows[n:] = weighted
        for i in range(phases * n):
            for j in range(d_in):
                columns[n + i, j] = back[i, j] - c[j]
        np.dot(rows.T, columns, d_w)
        return
    np.dot(factors.T, x, d_w)
    product = np.dot(np.dot(weighted.T, z), w)
    for i in range(d):
        pull = scale * total[i]
        for j in range(d_in):
            d_w[i, j] += product[i, j] - pull * c[j]


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _later_gradients(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    k: int,
    below: Any,
    above: Any,
    weight: Any,
    out: Any,
) -> None:
    """Write the derivatives of layer ``k >= 1``; rows of ``below`` and ``above`` count with ``weight``."""
    d, d_in = sizes[k + 1], sizes[k]
    w = _matrix(flat, w_at[k], d, d_in)
    d_w = _matrix(out, w_at[k], d, d_in)
    mismatch = np.dot(below, w.T)
    for i in range(above.shape[0]):
        factor = -a[k] * weight[i]
        for j in range(d):
            value = above[i, j] - mismatch[i, j]
            if b_at[k] >= 0:
                value -= flat[b_at[k] + j]
            value *= factor
            mismatch[i, j] = value
            if b_at[k] >= 0:
                out[b_at[k] + j] += value
    np.dot(mismatch.T, below, d_w)
    if ab[k] != 0:
        mismatch = np.dot(above, w)
        for i in range(above.shape[0]):
            factor = ab[k] * weight[i]
            for j in range(d_in):
                value = mismatch[i, j] - below[i, j]
                if c_at[k] >= 0:
                    value -= flat[c_at[k] + j]
                value *= factor
                mismatch[i, j] = value
                if c_at[k] >= 0:
                    out[c_at[k] + j] -= value
        d_w += np.dot(above.T, mismatch)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _constant(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    k: int,
    below: Any,
    above: Any,
    out: Any,
    sign: Any,
) -> None:
    """Add ``sign`` times the energy of layer ``k`` per sample, between two given layers, to ``out``."""
    d, d_in = sizes[k + 1], sizes[k]
    w = _matrix(flat, w_at[k], d, d_in)
    forth = np.dot(below, w.T)
    back = np.dot(above, w)
    for i in range(above.shape[0]):
        regression, reconstruction = 0.0, 0.0
        for j in range(d):
            value = above[i, j] - forth[i, j]
            if b_at[k] >= 0:
                value -= flat[b_at[k] + j]
            regression += value * value
        if ab[k] != 0:
            for j in range(d_in):
                value = back[i, j] - below[i, j]
                if c_at[k] >= 0:
                    value -= flat[c_at[k] + j]
                reconstruction += value * value
        out[i] += sign * 0.5 * (a[k] * regression + ab[k] * reconstruction)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def energy_step(
    flat: Any,  # (p,): the parameters
    w_at: Any,  # (L,) int64: where each W_k begins
    b_at: Any,  # (L,) int64: where each b_k begins, -1 if there is none
    c_at: Any,
    sizes: Any,  # (L + 1,) int64
    a: Any,  # (L,): discounts a_k, in the dtype of flat, as is everything that is neither an index nor a tolerance
    ab: Any,  # (L,): a_k beta_k
    both: Any,  # (L,): a_k (1 + beta_k)
    eliminated: bool,  # whether the output is not an unknown of the free phase
    plan_free: Any,  # layout, place, padded units and total length of the free phase's panels
    plan_clamped: Any,
    lo: Any,  # (1, d_1 + ... + d_L)
    hi: Any,
    gram: Any,  # (d_1, d_1): W_0 W_0^T; not read if beta_0 is 0
    x: Any,  # (n, d_0)
    y: Any,  # (n, d_L); not read if sign_clamped is 0
    weight: Any,  # (n,): the factor on each sample's loss
    sign_free: Any,  # factor on the free energy, 0 to leave that phase out
    sign_clamped: Any,
    tol: float,
    max_sweeps: int,
    cold: bool,  # whether z_free holds the cold start, zero
    z_free: Any,  # (n, free units): where to start; out: the solution
    z_clamped: Any,  # (n, hidden units), likewise, but it starts from the free phase if that was solved
    sweeps: Any,  # (1,) int64, added to
    losses: Any,  # (n,), out
    out: Any,  # (p,): derivatives of sum of weight * (sign_clamped E(zhat) + sign_free E(z*)); zero on entry
) -> int:
    """Return 0 if all went well, 1 if the free phase did not converge everywhere, 2 if the clamped phase did not."""
    n, n_layers = x.shape[0], w_at.shape[0]
    n_free = n_layers - 1 if eliminated else n_layers
    hidden = z_clamped.shape[1]
    q = np.empty(z_free.shape, flat.dtype)
    g = np.empty(z_free.shape, flat.dtype)
    _linear(flat, w_at, b_at, c_at, sizes, a, ab, both, n_free, x, q)
    free, clamped = sign_free != 0, sign_clamped != 0
    if free:
        layout, place, padded, total = plan_free
        panels, inverse = np.zeros(total, flat.dtype), np.zeros(padded, flat.dtype)
        _pack(flat, w_at, sizes, a, ab, both, gram, n_free, False, panels, inverse)
        dim = z_free.shape[1]
        bounds = np.ascontiguousarray(lo[:, :dim]), np.ascontiguousarray(hi[:, :dim])
        if not _solve(panels, layout, inverse, place, bounds[0], bounds[1], q, tol, max_sweeps, cold, z_free, g, sweeps):
            return 1
        for i in range(n):
            value = 0.0
            for j in range(dim):
                value += np.float64(z_free[i, j]) * (np.float64(g[i, j]) - np.float64(q[i, j]))
            losses[i] = sign_free * 0.5 * value
    else:
        losses[:] = 0
    if clamped:
        layout, place, padded, total = plan_clamped
        panels, inverse = np.zeros(total, flat.dtype), np.zeros(padded, flat.dtype)
        _pack(flat, w_at, sizes, a, ab, both, gram, n_layers - 1, True, panels, inverse)
        q_clamped = np.ascontiguousarray(q[:, :hidden])
        g_clamped = np.empty((n, hidden), flat.dtype)
        _clamp(flat, w_at, b_at, sizes, a, ab, both, n_layers - 1, eliminated, y, q_clamped)
        if free:
            z_clamped[:] = z_free[:, :hidden]
        bounds = np.ascontiguousarray(lo[:, :hidden]), np.ascontiguousarray(hi[:, :hidden])
        if not _solve(
            panels,
            layout,
            inverse,
            place,
            bounds[0],
            bounds[1],
            q_clamped,
            tol,
            max_sweeps,
            cold and not free,
            z_clamped,
            g_clamped,
            sweeps,
        ):
            return 2
        for i in range(n):
            value = 0.0
            for j in range(hidden):
                value += np.float64(z_clamped[i, j]) * (np.float64(g_clamped[i, j]) - np.float64(q_clamped[i, j]))
            losses[i] += sign_clamped * 0.5 * value
    _add_constants(flat, w_at, b_at, c_at, sizes, a, ab, both, eliminated, x, y, sign_free, sign_clamped, losses)
    _gradients(
        flat, w_at, b_at, c_at, sizes, a, ab, both, n_free, x, y, weight, sign_free, sign_clamped, z_free, z_clamped, out
    )
    return 0


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _add_constants(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    eliminated: bool,
    x: Any,
    y: Any,
    sign_free: Any,
    sign_clamped: Any,
    losses: Any,
) -> None:
    """Add what the phases' energies are at zero activations, which their QPs leave out."""
    n, n_layers = x.shape[0], w_at.shape[0]
    last = n_layers - 1
    common = sign_free + sign_clamped
    if common != 0:
        _constant(flat, w_at, b_at, c_at, sizes, a, ab, both, 0, x, np.zeros((n, sizes[1]), flat.dtype), losses, common)
    for k in range(1, n_layers):
        below, above = np.zeros((n, sizes[k]), flat.dtype), np.zeros((n, sizes[k + 1]), flat.dtype)
        if k < last:
            if common != 0:
                _constant(flat, w_at, b_at, c_at, sizes, a, ab, both, k, below, above, losses, common)
            continue
        if sign_clamped != 0:
            _constant(flat, w_at, b_at, c_at, sizes, a, ab, both, k, below, y, losses, sign_clamped)
        if sign_free != 0 and not eliminated:
            _constant(flat, w_at, b_at, c_at, sizes, a, ab, both, k, below, above, losses, sign_free)


@njit(nogil=True, cache=True, error_model="numpy", boundscheck=False)  # type: ignore[untyped-decorator]
def _gradients(
    flat: Any,
    w_at: Any,
    b_at: Any,
    c_at: Any,
    sizes: Any,
    a: Any,
    ab: Any,
    both: Any,
    n_free: int,
    x: Any,
    y: Any,
    weight: Any,
    sign_free: Any,
    sign_clamped: Any,
    z_free: Any,
    z_clamped: Any,
    out: Any,
) -> None:
    n, n_layers = x.shape[0], w_at.shape[0]
    free, clamped = sign_free != 0, sign_clamped != 0
    phases = int(free) + int(clamped)
    signs = np.empty(phases, flat.dtype)
    if clamped:
        signs[0] = sign_clamped
    if free:
        signs[phases - 1] = sign_free
    # the clamped phase comes first, so that what the free phase lacks at the top is a tail
    above = np.empty((phases * n, sizes[1]), flat.dtype)
    rows = np.empty(phases * n, flat.dtype)
    for p in range(phases):
        for i in range(n):
            rows[p * n + i] = signs[p] * weight[i]
    if clamped:
        _block(above, 0, z_clamped, 0)
    if free:
        _block(above, (phases - 1) * n, z_free, 0)
    _first_gradients(flat, w_at, b_at, c_at, sizes, a, ab, both, x, above, signs, weight, out)
    start = sizes[1]
    for k in range(1, n_layers):
        below = above
        top = k == n_layers - 1
        in_free = free and k < n_free
        used = n * (int(clamped) + int(in_free))
        if used == 0:
            continue
        above = np.empty((used, sizes[k + 1]), flat.dtype)
        if clamped:
            if top:
                _block(above, 0, y, 0)
            else:
                _block(above, 0, z_clamped, start)
        if in_free:
            _block(above, used - n, z_free, start)
        _later_gradients(flat, w_at, b_at, c_at, sizes, a, ab, both, k, below[:used], above, rows[:used], out)
        start += sizes[k + 1]
