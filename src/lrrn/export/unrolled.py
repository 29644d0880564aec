"""A network as a fixed number of plain operations, with a proven bound on the error of its outputs over a box of inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from lrrn.energy import LiftedEnergy
from lrrn.energy.lifted import UNFOLDED_UNITS
from lrrn.export.rounding import Box, IterationError, ReadOut, Stored, output_error
from lrrn.export.splitting import InputMap, Splitting
from lrrn.network import LRRN

DTYPES = (torch.float32, torch.float64)
SHARE = 0.05
"""Share of the error that stopping early may add to that of rounding, if no error is asked for."""


@final
class Unrolled(nn.Module):
    """A network as a fixed number of matrix products, sums and projections; :func:`lrrn.unroll` makes it.

    Call it with inputs of shape (n, d_0), in its dtype, inside the box; it returns outputs of shape (n, d_L). The bound is void
    if the module is converted to another dtype.

    Attributes
    ----------
    error_bound : float64 Tensor of shape (d_L,)
        Proven bounds on the distance of each output from the exact one, for every input of the box.
    iterations : int
        Number of iterations.
    lower, upper : float64 Tensor of shape (d_0,)
        The box, with ends rounded outwards to the dtype.
    classes : array or None
        Labels of a classifier, in the order of the outputs.
    """

    matrix: Tensor
    input: Tensor
    bias: Tensor
    lo: Tensor
    hi: Tensor
    start: Tensor
    output: Tensor
    output_bias: Tensor

    def __init__(self, stored: Stored, iterations: int, error_bound: Tensor, box: Box, classes: Any = None) -> None:
        super().__init__()
        for name, value in stored._asdict().items():
            self.register_buffer(name, value)
        self.iterations, self.error_bound, self.classes = iterations, error_bound, classes
        self.lower, self.upper = box.lower, box.upper
        self.eval()  # nothing here is trained, and exporters warn of modules that are in training
        self.bounded = bool((stored.lo > -math.inf).any()), bool((stored.hi < math.inf).any())

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of rows of ``x``."""
        if self.iterations == 0:
            return x @ self.output.mT + self.output_bias
        pull, s = x @ self.input.mT + self.bias, self.start[None]
        for _ in range(self.iterations):
            inside = self._projected(s)
            s = (inside + (inside - s)) @ self.matrix.mT + pull
        return self._projected(s)[:, -self.output.shape[1] :] @ self.output.mT + self.output_bias

    def _projected(self, s: Tensor) -> Tensor:
        below, above = self.bounded
        s = torch.maximum(s, self.lo) if below else s
        return torch.minimum(s, self.hi) if above else s

    def extra_repr(self) -> str:
        """Show what is proven in ``repr``."""
        return f"iterations={self.iterations}, error_bound={float(self.error_bound.max()):.2g}, dtype={self.output.dtype}"


