"""The lifted network as a torch module: its forward pass minimises the energy, its backward pass solves the adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from lrrn import bounds
from lrrn.bounds import LipschitzBound
from lrrn.bounds.multiplier import network_multipliers
from lrrn.energy import LiftedEnergy
from lrrn.energy.constraints import ConstraintSpec, interval
from lrrn.network.checks import check_input, checked_target, same, stacked, vectors
from lrrn.network.graph_op import graph_prediction
from lrrn.network.implicit import minimiser, prediction, without_autocast
from lrrn.network.judging import judged
from lrrn.network.layers import Conv, checked_architecture, layer_shapes, per_unit, unfolds
from lrrn.network.policy import SolvePolicy
from lrrn.network.solution import ON_FAILURE, Solution, check_on_failure
from lrrn.network.structure import checked_beta, checked_gamma, checked_solving, hidden_intervals, initial_weight
from lrrn.qp import DEFAULT_TOL
from lrrn.solvers import solve

LIPSCHITZ_METHODS = ("auto", "paper", "spectral", "multiplier")
FLOAT32_FLOOR = 4e-6
"""Smallest tolerance that float32 can resolve; below it, inference runs in float64."""
STRUCTURE = frozenset(("architecture", "is_dense", "layers", "sizes", "beta", "gamma", "intervals"))
"""Read-only attributes: bounds, solves and cached results depend on them."""


@final
class LRRN(nn.Module):
    """A lifted regression/reconstruction network (Høier and Zach, 2020).

    The prediction is the last block of the minimiser of a convex energy; its Lipschitz constant is bounded by construction.

    Parameters
    ----------
    sizes : sequence of int, tuple and Conv
        Widths d_0, ..., d_L of the input, the hidden layers and the output. A hidden layer may be a :class:`lrrn.Conv`, and the
        input is then the shape of the images, (channels, height, width).
    beta : float or sequence of L floats, default=1.0
        Weight of each layer's reconstruction term. A single number stands for ``(beta, ..., beta, 0)``.
    gamma : float, default=1/8
        Discount of later layers: layer k has weight gamma^k.
    constraint : {"free", "nonneg", "box"}, (lo, hi), or a list of L - 1 of these, default="nonneg"
        Feasible set of the hidden activations: one for all hidden layers, or one per layer.
    output_constraint : {"free", "nonneg", "box"} or (lo, hi), default="free"
        Feasible set of the output.
    bias, reconstruction_bias : bool, default=True
        Whether the biases b_k and c_k exist.
    init : {"glorot", "orthogonal", "uniform"}, default="glorot"
        Initial weights; biases start at zero. "uniform" is the default of torch.nn.Linear, within 1 / sqrt(d_k); on MNIST it
        learns faster than "glorot" at the paper's settings.
    generator : torch.Generator, optional
        Source of randomness for the initial weights; torch's global one if not given.
    device, dtype : optional
        Device and dtype of the parameters.
    solver : str, default="auto"
        Solver of the differentiable passes; see :func:`lrrn.solvers.solve`.
    tol : float, optional
        Tolerance of the differentiable passes; by default as tight as the dtype allows at little cost.
    max_sweeps : int, default=1000
        Maximum number of sweeps in the differentiable passes.

    Attributes
    ----------
    architecture : tuple
        The argument ``sizes``.
    sizes, beta, gamma, intervals
        The structure, read-only. All but ``gamma`` are tuples. ``sizes`` has the number of units of every layer.
    layers : tuple of LayerShape
        How the weights of every layer act.
    is_dense : bool
        Whether the weights of all layers are plain matrices.
    W, b, c : ParameterList
        ``W[k]`` of shape (d_{k+1}, d_k), ``b[k]`` of shape (d_{k+1},), ``c[k]`` of shape (d_k,); None if disabled. Of a
        convolution, (channels, in_channels, kernel, kernel), (channels,) and (in_channels,).

    Examples
    --------
    >>> import torch, lrrn
    >>> net = lrrn.LRRN(sizes=(784, 64, 64, 10), generator=torch.Generator().manual_seed(0))
    >>> net(torch.rand(5, 784)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        sizes: Sequence[int | Sequence[int] | Conv],
        beta: float | Sequence[float] = 1.0,
        gamma: float = 1 / 8,
        constraint: ConstraintSpec | Sequence[ConstraintSpec] = "nonneg",
        output_constraint: ConstraintSpec = "free",
        bias: bool = True,
        reconstruction_bias: bool = True,
        init: str = "glorot",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        solver: str = "auto",
        tol: float | None = None,
        max_sweeps: int = 1000,
    ) -> None:
        super().__init__()
        self.architecture = checked_architecture(sizes)
        self.layers = layer_shapes(self.architecture)
        self.sizes = (self.layers[0].columns, *(layer.rows for layer in self.layers))
        n_layers = len(self.sizes) - 1
        self.beta = checked_beta(beta, n_layers)
        self.gamma = checked_gamma(gamma, n_layers)
        self.intervals = (*hidden_intervals(constraint, n_layers - 1), interval(output_constraint))
        self.solver, self.tol, self.max_sweeps = checked_solving(solver, tol, max_sweeps)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"parameters need a floating-point dtype; got {dtype}")
        like = torch.empty(0, device=device, dtype=dtype)
        self.W = nn.ParameterList([initial_weight(layer.weight_shape, init, generator).to(like) for layer in self.layers])
        self.b = nn.ParameterList([like.new_zeros(layer.n_b) if bias else None for layer in self.layers])
        self.c = nn.ParameterList([like.new_zeros(layer.n_c) if reconstruction_bias else None for layer in self.layers])
        self._has_b, self._has_c = bias, reconstruction_bias
        self.is_dense = all(layer.is_dense for layer in self.layers)
        self._unfolds = not self.is_dense and unfolds(self.layers)
        self._frozen: tuple[list[Tensor], dict[torch.dtype, LiftedEnergy]] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in STRUCTURE and name in self.__dict__:
            raise AttributeError(
                f"{name} is part of the network's structure and cannot be changed; build a new LRRN with the {name} you want "
                "and give it these parameters by load_state_dict"
            )
        super().__setattr__(name, value)

    @property
    def policy(self) -> SolvePolicy:
        """Default solver settings of the differentiable passes: ``solver``, ``tol`` and ``max_sweeps``."""
        return SolvePolicy(self.solver, self.tol, None, self.max_sweeps)

    def forward(self, x: Tensor, policy: SolvePolicy | None = None) -> Tensor:
        """Predict z_L*(x), differentiable once in ``x`` and the parameters, and more often under ``torch.func``.

        Parameters
        ----------
        x : Tensor of shape (..., d_0)
        policy : SolvePolicy, optional
            How to solve; :attr:`policy` if not given.

        Returns
        -------
        Tensor of shape (..., d_L)
            In the dtype of ``x``; float16 and bfloat16 are solved in float32.
        """
        x = vectors(x, self.image_shape)
        flat = x.reshape(-1, x.shape[-1]) if x.dim() > 0 else x
        check_input(flat, self.sizes[0], self.image_shape)
        with without_autocast(x.device):
            wide = flat.to(self._solve_dtype(x))
            parameters = self.energy_parameters(wide.dtype)
            if torch.compiler.is_compiling():
                output = graph_prediction(self.energy_of(parameters), policy or self.policy, wide)
            else:
                output = prediction(self.energy_of, policy or self.policy, wide, parameters)
        return output.to(x.dtype).reshape(*x.shape[:-1], self.sizes[-1])

    def minimise(
        self,
        x: Tensor,
        start: Tensor | None = None,
        energy: LiftedEnergy | None = None,
        policy: SolvePolicy | None = None,
    ) -> Tensor:
        """Return the stacked minimiser of the free phase, differentiable once; :meth:`read_out` turns it into the prediction.

        Parameters
        ----------
        x : float32 or float64 Tensor of shape (n, d_0)
        start : Tensor of shape (n, dim), optional
            Warm start: stacked activations, such as an earlier result.
        energy : LiftedEnergy, optional
            Energy of the current parameters, detached and in the dtype of ``x``. If given, its Hessian is reused instead of
            being built again.
        policy : SolvePolicy, optional
            How to solve; :attr:`policy` if not given.

        Returns
        -------
        Tensor of shape (n, dim)
            z_1, ..., z_L concatenated, without an eliminated output.
        """
        return minimiser(self.energy_of, policy or self.policy, x, self.energy_parameters(x.dtype), start, energy)

    def read_out(self, x: Tensor, z: Tensor) -> Tensor:
        """Return the output of a stacked minimiser, of shape (n, d_L); differentiable."""
        return self.energy_of(self.energy_parameters(x.dtype)).output(x, z)

    @torch.no_grad()
    def infer(
        self,
        x: Tensor,
        y: Tensor | None = None,
        solver: str = "auto",
        tol: float | None = None,
        max_sweeps: int = 1000,
        start: Solution | Sequence[Tensor] | None = None,
        on_failure: str = "warn",
    ) -> Solution:
        """Minimise the energy over the activations and report residuals and convergence; not differentiable.

        Parameters
        ----------
        x : Tensor of shape (n, d_0)
            Inputs.
        y : Tensor of shape (n, d_L), optional
            Target vectors (not labels). If given, the output is clamped to them.
        solver : str, default="auto"
            "auto", "coordinate_descent", "accelerated", "newton" or "reference".
        tol : float, optional
            A sample has converged when its KKT residual, with an allowance for rounding, is at most
            ``tol * max(1, |q(x)|)``. Default 1e-6 in float64 and 1e-4 in float32. Float32 residuals whose rounding error is
            too large for a decision are recomputed in float64. If ``tol`` is below the resolution of float32, the solve and
            its result are in float64.
        max_sweeps : int, default=1000
            Sweeps or iterations per sample.
        start : Solution or sequence of tensors of shape (n, d_k), optional
            Warm start: activations to start from.
        on_failure : {"warn", "raise", "ignore"}, default="warn"
            What to do if a sample does not converge: warn with scikit-learn's ConvergenceWarning, raise
            :class:`lrrn.ConvergenceError`, or leave it to the caller to check ``converged``. Certified radii hold only for
            solves that converge; "raise" excludes all others.

        Returns
        -------
        Solution
            Activations, energy, residual, error bound, sweeps and status, per sample.
        """
        check_on_failure(on_failure)
        x = self._checked(x)
        given = x.dtype
        with without_autocast(x.device):
            dtype = self._solve_dtype(x)
            if dtype == torch.float32 and tol is not None and tol < FLOAT32_FLOOR:
                dtype = given = torch.float64
            energy = self.energy_snapshot(dtype)
            x = x.to(dtype)
            if y is not None:
                y = checked_target(y, x, self.sizes[-1], self.intervals[-1])
            qp = energy.free(x) if y is None else energy.clamped(x, y)
            solved = solve(qp, solver=solver, tol=tol, max_sweeps=max_sweeps, start=stacked(start, qp))
            tol = DEFAULT_TOL[dtype] if tol is None else tol
            solved = judged(solved, qp, energy, x, y, tol)
            activations = [z.to(given) for z in energy.activations(x, solved.z, y)]
            # the solver has checked its unknowns only: the output or a conversion to a narrower dtype may still overflow
            for z in activations if given != dtype else activations[-1:]:
                solved = solved.flagged_unless(z.isfinite().all(-1))
            ON_FAILURE[on_failure](solved, qp.scale, tol, "free phase" if y is None else "clamped phase")
            return Solution(activations, solved.residual, solved.n_sweeps, solved.status, solved.solvers, energy, x, y)

    def energy(self, x: Tensor, z: Sequence[Tensor] | None = None, y: Tensor | None = None) -> Tensor:
        """Return E at given activations, or at the minimiser.

        Parameters
        ----------
        x : Tensor of shape (n, d_0)
        z : sequence of L tensors of shape (n, d_k), optional
            Activations. If not given, those of the free phase or, with ``y``, of the clamped phase are inferred and held
            fixed, which gives exact first derivatives (envelope theorem).
        y : Tensor of shape (n, d_L), optional
            Target to clamp the output to; cannot be combined with ``z``.

        Returns
        -------
        Tensor of shape (n,)
            Differentiable in ``x``, ``z`` and the parameters.
        """
        if z is None:
            z = self.infer(x, y, solver=self.solver, tol=self.tol, max_sweeps=self.max_sweeps).activations
        elif y is not None:
            raise ValueError("give either activations z or a target y to clamp to, not both")
        x = self._checked(x)
        dtype = self._solve_dtype(x)
        energy = self.energy_of(self.energy_parameters(dtype))
        return energy.value(x.to(dtype), [block.to(dtype) for block in z])

    def lipschitz(
        self, method: str = "auto", seconds: float | None = None, pair: tuple[int, int] | None = None
    ) -> LipschitzBound:
        """Return a proven upper bound on the Lipschitz constant of the prediction.

        Parameters
        ----------
        method : {"auto", "paper", "spectral", "multiplier"}, default="auto"
            "paper" is the product of the paper's constants. "spectral" also uses the singular values of every layer and is
            never worse. "multiplier" optimises one Lagrangian multiplier per unit and is never worse than "spectral". "auto"
            is the best bound within its budget.
        seconds : float, optional
            Time budget of "auto" (default 5) and of "multiplier" (default 300). It is converted into a number of steps, so
            that results do not depend on the machine.
        pair : (int, int), optional
            Indices i and j of two outputs: bound the constant of y_i - y_j instead, the one by which certificates divide leads.
            The constants of all pairs are computed within one budget, and kept until the parameters change.

        Returns
        -------
        LipschitzBound
            A float with ``.value``, ``.per_layer`` and ``.method``, the method that gave the value.
        """
        if method not in LIPSCHITZ_METHODS:
            raise ValueError(f"unknown method {method!r}; use one of {', '.join(LIPSCHITZ_METHODS)}")
        energy = self.energy_snapshot(torch.float64)
        if pair is not None:
            return bounds.of_pair(energy, pair, method, seconds)
        if method == "paper":
            return bounds.paper(energy.operators, self.beta)
        best = bounds.spectral(energy.operators, self.beta)
        if method == "spectral" or energy.n_free == 0 or (method == "auto" and not energy.has_matrices):
            return best
        budget = bounds.BUDGET[method] if seconds is None else seconds
        rho = network_multipliers(energy, float(best), budget).rho
        return LipschitzBound((rho,), "multiplier") if rho < best else best

    def extra_repr(self) -> str:
        """Show the structure in ``repr``."""
        sets = ", ".join(str(i) for i in self.intervals)
        return f"sizes={self.architecture}, beta={self.beta}, gamma={self.gamma:g}, constraints=({sets})"

    def flat_parameters(self) -> list[Tensor]:
        """Return W, then b, then c, without disabled biases."""
        return [p for group in self._groups() for p in group if p is not None]

    def _groups(self) -> tuple[tuple[Tensor | None, ...], ...]:
        """Return W, b and c as tuples; indexing the ParameterLists would cost more time than a small solve."""
        none = (None,) * len(self.W)
        return tuple(tuple(group._parameters.values()) or none for group in (self.W, self.b, self.c))

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of the input, if it is given as images."""
        first = self.architecture[0]
        return first if isinstance(first, tuple) else None

    def energy_parameters(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return the parameters as :meth:`energy_of` takes them, differentiable in those of the network.

        In a dense network these are :meth:`flat_parameters`. Biases of channels are repeated over their pixels, and small
        convolutions become matrices.
        """
        return self._as_taken([p if dtype is None else p.to(dtype) for p in self.flat_parameters()])

    def _as_taken(self, parameters: list[Tensor]) -> list[Tensor]:
        if self.is_dense:
            return parameters
        n = len(self.layers)
        none: list[Tensor | None] = [None] * n
        weights, rest = parameters[:n], parameters[n:]
        b = [*rest[:n]] if self._has_b else none
        c = [*rest[-n:]] if self._has_c else none
        if self._unfolds:
            weights = [layer.operator(w).dense() for layer, w in zip(self.layers, weights, strict=True)]
        biases = [per_unit(*each) for each in zip(self.layers, b, c, strict=True)]
        return [*weights, *(each for group in zip(*biases, strict=True) for each in group if each is not None)]

    def energy_of(self, parameters: Sequence[Tensor]) -> LiftedEnergy:
        """Build the energy of a flat list of parameters, in the order of :meth:`energy_parameters`."""
        n = len(self.sizes) - 1
        none = (None,) * n
        weights, rest = tuple(parameters[:n]), parameters[n:]
        b = tuple(rest[:n]) if self._has_b else none
        c = tuple(rest[-n:]) if self._has_c else none
        layers = None if self.is_dense or self._unfolds else self.layers
        return LiftedEnergy(weights, b, c, self.beta, self.gamma, self.intervals, layers)

    def energy_now(self) -> LiftedEnergy:
        """Return the energy of the current parameters, detached but not copied: valid until they change."""
        with torch.no_grad():
            return self.energy_of([p.detach() for p in self.energy_parameters()])

    def energy_snapshot(self, dtype: torch.dtype) -> LiftedEnergy:
        """Return the energy of a copy of the parameters; Hessian and eigenvalue bound are cached until they change."""
        now = [p.detach() for p in self.flat_parameters()]
        if self._frozen is None or not same(self._frozen[0], now):
            self._frozen = ([p.clone() for p in now], {})
        copies, energies = self._frozen
        if dtype not in energies:
            with torch.no_grad():
                energies[dtype] = self.energy_of(self._as_taken([p.to(dtype) for p in copies]))
        return energies[dtype]

    def _solve_dtype(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(torch.promote_types(x.dtype, self.W[0].dtype), torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the cached energies from pickles and deep copies."""
        return {**self.__dict__, "_frozen": None}

    def _checked(self, x: Tensor) -> Tensor:
        """Return inputs as vectors; raise if they are not what the network takes."""
        x = vectors(x, self.image_shape)
        check_input(x, self.sizes[0], self.image_shape)
        return x
