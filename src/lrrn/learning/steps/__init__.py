"""Backends that compute the gradient of a batch, in order of preference; the first that applies runs.

The two compiled ones also take several steps in one call, updates included.

=======================  ================================================================================================
``compiled``             solves and derivatives of a signed sum of energies in one compiled call on the CPU
``triton``               the same, and losses of the prediction, in a few Triton kernels, inside a CUDA graph
``compiled prediction``  compiled solves and derivatives of a loss of the prediction on the CPU, large batches in parts
``direct prediction``    losses of the prediction of dense networks, with any solver and device
``autograd``             any objective: energies have closed-form derivatives, predictions implicit ones; any solver and device
=======================  ================================================================================================
"""

from __future__ import annotations

from lrrn.learning.flat import FlatParameters
from lrrn.learning.objectives import Objective
from lrrn.learning.settings import Settings
from lrrn.learning.steps.autograd import Autograd
from lrrn.learning.steps.base import GradientBackend, SeveralSteps
from lrrn.learning.steps.compiled_cpu import CompiledCpu
from lrrn.learning.steps.direct_prediction import DirectPrediction
from lrrn.learning.steps.prediction import CompiledPrediction
from lrrn.learning.steps.triton import TritonKernels
from lrrn.network import LRRN

BACKENDS: tuple[type[GradientBackend], ...] = (CompiledCpu, TritonKernels, CompiledPrediction, DirectPrediction, Autograd)


def backends(net: LRRN, objective: Objective, settings: Settings, flat: FlatParameters, aim: float) -> list[GradientBackend]:
    """Return the backends that apply, fastest first; the last supports any batch."""
    return [kind(net, objective, flat, aim) for kind in BACKENDS if kind.applies(net, objective, settings)]


__all__ = ["BACKENDS", "GradientBackend", "SeveralSteps", "backends"]
