"""Arguments that the compiled kernels for the CPU share; separate from the kernels, which take a second to import."""

from __future__ import annotations

from typing import Any, NamedTuple


class Network(NamedTuple):
    """A network. All arrays have the dtype of the parameters, except for offsets and sizes, which are int64."""

    flat: Any  # (p,): the parameters: all W, then all b, then all c
    w_at: Any  # (L,): where each W_k begins
    b_at: Any  # (L,): where each b_k begins; -1 if there is none
    c_at: Any
    sizes: Any  # (L + 1,)
    a: Any  # (L,): discounts a_k
    ab: Any  # (L,): a_k beta_k
    both: Any  # (L,): a_k (1 + beta_k)


class PackedQP(NamedTuple):
    """Hessian and bounds of a QP, in the layout of :func:`lrrn.kernels.cpu.coordinate_descent.descend`."""

    panels: Any  # (total,): the Hessian, panel by panel; zero where there is no unit
    layout: Any  # (n_panels, 4) int64: offset in panels, first unit, first row, number of rows; in padded numbers
    inverse_diagonal: Any  # (padded,)
    place: Any  # (dim,) int64: padded number of each unit
    lo: Any  # (1 or n, dim)
    hi: Any