@torch.no_grad()
def unroll(
    model: Any, lower: ArrayLike, upper: ArrayLike, error: float | None = None, dtype: torch.dtype = torch.float32
) -> Unrolled:
    """Turn a network into a fixed number of plain operations, with a proven bound on the error of its outputs.

    The result is a ``torch.nn.Module`` for ``torch.export`` and :func:`lrrn.save_onnx`. Its bound covers the iterations that
    are not taken, the rounding of its tensors to ``dtype``, and the rounding of every operation, in any order of summation.

    Parameters
    ----------
    model : LRRN, LRRNClassifier or LRRNRegressor
        A network, or a fitted estimator, whose scaling of features and targets becomes part of the result. The outputs of a
        classifier are its scores. With convolutions, at most 4,096 hidden units; images are given as rows.
    lower, upper : float or array of shape (d_0,)
        The box of inputs, in the units of the model's input.
    error : float, optional
        Largest error of an output to allow; it determines the number of iterations. By default, as many iterations are taken as
        lower the bound by more than a few per cent.
    dtype : {torch.float32, torch.float64}, default=torch.float32
        Type of inputs, outputs and everything in between.

    Returns
    -------
    Unrolled

    Examples
    --------
    >>> import torch, lrrn
    >>> net = lrrn.LRRN((8, 16, 3), generator=torch.Generator().manual_seed(0))
    >>> plain = lrrn.unroll(net, lower=0, upper=1)
    >>> bool((plain.error_bound < 1e-3).all())
    True
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be torch.float32 or torch.float64; got {dtype}")
    if error is not None and not error > 0:
        raise ValueError(f"error must be a positive number; got {error}")
    net, given, out_scale, out_offset, classes = _parts(model)
    box = checked_box(lower, upper, net.sizes[0], dtype)
    energy = net.energy_snapshot(torch.float64)
    if not energy.has_matrices:
        raise ValueError(
            f"unrolling needs a matrix of all hidden units, and this network with convolutions has {sum(energy.free_sizes):,}; "
            f"at most {UNFOLDED_UNITS:,} are possible. torch.export of the network itself needs none; or take fewer channels "
            "or a larger stride"
        )
    energy = energy.unfolded.to(torch.float64, "cpu")
    read_out = _read_out(energy, out_scale, out_offset)
    if energy.n_free == 0:
        return _accepted(_linear(read_out, given, box, dtype, classes), error)
    exact = Splitting.of(energy, given)
    read_out = read_out._replace(weight=read_out.weight * exact.units[-read_out.weight.shape[1] :])
    start = exact.fixed_point(box.centre)
    kept = (exact.matrix, exact.input, exact.bias, exact.lo, exact.hi, start, read_out.weight, read_out.bias)
    stored = Stored(*(t.to(dtype) for t in kept))
    proven = IterationError.of(exact, stored, box)

    def outputs(e: float) -> Tensor:
        return output_error(read_out, stored, e, proven.size, proven.bounds)

    iterations = _iterations(proven, lambda e: float(outputs(e).max()), error)
    return _accepted(Unrolled(stored, iterations, outputs(proven.after(iterations)), box, classes), error)


def _read_out(energy: LiftedEnergy, scale: Tensor, offset: Tensor) -> ReadOut:
    """Return the map from the last block of the minimiser, or from the input, to scaled outputs."""
    weight = energy.weights[-1] if energy.eliminated else torch.eye(energy.sizes[-1], dtype=torch.float64)
    bias = energy.b[-1] if energy.eliminated else None
    shift = torch.zeros_like(offset) if bias is None else bias * scale
    return ReadOut(weight * scale[:, None], shift + offset, shift.abs() + offset.abs())


def _linear(read_out: ReadOut, given: InputMap, box: Box, dtype: torch.dtype, classes: Any) -> Unrolled:
    """Return a network without unknowns, which is an affine map."""
    weight = read_out.weight / given.scale
    terms = len(given.scale) + 8  # of the inner products below
    size = read_out.bias_size + terms * (weight.abs() @ given.offset.abs())
    read_out = ReadOut(weight, read_out.bias - weight @ given.offset, size)
    none = torch.zeros(0, dtype=dtype)
    stored = Stored(none, none, none, none, none, none, weight.to(dtype), read_out.bias.to(dtype))
    return Unrolled(stored, 0, output_error(read_out, stored, 0.0, box.size, 0.0), box, classes)


def _iterations(proven: IterationError, output: Callable[[float], float], error: float | None) -> int:
    """Return the least number of iterations that gives the error, or that leaves little but rounding."""
    if not 0 < proven.rate < 1:  # at 0, the first iteration is exact
        return 1
    wanted = proven.limit * (1 + SHARE)
    if error is not None:
        # the output's error is affine in that of the iteration
        least = output(0.0)
        slope = output(1.0) - least
        wanted = (error - least) / slope * (1 - 1e-6) if slope > 0 else math.inf
    # an error that cannot be proven is refused later, with the bound that can be
    left = max(wanted - proven.limit, SHARE * proven.limit)
    if left >= proven.start:
        return 1
    return max(1, math.ceil(math.log(left / proven.start) / math.log(proven.rate)))


def _accepted(unrolled: Unrolled, error: float | None) -> Unrolled:
    found = float(unrolled.error_bound.max())
    if not math.isfinite(found):
        raise ValueError(
            f"no error could be proven in {unrolled.output.dtype}; use dtype=torch.float64 or a smaller box of inputs"
        )
    if error is not None and found > error:
        raise ValueError(
            f"an error of {error:g} cannot be proven in {unrolled.output.dtype} on this box of inputs, only {found:.2g}; "
            "use dtype=torch.float64, a smaller box or a larger error"
        )
    return unrolled


def checked_box(lower: ArrayLike, upper: ArrayLike, d_0: int, dtype: torch.dtype) -> Box:
    """Return the box, with ends rounded outwards: it holds inputs before and after they are rounded to the dtype."""
    ends = []
    for name, value in (("lower", lower), ("upper", upper)):
        array = np.asarray(value, dtype=np.float64)
        if array.shape not in ((), (d_0,)) or not np.isfinite(array).all():
            raise ValueError(f"{name} must be a finite number, or one for each of {d_0} features; got {value!r}")
        ends.append(torch.as_tensor(np.broadcast_to(array, (d_0,)).copy()))
    if bool((ends[0] > ends[1]).any()):
        raise ValueError(f"lower must not exceed upper; it does in feature {int((ends[0] > ends[1]).nonzero()[0])}")
    low, high = ends
    if not all(bool(end.to(dtype).isfinite().all()) for end in ends):
        raise ValueError(f"lower and upper must be finite in {dtype}; use dtype=torch.float64 or a smaller box of inputs")
    return Box(torch.minimum(low, low.to(dtype).double()), torch.maximum(high, high.to(dtype).double()))


def _parts(model: Any) -> tuple[LRRN, InputMap, Tensor, Tensor, Any]:
    """Return the network, its input map, the scale and offset of its outputs, and labels."""
    if isinstance(model, LRRN):
        net, about = model, dict[str, Any]()
    else:
        net, about = _estimated(model), vars(model)

    def vector(value: Any, size: int) -> Tensor:
        return torch.as_tensor(np.broadcast_to(np.asarray(value, dtype=np.float64), (size,)).copy())

    d_0, d_l = net.sizes[0], net.sizes[-1]
    given = InputMap(vector(about.get("offset_in_", 0.0), d_0), vector(about.get("scale_in_", 1.0), d_0))
    scale, offset = vector(about.get("scale_out_", 1.0), d_l), vector(about.get("offset_out_", 0.0), d_l)
    return net, given, scale, offset, about.get("classes_")


def _estimated(model: Any) -> LRRN:
    """Return the network of an estimator whose predictions are its outputs."""
    from sklearn.utils.validation import check_is_fitted

    from lrrn.estimators import LRRNClassifier, LRRNRegressor

    if not isinstance(model, LRRNClassifier | LRRNRegressor):
        raise TypeError(f"unroll takes an LRRN, an LRRNClassifier or an LRRNRegressor; got {type(model).__name__}")
    check_is_fitted(model, "network_")
    if model.objective == "class_energy":
        raise ValueError(
            "the scores of objective='class_energy' are energies, not outputs of the network, and cannot be unrolled"
        )
    return model.network_
