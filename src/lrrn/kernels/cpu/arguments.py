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


class Rule(NamedTuple):
    """How the parameters are updated: by Adam or AdamW, or by plain gradient descent if ``mean`` is empty."""

    decay: Any  # (p,): decoupled weight decay; negative for parameters that are not trained
    mean: Any  # (p or 0,): Adam's moving averages of the gradient and of its square
    square: Any
    taken: Any  # (k,): how many steps Adam has taken, the same number k times
    beta_mean: float
    beta_square: float
    eps: float
    penalty: float  # lambda: the loss has lambda |W_{L-1}|_F^2 added
    norms: Any  # (rows or 0, 2): the least and the largest norm of each row of W_{L-1}; no limits if empty


class Course(NamedTuple):
    """Consecutive steps of an epoch, and the data they are about."""

    inputs: Any  # (samples, d_0)
    targets: Any  # (samples, d_L), or empty
    weights: Any  # (samples or 0,): factors on the losses; one if empty
    activations: Any  # (samples or 0, free units), in and out: warm starts of the free phase
    order: Any  # (samples,) int64: the order of the epoch
    size: int  # samples of a step; the last may have fewer
    first: int  # the step to begin with
    rates: Any  # (steps,): learning rates of the steps to take


class Loss(NamedTuple):
    """A loss of the prediction: half the squared error, or cross-entropy with a margin; one number per step."""

    squared: bool
    margin: Any  # (steps,) float64
    temperature: Any
    size: Any  # of the adversarial perturbation of the inputs
    tol: float  # of the adjoint that finds its direction
    limit: float  # largest accepted relative residual there
