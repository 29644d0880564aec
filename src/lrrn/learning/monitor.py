"""Monitoring of a training run: failed solves, diverging energies, ill-conditioned Hessians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lrrn.energy.lifted import matrix_hessian
from lrrn.linalg import verified
from lrrn.linalg.operator_hessian import OperatorHessian, hessian_of
from lrrn.network import LRRN
from lrrn.qp import QPSolution

FIRST_STEPS = 20
"""Steps of a power iteration from a random vector."""


class DivergenceError(ArithmeticError):
    """Training has diverged. The message names the epoch, the layer and a remedy."""


@final
@dataclass
class SolveCounts:
    """Accumulates the results of an epoch's solves; an observer for :class:`SolvePolicy`."""

    samples: int = 0
    sweeps: int = 0
    missed: int = 0
    missed_phase: str = ""

    def __call__(self, solution: QPSolution, scale: Tensor, tol: float, what: str) -> None:
        """Count one solve."""
        n = len(scale)
        self.samples += n
        if n == 0:
            return
        self.sweeps += int(solution.n_sweeps.sum())
        missed = 0 if solution.certain else int(solution.status.count_nonzero())  # CONVERGED is 0
        if missed:
            self.missed += missed
            self.missed_phase = what


def weight_norms(net: LRRN, vectors: list[Tensor], iterations: int) -> list[float]:
    """Return :func:`layer_norms` as Python floats."""
    if net.is_dense and vectors[0].device.type == "cpu" and vectors[0].dtype in (torch.float32, torch.float64):
        # the same without a hundred calls of torch
        from lrrn.kernels.cpu.power_iteration import largest_singular

        return [largest_singular(w.detach().numpy(), v.numpy(), iterations) for w, v in zip(net.W, vectors, strict=True)]
    return [float(norm) for norm in layer_norms(net, vectors, iterations)]


@torch.no_grad()
def layer_norms(net: LRRN, vectors: list[Tensor], iterations: int) -> list[Tensor]:
    """Estimate every layer's spectral norm from below by power iteration; ``vectors`` persist between calls.

    For monitoring and control only. Certificates do not use these estimates.
    """
    norms = []
    for layer, w, v in zip(net.layers, net.W, vectors, strict=True):
        operator = layer.operator(w)
        for _ in range(iterations):
            v.copy_(operator.adjoint(operator.apply(v[None]))[0])
            v.div_(torch.linalg.vector_norm(v).clamp_(min=1e-30))
        norms.append(torch.linalg.vector_norm(operator.apply(v[None])))
    return norms


def start_vectors(net: LRRN) -> list[Tensor]:
    """Return fixed start vectors for :func:`weight_norms`, one per layer."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(layer.columns, generator=generator).to(w) for layer, w in zip(net.layers, net.W, strict=True)]


def condition_number(net: LRRN) -> float:
    """Estimate the condition number of the free phase's Hessian."""
    energy = net.energy_now()
    if energy.n_free == 0:
        return 1.0
    if isinstance(energy.free_hessian, OperatorHessian):
        return energy.free_hessian.estimate_condition()
    return verified.estimate_condition(matrix_hessian(energy.to(torch.float64)))


@final
class ConditionLimit:
    """Keeps the estimated condition number of H below a bound, by scaling down the hidden weights.

    The largest eigenvalue is estimated by one step of a power iteration per call; the smallest is bounded by the structure.
    Nothing synchronises with a device.

    Attributes
    ----------
    vector : Tensor of shape (1, dim)
        Vector of the power iteration. It persists between calls, and is part of the state of a run.
    """

    def __init__(self, net: LRRN, bound: float) -> None:
        self._net, self._bound = net, bound
        energy = net.energy_now()
        self._n_free = energy.n_free
        generator = torch.Generator().manual_seed(0)
        self.vector = torch.randn((1, sum(energy.free_sizes)), generator=generator).to(net.W[0].detach())

    @torch.no_grad()
    def enforce(self, steps: int = 1) -> None:
        """Scale the hidden weights if the estimate exceeds the bound, after some steps of the power iteration."""
        net = self._net
        if self._n_free == 0:
            return
        operators = [layer.operator(w.detach()) for layer, w in zip(net.layers, net.W, strict=True)]
        discounts = [net.gamma**k for k in range(len(operators))]
        hessian = hessian_of(operators, discounts, net.beta, self._n_free, False)
        for _ in range(steps):
            # in place, as in a CUDA graph
            self.vector.copy_(hessian.matmul(self.vector / torch.linalg.vector_norm(self.vector).clamp_(min=1e-30)))
        # eigenvalues are at least a_0, and what exceeds it grows with the squares of the weights
        largest = torch.linalg.vector_norm(self.vector)
        smallest = hessian.smallest_eigenvalue()
        allowed = self._bound * smallest - discounts[0]
        if allowed <= 0 and all(beta > 0 for beta in net.beta[1 : self._n_free]):
            # smallest does not depend on the weights then, and only weights of zero would do
            raise ValueError(
                f"max_condition={self._bound:g} cannot be held: with gamma={net.gamma:g} and beta={net.beta}, the bound on the "
                f"condition number is at least {discounts[0] / max(smallest, 1e-300):.3g} whatever the weights are. Raise "
                "max_condition or gamma, or leave max_condition out"
            )
        factor = (max(allowed, 0.0) / (largest - discounts[0]).clamp(min=1e-30)).sqrt().clamp(max=1)
        for w in net.W[: self._n_free]:
            w.mul_(factor)


def check_health(
    net: LRRN, epoch: int, loss: float, counts: SolveCounts, condition: float, norms: list[float], max_unconverged: float
) -> None:
    """Raise :class:`DivergenceError` if training has diverged.

    ``epoch`` counts from 1, ``loss`` is its mean and ``counts`` are of its solves. ``condition`` is the condition number of H,
    and ``norms`` are the spectral norms of the weights.
    """
    worst = max(range(len(norms)), key=lambda k: norms[k] if norms[k] == norms[k] else float("inf"))
    layer = f"layer {worst} has weights of spectral norm {norms[worst]:.3g}"
    if loss != loss or loss in (float("inf"), float("-inf")):
        raise DivergenceError(
            f"the loss became non-finite in epoch {epoch}; {layer}. Lower learning_rate, or scale the inputs to about [0, 1]"
        )
    limit = 0.1 / torch.finfo(net.W[0].dtype).eps
    if not condition < limit:
        raise DivergenceError(
            f"the Hessian's condition number reached {condition:.1e} in epoch {epoch}, beyond what {net.W[0].dtype} can solve; "
            f"{layer}. Set max_weight_norm or decoupled_weight_decay, lower learning_rate, or train in float64"
        )
    if counts.missed > max_unconverged * max(counts.samples, 1):
        raise DivergenceError(
            f"in epoch {epoch}, {counts.missed} of {counts.samples} solves did not converge (last: {counts.missed_phase}); "
            f"{layer}. Set max_weight_norm or decoupled_weight_decay, lower learning_rate, or raise max_sweeps"
        )
